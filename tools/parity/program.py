"""What the comparisons here do around their work: quiet libraries, a scratch directory, the verdict."""

import sys
import tempfile
import time
from pathlib import Path

import reference
import torch
import transformers


def run(arguments, subject, compare):
    """compare(arguments, scratch, problems) in arguments.scratch, which is made and kept, or in a temporary directory.
    Ends the program with exit code 1 and the problems, if there are any. `subject` is printed first."""
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    reference.prepare()
    start = time.monotonic()
    print(f"torch {torch.__version__}, transformers {transformers.__version__} on {reference.description()}; {subject}")
    problems = []
    if arguments.scratch:
        arguments.scratch.mkdir(parents=True)
        compare(arguments, arguments.scratch.resolve(), problems)
    else:
        with tempfile.TemporaryDirectory(prefix="layerstream-parity-") as scratch:
            compare(arguments, Path(scratch), problems)
    print(f"{time.monotonic() - start:.0f} s")
    if problems:
        sys.exit("\n".join(problems))
    print("OK")
