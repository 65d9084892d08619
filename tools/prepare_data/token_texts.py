"""What each token stands for, beside the shards, for people who look at them (layerstream inspect-data).

The file's name begins with a dot, as the manifest's does."""

from __future__ import annotations

from pathlib import Path

from .json_file import write_json

NAME = ".tokens.json"


def write(directory: Path, texts: list[str]) -> None:
    """`texts` by id; empty where there is no token."""
    write_json(directory / NAME, texts)


def text_of_token(token: str, is_byte_level: bool) -> str:
    """The text of a token as the vocabulary spells it; bytes that are no UTF-8 by themselves as \\xc3."""
    if is_byte_level:
        if all(character in _BYTES for character in token):
            return bytes(_BYTES[character] for character in token).decode("utf-8", "backslashreplace")
        return token
    return token.replace("\u2581", " ")


def _byte_level_alphabet() -> dict:
    """{character: byte}: how byte-level BPE (GPT-2) spells bytes: printable Latin-1 as itself, the others as the
    characters from U+0100 on, in order."""
    printable = {*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)}
    others = [byte for byte in range(256) if byte not in printable]
    return {**{chr(byte): byte for byte in printable}, **{chr(256 + i): byte for i, byte in enumerate(others)}}


_BYTES = _byte_level_alphabet()
