"""tools/gguf_to_hf.py on a tiny model that the gguf package writes: weights, config, tokenizer, errors."""

import json
import sys
import tempfile
import unittest
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.dont_write_bytecode = True
sys.path.insert(0, str(ROOT / "tools"))

from needed_packages import missing  # noqa: E402

MISSING = missing("gguf", "numpy", "torch", "transformers", "gguf_to_hf")
if not MISSING:
    import gguf
    import numpy
    import torch
    import transformers

    import gguf_to_hf

HIDDEN, HEADS, KV_HEADS, HEAD_DIM, LAYERS, FEED_FORWARD = 64, 4, 2, 16, 2, 96
SPECIAL, TEMPLATE = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"], "{{ messages[0].content }}"


def bytes_as_characters():
    """GPT-2's 256 characters for bytes."""
    from tokenizers import pre_tokenizers

    return sorted(pre_tokenizers.ByteLevel.alphabet())


def pairs_from_halves(weight, heads):
    """As llama.cpp's converter does it: rows i and i + half of a head become neighbours."""
    rows = []
    for head in weight.reshape(heads, -1, weight.shape[1]):
        for i in range(len(head) // 2):
            rows += [head[i], head[i + len(head) // 2]]
    return numpy.stack(rows)


@unittest.skipIf(MISSING, MISSING)
class GgufToHfTest(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = Path(folder.name)
        self.tokens = SPECIAL + bytes_as_characters() + ["he", "Ġw"]

    def make_model(self, tied):
        torch.manual_seed(1)
        config = transformers.LlamaConfig(
            vocab_size=len(self.tokens), hidden_size=HIDDEN, intermediate_size=FEED_FORWARD, num_hidden_layers=LAYERS,
            num_attention_heads=HEADS, num_key_value_heads=KV_HEADS, max_position_embeddings=512,
            rms_norm_eps=1e-5, rope_parameters={"rope_type": "default", "rope_theta": 100000.0},
            tie_word_embeddings=tied,
        )
        return transformers.LlamaForCausalLM(config)

    def write(self, model, quantize=(), leave_out=(), **changes):
        """Returns the file's path."""
        path = self.folder / "model.gguf"
        values = {
            "architecture": "llama", "eps": 1e-5, "pre": "smollm", "eos": 2, "extra_tensor": None, **changes,
        }
        writer = gguf.GGUFWriter(path, values["architecture"])
        writer.add_name("a model")
        writer.add_block_count(LAYERS)
        writer.add_context_length(512)
        writer.add_embedding_length(HIDDEN)
        writer.add_feed_forward_length(FEED_FORWARD)
        writer.add_head_count(HEADS)
        writer.add_head_count_kv(KV_HEADS)
        writer.add_rope_freq_base(100000.0)
        writer.add_layer_norm_rms_eps(values["eps"])
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre(values["pre"])
        writer.add_token_list(self.tokens)
        writer.add_token_types([3] * len(SPECIAL) + [1] * (len(self.tokens) - len(SPECIAL)))
        writer.add_token_merges(["h e", "Ġ w"])
        writer.add_bos_token_id(1)
        writer.add_eos_token_id(values["eos"])
        writer.add_chat_template(TEMPLATE)
        if values["extra_tensor"]:
            writer.add_tensor(values["extra_tensor"], numpy.zeros(8, numpy.float32))
        names = {hf: name for name, hf in gguf_to_hf.OUTSIDE.items()}
        names |= {
            f"model.layers.{i}.{hf}": f"blk.{i}.{name}"
            for i in range(LAYERS) for name, hf in gguf_to_hf.IN_LAYER.items()
        }
        for hf, weight in model.state_dict().items():
            if hf == "lm_head.weight" and model.config.tie_word_embeddings or hf in leave_out:
                continue
            weight = weight.numpy()
            if "q_proj" in hf or "k_proj" in hf:
                weight = pairs_from_halves(weight, HEADS if "q_proj" in hf else KV_HEADS)
            kind = gguf.GGMLQuantizationType.Q8_0 if hf in quantize else gguf.GGMLQuantizationType.F32
            writer.add_tensor(names[hf], gguf.quants.quantize(weight, kind), raw_dtype=kind)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return path

    def convert(self, path, dtype="float32"):
        output = self.folder / "model"
        gguf_to_hf.convert(path, output, getattr(torch, dtype))
        return output

    def test_the_same_model_comes_back(self):
        for tied in (True, False):
            with self.subTest(tied=tied):
                source = self.make_model(tied)
                output = self.convert(self.write(source))
                model = transformers.AutoModelForCausalLM.from_pretrained(output)
                self.assertEqual(model.config.tie_word_embeddings, tied)
                self.assertEqual(model.config.rms_norm_eps, 1e-5)
                self.assertEqual(model.config.eos_token_id, 2)
                for name, weight in source.state_dict().items():
                    self.assertTrue(torch.equal(model.state_dict()[name], weight), name)
                ids = torch.arange(24).reshape(2, 12)
                with torch.no_grad():
                    self.assertTrue(torch.equal(model(ids).logits, source(ids).logits))

    def test_quantised_weights_are_multiplied_out_and_bfloat16_is_rounded_to(self):
        source = self.make_model(True)
        name = "model.layers.1.mlp.down_proj.weight"
        weight = source.state_dict()[name]
        path = self.write(source, quantize=[name])
        model = transformers.AutoModelForCausalLM.from_pretrained(self.convert(path))
        error = (model.state_dict()[name] - weight).abs().reshape(-1, 32).amax(1)
        step = weight.abs().reshape(-1, 32).amax(1) / 127
        self.assertTrue((error <= step * 0.57).all())  # rounding: half a step; the scale in half precision: 127/2048
        self.assertGreater(error.max(), 0)
        half = transformers.AutoModelForCausalLM.from_pretrained(self.convert(path, "bfloat16"), dtype="auto")
        self.assertTrue(torch.equal(half.state_dict()[name], model.state_dict()[name].bfloat16()))

    def test_tokenizer_and_template(self):
        output = self.convert(self.write(self.make_model(True)))
        tokenizer = transformers.AutoTokenizer.from_pretrained(output)
        tokens = tokenizer.tokenize("<|im_start|>he   12 world")
        self.assertEqual(tokens[:2], ["<|im_start|>", "he"])
        self.assertEqual(tokens[2:7], ["Ġ", "Ġ", "Ġ", "1", "2"])
        self.assertEqual(tokens[7], "Ġw")
        self.assertEqual(tokenizer.eos_token, "<|im_end|>")
        self.assertEqual(tokenizer.chat_template, TEMPLATE)
        splits = json.loads(tokenizer.backend_tokenizer.to_str())["pre_tokenizer"]["pretokenizers"]
        self.assertEqual([split["type"] for split in splits], ["Digits", "ByteLevel"])

    def test_files_that_are_not_a_plain_llama_are_refused(self):
        model = self.make_model(True)
        missing = "model.layers.1.mlp.up_proj.weight"
        for cause, made in (
            ("architecture is qwen2", lambda: self.write(model, architecture="qwen2")),
            ("tokenizer.ggml.pre is unheard-of", lambda: self.write(model, pre="unheard-of")),
            ("rope_freqs.weight has no place", lambda: self.write(model, extra_tensor="rope_freqs.weight")),
            (f"no tensors for {missing}", lambda: self.write(model, leave_out=[missing])),
        ):
            with self.subTest(cause), self.assertRaisesRegex(gguf_to_hf.ConversionError, cause):
                self.convert(made())
        self.assertFalse((self.folder / "model").exists())
        path = self.folder / "other"
        path.write_bytes(b"no such format here, whatever the name says")
        with self.assertRaisesRegex(gguf_to_hf.ConversionError, "not readable as GGUF"):
            self.convert(path)


if __name__ == "__main__":
    unittest.main()
