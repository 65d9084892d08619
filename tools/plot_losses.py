#!/usr/bin/env python3
"""Loss curves of runs of layerstream, from their metrics.jsonl: a table, a CSV file, a plot. Standard library only.

    python3 tools/plot_losses.py "whole rows=runs/x/out" "cut rows=runs/y/out" --every 20 --output curves

Each run is NAME=OUTPUT_DIR. A point is the mean over `every` steps, at the last of them. Prints the table in Markdown;
writes OUTPUT.csv with the loss of every step and OUTPUT.svg.
"""

import argparse
import csv
import json
import sys
from pathlib import Path

sys.path.insert(1, str(Path(__file__).resolve().parents[1] / "profiles/studies"))

import chart  # noqa: E402


def read_losses(output_dir: Path):
    """{step: loss}, in nats per target; steps with NaN or Inf are not in it."""
    with (output_dir / "metrics.jsonl").open() as lines:
        metrics = [json.loads(line) for line in lines]
    return {m["step"]: m["loss"] for m in metrics if m.get("loss") is not None}


def averaged(losses, every):
    """{last step: mean loss} of each `every` steps; what is left at the end is a point of its own."""
    points = {}
    steps = sorted(losses)
    for begin in range(0, len(steps), every):
        part = steps[begin : begin + every]
        points[part[-1]] = sum(losses[step] for step in part) / len(part)
    return points


def rows_of(runs, missing=""):
    """A row for each step that a run has: the step, and each run's loss."""
    for step in sorted({step for losses in runs.values() for step in losses}):
        yield [step] + [losses.get(step, missing) for losses in runs.values()]


def markdown(runs):
    lines = ["| step | " + " | ".join(runs) + " |", "|" + "---|" * (len(runs) + 1)]
    for step, *losses in rows_of(runs):
        cells = [f"{loss:.4f}" if loss != "" else "" for loss in losses]
        lines.append(f"| {step} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", metavar="NAME=OUTPUT_DIR")
    parser.add_argument("--every", type=int, default=20, help="steps of a point (default 20)")
    parser.add_argument("--title", default="Loss")
    parser.add_argument("--output", required=True, metavar="PATH", help="without .csv and .svg")
    arguments = parser.parse_args()
    if arguments.every < 1:
        parser.error("--every: must be at least 1")
    for run in arguments.runs:
        if not (Path(run.partition("=")[2]) / "metrics.jsonl").is_file():
            parser.error(f"{run}: not NAME=OUTPUT_DIR with a metrics.jsonl in it")
    return arguments


def main():
    arguments = parse_arguments()
    runs = {name: read_losses(Path(folder)) for name, _, folder in (run.partition("=") for run in arguments.runs)}
    with open(f"{arguments.output}.csv", "w", newline="") as file:
        csv.writer(file, lineterminator="\n").writerows([["step", *runs], *rows_of(runs)])
    points = {name: averaged(losses, arguments.every) for name, losses in runs.items()}
    curves = [chart.Line(name, list(line.items())) for name, line in points.items()]
    Path(f"{arguments.output}.svg").write_text(chart.lines(arguments.title, "step", "nats per target", curves))
    print(markdown(points))


if __name__ == "__main__":
    main()
