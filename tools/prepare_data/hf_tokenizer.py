"""The tokenizer of a Hugging Face model directory, read as transformers reads it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from .chat_template import ChatTemplate
from .errors import PrepareError, needs_package
from .json_file import read_json
from .llama_tokenizer import apply_llama_class
from .token_texts import text_of_token

SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "chat_template.json",
    "config.json",
)


class HfTokenizer:
    """Throws PrepareError for a directory without a usable tokenizer.json."""

    def __init__(self, directory: Path):
        self.directory = directory
        self._config = _read_json(directory / "tokenizer_config.json") or {}
        self._tokenizer = _load_tokenizer(directory, self._config)
        self._add_tokens_of_config()
        given = {**(_read_json(directory / "special_tokens_map.json") or {}), **self._config}
        self.special_tokens = {
            name: _content(given[name]) for name in SPECIAL_TOKENS if given.get(name) is not None
        }
        self._add_special_tokens(given)
        self._before, self._after = self._affixes()

    def encode(self, text: str) -> tuple[list[int], list[tuple[int, int]]]:
        """Ids of the text alone, and the characters (begin, end) that each stands for."""
        encoding = self._tokenizer.encode(text, add_special_tokens=False)
        return encoding.ids, encoding.offsets

    def encode_beginning(self, text: str) -> list[int]:
        """Ids of a text that goes on, with the special tokens that the tokenizer puts before a text."""
        return [*self._before, *self.encode(text)[0]]

    def encode_document(self, text: str) -> list[int]:
        """Ids with the special tokens that the tokenizer puts around a text."""
        return [*self.encode_beginning(text), *self._after]

    def decode(self, ids: list[int]) -> str:
        """The text of ids, without special tokens."""
        return self._tokenizer.decode(ids, skip_special_tokens=True)

    def id_of(self, name: str) -> int:
        """Of a special token, e.g. eos_token."""
        if name not in self.special_tokens:
            remedy = "; name one there, or give --no-eos" if name == "eos_token" else ""
            raise PrepareError(f"{self.directory / 'tokenizer_config.json'}: no {name}{remedy}")
        token = self.special_tokens[name]
        token_id = self._tokenizer.token_to_id(token)
        if token_id is None:
            raise PrepareError(f"{self.directory / 'tokenizer.json'}: {name} '{token}' is not in the vocabulary")
        return token_id

    def token_of(self, token_id: int) -> str:
        return self._tokenizer.id_to_token(token_id)

    def texts(self) -> list[str]:
        """Of all tokens, by id; empty where an id has none."""
        is_byte_level = '"ByteLevel"' in json.dumps(json.loads(self._tokenizer.to_str())["decoder"])
        texts = [""] * (self.largest_id + 1)
        for token, token_id in self._tokenizer.get_vocab(with_added_tokens=True).items():
            texts[token_id] = text_of_token(token, is_byte_level)
        for token_id, token in self._tokenizer.get_added_tokens_decoder().items():
            texts[token_id] = token.content
        return texts

    @property
    def largest_id(self) -> int:
        return max(self._tokenizer.get_vocab(with_added_tokens=True).values())

    def chat_template(self, name: str | None, variables: dict) -> ChatTemplate | None:
        """The template of that name, or the default one; None if the model brings none."""
        place, templates = self._templates()
        if not templates and name is None:
            return None
        wanted = name or "default"
        if wanted not in templates:
            raise PrepareError(f"{place}: no chat template '{wanted}'; there are {', '.join(templates) or 'none'}")
        return self.make_template(templates[wanted], variables, str(place))

    def make_template(self, source: str, variables: dict, place: str) -> ChatTemplate:
        return ChatTemplate(source, {**self.special_tokens, **variables}, place)

    def _affixes(self) -> tuple[list[int], list[int]]:
        """What surrounds a text: by add_bos_token and add_eos_token, or else by the post-processor."""
        bos, eos = self._config.get("add_bos_token"), self._config.get("add_eos_token")
        if bos is not None or eos is not None:
            return [self.id_of("bos_token")] if bos else [], [self.id_of("eos_token")] if eos else []
        alone = self._tokenizer.encode("a", add_special_tokens=False).ids
        whole = self._tokenizer.encode("a", add_special_tokens=True).ids
        begin = next((i for i in range(len(whole)) if whole[i : i + len(alone)] == alone), 0)
        return whole[:begin], whole[begin + len(alone) :]

    def _templates(self) -> tuple[Path, dict]:
        """Name: source, from the file that counts: chat_template.jinja, chat_template.json, the config."""
        path = self.directory / "chat_template.jinja"
        if path.is_file():
            templates = {"default": path.read_text(encoding="utf-8")}
            for other in sorted((self.directory / "additional_chat_templates").glob("*.jinja")):
                templates[other.stem] = other.read_text(encoding="utf-8")
            return path, templates
        path = self.directory / "chat_template.json"
        given = (_read_json(path) or {}).get("chat_template")
        if given is None:
            path, given = self.directory / "tokenizer_config.json", self._config.get("chat_template")
        if given is None:
            return path, {}
        if isinstance(given, str):
            return path, {"default": given}
        try:
            return path, {template["name"]: template["template"] for template in given}
        except (TypeError, KeyError):
            raise PrepareError(f"{path}: chat_template must be a string or a list of name and template") from None

    def _add_tokens_of_config(self) -> None:
        """Tokens that tokenizer_config.json has and tokenizer.json lacks, or has with other flags."""
        present = self._added_tokens()
        entries = self._config.get("added_tokens_decoder", {})
        for token_id, entry in sorted(entries.items(), key=lambda item: int(item[0])):
            token, had = _added_token(entry), self._tokenizer.token_to_id(entry["content"])
            if repr(token) != repr(present.get(token.content)):
                self._tokenizer.add_tokens([token])
            got = self._tokenizer.token_to_id(token.content)
            if had is None and got != int(token_id):
                raise PrepareError(
                    f"{self.directory / 'tokenizer_config.json'}: added_tokens_decoder: '{token.content}' has id "
                    f"{token_id}, but tokenizer.json leaves {got} for it"
                )

    def _add_special_tokens(self, given: dict) -> None:
        """Special tokens are never cut, also where tokenizer.json has them among the words of its vocabulary."""
        present = self._added_tokens()
        for value in [given.get(name) for name in SPECIAL_TOKENS] + list(given.get("additional_special_tokens") or []):
            entry = value if isinstance(value, dict) else {"content": value}
            content = entry["content"]
            if content is not None and content not in present and self._tokenizer.token_to_id(content) is not None:
                self._tokenizer.add_tokens([_added_token({**entry, "special": True})])

    def _added_tokens(self) -> dict:
        """By content."""
        return {token.content: token for token in self._tokenizer.get_added_tokens_decoder().values()}


def _read_json(path: Path) -> Any:
    """None if there is no such file."""
    return read_json(path) if path.is_file() else None


def _content(token: Any) -> str:
    return token["content"] if isinstance(token, dict) else token


def _added_token(entry: dict):
    """Of an entry with flags beside its content."""
    from tokenizers import AddedToken

    names = ("lstrip", "rstrip", "single_word", "normalized", "special")
    return AddedToken(entry["content"], **{name: entry[name] for name in names if name in entry})


def _load_tokenizer(directory: Path, config: dict):
    path = directory / "tokenizer.json"
    try:
        from tokenizers import Tokenizer
    except ImportError:
        raise needs_package("tokenizers", "a Hugging Face tokenizer") from None
    description = _read_json(path)
    if description is None:
        raise PrepareError(
            f"{path}: no such file; a tokenizer.json is needed, which tokenizer.save_pretrained of transformers "
            "writes for a model with another kind of tokenizer"
        )
    _keep_whole_offsets(description.get("post_processor"))
    apply_llama_class(description, config, _read_json(directory / "config.json") or {})
    try:
        tokenizer = Tokenizer.from_str(json.dumps(description))
    except Exception as error:  # noqa: BLE001 - the library raises nothing more specific
        raise PrepareError(f"{path}: not a tokenizer: {error}") from None
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def _keep_whole_offsets(post_processor: Any) -> None:
    """Byte-level post-processors may take white space out of the characters that a token stands for. The ids are
    the same without that, and the mask needs all characters."""
    if isinstance(post_processor, dict):
        if "trim_offsets" in post_processor:
            post_processor["trim_offsets"] = False
        for child in post_processor.get("processors", []):
            _keep_whole_offsets(child)
