#!/usr/bin/env python3
"""Performance studies, each one command: runs benches/train_step at a few points and writes OUTPUT/STUDY.md (text and
table), OUTPUT/STUDY.svg (plot) and what the bench printed at each point (OUTPUT/STUDY-N.txt).

    python3 profiles/studies/study.py overlap      # weight slots and chunks: what hides behind computation
    python3 profiles/studies/study.py optimizer    # host, device, both; clipping on and off
    python3 profiles/studies/study.py placement    # device memory from 16 GiB to all

Exit code 0, also when a point was refused because it does not fit; 1 when one failed otherwise, or none ran; 2 for
an option that cannot be.
"""

import argparse
import datetime
import json
import os
import platform
import shlex
import subprocess
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

import bench_output  # noqa: E402
import studies  # noqa: E402

ROOT = Path(os.path.relpath(Path(__file__).resolve().parents[2]))


def positive(text):
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value}: at least 1 is needed")
    return value


def limit(text):
    return text if text == "all" else str(positive(text))


def setting(text):
    key, equals, value = text.partition("=")
    if not (key and equals):
        raise argparse.ArgumentTypeError(f"'{text}': expected KEY=VALUE")
    return key, value


def arguments_of(argv):
    common = argparse.ArgumentParser(add_help=False)
    common.add_argument(
        "--bench", type=Path, default=ROOT / "build/cuda/benches/train_step", help="default: %(default)s"
    )
    common.add_argument(
        "--model", type=Path, default=ROOT / "examples/qwen2.5-7b-shape/config.json", help="default: %(default)s"
    )
    common.add_argument("--layers", type=positive, metavar="N", help="cut the model to its first N decoder layers")
    common.add_argument("--tokens", type=positive, default=1024, help="of a row; default: %(default)s")
    common.add_argument("--step-tokens", type=positive, default=16384, help="default: %(default)s")
    common.add_argument("--steps", type=positive, default=3, help="measured at each point; default: %(default)s")
    common.add_argument("--warmup", type=positive, default=2, help="steps before them; default: %(default)s")
    common.add_argument("--host-memory-limit", metavar="BYTES", help="such as 122GiB")
    common.add_argument(
        "--set",
        type=setting,
        action="append",
        default=[],
        metavar="KEY=VALUE",
        dest="settings",
        help="another configuration key, at every point; may be given several times",
    )
    common.add_argument("--output", type=Path, default=Path("runs/studies"), help="folder; default: %(default)s")
    common.add_argument("--timeout", type=positive, default=600, help="seconds a point may take; default: %(default)s")
    common.add_argument("--traces", action="store_true", help="timelines OUTPUT/STUDY-N.json, for ui.perfetto.dev")
    instead = common.add_mutually_exclusive_group()
    instead.add_argument("--dry-run", action="store_true", help="print the commands and stop")
    instead.add_argument(
        "--print-nsys",
        action="store_true",
        help="print commands that record the same points with Nsight Systems, and stop",
    )

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="study", required=True)
    for name, text in (("overlap", "weight slots and chunks"), ("optimizer", "who updates, and when")):
        commands.add_parser(name, parents=[common], help=text)
    command = commands.add_parser("placement", parents=[common], help="device memory against speed")
    command.add_argument(
        "--limits",
        type=limit,
        nargs="+",
        metavar="GIB",
        default=["16", "24", "40", "56", "80", "104", "128", "all"],
        help="device memory limits, whole GiB or all; default: %(default)s",
    )
    arguments = parser.parse_args(argv)
    if arguments.step_tokens % arguments.tokens != 0:
        parser.error(f"--step-tokens {arguments.step_tokens}: not a multiple of --tokens {arguments.tokens}")
    return parser, arguments


def study_of(arguments):
    if arguments.study == "placement":
        return studies.placement(arguments.limits)
    return {"overlap": studies.overlap, "optimizer": studies.optimizer}[arguments.study]()


def cut_config(text, layers):
    """A config.json with its first `layers` decoder layers only; throws ValueError where there are fewer."""
    config = json.loads(text)
    present = config.get("num_hidden_layers")
    if not isinstance(present, int) or present < layers:
        raise ValueError(f"num_hidden_layers is {present}, cannot be cut to {layers}")
    config["num_hidden_layers"] = layers
    if isinstance(config.get("layer_types"), list):
        config["layer_types"] = config["layer_types"][:layers]
    return json.dumps(config, indent=2) + "\n"


