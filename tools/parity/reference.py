"""Training runs of Hugging Face transformers, on the GPU if there is one."""

import contextlib
import os
import warnings

import torch

from curve import BETAS, EPS, LEARNING_RATE, MAX_GRAD_NORM, WEIGHT_DECAY, Curve, is_matrix
from reference_fp64 import Fp64Mode

# fp64: every operation in double, the exact result.
# fp32: TF32 off.
# bf16_autocast: fp32 parameters under torch.autocast: matrix products in bf16, the residual stream in fp32.
# bf16: the whole model in bf16, over fp32 master weights that are rounded for each step; gradients arrive in
# bf16 and are fp32 from the master on.
KINDS = ("fp64", "fp32", "bf16_autocast", "bf16")


def device():
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def description():
    return torch.cuda.get_device_name() if torch.cuda.is_available() else "the CPU"


def prepare():
    """Before the first operation on the GPU: no TF32, and the same bits in every run where torch can."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # torch asks for it
    torch.set_float32_matmul_precision("highest")
    torch.use_deterministic_algorithms(True, warn_only=True)
    warnings.filterwarnings("ignore", message=".*deterministic.*")


def build(case, weights, kind):
    # The exact formulas where they are the reference, what people train with where its noise is.
    attention = "eager" if kind in ("fp64", "fp32") else "sdpa"
    model = case.model_class(case.model_config(attention)).to(device())
    model.train()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(weights[name])
    return model


def loss_function(model, kind):
    def plain(ids):
        return model(input_ids=ids, labels=ids).loss

    def autocast(ids):
        with torch.autocast(ids.device.type, dtype=torch.bfloat16):
            return plain(ids)

    def rounded(ids):
        weights = {name: parameter.bfloat16() for name, parameter in model.named_parameters()}
        return torch.func.functional_call(model, weights, kwargs={"input_ids": ids, "labels": ids}).loss

    return {"bf16_autocast": autocast, "bf16": rounded}.get(kind, plain)


def train(case, weights, rows, steps, kind):
    """The curve of `steps` AdamW steps, each on all rows."""
    with Fp64Mode() if kind == "fp64" else contextlib.nullcontext():
        if kind == "fp64":
            weights = {name: weight.double() for name, weight in weights.items()}
        model = build(case, weights, kind)
        parameters = list(model.parameters())
        optimizer = torch.optim.AdamW(
            [
                {"params": [p for p in parameters if is_matrix(p)], "weight_decay": WEIGHT_DECAY},
                {"params": [p for p in parameters if not is_matrix(p)], "weight_decay": 0.0},
            ],
            lr=LEARNING_RATE,
            betas=BETAS,
            eps=EPS,
        )
        loss_of = loss_function(model, kind)
        ids = rows.to(device())
        losses, norms = [], []
        for _ in range(steps):
            optimizer.zero_grad()
            loss = loss_of(ids)
            loss.backward()
            losses.append(loss.detach())
            norms.append(torch.nn.utils.clip_grad_norm_(parameters, MAX_GRAD_NORM).detach())
            optimizer.step()
        return Curve(
            torch.stack(losses).tolist(),
            torch.stack(norms).tolist(),
            {name: parameter.detach().cpu() for name, parameter in model.named_parameters()},
        )
