"""profiles/studies/grace_hopper.py: reading plans, scaling profiles, the arithmetic, and the whole study with a program
that replays records.

tests/profiles/studies/plan_gh200.txt and plan_refused.txt (standard error) are what `layerstream plan` printed with the
profile gh200-96g-480g, 8,192 tokens, for the shapes of Qwen2.5-7B and Llama-3.1-70B; plan_longest_row.txt is what
`layerstream plan --max-seq` printed for the first.
"""

import contextlib
import io
import itertools
import json
import sys
import tempfile
import unittest
import xml.etree.ElementTree as ET
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
sys.dont_write_bytecode = True
sys.path.insert(0, str(ROOT / "profiles/studies"))

import direct_access as direct  # noqa: E402
import grace_hopper  # noqa: E402
import long_rows  # noqa: E402
import plan_output  # noqa: E402
import planner  # noqa: E402
from scaled_profile import Profile, scaled  # noqa: E402

SHIPPED = [Profile((ROOT / f"profiles/hardware/{module}.yaml").read_text()) for module in grace_hopper.MODULES]


def record(name):
    return (HERE / "studies" / name).read_text()


class PlanOutputTest(unittest.TestCase):
    def test_reads_every_number_of_a_plan(self):
        plan = plan_output.parse(record("plan_gh200.txt"))
        self.assertEqual(plan.parameters, 7615616512)
        self.assertEqual((plan.seconds, plan.tokens_per_second, plan.model_tflops), (0.756, 10837, 466))
        self.assertEqual(plan.bottleneck, "the device waits 12% of the step for optimizer")
        self.assertEqual(plan.placement["resident_blocks"], "14")
        self.assertEqual(plan.placement["device_update"], "in_place")
        self.assertEqual(plan.device_limit, 88.51 * 2**30)
        self.assertEqual((plan.host_bytes, plan.host_limit), (100.18 * 2**30, 424.68 * 2**30))

    def test_a_missing_line_is_an_error_that_shows_the_output(self):
        text = record("plan_gh200.txt")
        for start in ("model ", "predicted: ", "bottleneck: ", "  fits: ", "device_update: ", "resident_blocks: "):
            kept = "".join(line for line in text.splitlines(True) if not line.startswith(start))
            self.assertNotEqual(kept, text, start)
            with self.subTest(start), self.assertRaises(plan_output.UnexpectedOutput) as caught:
                plan_output.parse(kept)
            self.assertIn(kept, str(caught.exception))

    def test_a_refusal_says_by_how_much(self):
        refusal = plan_output.parse_refusal(2, record("plan_refused.txt"))
        self.assertEqual(
            refusal.reason,
            "does not fit: device memory 202 GiB short (290.89 GiB of 88.51 GiB), "
            "host memory 364 GiB short (788.52 GiB of 424.68 GiB)",
        )

    def test_reads_the_longest_row(self):
        row = plan_output.parse_longest_row(record("plan_longest_row.txt"))
        self.assertEqual(row, plan_output.LongestRow(1867776, 5929.0, 315.0, 368.0, "host memory"))
        for start in ("longest row ", "predicted: ", "what limits it, "):
            lines = record("plan_longest_row.txt").splitlines(True)
            with self.subTest(start), self.assertRaises(plan_output.UnexpectedOutput):
                plan_output.parse_longest_row("".join(line for line in lines if not line.startswith(start)))

    def test_another_failure_is_no_refusal(self):
        for code, errors in ((2, "layerstream: unknown key `x`"), (1, record("plan_refused.txt")), (-9, "")):
            with self.subTest(code), self.assertRaisesRegex(plan_output.UnexpectedOutput, f"exit code {code}"):
                plan_output.parse_refusal(code, errors)


