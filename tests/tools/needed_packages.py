"""Python packages that tests need, and without which they are skipped."""

import importlib


def missing(*names):
    """Which of these modules cannot be imported, and so the reason for a skip; empty if all can."""
    for name in names:
        try:
            importlib.import_module(name)
        except ImportError as error:
            return f"the Python package {error.name} is not installed"
    return ""
