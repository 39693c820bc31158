"""Whether a row's code can be used here, found out without letting foreign code harm this process.

A probe or target that lives outside this package is first imported in a child process, so that an ImportError, a
failing assertion, `sys.exit`, a hard exit, a segmentation fault or a hang there becomes a text here. The child's
good verdict is remembered on disk until the installation changes; a bad one is not, because what it speaks of may be
there at the next start. A library that is not installed is found absent without a child.
"""

from __future__ import annotations

import importlib
import importlib.machinery
import logging
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from rapid_llm import settings

from .errors import told
from .forking import Lock

if TYPE_CHECKING:
    from pathlib import Path

_log = logging.getLogger(__name__)

TIMEOUT_S: Final = 120.0
"""A child that has not answered after this long is taken to hang."""

_OWN: Final = "rapid_llm"
_MARK: Final = "rapid_llm probe verdict:"
_lock: Final = Lock()
_results: Final[dict[tuple[str, ...], Probe]] = {}

_CHILD: Final = f"""
import importlib, json, sys
sys.path[:] = json.loads(sys.argv[1])
def look(name, call):
    module, _, attr = name.partition(":")
    found = importlib.import_module(module)
    value = getattr(found, attr) if attr else found
    if call:
        answer = value()
        if not answer and attr.startswith("available"):
            answer = getattr(found, attr.replace("available", "why_not", 1), lambda: answer)()
        value = answer
        return (value is True or (value is not False and not isinstance(value, str) and bool(value))), value
    return True, value
try:
    text, ok = "", True
    if sys.argv[2]:
        ok, value = look(sys.argv[2], True)
        if not ok:
            text = value if isinstance(value, str) else sys.argv[2] + "() returned " + repr(value)
    if ok and sys.argv[3]:
        look(sys.argv[3], False)
except BaseException as error:
    import traceback
    ok, text = False, type(error).__name__ + ": " + str(error) + "\\n" + traceback.format_exc(limit=-8)
    if "undefined symbol" in str(error):
        from rapid_llm.kernels.registry.probes import abi_note
        text = abi_note((sys.argv[2] or sys.argv[3]).split(".")[0].split(":")[0]) + text
sys.stdout.flush()
print("\\n{_MARK}" + json.dumps([bool(ok), text]), flush=True)
"""

_OPEN: Final = f"""
import importlib.machinery, importlib.util, json, sys
sys.path[:] = json.loads(sys.argv[1])
ok, text = True, ""
try:
    import torch
    loader = importlib.machinery.ExtensionFileLoader(sys.argv[2], sys.argv[3])
    spec = importlib.util.spec_from_file_location(sys.argv[2], sys.argv[3], loader=loader)
    loader.exec_module(importlib.util.module_from_spec(spec))
except BaseException as error:
    ok, text = False, str(error) or type(error).__name__
sys.stdout.flush()
print("\\n{_MARK}" + json.dumps([ok, text]), flush=True)
"""


@dataclass(frozen=True, slots=True)
class Probe:
    """ok, and if not, why. `installed` is False where the library is simply not there. fix: what would make it ok, for
    probes that know."""

    ok: bool
    text: str = ""
    installed: bool = True
    fix: str = ""


def check(available: str | None, target: str = "") -> Probe:
    """Whether `available()` says yes and, for foreign code, whether `target` imports. Asked once per process."""
    if available is None:
        return Probe(True)
    key = (available, target)
    with _lock:
        if key not in _results:
            _results[key] = _check(available, target)
        return _results[key]


def abi_note(package: str) -> str:
    """What a missing symbol means: the versions that `package` was built for, and those that are here."""
    import re
    from importlib import metadata

    built_for, found = [], []
    for name in sorted(set(metadata.packages_distributions().get(package, []))):
        for requirement in metadata.requires(name) or []:
            library = requirement.split(";")[0].strip()
            known = re.split(r"[^\w.-]", library)[0]
            try:
                found.append(f"{known} {metadata.version(known)}")
            except metadata.PackageNotFoundError:
                found.append(f"no {known}")
            built_for.append(library)
    if not built_for:
        return f"ABI mismatch: {package} was built against a library of another version than the one here. "
    return f"ABI mismatch: {package} was built for {', '.join(built_for)}; here are {', '.join(found)}. "


