#!/usr/bin/env python3
"""What `layerstream plan` says of the ready configurations, examples/configs/*.yaml, on the shipped machines: the table in
examples/configs/README.md, written there. A minute, without a GPU and without weights: the models are the shapes in
examples/*-shape.

    python3 profiles/studies/ready_configs.py
"""

import argparse
import concurrent.futures
import dataclasses
import os
import re
import sys
from pathlib import Path
from typing import Dict, List, Sequence, Tuple, Union

sys.path.insert(0, str(Path(__file__).resolve().parent))

from plan_output import Plan, Refusal  # noqa: E402
from planner import Outcome, run_plan  # noqa: E402
from tables import table  # noqa: E402

ROOT = Path(os.path.relpath(Path(__file__).resolve().parents[2]))
EXAMPLES = ROOT / "examples"
PAGE = EXAMPLES / "configs/README.md"
MACHINES = ("gh200-96g-480g", "h200-1500g", "h200-pcie5-128g", "h100-pcie", "rtx4090-128g")
MODELS = (  # by size
    "mistral-7b-v0.3",
    "qwen2.5-7b",
    "llama-3.1-8b",
    "qwen3-8b",
    "qwen2.5-14b",
    "qwen3-32b",
    "qwen2.5-32b",
    "llama-3.1-70b",
    "qwen2.5-72b",
)
_MARKS = ("<!-- by profiles/studies/ready_configs.py -->\n", "<!-- end -->\n")


@dataclasses.dataclass(frozen=True)
class Fits:
    tokens_per_second: float
    host_gib: float

    def __str__(self) -> str:
        return f"{three_digits(self.tokens_per_second)} tokens/s, {three_digits(self.host_gib)} GiB"


@dataclasses.dataclass(frozen=True)
class Needs:
    """Does not fit."""

    host_gib: float  # would do

    def __str__(self) -> str:
        return f"needs {three_digits(self.host_gib)} GiB"


Cell = Union[Fits, Needs]
Cells = Dict[Tuple[str, str], Cell]  # by model and machine


def three_digits(value: float) -> str:
    return f"{float(f'{value:.3g}'):,.0f}"


def cell_of(outcome: Outcome) -> Cell:
    if isinstance(outcome, Plan):
        return Fits(outcome.tokens_per_second, outcome.host_bytes / 2.0**30)
    return Needs(host_need(outcome) / 2.0**30)


def host_need(refusal: Refusal) -> float:
    """Bytes. What the device is short of may lie on the host as well."""
    missing = {of.space: of.need - of.have for of in refusal.shortfalls}
    have = {of.space: of.have for of in refusal.shortfalls}
    if "host" not in have:
        raise ValueError(f"more host memory would not help: {refusal.reason}")
    return have["host"] + sum(missing.values())


def plan_all(program: Path, workers: int) -> Dict[Tuple[str, str], Outcome]:
    """By model and machine. Throws as run_plan does."""

    def plan(pair: Tuple[str, str]) -> Outcome:
        model, machine = pair
        keys = {"model_name_or_path": EXAMPLES / f"{model}-shape", "hardware_profile": machine}
        return run_plan(program, EXAMPLES / f"configs/{model}.yaml", keys)

    pairs = [(model, machine) for model in MODELS for machine in MACHINES]
    with concurrent.futures.ThreadPoolExecutor(workers) as pool:
        return dict(zip(pairs, pool.map(plan, pairs)))


def table_of(cells: Cells) -> str:
    rows = [[model, *(str(cells[model, machine]) for machine in MACHINES)] for model in MODELS]
    return table(["", *MACHINES], rows)


def cells_of(text: str) -> Cells:
    """Of a page, what table_of wrote there. Throws ValueError where it did not."""
    (_, machines), _, *rows = (_cut(line) for line in _split(text)[1].splitlines())
    return {
        (model, machine): _parse(cell) for model, row in rows for machine, cell in zip(machines, row)
    }


def _cut(line: str) -> Tuple[str, List[str]]:
    first, *others = (cell.strip() for cell in line.strip("|").split("|"))
    return first, others


def _parse(cell: str) -> Cell:
    for kind, pattern in ((Fits, r"([\d,]+) tokens/s, ([\d,]+) GiB"), (Needs, r"needs ([\d,]+) GiB")):
        found = re.fullmatch(pattern, cell)
        if found is not None:
            return kind(*(float(number.replace(",", "")) for number in found.groups()))
    raise ValueError(f"neither a plan nor a refusal: {cell!r}")


def _split(text: str) -> Tuple[str, str, str]:
    """Before, in and after the table."""
    parts = re.split("|".join(map(re.escape, _MARKS)), text)
    if len(parts) != 3:
        raise ValueError(f"not one table between {_MARKS[0]!r} and {_MARKS[1]!r}")
    return parts[0], parts[1], parts[2]


def with_table(text: str, cells: Cells) -> str:
    """The page with a new table. Throws ValueError where it has none."""
    before, _, after = _split(text)
    return before + _MARKS[0] + table_of(cells) + _MARKS[1] + after


def differences(said: Cells, planned: Cells, tolerance: float) -> List[str]:
    """A line for each pair that one of them lacks, that fits in one only, or whose numbers differ by more than so large
    a part."""
    lines = []
    for pair in sorted({*said, *planned}):
        of_page, of_plan = said.get(pair), planned.get(pair)
        if type(of_page) is type(of_plan):
            numbers = zip(dataclasses.astuple(of_page), dataclasses.astuple(of_plan))
            if all(abs(a - b) <= tolerance * abs(b) for a, b in numbers):
                continue
        lines.append(f"{' on '.join(pair)}: the page says {of_page}, plan says {of_plan}")
    return lines


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__.partition("\n\n")[0], formatter_class=argparse.RawDescriptionHelpFormatter
    )
    default = ROOT / "build/cpu/src/cli/layerstream"
    parser.add_argument("--program", type=Path, default=default, help="layerstream; default: %(default)s")
    options = parser.parse_args(arguments)
    outcomes = plan_all(options.program, os.cpu_count() or 1)
    cells = {pair: cell_of(outcome) for pair, outcome in outcomes.items()}
    PAGE.write_text(with_table(PAGE.read_text(), cells))
    print(PAGE)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
