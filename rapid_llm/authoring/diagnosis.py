"""What compiled kernels need on this machine, and what is wrong with it: one cause and one fixing command a finding.

What a machine cannot have is no finding: without an NVIDIA driver, whatever only CUDA needs is a fact.
"""

from __future__ import annotations

import fcntl
import importlib
import json
import os
import pkgutil
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from rapid_llm.authoring import builds
from rapid_llm.kernels import backend, build, cpp
from rapid_llm.kernels.backend._library import Library
from rapid_llm.kernels.build import arch, store, upkeep
from rapid_llm.kernels.registry import probes
from rapid_llm.platform import has_nvidia

LONG_S: Final = 900.0
"""A lock that is held for longer than any compiler may run."""

_HOST: Final = ("host compiler", "Python.h")
"""Parts of the toolchain that kernels for the CPU need too."""


@dataclass(slots=True)
class Diagnosis:
    """facts: what is there, by section. findings: (what is wrong, the command or step that mends it)."""

    facts: dict[str, dict[str, str]] = field(default_factory=dict)
    findings: list[tuple[str, str]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def find(self, what: str, fix: str) -> None:
        self.findings.append((what, fix))


def diagnose() -> Diagnosis:
    """Look at everything; compiles nothing, and changes nothing."""
    found = Diagnosis()
    for look in (_toolchain, _store, _extension, _nvrtc, _libraries, _triton):
        look(found)
    return found


def tools() -> Diagnosis:
    """The part about C++ and CUDA alone, for a report that speaks of the rest, and of the cache's folder, itself."""
    found = Diagnosis()
    _toolchain(found)
    _store(found, folders=False)
    _extension(found)
    _nvrtc(found)
    return found


def _toolchain(found: Diagnosis) -> None:
    facts = found.facts["C++ and CUDA"] = {}
    gpu = has_nvidia()
    for part in build.toolchain().parts:
        facts[part.name] = part.text if part.ok else f"missing: {part.text}"
        if not part.ok and (gpu or part.name in _HOST):
            found.find(f"{part.name}: {part.text}", part.fix)
    if not gpu:
        facts["GPU"] = "no NVIDIA driver is loaded: kernels for CUDA can be compiled here, not run"
    _variables(found)
    usable = cpp.available()
    facts["C++ rows"] = "can be built" if usable is True else str(usable)


def _variables(found: Diagnosis) -> None:
    """Values of TORCH_CUDA_ARCH_LIST and MAX_JOBS that no build can heed, which a build says only when it starts."""
    facts = found.facts["C++ and CUDA"]
    sms, tools = builds.device_sms(), build.toolchain()
    listed = os.environ.get(arch.VARIABLE, "").strip()
    own = " ".join(f"{sm // 10}.{sm % 10}" for sm in sms) or "9.0"
    try:
        entries = arch.arch_list() or ()
        for sm in sms:
            build.nvcc_arch(sm)
        strange = [entry.code for entry in entries if tools.archs and not tools.compiles_for(entry.code)]
        if strange:
            what = f"{tools.nvcc_text} does not compile for {', '.join(strange)}, only for {' '.join(tools.archs)}"
            raise build.BuildError(f"{arch.VARIABLE}={listed}: {what}")
    except build.BuildError as error:
        found.find(str(error), f'export {arch.VARIABLE}="{own}", or unset {arch.VARIABLE}')
    if listed:
        facts[arch.VARIABLE] = listed
    try:
        facts["compilers at once"] = str(build.jobs())
    except build.BuildError as error:
        found.find(str(error), "unset MAX_JOBS")


def _store(found: Diagnosis, *, folders: bool = True) -> None:
    """folders: whether one that cannot be written is a finding, or somebody else's."""
    facts = found.facts["compiled kernels"] = {}
    for layer in store.layers():
        problem = _unusable(layer.root) if layer.writable else ""
        facts[layer.name] = f"{layer.root}{f', cannot be written: {problem}' if problem else ''}"
        if layer.name == "user" and problem and folders:
            found.find(
                f"kernels cannot be kept in {layer.root}: {problem}", "export RAPID_LLM_CACHE_DIR=DIR, one with room"
            )
    records = upkeep.artifacts()
    states = upkeep.states(records)
    stale = [r for r in records if states[r.folder] == "stale"]
    facts["artifacts"] = f"{len(records)}, {len(stale)} of them stale"
    if stale:
        size = sum(r.size for r in stale)
        cure = "rapid-llm cache gc --newest-only takes old ones away"
        found.notes.append(f"{len(stale)} stale artifacts take {size / 1e6:.1f} MB; {cure}")
    bad = upkeep.faults()
    for folder, fault in bad:
        found.find(f"{folder}: {fault}", "rapid-llm cache gc")
    for layer in store.layers():
        for text, held_s, pid in _held(layer):
            found.notes.append(f"a build is under way: {text}")
            if held_s > LONG_S:
                found.find(f"a build hangs: {text}", f"kill {pid}" if pid else "end that process")
        left = _left_overs(layer)
        if left:
            found.find(f"killed builds left {left} folders in {layer.root / store.STAGING}", "rapid-llm cache gc")


def _unusable(root: Path) -> str:
    """Why nothing can be written below `root`, or ''."""
    there = next((p for p in (root, *root.parents) if p.exists()), root)
    if not there.is_dir():
        return f"{there} is not a folder"
    return "" if os.access(there, os.W_OK | os.X_OK) else f"no permission to write to {there}"


def _held(layer: store.Layer) -> Iterator[tuple[str, float, int]]:
    """(who holds what, for how long, its process) of every lock that is held now."""
    folder = layer.root / store.LOCKS
    if not (layer.writable and store.readable(layer) and folder.is_dir()):
        return
    for file in sorted(folder.glob("*.lock")):
        try:
            descriptor = os.open(file, os.O_RDWR | os.O_CLOEXEC)
        except OSError:  # somebody else's, or gone
            continue
        try:
            fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except OSError:
            yield _owner(file, descriptor)
        finally:
            os.close(descriptor)


def _owner(file: Path, descriptor: int) -> tuple[str, float, int]:
    held_s = max(0.0, time.time() - file.stat().st_mtime)
    try:
        owner = json.loads(os.pread(descriptor, 4096, 0))
        return (
            f"process {owner['pid']} on {owner['host']} builds {owner['what']} since {owner['since']}",
            held_s,
            owner["pid"],
        )
    except (ValueError, KeyError, TypeError):
        return f"{file} is held by a process that left no name", held_s, 0


def _left_overs(layer: store.Layer) -> int:
    """Folders of builds whose lock nobody holds any more."""
    folder = layer.root / store.STAGING
    if not (layer.writable and store.readable(layer) and folder.is_dir()):
        return 0
    known = {file.stem for file in (layer.root / store.LOCKS).glob("*.lock")}
    free = known - set(_locked_stems(layer))
    return sum(left.is_dir() and left.name.rpartition(".")[0] in free for left in folder.iterdir())


def _locked_stems(layer: store.Layer) -> Iterator[str]:
    for file in sorted((layer.root / store.LOCKS).glob("*.lock")):
        with file.open("rb") as opened:
            try:
                fcntl.flock(opened, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except OSError:
                yield file.stem


def _extension(found: Diagnosis) -> None:
    from rapid_llm.kernels import aot

    facts = found.facts["extension (aot)"] = {}
    probe = aot.why_not()
    info = aot.build_info()
    facts["rapid_llm._C"] = "can be used" if probe.ok else probe.text
    if info is not None:
        facts["built"] = str(info)
    if not probe.ok and probe.installed and has_nvidia():
        found.find(f"rapid_llm._C: {probe.text}", probe.fix)


def _nvrtc(found: Diagnosis) -> None:
    from rapid_llm.kernels import nvrtc

    probe = nvrtc.why_not()
    library = nvrtc.library()
    found.facts["NVRTC"] = {
        "libnvrtc": f"missing: {library.reason}" if library.reason else str(library.path),
        "rows": "can be built and run" if probe.ok else probe.text,
    }
    if not probe.ok and probe.text.startswith("NVRTC"):
        found.find(probe.text, probe.fix)


def _libraries(found: Diagnosis) -> None:
    facts = found.facts["external libraries"] = {}
    for name in sorted(m.name for m in pkgutil.iter_modules(backend.__path__) if not m.name.startswith("_")):
        module = importlib.import_module(f"{backend.__name__}.{name}")
        library: Library = module.LIBRARY
        available: Callable[[], probes.Probe] = module.available
        probe = available()
        version = library.version() or "no version known"
        facts[name] = version if probe.ok else f"out: {_first(probe.text)}"
        if not probe.ok and probe.installed and has_nvidia():
            found.find(f"{name} {version} is here and cannot be used: {_first(probe.text)}", probe.fix)


def _triton(found: Diagnosis) -> None:
    facts = found.facts["Triton"] = {}
    if not probes.installed("triton"):
        facts["version"] = "not installed"
        if has_nvidia():
            found.find("Triton is not installed, so native rows answer through PyTorch", "pip install 'triton>=3.6'")
        return
    probe = probes.library("triton")
    facts["imports"] = "yes" if probe.ok else f"no: {_first(probe.text)}"
    if not probe.ok:
        found.find(f"Triton cannot be imported: {_first(probe.text)}", "pip install --force-reinstall 'triton>=3.6'")


def _first(text: str) -> str:
    return text.strip().splitlines()[0] if text.strip() else ""
