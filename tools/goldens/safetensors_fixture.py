"""Writes tests/golden/safetensors/reference.safetensors with the reference implementation.

    python tools/goldens/safetensors_fixture.py tests/golden/safetensors/reference.safetensors

Made with safetensors 0.8.0 and torch 2.15.0. The values are repeated in tests/io/safetensors_file_test.cpp.
"""

import sys

import torch
from safetensors.torch import save_file

TENSORS = {
    "float64": torch.tensor([0.1, -1.25, 1e300], dtype=torch.float64),
    "float32": torch.tensor([[0.1, -2.0, 3e38], [1e-45, float("inf"), -0.0]], dtype=torch.float32),
    "float16": torch.tensor([1.0, -0.5, 65504.0, 6e-8], dtype=torch.float16),
    "bfloat16": torch.tensor([1.0, -3.0, 3e38], dtype=torch.bfloat16),
    "int64": torch.tensor([-(2**63), 2**63 - 1], dtype=torch.int64),
    "int32": torch.tensor([-(2**31), 2**31 - 1], dtype=torch.int32),
    "int16": torch.tensor([-(2**15), 2**15 - 1], dtype=torch.int16),
    "int8": torch.tensor([-128, 127, 0], dtype=torch.int8),
    "uint8": torch.tensor([0, 255, 7], dtype=torch.uint8),
    "bool": torch.tensor([True, False, True], dtype=torch.bool),
    "scalar": torch.tensor(42.5, dtype=torch.float32),
    "empty": torch.zeros((0, 7), dtype=torch.float32),
    "rank5": torch.arange(32, dtype=torch.int32).reshape(2, 2, 2, 2, 2),
    'name "with" \\ and é': torch.tensor([1], dtype=torch.int64),
}

if __name__ == "__main__":
    save_file(TENSORS, sys.argv[1], metadata={"format": "pt", "note": "größer\nthan one line"})
