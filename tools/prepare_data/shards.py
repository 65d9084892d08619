"""Token shards: safetensors files with input_ids, target_mask and document_offsets."""

from __future__ import annotations

import json
import os
import struct
import sys
from array import array
from collections.abc import Callable, Sequence
from pathlib import Path

from .spool import Spool

_OFFSET_BYTES, _MASK_BYTES = 8, 1


def id_bytes(largest_id: int) -> int:
    """2 (uint16) if all ids fit, else 4 (int32)."""
    return 2 if largest_id < 1 << 16 else 4


def plan_shards(lengths: Sequence[int], bytes_of_id: int, max_bytes: int) -> list[range]:
    """The documents of each shard. A document is never divided: one that is larger than the limit is alone."""
    shards, begin, size = [], 0, 0
    for i, length in enumerate(lengths):
        document = length * (bytes_of_id + _MASK_BYTES) + _OFFSET_BYTES
        if i > begin and size + document > max_bytes:
            shards.append(range(begin, i))
            begin, size = i, 0
        size += document
    if begin < len(lengths):
        shards.append(range(begin, len(lengths)))
    return shards


def shard_name(number: int, count: int) -> str:
    """`number` counts from 0."""
    return f"tokens-{number + 1:05}-of-{count:05}.safetensors"


def shard_bytes(lengths: Sequence[int], bytes_of_id: int) -> int:
    """Of the tensors."""
    return sum(lengths) * (bytes_of_id + _MASK_BYTES) + (len(lengths) + 1) * _OFFSET_BYTES


def write_shard(
    path: Path,
    spools: Sequence[Spool],
    documents: Sequence[tuple],
    bytes_of_id: int,
    written: Callable[[int], None] = lambda count: None,
) -> dict:
    """Documents are (spool, index). The file has its name only once it is complete; `written` is told its size as it
    grows. Returns its figures."""
    offsets = array("q", [0])
    for spool, index in documents:
        offsets.append(offsets[-1] + spools[spool].length(index))
    partial, targets = path.with_name(f".{path.name}.partial"), 0
    with partial.open("wb") as file:
        file.write(_header(len(offsets), offsets[-1], bytes_of_id))
        file.write(_little_endian(offsets))
        for spool, index in documents:
            file.write(_little_endian(array("H" if bytes_of_id == 2 else "i", spools[spool].ids(index))))
            written(file.tell())
        for spool, index in documents:
            mask = spools[spool].mask(index)
            targets += mask.count(1)
            file.write(mask)
            written(file.tell())
        size = file.tell()
    os.replace(partial, path)
    return {
        "file": path.name,
        "bytes": size,
        "documents": len(documents),
        "tokens": offsets[-1],
        "targets": targets,
    }


def _header(offsets: int, tokens: int, bytes_of_id: int) -> bytes:
    """https://huggingface.co/docs/safetensors, "Format"."""
    entries, end = {}, 0
    for name, dtype, size, count in (
        ("document_offsets", "I64", _OFFSET_BYTES, offsets),
        ("input_ids", "U16" if bytes_of_id == 2 else "I32", bytes_of_id, tokens),
        ("target_mask", "U8", _MASK_BYTES, tokens),
    ):
        entries[name] = {"dtype": dtype, "shape": [count], "data_offsets": [end, end + size * count]}
        end += size * count
    text = json.dumps(entries).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text


def _little_endian(numbers: array) -> bytes:
    if sys.byteorder == "big":
        numbers = numbers[:]
        numbers.byteswap()
    return numbers.tobytes()
