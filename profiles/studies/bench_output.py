"""What benches/train_step printed, as numbers."""

import dataclasses
import re
from typing import Dict, Optional

WAIT_CAUSES = ("weights", "optimizer", "gradients", "activations", "issue")

_BYTES = r"[\d.]+ (?:[KMGT]i)?B"
_STEP = re.compile(
    r"^(?P<tokens>\d+) tokens a step: (?P<rate>\S+) tokens/s median \((?P<slowest>\S+) to (?P<fastest>\S+)\), "
    r"(?P<seconds>\S+) s, (?P<tflops>\S+) model TFLOP/s,",
    re.MULTILINE,
)
_PREDICTED = re.compile(r"^predicted (\S+) s, measured \S+ s \(\S+\); bottleneck: (.+)$", re.MULTILINE)
_MACHINE = re.compile(rf"^(?P<text>Kokkos .+, (?P<limit>{_BYTES})(?: of {_BYTES})?)$", re.MULTILINE)
_RATES = re.compile(r"^measured: (.+)$", re.MULTILINE)
_READY = re.compile(
    r"^(?P<parameters>\d+) parameters, .*, (?P<slots>\d+) slots, device share (?P<share>\S+);", re.MULTILINE
)
_LANE = re.compile(r"^(\w+|link in|link out) +([\d.]+)% +([\d.]+) +([\d.]+)$", re.MULTILINE)
_WAITS = re.compile(r"^compute waits: (.+)$", re.MULTILINE)
_WAIT = re.compile(r"(\w+) \S+% \((\S+) s\)")
_PLANNED = re.compile(r"^planned in .+ with the rates of (.+)\n((?:\w+: .+\n)+?)predicted: ", re.MULTILINE)
_DEVICE = re.compile(rf"^device: ({_BYTES}) of ({_BYTES}) planned", re.MULTILINE)
_HOST = re.compile(rf"^host: +peak ({_BYTES}) of ({_BYTES}) planned", re.MULTILINE)
_SHORTFALL = re.compile(rf"^((?:device|host) memory: need {_BYTES}, have {_BYTES})", re.MULTILINE)

REFUSED = 2  # exit code: configuration, files or memory refused before the first step


class UnexpectedOutput(Exception):
    """The bench ended well but did not print what is looked for. The message ends with all that it printed."""


@dataclasses.dataclass(frozen=True)
class Use:
    """Of a lane or a direction of the link, in a step."""

    busy: float  # percent of the step
    gigabytes: float
    rate: float  # GB/s while busy


@dataclasses.dataclass(frozen=True)
class Memory:
    """Bytes."""

    used: float
    planned: float


@dataclasses.dataclass(frozen=True)
class BenchRun:
    """A run of one step size."""

    machine: str
    rates: str
    device_limit: float  # bytes
    parameters: int
    slots: int
    device_share: float  # of the whole update
    step_tokens: int
    tokens_per_second: float
    slowest: float
    fastest: float
    seconds: float
    model_tflops: float
    lanes: Dict[str, Use]  # those that did something, "link in" and "link out"
    waits: Dict[str, float]  # seconds of the compute lane, by cause
    device: Memory
    host: Memory
    # With rates of the machine only:
    profile: Optional[str]
    placement: Dict[str, str]
    predicted_seconds: Optional[float]
    bottleneck: Optional[str]

    def lane(self, name: str) -> Use:
        return self.lanes.get(name, Use(0.0, 0.0, 0.0))

    @property
    def compute_seconds(self) -> float:
        return self.seconds * self.lane("compute").busy / 100.0


def to_bytes(text: str) -> float:
    """ "24.31 MiB" in bytes."""
    number, unit = text.split()
    return float(number) * 1024.0 ** ("B", "KiB", "MiB", "GiB", "TiB").index(unit)


def _find(pattern, text, what):
    match = pattern.search(text)
    if match is None:
        raise UnexpectedOutput(f"the bench printed no {what}. All it printed:\n{text}")
    return match


def parse(text: str, needs_plan: bool = False) -> BenchRun:
    """Throws UnexpectedOutput where a line is missing; needs_plan: also where no placement was predicted."""
    step = _find(_STEP, text, "line of tokens/s")
    machine = _find(_MACHINE, text, "line of the machine")
    ready = _find(_READY, text, "line of the model")
    device = _find(_DEVICE, text, "line of device memory")
    host = _find(_HOST, text, "line of host memory")
    waits = {cause: float(seconds) for cause, seconds in _WAIT.findall(_find(_WAITS, text, "line of waits").group(1))}
    lanes = {name: Use(float(busy), float(gb), float(rate)) for name, busy, gb, rate in _LANE.findall(text)}
    for names, found, what in (
        (WAIT_CAUSES, waits, "wait for"),
        (("compute", "link in", "link out"), lanes, "table line of"),
    ):
        for name in names:
            if name not in found:
                raise UnexpectedOutput(f"the bench printed no {what} {name}. All it printed:\n{text}")
    planned = _PLANNED.search(text)
    predicted = _PREDICTED.search(text)
    if needs_plan and (planned is None or predicted is None):
        raise UnexpectedOutput(
            "the bench planned nothing: no hardware profile is of this machine; name one, shipped or from "
            f"`layerstream calibrate`, with --set hardware_profile=NAME. All it printed:\n{text}"
        )
    return BenchRun(
        machine=machine["text"],
        rates=_find(_RATES, text, "line of measured rates").group(1),
        device_limit=to_bytes(machine["limit"]),
        parameters=int(ready["parameters"]),
        slots=int(ready["slots"]),
        device_share=float(ready["share"]),
        step_tokens=int(step["tokens"]),
        tokens_per_second=float(step["rate"]),
        slowest=float(step["slowest"]),
        fastest=float(step["fastest"]),
        seconds=float(step["seconds"]),
        model_tflops=float(step["tflops"]),
        lanes=lanes,
        waits=waits,
        device=Memory(to_bytes(device[1]), to_bytes(device[2])),
        host=Memory(to_bytes(host[1]), to_bytes(host[2])),
        profile=planned[1] if planned else None,
        placement=dict(line.split(": ", 1) for line in planned[2].splitlines()) if planned else {},
        predicted_seconds=float(predicted[1]) if predicted else None,
        bottleneck=predicted[2] if predicted else None,
    )


def failure(exit_code: int, errors: str) -> str:
    """Why a bench that did not end well printed no numbers, in a line. @param errors its standard error"""
    shortfall = _SHORTFALL.search(errors)
    if shortfall is not None and exit_code == REFUSED:
        return f"does not fit: {shortfall[1]}"
    lines = [line.strip() for line in errors.splitlines() if line.strip()]
    last = lines[-1] if lines else "nothing on standard error"
    if exit_code == REFUSED:
        return f"refused: {last}"
    how = f"killed by signal {-exit_code}" if exit_code < 0 else f"exit code {exit_code}"
    return f"failed, {how}: {last}"
