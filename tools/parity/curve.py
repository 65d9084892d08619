"""The settings that both sides of a comparison share, and what a run leaves."""

import dataclasses

import torch

BETAS = (0.9, 0.999)
EPS = 1e-8


@dataclasses.dataclass(frozen=True)
class Recipe:
    learning_rate: float = 1e-4
    lr_scheduler_type: str = "constant"
    warmup_steps: int = 0
    weight_decay: float = 0.01  # of matrices, embeddings among them; not of norms and biases
    max_grad_norm: float = 1.0


@dataclasses.dataclass
class Curve:
    losses: list  # before each step's update
    grad_norms: list  # before clipping
    weights: dict | None = None  # after the last step, by parameter name
    learning_rates: list | None = None

    def loss_errors(self, exact):
        """|loss - exact loss| / exact loss, for each step."""
        return relative_errors(self.losses, exact.losses)

    def norm_errors(self, exact):
        return relative_errors(self.grad_norms, exact.grad_norms)

    def weight_error(self, exact, start):
        """|w - exact w| over |exact w - start|, how far training moved the weights; 2-norm over all of them."""
        distance = movement = 0.0
        for name, weight in exact.weights.items():
            weight = weight.double()
            distance += (self.weights[name].double() - weight).square().sum().item()
            movement += (weight - start[name].double()).square().sum().item()
        return (distance / movement) ** 0.5


def relative_errors(values, exact):
    return [abs(a - b) / b for a, b in zip(values, exact, strict=True)]


def is_matrix(parameter: torch.Tensor):
    return parameter.dim() == 2
