"""tools/plot_losses.py: reading metrics, averages, the table, the files."""

import contextlib
import io
import sys
import tempfile
import unittest
import xml.etree.ElementTree as ET
from pathlib import Path
from unittest import mock

ROOT = Path(__file__).resolve().parents[2]
sys.dont_write_bytecode = True
sys.path.insert(0, str(ROOT / "tools"))

import plot_losses  # noqa: E402


class PlotLossesTest(unittest.TestCase):
    def test_a_point_is_the_mean_of_its_steps_and_the_rest_a_point_of_its_own(self):
        self.assertEqual(plot_losses.averaged({1: 4.0, 2: 2.0, 3: 5.0}, 2), {2: 3.0, 3: 5.0})

    def test_writes_table_csv_and_plot_and_leaves_out_what_a_run_lacks(self):
        with tempfile.TemporaryDirectory() as folder:
            folder = Path(folder)
            for name, losses in (("a", ("3.0", "1.0")), ("b", ("2.0", "null", "0.5"))):
                (folder / name).mkdir()
                lines = (f'{{"step":{i},"loss":{loss}}}\n' for i, loss in enumerate(losses, 1))
                (folder / name / "metrics.jsonl").write_text("".join(lines))
            arguments = ["x", f"whole={folder}/a", f"cut={folder}/b", "--every", "1", "--output", f"{folder}/out"]
            with mock.patch.object(sys, "argv", arguments), contextlib.redirect_stdout(io.StringIO()) as out:
                plot_losses.main()
            self.assertEqual((folder / "out.csv").read_text(), "step,whole,cut\n1,3.0,2.0\n2,1.0,\n3,,0.5\n")
            curves = ET.parse(folder / "out.svg").findall("{http://www.w3.org/2000/svg}polyline")
        self.assertEqual(len(curves), 2)
        self.assertIn("| 1 | 3.0000 | 2.0000 |\n| 2 | 1.0000 |  |\n| 3 |  | 0.5000 |", out.getvalue())


if __name__ == "__main__":
    unittest.main()
