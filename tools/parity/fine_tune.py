#!/usr/bin/env python3
"""Fine-tunes a model with a layerstream binary and with transformers and torch's AdamW, on the same batches.

    python tools/parity/fine_tune.py build/cuda/src/cli/layerstream --model models/x --train-file data/chats \\
        --out curves.csv

Both start from the same files and see the same rows in the same order: documents packed into rows, without attending
to each other. The learning rate warms up and falls along a cosine, gradients are clipped. As in loss_curves.py the
exact result is transformers in double precision, and our error is held against transformers' own in the same dtype.
transformers runs without the configuration's pad_token_id (see `Model.config`).
Prints the curves side by side and the errors, and writes the curves of every step. Exit code 1 when a limit is broken
(see limits.py), learning rates differ, clipping changed no step, or a run fails.
"""

import argparse
import concurrent.futures
import csv
import math
import sys
import time
from pathlib import Path

import numpy as np
import torch
import transformers

sys.path[1:1] = [str(Path(__file__).parents[1]), str(Path(__file__).parents[1] / "goldens")]

import batches  # noqa: E402
import check_export  # noqa: E402
import engine  # noqa: E402
import program  # noqa: E402
import reference  # noqa: E402
from curve import Recipe, relative_errors  # noqa: E402
from limits import LIMITS, NOISE, Errors, broken_limits, print_header, print_row  # noqa: E402
from reference_fp64 import Fp64Mode  # noqa: E402

SEED = 42
LINES = 11  # of the curves that are printed

# Double precision leaves this between a packed row and its documents, which are summed in another order.
APART = 1e-12
# The schedules compute the same formula in double; in units in the last place of the highest rate, for there is a
# cosine in it whose last bit is the mathematics library's.
RATE_ULPS = 2


class Model:
    """A Hugging Face directory. Throws SystemExit for one that transformers cannot load whole."""

    def __init__(self, directory):
        model, problems = check_export.load(directory, torch.float32)
        if problems:
            sys.exit("\n".join(problems))
        self.directory = directory
        self.weights = {name: parameter.detach() for name, parameter in model.named_parameters()}

    def config(self, attention):
        """Without a padding token: transformers keeps the lookups of that one out of its embedding's gradient, also
        where it is a token of the text, as in chats whose turns end with it."""
        config = transformers.AutoConfig.from_pretrained(
            self.directory, attn_implementation=attention, use_cache=False, local_files_only=True
        )
        config.pad_token_id = None
        return config


def calls_of(rows, indices, num_targets):
    """The arguments of a call of the model. transformers tells documents apart by positions that begin anew."""
    return {
        "input_ids": torch.from_numpy(rows.input_ids[indices]),
        "position_ids": torch.from_numpy(rows.positions[indices]),
        "labels": torch.from_numpy(rows.labels[indices]),
        "num_items_in_batch": num_targets,  # what the sum of the losses is divided by
    }


def steps_of(rows, order, rows_per_call):
    steps = []
    for indices in order:
        num_targets = rows.num_targets(indices)
        parts = [indices[begin : begin + rows_per_call] for begin in range(0, len(indices), rows_per_call)]
        steps.append([calls_of(rows, part, num_targets) for part in parts])
    return steps


def documents_apart_error(model, rows):
    """How far the loss of a row of several documents is from that of its documents alone, relative, in FP64."""
    row = int((rows.positions == 0).sum(axis=1).argmax())
    packed = calls_of(rows, [row], 1)
    starts = np.flatnonzero(rows.positions[row] == 0)
    pieces = np.split(np.arange(rows.input_ids.shape[1]), starts[1:])
    worst = 0.0
    with Fp64Mode(), torch.no_grad():
        weights = {name: weight.double() for name, weight in model.weights.items()}
        network = reference.build(model.config("eager"), weights)
        for attention in ("eager", "sdpa"):
            network.set_attn_implementation(attention)

            def loss(inputs):
                return network(**reference.on_device(inputs)).loss.item()

            alone = sum(
                loss({key: value[:, piece] if torch.is_tensor(value) else value for key, value in packed.items()})
                for piece in pieces
            )
            worst = max(worst, abs(loss(packed) - alone) / alone)
    return worst


