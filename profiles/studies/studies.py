"""The studies: their points, tables, charts, and what to look at."""

import dataclasses
from typing import Callable, Dict, List, Optional, Sequence, Set, Tuple

import chart
import tables
from bench_output import WAIT_CAUSES, BenchRun

GIB = 1024.0**3


@dataclasses.dataclass(frozen=True)
class Point:
    cells: Tuple[str, ...]  # one for each of the study's setting columns
    settings: Dict[str, str]  # configuration keys, beside the study's own
    label: str  # in the chart


@dataclasses.dataclass(frozen=True)
class Outcome:
    """Of a point: a run, or why there is none."""

    point: Point
    run: Optional[BenchRun] = None
    failure: str = ""


@dataclasses.dataclass(frozen=True)
class Study:
    name: str
    shows: str
    settings: Dict[str, str]  # the same at every point
    points: Sequence[Point]
    setting_columns: Sequence[str]
    result_columns: Sequence[Tuple[str, Callable[[BenchRun], str]]]
    look_at: str
    draw: Callable[[Sequence[Outcome]], str]
    needs_plan: bool = False  # runs must be predicted

    def varied(self) -> Set[str]:
        """Keys that the study sets by itself."""
        return set(self.settings).union(*(point.settings for point in self.points))


def table(study: Study, outcomes: Sequence[Outcome]) -> str:
    """A Markdown table. A point without a run has the reason in its first result column."""
    rows: List[List[str]] = []
    for outcome in outcomes:
        if outcome.run is not None:
            results = [show(outcome.run) for _, show in study.result_columns]
        else:
            results = [outcome.failure] + [""] * (len(study.result_columns) - 1)
        rows.append([*outcome.point.cells, *results])
    return tables.table([*study.setting_columns, *(name for name, _ in study.result_columns)], rows)


def _rate(run: BenchRun) -> str:
    return f"{run.tokens_per_second:,.0f}"


def _seconds(run: BenchRun) -> str:
    return f"{run.seconds:.3f}"


def _busy(lane: str) -> Callable[[BenchRun], str]:
    return lambda run: f"{run.lane(lane).busy:.0f}%"


def _busy_at(lane: str) -> Callable[[BenchRun], str]:
    return lambda run: f"{run.lane(lane).rate:.1f} ({run.lane(lane).busy:.0f}%)"


def _wait(cause: str) -> Callable[[BenchRun], str]:
    return lambda run: f"{run.waits[cause]:.3f}"


_RATE_AND_TIME = (("tokens/s", _rate), ("s a step", _seconds), ("device computes", _busy("compute")))


def _draw_step(title: str) -> Callable[[Sequence[Outcome]], str]:
    """A bar for each point: a step of the compute lane, work and waits."""

    def draw(outcomes: Sequence[Outcome]) -> str:
        bars = []
        for outcome in outcomes:
            run = outcome.run
            if run is None:
                bars.append(
                    chart.Bar(outcome.point.label, {}, outcome.failure.split(":")[0])
                )  # the table says the rest
                continue
            parts = {"computes": run.compute_seconds}
            parts.update({f"waits: {cause}": run.waits[cause] for cause in WAIT_CAUSES})
            bars.append(chart.Bar(outcome.point.label, parts, f"{_rate(run)} tokens/s"))
        return chart.stacked_bars(title, "seconds of a step", bars)

    return draw


# What streams everything and keeps nothing, so that a study sees one thing change.
_STREAMED = {
    "loop_order": "layer_major",
    "resident_blocks": "0",
    "activation_policy": "input",
    "device_activation_blocks": "0",
}


def overlap() -> Study:
    def point(slots: int, chunk: int) -> Point:
        return Point(
            cells=(str(slots), f"{chunk:,}"),
            settings={"weight_slots": str(slots), "chunk_tokens": str(chunk)},
            label=f"{slots} slot{'s' * (slots > 1)}, chunks of {chunk:,}",
        )

    return Study(
        name="overlap",
        shows="How much of the copies hides behind computation: all weights stream, block inputs are kept on the host.",
        settings={**_STREAMED, "optimizer_device_share": "0.35", "gradient_home": "host"},
        points=[point(slots, 8192) for slots in (1, 2, 3, 4)] + [point(2, chunk) for chunk in (4096, 2048)],
        setting_columns=("weight slots", "tokens of a chunk"),
        result_columns=(
            *_RATE_AND_TIME,
            *((f"waits for {cause}, s", _wait(cause)) for cause in WAIT_CAUSES),
            ("link in, GB/s (busy)", _busy_at("link in")),
            ("link out, GB/s (busy)", _busy_at("link out")),
        ),
        look_at=(
            "With one slot nothing can be fetched while a block computes, so that the wait for weights is the whole "
            "copy; from two slots on it should fall to what the link cannot deliver in the time of a block's "
            "computation, and a further slot only helps where copies come in bursts. "
            "Chunks set the size of the copies of kept inputs: shorter ones start earlier, at the price of smaller "
            "matrix products (the device computes longer) and of more waits for issue."
        ),
        draw=_draw_step("overlap: weight slots and chunks"),
    )


