"""Tokens and target masks of samples."""

from __future__ import annotations

import dataclasses

from .chat_template import ChatTemplate
from .errors import PrepareError, RecordError
from .formats import Chat, Completion, Sample, Text
from .hf_tokenizer import HfTokenizer

OVERLONG = ("keep-text", "split", "truncate", "drop", "error")


@dataclasses.dataclass(frozen=True)
class Document:
    ids: list[int]
    mask: bytes  # (tokens) 1 where the token is a target

    @property
    def has_targets(self) -> bool:
        """Nothing predicts the first token."""
        return 1 in self.mask[1:]


@dataclasses.dataclass(frozen=True)
class EncodeSettings:
    train_on_prompt: bool = False  # every token is a target
    mask_history: bool = False  # of the assistant's turns only the last is
    append_eos: bool = True  # to plain text and completions
    vocab_size: int | None = None  # of the model


class Encoder:
    def __init__(self, tokenizer: HfTokenizer, template: ChatTemplate | None, settings: EncodeSettings):
        self._tokenizer, self._template, self._settings = tokenizer, template, settings

    @property
    def largest_id(self) -> int:
        return self._tokenizer.largest_id

    def encode(self, sample: Sample) -> Document:
        """Throws RecordError, PrepareError for special tokens that the tokenizer lacks."""
        if isinstance(sample, Text):
            document = self._encode_text(sample)
        elif isinstance(sample, Completion):
            document = self._encode_completion(sample)
        else:
            document = self._encode_chat(sample)
        if self._settings.train_on_prompt:
            document = dataclasses.replace(document, mask=b"\1" * len(document.ids))
        self._check_ids(document.ids)
        return document

    def _encode_text(self, sample: Text) -> Document:
        ids = self._tokenizer.encode_document(sample.text) if sample.text else []
        if ids:
            self._finish(ids)
        return Document(ids, b"\1" * len(ids))

    def _encode_completion(self, sample: Completion) -> Document:
        """Apart from each other, as a prompt is tokenized when the model is asked."""
        completion, _ = self._tokenizer.encode(sample.completion)
        if completion:
            self._finish(completion)
        prompt = self._tokenizer.encode_beginning(sample.prompt)
        return Document(prompt + completion, bytes(len(prompt)) + b"\1" * len(completion))

    def _finish(self, ids: list[int]) -> None:
        if self._settings.append_eos:
            eos = self._tokenizer.id_of("eos_token")
            if ids[-1] != eos:
                ids.append(eos)

    def _encode_chat(self, sample: Chat) -> Document:
        if self._template is None:
            raise PrepareError(
                f"a conversation needs a chat template, and {self._tokenizer.directory} brings none; give one with "
                "--chat-template-file"
            )
        if self._settings.train_on_prompt:
            text, spans = self._template.render(sample.messages, sample.tools), []
        else:
            text, spans = self._template.targets(sample.messages, sample.tools, self._settings.mask_history)
        ids, offsets = self._tokenizer.encode(text)
        return Document(ids, mask_of_spans(offsets, spans))

    def _check_ids(self, ids: list[int]) -> None:
        vocab_size = self._settings.vocab_size
        if vocab_size is None or not ids or max(ids) < vocab_size:
            return
        at = next(i for i, token_id in enumerate(ids) if token_id >= vocab_size)
        raise RecordError(
            f"token {at} is {ids[at]} ({self._tokenizer.token_of(ids[at])!r}), outside the model's vocabulary of "
            f"{vocab_size}; take the tokenizer of this model"
        )


def mask_of_spans(offsets: list[tuple[int, int]], spans: list[tuple[int, int]]) -> bytes:
    """(tokens) 1 for every token with a character in one of the ascending spans."""
    mask, span = bytearray(len(offsets)), 0
    for i, (begin, end) in enumerate(offsets):
        while span < len(spans) and spans[span][1] <= begin:
            span += 1
        if span < len(spans) and max(end, begin + 1) > spans[span][0]:
            mask[i] = 1
    return bytes(mask)


def fit(document: Document, cutoff_len: int | None, overlong: str) -> list[Document]:
    """The documents that one of any length becomes; none if it is dropped. Throws RecordError."""
    length = len(document.ids)
    if cutoff_len is None or length <= cutoff_len or overlong == "keep":
        return [document]
    if overlong == "error":
        raise RecordError(f"{length} tokens are more than the cutoff_len of {cutoff_len}")
    if overlong == "drop":
        return []
    ends = range(cutoff_len, length + cutoff_len, cutoff_len) if overlong == "split" else [cutoff_len]
    return [
        Document(document.ids[end - cutoff_len : end], document.mask[end - cutoff_len : end]) for end in ends
    ]
