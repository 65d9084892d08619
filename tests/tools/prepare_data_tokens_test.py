"""tools/prepare_data with a tokenizer: templates, masks token by token, whole runs, the cache, and errors."""

import contextlib
import io
import json
import signal
import subprocess
import sys
import tempfile
import unittest
from pathlib import Path
from unittest import mock

ROOT = Path(__file__).resolve().parents[2]
sys.dont_write_bytecode = True
sys.path.insert(0, str(ROOT / "tools"))

from prepare_data import command, lock  # noqa: E402
from prepare_data.encode import Encoder, EncodeSettings  # noqa: E402
from prepare_data.errors import PrepareError, RecordError  # noqa: E402
from prepare_data.formats import Chat, Completion, Text  # noqa: E402
from prepare_data.hf_tokenizer import HfTokenizer  # noqa: E402
from shard_reader import read_documents  # noqa: E402
from tokenizer_files import CHATML, CHATML_MARKED, FORGETFUL, LLAMA3, MISSING, SPECIAL, make_tokenizer, turns  # noqa: E402

TOOL = ROOT / "tools" / "prepare_data"

@unittest.skipIf(MISSING, MISSING)
class WithTokenizer(unittest.TestCase):
    def setUp(self):
        directory = tempfile.TemporaryDirectory()
        self.addCleanup(directory.cleanup)
        self.directory = Path(directory.name)

    def encode(self, sample, template=CHATML, bos=False, variables=None, config=None, **settings):
        """[(token's text, whether it is a target)]"""
        tokenizer = HfTokenizer(make_tokenizer(self.directory / "model", template, bos, **(config or {})))
        chat_template = tokenizer.chat_template(None, variables or {})
        document = Encoder(tokenizer, chat_template, EncodeSettings(**settings)).encode(sample)
        self.assertEqual(len(document.ids), len(document.mask))
        return [(tokenizer.token_of(i).replace("Ġ", " ").replace("Ċ", "\n"), m) for i, m in zip(*document_of(document))]

    def text_of(self, tokens, target):
        """The tokens that are targets or not, each run of them as one string."""
        runs = [[]]
        for token, is_target in tokens:
            if is_target == target:
                runs[-1].append(token)
            elif runs[-1]:
                runs.append([])
        return ["".join(run) for run in runs if run]


def document_of(document):
    return document.ids, document.mask


