"""`dataset:` end to end: layerstream and tools/prepare_data as its child process, with a real tokenizer.

    python3 train_dataset_test.py PROGRAM"""

import json
import os
import subprocess
import sys
import tempfile
import unittest
from pathlib import Path

sys.dont_write_bytecode = True
sys.path.insert(0, str(Path(__file__).resolve().parent))

from tokenizer_files import CHATML, CHATML_MARKED, FORGETFUL, MISSING, make_tokenizer, turns  # noqa: E402

PROGRAM = str(Path(sys.argv.pop(1)).resolve()) if len(sys.argv) > 1 and not sys.argv[1].startswith("-") else ""
MISSING = MISSING or ("" if PROGRAM else "no program was given")
REFUSED = 2
MODEL = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
}
RUN = """\
config_name: model
tokenizer_name: model
output_dir: out
cutoff_len: 64
max_steps: 1
per_device_train_batch_size: 2
gradient_accumulation_steps: 1
"""
CHATS = [{"messages": turns("hello", "world", "user", "hello world")}] * 8


@unittest.skipIf(MISSING, MISSING)
class DatasetTest(unittest.TestCase):
    def setUp(self):
        directory = tempfile.TemporaryDirectory()
        self.addCleanup(directory.cleanup)
        self.directory = Path(directory.name)
        self.make_model()
        (self.directory / "run.yaml").write_text(RUN + f"python: {json.dumps(sys.executable)}\n")
        self.write("chats.jsonl", *CHATS)

    def make_model(self, vocab_size=320, template=CHATML):
        make_tokenizer(self.directory / "model", template)
        (self.directory / "model" / "config.json").write_text(json.dumps({**MODEL, "vocab_size": vocab_size}))

    def write(self, name, *records):
        lines = (record if isinstance(record, str) else json.dumps(record) for record in records)
        (self.directory / name).write_text("".join(line + "\n" for line in lines))

    def run_it(self, command, *settings, arguments=()):
        overrides = [part for setting in settings for part in ("--set", setting)]
        return subprocess.run(
            [PROGRAM, command, "run.yaml", *overrides, *arguments],
            cwd=self.directory,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            timeout=110,
        )

    def succeeds(self, command, *settings, arguments=()):
        result = self.run_it(command, *settings, arguments=arguments)
        self.assertEqual(result.returncode, 0, result.stderr)
        return result.stdout + result.stderr

    def refused(self, *settings):
        """By train and inspect-data alike, before anything is made; returns the message."""
        messages = set()
        for command in ("train", "inspect-data"):
            result = self.run_it(command, *settings)
            self.assertEqual(result.returncode, REFUSED, result.stderr)
            self.assertFalse((self.directory / "out").exists())
            messages.add(result.stderr[result.stderr.index("layerstream: ") :])
        (message,) = messages
        return message

    def shown(self, *settings, rows=1):
        """[(text, whether it is trained on)] of the first rows."""
        out = self.succeeds("inspect-data", *settings, arguments=("--rows", str(rows), "--tokens", "1000"))
        tokens = []
        for line in out.splitlines():
            before, quote, rest = line.partition("'")
            if quote and len(before.split()) == 3 and all(part.isdigit() for part in before.split()):
                text, _, rest = rest.partition("'")
                tokens.append((text, {"yes": True, "no": False}[rest.split()[0]]))
        self.assertTrue(tokens)
        return tokens

    def test_chats_are_prepared_trained_on_and_not_prepared_again(self):
        log = self.succeeds("train", "dataset=chats.jsonl")
        self.assertRegex(log, "data: chats.jsonl: 8 records, 8 documents")
        self.assertRegex(log, "tokens of a record: shortest .* 50% .* longest")
        self.assertIn("step 1/1", log)
        shards = list((self.directory / "data" / ".layerstream").glob("*/*.safetensors"))
        self.assertEqual(len(shards), 1)
        before = shards[0].stat().st_mtime_ns
        log = self.succeeds("train", "dataset=chats.jsonl", "resume_from_checkpoint=auto", "max_steps=2")
        self.assertRegex(log, "up to date, nothing to do\n.*data: chats.jsonl: 8 records, 8 documents")
        self.assertIn("step 2/2", log)
        self.assertEqual(shards[0].stat().st_mtime_ns, before)
        self.write("chats.jsonl", *CHATS, *CHATS)
        self.assertRegex(self.succeeds("inspect-data", "dataset=chats.jsonl"), "16 records, 16 documents")

    def test_held_out_data_and_a_place_of_its_own(self):
        self.write("held.jsonl", {"text": "hello world " * 5})
        log = self.succeeds(
            "train", "dataset=chats.jsonl", "eval_dataset=held.jsonl", "tokenized_path=tokens",
            "eval_strategy=steps", "eval_steps=1",
        )
        self.assertIn("eval loss", log)
        for role in ("train", "eval"):
            self.assertTrue(list((self.directory / "tokens" / role).glob("*.safetensors")), role)

    def test_named_datasets_are_mixed(self):
        (self.directory / "data").mkdir()
        for name in ("a", "b"):
            self.write(f"data/{name}.jsonl", *[{"instruction": "hello", "input": "", "output": "world"}] * 20)
        info = {"mine": {"file_name": "a.jsonl"}, "yours": {"file_name": "b.jsonl"}}
        (self.directory / "data" / "dataset_info.json").write_text(json.dumps(info))
        self.assertIn("no dataset 'theirs'; there are mine, yours", self.refused("dataset=theirs"))
        mixed = "dataset=[mine,yours]", "mix_strategy=interleave_under", "interleave_probs=[0.8,0.2]"
        self.assertRegex(self.succeeds("train", *mixed), r"mine: 20 of \d+ documents")

    # Case 18: the mask of a conversation.

    def test_only_the_assistants_turns_are_targets_with_and_without_marks_in_the_template(self):
        for template in (CHATML, CHATML_MARKED):
            with self.subTest(template):
                self.make_model(template=template)
                tokens = self.shown("dataset=chats.jsonl", "packing=false")
                trained = "".join(text for text, is_target in tokens if is_target)
                self.assertEqual(trained, r"world<|im_end|>\nhello world<|im_end|>\n")
                self.assertIn("user", "".join(text for text, is_target in tokens if not is_target))
                log = self.succeeds("train", "dataset=chats.jsonl", f"output_dir=out{len(template)}")
                self.assertIn("step 1/1", log)

    def test_the_mask_follows_its_settings(self):
        last = self.shown("dataset=chats.jsonl", "packing=false", "mask_history=true")
        self.assertEqual("".join(text for text, is_target in last if is_target), r"hello world<|im_end|>\n")
        every = self.shown("dataset=chats.jsonl", "packing=false", "train_on_prompt=true")
        self.assertTrue(all(is_target for _, is_target in every[1:]))
        contradiction = self.refused("dataset=chats.jsonl", "mask_history=true", "train_on_prompt=true")
        self.assertIn("mask", contradiction)

    def test_a_template_that_hides_where_turns_are_is_refused_with_the_line(self):
        self.make_model(template=FORGETFUL)
        self.write("chats.jsonl", CHATS[0], {"messages": turns("hello", "<think>x</think>world", "user", "hello")})
        self.assertRegex(self.refused("dataset=chats.jsonl"), "chats.jsonl:2: .*turn")

    def test_packed_conversations_keep_their_prompts(self):
        out = self.succeeds("inspect-data", "dataset=chats.jsonl")
        self.assertNotIn("split over rows", out)
        self.assertNotIn("rows dropped", out)

    # Case 19: records longer than a row.

    def test_overlong_conversations_are_truncated_dropped_or_refused_never_silently(self):
        self.write("chats.jsonl", *CHATS, {"messages": turns("hello", "world " * 100)})
        for setting, told in (
            ("split", "9 records, 9 documents; 1 overlong, truncated"),
            ("truncate", "9 records, 9 documents; 1 overlong, truncated"),
            ("drop", "9 records, 8 documents; 1 overlong, dropped"),
        ):
            with self.subTest(setting):
                log = self.succeeds("train", "dataset=chats.jsonl", f"overlong={setting}", f"output_dir=out-{setting}")
                before_training = log[: log.index("step 1 begins")]
                self.assertIn(told, before_training)
                self.assertRegex(before_training, r"tokens of a record: .*longest [1-9]\d\d\n")
        message = self.refused("dataset=chats.jsonl", "overlong=error")
        self.assertRegex(message, "chats.jsonl:9: [0-9]+ tokens are more than the cutoff_len of 64")

    def test_overlong_plain_text_is_split_over_rows_without_loss(self):
        self.write("text.jsonl", *[{"text": "hello world " * 100}] * 3)
        out = self.succeeds("inspect-data", "dataset=text.jsonl")
        documents, tokens, rows = (out.split(word)[0].split()[-1] for word in (" documents,", " tokens\n", " of up to"))
        self.assertEqual(documents, "3")
        self.assertIn(f"full: {tokens} tokens", out)
        self.assertEqual(int(rows), -(-int(tokens) // 64))
        self.assertIn("documents split over rows: 3", out)

    # Case 27: records that cannot be used.

    def test_bad_records_are_refused_with_file_line_and_cause_or_left_out(self):
        for bad, cause in (
            ('{"messages": [', "not JSON: .* at column"),
            ('{"messages": []}', "messages"),
            ('{"other": 1}', "chats.jsonl:9: "),
        ):
            with self.subTest(bad):
                self.write("chats.jsonl", *CHATS, bad)
                message = self.refused("dataset=chats.jsonl")
                self.assertRegex(message, f"chats.jsonl:9: .*{cause}" if "9" not in cause else cause)
                self.assertNotIn("Traceback", message)
                self.assertIn("by hand: ", message)
        (self.directory / "chats.jsonl").write_bytes(json.dumps(CHATS[0]).encode() + b'\n{"text": "\xff"}\n')
        self.assertRegex(self.refused("dataset=chats.jsonl"), "chats.jsonl:2: not UTF-8: byte 10 is 0xff")
        log = self.succeeds("train", "dataset=chats.jsonl", "on_bad_line=skip")
        self.assertRegex(log, "2 records, 1 documents; 1 unusable, left out\n.*chats.jsonl:2: not UTF-8")

    def test_tokens_beyond_the_models_vocabulary_are_refused_with_file_and_line(self):
        self.make_model(vocab_size=288)
        self.write("chats.jsonl", {"text": "be"}, {"text": "be hello"})
        self.assertRegex(
            self.refused("dataset=chats.jsonl"),
            "chats.jsonl:2: token [0-9]+ is [0-9]+ .*outside the model's vocabulary of 288",
        )

    def test_a_missing_tokenizer_is_refused_with_the_remedy(self):
        (self.directory / "model" / "tokenizer.json").unlink()
        self.assertRegex(self.refused("dataset=chats.jsonl"), "tokenizer.json: no such file; .*save_pretrained")


if __name__ == "__main__":
    unittest.main()