def optimizer() -> Study:
    def point(update: str, clips: bool, share: float, home: str) -> Point:
        engines = {0.0: "host alone", 1.0: "device alone"}.get(share, f"device {share:.0%}")
        gradients = [f"gradients on {home}"] if share > 0.0 else []
        settings = {"optimizer_update": update, "optimizer_device_share": f"{share:g}", "gradient_home": home}
        if not clips:
            settings["max_grad_norm"] = "0"
        return Point(
            cells=(update, "on" if clips else "off", engines, home if share > 0.0 else "none"),
            settings=settings,
            label=", ".join([engines, *gradients, update, "clips" if clips else "no clipping"]),
        )

    return Study(
        name="optimizer",
        shows="Who updates the weights, and when: no block is resident, so every state lives on the host.",
        settings={**_STREAMED, "weight_slots": "2"},
        points=[
            point("deferred", True, 0.0, "host"),
            point("deferred", True, 0.25, "host"),
            point("deferred", True, 0.5, "host"),
            point("deferred", True, 1.0, "host"),
            point("deferred", True, 0.5, "device"),
            point("deferred", True, 1.0, "device"),
            point("deferred", False, 0.0, "host"),
            # The device takes no part in immediate updates, which may have to stop in the middle.
            point("immediate", False, 0.0, "host"),
        ],
        setting_columns=("update", "clipping", "updated by", "gradients of the device's share"),
        result_columns=(
            *_RATE_AND_TIME,
            *((f"waits for {cause}, s", _wait(cause)) for cause in ("optimizer", "weights", "gradients")),
            ("host's update, GB/s (busy)", _busy_at("host")),
            ("device's update busy", _busy("update")),
            ("link in, GB/s (busy)", _busy_at("link in")),
            ("link out, GB/s (busy)", _busy_at("link out")),
        ),
        look_at=(
            "Alone, each engine has a limit of its own, the host its memory and the device the link, and the step "
            "waits for the optimizer; the best share is where both finish together, and gradients kept on the "
            "device take their way out and in again off the link. "
            "An immediate update runs beside the backward pass instead of beside the next forward pass: by the host "
            "alone, immediate against deferred without clipping is what waiting for all gradients costs, deferred "
            "with clipping against without it what the norm itself costs."
        ),
        draw=_draw_step("optimizer: who updates, and when"),
    )


def _chosen(run: BenchRun) -> str:
    of = run.placement
    kept = f"{of['activation_policy']} of {of['activation_blocks']} blocks, {of['device_activation_blocks']} on the device"
    return (
        f"{of['resident_blocks']} resident, {of['weight_slots']} slots, {of['loop_order']}, keeps {kept}, "
        f"device share {of['optimizer_device_share']}, gradients on {of['gradient_home']}"
    )


def _draw_placement(outcomes: Sequence[Outcome]) -> str:
    runs = sorted((o.run for o in outcomes if o.run is not None), key=lambda run: run.device_limit)
    measured = [(run.device_limit / GIB, run.tokens_per_second) for run in runs]
    predicted = [(run.device_limit / GIB, run.step_tokens / run.predicted_seconds) for run in runs]
    return chart.lines(
        "placement: device memory and speed",
        "device memory that may be used, GiB",
        "tokens/s",
        [chart.Line("measured", measured), chart.Line("predicted", predicted, dashed=True)],
    )


def placement(limits: Sequence[str]) -> Study:
    """@param limits whole GiB, or `all`"""

    def point(limit: str) -> Point:
        settings = {} if limit == "all" else {"device_memory_limit": f"{limit}GiB"}
        return Point(cells=(limit,), settings=settings, label=limit)

    return Study(
        name="placement",
        shows="What the planner makes of device memory: nothing but its limit is given.",
        settings={},
        points=[point(limit) for limit in limits],
        setting_columns=("device memory limit, GiB",),
        result_columns=(
            ("tokens/s", _rate),
            ("measured, s", _seconds),
            ("predicted, s", lambda run: f"{run.predicted_seconds:.3f}"),
            ("measured against predicted", lambda run: f"{100.0 * (run.seconds / run.predicted_seconds - 1.0):+.1f}%"),
            (
                "device memory in use, of planned, GiB",
                lambda run: f"{run.device.used / GIB:.1f} of {run.device.planned / GIB:.1f}",
            ),
            ("predicted bottleneck", lambda run: str(run.bottleneck)),
            ("chosen", _chosen),
        ),
        look_at=(
            "The curve should rise without cliffs to the speed of a resident model and then stay flat: where it is "
            "flat early, the bottleneck says that memory is not what is missing. "
            "A measured time above the predicted one marks what the machine's profile is too hopeful about; "
            "`layerstream calibrate` measures it anew."
        ),
        draw=_draw_placement,
        needs_plan=True,
    )