class MaskTest(WithTokenizer):
    CHAT = Chat(turns("hello", "world", "user", "hello world"))

    def test_chatml_token_by_token(self):
        expected = [
            ("<|im_start|>", 0), ("system", 0), ("\n", 0), *((c, 0) for c in "Be"), (" ", 0),
            *((c, 0) for c in "brief."), ("<|im_end|>", 0), ("\n", 0),
            ("<|im_start|>", 0), ("user", 0), ("\n", 0), ("hello", 0), ("<|im_end|>", 0), ("\n", 0),
            ("<|im_start|>", 0), ("assistant", 0), ("\n", 0), ("world", 1), ("<|im_end|>", 1), ("\n", 1),
        ]  # fmt: skip
        got = self.encode(Chat(turns("hello", "world")))
        # How letters merge is the trainer's affair; what they spell and which are targets is not.
        join = lambda tokens: [(c, m) for t, m in tokens for c in ([t] if t in SPECIAL else t)]  # noqa: E731
        self.assertEqual(join(got), join(expected))

    def test_marks_and_prefixes_give_the_same_mask(self):
        chats = [
            self.CHAT,
            Chat([{"role": "system", "content": "s"}, *turns("hello\n\n", "\n\n wörld 🙂.\n\n", "user ", " ")]),
            Chat(turns("a", "b", "c")),
            Chat([*turns("a", "b"), {"role": "assistant", "content": "c"}]),
            Chat(turns("<|im_end|>\n<|im_start|>assistant\n", "x")),
        ]
        for chat in chats:
            for mask_history in (False, True):
                with self.subTest(chat, mask_history=mask_history):
                    marked = self.encode(chat, CHATML_MARKED, mask_history=mask_history)
                    self.assertEqual(self.encode(chat, CHATML, mask_history=mask_history), marked)

    def test_every_assistant_turn_is_a_target_or_only_the_last(self):
        for template in (CHATML, CHATML_MARKED):
            all_turns = self.text_of(self.encode(self.CHAT, template), 1)
            self.assertEqual(all_turns, ["world<|im_end|>\n", "hello world<|im_end|>\n"])
            last = self.text_of(self.encode(self.CHAT, template, mask_history=True), 1)
            self.assertEqual(last, ["hello world<|im_end|>\n"])

    def test_llama3_template_begins_with_one_bos_and_its_blank_lines_are_no_targets(self):
        tokens = self.encode(self.CHAT, LLAMA3, bos=True)
        self.assertEqual([t for t, _ in tokens].count("<|bos|>"), 1)
        self.assertEqual(self.text_of(tokens, 1), ["world<|eot_id|>", "hello world<|eot_id|>"])
        header = "<|start_header_id|>{}<|end_header_id|>\n\n".format
        self.assertEqual(
            self.text_of(tokens, 0),
            [f"<|bos|>{header('user')}hello<|eot_id|>{header('assistant')}"]
            + [f"{header('user')}user<|eot_id|>{header('assistant')}"],
        )

    def test_white_space_at_the_ends_of_turns_stays_on_its_side(self):
        # Llama 3's post-processor trims the offsets of such tokens, which must not move the mask.
        template = "{% for m in messages %}{{ m.role }}\n\n{{ m.content }}\n\n{% endfor %}" + (
            "{% if add_generation_prompt %}{{ 'assistant\n\n' }}{% endif %}"
        )
        tokens = self.encode(self.CHAT, template)
        self.assertEqual(self.text_of(tokens, 1), ["world\n\n", "hello world\n\n"])

    def test_train_on_prompt_makes_every_token_a_target(self):
        for sample in (self.CHAT, Completion("hello", "world")):
            self.assertEqual(self.text_of(self.encode(sample, train_on_prompt=True), 0), [])

    def test_a_forgetful_template_is_refused_with_the_turn_unless_only_the_last_counts(self):
        chat = Chat(turns("hello", "<think>x</think>world", "user", "<think>y</think>hello"))
        with self.assertRaisesRegex(RecordError, r"^turn 2: .* no prefix of the whole conversation: .*mask_history"):
            self.encode(chat, FORGETFUL)
        tokens = self.encode(chat, FORGETFUL, mask_history=True)
        self.assertEqual(self.text_of(tokens, 1), ["<think>y</think>hello<|im_end|>\n"])

    def test_a_template_whose_prompt_differs_from_the_turn_is_refused_with_the_turn(self):
        template = CHATML.replace("{{- '<|im_start|>assistant\\n' }}\n{%- endif", "{{- 'ASSISTANT' }}\n{%- endif")
        with self.assertRaisesRegex(RecordError, "^turn 2: .* before the assistant's turn is no prefix .*'ASSISTANT'"):
            self.encode(self.CHAT, template)

    def test_completions_are_targets_and_prompts_are_not(self):
        self.assertEqual(
            self.encode(Completion("hello", " world"), bos=True),
            [("<|bos|>", 0), ("hello", 0), *((t, 1) for t, _ in self.encode(Text(" world")))],
        )
        self.assertEqual(self.text_of(self.encode(Completion("a", "b")), 1), ["b<|end|>"])

    def test_text_is_a_target_as_a_whole_between_the_tokens_of_the_tokenizer(self):
        self.assertEqual(self.text_of(self.encode(Text("hello\n")), 1), ["hello\n<|end|>"])
        self.assertEqual(self.text_of(self.encode(Text("hello"), bos=True), 1), ["<|bos|>hello<|end|>"])
        self.assertEqual(self.text_of(self.encode(Text("hello"), append_eos=False), 1), ["hello"])
        config = {"add_bos_token": True, "add_eos_token": True}
        self.assertEqual(self.text_of(self.encode(Text("hello"), config=config), 1), ["<|bos|>hello<|end|>"])
        config = {"add_bos_token": False}
        self.assertEqual(self.text_of(self.encode(Text("hello"), bos=True, config=config), 1), ["hello<|end|>"])

    def test_no_eos_token_is_an_error_with_a_remedy(self):
        with self.assertRaisesRegex(PrepareError, r"tokenizer_config\.json: no eos_token; .*--no-eos"):
            self.encode(Text("hello"), config={"eos_token": None})


