"""What can go wrong, in two kinds: a record may be left out, anything else ends the run."""

import sys


class PrepareError(Exception):
    """The run cannot go on; says where and what to do."""


class RecordError(Exception):
    """One record is unusable: its cause, without its place. on_bad_line decides what follows."""


def needs_package(package: str, purpose: str) -> PrepareError:
    return PrepareError(
        f"{purpose} needs the Python package {package}; install it with: {sys.executable} -m pip install {package}"
    )
