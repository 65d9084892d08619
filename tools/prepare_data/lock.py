"""One run at a time in an output directory."""

from __future__ import annotations

import contextlib
import fcntl
import shutil
from collections.abc import Iterator
from pathlib import Path

from .progress import say

NAME = ".prepare_data.lock"
SPOOL_PREFIX = ".spool-"


@contextlib.contextmanager
def locked(directory: Path) -> Iterator[None]:
    """Waits for another run that works there. What a killed one left behind is removed."""
    with (directory / NAME).open("a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say(f"{directory}: waiting for another prepare_data that writes there")
            fcntl.flock(file, fcntl.LOCK_EX)
        except OSError as error:
            say(f"{directory}: cannot be locked ({error.strerror}): nothing else may write there at the same time")
        for left in directory.glob(f"{SPOOL_PREFIX}*"):
            shutil.rmtree(left, ignore_errors=True)
        for left in directory.glob(".*.partial"):
            left.unlink(missing_ok=True)
        yield
