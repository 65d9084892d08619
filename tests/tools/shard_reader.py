"""Reads token shards by the format's own description and none of the writers' code."""

import json
import struct
import sys
from array import array


def read_shard(path):
    """{tensor: list of numbers}"""
    data = path.read_bytes()
    (size,) = struct.unpack_from("<Q", data)
    tensors = {}
    for name, entry in json.loads(data[8 : 8 + size]).items():
        begin, end = entry["data_offsets"]
        values = array({"I64": "q", "I32": "i", "U16": "H", "U8": "B"}[entry["dtype"]])
        values.frombytes(data[8 + size + begin : 8 + size + end])
        if sys.byteorder == "big":
            values.byteswap()
        assert entry["shape"] == [len(values)] and begin % values.itemsize == 0
        tensors[name] = values.tolist()
    return tensors


def read_documents(path):
    """[(ids, mask)] of a shard's documents"""
    tensors = read_shard(path)
    ids, mask, offsets = (tensors[name] for name in ("input_ids", "target_mask", "document_offsets"))
    return [(ids[begin:end], mask[begin:end]) for begin, end in zip(offsets, offsets[1:])]