def forget() -> None:
    """Ask again from now on; the results remembered on disk stay valid as long as the installation is unchanged."""
    with _lock:
        _results.clear()


def check_module(module: str) -> Probe:
    """Whether importing `module` is harmless, tried in a child process."""
    with _lock:
        key = (module,)
        if key not in _results:
            _results[key] = _in_child(module, "", module)
        return _results[key]


def library(name: str, check: str = "") -> Probe:
    """For the backends' own probes: whether library `name` is there and imports; `check` names a function to call."""
    with _lock:
        key = (name, "library", check)
        if key not in _results:
            _results[key] = _in_child(name, check, name)
        return _results[key]


def extension(name: str, path: Path) -> Probe:
    """Whether the extension module `name` in the file `path` can be imported beside torch, tried in a child process."""
    from pathlib import Path

    torch = importlib.machinery.PathFinder.find_spec("torch")
    version = Path(torch.origin).parent / "version.py" if torch is not None and torch.origin is not None else path
    parts = (sys.version, sys.executable, name, _stamp(path), _stamp(version))
    with _lock:
        if parts not in _results:
            memory = _place(parts)
            known = _recall(memory)
            if known is None:
                known = _ask_child(f"{name} ({path})", _OPEN, name, str(path))
                _remember(memory, known)
            _results[parts] = known
        return _results[parts]


def installed(name: str) -> bool:
    """Whether the top-level package of `name` is on the import path; nothing is imported."""
    return _locate(name) is not None


def _check(available: str, target: str) -> Probe:
    module = available.partition(":")[0]
    foreign = module.split(".")[0] != _OWN
    if foreign:
        result = _in_child(module, available, target)
        if not result.ok:
            return result
    return call_here(available)


def call_here(available: str) -> Probe:
    """Import and call a probe in this process; whatever it raises becomes the text.

    Where `available()` answers False or with a text, the `why_not()` beside it says more, if there is one.
    """
    module, attr = available.split(":")
    try:
        found = importlib.import_module(module)
        answer = getattr(found, attr)()
        if (not answer or isinstance(answer, str)) and attr.startswith("available"):
            answer = getattr(found, attr.replace("available", "why_not", 1), lambda: answer)()
        if isinstance(answer, Probe):
            return answer
        if isinstance(answer, str):
            return Probe(False, answer)
        return Probe(True) if answer else Probe(False, f"{available}() returned {answer!r}")
    except BaseException as error:  # AssertionError and SystemExit at import are among what was met
        if isinstance(error, KeyboardInterrupt):
            raise
        return Probe(False, f"{available} raised {told(error)}")


def load(target: str) -> Callable[..., Any]:
    """Import a target; raises `ImportError` with the cause's text, whatever the import raised."""
    module, attr = target.split(":")
    try:
        loaded: Callable[..., Any] = getattr(importlib.import_module(module), attr)
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt):
            raise
        raise ImportError(f"{target}: {told(error)}") from error
    return loaded


def _in_child(module: str, available: str, target: str) -> Probe:
    location = _locate(module)
    if location is None:
        return Probe(False, f"{module.split('.')[0]} is not installed", installed=False)
    remembered = _memory(location, available, target)
    known = _recall(remembered)
    if known is not None:
        return known
    result = _run_child(available, target)
    _remember(remembered, result)
    return result


def _run_child(available: str, target: str) -> Probe:
    return _ask_child(available or target, _CHILD, available, target)


def _ask_child(what: str, code: str, *arguments: str) -> Probe:
    """The verdict that `code` prints in a process of its own; what: its subject, for the text where there is none."""
    import json
    import subprocess

    if not sys.executable:
        return Probe(False, f"no child process could be started to try {what}: this Python does not know its own file")
    places = [place for place in sys.path if isinstance(place, str)]  # imports pass over others too
    command = [sys.executable, "-c", code, json.dumps(places), *arguments]
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace", timeout=TIMEOUT_S
        )
    except subprocess.TimeoutExpired:
        return Probe(False, f"{what} did not answer within {TIMEOUT_S:.0f} s in a child process")
    except OSError as error:
        return Probe(False, f"no child process could be started to try {what}: {error}")
    _, found, verdict = done.stdout.rpartition(_MARK)
    if found and done.returncode == 0:
        ok, text = json.loads(verdict.partition("\n")[0])  # what follows, the library said at its exit
        return Probe(bool(ok), str(text))
    tail = done.stderr.strip()[-2000:]
    if done.returncode < 0:
        import signal

        known = {int(s): s.name for s in signal.Signals}
        cause = f"was killed by {known.get(-done.returncode, f'signal {-done.returncode}')}"
    else:
        cause = f"ended its process with status {done.returncode}"
    return Probe(False, f"importing {what} {cause}" + (f"; it printed: {tail}" if tail else ""))


