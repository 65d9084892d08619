"""From datasets to token shards."""

from __future__ import annotations

import contextlib
import dataclasses
import tempfile
from importlib import metadata
from pathlib import Path

from . import lock, manifest, mixing, token_texts
from .chat_template import ChatTemplate
from .encode import Encoder, EncodeSettings, fit
from .errors import PrepareError, RecordError
from .formats import RecordFormat, Text, detect_format
from .hf_tokenizer import FILES, HfTokenizer
from .progress import Progress
from .report import DatasetReport, report_lines
from .shards import id_bytes, plan_shards, shard_bytes, shard_name, write_shard
from .sources import RawRecord, find_files, read_records
from .spool import Spool


@dataclasses.dataclass(frozen=True)
class Dataset:
    name: str
    files: list[Path]
    format: RecordFormat | None  # None: told from the first record of each file

    def bytes(self) -> int:
        return sum(path.stat().st_size for path in self.files)


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


@dataclasses.dataclass(frozen=True)
class OutputPlace:
    """One of both."""

    directory: Path | None = None
    cache: Path | None = None  # of directories that are named by the content of their shards

    def directory_for(self, content_hash: str) -> Path:
        return self.directory or self.cache / content_hash[:32]


@dataclasses.dataclass(frozen=True)
class Result:
    shards: list[Path]
    lines: list[str]  # what to tell the user


class DatasetReader:
    """Puts the documents of a dataset into a spool."""

    def __init__(self, encoder: Encoder, settings: Settings, progress: Progress):
        self._encoder, self._settings, self._progress = encoder, settings, progress

    def read(self, dataset: Dataset, spool: Spool) -> DatasetReport:
        """Throws PrepareError with the place for the first bad record, unless those are skipped."""
        report, done = DatasetReport(dataset.name), 0
        self._progress.begin(f"{dataset.name}: tokenizing", dataset.bytes())
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
                self._progress.at(done + record.end, f"{report.records} records")
            done += path.stat().st_size
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
        overlong, is_text = self._settings.overlong, isinstance(sample, Text)
        if overlong is None:
            return "split" if is_text else "truncate"
        if overlong == "keep-text":
            return "keep" if is_text else "truncate"
        if overlong == "split" and not is_text:
            raise PrepareError(
                f"{record.place}: --overlong split is for plain text, this record is {record_format.name}; choose "
                "truncate, drop or error"
            )
        return overlong


def hash_files(datasets: list[Dataset], progress: Progress) -> list[list[dict]]:
    """[dataset][file]"""
    done = 0

    def read(count: int) -> None:
        nonlocal done
        done += count
        progress.at(done)

    progress.begin("hashing the datasets", sum(dataset.bytes() for dataset in datasets))
    return [
        [{"file": path.name, "sha256": manifest.hash_of_file(path, read)} for path in dataset.files]
        for dataset in datasets
    ]


def describe(
    datasets: list[Dataset],
    tokenizer: HfTokenizer,
    template: ChatTemplate | None,
    settings: Settings,
    progress: Progress,
) -> dict:
    """All that the tokens depend on, by content: not where files lie."""
    template_source = template.source if template else None
    description = {
        "tool": manifest.hash_of_tool(),
        "packages": {name: metadata.version(name) for name in ("tokenizers", "jinja2")},
        "datasets": [
            {
                "name": dataset.name,
                "format": dataclasses.asdict(dataset.format) if dataset.format else None,
                "files": files,
            }
            for dataset, files in zip(datasets, hash_files(datasets, progress))
        ],
        "tokenizer": manifest.hash_of_files(tokenizer.directory / name for name in FILES),
        "chat_template": template_source,
        "template_variables": template.variables if template else None,
        "settings": dataclasses.asdict(settings),
    }
    # Not the date, which some templates write into their text: a run that goes on tomorrow wants today's tokens.
    return description


def prepare(
    datasets: list[Dataset],
    tokenizer: HfTokenizer,
    template: ChatTemplate | None,
    settings: Settings,
    place: OutputPlace,
) -> Result:
    """Writes the shards unless they are there already."""
    progress = Progress()
    description = describe(datasets, tokenizer, template, settings, progress)
    content_hash = manifest.hash_of_description(description)
    output = place.directory_for(content_hash)
    if found := _up_to_date(output, content_hash):
        return found
    try:
        output.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise PrepareError(f"{output}: {error.strerror}; give another directory, that can be written") from None
    with lock.locked(output):
        if found := _up_to_date(output, content_hash):  # by the run that this one has waited for
            return found
        made = _make(datasets, Encoder(tokenizer, template, settings.encode), settings, output, progress)
        token_texts.write(output, tokenizer.texts())
        manifest.write(output, {"hash": content_hash, "made_from": description, **made})
    return _result(output, made)


def _up_to_date(output: Path, content_hash: str) -> Result | None:
    before = manifest.read(output)
    if not manifest.is_up_to_date(output, before, content_hash):
        return None
    return _result(output, before, f"{output}: up to date, nothing to do")


def _result(output: Path, made: dict, *lines: str) -> Result:
    shards = [output / shard["file"] for shard in made["shards"]]
    return Result(shards, [*lines, *report_lines(made["datasets"], made["shards"], output)])


def _make(datasets: list[Dataset], encoder: Encoder, settings: Settings, output: Path, progress: Progress) -> dict:
    """What the manifest says of datasets and shards."""
    with contextlib.ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix=lock.SPOOL_PREFIX, dir=output)))
        reader = DatasetReader(encoder, settings, progress)
        spools, figures = [], []
        for number, dataset in enumerate(datasets):
            spools.append(Spool(directory / str(number)))
            stack.callback(spools[-1].close)
            figures.append(reader.read(dataset, spools[-1]).figures())
        order = _order(datasets, spools, settings)
        for number, of_dataset in enumerate(figures):
            of_dataset["taken"] = sum(1 for drawn, _ in order if drawn == number)
        manifest.clear(output, manifest.read(output))
        shards = _write_shards(output, spools, order, id_bytes(encoder.largest_id), settings.max_shard_bytes, progress)
    return {"datasets": figures, "shards": shards}


def _order(datasets: list[Dataset], spools: list[Spool], settings: Settings) -> list:
    for dataset, spool in zip(datasets, spools):
        if not len(spool) and settings.mix_strategy != mixing.CONCAT:
            raise PrepareError(f"{dataset.name}: no document is left to mix; see its records or take it out")
    counts = [len(spool) for spool in spools]
    if not sum(counts):
        raise PrepareError(f"{', '.join(d.name for d in datasets)}: no document is left; no record has a target")
    return mixing.mix(counts, settings.mix_strategy, settings.probabilities, settings.seed)


def _write_shards(
    output: Path, spools: list[Spool], order: list, bytes_of_id: int, max_bytes: int, progress: Progress
) -> list:
    lengths = [spools[spool].length(index) for spool, index in order]
    plan = plan_shards(lengths, bytes_of_id, max_bytes)
    progress.begin(f"{output}: writing", shard_bytes(lengths, bytes_of_id))
    shards, done = [], 0
    for number, documents in enumerate(plan):
        shards.append(
            write_shard(
                output / shard_name(number, len(plan)),
                spools,
                order[documents.start : documents.stop],
                bytes_of_id,
                lambda size, before=done: progress.at(before + size),
            )
        )
        done += shards[-1]["bytes"]
    return shards
