#!/usr/bin/env python3
"""Loads an exported model with Hugging Face transformers and checks that every weight is there.

    python tools/check_export.py runs/x/export [--source models/y]

Fails when a key is missing, unexpected or of the wrong shape, when a weight is not finite, or, with --source,
when the two models differ in their config (the dtype apart) or in the names and shapes of their weights.
Prints OK and what was loaded.
"""

import argparse
import sys
from pathlib import Path

import torch
import transformers


def load(directory, dtype):
    model, info = transformers.AutoModelForCausalLM.from_pretrained(
        directory, dtype=dtype, output_loading_info=True, local_files_only=True
    )
    problems = [
        f"{directory}: {kind.replace('_', ' ')}: {sorted(map(str, info[kind]))}"
        for kind in ("missing_keys", "unexpected_keys", "mismatched_keys")
        if info[kind]
    ]
    return model, problems


def shapes_of(model):
    return {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}


def config_of(model):
    ignored = ("dtype", "torch_dtype", "transformers_version", "_name_or_path")
    return {key: value for key, value in model.config.to_dict().items() if key not in ignored}


def differences(model, source):
    problems = []
    ours, theirs = config_of(model), config_of(source)
    for key in sorted(ours.keys() | theirs.keys()):
        if ours.get(key) != theirs.get(key):
            problems.append(f"config {key}: {ours.get(key)!r}, in the source {theirs.get(key)!r}")
    ours, theirs = shapes_of(model), shapes_of(source)
    for name in sorted(ours.keys() | theirs.keys()):
        if ours.get(name) != theirs.get(name):
            problems.append(f"weight {name}: {ours.get(name)}, in the source {theirs.get(name)}")
    return problems


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--source", type=Path, help="the model that training started from")
    arguments = parser.parse_args()
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()

    model, problems = load(arguments.directory, "auto")
    problems += [f"weight {n} is not finite" for n, p in model.named_parameters() if not torch.isfinite(p).all()]
    if arguments.source:
        source, source_problems = load(arguments.source, "auto")
        problems += source_problems + differences(model, source)
    if problems:
        sys.exit("\n".join(problems))
    num_parameters = sum(p.numel() for p in model.parameters())
    print(f"OK {type(model).__name__}, {num_parameters:,} parameters, {model.dtype}")


if __name__ == "__main__":
    main()
