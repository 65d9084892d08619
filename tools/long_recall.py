#!/usr/bin/env python3
"""Writes training rows whose answers lie far back, as token shards for layerstream. Standard library only.

    python3 tools/long_recall.py --rows 9600 --length 32768 --cut 1024 --output runs/long-recall

A row is one document: a table with an entry for each key, `copies` times over and each time in another order; filler;
then each key once, followed by its value. Only those values are targets. An entry is a single token that stands for
one key and one value. Which value a key has is drawn anew for every row, so nothing can be learned by heart: the only
way below a loss of ln(values) is to look the key up in the table, at least as many tokens back as there is filler.
Written into `output`:

    whole.safetensors    the rows
    cut.safetensors      their last `cut` tokens: the same queries and targets, without the table

Tokens: fillers, then keys, then values, then entries, entry (k, v) at k * values + v.
"""

import argparse
import dataclasses
import json
import math
import random
import struct
import sys
from array import array
from pathlib import Path


@dataclasses.dataclass(frozen=True)
class Task:
    length: int  # tokens of a row
    keys: int
    values: int  # different ones
    copies: int  # of the table
    fillers: int  # different ones, at most 256

    @property
    def first_key(self):
        return self.fillers

    @property
    def first_value(self):
        return self.first_key + self.keys

    @property
    def first_entry(self):
        return self.first_value + self.values

    @property
    def vocab_size(self):
        return self.first_entry + self.keys * self.values

    @property
    def table_tokens(self):
        return self.keys * self.copies

    @property
    def query_tokens(self):
        return 2 * self.keys

    @property
    def filler_tokens(self):
        return self.length - self.table_tokens - self.query_tokens

    @property
    def filler_of_byte(self):
        return bytes(byte * self.fillers >> 8 for byte in range(256))

    def entry(self, key, value):
        return self.first_entry + key * self.values + value

    def problem(self, cut):
        """Why there are no such rows, or no such cut of them; None if there are."""
        if min(self.keys, self.values, self.copies) < 1 or not 1 <= self.fillers <= 256:
            return "keys, values and copies must be at least 1, fillers 1 to 256"
        if self.vocab_size > 1 << 16:
            return f"{self.vocab_size} different tokens do not fit into 16 bits; take fewer keys or values"
        if self.filler_tokens < 0:
            needed = self.table_tokens + self.query_tokens
            return f"table and queries take {needed} tokens, more than a row of {self.length}"
        longest = self.length - self.table_tokens
        if not self.query_tokens <= cut <= longest:
            return f"a cut row holds all queries and nothing of the table: {self.query_tokens} to {longest} tokens"
        return None


def make_row(task: Task, generator: random.Random) -> array:
    """(length) uint16"""
    pairs = [(key, generator.randrange(task.values)) for key in range(task.keys)]
    row = array("H")
    for _ in range(task.copies):
        generator.shuffle(pairs)
        row.extend(task.entry(key, value) for key, value in pairs)
    row.extend(generator.randbytes(task.filler_tokens).translate(task.filler_of_byte))
    generator.shuffle(pairs)
    for key, value in pairs:
        row.extend((task.first_key + key, task.first_value + value))
    return row


def make_mask(task: Task) -> bytes:
    """(length) uint8, the same for every row: 1 at the values of the queries."""
    return bytes(task.length - task.query_tokens) + b"\0\1" * task.keys


def little_endian(numbers: array) -> bytes:
    if sys.byteorder == "big":
        numbers = numbers[:]
        numbers.byteswap()
    return numbers.tobytes()


class ShardWriter:
    """A token shard of `rows` documents of one length and mask. Use: with; add() each row in it."""

    def __init__(self, path: Path, rows: int, mask: bytes):
        self._path, self._rows, self._mask = path, rows, mask

    def _header(self) -> bytes:
        """https://huggingface.co/docs/safetensors, "Format"."""
        tokens = self._rows * len(self._mask)
        entries, end = {}, 0
        for name, dtype, size, count in (
            ("document_offsets", "I64", 8, self._rows + 1),
            ("input_ids", "U16", 2, tokens),
            ("target_mask", "U8", 1, tokens),
        ):
            entries[name] = {"dtype": dtype, "shape": [count], "data_offsets": [end, end + size * count]}
            end += size * count
        text = json.dumps(entries).encode()
        text += b" " * (-len(text) % 8)
        return struct.pack("<Q", len(text)) + text

    def __enter__(self):
        self._file = self._path.open("wb")
        self._file.write(self._header())
        length = len(self._mask)
        self._file.write(little_endian(array("q", range(0, self._rows * length + 1, length))))
        return self

    def add(self, row: array):
        self._file.write(little_endian(row))

    def __exit__(self, *_):
        for _row in range(self._rows):
            self._file.write(self._mask)
        self._file.close()


def write_shards(task: Task, rows: int, cut: int, seed: int, output: Path):
    output.mkdir(parents=True, exist_ok=True)
    mask = make_mask(task)
    generator = random.Random(seed)
    whole_path, cut_path = output / "whole.safetensors", output / "cut.safetensors"
    with ShardWriter(whole_path, rows, mask) as whole, ShardWriter(cut_path, rows, mask[-cut:]) as short:
        for _ in range(rows):
            row = make_row(task, generator)
            whole.add(row)
            short.add(row[-cut:])


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, required=True)
    parser.add_argument("--length", type=int, required=True, help="tokens of a row")
    parser.add_argument("--cut", type=int, required=True, help="tokens of a row without its table")
    parser.add_argument("--keys", type=int, default=64, help="each has a value in each row (default 64)")
    parser.add_argument("--values", type=int, default=16, help="different values (default 16)")
    parser.add_argument("--copies", type=int, default=16, help="of the table (default 16)")
    parser.add_argument("--fillers", type=int, default=16, help="different filler tokens (default 16)")
    parser.add_argument("--seed", type=int, default=1, help="of values, orders and filler (default 1)")
    parser.add_argument("--output", type=Path, required=True, metavar="DIRECTORY")
    arguments = parser.parse_args()
    task = Task(arguments.length, arguments.keys, arguments.values, arguments.copies, arguments.fillers)
    problem = "rows must be at least 1" if arguments.rows < 1 else task.problem(arguments.cut)
    if problem:
        parser.error(problem)
    return arguments, task


def main():
    arguments, task = parse_arguments()
    write_shards(task, arguments.rows, arguments.cut, arguments.seed, arguments.output)
    print(
        f"{arguments.rows} rows of {task.length} tokens: table {task.table_tokens}, filler {task.filler_tokens}, "
        f"queries {task.query_tokens}; {task.keys} targets a row, chance ln({task.values}) = "
        f"{math.log(task.values):.4f}; vocabulary {task.vocab_size}"
    )


if __name__ == "__main__":
    main()
