"""Signs of life on standard error."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable

INTERVAL = 5.0  # seconds


def say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


class Progress:
    """How much of a piece of work is done, told every few seconds: nothing for work that takes less."""

    def __init__(self, write: Callable[[str], None] = say, clock: Callable[[], float] = time.monotonic):
        self._write, self._clock = write, clock
        self.begin("", 0)

    def begin(self, what: str, total: int) -> None:
        """`total` is in bytes."""
        self._what, self._total = what, total
        self._start = self._told = self._clock()

    def at(self, done: int, note: str = "") -> None:
        """`done` bytes of the total are; a note such as "1200 records"."""
        now = self._clock()
        if now < self._told + INTERVAL:
            return
        self._told = now
        line = f"{self._what}: {done / max(self._total, 1):.0%} of {_bytes(self._total)}"
        if note:
            line += f", {note}"
        if 0 < done < self._total:
            line += f", {_duration((now - self._start) * (self._total - done) / done)} to go"
        self._write(line)


def _bytes(count: int) -> str:
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.1f} {unit}" if unit != "B" else f"{count} B"
        count /= 1024
    return f"{count:.1f} TiB"


def _duration(seconds: float) -> str:
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours}h {minutes:02}m"
    return f"{minutes}m {seconds:02}s" if minutes else f"{seconds}s"
