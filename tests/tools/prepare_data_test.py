"""tools/prepare_data without a tokenizer: files, record formats, dataset_info.json, masks, lengths, mixing, shards."""

import json
import sys
import tempfile
import unittest
from pathlib import Path
from unittest import mock

ROOT = Path(__file__).resolve().parents[2]
sys.dont_write_bytecode = True
sys.path.insert(0, str(ROOT / "tools"))

from prepare_data import mixing, progress, report, shards, sources  # noqa: E402
from prepare_data.dataset_info import find_dataset, read_dataset_info  # noqa: E402
from prepare_data.encode import Document, fit, mask_of_spans  # noqa: E402
from prepare_data.errors import PrepareError, RecordError  # noqa: E402
from prepare_data.formats import Chat, Completion, Text, default_format, detect_format  # noqa: E402
from prepare_data.spool import Spool  # noqa: E402
from prepare_data.token_texts import text_of_token  # noqa: E402
from shard_reader import read_shard  # noqa: E402

USER, ASSISTANT = {"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}


class InDirectory(unittest.TestCase):
    def setUp(self):
        directory = tempfile.TemporaryDirectory()
        self.addCleanup(directory.cleanup)
        self.directory = Path(directory.name)

    def write(self, name, data):
        path = self.directory / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data if isinstance(data, bytes) else data.encode())
        return path


class SourcesTest(InDirectory):
    def read(self, name, data):
        return [
            (record.place.replace(str(self.directory) + "/", ""), record.value)
            for record in sources.read_records(self.write(name, data))
        ]

    def test_json_lines_have_their_line_as_place_and_blank_ones_count(self):
        self.assertEqual(
            self.read("a.jsonl", '{"text": "x"}\n\n{"text": "y"}'),
            [("a.jsonl:1", {"text": "x"}), ("a.jsonl:3", {"text": "y"})],
        )

    def test_a_line_that_is_not_json_or_not_utf8_is_an_error_of_that_line_alone(self):
        records = self.read("a.jsonl", b'{"text": "x"\n{"text": "\xff"}\n{"text": "y"}\n')
        self.assertEqual([place for place, _ in records], ["a.jsonl:1", "a.jsonl:2", "a.jsonl:3"])
        self.assertIsInstance(records[0][1], RecordError)
        self.assertRegex(str(records[0][1]), "^not JSON: .* at column")
        self.assertEqual(str(records[1][1]), "not UTF-8: byte 10 is 0xff")
        self.assertEqual(records[2][1], {"text": "y"})

    def test_records_of_a_json_list_are_placed_at_the_line_where_they_begin(self):
        self.assertEqual(
            self.read("a.json", '\n[{"text": "x"},\n {"text":\n "y"},\n\n {"text": "z"}\n]\n'),
            [("a.json:2", {"text": "x"}), ("a.json:3", {"text": "y"}), ("a.json:6", {"text": "z"})],
        )

    def test_a_json_file_may_hold_lines_of_objects_and_an_empty_list(self):
        self.assertEqual(self.read("a.json", '{"text": "x"}\n{"text": "y"}\n')[1], ("a.json:2", {"text": "y"}))
        self.assertEqual(self.read("b.json", "[ ]"), [])

    def test_a_broken_json_list_ends_the_run_with_the_line(self):
        for data, cause in (
            ('[{"text": "x"},\n {"text" "y"}]', r"a\.json:2: not JSON: "),
            ('[{"text": "x"}\n {"text": "y"}]', r"a\.json:2: .*neither ',' nor ']'"),
            ('"x"', r"a\.json:1: .*does not begin with"),
            ("[1]\n[2]", r"a\.json:2: .*text after the list"),
            ("[1", r"a\.json:1: .*neither"),
        ):
            with self.subTest(data), self.assertRaisesRegex(PrepareError, cause):
                self.read("a.json", data)

    def test_records_tell_how_much_of_the_file_is_read(self):
        for name, data in (
            ("a.jsonl", b'{"text": "\xc3\xa4"}\n\nx\n{"text": "y"}'),
            ("b.json", b'[{"text": "x"}, {"text": "y"}]'),
            ("c.txt", b"\xc3\xa4"),
        ):
            with self.subTest(name):
                ends = [record.end for record in sources.read_records(self.write(name, data))]
                self.assertEqual(ends, sorted(ends))
                self.assertTrue(len(data) - 1 <= ends[-1] <= len(data))

    def test_raw_text_is_one_document_without_its_byte_order_mark(self):
        self.assertEqual(self.read("a.txt", "\ufeffone\ntwo"), [("a.txt:1", {"text": "one\ntwo"})])

    def test_a_directory_is_read_in_the_order_of_paths_without_hidden_files(self):
        for name in ("b/1.txt", "a.txt", "b/.hidden", ".git/x.txt"):
            self.write(name, "x")
        found = [str(path.relative_to(self.directory)) for path in sources.find_files(self.directory)]
        self.assertEqual(found, ["a.txt", "b/1.txt"])

    def test_missing_empty_and_unreadable_inputs_are_named(self):
        with self.assertRaisesRegex(PrepareError, "nowhere: no such file or directory"):
            sources.find_files(self.directory / "nowhere")
        with self.assertRaisesRegex(PrepareError, "holds no files"):
            sources.find_files(self.directory)
        self.write("a.csv", "x")
        with self.assertRaisesRegex(PrepareError, r"a\.csv: files of this kind are not read; give raw text, \.jsonl"):
            sources.find_files(self.directory)

    def test_parquet_without_pyarrow_says_how_to_install_it(self):
        with mock.patch.dict(sys.modules, {"pyarrow": None}):
            with self.assertRaisesRegex(PrepareError, r"a\.parquet: Parquet needs .*pip install pyarrow"):
                self.read("a.parquet", b"")

    def test_parquet_records_are_numbered(self):
        try:
            import pyarrow
            import pyarrow.parquet
        except ImportError:
            self.skipTest("pyarrow is not installed")
        rows = [{"messages": [USER, {**ASSISTANT, "name": "n"}]}, {"messages": [USER, ASSISTANT]}]
        path = self.directory / "a.parquet"
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
        records = list(sources.read_records(path))
        self.assertEqual([record.place for record in records], [f"{path}: record 1", f"{path}: record 2"])
        chats = [detect_format(record.value).read(record.value) for record in records]
        self.assertEqual([chat.messages for chat in chats], [row["messages"] for row in rows])
        path.write_bytes(b"PAR1")
        with self.assertRaisesRegex(PrepareError, r"a\.parquet: not readable as Parquet"):
            list(sources.read_records(path))


