"""LLaMA-Factory's dataset_info.json: names of datasets, their files, formats, columns and tags."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from .errors import PrepareError
from .formats import RecordFormat
from .json_file import read_json

_IGNORED = {"file_sha1", "subset", "split"}  # of no meaning for a local file
_COLUMNS = {
    "alpaca": {
        "prompt": "instruction",
        "query": "query",
        "response": "response",
        "history": "history",
        "system": "system",
        "tools": "tools",
    },
    "sharegpt": {"messages": "messages", "system": "system", "tools": "tools"},
}
_SHAREGPT_TAGS = {
    "role_tag": "from",
    "content_tag": "value",
    "user_tag": "human",
    "assistant_tag": "gpt",
    "observation_tag": "observation",
    "function_tag": "function_call",
    "system_tag": "system",
}
_OPENAI_TAGS = {
    "role_tag": "role",
    "content_tag": "content",
    "user_tag": "user",
    "assistant_tag": "assistant",
    "observation_tag": "tool",
    "function_tag": "",
    "system_tag": "system",
}
_ROLES = {
    "user_tag": "user",
    "assistant_tag": "assistant",
    "observation_tag": "tool",
    "function_tag": "function_call",
    "system_tag": "system",
}


@dataclasses.dataclass(frozen=True)
class NamedDataset:
    name: str
    path: Path
    format: RecordFormat


def read_dataset_info(path: Path) -> dict:
    entries = read_json(path, "utf-8-sig")
    if not isinstance(entries, dict):
        raise PrepareError(f"{path}: must be an object: name of a dataset: description")
    return entries


def find_dataset(path: Path, entries: dict, name: str) -> NamedDataset:
    """`entries` as read from `path`; file names are relative to it."""
    if name not in entries:
        raise PrepareError(f"{path}: no dataset '{name}'; there are {', '.join(entries) or 'none'}")
    place, entry = f"{path}: {name}", entries[name]
    if not isinstance(entry, dict) or not isinstance(entry.get("file_name"), str):
        raise PrepareError(f"{place}: no file_name; only local files are read, download others first")
    if entry.get("ranking"):
        raise PrepareError(f"{place}: ranking: preference pairs have no place in token shards")
    for key in entry.keys() - _IGNORED - {"file_name", "formatting", "columns", "tags", "ranking"}:
        raise PrepareError(f"{place}: key '{key}' is not supported; take it out if the data is right without it")
    formatting = entry.get("formatting", "alpaca")
    if formatting not in ("alpaca", "sharegpt", "openai"):
        raise PrepareError(f"{place}: formatting '{formatting}'; known are alpaca, sharegpt and openai")
    columns = entry.get("columns")
    record_format = (
        _alpaca_format(place, columns)
        if formatting == "alpaca"
        else _messages_format(place, formatting, columns, entry.get("tags", {}))
    )
    return NamedDataset(name, path.parent / entry["file_name"], record_format)


def _check_keys(place: str, what: str, given: dict, known) -> None:
    for key in given:
        if key not in known:
            raise PrepareError(f"{place}: {what}: '{key}' is not supported; known are {', '.join(known)}")


def _alpaca_format(place: str, columns: dict | None) -> RecordFormat:
    """Columns that are not named do not exist, except where none is named at all: as LLaMA-Factory reads them."""
    if columns is None:
        return RecordFormat("alpaca", history=None, system=None, tools=None)
    _check_keys(place, "columns", columns, _COLUMNS["alpaca"])
    if "prompt" not in columns:
        raise PrepareError(f"{place}: columns: no 'prompt'")
    if "response" not in columns:  # how LLaMA-Factory describes text for pretraining
        return RecordFormat("text", text=columns["prompt"])
    fields = {field: columns.get(key) for key, field in _COLUMNS["alpaca"].items()}
    return RecordFormat("alpaca", **fields)


def _messages_format(place: str, formatting: str, columns: dict | None, tags: dict) -> RecordFormat:
    _check_keys(place, "columns", columns or {}, _COLUMNS["sharegpt"])
    _check_keys(place, "tags", tags, _SHAREGPT_TAGS)
    columns = columns or {}
    openai = formatting == "openai"
    tags = {**(_OPENAI_TAGS if openai else _SHAREGPT_TAGS), **tags}
    return RecordFormat(
        formatting,
        messages=columns.get("messages") or ("messages" if openai else "conversations"),
        system=columns.get("system"),
        tools=columns.get("tools"),
        role_tag=tags["role_tag"],
        content_tag=tags["content_tag"],
        roles={tags[tag]: role for tag, role in _ROLES.items() if tags[tag]},
    )
