"""From datasets to token shards."""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import tempfile
from importlib import metadata
from pathlib import Path

from . import manifest, mixing
from .chat_template import ChatTemplate
from .encode import Encoder, EncodeSettings, fit
from .errors import PrepareError, RecordError
from .formats import RecordFormat, Text, detect_format
from .hf_tokenizer import FILES, HfTokenizer
from .report import DatasetReport
from .shards import id_bytes, plan_shards, shard_name, write_shard
from .sources import RawRecord, find_files, read_records
from .spool import Spool


@dataclasses.dataclass(frozen=True)
class Dataset:
    name: str
    files: list[Path]
    format: RecordFormat | None  # None: told from the first record of each file


def make_dataset(name: str, path: Path, record_format: RecordFormat | None) -> Dataset:
    return Dataset(name, find_files(path), record_format)


@dataclasses.dataclass(frozen=True)
class Settings:
    encode: EncodeSettings
    cutoff_len: int | None = None
    overlong: str | None = None  # None: plain text is split, all else truncated
    skip_bad_records: bool = False
    mix_strategy: str = mixing.CONCAT
    probabilities: list[float] | None = None
    seed: int = 42
    max_shard_bytes: int = 1 << 32


class DatasetReader:
    """Puts the documents of a dataset into a spool."""

    def __init__(self, encoder: Encoder, settings: Settings):
        self._encoder, self._settings = encoder, settings

    def read(self, dataset: Dataset, spool: Spool) -> DatasetReport:
        """Throws PrepareError with the place for the first bad record, unless those are skipped."""
        report = DatasetReport(dataset.name)
        for path in dataset.files:
            record_format = dataset.format
            for record in read_records(path):
                report.records += 1
                try:
                    if isinstance(record.value, RecordError):
                        raise record.value
                    record_format = record_format or detect_format(record.value)
                    self._add(record, record_format, spool, report)
                except RecordError as error:
                    self._note_bad(f"{record.place}: {error}", report)
        spool.finish()
        return report

    def _note_bad(self, message: str, report: DatasetReport) -> None:
        if not self._settings.skip_bad_records:
            raise PrepareError(f"{message}; --on-bad-line skip leaves out such records")
        report.add_bad(message)

    def _add(self, record: RawRecord, record_format: RecordFormat, spool: Spool, report: DatasetReport) -> None:
        sample = record_format.read(record.value)
        document = self._encoder.encode(sample)
        overlong = self._overlong_of(sample, record, record_format)
        pieces = fit(document, self._settings.cutoff_len, overlong)
        report.lengths.append(len(document.ids))
        is_overlong = not any(piece is document for piece in pieces)
        kept = [piece for piece in pieces if piece.has_targets]
        if is_overlong and not pieces:
            report.dropped_overlong += 1
        elif not kept:
            report.without_targets += 1
        elif is_overlong:
            report.split += overlong == "split"
            report.truncated += overlong == "truncate"
        for piece in kept:
            spool.add(piece)
        report.documents += len(kept)

    def _overlong_of(self, sample, record: RawRecord, record_format: RecordFormat) -> str:
        overlong = self._settings.overlong or ("split" if isinstance(sample, Text) else "truncate")
        if overlong == "split" and not isinstance(sample, Text):
            raise PrepareError(
                f"{record.place}: --overlong split is for plain text, this record is {record_format.name}; choose "
                "truncate, drop or error"
            )
        return overlong


def describe(datasets: list[Dataset], tokenizer: HfTokenizer, template: ChatTemplate | None, settings: Settings):
    """All that the tokens depend on, by content: not where files lie."""
    template_source = template.source if template else None
    description = {
        "tool": manifest.hash_of_tool(),
        "packages": {name: metadata.version(name) for name in ("tokenizers", "jinja2")},
        "datasets": [
            {
                "name": dataset.name,
                "format": dataclasses.asdict(dataset.format) if dataset.format else None,
                "files": [{"file": path.name, "sha256": manifest.hash_of_file(path)} for path in dataset.files],
            }
            for dataset in datasets
        ],
        "tokenizer": manifest.hash_of_files(tokenizer.directory / name for name in FILES),
        "chat_template": template_source,
        "template_variables": template.variables if template else None,
        "settings": dataclasses.asdict(settings),
    }
    if template_source and "strftime_now" in template_source:
        description["date"] = datetime.date.today().isoformat()
    return description


def prepare(
    datasets: list[Dataset], tokenizer: HfTokenizer, template: ChatTemplate | None, settings: Settings, output: Path
) -> list[str]:
    """Writes the shards unless they are there already. Returns what to tell the user, line by line."""
    description = describe(datasets, tokenizer, template, settings)
    content_hash = manifest.hash_of_description(description)
    before = manifest.read(output)
    if manifest.is_up_to_date(output, before, content_hash):
        return [f"{output}: up to date, nothing to do"]
    output.mkdir(parents=True, exist_ok=True)
    with contextlib.ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix=".spool-", dir=output)))
        reader = DatasetReader(Encoder(tokenizer, template, settings.encode), settings)
        spools, reports = [], []
        for number, dataset in enumerate(datasets):
            spools.append(Spool(directory / str(number)))
            stack.callback(spools[-1].close)
            reports.append(reader.read(dataset, spools[-1]))
        order = _order(datasets, spools, settings)
        manifest.clear(output, before)
        shards = _write_shards(output, spools, order, id_bytes(tokenizer.largest_id), settings.max_shard_bytes)
    manifest.write(
        output,
        {
            "hash": content_hash,
            "made_from": description,
            "datasets": [report.figures() for report in reports],
            "shards": shards,
        },
    )
    return [line for report in reports for line in report.lines()] + _summary(output, datasets, order, shards)


def _order(datasets: list[Dataset], spools: list[Spool], settings: Settings) -> list:
    for dataset, spool in zip(datasets, spools):
        if not len(spool) and settings.mix_strategy != mixing.CONCAT:
            raise PrepareError(f"{dataset.name}: no document is left to mix; see its records or take it out")
    counts = [len(spool) for spool in spools]
    if not sum(counts):
        raise PrepareError(f"{', '.join(d.name for d in datasets)}: no document is left; no record has a target")
    return mixing.mix(counts, settings.mix_strategy, settings.probabilities, settings.seed)


def _write_shards(output: Path, spools: list[Spool], order: list, bytes_of_id: int, max_bytes: int) -> list:
    plan = plan_shards([spools[spool].length(index) for spool, index in order], bytes_of_id, max_bytes)
    return [
        write_shard(
            output / shard_name(number, len(plan)), spools, order[documents.start : documents.stop], bytes_of_id
        )
        for number, documents in enumerate(plan)
    ]


def _summary(output: Path, datasets: list[Dataset], order: list, shards: list) -> list[str]:
    lines = []
    if len(datasets) > 1:
        for number, dataset in enumerate(datasets):
            taken = sum(1 for drawn, _ in order if drawn == number)
            lines.append(f"{dataset.name}: {taken} of {len(order)} documents ({taken / len(order):.1%})")
    tokens, targets = (sum(shard[key] for shard in shards) for key in ("tokens", "targets"))
    lines.append(
        f"{output}: {len(order)} documents, {tokens} tokens, {targets} targets ({targets / tokens:.1%}) in "
        f"{len(shards)} shard{'s' if len(shards) > 1 else ''}"
    )
    return lines
