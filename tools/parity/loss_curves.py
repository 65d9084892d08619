#!/usr/bin/env python3
"""Trains small models of every family with a layerstream binary and with Hugging Face transformers, and compares.

    python tools/parity/loss_curves.py build/cuda/src/cli/layerstream

Both start from the same files and take 50 AdamW steps; transformers runs on the GPU if there is one. The exact
result is transformers in double precision. Against it, ours and transformers' own error in the same dtype:

  loss max, mean   |loss - exact| / exact over the steps
  norm             the same for the first step's gradient norm, before clipping
  weights          |w - exact w| / |exact w - start|: of all weights after the last step, as exported

transformers' bf16 runs twice: with the whole model in bf16 over fp32 master weights, and under autocast (which
keeps the residual stream in fp32). Exit code 1 when a limit is broken (see limits.py), a run fails, or
transformers does not load an export as the model that it started from.

A GPU is compared with a CPU by way of a record, which may come from another machine:

    python tools/parity/loss_curves.py build/cpu/src/cli/layerstream --engine-only --steps 10 --record cpu.json
    python tools/parity/loss_curves.py build/cuda/src/cli/layerstream --against cpu.json
"""

import argparse
import concurrent.futures
import dataclasses
import json
import sys
from pathlib import Path

import torch

sys.path[1:1] = [str(Path(__file__).parents[1]), str(Path(__file__).parents[1] / "goldens")]

import check_export  # noqa: E402
import engine  # noqa: E402
import models  # noqa: E402
import program  # noqa: E402
import reference  # noqa: E402
from curve import Curve, Recipe  # noqa: E402
from limits import LIMITS, NOISE, Errors, broken_limits, print_header, print_row  # noqa: E402

RECIPE = Recipe()

# Largest difference of loss and of first norm between two builds, which round at the same places but sum in
# different orders. The losses are those of the first steps: noise grows with the steps, as it does between
# transformers' runs (bf16 at step 8 of mistral: 3e-4).
BUILD_STEPS = 10
BETWEEN_BUILDS = {"fp32": (1e-6, 1e-6), "bf16": (2**-10, 2**-9)}


def export_problems(folder, dtype):
    model, problems = check_export.load(folder / f"export.{dtype}", "auto")
    source, source_problems = check_export.load(folder / "model", "auto")
    return problems + source_problems + check_export.differences(model, source)


@dataclasses.dataclass
class Inputs:
    case: models.Case
    folder: Path
    weights: dict
    rows: torch.Tensor

    @staticmethod
    def make(case, scratch):
        inputs = Inputs(case, scratch / case.name, models.random_weights(case), models.random_rows(case))
        inputs.folder.mkdir(parents=True)
        models.save_model(case, inputs.weights, inputs.folder / "model")
        models.save_rows(inputs.rows, inputs.folder / "rows.safetensors")
        return inputs


def compare_with_transformers(inputs, ours, steps, problems):
    def run(kind):
        calls = [{"input_ids": inputs.rows, "labels": inputs.rows}]
        return reference.train(inputs.case.model_config, inputs.weights, [calls] * steps, kind, RECIPE)

    def errors(curve):
        return Errors.of(curve, exact, inputs.weights)

    name = inputs.case.name
    exact = run("fp64")
    for dtype, curve in ours.items():
        theirs = {kind: errors(run(kind)) for kind in NOISE[dtype]}
        own = errors(curve)
        for kind, noise in theirs.items():
            print_row(name, kind, own, noise)
        broken = broken_limits(own, Errors.largest(theirs.values()), LIMITS[dtype])
        problems += [f"{name} {dtype}: {problem}" for problem in broken]
        problems += [f"{name} {dtype}: export: {problem}" for problem in export_problems(inputs.folder, dtype)]


def record_of(inputs, ours):
    curves = {dtype: {"loss": curve.losses, "grad_norm": curve.grad_norms} for dtype, curve in ours.items()}
    return {"start": models.digest(inputs.weights, inputs.rows), "curves": curves}


