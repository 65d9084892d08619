#!/usr/bin/env python3
"""Writes tests/golden/rope.json: rotary embeddings as transformers computes them on a CPU.

    python tools/goldens/rope_goldens.py [output.json]

Needs torch and transformers. Each case goes through LlamaRotaryEmbedding, the path a model takes
(including its updates by sequence length), and, where the type has one, through ROPE_INIT_FUNCTIONS. Floats
are written with nine digits, which is enough to read back the exact fp32.
"""

import json
import math
import pathlib
import platform
import sys

import torch
import transformers
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

SHORT = [1.0 + 0.01 * i for i in range(32)]
LONG = [1.0 + 0.05 * i * i for i in range(32)]


def case(name, head_dim, max_positions, length, parameters):
    return dict(name=name, head_dim=head_dim, max_position_embeddings=max_positions, sequence_length=length,
                rope_parameters=parameters)


def yarn(theta=1e6, factor=4.0, original=32768, **more):
    return dict(rope_type="yarn", rope_theta=theta, factor=factor, original_max_position_embeddings=original,
                **more)


def longrope(**more):
    return dict(rope_type="longrope", rope_theta=10000.0, short_factor=SHORT, long_factor=LONG,
                original_max_position_embeddings=4096, **more)


LLAMA31 = dict(rope_type="llama3", rope_theta=500000.0, factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0,
               original_max_position_embeddings=8192)

CASES = [
    case("default, theta 1e4", 64, 4096, 4096, dict(rope_type="default", rope_theta=10000.0)),
    case("default, Qwen2.5", 128, 32768, 32768, dict(rope_type="default", rope_theta=1000000.0)),
    case("default, odd half", 20, 2048, 333, dict(rope_type="default", rope_theta=10000.0)),
    case("linear", 64, 8192, 8192, dict(rope_type="linear", rope_theta=10000.0, factor=3.0)),
    case("dynamic, within", 64, 4096, 4096, dict(rope_type="dynamic", rope_theta=10000.0, factor=2.0)),
    case("dynamic, one beyond", 64, 4096, 4097, dict(rope_type="dynamic", rope_theta=10000.0, factor=2.0)),
    case("dynamic, far beyond", 64, 4096, 20000, dict(rope_type="dynamic", rope_theta=10000.0, factor=4.0)),
    case("llama3, Llama 3.1", 128, 131072, 131072, LLAMA31),
    case("llama3, Llama 3.2", 64, 131072, 16384, {**LLAMA31, "factor": 32.0}),
    case("yarn, Qwen2.5 long", 128, 131072, 131072, yarn()),
    case("yarn, not truncated", 64, 131072, 40000,
         yarn(theta=150000.0, factor=32.0, original=4096, truncate=False)),
    case("yarn, equal mscale", 64, 163840, 8192,
         yarn(theta=10000.0, factor=40.0, original=4096, mscale=1.0, mscale_all_dim=1.0)),
    case("yarn, mscale", 64, 163840, 8192,
         yarn(theta=10000.0, factor=40.0, original=4096, mscale=0.707, mscale_all_dim=1.2)),
    case("yarn, betas and attention factor", 64, 8192, 8192,
         yarn(theta=10000.0, factor=2.0, original=4096, beta_fast=16.0, beta_slow=2.0, attention_factor=1.25)),
    case("yarn, no factor", 64, 16384, 8192, yarn(theta=10000.0, factor=None, original=4096)),
    case("longrope, short", 64, 131072, 4096, longrope()),
    case("longrope, long", 64, 131072, 4097, longrope()),
    case("longrope, factor", 64, 131072, 9000, longrope(factor=4.0)),
    case("longrope, attention factor", 64, 131072, 100, longrope(attention_factor=1.5)),
]


def numbers(tensor):
    return [float(f"{x:.9g}") for x in tensor.flatten().tolist()]


def compute(entry):
    config = LlamaConfig(hidden_size=2 * entry["head_dim"], num_attention_heads=2, head_dim=entry["head_dim"],
                         max_position_embeddings=entry["max_position_embeddings"],
                         rope_parameters=dict(entry["rope_parameters"]))
    length = entry["sequence_length"]
    embedding = LlamaRotaryEmbedding(config)
    cos, sin = embedding(torch.zeros(1), torch.arange(length)[None])
    half = entry["head_dim"] // 2
    rows = sorted({1, length // 2, length - 1})
    entry["inverse_frequencies"] = numbers(embedding.inv_freq)
    entry["attention_scaling"] = float(embedding.attention_scaling)
    entry["rows"] = [dict(position=p, cos=numbers(cos[0, p, :half]), sin=numbers(sin[0, p, :half])) for p in rows]

    rope_type = entry["rope_parameters"]["rope_type"]
    if rope_type in ROPE_INIT_FUNCTIONS:
        inverse, scaling = ROPE_INIT_FUNCTIONS[rope_type](config, None, seq_len=length)
        assert math.isclose(scaling, entry["attention_scaling"], rel_tol=1e-15), entry["name"]
        # The model computes the dynamic base in fp32, a direct call in double: all else is equal.
        torch.testing.assert_close(inverse, embedding.inv_freq, rtol=3e-6 if rope_type == "dynamic" else 0, atol=0)
    return entry


def main():
    default = pathlib.Path(__file__).resolve().parents[2] / "tests" / "golden" / "rope.json"
    output = pathlib.Path(sys.argv[1]) if len(sys.argv) > 1 else default
    made_by = dict(script="tools/goldens/rope_goldens.py", transformers=transformers.__version__,
                   torch=torch.__version__, python=platform.python_version(),
                   cpu_capability=torch.backends.cpu.get_cpu_capability())
    cases = [json.dumps(compute(entry)) for entry in CASES]
    output.write_text('{"made_by": ' + json.dumps(made_by) + ',\n"cases": [\n' + ",\n".join(cases) + "\n]}\n")


if __name__ == "__main__":
    main()
