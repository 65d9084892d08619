"""The command line."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from . import mixing
from .chat_template import ChatTemplate
from .dataset_info import find_dataset, read_dataset_info
from .encode import OVERLONG, EncodeSettings
from .errors import PrepareError
from .formats import FORMATS, default_format
from .hf_tokenizer import HfTokenizer
from .json_file import read_json
from .prepare import Dataset, OutputPlace, Result, Settings, make_dataset, prepare

DESCRIPTION = """\
Turns datasets into token shards for layerstream, with a Hugging Face tokenizer and its chat template.
Needs the Python packages tokenizers and jinja2, for Parquet also pyarrow.

    python3 tools/prepare_data chats.jsonl --tokenizer models/qwen --cutoff-len 4096 --output data/chats

Targets are the assistant's turns, completions, and all of plain text.
"""


def parse_arguments(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="prepare_data", description=DESCRIPTION, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add(
        "inputs",
        nargs="+",
        metavar="INPUT",
        help="a dataset: file (.jsonl, .json, .parquet, else raw text), directory, or name in --dataset-info",
    )
    add("--tokenizer", type=Path, required=True, metavar="DIRECTORY", help="of a Hugging Face model")
    output = parser.add_mutually_exclusive_group(required=True)
    output.add_argument("--output", type=Path, metavar="DIRECTORY", help="for the token shards")
    output.add_argument(
        "--cache", type=Path, metavar="DIRECTORY", help="instead: for directories of them, named by their content"
    )
    add("--print-shards", action="store_true", help="print only their paths, and the report to standard error")
    add("--dataset-info", type=Path, metavar="FILE", help="LLaMA-Factory's dataset_info.json")
    add("--format", choices=FORMATS, help="of inputs given as paths (default: told from the columns)")
    add("--chat-template", metavar="NAME", help="of several that the model brings (default: default)")
    add("--chat-template-file", type=Path, metavar="FILE", help="a Jinja file instead of the model's template")
    add("--template-variables", metavar="JSON", help='for the template, e.g. {"enable_thinking": false}')
    add("--model-config", type=Path, metavar="FILE", help="config.json: refuse tokens outside its vocab_size")
    add("--train-on-prompt", action="store_true", help="every token is a target")
    add("--mask-history", action="store_true", help="of the assistant's turns only the last is a target")
    add("--no-eos", action="store_true", help="do not end plain text and completions with eos_token")
    add("--cutoff-len", type=int, metavar="TOKENS", help="of a document (default: any length)")
    add(
        "--overlong",
        choices=OVERLONG,
        help="what becomes of longer ones (default: split plain text, truncate others; keep-text: leave plain text "
        "to layerstream, which splits it where rows end)",
    )
    add("--on-bad-line", choices=("error", "skip"), default="error", help="unusable records (default error)")
    add("--mix-strategy", choices=mixing.STRATEGIES, default=mixing.CONCAT, help="of several inputs (default concat)")
    add("--interleave-probs", metavar="P,P,...", help="one for each input (default: equal)")
    add("--seed", type=int, default=42, help="of the interleaving (default 42)")
    add("--shard-size", type=int, default=4096, metavar="MIB", help="a shard's limit (default 4096)")
    return parser.parse_args(arguments)


def read_vocab_size(path: Path) -> int:
    config = read_json(path)
    for part in (config, config.get("text_config", {})):
        if isinstance(part.get("vocab_size"), int):
            return part["vocab_size"]
    raise PrepareError(f"{path}: no vocab_size; give the config.json of a model")


def read_probabilities(text: str | None, strategy: str, count: int) -> list[float] | None:
    if text is None:
        return None
    if strategy == mixing.CONCAT:
        raise PrepareError("--interleave-probs: --mix-strategy concat takes none; choose interleave_under or _over")
    try:
        probabilities = [float(part) for part in text.split(",")]
    except ValueError:
        raise PrepareError(f"--interleave-probs {text}: not numbers with commas between them") from None
    if len(probabilities) != count:
        raise PrepareError(f"--interleave-probs {text}: {len(probabilities)} probabilities for {count} inputs")
    if not all(0 < p < float("inf") for p in probabilities):
        raise PrepareError(f"--interleave-probs {text}: each must be positive")
    return probabilities


def read_settings(arguments: argparse.Namespace) -> Settings:
    if arguments.train_on_prompt and arguments.mask_history:
        raise PrepareError("--train-on-prompt and --mask-history contradict each other; give one of them")
    if arguments.cutoff_len is not None and arguments.cutoff_len < 2:
        raise PrepareError(f"--cutoff-len {arguments.cutoff_len}: must be at least 2, a token and a target")
    if arguments.overlong and arguments.cutoff_len is None:
        raise PrepareError(f"--overlong {arguments.overlong} needs --cutoff-len")
    if arguments.shard_size < 1:
        raise PrepareError(f"--shard-size {arguments.shard_size}: must be at least 1 MiB")
    return Settings(
        encode=EncodeSettings(
            train_on_prompt=arguments.train_on_prompt,
            mask_history=arguments.mask_history,
            append_eos=not arguments.no_eos,
            vocab_size=read_vocab_size(arguments.model_config) if arguments.model_config else None,
        ),
        cutoff_len=arguments.cutoff_len,
        overlong=arguments.overlong,
        skip_bad_records=arguments.on_bad_line == "skip",
        mix_strategy=arguments.mix_strategy,
        probabilities=read_probabilities(arguments.interleave_probs, arguments.mix_strategy, len(arguments.inputs)),
        seed=arguments.seed,
        max_shard_bytes=arguments.shard_size << 20,
    )


def find_datasets(arguments: argparse.Namespace) -> list[Dataset]:
    """An input is a name in --dataset-info if that has it, otherwise a path."""
    info = arguments.dataset_info
    entries = read_dataset_info(info) if info else {}
    datasets = []
    for given in arguments.inputs:
        if info and (given in entries or not Path(given).exists()):
            named = find_dataset(info, entries, given)
            datasets.append(make_dataset(named.name, named.path, named.format))
        else:
            record_format = default_format(arguments.format) if arguments.format else None
            datasets.append(make_dataset(given, Path(given), record_format))
    return datasets


def find_template(arguments: argparse.Namespace, tokenizer: HfTokenizer) -> ChatTemplate | None:
    try:
        variables = json.loads(arguments.template_variables or "{}")
    except ValueError as error:
        raise PrepareError(f"--template-variables: not JSON: {error}") from None
    if not isinstance(variables, dict):
        raise PrepareError("--template-variables: must be an object: name of a variable: value")
    path = arguments.chat_template_file
    if path is None:
        return tokenizer.chat_template(arguments.chat_template, variables)
    try:
        source = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise PrepareError(f"{path}: {error}") from None
    return tokenizer.make_template(source, variables, str(path))


def run(arguments: argparse.Namespace) -> Result:
    settings = read_settings(arguments)
    datasets = find_datasets(arguments)
    tokenizer = HfTokenizer(arguments.tokenizer)
    place = OutputPlace(arguments.output, arguments.cache)
    return prepare(datasets, tokenizer, find_template(arguments, tokenizer), settings, place)


def main(arguments: list[str] | None = None) -> None:
    parsed = parse_arguments(arguments)
    try:
        result = run(parsed)
    except (PrepareError, OSError) as error:
        sys.exit(f"prepare_data: {error}")
    print("\n".join(result.lines), file=sys.stderr if parsed.print_shards else sys.stdout)
    if parsed.print_shards:
        print("\n".join(map(str, result.shards)))
