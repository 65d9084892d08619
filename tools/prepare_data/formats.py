"""The record formats of fine-tuning datasets, read into three kinds of sample."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from typing import Any, Union

from .errors import RecordError

FORMATS = ("text", "prompt_completion", "alpaca", "sharegpt", "openai")

SHAREGPT_ROLES = {
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "assistant": "assistant",
    "system": "system",
    "observation": "tool",
    "tool": "tool",
    "function_call": "function_call",
}
OPENAI_ROLES = {role: role for role in ("system", "developer", "user", "assistant", "tool")}


@dataclasses.dataclass(frozen=True)
class Text:
    text: str


@dataclasses.dataclass(frozen=True)
class Completion:
    prompt: str
    completion: str


@dataclasses.dataclass(frozen=True)
class Chat:
    messages: list  # as chat templates take them: dicts with role and content
    tools: list | None = None  # JSON schemas


Sample = Union[Text, Completion, Chat]


@dataclasses.dataclass(frozen=True)
class RecordFormat:
    """Which columns of a record mean what. None for a column: records have none."""

    name: str
    text: str = "text"
    prompt: str = "prompt"
    completion: str = "completion"
    instruction: str = "instruction"
    query: str | None = "input"
    response: str = "output"
    history: str | None = "history"
    system: str | None = "system"
    tools: str | None = "tools"
    messages: str = "messages"
    role_tag: str = "role"
    content_tag: str = "content"
    roles: Mapping = dataclasses.field(default_factory=lambda: OPENAI_ROLES)  # tag: role

    def read(self, record: Any) -> Sample:
        """Throws RecordError where the record is not of this format."""
        if not isinstance(record, dict):
            raise RecordError(f"a record must be an object with columns, this is {_kind(record)}")
        return _READERS[self.name](self, record)


def default_format(name: str, messages: str | None = None) -> RecordFormat:
    if name == "sharegpt":
        return RecordFormat(
            name, messages=messages or "conversations", role_tag="from", content_tag="value", roles=SHAREGPT_ROLES
        )
    return RecordFormat(name, messages=messages or "messages")


def detect_format(record: Any) -> RecordFormat:
    """By the columns of a record."""
    if not isinstance(record, dict):
        raise RecordError(f"a record must be an object with columns, this is {_kind(record)}")
    for column in ("messages", "conversations"):
        turns = record.get(column)
        if isinstance(turns, list) and turns and isinstance(turns[0], dict):
            if {"role", "content"} <= turns[0].keys():
                return default_format("openai", column)
            if {"from", "value"} <= turns[0].keys():
                return default_format("sharegpt", column)
    for columns, name in (
        ({"instruction", "output"}, "alpaca"),
        ({"prompt", "completion"}, "prompt_completion"),
        ({"text"}, "text"),
    ):
        if columns <= record.keys():
            return default_format(name)
    raise RecordError(
        f"the format cannot be told from the columns {', '.join(map(str, record)) or '(none)'}; known are text, "
        "prompt and completion, instruction and output, messages, conversations. Name it with --format, or its "
        "columns in a dataset_info.json"
    )


def _kind(value: Any) -> str:
    names = {dict: "an object", list: "a list", str: "a string", bool: "a boolean", type(None): "null"}
    return names.get(type(value), "a number" if isinstance(value, (int, float)) else type(value).__name__)


def _string(record: dict, column: str) -> str:
    if column not in record:
        raise RecordError(f"no column '{column}'; there are {', '.join(map(str, record)) or 'none'}")
    if not isinstance(record[column], str):
        raise RecordError(f"column '{column}' must be a string, it is {_kind(record[column])}")
    return record[column]


def _optional_string(record: dict, column: str | None) -> str:
    if column is None or record.get(column) is None:
        return ""
    return _string(record, column)


def _json(text: str, what: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise RecordError(f"{what} is not JSON: {error.msg} at column {error.colno}") from None


def _tools(record: dict, column: str | None) -> list | None:
    tools = record.get(column) if column else None
    if isinstance(tools, str):
        tools = _json(tools, f"column '{column}'") if tools.strip() else None
    if tools is not None and not isinstance(tools, list):
        raise RecordError(f"column '{column}' must be a list of tools, it is {_kind(tools)}")
    return tools or None


def _read_text(format_: RecordFormat, record: dict) -> Text:
    return Text(_string(record, format_.text))


def _read_prompt_completion(format_: RecordFormat, record: dict) -> Sample:
    prompt, completion = record.get(format_.prompt), record.get(format_.completion)
    if isinstance(prompt, list) and isinstance(completion, list):  # of messages
        return _chat(format_, record, prompt + completion)
    return Completion(_string(record, format_.prompt), _string(record, format_.completion))


def _read_alpaca(format_: RecordFormat, record: dict) -> Chat:
    messages = []
    if system := _optional_string(record, format_.system):
        messages.append({"role": "system", "content": system})
    history = record.get(format_.history) if format_.history else None
    if not isinstance(history, (list, type(None))):
        raise RecordError(f"column '{format_.history}' must be a list of pairs, it is {_kind(history)}")
    for number, pair in enumerate(history or [], 1):
        if not (isinstance(pair, list) and len(pair) == 2 and all(isinstance(s, str) for s in pair)):
            raise RecordError(f"column '{format_.history}': pair {number} must be two strings, prompt and answer")
        messages += [{"role": "user", "content": pair[0]}, {"role": "assistant", "content": pair[1]}]
    parts = [_string(record, format_.instruction), _optional_string(record, format_.query)]
    messages.append({"role": "user", "content": "\n".join(part for part in parts if part)})
    messages.append({"role": "assistant", "content": _string(record, format_.response)})
    return Chat(messages, _tools(record, format_.tools))


def _read_messages(format_: RecordFormat, record: dict) -> Chat:
    if format_.messages not in record:
        raise RecordError(f"no column '{format_.messages}'; there are {', '.join(map(str, record)) or 'none'}")
    return _chat(format_, record, record[format_.messages])


def _chat(format_: RecordFormat, record: dict, turns: Any) -> Chat:
    if not isinstance(turns, list) or not turns:
        what = "an empty list" if turns == [] else _kind(turns)
        raise RecordError(f"column '{format_.messages}' must be a list of messages, it is {what}")
    messages = [_message(format_, number, turn) for number, turn in enumerate(turns, 1)]
    system = _optional_string(record, format_.system)
    if system and messages[0]["role"] != "system":
        messages.insert(0, {"role": "system", "content": system})
    return Chat(messages, _tools(record, format_.tools))


def _message(format_: RecordFormat, number: int, turn: Any) -> dict:
    if not isinstance(turn, dict):
        raise RecordError(f"turn {number} must be an object, it is {_kind(turn)}")
    tag = turn.get(format_.role_tag)
    if not isinstance(tag, str) or tag not in format_.roles:
        raise RecordError(
            f"turn {number}: '{format_.role_tag}' is {json.dumps(tag, ensure_ascii=False, default=str)}; "
            f"known are {', '.join(format_.roles)}"
        )
    role, content = format_.roles[tag], turn.get(format_.content_tag)
    if role == "function_call":
        return {"role": "assistant", "content": "", "tool_calls": _calls_of_text(content, number)}
    others = {} if format_.name == "sharegpt" else _other_columns(format_, turn, number)
    if content is None and "tool_calls" in others:
        content = ""
    if isinstance(content, list):
        content = _text_of_parts(content, number)
    if not isinstance(content, str):
        raise RecordError(f"turn {number}: '{format_.content_tag}' must be a string, it is {_kind(content)}")
    return {"role": role, "content": content, **others}


def _other_columns(format_: RecordFormat, turn: dict, number: int) -> dict:
    """What templates read beside role and content: name, tool_calls, reasoning_content, ... Nulls are absent:
    Parquet gives every message the columns of all."""
    others = {
        key: value
        for key, value in turn.items()
        if key not in (format_.role_tag, format_.content_tag, "role", "content") and value is not None
    }
    if "tool_calls" in others:
        calls = others["tool_calls"]
        if not isinstance(calls, list) or not all(isinstance(call, dict) for call in calls):
            raise RecordError(f"turn {number}: 'tool_calls' must be a list of objects")
        others["tool_calls"] = [_with_parsed_arguments(call, number) for call in calls]
        if not calls:
            del others["tool_calls"]
    return others


def _with_parsed_arguments(call: dict, number: int) -> dict:
    """OpenAI's arguments are JSON in a string; templates print an object with tojson."""
    function = call.get("function")
    if not isinstance(function, dict) or not isinstance(function.get("arguments"), str):
        return call
    arguments = _json(function["arguments"], f"turn {number}: 'arguments' of a tool call")
    return {**call, "function": {**function, "arguments": arguments}}


def _calls_of_text(content: Any, number: int) -> list:
    """ShareGPT's function_call: an object with name and arguments, or a list of them, as JSON in a string."""
    calls = _json(content, f"turn {number}: function call") if isinstance(content, str) else content
    calls = calls if isinstance(calls, list) else [calls]
    for call in calls:
        if not isinstance(call, dict) or "name" not in call:
            raise RecordError(f"turn {number}: a function call must be an object with name and arguments")
    return [{"type": "function", "function": call} for call in calls]


def _text_of_parts(parts: list, number: int) -> str:
    texts = []
    for part in parts:
        if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            kind = part.get("type") if isinstance(part, dict) else _kind(part)
            raise RecordError(f"turn {number}: content of type {kind}; only text can be trained on")
        texts.append(part["text"])
    return "".join(texts)


_READERS = {
    "text": _read_text,
    "prompt_completion": _read_prompt_completion,
    "alpaca": _read_alpaca,
    "sharegpt": _read_messages,
    "openai": _read_messages,
}