class ScaledProfileTest(unittest.TestCase):
    def test_nothing_changes_at_one(self):
        for shipped in SHIPPED:
            self.assertEqual(scaled(shipped, 1.0, 1.0).text, shipped.text)

    def test_copies_contradict_nothing_that_the_reader_of_profiles_refuses(self):
        factors = (0.1, 0.5, 0.75, 1.0, 1.4, 3.0)
        for shipped, c2c, lpddr in itertools.product(SHIPPED, factors, factors):
            with self.subTest(c2c=c2c, lpddr=lpddr):
                profile = scaled(shipped, c2c, lpddr)
                into = profile.value("link", "to_device_bytes_per_second")
                out = profile.value("link", "to_host_bytes_per_second")
                both = profile.value("link", "duplex_bytes_per_second")
                self.assertLessEqual(max(into, out), 1.1 * both)
                self.assertLessEqual(both, 1.1 * (into + out))
                alone = profile.value("host", "adamw_parameters_per_second")
                beside = profile.value("host", "adamw_beside_copies_parameters_per_second")
                copies = profile.value("host", "copies_beside_adamw_bytes_per_second")
                self.assertLessEqual(beside, 1.1 * alone)
                self.assertLessEqual(copies, 1.1 * both)
                # Together no more than LPDDR gives; the shipped sum is rounded.
                self.assertLessEqual(
                    28.0 * beside + copies, 1.01 * lpddr * shipped.value("host", "triad_bytes_per_second")
                )

    def test_each_rate_goes_with_what_it_uses(self):
        def ratio(profile, section, key):
            return profile.value(section, key) / SHIPPED[0].value(section, key)

        slow_link, slow_memory = scaled(SHIPPED[0], 0.5, 1.0), scaled(SHIPPED[0], 1.0, 0.5)
        rates = ("to_device_bytes_per_second", "kernel_read_bytes_per_second", "adamw_in_place_parameters_per_second")
        for key in rates:
            self.assertAlmostEqual(ratio(slow_link, "link", key), 0.5, places=5)
            self.assertAlmostEqual(ratio(slow_memory, "link", key), 0.5, places=5)
        self.assertEqual(ratio(slow_link, "host", "adamw_parameters_per_second"), 1.0)
        self.assertEqual(ratio(slow_memory, "host", "adamw_parameters_per_second"), 0.5)
        self.assertGreater(ratio(slow_link, "host", "adamw_beside_copies_parameters_per_second"), 1.0)
        self.assertEqual(ratio(slow_memory, "device", "copy_bytes_per_second"), 1.0)

    def test_changed_numbers_say_so_and_lines_stay(self):
        profile = scaled(SHIPPED[0], 0.5, 1.0)
        self.assertIn("name: gh200-96g-480g-c2c-0.5-lpddr-1\n", profile.text)
        changed = [b for a, b in zip(SHIPPED[0].text.splitlines(), profile.text.splitlines()) if a != b]
        self.assertEqual(len(profile.text.splitlines()), len(SHIPPED[0].text.splitlines()))
        for line in changed[1:]:
            self.assertIn('source: "estimate: the rate of gh200-96g-480g, with NVLink-C2C 0.5 and LPDDR 1 times', line)

    def test_an_unknown_rate_is_an_error(self):
        with self.assertRaisesRegex(ValueError, "no rate link.warp_speed"):
            SHIPPED[0].value("link", "warp_speed")
        with self.assertRaisesRegex(ValueError, "no section warp"):
            SHIPPED[0].value("warp", "speed")
        with self.assertRaisesRegex(ValueError, "no curve device.warp"):
            SHIPPED[0].curve("device", "warp", "tokens")


class DirectAccessTest(unittest.TestCase):
    rates = direct.Rates(377e9, 297e9, 377e9, 335e9, 297e9, 1.2e10, [(256.0, 3e14), (1024.0, 5e14)])
    model = grace_hopper.MODELS[0]

    def test_sizes_of_qwen_7b(self):
        # hidden 3584: q and o 3584 x 3584, k and v 3584 x 512, three of 3584 x 18944.
        self.assertEqual(self.model.layer_matrices, 2 * 3584 * 3584 + 2 * 3584 * 512 + 3 * 3584 * 18944)
        self.assertEqual(self.model.table_bytes, 1089994752)

    def test_curve_is_linear_in_the_logarithm(self):
        self.assertEqual(self.rates.product(1), 3e14)
        self.assertEqual(self.rates.product(1 << 20), 5e14)
        self.assertAlmostEqual(self.rates.product(512) / 4e14, 1.0, places=12)

    def test_gathering_as_many_tokens_as_equal_takes_as_long_as_the_table(self):
        tokens = direct.equal_tokens(self.model, self.rates)
        self.assertAlmostEqual(
            direct.gather_seconds(self.model, self.rates, tokens)
            / direct.promote_table_seconds(self.model, self.rates),
            1.0,
            places=12,
        )

    def test_passes_of_a_layer(self):
        copy, read = (2.0 * self.model.layer_matrices / rate for rate in (377e9, 335e9))
        short = direct.layer_passes(self.model, self.rates, 256, 4)
        self.assertAlmostEqual(short.direct / (12.0 * read + short.computing / 4.0), 1.0, places=12)
        one = direct.layer_passes(self.model, self.rates, 256, 1)
        self.assertGreater(one.promoted, one.computing)
        self.assertLess(one.promoted, one.direct)
        self.assertAlmostEqual(one.promoted, copy + max(copy, 0.75 * one.computing), places=12)
        long = direct.layer_passes(self.model, self.rates, 8192, 2)
        self.assertEqual((long.promoted, long.direct), (long.computing, long.computing))

    def test_reading_hides_from_the_tokens_that_are_told(self):
        tokens = direct.hidden_reading_tokens(self.rates)
        self.assertAlmostEqual(tokens / self.rates.product(tokens) * 335e9, 1.0, places=6)

    def test_bounds_of_updates(self):
        on_device, on_host = direct.update_bounds(self.rates)
        self.assertAlmostEqual(on_device.in_place, 335e9 / 24.0)
        self.assertAlmostEqual(on_host.in_place, 335e9 / 28.0)
        self.assertAlmostEqual(on_device.staged, 377e9 / 24.0)
        self.assertAlmostEqual(on_host.staged, 377e9 / 28.0)
        # The profile's rate is that of gradients on the host.
        self.assertAlmostEqual(on_host.profile, 1.2e10)
        self.assertAlmostEqual(on_device.profile, 1.2e10 * 28.0 / 24.0)


