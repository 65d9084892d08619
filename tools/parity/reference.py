"""Training runs of Hugging Face transformers, on the GPU if there is one."""

import contextlib
import os
import warnings

import torch
import transformers

from curve import BETAS, EPS, Curve, is_matrix
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


def attention_of(kind):
    """The exact formulas where they are the reference, what people train with where its noise is."""
    return "eager" if kind in ("fp64", "fp32") else "sdpa"


def build(config, weights):
    model = getattr(transformers, config.architectures[0])(config).to(device())
    model.train()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(weights[name])
    return model


def on_device(inputs):
    return {name: value.to(device()) if torch.is_tensor(value) else value for name, value in inputs.items()}


def loss_function(model, kind):
    def plain(inputs):
        return model(**inputs).loss

    def autocast(inputs):
        with torch.autocast(device().type, dtype=torch.bfloat16):
            return plain(inputs)

    def rounded(inputs):
        weights = {name: parameter.bfloat16() for name, parameter in model.named_parameters()}
        return torch.func.functional_call(model, weights, kwargs=inputs).loss

    return {"bf16_autocast": autocast, "bf16": rounded}.get(kind, plain)


def adamw(parameters, recipe):
    return torch.optim.AdamW(
        [
            {"params": [p for p in parameters if is_matrix(p)], "weight_decay": recipe.weight_decay},
            {"params": [p for p in parameters if not is_matrix(p)], "weight_decay": 0.0},
        ],
        lr=recipe.learning_rate,
        betas=BETAS,
        eps=EPS,
    )


def train(config_of, weights, steps, kind, recipe):
    """The curve of AdamW steps.

    config_of: the model's configuration for an implementation of attention.
    steps: for each step the arguments of the model's calls whose losses add up to the step's.
    """
    with Fp64Mode() if kind == "fp64" else contextlib.nullcontext():
        if kind == "fp64":
            weights = {name: weight.double() for name, weight in weights.items()}
        model = build(config_of(attention_of(kind)), weights)
        parameters = list(model.parameters())
        optimizer = adamw(parameters, recipe)
        scheduler = transformers.get_scheduler(
            recipe.lr_scheduler_type, optimizer, num_warmup_steps=recipe.warmup_steps, num_training_steps=len(steps)
        )
        loss_of = loss_function(model, kind)
        losses, norms, learning_rates = [], [], []
        for calls in steps:
            optimizer.zero_grad()
            loss = 0.0
            for inputs in calls:
                part = loss_of(on_device(inputs))
                part.backward()
                loss = loss + part.detach()
            losses.append(loss)
            norms.append(torch.nn.utils.clip_grad_norm_(parameters, recipe.max_grad_norm).detach())
            learning_rates += scheduler.get_last_lr()[:1]
            optimizer.step()
            scheduler.step()
        return Curve(
            torch.stack(losses).tolist(),
            torch.stack(norms).tolist(),
            {name: parameter.detach().cpu() for name, parameter in model.named_parameters()},
            learning_rates,
        )
