"""`layerstream report` and `compare`, looked at in a browser: on a phone, on a desk, by day and by night."""

import json
import re
import sys
import tempfile
import unittest
from pathlib import Path

sys.dont_write_bytecode = True
sys.path.insert(0, str(Path(__file__).parent))

import browser  # noqa: E402
from training import Training, metrics  # noqa: E402

SKIPPED = 77
PHONE, SMALL_PHONE, DESK = (390, 844), (360, 740), (1280, 800)
STEPS = 30

# Elements that stand out of a window of WIDTH. (A phone's browser would widen its own idea of the window for them.)
OVERFLOWING = """[...document.querySelectorAll("body *")].filter(node => {
  if (["SCRIPT", "NOSCRIPT"].includes(node.tagName)) return false;
  const box = node.getBoundingClientRect();
  return box.width > 0 && (box.right > WIDTH + 0.5 || box.left < -0.5);
}).map(node => node.tagName + "." + node.className)"""
# Text that is wider than the box around it.
CUT_OFF = """[...document.querySelectorAll("h1, h2, p, td, th, .tile, .legend, .facts div")].filter(
  node => node.scrollWidth > node.clientWidth + 1).map(node => node.textContent)"""


def curves(page, part):
    """{name: points} of a chart's paths; where a curve is smoothed, of the smooth and the faint one."""
    found = page.evaluate(f"""[...document.querySelectorAll('[data-part="{part}"] path[data-series]')]
        .map(path => [path.dataset.series, path.getAttribute("d")])""")
    return {name: len(re.findall("[ML]", path)) for name, path in found}


