"""What an output directory was made from, so that the same is not made twice.

The manifest's name begins with a dot: layerstream reads every other file of a directory as training data."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable
from pathlib import Path

from .errors import PrepareError
from .json_file import write_json

NAME = ".prepare_data.json"


def hash_of_file(path: Path, read: Callable[[int], None] = lambda count: None) -> str:
    """`read` is told how many bytes were read, block by block."""
    digest = hashlib.sha256()
    try:
        with path.open("rb") as file:
            while block := file.read(1 << 20):
                digest.update(block)
                read(len(block))
    except OSError as error:
        raise PrepareError(f"{path}: {error.strerror}") from None
    return digest.hexdigest()


def hash_of_files(paths: Iterable[Path]) -> dict:
    """{name: hash} of those that exist."""
    return {path.name: hash_of_file(path) for path in paths if path.is_file()}


def hash_of_tool() -> str:
    """Of this package's sources: another version may make other tokens."""
    digest = hashlib.sha256()
    for path in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(hash_of_file(path).encode())
    return digest.hexdigest()


def hash_of_description(description: dict) -> str:
    return hashlib.sha256(json.dumps(description, sort_keys=True).encode()).hexdigest()


def read(directory: Path) -> dict:
    """Empty if there is none, or none that can be read."""
    try:
        manifest = json.loads((directory / NAME).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return manifest if isinstance(manifest, dict) else {}


def is_up_to_date(directory: Path, manifest: dict, content_hash: str) -> bool:
    """Whether the directory was made from that content and its shards are still there."""
    return manifest.get("hash") == content_hash and all(
        (directory / shard["file"]).is_file() and (directory / shard["file"]).stat().st_size == shard["bytes"]
        for shard in manifest["shards"]
    )


def clear(directory: Path, manifest: dict) -> None:
    """Removes what the manifest lists. Throws PrepareError if there are shards of another origin."""
    ours = {shard["file"] for shard in manifest.get("shards", [])}
    foreign = sorted(path.name for path in directory.glob("*.safetensors") if path.name not in ours)
    if foreign:
        raise PrepareError(
            f"{directory}: holds {foreign[0]}, which its manifest does not list; give another --output, or remove it"
        )
    (directory / NAME).unlink(missing_ok=True)
    for name in ours:
        (directory / name).unlink(missing_ok=True)


def write(directory: Path, manifest: dict) -> None:
    write_json(directory / NAME, manifest, indent=1)
