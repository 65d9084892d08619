"""tools/ask.py with a program in layerstream's place that writes down what it is asked and answers fixed ids."""

import json
import subprocess
import sys
import tempfile
import unittest
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.dont_write_bytecode = True
sys.path.insert(0, str(ROOT / "tools"))

from prepare_data.hf_tokenizer import HfTokenizer  # noqa: E402
from tokenizer_files import MISSING, make_tokenizer  # noqa: E402

PROGRAM = """\
#!{python}
import json, pathlib, sys
here = pathlib.Path(__file__).parent
with open(here / "calls", "a") as calls:
    print(json.dumps(sys.argv[1:]), file=calls)
print((here / "ids").read_text())
sys.exit({code})
"""


@unittest.skipIf(MISSING, MISSING)
class AskTest(unittest.TestCase):
    def setUp(self):
        directory = tempfile.TemporaryDirectory()
        self.addCleanup(directory.cleanup)
        self.directory = Path(directory.name)
        self.model = make_tokenizer(self.directory / "model")
        self.tokenizer = HfTokenizer(self.model)
        self.program = self.directory / "layerstream"
        self.write_program(code=0)
        # generate does not end where the answer does.
        self.write_answer("hello world<|im_end|>\nuser")
        self.write_generation_config([self.id_of("<|eot_id|>"), self.id_of("<|im_end|>")])

    def id_of(self, text):
        (token_id,) = self.tokenizer.encode(text)[0]
        return token_id

    def write_program(self, code):
        self.program.write_text(PROGRAM.format(python=sys.executable, code=code))
        self.program.chmod(0o755)

    def write_answer(self, text):
        (self.directory / "ids").write_text(" ".join(map(str, self.tokenizer.encode(text)[0])))

    def write_generation_config(self, end):
        (self.model / "generation_config.json").write_text(json.dumps({"eos_token_id": end}))

    def ask(self, *arguments):
        return subprocess.run(
            [sys.executable, ROOT / "tools" / "ask.py", self.model, "--layerstream", self.program, *arguments],
            capture_output=True,
            text=True,
            timeout=60,
        )

    def answers(self, *arguments):
        result = self.ask(*arguments)
        self.assertEqual(result.returncode, 0, result.stderr)
        return result.stdout

    def prompts(self):
        """The texts of the ids that the program was given."""
        calls = [json.loads(line) for line in (self.directory / "calls").read_text().splitlines()]
        texts = self.tokenizer.texts()
        ids = [map(int, call[call.index("--prompt-ids") + 1].split(",")) for call in calls]
        return ["".join(texts[i] for i in prompt) for prompt in ids]

    def test_question_in_the_chat_template(self):
        self.assertEqual(self.answers("hello"), "> hello\nhello world\n\n")
        self.assertEqual(
            self.prompts(),
            ["<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n"],
        )

    def test_system_message(self):
        self.answers("hello", "--system", "user")
        self.assertTrue(self.prompts()[0].startswith("<|im_start|>system\nuser<|im_end|>\n"))

    def test_questions_are_conversations_or_turns_of_one(self):
        self.answers("hello", "world")
        self.assertNotIn("hello", self.prompts()[1])
        self.answers("hello", "world", "--chat")
        self.assertIn(
            "user\nhello<|im_end|>\n<|im_start|>assistant\nhello world<|im_end|>\n<|im_start|>user\nworld",
            self.prompts()[3],
        )

    def test_answer_without_an_end(self):
        self.write_answer("hello world")
        self.assertEqual(self.answers("hello"), "> hello\nhello world\n\n")

    def test_end_of_the_tokenizer_where_the_model_names_none(self):
        (self.model / "generation_config.json").unlink()
        self.write_answer("world<|end|>hello")
        self.assertEqual(self.answers("hello"), "> hello\nworld\n\n")

    def test_failure_of_the_program(self):
        self.write_program(code=2)
        self.assertEqual(self.ask("hello").returncode, 2)

    def test_program_that_is_not_there(self):
        self.program.unlink()
        result = self.ask("hello")
        self.assertEqual(result.returncode, 1)
        self.assertIn("--layerstream names the program", result.stderr)

    def test_model_without_template(self):
        make_tokenizer(self.model, template=None)
        self.assertIn("no chat template", self.ask("hello").stderr)


if __name__ == "__main__":
    unittest.main()