def compare_with_record(name, now, record, problems):
    """A shorter run is the beginning of a longer one: the learning rate is constant."""
    if name not in record or record[name]["start"] != now["start"]:
        problems.append(f"{name}: the record holds no run from the same weights and rows")
        return
    for dtype in sorted(now["curves"].keys() & record[name]["curves"].keys()):
        both = [curves["curves"][dtype] for curves in (now, record[name])]
        steps = min(BUILD_STEPS, *(len(curve["loss"]) for curve in both))
        ours, other = (Curve(curve["loss"][:steps], curve["grad_norm"][:steps]) for curve in both)
        loss, norm = max(ours.loss_errors(other)), ours.norm_errors(other)[0]
        print(f"{name:12}{dtype:14}from the record, {steps} steps: loss max {loss:.1e}, norm {norm:.1e}", flush=True)
        loss_limit, norm_limit = BETWEEN_BUILDS[dtype]
        if not (loss <= loss_limit and norm <= norm_limit):
            problems.append(f"{name} {dtype}: from the record, at most {loss_limit:.1e} and {norm_limit:.1e} allowed")


def train_ours(arguments, inputs):
    data = {
        "model_name_or_path": str(inputs.folder / "model"),
        "train_file": str(inputs.folder / "rows.safetensors"),
        "cutoff_len": models.SEQUENCE,
        "packing": False,
        "per_device_train_batch_size": models.ROWS,
    }
    targets = [models.ROWS * (models.SEQUENCE - 1)] * arguments.steps
    return {
        dtype: engine.train(arguments.binary, inputs.folder, data, targets, RECIPE, dtype, arguments.set)
        for dtype in arguments.dtypes
    }


def compare(arguments, scratch, problems):
    cases = [case for case in models.CASES if not arguments.only or case.name in arguments.only]
    all_inputs = [Inputs.make(case, scratch) for case in cases]
    record = {}
    against = json.loads(arguments.against.read_text()) if arguments.against else None
    if not arguments.engine_only:
        print_header()
    # The engine's processes run beside this one's transformers.
    with concurrent.futures.ThreadPoolExecutor(max_workers=1) as pool:
        runs = [pool.submit(train_ours, arguments, inputs) for inputs in all_inputs]
        for inputs, run in zip(all_inputs, runs, strict=True):
            name = inputs.case.name
            try:
                ours = run.result()
            except engine.EngineFailure as failure:
                problems.append(f"{name}: {failure}")
                continue
            record[name] = record_of(inputs, ours)
            if against is not None:
                compare_with_record(name, record[name], against, problems)
            if not arguments.engine_only:
                compare_with_transformers(inputs, ours, arguments.steps, problems)
    if arguments.record:
        arguments.record.write_text(json.dumps(record, indent=1) + "\n")


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("binary", type=Path, help="layerstream")
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--only", nargs="+", choices=[case.name for case in models.CASES], help="these models")
    parser.add_argument("--dtypes", nargs="+", choices=sorted(NOISE), default=["fp32", "bf16"])
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="passed to layerstream train")
    parser.add_argument("--engine-only", action="store_true", help="no transformers, for --record and --against")
    parser.add_argument("--record", type=Path, metavar="FILE", help="write our curves")
    parser.add_argument("--against", type=Path, metavar="FILE", help="compare our curves with recorded ones")
    parser.add_argument("--scratch", type=Path, help="keep models, runs and exports in this new directory")
    arguments = parser.parse_args()
    if not arguments.binary.is_file():
        parser.error(f"{arguments.binary}: no such file")
    arguments.binary = arguments.binary.resolve()
    return arguments


def main():
    arguments = parse_arguments()
    program.run(arguments, f"{arguments.steps} steps of {models.ROWS} rows of {models.SEQUENCE} tokens", compare)


if __name__ == "__main__":
    main()
