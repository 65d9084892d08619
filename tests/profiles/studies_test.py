"""profiles/studies: reading what the bench prints, tables, plots, whole studies with a bench that replays records.

tests/profiles/studies/ holds what benches/train_step printed: h200_all.txt and h200_40gib.txt on an H200 with the
shape of Qwen2.5-7B, no_profile.txt and does_not_fit.txt (standard error) on the simulated device.
"""

import contextlib
import io
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

import bench_output  # noqa: E402
import chart  # noqa: E402
import studies  # noqa: E402
import study  # noqa: E402

SVG = "{http://www.w3.org/2000/svg}"


def record(name):
    return (HERE / "studies" / name).read_text()


class BenchOutputTest(unittest.TestCase):
    def test_reads_every_number_of_a_planned_run(self):
        run = bench_output.parse(record("h200_40gib.txt"), needs_plan=True)
        self.assertEqual(run.tokens_per_second, 9693)
        self.assertEqual((run.slowest, run.fastest), (9600, 9792))
        self.assertEqual(run.seconds, 3.381)
        self.assertEqual(run.model_tflops, 417)
        self.assertEqual(run.step_tokens, 32768)
        self.assertEqual(run.parameters, 7615616512)
        self.assertEqual((run.slots, run.device_share), (2, 0.46))
        self.assertEqual(run.device_limit, 40 * 2**30)
        self.assertEqual(run.predicted_seconds, 3.304)
        self.assertTrue(run.bottleneck.startswith("the device waits 8% of the step for optimizer ("))
        self.assertEqual(run.profile, "h200-pcie5-128g")
        self.assertEqual(run.placement["resident_blocks"], "4")
        self.assertEqual(run.placement["gradient_home"], "host")
        self.assertEqual(len(run.placement), 9)
        self.assertEqual(
            run.waits, {"weights": 0.303, "optimizer": 0.318, "gradients": 0.0, "activations": 0.0, "issue": 0.005}
        )
        self.assertEqual(run.lane("link in"), bench_output.Use(43.4, 59.61, 40.8))
        self.assertEqual(run.lane("update_out"), bench_output.Use(15.3, 26.76, 52.0))
        self.assertEqual(run.device, bench_output.Memory(37.03 * 2**30, 37.28 * 2**30))
        self.assertEqual(run.host, bench_output.Memory(109.37 * 2**30, 109.14 * 2**30))
        self.assertIn("NVIDIA H200", run.machine)
        self.assertIn("55.1 GB/s to the device", run.rates)

    def test_device_limit_is_what_may_be_used_not_what_there_is(self):
        self.assertEqual(bench_output.parse(record("h200_all.txt")).device_limit, 139.28 * 2**30)

    def test_without_a_profile_there_is_no_prediction(self):
        run = bench_output.parse(record("no_profile.txt"))
        self.assertIsNone(run.predicted_seconds)
        self.assertEqual(run.placement, {})
        with self.assertRaisesRegex(bench_output.UnexpectedOutput, "hardware_profile=NAME"):
            bench_output.parse(record("no_profile.txt"), needs_plan=True)

    def test_a_lane_that_did_nothing_was_not_busy(self):
        self.assertEqual(bench_output.parse(record("no_profile.txt")).lane("update").busy, 0.0)

    def test_a_missing_line_is_an_error_that_shows_the_output(self):
        text = record("h200_40gib.txt")
        needed = (
            "Kokkos ",
            "7615616512 ",
            "measured:",
            "32768 ",
            "compute  ",
            "link in",
            "link out",
            "compute waits",
            "device: ",
            "host:   peak",
            "predicted 3",
            "planned in",
        )
        for start in needed:
            kept = "".join(line for line in text.splitlines(True) if not line.startswith(start))
            self.assertNotEqual(kept, text, start)
            with self.subTest(start), self.assertRaises(bench_output.UnexpectedOutput) as caught:
                bench_output.parse(kept, needs_plan=True)
            self.assertIn(kept, str(caught.exception))

    def test_a_missing_cause_of_waits_is_an_error(self):
        text = record("h200_40gib.txt").replace(" gradients 0.0% (0.000 s)", "")
        with self.assertRaisesRegex(bench_output.UnexpectedOutput, "wait for gradients"):
            bench_output.parse(text)

    def test_failures_in_a_line(self):
        self.assertEqual(
            bench_output.failure(2, record("does_not_fit.txt")),
            "does not fit: device memory: need 8.47 GiB, have 4.00 GiB",
        )
        self.assertEqual(bench_output.failure(2, "warning\n\nweight_slots: no\n"), "refused: weight_slots: no")
        self.assertEqual(bench_output.failure(1, "lost the device\n"), "failed, exit code 1: lost the device")
        self.assertEqual(bench_output.failure(-9, ""), "failed, killed by signal 9: nothing on standard error")