def train_ours(arguments, folder, targets, recipe):
    data = {
        "model_name_or_path": str(arguments.model),
        "train_file": [str(shard) for shard in arguments.shards],
        "cutoff_len": arguments.cutoff_len,
        "packing": True,
        "overlong": "split",
        "seed": SEED,
        "per_device_train_batch_size": arguments.rows_per_step,
    }
    return {
        dtype: engine.train(arguments.binary, folder, data, targets, recipe, dtype, arguments.set)
        for dtype in arguments.dtypes
    }


def rate_ulps(ours, theirs, peak):
    return max(abs(a - b) for a, b in zip(ours.learning_rates, theirs.learning_rates, strict=True)) / math.ulp(peak)


def clipped_steps(curve, recipe):
    return {step for step, norm in enumerate(curve.grad_norms, start=1) if norm > recipe.max_grad_norm}


def print_curves(curves):
    """`curves` by name. At the first and the last step and some between."""
    exact = curves["exact"]
    steps = len(exact.losses)
    print(f"\nloss, in nats per target{'':11}" + "".join(f"{name:>18}" for name in curves) + f"{'gradient norm':>16}")
    for step in sorted({round(1 + i * (steps - 1) / (LINES - 1)) for i in range(LINES)}):
        losses = "".join(f"{curve.losses[step - 1]:18.7f}" for curve in curves.values())
        rate = exact.learning_rates[step - 1]
        print(f"step {step:4}  lr {rate:.4e}{'':12}{losses}{exact.grad_norms[step - 1]:16.4f}")


def print_differences(curves, pairs):
    print(f"\n{'difference':38}{'loss max':>11}{'mean':>10}{'last':>10}{'relative max':>14}{'norm relative max':>19}")
    for a, b in pairs:
        losses = [abs(x - y) for x, y in zip(curves[a].losses, curves[b].losses, strict=True)]
        relative = max(curves[a].loss_errors(curves[b]))
        norm = max(relative_errors(curves[a].grad_norms, curves[b].grad_norms))
        mean = sum(losses) / len(losses)
        print(f"{a + ' - ' + b:38}{max(losses):11.1e}{mean:10.1e}{losses[-1]:10.1e}{relative:14.1e}{norm:19.1e}")


def write_curves(path, curves):
    quantities = {"learning_rate": "learning_rates", "loss": "losses", "grad_norm": "grad_norms"}
    columns = {"step": range(1, len(curves["exact"].losses) + 1)}
    for quantity, attribute in quantities.items():
        columns |= {f"{quantity} {name}": getattr(curve, attribute) for name, curve in curves.items()}
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(columns)
        writer.writerows(zip(*columns.values(), strict=True))


def check_schedule(name, curve, exact, recipe, problems):
    ulps = rate_ulps(curve, exact, recipe.learning_rate)
    if not ulps <= RATE_ULPS:
        problems.append(f"{name}: learning rates {ulps:.2g} ulps apart, at most {RATE_ULPS} allowed")
    ours, theirs = clipped_steps(curve, recipe), clipped_steps(exact, recipe)
    print(
        f"{name}: learning rates {ulps:.2g} ulps of the highest apart at most; "
        f"clipped {len(ours)} of {len(exact.losses)} steps, exact {len(theirs)}, both {len(ours & theirs)}"
    )


def train_theirs(model, steps, recipe, dtypes):
    """Curves by kind, the exact one among them."""
    curves = {}
    for kind in ("fp64", *(kind for dtype in dtypes for kind in NOISE[dtype])):
        start = time.monotonic()
        curves[kind] = reference.train(model.config, model.weights, steps, kind, recipe)
        print(f"transformers {kind}: {time.monotonic() - start:.0f} s", flush=True)
    return curves


