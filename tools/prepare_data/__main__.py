"""python3 tools/prepare_data ...: the command, from any directory."""

import signal
import sys
from pathlib import Path

if not __package__:  # run as a directory: that directory is on the path, its parent has to be
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from prepare_data.command import main  # noqa: E402


def stop(number: int, _frame: object) -> None:
    """As an exception, so that what is half done is removed."""
    sys.exit(f"prepare_data: stopped by {signal.Signals(number).name}")


if __name__ == "__main__":
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, stop)
    sys.stdout.reconfigure(errors="surrogateescape")  # paths are any bytes
    main()
