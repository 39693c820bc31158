"""The version of what is running."""

from __future__ import annotations

from importlib import metadata


def version() -> str:
    """The installed version; says so where the package runs from a source tree that is not installed."""
    try:
        return metadata.version("rapid-llm")
    except metadata.PackageNotFoundError:
        return "(a source tree that is not installed)"
