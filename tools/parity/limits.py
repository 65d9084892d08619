"""How far a run is from the exact one, and how far it may be: a multiple of transformers' own distance."""

import dataclasses

# Which runs of transformers measure the noise of a dtype.
NOISE = {"fp32": ("fp32",), "bf16": ("bf16", "bf16_autocast")}


@dataclasses.dataclass(frozen=True)
class Limits:
    """Our error may be `ratio` times transformers' (the larger of its runs), and always `floor`."""

    ratio: float
    loss_floor: float
    norm_floor: float
    weights_floor: float


LIMITS = {
    # The floors are for where transformers happens to be exact: 1e-5, as in the tests against goldens, and for
    # the weights what both leave after a few steps. TF32 instead of fp32 is far beyond the latter two (emulated,
    # three steps of llama: loss 6e-6, norm 4e-5, weights 1.3e-2).
    "fp32": Limits(ratio=2.0, loss_floor=1e-5, norm_floor=1e-5, weights_floor=1e-4),
    # The noise of one number has no reliable size: transformers' own two runs are up to nine times apart. Hence
    # the floors: a bf16 rounding (2^-9) for the norm, a sixteenth of one for the loss, which averages many. The
    # weights are millions of numbers and need none (the CPU build: 0.94 to 1.14 of the bf16 run's).
    "bf16": Limits(ratio=1.5, loss_floor=2**-13, norm_floor=2**-9, weights_floor=0.0),
}


@dataclasses.dataclass(frozen=True)
class Errors:
    loss_max: float
    loss_mean: float
    norm: float  # of the first step
    weights: float

    @staticmethod
    def of(curve, exact, start):
        losses = curve.loss_errors(exact)
        return Errors(
            max(losses),
            sum(losses) / len(losses),
            curve.norm_errors(exact)[0],
            curve.weight_error(exact, start),
        )

    @staticmethod
    def largest(several):
        return Errors(*(max(values) for values in zip(*map(dataclasses.astuple, several), strict=True)))


def broken_limits(ours, noise, limits):
    floors = Errors(limits.loss_floor, limits.loss_floor, limits.norm_floor, limits.weights_floor)
    for field in dataclasses.fields(Errors):
        value = getattr(ours, field.name)
        allowed = max(limits.ratio * getattr(noise, field.name), getattr(floors, field.name))
        if not value <= allowed:  # a NaN breaks it too
            yield f"{field.name} {value:.2e}, at most {allowed:.2e} allowed"


def print_header():
    groups = ("loss max", "loss mean", "norm", "weights")
    print(f"{'':26}" + "".join(f"{group:^25}" for group in groups))
    print(f"{'model':12}{'dtype':14}" + f"{'ours':>8}{'HF':>9}{'ratio':>7} " * len(groups))


def print_row(model, dtype, ours, theirs):
    cells = ""
    for field in dataclasses.fields(Errors):
        a, b = getattr(ours, field.name), getattr(theirs, field.name)
        cells += f"{a:8.1e}{b:9.1e}{a / b if b else float('inf'):7.2f} "
    print(f"{model:12}{dtype:14}{cells}", flush=True)
