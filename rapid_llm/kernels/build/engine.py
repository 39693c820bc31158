"""`build`: find a unit's artifact in the store, or compile it there, once, whoever else asks at the same time."""

from __future__ import annotations

import ctypes
import errno
import json
import logging
import os
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from . import keys, locks, store
from .digests import content_digest, write_quietly
from .distill import distill
from .errors import BuildError, BuildTimeout, CompileFailed
from .freezing import check_thawed, counters
from .progress import Progress
from .unit import Artifact, Compiler, Unit

_log: Final = logging.getLogger("rapid_llm.kernels.build")

LOCK_TIMEOUT_S: Final = 900.0
"""How long to wait for another process that builds the same unit: longer than a compiler may run."""

_ATTEMPTS: Final = 3
"""How often a source that is edited while it compiles is compiled again."""

_NOEXEC: Final = ("failed to map segment from shared object", "cannot apply additional memory protection")
"""What the loader says of a good library on a file system, or under a policy, that lets nothing be executed."""

Check = Callable[[Path], object]


def load_test_ctypes(path: Path) -> None:
    """Load a shared library into this process; raises OSError."""
    ctypes.CDLL(str(path))


def build(
    unit: Unit,
    compiler: Compiler,
    *,
    check: Check = load_test_ctypes,
    lock_timeout_s: float | None = None,
) -> Artifact:
    """The unit's artifact, found or compiled. `check(path)` raises if the built file is of no use here.

    Raises `BuildError` (the first error, the command, the log), `BuildTimeout`, `LockTimeout` or `FrozenError`.
    """
    try:
        base = keys.base_key(unit, compiler)
    except OSError as error:
        raise BuildError(f"{unit}: {error}") from error
    except CompileFailed as failure:
        raise _report(unit, failure, None) from failure
    found = _find(unit, base, check)
    if found is not None:
        return found
    check_thawed(unit)
    limit = LOCK_TIMEOUT_S if lock_timeout_s is None else lock_timeout_s
    job = _Job(unit, compiler, check, base, limit)
    layers = store.layers()
    reasons = [] if layers[-1].name == "temporary" else ["no temporary directory can be written"]
    for layer in layers:
        if not layer.writable:
            continue
        try:
            return job.run(layer)
        except _UnusableError as unusable:
            reasons.append(f"{layer.root}: {unusable}")
            _log.warning("%s cannot be built in %s: %s", unit, layer.root, unusable)
    raise BuildError(
        f"{unit}: no directory to build in: {'; '.join(reasons)}. Set RAPID_LLM_CACHE_DIR to one with room"
    )


def key_of(unit: Unit, compiler: Compiler) -> str:
    """The key under which the unit's artifact is kept now. Asks the compiler only if the store knows no answer."""
    base = keys.base_key(unit, compiler)
    known = _current(unit, base)
    return known.key if known is not None else keys.full_key(base, keys.headers(unit, compiler))


class _UnusableError(Exception):
    """A layer that cannot take the artifact, for a reason that another one may not share."""