class TemplateTest(WithTokenizer):
    def render(self, template, messages=None, tools=None, **variables):
        tokenizer = HfTokenizer(make_tokenizer(self.directory / "model"))
        return tokenizer.make_template(template, variables, "x").render(messages or turns("q", "a"), tools)

    def test_blocks_leave_no_white_space_and_loops_can_be_left(self):
        template = "{% for m in messages %}\n    {% if loop.index0 %}\n{% break %}\n{% endif %}\n{{ m.content }}\n{% endfor %}"
        self.assertEqual(self.render(template), "q\n")

    def test_json_is_not_escaped_and_can_be_indented(self):
        self.assertEqual(self.render("{{ tools | tojson }}", tools=[{"ö": "<b>"}]), '[{"ö": "<b>"}]')
        self.assertEqual(self.render("{{ tools | tojson(indent=1) }}", tools=[1]), "[\n 1\n]")

    def test_templates_read_special_tokens_the_date_and_the_users_variables(self):
        self.assertEqual(self.render("{{ bos_token }}{{ eos_token }}{{ x }}", x=[1]), "<|bos|><|end|>[1]")
        self.assertRegex(self.render("{{ strftime_now('%Y') }}"), r"^\d{4}$")

    def test_faults_of_templates_and_data_are_told_apart(self):
        with self.assertRaisesRegex(RecordError, "chat template: no such role"):
            self.render("{{ raise_exception('no such role') }}")
        with self.assertRaisesRegex(RecordError, "chat template: .*has no element 5"):
            self.render("{{ messages[5].content }}")
        with self.assertRaisesRegex(RecordError, "chat template: TypeError"):
            self.render("{{ messages[0].content + 1 }}")
        with self.assertRaisesRegex(RecordError, "chat template: .*unsafe"):
            self.render("{{ messages.append(1) }}")
        with self.assertRaisesRegex(PrepareError, "x: chat template, line 2: "):
            self.render("\n{% if %}")

    def test_text_that_holds_the_characters_of_the_marks_is_refused(self):
        tokenizer = HfTokenizer(make_tokenizer(self.directory / "model", CHATML_MARKED))
        template = tokenizer.chat_template(None, {})
        with self.assertRaisesRegex(RecordError, "U\\+FDD0"):
            template.targets(turns("q", "a\ufdd0b"), None, False)

    def test_templates_come_from_the_places_that_transformers_knows(self):
        named = [{"name": "default", "template": "d"}, {"name": "tool_use", "template": "t"}]
        model = make_tokenizer(self.directory / "model", named)
        load = lambda name: HfTokenizer(model).chat_template(name, {}).source  # noqa: E731
        self.assertEqual([load(None), load("tool_use")], ["d", "t"])
        with self.assertRaisesRegex(PrepareError, "no chat template 'x'; there are default, tool_use"):
            load("x")
        (model / "chat_template.json").write_text('{"chat_template": "j"}')
        self.assertEqual(load(None), "j")
        (model / "chat_template.jinja").write_text("jinja")
        self.assertEqual(load(None), "jinja")

    def test_tokens_of_the_config_are_added_at_their_ids(self):
        model = make_tokenizer(self.directory / "model")
        size = HfTokenizer(model).largest_id + 1
        token = {"content": "<new>", "special": True}
        make_tokenizer(model, added_tokens_decoder={str(size): token})
        self.assertEqual(HfTokenizer(model).encode("a<new>")[0][-1], size)
        make_tokenizer(model, added_tokens_decoder={str(size + 1): token})
        with self.assertRaisesRegex(PrepareError, f"'<new>' has id {size + 1}, but tokenizer.json leaves {size}"):
            HfTokenizer(model)

    def test_offsets_cover_the_text_although_the_post_processor_would_trim_them(self):
        _, offsets = HfTokenizer(make_tokenizer(self.directory / "model")).encode("hello user\n\n")
        self.assertEqual([begin for begin, _ in offsets[1:]] + [12], [end for _, end in offsets])

    def test_a_directory_without_tokenizer_json_is_refused_with_a_remedy(self):
        with self.assertRaisesRegex(PrepareError, r"tokenizer\.json: no such file; .*save_pretrained"):
            HfTokenizer(self.directory)
        (self.directory / "tokenizer.json").write_text("{}")
        with self.assertRaisesRegex(PrepareError, r"tokenizer\.json: not a tokenizer"):
            HfTokenizer(self.directory)


