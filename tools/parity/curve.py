"""The settings that every run shares, and what a run leaves."""

import dataclasses

import torch

LEARNING_RATE = 1e-4
BETAS = (0.9, 0.999)
EPS = 1e-8
WEIGHT_DECAY = 0.01  # of matrices, embeddings among them; not of norms and biases
MAX_GRAD_NORM = 1.0


@dataclasses.dataclass
class Curve:
    losses: list  # before each step's update
    grad_norms: list  # before clipping
    weights: dict | None = None  # after the last step, by parameter name

    def loss_errors(self, exact):
        """|loss - exact loss| / exact loss, for each step."""
        return [abs(a - b) / b for a, b in zip(self.losses, exact.losses, strict=True)]

    def first_norm_error(self, exact):
        return abs(self.grad_norms[0] - exact.grad_norms[0]) / exact.grad_norms[0]

    def weight_error(self, exact, start):
        """|w - exact w| over |exact w - start|, how far training moved the weights; 2-norm over all of them."""
        distance = movement = 0.0
        for name, weight in exact.weights.items():
            weight = weight.double()
            distance += (self.weights[name].double() - weight).square().sum().item()
            movement += (weight - start[name].double()).square().sum().item()
        return (distance / movement) ** 0.5


def is_matrix(parameter: torch.Tensor):
    return parameter.dim() == 2
