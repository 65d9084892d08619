"""tools/long_recall.py: what a row holds, where its targets are, and that a cut row lacks the answers."""

import contextlib
import io
import json
import math
import random
import sys
import tempfile
import unittest
from pathlib import Path
from unittest import mock

ROOT = Path(__file__).resolve().parents[2]
sys.dont_write_bytecode = True
sys.path.insert(0, str(ROOT / "tools"))

import long_recall  # noqa: E402
from shard_reader import read_shard  # noqa: E402

TASK = long_recall.Task(length=200, keys=8, values=4, copies=3, fillers=5)


def run(*arguments):
    with mock.patch.object(sys, "argv", ["long_recall.py", *map(str, arguments)]):
        with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(out):
            long_recall.main()
    return out.getvalue()


class RowTest(unittest.TestCase):
    def setUp(self):
        self.row = long_recall.make_row(TASK, random.Random(1))

    def test_has_each_key_in_every_copy_of_the_table_with_the_value_that_its_query_has(self):
        queries = self.row[-16:]
        values = {k - TASK.first_key: v - TASK.first_value for k, v in zip(queries[::2], queries[1::2])}
        self.assertEqual(sorted(values), list(range(8)))
        entries = sorted(TASK.entry(key, value) for key, value in values.items())
        for copy in range(3):
            self.assertEqual(sorted(self.row[8 * copy : 8 * (copy + 1)]), entries)

    def test_has_nothing_but_filler_between_table_and_queries(self):
        self.assertTrue(all(token < TASK.fillers for token in self.row[24:-16]))
        self.assertEqual(set(self.row[24:-16]), set(range(5)))
        self.assertEqual(len(self.row), 200)

    def test_tokens_of_all_kinds_differ_and_fill_the_vocabulary(self):
        entries = {TASK.entry(key, value) for key in range(8) for value in range(4)}
        self.assertEqual(len(entries), 32)
        self.assertEqual((min(entries), max(entries)), (TASK.first_value + 4, TASK.vocab_size - 1))

    def test_targets_are_the_values_of_the_queries_alone(self):
        mask = long_recall.make_mask(TASK)
        self.assertEqual(len(mask), 200)
        self.assertEqual([i for i, m in enumerate(mask) if m], list(range(185, 200, 2)))
        self.assertTrue(all(TASK.first_value <= self.row[i] < TASK.first_entry for i, m in enumerate(mask) if m))

    def test_values_change_from_row_to_row_without_a_favourite(self):
        generator = random.Random(2)
        counts = [0] * 4
        for _ in range(500):
            for token in long_recall.make_row(TASK, generator)[-15::2]:
                counts[token - TASK.first_value] += 1
        # 4,000 draws: a count is 1,000 with a standard deviation of 27.
        self.assertTrue(all(abs(count - 1000) < 5 * math.sqrt(4000 * 0.25 * 0.75) for count in counts), counts)


class ShardsTest(unittest.TestCase):
    def test_cut_rows_are_the_ends_of_the_whole_ones_without_the_table(self):
        with tempfile.TemporaryDirectory() as folder:
            sizes = ("--keys", 8, "--values", 4, "--copies", 3, "--fillers", 5)
            run("--rows", 6, "--length", 200, "--cut", 50, *sizes, "--output", folder)
            whole, cut = (read_shard(Path(folder) / f"{name}.safetensors") for name in ("whole", "cut"))
        self.assertEqual(list(whole["document_offsets"]), list(range(0, 1201, 200)))
        self.assertEqual(list(cut["document_offsets"]), list(range(0, 301, 50)))
        for i in range(6):
            for tensor in ("input_ids", "target_mask"):
                end = whole[tensor][200 * i + 150 : 200 * (i + 1)]
                self.assertEqual(cut[tensor][50 * i : 50 * (i + 1)], end)
        self.assertTrue(all(token < TASK.first_entry for token in cut["input_ids"]))
        self.assertEqual(sum(cut["target_mask"]), sum(whole["target_mask"]))
        self.assertNotEqual(whole["input_ids"][:200], whole["input_ids"][200:400])

    def test_the_example_has_its_vocabulary_and_31_thousand_tokens_between(self):
        with tempfile.TemporaryDirectory() as folder:
            said = run("--rows", 1, "--length", 32768, "--cut", 1024, "--output", folder)
        config = json.loads((ROOT / "examples/long-recall/config.json").read_text())
        self.assertIn(f"vocabulary {config['vocab_size']}\n", said)
        self.assertIn("filler 31616,", said)

    def test_refuses_a_cut_that_would_hold_part_of_the_table(self):
        with tempfile.TemporaryDirectory() as folder, self.assertRaises(SystemExit):
            run("--rows", 1, "--length", 32768, "--cut", 32000, "--output", folder)


if __name__ == "__main__":
    unittest.main()