class StudiesTest(unittest.TestCase):
    def all(self):
        return [studies.overlap(), studies.optimizer(), studies.placement(["16", "all"])]

    def test_points_differ_and_fill_the_table(self):
        for one in self.all():
            with self.subTest(one.name):
                self.assertEqual(len({p.cells for p in one.points}), len(one.points))
                self.assertEqual(len({tuple(p.settings.items()) for p in one.points}), len(one.points))
                for point in one.points:
                    self.assertEqual(len(point.cells), len(one.setting_columns))
                    self.assertFalse(one.settings.keys() & point.settings.keys())

    def test_immediate_updates_neither_clip_nor_use_the_device(self):
        immediate = [p.settings for p in studies.optimizer().points if p.settings["optimizer_update"] == "immediate"]
        self.assertTrue(immediate)
        for settings in immediate:
            self.assertEqual((settings["max_grad_norm"], settings["optimizer_device_share"]), ("0", "0"))

    def test_table_has_a_row_for_each_point_also_without_a_run(self):
        one = studies.placement(["16", "40", "all"])
        outcomes = [
            studies.Outcome(one.points[0], failure="does not fit: a | b"),
            studies.Outcome(one.points[1], run=bench_output.parse(record("h200_40gib.txt"))),
            studies.Outcome(one.points[2], run=bench_output.parse(record("h200_all.txt"))),
        ]
        rows = studies.table(one, outcomes).splitlines()
        self.assertEqual(len(rows), 5)
        columns = len(one.setting_columns) + len(one.result_columns)
        for row in rows:
            self.assertEqual(row.replace("\\|", "").count("|"), columns + 1)
        self.assertTrue(rows[2].startswith("| 16 | does not fit: a \\| b |  |"))
        self.assertTrue(rows[3].startswith("| 40 | 9,693 | 3.381 | 3.304 | +2.3% | 37.0 of 37.3 | the device waits"))
        self.assertIn("4 resident, 2 slots, layer_major, keeps all of 0 blocks, 28 on the device", rows[3])

    def test_plots_are_well_formed_and_show_every_run(self):
        run = bench_output.parse(record("h200_40gib.txt"))
        for one in self.all():
            with self.subTest(one.name):
                outcomes = [studies.Outcome(point, run=run) for point in one.points[:-1]]
                outcomes.append(studies.Outcome(one.points[-1], failure="does not fit: <&>"))
                svg = ET.fromstring(one.draw(outcomes))
                text = [element.text for element in svg.iter(SVG + "text")]
                if one.name == "placement":
                    self.assertEqual(len(list(svg.iter(SVG + "circle"))), 2 * (len(one.points) - 1))
                else:
                    self.assertEqual(text.count("9,693 tokens/s"), len(one.points) - 1)
                    self.assertEqual(text.count("does not fit"), 1)


class ChartTest(unittest.TestCase):
    def test_ticks_cover_the_data(self):
        for largest in (0.003, 0.7, 1.0, 3.381, 139.3, 12817.0, 99999.0):
            marks = chart.ticks(largest)
            self.assertGreaterEqual(marks[-1], largest * (1.0 - 1e-9))
            self.assertLess(marks[-2], largest)
            self.assertIn(len(marks), range(5, 12), largest)
        self.assertEqual(chart.ticks(0.0), [0.0, 1.0])

    def test_lengths_are_in_proportion(self):
        bars = [chart.Bar("a", {"x": 1.0, "y": 3.0}, ""), chart.Bar("b & <c>", {"x": 2.0}, "")]
        svg = ET.fromstring(chart.stacked_bars("t", "s", bars))
        drawn = [float(r.get("width")) for r in svg.iter(SVG + "rect") if r.get("height") == "22"]
        self.assertEqual(len(drawn), 3)
        # Widths are written to a tenth of a pixel.
        self.assertAlmostEqual(drawn[1] / drawn[0], 3.0, places=2)
        self.assertAlmostEqual(drawn[2] / drawn[0], 2.0, places=2)
        self.assertIn("b & <c>", [element.text for element in svg.iter(SVG + "text")])


