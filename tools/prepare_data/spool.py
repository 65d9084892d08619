"""Documents of a dataset on disk, to be read in any order."""

from __future__ import annotations

from array import array
from pathlib import Path

from .encode import Document


class Spool:
    """Documents are added, then read after finish(). Close it in the end."""

    def __init__(self, path: Path):
        self._ids = path.with_name(f"{path.name}.ids").open("w+b")
        self._masks = path.with_name(f"{path.name}.masks").open("w+b")
        self._offsets = array("q", [0])

    def __len__(self) -> int:
        return len(self._offsets) - 1

    def add(self, document: Document) -> None:
        array("I", document.ids).tofile(self._ids)
        self._masks.write(document.mask)
        self._offsets.append(self._offsets[-1] + len(document.ids))

    def finish(self) -> None:
        self._ids.flush()
        self._masks.flush()

    def length(self, index: int) -> int:
        return self._offsets[index + 1] - self._offsets[index]

    def ids(self, index: int) -> array:
        """(tokens) uint32"""
        ids = array("I")
        self._ids.seek(ids.itemsize * self._offsets[index])
        ids.fromfile(self._ids, self.length(index))
        return ids

    def mask(self, index: int) -> bytes:
        """(tokens) uint8"""
        self._masks.seek(self._offsets[index])
        return self._masks.read(self.length(index))

    def close(self) -> None:
        self._ids.close()
        self._masks.close()
