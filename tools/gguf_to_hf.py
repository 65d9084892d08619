#!/usr/bin/env python3
"""Makes a Hugging Face model directory of a GGUF file of the llama architecture.

    python tools/gguf_to_hf.py SmolLM2-135M-Instruct.Q4_1.gguf models/smollm2 [--dtype bfloat16]

Quantised weights are multiplied out; float32, the default, holds what the file says exactly. Writes config.json,
generation_config.json, model.safetensors, and the tokenizer with its chat template. Needs gguf, torch, transformers.
"""

import argparse
import re
import sys
from pathlib import Path

import gguf
import numpy
import torch
import transformers
from safetensors.torch import save_file
from tokenizers import pre_tokenizers

# GGUF's name of a tensor, within a layer or without: Hugging Face's.
OUTSIDE = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",  # absent where embeddings are tied
}
IN_LAYER = {
    "attn_norm.weight": "input_layernorm.weight",
    "attn_q.weight": "self_attn.q_proj.weight",
    "attn_k.weight": "self_attn.k_proj.weight",
    "attn_v.weight": "self_attn.v_proj.weight",
    "attn_output.weight": "self_attn.o_proj.weight",
    "ffn_norm.weight": "post_attention_layernorm.weight",
    "ffn_gate.weight": "mlp.gate_proj.weight",
    "ffn_up.weight": "mlp.up_proj.weight",
    "ffn_down.weight": "mlp.down_proj.weight",
}
# Pre-tokenizers of byte-level vocabularies by GGUF's name; None: transformers makes it from the file itself.
PRE_TOKENIZERS = {
    "gpt-2": None,
    "llama-bpe": None,
    "smollm": lambda: pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    ),
}


class ConversionError(Exception):
    pass


class GgufFile:
    """Throws ConversionError for a file that is not a plain llama."""

    def __init__(self, path):
        self.path = path
        try:
            self._reader = gguf.GGUFReader(path)
        except (OSError, ValueError) as error:
            raise ConversionError(f"{path}: not readable as GGUF: {error}") from None
        architecture = self.get("general.architecture")
        if architecture != "llama":
            raise ConversionError(f"{path}: the architecture is {architecture}; only llama is converted")
        scaling = self.get("llama.rope.scaling.type", "none")
        if scaling != "none":
            raise ConversionError(f"{path}: llama.rope.scaling.type is {scaling}; only unscaled rope is converted")

    _REQUIRED = object()

    def get(self, key, default=_REQUIRED):
        field = self._reader.get_field(key)
        if field is not None:
            return field.contents()
        if default is self._REQUIRED:
            raise ConversionError(f"{self.path}: no {key} in the file's metadata")
        return default

    def get_float(self, key, default=_REQUIRED):
        """The shortest decimal that is this float32: 1e-05, not 9.999999747378752e-06."""
        return float(str(numpy.float32(self.get(key, default))))

    def tensors(self):
        """(Hugging Face's name, GGUF's tensor), in the file's order."""
        for tensor in self._reader.tensors:
            layer = re.fullmatch(r"blk\.(\d+)\.(.+)", tensor.name)
            if layer and layer[2] in IN_LAYER:
                yield f"model.layers.{layer[1]}.{IN_LAYER[layer[2]]}", tensor
            elif tensor.name in OUTSIDE:
                yield OUTSIDE[tensor.name], tensor
            else:
                raise ConversionError(f"{self.path}: tensor {tensor.name} has no place in a plain llama")


