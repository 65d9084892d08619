"""Files of JSON."""

from __future__ import annotations

import json
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
