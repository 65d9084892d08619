#!/usr/bin/env python3
"""What the simulator makes of GH200 modules, in one command and some minutes, without a GPU: `layerstream plan` at some
hundred points with the shipped GH200 profiles and copies of them with other rates. Writes OUTPUT/grace-hopper.md
(tables), OUTPUT/grace-hopper.svg (plot), and the models and profiles that it planned with.

    python3 profiles/studies/grace_hopper.py

Predictions from published and estimated rates, not measurements. Exit code 0, also where something does not fit.
"""

import argparse
import dataclasses
import os
import platform
import shlex
import sys
from pathlib import Path
from typing import Dict, List, Optional, Sequence

sys.path.insert(0, str(Path(__file__).resolve().parent))

import chart  # noqa: E402
import direct_access as direct  # noqa: E402
import long_rows  # noqa: E402
from plan_output import Plan, Refusal, UnexpectedOutput  # noqa: E402
from planner import ROW, Outcome, Planner  # noqa: E402
from scaled_profile import ADAMW_BYTES, Profile, scaled  # noqa: E402
from study import commit  # noqa: E402
from tables import table  # noqa: E402

ROOT = Path(os.path.relpath(Path(__file__).resolve().parents[2]))
STEP_TOKENS = (2048, 4096, 8192, 16384, 32768, 65536)
MODULES = ("gh200-96g-480g", "gh200-144g-480g")
GIB = 2.0**30

MODELS = tuple(direct.SHAPES[name] for name in ("7B", "14B", "32B", "70B"))
# All gradients wait for their norm under clipping; without it each is applied as it lands, and two are held at a time.
NO_CLIPPING = {"optimizer_update": "immediate", "max_grad_norm": "0"}
# Gradients that fit neither in host nor in device memory, in both.
DIVIDED = {"gradient_home": "device", "optimizer_device_share": "0.55"}
# Each is for models that the one before has refused.
WAYS = (("", {}), (", gradients divided", DIVIDED), (", no clipping", NO_CLIPPING))
# What streams everything, so that backends differ at all.
STREAMED = {"resident_blocks": "0", "activation_policy": "input"}


def seconds(outcome: Outcome) -> str:
    return f"{outcome.seconds:.3f}" if isinstance(outcome, Plan) else "no"


def settings_text(settings: Dict[str, str]) -> str:
    return ", ".join(f"{key}: {value}" for key, value in settings.items())


def update(plan: Plan) -> str:
    """Who updates what is not resident."""
    share = float(plan.placement["optimizer_device_share"])
    if share == 0.0:
        return "host"
    return f"{100.0 * share:.0f}% device, {plan.placement['device_update'].replace('_', ' ')}"


# --- the parts of the page ---


@dataclasses.dataclass(frozen=True)
class FreePoint:
    module: str
    model: str  # and the way
    tokens: int
    explicit: Outcome
    coherent: Outcome


def planned_freely(planner: Planner) -> List[FreePoint]:
    points = []
    for module in MODULES:
        for shape in MODELS:
            for way, settings in WAYS:
                of_way = [
                    FreePoint(
                        module,
                        shape.name + way,
                        tokens,
                        planner.plan(shape, tokens, "explicit", module, settings),
                        planner.plan(shape, tokens, "coherent", module, settings),
                    )
                    for tokens in STEP_TOKENS
                ]
                points += of_way
                if all(isinstance(point.coherent, Plan) for point in of_way):
                    break
    return points


def free_tables(points: Sequence[FreePoint]) -> str:
    header = ("model", "tokens a step", "explicit, s", "coherent, s", "explicit / coherent")
    header += ("tokens/s", "model TFLOP/s", "blocks resident", "updates of the rest", "bottleneck (coherent)")
    text = ""
    for module in MODULES:
        rows: List[List[str]] = []
        refused: List[FreePoint] = []  # one row for what follows one another
        for point in [point for point in points if point.module == module] + [None]:
            if refused and (point is None or point.model != refused[0].model or isinstance(point.coherent, Plan)):
                tokens = dict.fromkeys(f"{of.tokens:,}" for of in (refused[0], refused[-1]))
                rows.append(
                    [refused[0].model, " to ".join(tokens), "no", "no"] + [""] * 5 + [refused[0].coherent.reason]
                )
                refused = []
            if point is not None and isinstance(point.coherent, Refusal):
                refused.append(point)
            elif point is not None:
                rows.append(free_row(point))
        text += f"### {module}\n\n{table(header, rows)}\n"
    return text


def free_row(point: FreePoint) -> List[str]:
    explicit, coherent = point.explicit, point.coherent
    return [
        point.model,
        f"{point.tokens:,}",
        seconds(explicit),
        seconds(coherent),
        f"{explicit.seconds / coherent.seconds:.3f}" if isinstance(explicit, Plan) else "",
        f"{coherent.tokens_per_second:,.0f}",
        f"{coherent.model_tflops:.0f}",
        coherent.placement["resident_blocks"],
        update(coherent),
        coherent.bottleneck,
    ]


