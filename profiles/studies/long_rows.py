"""One long row a step: what plans say of chosen lengths, and the longest that each machine takes."""

from typing import List

from direct_access import SHAPES
from plan_output import Plan, Refusal
from planner import Planner
from tables import table

MODELS = (SHAPES["7B"], SHAPES["8B"])
ROWS = (524288, 1048576)  # tokens
MACHINES = ("gh200-96g-480g", "gh200-144g-480g", "h200-pcie5-128g", "rtx4090-128g")
# Spares the most computation a byte where not everything can be kept: attention grows with the row's square.
ATTENTION_KEPT = {"activation_policy": "input+attention"}
GIB = 2.0**30


def kept(plan: Plan) -> str:
    of = plan.placement
    homes = f"{of['device_activation_blocks']} blocks on the device"
    if int(of["activation_blocks"]) == 0 or of["activation_policy"] == "input":
        return f"inputs of blocks, {homes}"
    what = f"{of['activation_policy']}, last {of['activation_chunks']} chunks of last {of['activation_blocks']} blocks"
    return f"{what}, {homes}"


def one_row(planner: Planner, module: str) -> str:
    header = ("model", "tokens of the row", "given", "activations kept", "s a step", "tokens/s", "model TFLOP/s")
    rows: List[List[str]] = []
    for shape in MODELS:
        for tokens in ROWS:
            for what, settings in (("nothing", {}), (f"activation_policy: {ATTENTION_KEPT['activation_policy']}", ATTENTION_KEPT)):
                row = {"cutoff_len": str(tokens), "per_device_train_batch_size": "1"}
                outcome = planner.plan(shape, tokens, "coherent", module, {**row, **settings})
                cells = [shape.name, f"{tokens:,}", what]
                if isinstance(outcome, Refusal):
                    rows.append(cells + [outcome.reason] + [""] * 5)
                    continue
                cells += [kept(outcome), f"{outcome.seconds:,.0f}", f"{outcome.tokens_per_second:,.0f}"]
                cells += [f"{outcome.model_tflops:.0f}", f"{outcome.device_bytes / GIB:.0f}"]
                rows.append(cells + [f"{outcome.host_bytes / GIB:.0f} of {outcome.host_limit / GIB:.0f}"])
    return table(header + ("device GiB", "host GiB"), rows)


def longest(planner: Planner) -> str:
    header = ("model", "machine", "longest row, tokens", "s a step", "tokens/s", "model TFLOP/s", "what ends it")
    rows: List[List[str]] = []
    for shape in MODELS:
        for machine in MACHINES:
            row = planner.longest_row(shape, machine)
            if isinstance(row, Refusal):
                rows.append([shape.name, machine, "none", "", "", "", row.reason])
                continue
            rows.append([shape.name, machine, f"{row.tokens:,}", f"{row.seconds:,.0f}"])
            rows[-1] += [f"{row.tokens_per_second:,.0f}", f"{row.model_tflops:.0f}", row.limit]
    return table(header, rows)
