#!/usr/bin/env python3
"""Compares tools/prepare_data with transformers, token by token, on real tokenizers and datasets.

    python tools/parity/chat_tokens.py --data alpaca.jsonl tools/parity/hard_chats.jsonl --tokenizers models/*

Both read the same model directory and render the same messages. Every id and every target is compared: transformers'
mask where the template has {% generation %} marks, otherwise one that is made here of transformers' own renderings
and offsets. The shards that prepare_data writes are read back too. Prints a table; exits with 1 on any difference.
"""

import argparse
import dataclasses
import subprocess
import sys
import tempfile
from pathlib import Path

import jinja2
import tokenizers
import transformers
from safetensors.numpy import load_file

TOOLS = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(TOOLS))

from prepare_data.encode import Encoder, EncodeSettings  # noqa: E402
from prepare_data.errors import RecordError  # noqa: E402
from prepare_data.formats import Chat, detect_format  # noqa: E402
from prepare_data.hf_tokenizer import HfTokenizer  # noqa: E402
from prepare_data.sources import read_records  # noqa: E402

COLUMNS = ("records", "refused by both", "refused here", "tokens", "targets", "differing ids", "differing targets")


@dataclasses.dataclass
class Count:
    records: int = 0
    refused_by_both: int = 0
    refused_here: int = 0
    tokens: int = 0
    targets: int = 0
    differing_ids: int = 0
    differing_targets: int = 0
    notes: list = dataclasses.field(default_factory=list)

    def note(self, text):
        self.notes.append(text)

    def row(self):
        return [getattr(self, column.replace(" ", "_")) for column in COLUMNS]

    @property
    def is_equal(self):
        return not self.differing_ids and not self.differing_targets


class Theirs:
    """transformers alone."""

    def __init__(self, directory):
        self._tokenizer = transformers.AutoTokenizer.from_pretrained(directory)
        self.name = type(self._tokenizer).__name__
        self.has_marks = "endgeneration" in self._tokenizer.get_chat_template()

    def encode(self, chat):
        """Ids and mask; throws what Jinja throws."""
        encoding = self._tokenizer.apply_chat_template(
            chat.messages, tools=chat.tools, return_dict=True, return_assistant_tokens_mask=self.has_marks
        )
        ids = list(encoding["input_ids"])
        return ids, list(encoding["assistant_masks"]) if self.has_marks else self._mask(chat, ids)

    def _render(self, chat, messages, **settings):
        # As a batch of one: a lone conversation may not be empty.
        return self._tokenizer.apply_chat_template([messages], tools=chat.tools, tokenize=False, **settings)[0]

    def _mask(self, chat, ids):
        """A token is a target if any of its characters is one; it has those since the end of the token before."""
        text, is_target = self._render(chat, chat.messages), set()
        for i, message in enumerate(chat.messages):
            if message["role"] == "assistant":
                begin = len(self._render(chat, chat.messages[:i], add_generation_prompt=True))
                is_target.update(range(begin, len(self._render(chat, chat.messages[: i + 1]))))
        encoding = self._tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        assert list(encoding["input_ids"]) == ids
        mask, end_before, begin = [], 0, 0
        for _, end in encoding["offset_mapping"]:
            if end > end_before:  # otherwise one more token of the same character
                begin, end_before = end_before, end
            mask.append(int(any(character in is_target for character in range(begin, end_before))))
        return mask


def read_chats(path):
    for record in read_records(path):
        sample = detect_format(record.value).read(record.value)
        if not isinstance(sample, Chat):
            raise SystemExit(f"{record.place}: not a conversation")
        yield record.place, sample


def compare_record(place, chat, encoder, theirs, count):
    """The document as prepare_data has it; None if it refuses the record."""
    count.records += 1
    try:
        document = encoder.encode(chat)
    except RecordError as error:
        try:
            theirs.encode(chat)
        except (jinja2.TemplateError, TypeError, ValueError, KeyError):
            count.refused_by_both += 1
        else:
            count.refused_here += 1
            if count.refused_here == 1:
                count.note(f"{place}: refused here: {error}")
        return None
    ids, mask = theirs.encode(chat)
    count.tokens += len(ids)
    count.targets += sum(mask)
    ids_differ = count_differences(document.ids, ids)
    targets_differ = count_differences(list(document.mask), mask)
    if (ids_differ or targets_differ) and count.is_equal:
        at = next(i for i, (a, b) in enumerate(zip(zip(document.ids, document.mask), zip(ids, mask))) if a != b)
        count.note(
            f"{place}: token {at}: here {document.ids[at : at + 5]} targets {list(document.mask[at : at + 5])}, "
            f"transformers {ids[at : at + 5]} targets {mask[at : at + 5]}"
        )
    count.differing_ids += ids_differ
    count.differing_targets += targets_differ
    return document


def count_differences(ours, theirs):
    return sum(a != b for a, b in zip(ours, theirs)) + abs(len(ours) - len(theirs))


def check_shards(path, directory, documents, count):
    """What the command writes is what was compared, document after document."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, TOOLS / "prepare_data", path, "--on-bad-line", "skip"]
        command += ["--tokenizer", directory, "--output", folder]
        subprocess.run(command, check=True, capture_output=True)
        shards = [load_file(file) for file in sorted(Path(folder).glob("*.safetensors"))]
    written = []
    for shard in shards:
        offsets = shard["document_offsets"].tolist()
        for begin, end in zip(offsets, offsets[1:]):
            written.append((shard["input_ids"][begin:end].tolist(), shard["target_mask"][begin:end].tolist()))
    if written != [(document.ids, list(document.mask)) for document in documents]:
        count.differing_ids += 1
        count.note(f"{path}: the shards are not what the records gave one by one")


def compare(directory, path):
    tokenizer = HfTokenizer(directory)
    template = tokenizer.chat_template(None, {})
    encoder, theirs, count = Encoder(tokenizer, template, EncodeSettings()), Theirs(directory), Count()
    documents = [compare_record(place, chat, encoder, theirs, count) for place, chat in read_chats(path)]
    with_targets = [document for document in documents if document and document.has_targets]
    if with_targets:
        check_shards(path, directory, with_targets, count)
    return theirs, count


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokenizers", type=Path, nargs="+", required=True, help="Hugging Face model directories")
    parser.add_argument("--data", type=Path, nargs="+", required=True, help="conversations, as prepare_data takes them")
    arguments = parser.parse_args()
    transformers.logging.set_verbosity_error()

    versions = ", ".join(f"{m.__name__} {m.__version__}" for m in (tokenizers, transformers, jinja2))
    print(f"{versions}\n\n| model | template | dataset | {' | '.join(COLUMNS)} |")
    print(f"|---|---|---|{'---:|' * len(COLUMNS)}")
    equal, notes = True, []
    for directory in arguments.tokenizers:
        for path in arguments.data:
            theirs, count = compare(directory, path)
            kind = "marks" if theirs.has_marks else "prefixes"
            figures = " | ".join(f"{figure:,}" for figure in count.row())
            print(f"| {directory.name} | {kind} | {path.stem} | {figures} |", flush=True)
            equal &= count.is_equal
            notes += [f"{directory.name}: {note}" for note in count.notes]
    print("\n" + "\n".join(notes))
    sys.exit(0 if equal else 1)


if __name__ == "__main__":
    main()