class FormatsTest(unittest.TestCase):
    def read(self, record, name=None):
        return (default_format(name) if name else detect_format(record)).read(record)

    def test_text_and_prompt_completion(self):
        self.assertEqual(self.read({"text": "x"}), Text("x"))
        self.assertEqual(self.read({"prompt": "p", "completion": "c"}), Completion("p", "c"))

    def test_prompt_and_completion_may_be_messages(self):
        self.assertEqual(self.read({"prompt": [USER], "completion": [ASSISTANT]}), Chat([USER, ASSISTANT]))

    def test_alpaca_joins_instruction_and_input_after_system_and_history(self):
        record = {"instruction": "i", "input": "x", "output": "a", "system": "s", "history": [["q", "a"]]}
        expected = [{"role": "system", "content": "s"}, USER, ASSISTANT, {"role": "user", "content": "i\nx"}, ASSISTANT]
        self.assertEqual(self.read(record), Chat(expected))
        self.assertEqual(self.read({"instruction": "q", "input": "", "output": "a"}), Chat([USER, ASSISTANT]))

    def test_sharegpt_tags_become_roles_and_calls_become_tool_calls(self):
        call = {"name": "f", "arguments": {"x": 1}}
        turns = [("human", "q"), ("function_call", json.dumps(call)), ("observation", "1"), ("gpt", "a")]
        record = {"conversations": [{"from": f, "value": v} for f, v in turns], "system": "s", "tools": '[{"a": 1}]'}
        self.assertEqual(
            self.read(record),
            Chat(
                [
                    {"role": "system", "content": "s"},
                    USER,
                    {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": call}]},
                    {"role": "tool", "content": "1"},
                    ASSISTANT,
                ],
                [{"a": 1}],
            ),
        )

    def test_openai_messages_keep_what_templates_read_and_lose_nulls(self):
        call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}
        turns = [
            {"role": "user", "content": [{"type": "text", "text": "q"}], "tool_calls": None},
            {"role": "assistant", "content": None, "tool_calls": [call]},
        ]
        parsed = {**call, "function": {"name": "f", "arguments": {"x": 1}}}
        self.assertEqual(
            self.read({"messages": turns}),
            Chat([USER, {"role": "assistant", "content": "", "tool_calls": [parsed]}]),
        )

    def test_the_turns_tell_the_format_not_the_name_of_their_column(self):
        self.assertEqual(detect_format({"conversations": [USER]}).name, "openai")
        self.assertEqual(detect_format({"messages": [{"from": "human", "value": "q"}]}).name, "sharegpt")

    def test_each_fault_is_named(self):
        openai = lambda turn: {"messages": [USER, turn]}  # noqa: E731
        for record, name, cause in (
            ([1], None, "must be an object with columns, this is a list"),
            ({"a": 1, "b": 2}, None, "cannot be told from the columns a, b; .*--format"),
            ({"a": 1}, "text", "no column 'text'; there are a"),
            ({"text": None}, "text", "column 'text' must be a string, it is null"),
            ({"instruction": "i", "output": 3}, None, "column 'output' must be a string, it is a number"),
            ({"instruction": "i", "output": "a", "history": [["q"]]}, None, "'history': pair 1 must be two strings"),
            ({"messages": []}, "openai", "'messages' must be a list of messages, it is an empty list"),
            (openai("x"), None, "turn 2 must be an object, it is a string"),
            (openai({"role": "bot", "content": "a"}), None, "turn 2: 'role' is \"bot\"; known are system, "),
            (openai({"role": "assistant"}), None, "turn 2: 'content' must be a string, it is null"),
            (openai({"role": "user", "content": [{"type": "image"}]}), None, "turn 2: content of type image"),
            (
                openai({"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}),
                None,
                "turn 2: 'arguments' of a tool call is not JSON",
            ),
            ({"messages": [USER], "tools": "{"}, None, "column 'tools' is not JSON"),
            (
                {"conversations": [{"from": "function_call", "value": "f()"}]},
                None,
                "turn 1: function call is not JSON",
            ),
        ):
            with self.subTest(cause), self.assertRaisesRegex(RecordError, cause):
                self.read(record, name)


class DatasetInfoTest(InDirectory):
    def find(self, entry, name="d"):
        path = self.write("dataset_info.json", json.dumps({"d": entry}))
        return find_dataset(path, read_dataset_info(path), name)

    def test_files_lie_beside_it_and_alpaca_has_its_usual_columns(self):
        found = self.find({"file_name": "x.json"})
        self.assertEqual(found.path, self.directory / "x.json")
        record = {"instruction": "q", "input": "", "output": "a", "system": "not named, not read"}
        self.assertEqual(found.format.read(record), Chat([USER, ASSISTANT]))

    def test_only_named_columns_exist(self):
        columns = {"prompt": "question", "response": "answer", "system": "s"}
        record = {"question": "q", "answer": "a", "input": "not named", "s": "be brief"}
        self.assertEqual(
            self.find({"file_name": "x", "columns": columns}).format.read(record),
            Chat([{"role": "system", "content": "be brief"}, USER, ASSISTANT]),
        )

    def test_a_prompt_alone_is_text_for_pretraining(self):
        found = self.find({"file_name": "x", "columns": {"prompt": "content"}})
        self.assertEqual(found.format.read({"content": "x"}), Text("x"))

    def test_sharegpt_with_columns_and_tags(self):
        tags = {"role_tag": "who", "content_tag": "says", "user_tag": "U", "assistant_tag": "A"}
        entry = {"file_name": "x", "formatting": "sharegpt", "columns": {"messages": "m"}, "tags": tags}
        record = {"m": [{"who": "U", "says": "q"}, {"who": "A", "says": "a"}]}
        self.assertEqual(self.find(entry).format.read(record), Chat([USER, ASSISTANT]))
        with self.assertRaisesRegex(RecordError, "'who' is \"human\"; known are U, A, "):
            self.find(entry).format.read({"m": [{"who": "human", "says": "q"}]})

    def test_openai_formatting(self):
        found = self.find({"file_name": "x", "formatting": "openai"})
        self.assertEqual(found.format.read({"messages": [USER, ASSISTANT]}), Chat([USER, ASSISTANT]))

    def test_what_is_not_supported_is_refused_by_name(self):
        for entry, name, cause in (
            ({"file_name": "x"}, "e", "no dataset 'e'; there are d"),
            ({"hf_hub_url": "a/b"}, "d", "d: no file_name; only local files"),
            ({"file_name": "x", "ranking": True}, "d", "d: ranking: "),
            ({"file_name": "x", "num_samples": 5}, "d", "d: key 'num_samples' is not supported"),
            ({"file_name": "x", "formatting": "y"}, "d", "d: formatting 'y'; known are"),
            ({"file_name": "x", "columns": {"images": "i"}}, "d", "d: columns: 'images' is not supported"),
            ({"file_name": "x", "columns": {"response": "r"}}, "d", "d: columns: no 'prompt'"),
            ({"file_name": "x", "formatting": "sharegpt", "tags": {"a": "b"}}, "d", "d: tags: 'a' is not"),
        ):
            with self.subTest(cause), self.assertRaisesRegex(PrepareError, cause):
                self.find(entry, name)

    def test_a_missing_or_broken_file_is_named(self):
        with self.assertRaisesRegex(PrepareError, "nowhere: No such file"):
            read_dataset_info(self.directory / "nowhere")
        with self.assertRaisesRegex(PrepareError, "info: not JSON"):
            read_dataset_info(self.write("info", "{"))


class MaskTest(unittest.TestCase):
    def test_a_token_is_a_target_if_any_of_its_characters_is(self):
        offsets = [(0, 2), (2, 5), (5, 6), (6, 9), (9, 10), (10, 12)]
        self.assertEqual(mask_of_spans(offsets, [(2, 5), (8, 10)]), bytes([0, 1, 0, 1, 1, 0]))
        self.assertEqual(mask_of_spans(offsets, []), bytes(6))

    def test_tokens_that_share_a_character_share_its_target(self):
        self.assertEqual(mask_of_spans([(0, 1), (1, 2), (1, 2), (2, 3)], [(1, 2)]), bytes([0, 1, 1, 0]))

    def test_a_token_of_no_characters_belongs_to_the_place_where_it_stands(self):
        self.assertEqual(mask_of_spans([(0, 3), (3, 3), (3, 5), (5, 5)], [(3, 5)]), bytes([0, 1, 1, 0]))


class LengthTest(unittest.TestCase):
    DOCUMENT = Document(list(range(10)), bytes([0, 0, 0, 0, 1, 0, 0, 0, 0, 1]))

    def fit(self, cutoff_len, overlong):
        return [(d.ids, list(d.mask)) for d in fit(self.DOCUMENT, cutoff_len, overlong)]

    def test_documents_that_fit_stay_what_they_are(self):
        for overlong in ("split", "truncate", "drop", "error"):
            self.assertEqual(fit(self.DOCUMENT, 10, overlong), [self.DOCUMENT])
        self.assertEqual(fit(self.DOCUMENT, None, "error"), [self.DOCUMENT])

    def test_longer_ones_are_truncated_split_dropped_or_refused(self):
        self.assertEqual(self.fit(6, "truncate"), [([0, 1, 2, 3, 4, 5], [0, 0, 0, 0, 1, 0])])
        self.assertEqual([ids for ids, _ in self.fit(4, "split")], [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]])
        self.assertEqual([mask for _, mask in self.fit(5, "split")], [[0, 0, 0, 0, 1], [0, 0, 0, 0, 1]])
        self.assertEqual(self.fit(9, "drop"), [])
        with self.assertRaisesRegex(RecordError, "10 tokens are more than the cutoff_len of 9"):
            self.fit(9, "error")

    def test_the_first_token_is_no_target_as_nothing_predicts_it(self):
        self.assertFalse(Document([1, 2], b"\1\0").has_targets)
        self.assertTrue(Document([1, 2], b"\0\1").has_targets)

    def test_percentiles_are_lengths_that_occur(self):
        self.assertEqual(list(report.percentiles(range(1, 101)).values()), [1, 5, 25, 50, 75, 95, 99, 100])
        self.assertEqual(list(report.percentiles([7]).values()), [7] * 8)
        self.assertEqual(report.percentiles([]), {})


class MixingTest(unittest.TestCase):
    def test_concat_is_one_after_the_other(self):
        self.assertEqual(mixing.mix([2, 1], "concat", None, 1), [(0, 0), (0, 1), (1, 0)])

    def test_shares_follow_the_probabilities(self):
        order = mixing.mix([100000, 100000], "interleave_under", [0.8, 0.2], 1)
        share = sum(1 for dataset, _ in order if dataset == 1) / len(order)
        self.assertAlmostEqual(share, 0.2, delta=0.006)  # five deviations of 125,000 draws

    def test_under_ends_when_a_drawn_dataset_is_empty_and_repeats_nothing(self):
        order = mixing.mix([50, 200], "interleave_under", [1, 1], 3)
        self.assertEqual(len(order), len(set(order)))
        self.assertEqual(sum(1 for dataset, _ in order if dataset == 0), 50)
        self.assertLess(len(order), 250)

    def test_over_goes_through_all_and_begins_anew(self):
        order = mixing.mix([5, 200], "interleave_over", None, 3)
        self.assertEqual({d for d in order if d[0] == 1}, {(1, i) for i in range(200)})
        small = [document for dataset, document in order if dataset == 0]
        self.assertEqual(small, [i % 5 for i in range(len(small))])
        self.assertGreater(len(small), 50)
        self.assertEqual(order[-1], (1, 199))

    def test_a_seed_gives_one_order_and_another_seed_another(self):
        orders = [mixing.mix([99, 99], "interleave_under", None, seed) for seed in (1, 1, 2)]
        self.assertEqual(orders[0], orders[1])
        self.assertNotEqual(orders[0], orders[2])


class ShardsTest(InDirectory):
    def spool(self, documents):
        spool = Spool(self.directory / f"spool{len(list(self.directory.iterdir()))}")
        self.addCleanup(spool.close)
        for document in documents:
            spool.add(document)
        spool.finish()
        return spool

    def test_a_shard_holds_the_documents_in_the_order_given(self):
        spools = [self.spool([Document([1, 70000], b"\0\1")]), self.spool([Document([3], b"\1"), Document([4], b"\0")])]
        path = self.directory / "x.safetensors"
        for bytes_of_id, large in ((4, 70000), (2, None)):
            order = [(1, 1), (0, 0), (1, 0)] if large else [(1, 1), (1, 0)]
            figures = shards.write_shard(path, spools, order, bytes_of_id)
            tensors = read_shard(path)
            self.assertEqual(tensors["input_ids"], [4, 1, 70000, 3] if large else [4, 3])
            self.assertEqual(tensors["target_mask"], [0, 0, 1, 1] if large else [0, 1])
            self.assertEqual(tensors["document_offsets"], [0, 1, 3, 4] if large else [0, 1, 2])
            self.assertEqual(figures["bytes"], path.stat().st_size)
            self.assertEqual(figures["targets"], 2 if large else 1)

    def test_ids_take_two_bytes_where_all_fit(self):
        self.assertEqual([shards.id_bytes(n) for n in (65535, 65536)], [2, 4])

    def test_shards_end_before_the_limit_and_never_within_a_document(self):
        # Documents of 10 tokens take 10 * (2 + 1) + 8 = 38 bytes.
        self.assertEqual(shards.plan_shards([10] * 5, 2, 80), [range(0, 2), range(2, 4), range(4, 5)])
        self.assertEqual(shards.plan_shards([10, 1000, 10], 2, 80), [range(0, 1), range(1, 2), range(2, 3)])
        self.assertEqual(shards.plan_shards([10] * 5, 2, 1000), [range(0, 5)])


class ProgressTest(unittest.TestCase):
    def test_a_line_every_five_seconds_with_share_note_and_remaining_time(self):
        lines, now = [], [100.0]
        told = progress.Progress(lines.append, lambda: now[0])
        told.begin("a.jsonl: tokenizing", 4 << 20)
        for second in range(1, 13):
            now[0] = 100.0 + second
            told.at(second * 10000, f"{second} records")
        self.assertEqual(
            lines,
            [
                "a.jsonl: tokenizing: 1% of 4.0 MiB, 5 records, 6m 54s to go",
                "a.jsonl: tokenizing: 2% of 4.0 MiB, 10 records, 6m 49s to go",
            ],
        )

    def test_short_work_is_silent_and_each_piece_of_work_begins_anew(self):
        lines, now = [], [0.0]
        told = progress.Progress(lines.append, lambda: now[0])
        for _ in range(3):
            told.begin("x", 0)
            now[0] += 4
            told.at(0)
        self.assertEqual(lines, [])


class TokenTextsTest(unittest.TestCase):
    def test_byte_level_tokens_are_their_bytes(self):
        for token, text in (("\u0120hello", " hello"), ("\u010a", "\n"), ("\u00c3\u00a4", "\u00e4"), ("\u00c3", "\\xc3")):
            self.assertEqual(text_of_token(token, is_byte_level=True), text)

    def test_other_tokens_have_their_spaces(self):
        self.assertEqual(text_of_token("\u2581hello", is_byte_level=False), " hello")
        self.assertEqual(text_of_token("<0x0A>", is_byte_level=False), "<0x0A>")


if __name__ == "__main__":
    unittest.main()