@dataclass(frozen=True, slots=True)
class _Job:
    unit: Unit
    compiler: Compiler
    check: Check
    base: str
    lock_timeout_s: float

    @property
    def stem(self) -> str:
        return f"{self.unit.path}-{self.unit.name}-{self.base}"

    def run(self, layer: store.Layer) -> Artifact:
        """Build into `layer`, or take what another process built there while this one waited."""
        asked = time.time()
        try:
            store.open_layer(layer)
            lock = locks.KeyLock(layer.root / store.LOCKS / f"{self.stem}.lock", str(self.unit), self.lock_timeout_s)
            with lock:
                found = _find(self.unit, self.base, self.check, say=_log.warning)
                if found is not None:
                    return found
                self._share_failure(layer.root, asked)
                if lock.locked:
                    store.sweep(layer.root, self.stem)
                return self._build(layer)
        except OSError as error:
            raise _UnusableError(str(error)) from error

    def _build(self, layer: store.Layer) -> Artifact:
        log = layer.root / store.LOGS / f"{self.stem}.log"
        try:
            for _ in range(_ATTEMPTS):
                artifact = self._attempt(layer)
                if artifact is not None:
                    return artifact
        except CompileFailed as failure:
            report = distill(failure.output, failure.status)
            if report.disk_full:
                raise _UnusableError(report.first) from failure
            error = _report(self.unit, failure, log)
            self._note_failure(layer.root, str(error), failure.headers)
            raise error from failure
        except BuildTimeout as slow:
            text = f"{self.unit}: {slow}"
            self._note_failure(layer.root, text, ())
            raise BuildTimeout(text) from slow
        raise BuildError(f"{self.unit}: its files changed while they were compiled, {_ATTEMPTS} times; try again")

    def _attempt(self, layer: store.Layer) -> Artifact | None:
        """One compile; None if a file changed under it."""
        staging = store.stage(layer.root, self.stem)
        try:
            started = time.monotonic()
            counters.count("compiles")
            with Progress(f"building {self.unit}"):
                found = keys.headers(self.unit, self.compiler, staging)
                output = staging / self.unit.output
                try:
                    self.compiler.compile(self.unit, output, staging / store.LOG)
                    self._try_out(output)
                except CompileFailed as failure:
                    failure.headers = found.entries
                    raise
            seconds = time.monotonic() - started
            if not found.hold(self.unit) or keys.base_key(self.unit, self.compiler) != self.base:
                return None
            digest = content_digest(output)
            store.write(staging, self._record(found, output, digest, seconds))
            _keep_only(staging, {self.unit.output, store.RECORD, store.LOG})
            return self._publish(layer, staging, keys.full_key(self.base, found), digest, seconds)
        finally:
            shutil.rmtree(staging, ignore_errors=True)

    def _try_out(self, output: Path) -> None:
        try:
            self.check(output)
        except Exception as error:
            if any(words in str(error) for words in _NOEXEC):
                raise _UnusableError(f"nothing can be loaded from there, as if mounted noexec: {error}") from error
            log = output.with_name(store.LOG)
            said = log.read_text(encoding="utf-8", errors="replace") if log.is_file() else ""
            first = f"the compiler left nothing that loads: {error}"
            raise CompileFailed("", f"{first}\n{said}", first=first) from error

    def _publish(self, layer: store.Layer, staging: Path, key: str, digest: str, seconds: float) -> Artifact:
        final = layer.root / self.unit.path / f"{self.unit.name}-{key}"
        final.parent.mkdir(parents=True, exist_ok=True)
        try:
            os.rename(staging, final)
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR):
                raise
            theirs = store.read(final, layer.name)  # built at once where there are no locks, or of no use
            if theirs is not None and theirs.headers.hold(self.unit) and not _fault(theirs, self.check):
                return Artifact(theirs.file, theirs.key, theirs.seconds, True, layer.name)
            store.discard(final, layer.root)
            os.rename(staging, final)
        return Artifact(final / self.unit.output, key, seconds, False, layer.name)

    def _record(self, found: keys.Headers, output: Path, digest: str, seconds: float) -> dict[str, Any]:
        """All that went into the key, without a path of this machine."""
        unit = self.unit
        inputs = [(unit.source, content_digest(unit.source))]
        inputs += [(keys.locate(name, unit), sha) for name, sha in found.entries if sha != keys.ABSENT]
        named = [(keys.in_package(path), sha) for path, sha in inputs]
        return {
            "path": unit.path,
            "name": unit.name,
            "key": keys.full_key(self.base, found),
            "output": unit.output,
            "digest": digest,
            "size": output.stat().st_size,
            "arch": unit.arch,
            "seconds": round(seconds, 3),
            "created": round(time.time(), 3),
            "headers": [list(entry) for entry in found.entries],
            "sources": [[name, sha] for name, sha in named if name is not None],
            "details": {
                "source": unit.source.name,
                "flags": list(unit.flags),
                "facts": dict(unit.facts),
                "compiler": dict(self.compiler.identity()),
                "linked": [path.name for path in unit.link_inputs],
            },
        }

    def _note_failure(self, root: Path, text: str, headers: tuple[tuple[str, str], ...]) -> None:
        note = {"at": time.time(), "headers": headers, "text": text}
        write_quietly(root / store.LOGS / f"{self.stem}.failed.json", json.dumps(note))

    def _share_failure(self, root: Path, asked: float) -> None:
        """Raise a failure that came after this one had asked, from whomever it waited for, instead of repeating it."""
        try:
            note = json.loads((root / store.LOGS / f"{self.stem}.failed.json").read_bytes())
            fresh = asked <= float(note["at"]) <= time.time()  # a note from a clock that was ahead speaks of nothing
            headers = keys.Headers(tuple((str(n), str(d)) for n, d in note["headers"]))
            text = str(note["text"])
        except (OSError, ValueError, KeyError, TypeError, RecursionError):  # it did not fail
            return
        if fresh and headers.hold(self.unit):
            raise BuildError(text)


def _current(unit: Unit, base: str) -> store.Record | None:
    for layer in store.layers():
        for record in store.candidates(layer, unit, base):
            if record.headers.hold(unit):
                return record
    return None


def _find(unit: Unit, base: str, check: Check, say: Callable[..., None] = _log.debug) -> Artifact | None:
    """A ready artifact whose headers are unchanged, whose file is whole, and which passes the check.

    `say` is told of those that are of no use; a miss is looked for twice, and worth one warning.
    """
    for layer in store.layers():
        for record in store.candidates(layer, unit, base):
            if not record.headers.hold(unit):
                continue
            fault = _fault(record, check)
            if not fault:
                store.touch(record)
                counters.count("hits")
                return Artifact(record.file, record.key, record.seconds, True, layer.name)
            say("%s: %s is not used (%s); building it again", unit, record.file, fault)
    return None


def _fault(record: store.Record, check: Check) -> str:
    """Why an artifact is of no use here, or ''."""
    fault = record.fault()
    if not fault:
        try:
            check(record.file)
        except Exception as error:  # built for a system library that has gone, say
            fault = f"it does not load: {error}"
    return fault


def _keep_only(folder: Path, names: set[str]) -> None:
    for path in folder.iterdir():
        if path.name in names:
            continue
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()


def _report(unit: Unit, failure: CompileFailed, log: Path | None) -> BuildError:
    """The failure in three lines; the whole of it goes to `log`."""
    first = failure.first or distill(failure.output, failure.status).first
    text = f"{unit} does not compile: {first}"
    if failure.command:
        text += f"\n  command: {failure.command}"
    if log is not None:
        try:
            log.write_text(f"{failure.command}\n{failure.output}", encoding="utf-8", errors="backslashreplace")
            text += f"\n  log: {log}"
        except OSError as error:
            text += f"\n  log: not written ({error})"
    return BuildError(text)
