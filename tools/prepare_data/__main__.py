"""python3 tools/prepare_data ...: the command, from any directory."""

import sys
from pathlib import Path

if not __package__:  # run as a directory: that directory is on the path, its parent has to be
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from prepare_data.command import main  # noqa: E402

if __name__ == "__main__":
    main()