def find_top(top: str) -> importlib.machinery.ModuleSpec | None:
    """Where a top-level module lies, by any finder: what `pip install -e` links may be on no path. Imports nothing."""
    for finder in sys.meta_path:
        find_spec = getattr(finder, "find_spec", None)
        try:
            found: importlib.machinery.ModuleSpec | None = find_spec(top, None) if find_spec is not None else None
        except Exception as error:  # a foreign finder's failure is not this module's absence
            _log.debug("%r does not look for %s: %s", finder, top, error)
            continue
        if found is not None:
            return found
    return None


def _locate(module: str) -> str | None:
    """The file of the module's top-level package, found without importing it."""
    top = module.split(".")[0]
    loaded = sys.modules.get(top)
    if loaded is not None:
        return str(getattr(loaded, "__file__", None) or top)
    found = find_top(top)
    if found is None:
        return None
    if found.origin is not None:
        return found.origin
    return next(iter(found.submodule_search_locations or []), top)


def _memory(location: str, available: str, target: str) -> Path | None:
    """Where the verdict is kept: a name that changes with the library's files, its metadata, Python and torch."""
    from pathlib import Path

    parts = [sys.version, sys.executable, available, target]
    file = Path(location)
    parts.append(_stamp(file))
    # A folder's own time would change when Python writes its __pycache__; the installers' records do not.
    site = file.parent.parent if file.name == "__init__.py" else file.parent
    parts += sorted(_stamp(p) for pattern in ("*.dist-info", "*.egg-info") for p in site.glob(pattern))
    for name in {a.partition(":")[0] for a in (available, target) if a}:
        inner = file.parent.joinpath(*name.split(".")[1:])
        parts += [_stamp(inner.with_suffix(".py")), _stamp(inner / "__init__.py")]
    torch = importlib.machinery.PathFinder.find_spec("torch")
    if torch is not None and torch.origin is not None:
        parts.append(_stamp(Path(torch.origin).parent / "version.py"))
    return _place(parts)


def _place(parts: Sequence[str]) -> Path | None:
    """The file for a verdict about `parts`; None for a user without a home, who remembers nothing."""
    import hashlib

    known = "\0".join(map(str, parts))  # an embedded Python may not know its file
    digest = hashlib.sha256(known.encode(errors="surrogateescape")).hexdigest()[:32]
    try:
        return settings.cache_dir() / "probes" / f"{digest}.json"
    except (RuntimeError, settings.SettingError):  # of Path.home(), or of a variable that `doctor` reports
        return None


def _stamp(path: Path) -> str:
    try:
        state = path.stat()
    except OSError:
        return f"{path}:absent"
    return f"{path}:{state.st_mtime_ns}:{state.st_size}"


def _recall(memory: Path | None) -> Probe | None:
    import json

    if memory is None:
        return None
    try:
        kept = json.loads(memory.read_text())
        return Probe(True) if kept["ok"] is True else None
    except (OSError, ValueError, KeyError, TypeError, RecursionError):  # absent or damaged: the child is asked again
        return None


def _remember(memory: Path | None, result: Probe) -> None:
    """Keep a good verdict: what a bad one lacks (a driver, a system library, memory, time) may be there next time."""
    import json

    if memory is None or not result.ok:
        return
    try:
        memory.parent.mkdir(parents=True, exist_ok=True)
        partial = memory.with_suffix(f".{os.getpid()}.tmp")
        partial.write_text(json.dumps({"ok": True, "text": result.text}))
        partial.replace(memory)
    except OSError as error:
        _log.info("probe result not remembered: %s", error)
