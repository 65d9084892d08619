"""The batches of a layerstream run on token shards, made again without its code.

For `packing: true` and `overlong: split`; src/io/packing.hpp and src/io/sampler.hpp describe the rows and their order.
"""

import dataclasses

import numpy as np
from safetensors.numpy import load_file

NO_TARGET = -100


def find_shards(paths):
    """Of files and directories, in the order in which layerstream reads them."""
    for path in paths:
        yield from sorted(path.glob("*.safetensors")) if path.is_dir() else [path]


@dataclasses.dataclass
class Rows:
    """Arrays (rows, tokens of a row) int64. What a row lacks is a document of no targets."""

    input_ids: np.ndarray
    positions: np.ndarray  # from 0 in each document, or part of one
    labels: np.ndarray  # the token itself where one before it is to predict it
    lengths: np.ndarray  # (rows), tokens without the filling

    @staticmethod
    def pack(shards, cutoff_len):
        documents = [document for shard in shards for document in read_documents(shard)]
        rows = [row for row in lay(documents, cutoff_len) if any(is_target[1:].any() for _, is_target in row)]
        shape = (len(rows), cutoff_len)
        packed = Rows(np.zeros(shape, int), np.zeros(shape, int), np.full(shape, NO_TARGET), np.zeros(len(rows), int))
        for i, row in enumerate(rows):
            packed._fill(i, row)
        return packed

    def _fill(self, i, row):
        begin = 0
        for ids, is_target in row:
            piece = slice(begin, begin + len(ids))
            self.input_ids[i, piece] = ids
            self.positions[i, piece] = np.arange(len(ids))
            self.labels[i, piece][1:] = np.where(is_target, ids, NO_TARGET)[1:]
            begin += len(ids)
        self.lengths[i] = begin
        self.positions[i, begin:] = np.arange(self.positions.shape[1] - begin)

    def __len__(self):
        return len(self.input_ids)

    def num_targets(self, rows):
        return int((self.labels[rows] != NO_TARGET).sum())


def read_documents(path):
    """(ids, whether each is a target) of a shard's documents. Throws KeyError for a file that is no token shard."""
    shard = load_file(path)
    ids = shard["input_ids"].astype(np.int64)
    is_target = shard.get("target_mask", np.ones(len(ids))).astype(bool)
    offsets = shard.get("document_offsets", np.array([0, len(ids)]))
    return [(ids[begin:end], is_target[begin:end]) for begin, end in zip(offsets, offsets[1:])]


def lay(documents, cutoff_len):
    """Rows as lists of pieces. A document with context that a row can hold lies in one row, others fill rows up."""
    rows, room = [], 0
    for ids, is_target in documents:
        is_whole = len(ids) <= cutoff_len and not is_target[1:].all()
        while len(ids):
            if room == 0 or (is_whole and room < len(ids)):
                rows.append([])
                room = cutoff_len
            rows[-1].append((ids[:room], is_target[:room]))
            taken = len(rows[-1][-1][0])
            ids, is_target, room = ids[taken:], is_target[taken:], room - taken
    return rows


def rows_of_steps(num_rows, rows_per_step, steps, seed):
    """For each step the indices of its rows. An epoch's last step has the rows that are left."""
    epoch, found = 0, []
    while len(found) < steps:
        order = permutation(num_rows, seed, epoch)
        found += [order[begin : begin + rows_per_step] for begin in range(0, num_rows, rows_per_step)]
        epoch += 1
    return found[:steps]


def permutation(count, seed, epoch):
    """Fisher-Yates with Philox's numbers: key seed, counter (draw, "data" in ASCII and the epoch)."""
    stream, draw = (0x64617461 << 32) + epoch, 0

    def below(bound):
        """Uniform and unbiased: Lemire, "Fast random integer generation in an interval", algorithm 5."""
        nonlocal draw
        while True:
            high, low, _, _ = philox(seed, draw, stream)
            draw += 1
            product = (high << 32 | low) * bound
            if product % 2**64 >= 2**64 % bound:
                return product >> 64

    order = list(range(count))
    for i in range(count, 1, -1):
        j = below(i)
        order[i - 1], order[j] = order[j], order[i - 1]
    return order


def philox(key, counter_low, counter_high):
    """Philox4x32-10: Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC'11."""
    mask = 2**32 - 1
    key0, key1 = key & mask, key >> 32
    c0, c1, c2, c3 = counter_low & mask, counter_low >> 32, counter_high & mask, counter_high >> 32
    for _ in range(10):
        product0, product1 = 0xD2511F53 * c0, 0xCD9E8D57 * c2
        c0, c1, c2, c3 = product1 >> 32 ^ c1 ^ key0, product1 & mask, product0 >> 32 ^ c3 ^ key1, product0 & mask
        key0, key1 = (key0 + 0x9E3779B9) & mask, (key1 + 0xBB67AE85) & mask
    return c0, c1, c2, c3