class CommandTest(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = Path(folder.name)

    def program(self, refuses):
        """A layerstream that replays. @param refuses a shell condition on $layers and $words, all arguments"""
        records = HERE / "studies"
        program = self.folder / "layerstream"
        program.write_text(
            f"""#!/bin/sh
words="$*"
layers=${{words##*models/*b-}}
layers=${{layers%%-layers*}}
if {refuses}; then cat '{records}/plan_refused.txt' >&2; exit 2; fi
case "$words" in
*--max-seq*) cat '{records}/plan_longest_row.txt';;
*) cat '{records}/plan_gh200.txt';;
esac
"""
        )
        program.chmod(0o755)
        return program

    def call(self, program):
        """@return exit code and what was printed"""
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
            try:
                code = grace_hopper.main(["--program", str(program), "--output", str(self.folder / "out")])
            except SystemExit as end:
                code = end.code
        return code, printed.getvalue()

    def test_most_layers_is_the_last_number_that_fits(self):
        def most_layers(refuses):
            one = planner.Planner(self.program(refuses), self.folder / "out")
            return one.most_layers(grace_hopper.MODELS[3], 8192, "gh200-96g-480g", ({}, {"seed": "7"}))

        plan = plan_output.parse(record("plan_gh200.txt"))
        self.assertEqual(most_layers("[ $layers -gt 37 ]"), (37, plan))
        self.assertEqual(most_layers("false"), (80, plan))
        self.assertEqual(most_layers("true"), (0, None))
        # In one of the ways is enough.
        only_second = 'case "$words" in *seed=7*) [ $layers -gt 37 ];; *) true;; esac'
        self.assertEqual(most_layers(only_second), (37, plan))

    def test_models_are_what_their_names_say(self):
        for shape, architecture in zip(
            (*grace_hopper.MODELS, long_rows.MODELS[1]), ["Qwen2ForCausalLM"] * 3 + ["LlamaForCausalLM"] * 2
        ):
            config = json.loads(planner.model_config(shape, shape.layers))
            self.assertEqual(config["architectures"], [architecture])
            self.assertEqual(config["hidden_size"], config["num_attention_heads"] * shape.head_size)
        shipped = json.loads((ROOT / "examples/qwen2.5-7b-shape/config.json").read_text())
        made = json.loads(planner.model_config(grace_hopper.MODELS[0], 28))
        self.assertEqual(made, {**made, **{key: shipped[key] for key in made if key in shipped}})

    def test_writes_page_and_plot_with_refused_points(self):
        # 70B never fits, 14B without clipping only.
        clipped_14b = 'case "$words" in *14b-*optimizer_update=immediate*) false;; *14b-*) true;; *) false;; esac'
        code, printed = self.call(self.program(f"[ $layers = 80 ] || {clipped_14b}"))
        self.assertEqual(code, 0, printed)
        page = (self.folder / "out/grace-hopper.md").read_text()
        self.assertEqual(page.count("| 14B | 2,048 to 65,536 | no | no |"), 2)
        self.assertEqual(page.count("| 14B, no clipping | 8,192 | 0.756 | 0.756 | 1.000 | 10,837 |"), 2)
        self.assertNotIn("7B, no clipping", page)
        self.assertEqual(page.count("| 70B, no clipping | 2,048 to 65,536 | no | no |"), 2)
        self.assertIn("host memory 364 GiB short", page)
        self.assertEqual(page.count("79 of 80"), 4)
        self.assertEqual(page.count("64 of 64"), 4)
        self.assertIn(
            "| 8B | 1,048,576 | nothing | all, last 64 chunks of last 28 blocks, 28 blocks on the device | 1 | 10,837 | 466 | 87 | 100 of 425 |", page
        )
        self.assertEqual(page.count("| 1,867,776 | 5,929 | 315 | 368 | host memory |"), 8)
        svg = ET.fromstring((self.folder / "out/grace-hopper.svg").read_text())
        texts = [element.text for element in svg.iter("{http://www.w3.org/2000/svg}text")]
        self.assertEqual(texts.count("7B"), 1)  # two modules, one colour, one entry of the legend
        self.assertNotIn("70B", texts)

    def test_output_that_is_not_understood_ends_the_study_loudly(self):
        code, _ = self.call(self.program("echo something else; exit 0"))
        self.assertIn("something else", str(code))
        self.assertFalse((self.folder / "out/grace-hopper.md").exists())

    def test_no_program_is_an_error(self):
        code, _ = self.call(self.folder / "absent")
        self.assertIn("absent: No such file", str(code))


if __name__ == "__main__":
    unittest.main()