def what_fits(planner: Planner) -> str:
    rows = []
    for shape in MODELS[2:]:
        matrices = shape.layers * shape.layer_matrices + shape.table_bytes  # embedding and head, of 2 bytes each
        for module in MODULES:
            for clips, ways in (("on", ({}, DIVIDED)), ("off", (NO_CLIPPING,))):
                needed = matrices * (direct.STATE_BYTES + (4 if clips == "on" else 0)) / GIB
                layers, plan = planner.most_layers(shape, 8192, module, ways)
                row = [shape.name, module, clips, f"{needed:,.0f}", f"{layers} of {shape.layers}"]
                if plan is not None:
                    row.append(f"{1e-9 * plan.parameters:.1f}")
                    row.append(f"{plan.host_bytes / GIB:,.0f} of {plan.host_limit / GIB:,.0f}")
                    row.append(f"{plan.device_bytes / GIB:,.0f} of {plan.device_limit / GIB:,.0f}")
                    row.append(f"{plan.tokens_per_second:,.0f}")
                rows.append(row + [""] * (9 - len(row)))
    header = ("model", "module", "clipping", "all of it needs, GiB", "decoder layers that fit")
    return table(header + ("G parameters", "host GiB", "device GiB", "tokens/s"), rows)


VARIANTS = tuple(
    (backend, access, gradients)
    for backend, access in (("explicit", "staged"), ("coherent", "staged"), ("coherent", "in_place"))
    for gradients in ("host", "device")
)


def streamed(planner: Planner, share: Optional[str]) -> str:
    """@param share of the update that is the device's; none: the planner's choice"""
    rows = []
    for shape in MODELS[:2]:
        for limit in ("24GiB", "48GiB"):
            for tokens in (2048, 8192, 32768):
                row = [shape.name, limit.replace("GiB", ""), f"{tokens:,}"]
                for backend, access, gradients in VARIANTS:
                    settings = {
                        **STREAMED,
                        "device_memory_limit": limit,
                        "device_update": access,
                        "gradient_home": gradients,
                        **({"optimizer_device_share": share} if share else {}),
                    }
                    outcome = planner.plan(shape, tokens, backend, MODULES[0], settings)
                    cell = seconds(outcome)
                    if isinstance(outcome, Plan) and not share:
                        cell += f" ({100.0 * float(outcome.placement['optimizer_device_share']):.0f}%)"
                    row.append(cell)
                rows.append(row)
    header = ["model", "GiB", "tokens a step"]
    header += [f"{backend}, {access.replace('_', ' ')}, gradients on {where}" for backend, access, where in VARIANTS]
    return table(header, rows)


FREE_8K = ("7B, nothing given", MODELS[0], 8192, {})
STREAMED_8K = ("7B, all streams, 48 GiB", MODELS[0], 8192, {**STREAMED, "device_memory_limit": "48GiB"})
STREAMED_14B = ("14B, all streams, 48 GiB", MODELS[1], 8192, {**STREAMED, "device_memory_limit": "48GiB"})
RUNS = (FREE_8K, STREAMED_8K, STREAMED_14B)


def pair(planner: Planner, run, profile: Path) -> str:
    _, shape, tokens, settings = run
    explicit = planner.plan(shape, tokens, "explicit", profile, settings)
    coherent = planner.plan(shape, tokens, "coherent", profile, settings)
    how = update(coherent) if isinstance(coherent, Plan) else ""
    return f"{seconds(explicit)} / {seconds(coherent)} ({how})"


def sensitivity(planner: Planner, base: Profile) -> str:
    rows = []
    for lpddr in (0.5, 0.75, 1.0, 1.4):
        for c2c in [factor for factor in (0.5, 0.75, 1.0, 1.4) if factor <= lpddr]:
            name = f"{MODULES[0]}-c2c-{c2c:g}-lpddr-{lpddr:g}"
            profile = planner.profile_file(scaled(base, c2c, lpddr), name)
            rows.append([f"{c2c:g}", f"{lpddr:g}", *(pair(planner, run, profile) for run in RUNS)])
    return table(("C2C", "LPDDR", *(f"{run[0]}: explicit / coherent, s" for run in RUNS)), rows)


def doubtful_rates(planner: Planner, base: Profile) -> str:
    """Each estimate of the profile that decides between the backends, at what else it may be."""
    triad = base.value("host", "triad_bytes_per_second")
    duplex = ("link", "duplex_bytes_per_second")
    in_place = ("link", "adamw_in_place_parameters_per_second")
    bound = base.value(*duplex) / ADAMW_BYTES
    adamw = ("host", "adamw_parameters_per_second")
    cases = (
        ("as shipped", {}),
        ("both directions together at triad's rate", {duplex: triad}),
        (f"in place as fast as copies, over {ADAMW_BYTES} bytes", {in_place: bound}),
        ("in place three quarters as fast as shipped", {in_place: 0.75 * base.value(*in_place)}),
        ("in place half as fast as shipped", {in_place: base.value(*in_place) / 2.0}),
        ("in place a quarter as fast", {in_place: base.value(*in_place) / 4.0}),
        (f"the host alone updates at triad's rate over {ADAMW_BYTES} bytes", {adamw: triad / ADAMW_BYTES}),
    )
    rows = []
    for index, (what, values) in enumerate(cases):
        name = f"{MODULES[0]}-doubt-{index}"
        profile = planner.profile_file(base.with_values(name, values, what), name)
        changed = ", ".join(f"{key} {value:.4g}" for (_, key), value in values.items())
        rows.append([what, changed, *(pair(planner, run, profile) for run in RUNS)])
    return table(("case", "changed", *(f"{run[0]}: explicit / coherent, s" for run in RUNS)), rows)


