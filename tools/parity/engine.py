"""Training runs of a layerstream binary."""

import json
import subprocess

from safetensors.torch import load_file

from curve import BETAS, EPS, Curve


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


def train(binary, folder, data, targets, recipe, compute_dtype, overrides=()):
    """Trains as `recipe` says and exports the result into folder/export.<compute_dtype>.

    data: the configuration's keys of model and data; targets: how many each step is to have.
    Throws EngineFailure, also when a step had other rows or was skipped.
    """
    output = folder / f"run.{compute_dtype}"
    settings = {
        **data,
        "output_dir": str(output),
        "compute_dtype": compute_dtype,
        "max_steps": len(targets),
        "learning_rate": recipe.learning_rate,
        "lr_scheduler_type": recipe.lr_scheduler_type,
        "warmup_steps": recipe.warmup_steps,
        "weight_decay": recipe.weight_decay,
        "adam_beta1": BETAS[0],
        "adam_beta2": BETAS[1],
        "adam_epsilon": EPS,
        "max_grad_norm": recipe.max_grad_norm,
        "save_steps": 0,
    }
    config = folder / f"run.{compute_dtype}.yaml"
    config.write_text("".join(f"{key}: {json.dumps(value)}\n" for key, value in settings.items()))
    call([binary, "train", config, *(a for override in overrides for a in ("--set", override))])

    lines = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    for step, (line, expected) in enumerate(zip(lines, targets), start=1):
        if line["step"] != step or not line["applied"] or line["num_targets"] != expected:
            raise EngineFailure(f"{output}/metrics.jsonl: step {step} of {expected} targets expected: {line}")
    if len(lines) != len(targets):
        raise EngineFailure(f"{output}/metrics.jsonl: {len(targets)} steps expected, {len(lines)} found")

    export = folder / f"export.{compute_dtype}"
    checkpoint = output / f"checkpoint-{len(targets)}"
    call([binary, "export", "--checkpoint", checkpoint, "--output", export, "--dtype", "fp32"])
    weights = {}
    for path in sorted(export.glob("*.safetensors")):
        weights.update(load_file(path))
    return Curve(
        [line["loss"] for line in lines],
        [line["grad_norm"] for line in lines],
        weights,
        [line["learning_rate"] for line in lines],
    )
