"""Files of JSON."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from .errors import PrepareError


def read_json(path: Path, encoding: str = "utf-8") -> Any:
    """Throws PrepareError, naming the file."""
    try:
        return json.loads(path.read_text(encoding=encoding))
    except OSError as error:
        raise PrepareError(f"{path}: {error.strerror}") from None
    except ValueError as error:
        raise PrepareError(f"{path}: not JSON: {error}") from None


def write_json(path: Path, value: Any, indent: int | None = None) -> None:
    """The file is complete or not there."""
    partial = path.with_name(f"{path.name}.partial")
    partial.write_text(json.dumps(value, indent=indent, ensure_ascii=False) + "\n", encoding="utf-8")
    os.replace(partial, path)
