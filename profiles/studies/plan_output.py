"""What `layerstream plan` printed, as numbers."""

import dataclasses
import re
from typing import Dict, Tuple

from bench_output import REFUSED, UnexpectedOutput

_UNITS = {"B": 1.0, "KiB": 2.0**10, "MiB": 2.0**20, "GiB": 2.0**30, "TiB": 2.0**40}
_BYTES = r"([\d.]+) ((?:[KMGT]i)?B)"
_MODEL = re.compile(r"^model  (\d+) parameters, ", re.MULTILINE)
_PREDICTED = re.compile(r"^predicted: (\S+) s a step, (\S+) tokens/s, (\S+) model TFLOP/s$", re.MULTILINE)
_BOTTLENECK = re.compile(r"^bottleneck: (.+?)(?: \(.*?\))?; ", re.MULTILINE)
_FITS = re.compile(rf"^  fits: device {_BYTES} of {_BYTES}, host {_BYTES} of {_BYTES}", re.MULTILINE)
_PLACED = re.compile(r"^([a-z_]+): (\S+)$", re.MULTILINE)
_SHORTFALL = re.compile(rf"(device|host) memory: need {_BYTES}, have {_BYTES}")
_LONGEST = re.compile(r"^longest row on \S+: (\d+) tokens, ", re.MULTILINE)
_LIMIT = re.compile(r"^what limits it, for \d+ tokens more: (device|host) memory: ", re.MULTILINE)
_PLACEMENT = ("resident_blocks", "optimizer_device_share", "gradient_home", "device_update", "activation_policy")


@dataclasses.dataclass(frozen=True)
class Plan:
    parameters: int
    seconds: float  # predicted, of a step
    tokens_per_second: float
    model_tflops: float
    bottleneck: str  # without what is in brackets
    placement: Dict[str, str]
    device_bytes: float
    device_limit: float
    host_bytes: float
    host_limit: float


@dataclasses.dataclass(frozen=True)
class Shortfall:
    space: str  # device, host
    need: float  # bytes
    have: float


@dataclasses.dataclass(frozen=True)
class Refusal:
    """Nothing fits: what is missing where least is."""

    reason: str  # a line
    shortfalls: Tuple[Shortfall, ...]  # one or two


@dataclasses.dataclass(frozen=True)
class LongestRow:
    """What `--max-seq` found."""

    tokens: int
    seconds: float  # predicted, of a step of one such row
    tokens_per_second: float
    model_tflops: float
    limit: str  # "host memory", of which a longer row has too little


def _bytes(number: str, unit: str) -> float:
    return float(number) * _UNITS[unit]


def _find(text: str, pattern, what: str):
    found = pattern.search(text)
    if found is None:
        raise UnexpectedOutput(f"no line of {what} in what the plan printed:\n{text}")
    return found.groups()


def parse(text: str) -> Plan:
    """Of standard output. Throws UnexpectedOutput."""
    seconds, rate, tflops = _find(text, _PREDICTED, "the predicted step")
    fits = _find(text, _FITS, "what fits")
    placement = dict(_PLACED.findall(text))
    for key in _PLACEMENT:
        if key not in placement:
            raise UnexpectedOutput(f"no {key} in what the plan printed:\n{text}")
    return Plan(
        parameters=int(_find(text, _MODEL, "the model")[0]),
        seconds=float(seconds),
        tokens_per_second=float(rate),
        model_tflops=float(tflops),
        bottleneck=_find(text, _BOTTLENECK, "the bottleneck")[0],
        placement=placement,
        device_bytes=_bytes(*fits[0:2]),
        device_limit=_bytes(*fits[2:4]),
        host_bytes=_bytes(*fits[4:6]),
        host_limit=_bytes(*fits[6:8]),
    )


def parse_longest_row(text: str) -> LongestRow:
    """Of standard output of `plan --max-seq`. Throws UnexpectedOutput."""
    seconds, rate, tflops = _find(text, _PREDICTED, "the predicted step")
    return LongestRow(
        tokens=int(_find(text, _LONGEST, "the longest row")[0]),
        seconds=float(seconds),
        tokens_per_second=float(rate),
        model_tflops=float(tflops),
        limit=f"{_find(text, _LIMIT, 'what limits it')[0]} memory",
    )


def parse_refusal(code: int, errors: str) -> Refusal:
    """Of standard error. Throws UnexpectedOutput where it is no lack of memory."""
    lines = _SHORTFALL.findall(errors)
    if code != REFUSED or not lines:
        raise UnexpectedOutput(f"exit code {code}; on standard error:\n{errors}")
    shortfalls = tuple(Shortfall(line[0], _bytes(*line[1:3]), _bytes(*line[3:5])) for line in lines)
    parts = [
        f"{line[0]} memory {(of.need - of.have) / 2.0**30:,.0f} GiB short ({' '.join(line[1:3])} of {' '.join(line[3:5])})"
        for line, of in zip(lines, shortfalls)
    ]
    return Refusal("does not fit: " + ", ".join(parts), shortfalls)