class ReportPageTest(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.folder = tempfile.TemporaryDirectory()
        cls.training = Training(PROGRAM, Path(cls.folder.name))
        evaluating = {"validation_file": cls.training.held_out, "eval_strategy": "steps", "eval_steps": 10, "max_eval_samples": 2}
        cls.first = cls.training.train("first & <b>best</b>", max_steps=STEPS, **evaluating)
        cls.second = cls.training.train("second", max_steps=20, learning_rate=0.001)
        cls.training.call("report", cls.first)
        cls.page_file = cls.first / "report.html"
        cls.browser = browser.Browser()

    @classmethod
    def tearDownClass(cls):
        cls.browser.__exit__()
        cls.folder.cleanup()

    def open(self, path, size, **how):
        self.browser.open(path, *size, mobile=size != DESK, **how)
        self.assertEqual(self.browser.problems(), [])
        self.assertEqual(self.browser.requests(), [path.resolve().as_uri()])
        return self.browser

    def check_layout(self, page, size):
        self.assertEqual(page.evaluate("document.documentElement.scrollWidth"), size[0])
        self.assertEqual(page.evaluate(OVERFLOWING.replace("WIDTH", str(size[0]))), [])
        self.assertEqual(page.evaluate(CUT_OFF), [])

    def test_nothing_overflows_at_any_size(self):
        for size in (PHONE, SMALL_PHONE, DESK):
            for dark in (False, True):
                with self.subTest(size=size, dark=dark):
                    self.check_layout(self.open(self.page_file, size, dark=dark), size)

    def test_a_phone_has_one_column_and_a_desk_several(self):
        lefts = """new Set([...document.querySelectorAll(".grid > .card")].map(card => Math.round(card.getBoundingClientRect().left))).size"""
        self.assertEqual(self.open(self.page_file, PHONE).evaluate(lefts), 1)
        self.assertGreater(self.open(self.page_file, DESK).evaluate(lefts), 1)

    def test_it_is_dark_where_the_reader_wants_it_dark(self):
        ground = "getComputedStyle(document.body).backgroundColor"
        self.assertNotEqual(self.open(self.page_file, PHONE).evaluate(ground),
                            self.open(self.page_file, PHONE, dark=True).evaluate(ground))

    def test_every_step_is_a_point_of_every_curve(self):
        steps, evaluations = metrics(self.first)
        self.assertEqual(len(steps), STEPS)
        for size in (PHONE, DESK):
            page = self.open(self.page_file, size)
            self.assertEqual(curves(page, "Loss"), {"training": STEPS, "eval loss": len(evaluations)})
            for part in ("Gradient norm", "Learning rate", "Tokens per second"):
                self.assertEqual(list(curves(page, part).values()), [STEPS], part)
            self.assertEqual(page.evaluate("""document.querySelectorAll('[data-part="Loss"] circle').length"""), len(evaluations))

    def test_a_tap_tells_a_steps_values(self):
        page = self.open(self.page_file, PHONE)
        box = page.evaluate("""(() => { const chart = document.querySelector('[data-part="Loss"] svg');
            chart.scrollIntoView({block: "center"});
            const box = chart.getBoundingClientRect();
            return [box.left, box.top, box.width, box.height]; })()""")
        page.click(box[0] + box[2] - 11, box[1] + box[3] / 2)  # the last step, at the right edge
        text = page.evaluate("""document.querySelector('[data-part="Loss"] .legend').textContent""")
        last = metrics(self.first)[0][-1]
        self.assertIn(f"step {STEPS}", text)
        self.assertIn(f"training {float(format(last['loss'], '.5g')):g}", text)

    def test_the_scale_can_be_logarithmic_and_the_curve_smooth(self):
        page = self.open(self.page_file, DESK)
        path = """document.querySelector('[data-part="Loss"] path[data-series]').getAttribute("d")"""
        linear = page.evaluate(path)
        page.evaluate("""document.querySelector('[data-part="Loss"] input[type=checkbox]').click()""")
        logarithmic = page.evaluate(path)
        self.assertNotEqual(linear, logarithmic)
        page.evaluate("""(() => { const range = document.querySelector('[data-part="Loss"] input[type=range]');
            range.value = 0.9; range.dispatchEvent(new Event("input")); })()""")
        self.assertEqual(page.evaluate("""document.querySelectorAll('[data-part="Loss"] path[data-series=training]').length"""), 2)
        self.assertEqual(self.browser.problems(), [])

    def test_curves_can_stand_over_tokens_and_hours(self):
        page = self.open(self.page_file, PHONE)
        for axis in ("tokens", "hours"):
            page.evaluate(f"""(() => {{ const choice = document.querySelector("select");
                choice.value = "{axis}"; choice.dispatchEvent(new Event("change")); }})()""")
            self.assertEqual(curves(page, "Loss")["training"], STEPS)
            self.assertIn(axis, page.evaluate("""document.querySelector('[data-part="Loss"] svg').getAttribute("aria-label")"""))
        self.assertEqual(self.browser.problems(), [])
        self.check_layout(page, PHONE)

    def test_the_timeline_shows_every_lane_and_tells_an_operation(self):
        timeline = json.loads((self.first / "timeline.json").read_text())
        self.assertEqual(timeline["step"], 3)
        page = self.open(self.page_file, PHONE)
        lanes = page.evaluate("""[...new Set([...document.querySelectorAll("path[data-lane]")].map(path => path.dataset.lane))]""")
        used = {timeline["lanes"][lane]["name"] for lane in timeline["operations"]["lane"]}
        self.assertEqual(set(lanes), used)
        page.evaluate("""document.querySelector('[data-part="timeline"]').scrollIntoView()""")
        page.evaluate("""document.querySelector('[data-part="timeline"] button[title="show less time"]').click()""")
        box = page.evaluate("""(() => { const box = document.querySelector("path[data-lane=compute]").getBoundingClientRect();
            return [box.left, box.top, box.width, box.height]; })()""")
        page.click(box[0] + 2, box[1] + box[3] / 2)
        text = page.evaluate("""document.querySelector('[data-part="timeline"] .legend').textContent""")
        self.assertTrue(any(kind.replace("_", " ") in text for kind in timeline["kinds"]), text)
        self.assertEqual(self.browser.problems(), [])

    def test_waits_and_busy_time_make_the_whole_step(self):
        shares = self.open(self.page_file, PHONE).evaluate(
            """[...document.querySelectorAll('[data-part="waits"] tbody td:last-child')].map(cell => parseFloat(cell.textContent))""")
        self.assertAlmostEqual(sum(shares), 100, delta=0.05 * len(shares) + 0.01)  # each is rounded to 0.1

    def test_memory_is_the_runs_ledger(self):
        record = json.loads((self.first / "run.json").read_text())
        text = self.open(self.page_file, PHONE).evaluate("""document.querySelector('[data-part="memory"]').textContent""")
        for line in record["memory"]["ledger"]:
            self.assertIn(line["component"], text)
        self.assertGreater(record["memory"]["process_peak"], 0)
        self.assertIn("peak of the process", text)

    def test_names_are_text(self):
        page = self.open(self.page_file, PHONE)
        self.assertEqual(page.evaluate("document.querySelector('h1').textContent"), self.first.name)
        self.assertEqual(page.evaluate("document.title"), self.first.name)

    def test_a_run_without_record_and_timeline_still_has_curves(self):
        bare = self.training.folder / "bare"
        bare.mkdir()
        lines = [{"step": i, "loss": None if i % 7 == 0 else 5000 / i, "num_tokens": 64, "seconds": 0.5} for i in range(1, 5001)]
        (bare / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines) + '{"step": 50')
        self.training.call("report", bare, "--output", bare / "page.html")
        page = self.open(bare / "page.html", PHONE)
        self.check_layout(page, PHONE)
        points = curves(page, "Loss")["training"]
        self.assertTrue(STEPS < points < 5000, points)  # what its pixels can show
        # The first losses do not make the others flat, and are told.
        self.assertIn("up to 5k", page.evaluate("""document.querySelector('[data-part="Loss"] svg').textContent"""))

    def test_runs_side_by_side(self):
        output = self.training.folder / "compare.html"
        text = self.training.call("compare", self.first, self.second, "--output", output)
        self.assertRegex(text, r"learning_rate +0\.01 +0\.001\n")
        for size in (PHONE, SMALL_PHONE, DESK):
            page = self.open(output, size)
            self.check_layout(page, size)
            self.assertEqual(curves(page, "Gradient norm"), {self.first.name: STEPS, "second": 20})
            self.assertEqual(len(curves(page, "Loss")), 3)
        rows = page.evaluate("""[...document.querySelectorAll('[data-part="differences"] tr')].map(row => [...row.children].map(cell => cell.textContent))""")
        self.assertIn(["learning_rate", "0.01", "0.001"], rows)
        self.assertIn(["steps", str(STEPS), "20"], rows)
        self.assertFalse(any(row[0] == "seed" for row in rows))


if __name__ == "__main__":
    PROGRAM = sys.argv.pop(1)
    if browser.program() is None:
        print(f"SKIPPED: no browser ({', '.join(browser.NAMES)}) in PATH")
        sys.exit(SKIPPED)
    unittest.main()