class Commands:
    """Command lines of a study's points."""

    def __init__(self, study, arguments, model):
        self.study, self.arguments, self.model = study, arguments, model

    def stem(self, index):
        return self.arguments.output / f"{self.study.name}-{index + 1}"

    def _settings(self, point):
        settings = {**self.study.settings, **point.settings, **dict(self.arguments.settings)}
        if self.arguments.host_memory_limit:
            settings["host_memory_limit"] = self.arguments.host_memory_limit
        return settings

    @staticmethod
    def _as_options(settings):
        return [word for key, value in settings.items() for word in ("--set", f"{key}={value}")]

    def bench(self, index):
        a = self.arguments
        sizes = {"--tokens": a.tokens, "--step-tokens": a.step_tokens, "--steps": a.steps, "--warmup": a.warmup}
        command = [
            os.path.abspath(a.bench) if a.bench.parent == Path(".") else str(a.bench),
            "--model",
            str(self.model),
        ]
        command += [str(word) for option in sizes.items() for word in option]
        if a.traces:
            command += ["--trace", f"{self.stem(index)}.json"]
        return command + self._as_options(self._settings(self.study.points[index]))

    def nsys(self, index):
        """`layerstream train` with the point's settings on this project's text, one step of it recorded, then killed
        before it would write a checkpoint."""
        a = self.arguments
        first = a.warmup + 1
        settings = {
            "config_name": self.model,
            "train_file": f"[{ROOT / 'src'}, {ROOT / 'backends'}]",
            "output_dir": f"{self.stem(index)}-run",
            "cutoff_len": a.tokens,
            "per_device_train_batch_size": a.step_tokens // a.tokens,
            "compute_dtype": "bf16",
            "learning_rate": "1e-5",
            "max_steps": first + 100,
            "save_steps": 0,
            "profile.start_step": first,
            "profile.num_steps": 1,
            **self._settings(self.study.points[index]),
        }
        recorder = (
            "nsys profile --trace=cuda,nvtx,osrt -c cudaProfilerApi --capture-range-end=stop-shutdown --kill=sigkill"
        )
        program = a.bench.parent.parent / "src/cli/layerstream"
        return [
            *recorder.split(),
            "-o",
            str(self.stem(index)),
            str(program),
            "train",
            str(ROOT / "examples/quickstart.yaml"),
            *self._as_options(settings),
        ]


def run_point(study, point, command, log, timeout):
    """Runs the bench and keeps what it printed in `log`. Throws UnexpectedOutput if that is not understood, OSError
    if there is no such program. @return the outcome, and whether it counts as a failure of the study"""
    try:
        done = subprocess.run(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, errors="replace", timeout=timeout
        )
    except subprocess.TimeoutExpired:
        return studies.Outcome(point, failure=f"failed: not done after {timeout} s"), True
    log.write_text(f"$ {shlex.join(command)}\n{done.stdout}{done.stderr}")
    if done.returncode != 0:
        outcome = studies.Outcome(point, failure=bench_output.failure(done.returncode, done.stderr))
        return outcome, done.returncode != bench_output.REFUSED
    return studies.Outcome(point, run=bench_output.parse(done.stdout + done.stderr, study.needs_plan)), False


def commit():
    try:
        return subprocess.run(
            ["git", "-C", str(ROOT), "describe", "--always", "--dirty"], check=True, capture_output=True, text=True
        ).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def report(study, outcomes, arguments, argv):
    """The study's page; at least one of the outcomes is a run."""
    run = next(outcome.run for outcome in outcomes if outcome.run is not None)
    profile = f"\n- Planned with the rates of {run.profile}" if run.profile else ""
    return f"""# Study: {study.name}, {datetime.datetime.now(datetime.timezone.utc):%Y-%m-%d}

{study.shows}
{run.parameters:,} parameters, {run.step_tokens:,} tokens a step in rows of {arguments.tokens:,}; median of
{arguments.steps} steps after {arguments.warmup}.

    {shlex.join(["python3", str(ROOT / "profiles/studies/study.py"), *argv])}

- Machine: {run.machine}
- Measured before the first point: {run.rates}{profile}
- Versions: layerstream at commit {commit()}, Python {platform.python_version()}

{studies.table(study, outcomes)}
![{study.name}]({study.name}.svg)

{study.look_at}
"""


def main(argv):
    parser, arguments = arguments_of(argv)
    study = study_of(arguments)
    for key, _ in arguments.settings:
        if key in study.varied():
            parser.error(f"--set {key}: the study {study.name} sets it by itself")

    model = arguments.model
    if arguments.layers:
        model = arguments.output / f"{arguments.layers}-layers" / "config.json"
        try:
            config = cut_config(arguments.model.read_text(), arguments.layers)
        except (OSError, ValueError) as error:
            parser.error(f"--model {arguments.model}: {error}")
        if not arguments.dry_run:
            model.parent.mkdir(parents=True, exist_ok=True)
            model.write_text(config)
    commands = Commands(study, arguments, model)
    if arguments.dry_run or arguments.print_nsys:
        make = commands.bench if arguments.dry_run else commands.nsys
        for index in range(len(study.points)):
            print(shlex.join(make(index)))
        return 0

    arguments.output.mkdir(parents=True, exist_ok=True)
    outcomes, any_failed = [], False
    for index, point in enumerate(study.points):
        print(f"[{index + 1}/{len(study.points)}] {study.name}: {point.label} ...", end=" ", flush=True)
        log = Path(f"{commands.stem(index)}.txt")
        start = time.monotonic()
        try:
            outcome, failed = run_point(study, point, commands.bench(index), log, arguments.timeout)
        except OSError as error:
            sys.exit(f"\n--bench {arguments.bench}: {error.strerror}; build it, or name another")
        except bench_output.UnexpectedOutput as error:
            sys.exit(f"\n{shlex.join(commands.bench(index))}\n{error}")
        any_failed |= failed
        outcomes.append(outcome)
        said = f"{outcome.run.tokens_per_second:,.0f} tokens/s" if outcome.run else outcome.failure
        print(f"{said} ({time.monotonic() - start:.0f} s)", flush=True)
    if all(outcome.run is None for outcome in outcomes):
        sys.exit(f"no point ran; what the bench printed: {commands.stem(0)}.txt and its neighbours")
    page = arguments.output / f"{study.name}.md"
    page.write_text(report(study, outcomes, arguments, argv))
    page.with_suffix(".svg").write_text(study.draw(outcomes))
    print(f"written: {page}, {page.with_suffix('.svg')}")
    return int(any_failed)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
