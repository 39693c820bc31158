"""Importing a built extension module from the store, by its path."""

from __future__ import annotations

import importlib.machinery
import importlib.util
from pathlib import Path
from types import ModuleType

from .errors import BuildError


def import_extension(name: str, path: Path) -> ModuleType:
    """The module `name`, whose init function is in `path`; nothing enters sys.modules. Raises `BuildError`."""
    loader = importlib.machinery.ExtensionFileLoader(name, str(path))
    spec = importlib.util.spec_from_file_location(name, path, loader=loader)
    if spec is None:
        raise BuildError(f"{name}: {path} is no extension module")
    try:
        module = importlib.util.module_from_spec(spec)
        loader.exec_module(module)
    except Exception as error:  # of the dynamic linker, or of a torch whose exchange API is another
        raise BuildError(f"{name}: {path} does not import: {type(error).__name__}: {error}") from error
    return module
