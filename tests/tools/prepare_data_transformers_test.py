"""tools/prepare_data reads a tokenizer as transformers does: the flags of tokens and the class LlamaTokenizer."""

import json
import subprocess
import sys
import tempfile
import unittest
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.dont_write_bytecode = True
sys.path.insert(0, str(ROOT / "tools"))

from needed_packages import missing  # noqa: E402
from prepare_data.hf_tokenizer import HfTokenizer  # noqa: E402

MISSING = missing("jinja2", "tokenizers")
if not MISSING:
    import tokenizers

SPACE = "\u2581"
TEMPLATE = (
    "{% for message in messages %}{{ '<s>' + message.role + '\\n' + message.content + '</s>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<s>assistant\\n' }}{% endif %}"
)


def flags(content, **changes):
    entry = {"lstrip": False, "rstrip": False, "single_word": False, "normalized": False, "special": True}
    return {"content": content, **entry, **changes}


def save(directory, tokenizer, model_type=None, **config):
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(directory / "tokenizer.json"))
    config = {"bos_token": "<s>", "eos_token": "</s>", "chat_template": TEMPLATE, **config}
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    if model_type:
        (directory / "config.json").write_text(json.dumps({"model_type": model_type}))
    return directory


def make_byte_level(special_tokens=("<s>", "</s>")):
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = ["<s>", "</s>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    vocab = {word: i for i, word in enumerate(words)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.add_special_tokens([tokenizers.AddedToken(t, normalized=False, special=True) for t in special_tokens])
    return tokenizer


def make_llama():
    """As Llama 2's file: its normalizer puts a space before every piece of text."""
    from tokenizers import Tokenizer, models, normalizers

    words = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), SPACE]
    words += [chr(c) for c in range(33, 127)] + [SPACE + "a"]
    vocab = {word: i for i, word in enumerate(words)}
    model = models.BPE(vocab=vocab, merges=[(SPACE, "a")], unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    tokenizer = Tokenizer(model)
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend(SPACE), normalizers.Replace(" ", SPACE)])
    tokenizer.add_special_tokens(
        [tokenizers.AddedToken(t, normalized=False, special=True) for t in ("<unk>", "<s>", "</s>")]
    )
    return tokenizer


@unittest.skipIf(MISSING, MISSING)
class ReadingTest(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = Path(folder.name)

    def tokens(self, directory, text):
        tokenizer = HfTokenizer(directory)
        return [tokenizer.token_of(i) for i in tokenizer.encode(text)[0]]

    def test_flags_of_the_config_count_where_the_file_has_others(self):
        directory = save(self.folder, make_byte_level(), added_tokens_decoder={"1": flags("</s>", rstrip=True)})
        self.assertEqual(self.tokens(directory, "a</s>\nb"), ["a", "</s>", "b"])
        save(self.folder, make_byte_level(), added_tokens_decoder={"1": flags("</s>")})
        self.assertEqual(self.tokens(directory, "a</s>\nb"), ["a", "</s>", "Ċ", "b"])

    def test_special_tokens_that_the_file_has_as_mere_words_are_not_cut(self):
        directory = save(self.folder, make_byte_level(special_tokens=()), eos_token=flags("</s>"))
        self.assertEqual(self.tokens(directory, "<s>a</s>"), ["<s>", "a", "</s>"])
        save(self.folder, make_byte_level(special_tokens=()), eos_token=None)
        self.assertNotIn("</s>", self.tokens(directory, "a</s>"))
        save(self.folder, make_byte_level(special_tokens=()), eos_token=None, additional_special_tokens=["</s>"])
        self.assertIn("</s>", self.tokens(directory, "a</s>"))

    def test_the_llama_class_puts_a_space_first_of_all_or_with_legacy_everywhere(self):
        text = "a b</s>a"
        for model_type in ("llama", None):
            for legacy, after in ((None, "a"), (False, "a"), (True, SPACE + "a")):
                with self.subTest(model_type=model_type, legacy=legacy):
                    given = {} if legacy is None else {"legacy": legacy}
                    directory = self.folder / f"{model_type}-{legacy}"
                    save(directory, make_llama(), model_type, tokenizer_class="LlamaTokenizerFast", **given)
                    self.assertEqual(self.tokens(directory, text), [SPACE + "a", SPACE, "b", "</s>", after])
        directory = save(
            self.folder / "without", make_llama(), tokenizer_class="LlamaTokenizer", add_prefix_space=False
        )
        self.assertEqual(self.tokens(directory, text), ["a", SPACE, "b", "</s>", "a"])

    def test_the_file_counts_for_other_classes_and_for_models_that_transformers_trusts(self):
        for name, model_type, tokenizer_class in (
            ("fast", "llama", "PreTrainedTokenizerFast"), ("mistral", "mistral", "LlamaTokenizer"),
        ):
            directory = save(self.folder / name, make_llama(), model_type, tokenizer_class=tokenizer_class)
            self.assertEqual(self.tokens(directory, "a</s>a"), [SPACE + "a", "</s>", SPACE + "a"])
        directory = save(self.folder / "bytes", make_byte_level(), "llama", tokenizer_class="LlamaTokenizer")
        self.assertEqual(self.tokens(directory, "a b"), ["a", "Ġ", "b"])

    def test_every_id_and_target_is_that_of_transformers(self):
        if reason := missing("safetensors.numpy", "transformers"):
            self.skipTest(reason)
        import transformers

        if int(transformers.__version__.split(".")[0]) < 5:
            self.skipTest(f"transformers {transformers.__version__} reads LlamaTokenizer's files in another way")
        marked = (
            "{% for message in messages %}{{ '<s>' + message.role + '\\n' }}"
            "{% if message.role == 'assistant' %}{% generation %}{{ message.content + '</s>' }}{% endgeneration %}"
            "{% else %}{{ message.content + '</s>' }}{% endif %}{{ '\\n' }}{% endfor %}"
        )
        directories = [
            save(self.folder / "flags", make_byte_level(), added_tokens_decoder={"1": flags("</s>", rstrip=True)}),
            save(self.folder / "words", make_byte_level(special_tokens=()), chat_template=marked),
            save(self.folder / "llama", make_llama(), "llama", tokenizer_class="LlamaTokenizer", legacy=False),
        ]
        parity = ROOT / "tools" / "parity"
        command = [sys.executable, parity / "chat_tokens.py", "--data", parity / "hard_chats.jsonl", "--tokenizers"]
        done = subprocess.run([*command, *directories], capture_output=True, text=True)
        self.assertEqual(done.returncode, 0, done.stdout + done.stderr)
        self.assertEqual(done.stdout.count("hard_chats | 40 | 0 | 0 |"), len(directories), done.stdout)


if __name__ == "__main__":
    unittest.main()
