"""Reads the records of a file: raw text, JSON Lines, JSON, Parquet."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from .errors import PrepareError, RecordError, needs_package

JSON_LINES = {".jsonl", ".ndjson"}
UNREADABLE = {".csv", ".tsv", ".arrow", ".gz", ".bz2", ".xz", ".zst", ".zip", ".tar", ".safetensors", ".bin"}


@dataclasses.dataclass(frozen=True)
class RawRecord:
    place: str  # file:line; file: record n where there are no lines
    value: Any  # a RecordError if the line could not be read
    end: int  # bytes of the file that are read by now


def find_files(path: Path) -> list[Path]:
    """The file, or the files below a directory in the order of their paths, without hidden ones."""
    if path.is_file():
        files = [path]
    elif path.is_dir():
        below = (f for f in path.rglob("*") if f.is_file())
        files = sorted(f for f in below if not any(part.startswith(".") for part in f.relative_to(path).parts))
    else:
        raise PrepareError(f"{path}: no such file or directory")
    if not files:
        raise PrepareError(f"{path}: the directory holds no files")
    for file in files:
        if file.suffix.lower() in UNREADABLE:
            raise PrepareError(
                f"{file}: files of this kind are not read; give raw text, .jsonl, .json or .parquet"
            )
    return files


def read_records(path: Path) -> Iterator[RawRecord]:
    suffix = path.suffix.lower()
    if suffix in JSON_LINES:
        return _read_json_lines(path)
    if suffix == ".json":
        return _read_json(path)
    if suffix == ".parquet":
        return _read_parquet(path)
    return _read_text(path)


def _decode(data: bytes) -> str:
    try:
        return data.decode("utf-8-sig")  # with or without a byte order mark
    except UnicodeDecodeError as error:
        raise RecordError(f"not UTF-8: byte {error.start} is 0x{data[error.start]:02x}") from None


def _parse(text: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise RecordError(f"not JSON: {error.msg} at column {error.colno}") from None
    except RecursionError:
        raise RecordError("not JSON: nested too deeply") from None


def _read_text(path: Path) -> Iterator[RawRecord]:
    """The whole file is one document."""
    data = path.read_bytes()
    try:
        yield RawRecord(f"{path}:1", {"text": _decode(data)}, len(data))
    except RecordError as error:
        yield RawRecord(f"{path}:1", error, len(data))


def _read_json_lines(path: Path) -> Iterator[RawRecord]:
    end = 0
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            end += len(line)
            if not line.strip():
                continue
            place = f"{path}:{number}"
            try:
                yield RawRecord(place, _parse(_decode(line)), end)
            except RecordError as error:
                yield RawRecord(place, error, end)


def _read_json(path: Path) -> Iterator[RawRecord]:
    """A list of records, each placed at the line where it begins. Lines of objects are read as JSON Lines."""
    try:
        text = path.read_bytes().decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise PrepareError(f"{path}: not UTF-8: byte {error.start}; JSON files must be UTF-8") from None
    if text.lstrip().startswith("{"):
        yield from _read_json_lines(path)
        return
    yield from _read_json_list(path, text)


def _read_json_list(path: Path, text: str) -> Iterator[RawRecord]:
    decoder, position, line, counted, bytes_in_all = json.JSONDecoder(), 0, 1, 0, path.stat().st_size

    def skip_space(begin: int) -> int:
        while begin < len(text) and text[begin] in " \t\r\n":
            begin += 1
        return begin

    def broken(at: int, cause: str) -> PrepareError:
        number = text.count("\n", 0, at) + 1
        return PrepareError(f"{path}:{number}: not JSON: {cause}; the file must be a list of records")

    position = skip_space(0)
    if text[position : position + 1] != "[":
        raise broken(position, "does not begin with '['")
    position = skip_space(position + 1)
    while text[position : position + 1] != "]":
        line, counted = line + text.count("\n", counted, position), position
        try:
            value, end = decoder.raw_decode(text, position)
        except json.JSONDecodeError as error:
            raise broken(error.pos, error.msg) from None
        yield RawRecord(f"{path}:{line}", value, bytes_in_all * end // len(text))
        position = skip_space(end)
        if text[position : position + 1] == ",":
            position = skip_space(position + 1)
        elif text[position : position + 1] != "]":
            raise broken(position, "neither ',' nor ']' after a record")
    if skip_space(position + 1) != len(text):
        raise broken(skip_space(position + 1), "text after the list")


def _read_parquet(path: Path) -> Iterator[RawRecord]:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        raise needs_package("pyarrow", f"{path}: Parquet") from None
    number, bytes_in_all = 0, path.stat().st_size
    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            records = file.metadata.num_rows
            for batch in file.iter_batches(batch_size=1024):
                for row in batch.to_pylist():
                    number += 1
                    yield RawRecord(f"{path}: record {number}", row, bytes_in_all * number // records)
    except pyarrow.ArrowException as error:
        raise PrepareError(f"{path}: not readable as Parquet: {error}") from None