def report(model, recipe, ours, theirs, out, problems):
    exact = theirs["fp64"]
    curves, pairs = {"exact": exact}, []
    for dtype, curve in ours.items():
        curves[f"ours {dtype}"] = curve
        for kind in NOISE[dtype]:
            curves[f"HF {kind}"] = theirs[kind]
            pairs += [(f"ours {dtype}", f"HF {kind}"), (f"HF {kind}", "exact")]
        pairs.append((f"ours {dtype}", "exact"))
    write_curves(out, curves)
    print_curves(curves)
    print_differences(curves, pairs)

    print("\nrelative to the exact run")
    print_header()
    for dtype, curve in ours.items():
        own = Errors.of(curve, exact, model.weights)
        noise = {kind: Errors.of(theirs[kind], exact, model.weights) for kind in NOISE[dtype]}
        for kind, errors in noise.items():
            print_row(model.directory.name[:11], kind, own, errors)
        broken = broken_limits(own, Errors.largest(noise.values()), LIMITS[dtype])
        problems += [f"{dtype}: {problem}" for problem in broken]

    print("")
    for dtype, curve in ours.items():
        check_schedule(f"ours {dtype}", curve, exact, recipe, problems)
    if not clipped_steps(exact, recipe):
        problems.append(f"no gradient norm is above {recipe.max_grad_norm}: lower --max-grad-norm to compare clipping")


def compare(arguments, folder, problems):
    recipe = Recipe(
        learning_rate=arguments.learning_rate,
        lr_scheduler_type="cosine",
        warmup_steps=arguments.warmup_steps,
        weight_decay=0.1,
        max_grad_norm=arguments.max_grad_norm,
    )
    rows = batches.Rows.pack(arguments.shards, arguments.cutoff_len)
    order = batches.rows_of_steps(len(rows), arguments.rows_per_step, arguments.steps, SEED)
    targets = [rows.num_targets(indices) for indices in order]
    print(
        f"{len(rows)} rows; {arguments.steps} steps of {arguments.rows_per_step}: "
        f"{sum(int(rows.lengths[indices].sum()) for indices in order):,} tokens, {sum(targets):,} targets\n{recipe}"
    )
    # The engine's processes run beside this one's transformers.
    with concurrent.futures.ThreadPoolExecutor(max_workers=1) as pool:
        run = pool.submit(train_ours, arguments, folder, targets, recipe)
        model = Model(arguments.model)
        apart = documents_apart_error(model, rows)
        print(f"a packed row differs from its documents alone by {apart:.1e} in transformers' loss")
        if not apart <= APART:
            problems.append(f"transformers' documents attend to each other: {apart:.1e}, at most {APART} allowed")
        theirs = train_theirs(model, steps_of(rows, order, arguments.rows_per_call), recipe, arguments.dtypes)
        try:
            ours = run.result()
        except engine.EngineFailure as failure:
            problems.append(str(failure))
            return
    report(model, recipe, ours, theirs, arguments.out, problems)


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("binary", type=Path, help="layerstream")
    parser.add_argument("--model", type=Path, required=True, help="Hugging Face directory")
    parser.add_argument("--train-file", type=Path, nargs="+", required=True, help="token shards, directories of them")
    parser.add_argument("--out", type=Path, required=True, metavar="CSV", help="the curves")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--rows-per-step", type=int, default=8)
    parser.add_argument("--rows-per-call", type=int, default=8, help="of transformers' model, to save memory")
    parser.add_argument("--cutoff-len", type=int, default=1024)
    parser.add_argument("--learning-rate", type=float, default=2e-5)
    parser.add_argument("--warmup-steps", type=int, default=20)
    parser.add_argument("--max-grad-norm", type=float, default=1.0)
    parser.add_argument("--dtypes", nargs="+", choices=sorted(NOISE), default=["fp32", "bf16"])
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="passed to layerstream train")
    parser.add_argument("--scratch", type=Path, help="keep runs and exports in this new directory")
    arguments = parser.parse_args()
    if not arguments.binary.is_file():
        parser.error(f"{arguments.binary}: no such file")
    arguments.shards = [shard.resolve() for shard in batches.find_shards(arguments.train_file)]
    if not arguments.shards:
        parser.error("--train-file: there are no *.safetensors")
    arguments.binary, arguments.model = arguments.binary.resolve(), arguments.model.resolve()
    return arguments


def main():
    arguments = parse_arguments()
    program.run(arguments, f"{arguments.model.name}, rows of {arguments.cutoff_len} tokens", compare)


if __name__ == "__main__":
    main()
