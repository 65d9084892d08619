#!/usr/bin/env python3
"""Makes long documents of real text that every machine with Python has: the sources of its standard library.

    python3 tools/long_documents.py --output runs/long-document/text

Each package becomes one text file, its modules in the order of their paths, each under a line with its path; to
layerstream a file is one document. Prints every document's length, in tokens of the byte tokenizer. Packages
shorter than --min-tokens are left out, and `test`, which would outweigh all others. The text depends on the version
of Python.
"""

import argparse
import sys
import sysconfig
from pathlib import Path

LEFT_OUT = {"test", "site-packages", "__pycache__"}


def packages(library: Path):
    """The packages of `library`, by name."""
    for folder in sorted(library.iterdir()):
        if folder.name not in LEFT_OUT and (folder / "__init__.py").is_file():
            yield folder


def document_of(package: Path):
    """The package's modules as one text, and the paths of those that are left out because they are not UTF-8."""
    parts, left_out = [], []
    for path in sorted(package.rglob("*.py")):
        try:
            text = path.read_bytes().decode("utf-8")
        except UnicodeDecodeError:
            left_out.append(path)
            continue
        if "\0" in text:  # layerstream takes the file for a binary one
            left_out.append(path)
            continue
        parts.append(f"# ==== {path.relative_to(package.parent).as_posix()} ====\n{text}\n")
    return "".join(parts), left_out


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True, metavar="DIRECTORY")
    parser.add_argument("--min-tokens", type=int, default=8192, help="of a document (default 8192)")
    parser.add_argument(
        "--library", type=Path, default=Path(sysconfig.get_paths()["stdlib"]), help="default: this Python's own"
    )
    arguments = parser.parse_args()
    arguments.output.mkdir(parents=True, exist_ok=True)
    lengths = []
    for package in packages(arguments.library):
        text, left_out = document_of(package)
        data = text.encode()
        length = len(data) + 1  # the tokenizer ends a document with a token of its own
        for path in left_out:
            print(f"not UTF-8 text, left out: {path}", file=sys.stderr)
        if length < arguments.min_tokens:
            continue
        (arguments.output / f"{package.name}.txt").write_bytes(data)
        lengths.append(length)
        print(f"{length:>9} tokens  {package.name}")
    if not lengths:
        parser.error(f"{arguments.library}: no package of {arguments.min_tokens} tokens or more")
    print(f"{sum(lengths):>9} tokens in {len(lengths)} documents")


if __name__ == "__main__":
    main()
