"""Taking what was built from the store into this process: an extension module by its path, or any file."""

from __future__ import annotations

import importlib.machinery
import importlib.util
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Final, TypeVar

from .errors import BuildError
from .unit import Artifact

_ATTEMPTS: Final = 3

T = TypeVar("T")


def take(build: Callable[[], Artifact], load: Callable[[Path], T]) -> T:
    """`load(path)` of the artifact that `build()` finds or compiles; both again if the file went in between, as it may
    while `rapid-llm cache gc` runs: no row is lost for it."""
    for _ in range(_ATTEMPTS):
        path = build().path
        try:
            return load(path)
        except (BuildError, OSError):
            if path.is_file():
                raise
    raise BuildError(f"{path} was taken away {_ATTEMPTS} times before it was loaded; does `cache gc` run in a loop?")


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