def draw(points: Sequence[FreePoint]) -> str:
    curves = []
    for module, dashed in zip(MODULES, (False, True)):
        for name in dict.fromkeys(point.model for point in points):
            line = [
                (point.tokens / 1000.0, point.coherent.model_tflops)
                for point in points
                if point.module == module and point.model == name and isinstance(point.coherent, Plan)
            ]
            if line:
                curves.append(chart.Line(name, line, dashed))
    title = f"Predicted, coherent: {MODULES[0]}, dashed {MODULES[1]}"
    return chart.lines(title, "thousand tokens a step", "model TFLOP/s", curves)


def page(planner: Planner, argv: Sequence[str], base: Profile, points: Sequence[FreePoint]) -> str:
    fits = what_fits(planner)
    chosen, alone = streamed(planner, None), streamed(planner, "1")
    rates, doubts = sensitivity(planner, base), doubtful_rates(planner, base)
    rows, longest = long_rows.one_row(planner, MODULES[0]), long_rows.longest(planner)
    return f"""# Study: Grace Hopper, predicted

Predictions by the step's own schedule with published and estimated rates (`profiles/hardware/gh200-*.yaml`); nothing
here ran on a GH200. Rows of {ROW:,} tokens, bf16 products, FP32 states, exact clipping unless said otherwise; shapes of
Qwen2.5 7B, 14B and 32B and of Llama 3.1 8B and 70B.

    {shlex.join(["python3", str(ROOT / "profiles/studies/grace_hopper.py"), *argv])}

layerstream at commit {commit()}, Python {platform.python_version()}; {planner.num_plans} plans.

![model TFLOP/s by tokens a step](grace-hopper.svg)

## Nothing given: the planner's choice

Models that are refused so at some size are planned again with gradients on both sides (`{settings_text(DIVIDED)}`),
and those that are refused then without clipping (`{settings_text(NO_CLIPPING)}`).
A reason is that of the first number of tokens.

{free_tables(points)}
## How much fits

8,192 tokens a step, first layers of the model, in any of the ways above. States take {direct.STATE_BYTES} bytes a
parameter, gradients that wait for their norm 4 more.

{fits}
## Long rows

One row a step, coherent, exact clipping, {MODULES[0]}; 7B and Llama 3.1 8B. All states stay in FP32, all tokens attend
to all before them. Model TFLOP/s count the causal half of attention.

{rows}
The longest row by machine (`layerstream plan --max-seq`):

{longest}
## Everything streams

No block is resident, inputs of blocks are kept, the device's memory is limited; {MODULES[0]}. Seconds a step; in
brackets the device's share of the update, where it is the planner's choice.

{chosen}
The same with all of the update on the device:

{alone}
## Other rates of C2C and LPDDR

{MODULES[0]} with NVLink-C2C and LPDDR so many times as fast. What crosses the link goes with the smaller of the two,
since it reads or writes LPDDR as well, so that a C2C faster than LPDDR is as one that is as fast. LPDDR at 1.4 is about
that of modules with 120 GB (arXiv:2407.07850: 486 GB/s, and the same copies).

{rates}
## Rates that nobody measured

{doubts}
## Direct access or promotion: arithmetic

{direct.report(MODELS, direct.Rates.of(base))}"""


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--program", type=Path, default=ROOT / "build/cpu/src/cli/layerstream", help="default: %(default)s"
    )
    parser.add_argument(
        "--output", type=Path, default=Path("runs/studies/grace-hopper"), help="folder; default: %(default)s"
    )
    arguments = parser.parse_args(argv)
    base = Profile((ROOT / f"profiles/hardware/{MODULES[0]}.yaml").read_text())
    program = arguments.program.absolute() if arguments.program.parent == Path(".") else arguments.program
    planner = Planner(program, arguments.output)
    try:
        points = planned_freely(planner)
        text = page(planner, argv, base, points)
    except OSError as error:
        sys.exit(f"--program {arguments.program}: {error.strerror}; build it (scripts/build.sh cpu layerstream)")
    except UnexpectedOutput as error:
        sys.exit(str(error))
    written = arguments.output / "grace-hopper.md"
    written.write_text(text)
    written.with_suffix(".svg").write_text(draw(points))
    print(f"written: {written}, {written.with_suffix('.svg')}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