class CommandTest(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = Path(folder.name)

    def bench(self, body):
        """A bench that replays: `body` is Python with `settings`, the words after --set, and say(record)."""
        program = self.folder / "train_step"
        program.write_text(
            f"#!{sys.executable}\nimport sys\n"
            "settings = [b for a, b in zip(sys.argv, sys.argv[1:]) if a == '--set']\n"
            f"say = lambda name, to=sys.stdout: to.write(open({str(HERE / 'studies')!r} + '/' + name).read())\n{body}\n"
        )
        program.chmod(0o755)
        return program

    def call(self, *words):
        """@return exit code and what was printed"""
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
            try:
                code = study.main([*map(str, words), "--output", str(self.folder / "out")])
            except SystemExit as end:
                code = end.code
        return code, printed.getvalue()

    def page(self, name):
        return (self.folder / "out" / name).read_text()

    def test_a_point_that_does_not_fit_is_a_row_and_no_failure(self):
        bench = self.bench(
            "if 'device_memory_limit=16GiB' in settings: say('does_not_fit.txt', sys.stderr), sys.exit(2)\n"
            "say('h200_40gib.txt' if settings else 'h200_all.txt')"
        )
        code, printed = self.call("placement", "--bench", bench, "--limits", "16", "40", "all")
        self.assertEqual(code, 0, printed)
        page = self.page("placement.md")
        self.assertIn("| 16 | does not fit: device memory: need 8.47 GiB, have 4.00 GiB |", page)
        self.assertIn("| 40 | 9,693 |", page)
        self.assertIn("| all | 12,817 |", page)
        self.assertIn("NVIDIA H200", page)
        self.assertIn("profiles/studies/study.py placement --bench", page)
        self.assertIn("(placement.svg)", page)
        ET.fromstring(self.page("placement.svg"))
        self.assertIn("need 8.47 GiB", self.page("placement-1.txt"))
        self.assertIn("[2/3] placement: 40 ... 9,693 tokens/s", printed)

    def test_every_study_of_steps_writes_its_page(self):
        bench = self.bench("say('h200_40gib.txt')")
        for name, points in (
            ("overlap", len(studies.overlap().points)),
            ("optimizer", len(studies.optimizer().points)),
        ):
            code, printed = self.call(name, "--bench", bench)
            self.assertEqual(code, 0, printed)
            self.assertEqual(self.page(f"{name}.md").count("| 9,693 |"), points)
            ET.fromstring(self.page(f"{name}.svg"))

    def test_a_failed_point_is_a_row_and_a_failure(self):
        bench = self.bench("if 'weight_slots=3' in settings: sys.exit('lost the device')\nsay('h200_40gib.txt')")
        code, _ = self.call("overlap", "--bench", bench)
        self.assertEqual(code, 1)
        self.assertIn("| 3 | 8,192 | failed, exit code 1: lost the device |", self.page("overlap.md"))

    def test_a_point_that_hangs_is_a_failure(self):
        bench = self.bench("if 'weight_slots=1' in settings: import time; time.sleep(60)\nsay('h200_40gib.txt')")
        code, _ = self.call("overlap", "--bench", bench, "--timeout", 1)
        self.assertEqual(code, 1)
        self.assertIn("failed: not done after 1 s", self.page("overlap.md"))

    def test_output_that_is_not_understood_ends_the_study_loudly(self):
        code, printed = self.call("overlap", "--bench", self.bench("print('something else')"))
        self.assertIn("no line of tokens/s", str(code))
        self.assertIn("something else", str(code))
        self.assertFalse((self.folder / "out" / "overlap.md").exists())

    def test_no_point_and_no_bench_are_errors(self):
        code, _ = self.call("overlap", "--bench", self.bench("sys.exit(2)"))
        self.assertIn("no point ran", str(code))
        code, _ = self.call("overlap", "--bench", self.folder / "absent")
        self.assertIn("absent: No such file", str(code))

    def test_dry_run_prints_commands_and_touches_nothing(self):
        words = ("--layers", 8, "--host-memory-limit", "100GiB", "--set", "seed=7", "--dry-run")
        code, printed = self.call("overlap", "--bench", "build/x/train_step", *words)
        self.assertEqual(code, 0)
        self.assertEqual(len(printed.splitlines()), len(studies.overlap().points))
        self.assertIn("8-layers/config.json", printed)
        for word in (
            "weight_slots=1",
            "loop_order=layer_major",
            "resident_blocks=0",
            "activation_policy=input",
            "host_memory_limit=100GiB",
            "seed=7",
        ):
            self.assertIn(f"--set {word}", printed.splitlines()[0])
        self.assertFalse((self.folder / "out").exists())

    def test_nsys_commands_have_the_settings_of_the_points(self):
        code, printed = self.call(
            "optimizer", "--bench", "build/cuda/benches/train_step", "--layers", 2, "--print-nsys"
        )
        self.assertEqual(code, 0)
        commands = printed.splitlines()
        self.assertEqual(len(commands), len(studies.optimizer().points))
        for command, point in zip(commands, studies.optimizer().points):
            self.assertTrue(command.startswith("nsys profile "))
            self.assertIn(" build/cuda/src/cli/layerstream train ", command)
            for key, value in point.settings.items():
                self.assertIn(f"--set {key}={value}", command)
        self.assertEqual(json.loads(self.page("2-layers/config.json"))["num_hidden_layers"], 2)

    def test_impossible_options_are_refused(self):
        for words, said in (
            (("--set", "weight_slots=2"), "sets it by itself"),
            (("--set", "seed"), "KEY=VALUE"),
            (("--step-tokens", 1000), "not a multiple"),
            (("--layers", 29), "num_hidden_layers is 28"),
            (("--layers", 0), "at least 1"),
            (("--model", self.folder / "none.json", "--layers", 2), "none.json"),
        ):
            with self.subTest(words):
                code, printed = self.call("overlap", *words)
                self.assertEqual(code, 2)
                self.assertIn(said, printed)

    def test_a_cut_model_keeps_the_kinds_of_its_layers(self):
        config = {"num_hidden_layers": 3, "layer_types": ["a", "a", "b"], "hidden_size": 8}
        cut = json.loads(study.cut_config(json.dumps(config), 2))
        self.assertEqual(cut, {"num_hidden_layers": 2, "layer_types": ["a", "a"], "hidden_size": 8})


if __name__ == "__main__":
    unittest.main()
