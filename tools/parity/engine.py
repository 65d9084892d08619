"""Training runs of a layerstream binary."""

import json
import subprocess

from safetensors.torch import load_file

from curve import BETAS, EPS, LEARNING_RATE, MAX_GRAD_NORM, WEIGHT_DECAY, Curve
from models import ROWS, SEQUENCE


class EngineFailure(Exception):
    pass


def call(arguments, timeout=600):
    """Throws EngineFailure for an exit code other than 0, with the end of the output, and after `timeout` seconds."""
    command = [str(argument) for argument in arguments]
    try:
        done = subprocess.run(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=timeout, check=False
        )
    except subprocess.TimeoutExpired:
        raise EngineFailure(f"{' '.join(command)}: not done after {timeout} s") from None
    if done.returncode != 0:
        tail = "\n".join(done.stdout.splitlines()[-15:])
        raise EngineFailure(f"{' '.join(command)}: exit code {done.returncode}\n{tail}")


def train(binary, folder, steps, compute_dtype, overrides=()):
    """Trains folder/model on folder/rows.safetensors and exports the result into folder/export.<compute_dtype>.

    Throws EngineFailure, also when a step did not run on all rows or was skipped.
    """
    output = folder / f"run.{compute_dtype}"
    settings = {
        "model_name_or_path": str(folder / "model"),
        "train_file": str(folder / "rows.safetensors"),
        "cutoff_len": SEQUENCE,
        "packing": False,
        "output_dir": str(output),
        "compute_dtype": compute_dtype,
        "per_device_train_batch_size": ROWS,
        "max_steps": steps,
        "learning_rate": LEARNING_RATE,
        "lr_scheduler_type": "constant",
        "weight_decay": WEIGHT_DECAY,
        "adam_beta1": BETAS[0],
        "adam_beta2": BETAS[1],
        "adam_epsilon": EPS,
        "max_grad_norm": MAX_GRAD_NORM,
        "save_steps": 0,
    }
    config = folder / f"run.{compute_dtype}.yaml"
    config.write_text("".join(f"{key}: {json.dumps(value)}\n" for key, value in settings.items()))
    call([binary, "train", config, *(a for override in overrides for a in ("--set", override))])

    lines = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    targets = ROWS * (SEQUENCE - 1)
    for step, line in enumerate(lines, start=1):
        if line["step"] != step or not line["applied"] or line["num_targets"] != targets:
            raise EngineFailure(f"{output}/metrics.jsonl: step {step} of {targets} targets expected: {line}")
    if len(lines) != steps:
        raise EngineFailure(f"{output}/metrics.jsonl: {steps} steps expected, {len(lines)} found")

    export = folder / f"export.{compute_dtype}"
    checkpoint = output / f"checkpoint-{steps}"
    call([binary, "export", "--checkpoint", checkpoint, "--output", export, "--dtype", "fp32"])
    weights = {}
    for path in sorted(export.glob("*.safetensors")):
        weights.update(load_file(path))
    return Curve([line["loss"] for line in lines], [line["grad_norm"] for line in lines], weights)