class CommandTest(WithTokenizer):
    def setUp(self):
        super().setUp()
        self.model = make_tokenizer(self.directory / "model")
        self.output = self.directory / "out"

    def write(self, name, *records):
        path = self.directory / name
        path.write_text("".join(json.dumps(record) + "\n" for record in records))
        return path

    def run_it(self, *arguments):
        with contextlib.redirect_stdout(io.StringIO()) as out:
            command.main([*map(str, arguments), "--tokenizer", str(self.model), "--output", str(self.output)])
        return out.getvalue()

    def fails(self, cause, *arguments):
        with self.assertRaises(SystemExit) as caught:
            self.run_it(*arguments)
        self.assertRegex(str(caught.exception), f"^prepare_data: .*{cause}")

    def documents(self):
        return [d for path in sorted(self.output.glob("*.safetensors")) for d in read_documents(path)]

    def texts(self):
        tokenizer = HfTokenizer(self.model)
        decode = lambda ids: tokenizer._tokenizer.decode(ids, skip_special_tokens=False)  # noqa: E731
        return [decode(ids) for ids, _ in self.documents()]

    def test_datasets_of_several_formats_follow_each_other(self):
        chats = self.write("chats.jsonl", {"messages": turns("hello", "world")})
        alpaca = self.write("alpaca.jsonl", {"instruction": "hello", "input": "", "output": "world"})
        shared = self.write("s.jsonl", {"conversations": [{"from": "human", "value": "hello"}, {"from": "gpt", "value": "world"}]})
        text = self.directory / "a.txt"
        text.write_text("hello")
        out = self.run_it(chats, alpaca, shared, text)
        documents = self.documents()
        self.assertEqual(documents[0], documents[1])
        self.assertEqual(documents[0], documents[2])
        self.assertEqual(self.texts()[3], "hello<|end|>")
        self.assertIn("4 documents", out)
        self.assertRegex(out, r"chats\.jsonl: 1 records, 1 documents\n  tokens of a record: shortest \d+, 5% ")

    def test_dataset_info_names_datasets(self):
        self.write("x.jsonl", {"q": "hello", "a": "world"})
        info = self.directory / "dataset_info.json"
        info.write_text(json.dumps({"mine": {"file_name": "x.jsonl", "columns": {"prompt": "q", "response": "a"}}}))
        self.assertIn("mine: 1 records", self.run_it("mine", "--dataset-info", info))
        self.assertTrue(self.texts()[0].endswith("hello<|im_end|>\n<|im_start|>assistant\nworld<|im_end|>\n"))
        self.fails("no dataset 'other'; there are mine", "other", "--dataset-info", info)

    def test_overlong_records_by_the_setting(self):
        texts = self.write("t.jsonl", {"text": "a b c d e f g"}, {"text": "a"})
        whole = [len(ids) for ids, _ in self.documents()] if self.run_it(texts) else []
        self.assertIn("1 overlong, split", self.run_it(texts, "--cutoff-len", 6))
        self.assertEqual([len(ids) for ids, _ in self.documents()], [6, 6, whole[0] - 12, whole[1]])
        self.assertIn("1 overlong, truncated", self.run_it(texts, "--cutoff-len", 6, "--overlong", "truncate"))
        self.assertEqual([len(ids) for ids, _ in self.documents()], [6, whole[1]])
        self.assertIn("1 overlong, dropped", self.run_it(texts, "--cutoff-len", 6, "--overlong", "drop"))
        self.assertEqual([len(ids) for ids, _ in self.documents()], [whole[1]])
        cause = rf"t\.jsonl:1: {whole[0]} tokens are more than the cutoff_len of 6; --on-bad-line skip"
        self.fails(cause, texts, "--cutoff-len", 6, "--overlong", "error")

    def test_keep_text_leaves_plain_text_whole_and_truncates_all_else(self):
        text = self.write("t.jsonl", {"text": "hello world " * 20})
        chat = self.write("c.jsonl", {"prompt": "hello", "completion": "world " * 40})
        out = self.run_it(text, chat, "--cutoff-len", 16, "--overlong", "keep-text")
        self.assertEqual([len(ids) > 16 for ids, _ in self.documents()], [True, False])
        self.assertNotRegex(out, "t.jsonl: .*overlong")
        self.assertRegex(out, "c.jsonl: 1 records, 1 documents; 1 overlong, truncated")

    def test_only_plain_text_can_be_split(self):
        chats = self.write("c.jsonl", {"messages": turns("hello", "world " * 20)})
        self.fails(r"c\.jsonl:1: --overlong split is for plain text, this record is openai", chats, "--cutoff-len", 40, "--overlong", "split")
        self.run_it(chats, "--cutoff-len", 40)
        self.assertEqual([len(ids) for ids, _ in self.documents()], [40])

    def test_records_without_a_target_are_dropped_and_counted(self):
        chats = self.write("c.jsonl", {"messages": turns("a")}, {"messages": turns("a", "b")}, {"messages": turns("a b " * 20, "c")})
        self.assertIn("2 without a target, dropped", self.run_it(chats, "--cutoff-len", 50))
        self.assertEqual(len(self.documents()), 1)
        self.fails("no document is left; no record has a target", chats, "--cutoff-len", 2)

    def test_bad_records_end_the_run_or_are_left_out_and_counted(self):
        path = self.directory / "b.jsonl"
        path.write_text('{"messages": [{"role": "user"}]}\nnot json\n' + json.dumps({"messages": turns("a", "b")}))
        self.fails(r"b\.jsonl:1: turn 1: 'content'|b\.jsonl:1: the format cannot be told", path)
        out = self.run_it(path, "--on-bad-line", "skip")
        self.assertIn("3 records, 1 documents; 2 unusable, left out", out)
        self.assertRegex(out, r"\n  .*b\.jsonl:2: not JSON")

    def test_a_turn_that_cannot_be_masked_is_named_with_its_line(self):
        (self.model / "chat_template.jinja").write_text(FORGETFUL)
        chats = self.write("c.jsonl", {"messages": turns("a", "b")}, {"messages": turns("a", "x</think>b", "c", "d")})
        self.fails(r"c\.jsonl:2: turn 2: .*no prefix of the whole conversation", chats)

    def test_tokens_outside_the_models_vocabulary_are_refused_with_file_and_line(self):
        config = self.directory / "config.json"
        config.write_text('{"text_config": {"vocab_size": 7}}')
        texts = self.write("t.jsonl", {"text": "<|end|>"}, {"text": "<|end|>a"})
        self.fails(r"t\.jsonl:2: token 1 is \d+ \('a'\), outside the model's vocabulary of 7", texts, "--model-config", config)
        config.write_text("{}")
        self.fails(r"config\.json: no vocab_size", texts, "--model-config", config)

    def test_a_conversation_needs_a_template(self):
        make_tokenizer(self.model, template=None)
        chats = self.write("c.jsonl", {"messages": turns("a", "b")})
        self.fails("brings none; give one with --chat-template-file", chats, "--on-bad-line", "skip")
        template = self.directory / "t.jinja"
        template.write_text(CHATML_MARKED)
        self.run_it(chats, "--chat-template-file", template)
        self.assertEqual(len(self.documents()), 1)

    def test_mixing_draws_by_probability_and_is_the_same_again(self):
        a = self.write("a.jsonl", *({"text": f"hello {i}"} for i in range(300)))
        b = self.write("b.jsonl", *({"text": f"world {i}"} for i in range(300)))
        arguments = (a, b, "--mix-strategy", "interleave_under", "--interleave-probs", "0.75,0.25", "--seed", 7)
        out = self.run_it(*arguments)
        first = self.documents()
        share = sum(text.startswith("world") for text in self.texts()) / len(first)
        self.assertAlmostEqual(share, 0.25, delta=0.11)  # five deviations of 400 draws
        self.assertIn(f"documents ({share:.1%})", out)
        self.output = self.directory / "again"
        self.run_it(*arguments)
        self.assertEqual(self.documents(), first)

    def test_shards_are_limited_and_hold_all_documents_in_order(self):
        texts = self.write("t.jsonl", *({"text": f"{i} " + "hello " * 30000} for i in range(8)))
        self.run_it(texts, "--shard-size", 1)
        names = sorted(path.name for path in self.output.glob("*.safetensors"))
        self.assertGreater(len(names), 1)
        self.assertEqual(names[0], f"tokens-00001-of-{len(names):05}.safetensors")
        self.assertTrue(all(path.stat().st_size < (1 << 20) + 4096 for path in self.output.glob("*.safetensors")))
        self.assertEqual([text.split()[0] for text in self.texts()], [str(i) for i in range(8)])

    def test_the_same_is_not_made_twice_and_every_change_is_seen(self):
        texts = self.write("t.jsonl", {"text": "hello"})
        self.run_it(texts)
        (shard,) = self.output.glob("*.safetensors")
        nothing = f"^{self.output}: up to date, nothing to do\n"
        self.assertRegex(self.run_it(texts), nothing)
        self.assertEqual(
            sorted(path.name for path in self.output.iterdir()),
            [".prepare_data.json", ".prepare_data.lock", ".tokens.json", shard.name],
        )
        changes = (
            lambda: self.write("t.jsonl", {"text": "world"}),
            lambda: make_tokenizer(self.model, bos=True),
            lambda: (self.model / "chat_template.jinja").write_text("x"),
            shard.unlink,
        )
        for change in changes:
            change()
            self.assertNotRegex(self.run_it(texts), nothing)
            self.assertRegex(self.run_it(texts), nothing)
        self.assertNotRegex(self.run_it(texts, "--no-eos"), nothing)

    def test_what_is_up_to_date_is_reported_as_when_it_was_made(self):
        good, bad = self.write("t.jsonl", {"text": "hello"}, {"text": "hello world"}), self.write("u.jsonl", {"x": 1})
        arguments = (good, self.write("v.jsonl", {"text": "world"}), bad, "--on-bad-line", "skip")
        made = self.run_it(*arguments)
        self.assertIn("u.jsonl: 1 records, 0 documents; 1 unusable, left out", made)
        self.assertRegex(made, r"t\.jsonl: 2 of 3 documents \(66\.7%\)")
        self.assertEqual(self.run_it(*arguments), f"{self.output}: up to date, nothing to do\n{made}")

    def test_a_cache_has_a_directory_for_each_content_and_takes_both_back(self):
        def shards(*arguments):
            with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(io.StringIO()) as err:
                command.main(
                    [*map(str, arguments), "--tokenizer", str(self.model), "--cache", str(self.output), "--print-shards"]
                )
            self.assertIn("1 documents", err.getvalue())
            self.assertEqual("up to date" in err.getvalue(), out.getvalue() in seen)
            seen.append(out.getvalue())
            path = Path(out.getvalue().rstrip("\n"))
            self.assertEqual(path.parent.parent, self.output)
            return path

        seen = []
        texts = self.write("t.jsonl", {"text": "hello hello"})
        first = shards(texts)
        with_eos = read_documents(first)
        without = shards(texts, "--no-eos")
        self.assertNotEqual(first, without)
        self.assertEqual(first, shards(texts))
        self.assertEqual(without, shards(texts, "--no-eos"))
        self.assertEqual(read_documents(first), with_eos)
        self.write("t.jsonl", {"text": "hello world"})
        self.assertNotIn(shards(texts), (first, without))

    def test_token_texts_are_what_each_id_stands_for(self):
        self.run_it(self.write("t.jsonl", {"text": "hello \u00e4\n"}))
        texts = json.loads((self.output / ".tokens.json").read_text())
        ((ids, _),) = self.documents()
        self.assertEqual([texts[i] for i in ids], ["hello", " ", "\\xc3", "\\xa4", "\n", "<|end|>"])

    def test_what_a_killed_run_left_is_removed(self):
        (self.output / ".spool-x").mkdir(parents=True)
        (self.output / ".spool-x" / "0.ids").write_text("x")
        (self.output / ".tokens-00001-of-00001.safetensors.partial").write_text("x")
        self.run_it(self.write("t.jsonl", {"text": "hello"}))
        self.assertEqual([p for p in self.output.iterdir() if "spool" in p.name or "partial" in p.name], [])

    def start(self, *arguments):
        command_line = [sys.executable, "-B", TOOL, *arguments, "--tokenizer", self.model, "--output", self.output]
        return subprocess.Popen(command_line, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)

    def test_a_second_run_waits_for_the_first_and_finds_its_shards(self):
        texts = self.write("t.jsonl", {"text": "hello"})
        self.output.mkdir()
        with lock.locked(self.output):
            second = self.start(texts)
            self.assertIn("waiting for another prepare_data", second.stderr.readline())
            with mock.patch.object(lock, "locked", lambda directory: contextlib.nullcontext()):
                self.run_it(texts)
        out, _ = second.communicate(timeout=60)
        self.assertIn("up to date, nothing to do", out)

    def test_a_stopped_run_leaves_nothing_half_done(self):
        for number in (signal.SIGTERM, signal.SIGINT):
            (self.directory / "t.jsonl").write_text('{"text": "hello"}\n' * 400000)
            run = self.start(self.directory / "t.jsonl")
            while not list(self.output.glob(".spool-*/0.ids")):
                self.assertIsNone(run.poll())
            run.send_signal(number)
            _, err = run.communicate(timeout=60)
            self.assertEqual((run.returncode, err), (1, f"prepare_data: stopped by {number.name}\n"))
            self.assertEqual([path.name for path in self.output.iterdir()], [".prepare_data.lock"])

    def test_the_manifest_says_what_was_made_from_what(self):
        self.run_it(self.write("t.jsonl", {"text": "hello"}, {"text": "world"}))
        manifest = json.loads((self.output / ".prepare_data.json").read_text())
        (shard,) = manifest["shards"]
        self.assertEqual((shard["documents"], shard["targets"]), (2, shard["tokens"]))
        self.assertEqual(manifest["made_from"]["datasets"][0]["files"][0]["file"], "t.jsonl")
        self.assertIn("tokenizer.json", manifest["made_from"]["tokenizer"])

    def test_shards_of_another_origin_are_left_alone_and_our_old_ones_removed(self):
        texts = self.write("t.jsonl", *({"text": f"{i} " + "hello " * 30000} for i in range(8)))
        self.run_it(texts, "--shard-size", 1)
        self.run_it(texts)
        self.assertEqual([p.name for p in self.output.glob("*.safetensors")], ["tokens-00001-of-00001.safetensors"])
        (self.output / "model.safetensors").write_text("x")
        self.fails("holds model.safetensors, which its manifest does not list", texts, "--no-eos")
        self.assertTrue((self.output / "model.safetensors").exists())

    def test_settings_that_make_no_sense_are_refused(self):
        texts = self.write("t.jsonl", {"text": "hello"})
        for cause, *arguments in (
            ("contradict each other", "--train-on-prompt", "--mask-history"),
            ("--cutoff-len 1: must be at least 2", "--cutoff-len", 1),
            ("--overlong drop needs --cutoff-len", "--overlong", "drop"),
            ("--shard-size 0: must be", "--shard-size", 0),
            ("concat takes none", "--interleave-probs", "1"),
            ("2 probabilities for 1 inputs", "--mix-strategy", "interleave_over", "--interleave-probs", "1,2"),
            ("each must be positive", "--mix-strategy", "interleave_over", "--interleave-probs", "0"),
            ("not numbers with commas", "--mix-strategy", "interleave_over", "--interleave-probs", "x"),
            ("--template-variables: not JSON", "--template-variables", "{"),
            ("--template-variables: must be an object", "--template-variables", "1"),
        ):
            with self.subTest(cause):
                self.fails(cause, texts, *arguments)

    def test_a_missing_package_is_named_with_the_command_that_installs_it(self):
        texts = self.write("t.jsonl", {"text": "hello"})
        for package in ("tokenizers", "jinja2"):
            with mock.patch.dict(sys.modules, {package: None}):
                self.fails(f"pip install {package}", texts)


if __name__ == "__main__":
    unittest.main()
