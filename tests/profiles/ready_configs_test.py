"""examples/configs: every configuration is planned on every machine of its README's table, which must be what the plans
say. profiles/studies/ready_configs.py writes that table.

    python3 ready_configs_test.py PATH/TO/layerstream
"""

import os
import re
import sys
import unittest
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.dont_write_bytecode = True
sys.path.insert(0, str(ROOT / "profiles/studies"))

import ready_configs  # noqa: E402
from plan_output import Plan, Refusal, Shortfall  # noqa: E402
from ready_configs import Fits, Needs  # noqa: E402

GIB = 2.0**30

# safetensors' totals as Hugging Face shows them on the models' pages.
PARAMETERS = {
    "mistral-7b-v0.3": 7_248_023_552,
    "qwen2.5-7b": 7_615_616_512,
    "llama-3.1-8b": 8_030_261_248,
    "qwen3-8b": 8_190_735_360,
    "qwen2.5-14b": 14_770_033_664,
    "qwen3-32b": 32_762_123_264,
    "qwen2.5-32b": 32_763_876_352,
    "llama-3.1-70b": 70_553_706_496,
    "qwen2.5-72b": 72_706_203_648,
}


class PlannedTest(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.outcomes = ready_configs.plan_all(PROGRAM, min(2, os.cpu_count() or 1))
        cls.cells = {pair: ready_configs.cell_of(outcome) for pair, outcome in cls.outcomes.items()}

    def test_the_table_is_what_plan_says(self):
        said = ready_configs.cells_of(ready_configs.PAGE.read_text())
        # Three digits are within 0.5%; the rest is for another compiler's rounding, after which the search may end at a
        # placement that is as good.
        different = ready_configs.differences(said, self.cells, 0.03)
        remedy = "look why, and run profiles/studies/ready_configs.py if it is as it should be"
        self.assertEqual(different, [], f"{len(different)} of {len(self.cells)}; {remedy}")

    def test_shapes_have_the_models_parameters(self):
        planned = {model: plan.parameters for (model, _), plan in self.outcomes.items() if isinstance(plan, Plan)}
        self.assertEqual(planned, PARAMETERS)

    def test_every_file_is_in_the_table(self):
        files = {path.stem: path.read_text() for path in ready_configs.PAGE.parent.glob("*.yaml")}
        self.assertEqual(set(files), set(ready_configs.MODELS))
        for model, text in files.items():
            # Comments that name their own file, and the size of a checkpoint: 12 bytes a parameter.
            self.assertIn(f"layerstream plan examples/configs/{model}.yaml", text)
            self.assertIn(f"output_dir: runs/{model}\n", text)
            self.assertIn(f"# A checkpoint takes {12e-9 * PARAMETERS[model]:.0f} GB.\n", text)
            rows, cutoff = (
                int(re.search(rf"^{key}: (\d+)$", text, re.MULTILINE)[1])
                for key in ("per_device_train_batch_size", "cutoff_len")
            )
            self.assertIn(f"# Rows of a step, which has {rows * cutoff:,} tokens", text)


class TableTest(unittest.TestCase):
    def cells(self, **changed):
        fits, needs = Fits(12846.0, 147.69), Needs(1023.4)
        cells = {
            (model, machine): needs if model == "qwen2.5-72b" else fits
            for model in ready_configs.MODELS
            for machine in ready_configs.MACHINES
        }
        return {**cells, **changed}

    def test_is_read_as_it_was_written(self):
        marks = "".join(ready_configs._MARKS)
        page = ready_configs.with_table(f"before\n{marks}after\n", self.cells())
        self.assertTrue(page.startswith("before\n") and page.endswith("after\n"))
        self.assertIn("| qwen2.5-7b | 12,800 tokens/s, 148 GiB |", page)
        self.assertIn("| qwen2.5-72b | needs 1,020 GiB |", page)
        read = ready_configs.cells_of(page)
        self.assertEqual(read["qwen2.5-7b", "h100-pcie"], Fits(12800.0, 148.0))
        self.assertEqual(ready_configs.differences(read, self.cells(), 0.005), [])
        self.assertEqual(ready_configs.with_table(page, self.cells()), page)

    def test_a_page_without_a_table_or_with_other_words_is_an_error(self):
        with self.assertRaisesRegex(ValueError, "not one table"):
            ready_configs.with_table("before\nafter\n", self.cells())
        page = ready_configs.with_table("".join(ready_configs._MARKS), self.cells())
        with self.assertRaisesRegex(ValueError, "some tokens/s"):
            ready_configs.cells_of(page.replace("12,800 tokens/s", "some tokens/s", 1))

    def test_differences_are_named(self):
        pair = ("qwen2.5-7b", "h100-pcie")
        said = self.cells()
        for planned in (Needs(147.69), Fits(12846.0 * 1.04, 147.69), Fits(12846.0, 147.69 / 1.04), None):
            with self.subTest(planned):
                cells = self.cells()
                cells[pair] = planned
                if planned is None:
                    del cells[pair]
                (line,) = ready_configs.differences(said, cells, 0.03)
                self.assertIn("qwen2.5-7b on h100-pcie: the page says 12,800 tokens/s, 148 GiB, plan says", line)
                self.assertEqual(len(ready_configs.differences(cells, said, 0.03)), 1)

    def test_what_the_device_is_short_of_may_lie_on_the_host(self):
        host, device = Shortfall("host", 1012 * GIB, 425 * GIB), Shortfall("device", 100 * GIB, 89 * GIB)
        self.assertEqual(ready_configs.cell_of(Refusal("", (host,))), Needs(1012.0))
        self.assertEqual(ready_configs.cell_of(Refusal("", (device, host))), Needs(1023.0))
        with self.assertRaisesRegex(ValueError, "would not help: too small a card"):
            ready_configs.cell_of(Refusal("too small a card", (device,)))


if __name__ == "__main__":
    if len(sys.argv) < 2:
        sys.exit(__doc__)
    PROGRAM = Path(sys.argv.pop(1))
    unittest.main()