def make_config(file, dtype):
    names = {name for name, _ in file.tensors()}
    rows = {name: int(tensor.shape[-1]) for name, tensor in file.tensors()}
    hidden, heads = file.get("llama.embedding_length"), file.get("llama.attention.head_count")
    return transformers.LlamaConfig(
        architectures=["LlamaForCausalLM"],
        vocab_size=rows["model.embed_tokens.weight"],
        hidden_size=hidden,
        intermediate_size=file.get("llama.feed_forward_length"),
        num_hidden_layers=file.get("llama.block_count"),
        num_attention_heads=heads,
        num_key_value_heads=file.get("llama.attention.head_count_kv", heads),
        head_dim=file.get("llama.attention.key_length", hidden // heads),
        max_position_embeddings=file.get("llama.context_length"),
        rms_norm_eps=file.get_float("llama.attention.layer_norm_rms_epsilon"),
        rope_parameters={"rope_type": "default", "rope_theta": file.get_float("llama.rope.freq_base", 10000.0)},
        tie_word_embeddings="lm_head.weight" not in names,
        bos_token_id=file.get("tokenizer.ggml.bos_token_id", None),
        eos_token_id=file.get("tokenizer.ggml.eos_token_id", None),
        pad_token_id=file.get("tokenizer.ggml.padding_token_id", None),
        dtype=dtype,
    )


def halves_from_pairs(weight, heads):
    """Rows of q or k: GGUF puts the two that rope turns together next to each other, Hugging Face half a head apart."""
    return weight.reshape(heads, -1, 2, weight.shape[1]).transpose(1, 2).reshape(weight.shape)


def make_weights(file, config, dtype):
    with torch.device("meta"):
        shapes = {name: weight.shape for name, weight in transformers.LlamaForCausalLM(config).state_dict().items()}
    if config.tie_word_embeddings:
        del shapes["lm_head.weight"]
    weights = {}
    for name, tensor in file.tensors():
        weight = torch.from_numpy(gguf.quants.dequantize(tensor.data, tensor.tensor_type).copy())
        if name not in shapes or weight.shape != shapes[name]:
            expected = tuple(shapes[name]) if name in shapes else "no such tensor"
            raise ConversionError(f"{file.path}: {tensor.name} is {tuple(weight.shape)}; by the metadata {expected}")
        if "q_proj" in name:
            weight = halves_from_pairs(weight, config.num_attention_heads)
        elif "k_proj" in name:
            weight = halves_from_pairs(weight, config.num_key_value_heads)
        weights[name] = weight.to(dtype).contiguous()
    if missing := shapes.keys() - weights.keys():
        raise ConversionError(f"{file.path}: no tensors for {', '.join(sorted(missing))}")
    return weights


def make_tokenizer(file):
    tokenizer = transformers.AutoTokenizer.from_pretrained(file.path.parent, gguf_file=file.path.name)
    if file.get("tokenizer.ggml.model") == "gpt2":
        pre = file.get("tokenizer.ggml.pre")
        if pre not in PRE_TOKENIZERS:
            raise ConversionError(
                f"{file.path}: tokenizer.ggml.pre is {pre}; known are {', '.join(PRE_TOKENIZERS)}. Take the "
                "tokenizer's files from the model's Hugging Face directory, and use --no-tokenizer"
            )
        if PRE_TOKENIZERS[pre]:
            tokenizer.backend_tokenizer.pre_tokenizer = PRE_TOKENIZERS[pre]()
    return tokenizer


def convert(path, output, dtype, with_tokenizer=True):
    """Returns the number of parameters."""
    file = GgufFile(path)
    tokenizer = make_tokenizer(file) if with_tokenizer else None  # before the long part, for its errors
    config = make_config(file, dtype)
    weights = make_weights(file, config, dtype)
    output.mkdir(parents=True, exist_ok=True)
    config.save_pretrained(output)
    transformers.GenerationConfig.from_model_config(config).save_pretrained(output)
    if tokenizer:
        tokenizer.save_pretrained(output)
    save_file(weights, output / "model.safetensors", metadata={"format": "pt"})
    return sum(weight.numel() for weight in weights.values())


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("gguf", type=Path)
    parser.add_argument("output", type=Path)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32", help="of the weights written")
    parser.add_argument("--no-tokenizer", action="store_true", help="weights and config alone")
    arguments = parser.parse_args()
    transformers.logging.set_verbosity_error()
    try:
        count = convert(
            arguments.gguf, arguments.output, getattr(torch, arguments.dtype), not arguments.no_tokenizer
        )
    except ConversionError as error:
        sys.exit(f"gguf_to_hf: {error}")
    print(f"{arguments.output}: {count:,} parameters, {arguments.dtype}")


if __name__ == "__main__":
    main()
