"""The AOT extension `rapid_llm._C`: found, examined and opened, or why not, each reason by itself and with its fix.

The file is judged before anything maps it: whether it is whole, what it was built for (its own statement, read without
loading), whether this machine can run that. Then a child process opens it, so that one which would end its process ends
the child's. Nothing imports `rapid_llm._C` but `load`, and nothing here touches CUDA.
"""

from __future__ import annotations

import hashlib
import importlib
import mmap
import re
import struct
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from importlib import metadata
from pathlib import Path
from types import ModuleType
from typing import Final

from .build.arch import Arch
from .build.toolchain import driver_cuda
from .registry import KernelError, probes
from .registry.forking import Lock
from .registry.probes import Probe

NAME: Final = "rapid_llm._C"
FILE: Final = "_C.abi3.so"
PACKAGE: Final = Path(__file__).resolve().parent.parent
BUILD: Final = "RAPID_LLM_BUILD_EXT=1 pip install --no-build-isolation -e ."
"""What builds it, in a checkout with torch and the CUDA toolkit installed."""

_INFO: Final = re.compile(rb"RAPID_LLM_BUILD_INFO ([^;\0]*);\0")
_INCLUDE: Final = re.compile(rb'^\s*#\s*include\s+"([^"]+)"', re.MULTILINE)
_lock: Final = Lock()
_loaded: Final[list[ModuleType]] = []


class ExtensionError(KernelError):
    """The extension cannot be used: why, and what would mend it."""


@dataclass(frozen=True, slots=True)
class BuildInfo:
    """torch: the oldest that loads it. headers: the torch it was built against. cuda: the toolkit. archs: `sm_90` for
    machine code, `compute_120` for PTX. sources: a digest of all that was compiled."""

    torch: tuple[int, int]
    headers: str
    cuda: tuple[int, int]
    archs: tuple[str, ...]
    sources: str

    def __str__(self) -> str:
        torch, cuda = (".".join(map(str, pair)) for pair in (self.torch, self.cuda))
        return f"for torch {torch} and later (headers of {self.headers}), CUDA {cuda}, {' '.join(self.archs)}"

    def runs_on(self, sm: int) -> bool:
        """Whether some of its code runs on a device of SM version `sm`."""
        for arch in self.archs:
            number = int(re.sub(r"\D", "", arch))
            if arch.startswith("compute_") and number <= sm:
                return True
            if arch.startswith("sm_") and Arch(number, re.sub(r".*\d", "", arch)).runs_on(sm):
                return True
        return False


def available() -> bool:
    """Whether the extension opens and this machine can run it; `why_not()` says what is wrong."""
    return why_not().ok


def why_not() -> Probe:
    """The first thing that is wrong with the extension on this machine, with its fix."""
    try:
        found = examine(_path())
        _check_machine(found)
        load()
    except ExtensionError as error:
        text, _, fix = str(error).partition("; fix: ")
        return Probe(False, text, installed=_path().is_file(), fix=fix)
    return Probe(True)


def build_info() -> BuildInfo | None:
    """What the installed extension was built for; None where there is none, or its file is damaged."""
    try:
        return examine(_path())
    except ExtensionError:
        return None


def load() -> ModuleType:
    """The extension, imported once, its torch ops with fake kernels; raises `ExtensionError`. Needs no GPU."""
    with _lock:
        if not _loaded:
            path = _path()
            info = examine(path)
            _check_torch(info)
            opened = probes.extension(NAME, path)
            if not opened.ok:
                raise _refusal(opened.text, path, info)
            _loaded.append(_import(path, info))
        return _loaded[0]


def examine(path: Path) -> BuildInfo:
    """What the file says of itself, if it is there, whole and of these sources."""
    if not path.is_file():
        raise _fault(f"{NAME} is not built: there is no {path}", f"install a wheel that has it, or: {BUILD}")
    try:
        damage = _damage(path)
        info = None if damage else read_info(path)
    except OSError as error:
        raise _fault(f"{path} cannot be read: {error}", "let this user read it, or install it again") from error
    if damage:
        raise _fault(f"broken file: {path} {damage}", f"install it again, or build it: {BUILD}")
    if info is None:
        raise _fault(f"broken file: {path} does not say what it was built for", f"build it again: {BUILD}")
    checkout, kernels = PACKAGE.parent / "csrc", PACKAGE / "kernels" / "csrc"
    there = (checkout / "common_extension.cc").is_file()
    if there and info.sources != source_digest(checkout, kernels):
        raise _fault(f"stale: {path} was built from other sources than those in {checkout}", f"build it: {BUILD}")
    return info


def read_info(path: Path) -> BuildInfo | None:
    """What the library says of itself, without loading it; None if it says nothing that can be understood."""
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
        found = _INFO.search(content)
        text = found[1].decode(errors="replace") if found is not None else ""
    facts = dict(word.partition("=")[::2] for word in text.split())
    if set(facts) != {"torch", "headers", "cuda", "archs", "sources"}:
        return None
    archs = tuple(facts["archs"].split(","))
    versions = (re.match(r"\d+\D+\d", facts[name]) for name in ("torch", "cuda"))
    if not all(versions) or not all(re.fullmatch(r"(sm|compute)_\d+[af]?", arch) for arch in archs):
        return None
    return BuildInfo(release(facts["torch"]), facts["headers"], release(facts["cuda"]), archs, facts["sources"])


def release(version: str) -> tuple[int, int]:
    """(2, 13) of 2.13.0+cpu."""
    major, minor = re.findall(r"\d+", version)[:2]
    return int(major), int(minor)


def source_digest(csrc: Path, kernels: Path, sources: Iterable[Path] | None = None) -> str:
    """A digest of the extension's sources, or of those given, and of every own header that they include, by name and
    content."""
    known: dict[str, bytes] = {}
    pending = [(path.relative_to(csrc).as_posix(), path) for path in sorted(sources or csrc.rglob("*.c[uc]"))]
    while pending:
        name, path = pending.pop()
        if name in known:
            continue
        known[name] = path.read_bytes()
        for match in _INCLUDE.findall(known[name]):
            header = match.decode()
            places = (folder / header for folder in (csrc / "include", kernels, kernels / "include", path.parent))
            found = next((place for place in places if place.is_file()), None)
            if found is not None:
                pending.append((header, found))
    digest = hashlib.sha256()
    for name in sorted(known):
        digest.update(f"{name}\0{len(known[name])}\0".encode() + known[name])
    return digest.hexdigest()[:24]


def _path() -> Path:
    return PACKAGE / FILE


def _fault(text: str, fix: str) -> ExtensionError:
    return ExtensionError(f"{text}; fix: {fix}")


def _damage(path: Path) -> str:
    """What is wrong with a library's file, '' if nothing: mapping one that is cut short ends the process."""
    size = path.stat().st_size
    with path.open("rb") as file:
        head = file.read(64)
    if len(head) < 64 or head[:4] != b"\x7fELF":
        return f"is no shared library ({size} bytes)"
    if head[4:6] != b"\x02\x01":
        return "is no 64-bit little-endian library"
    machine = struct.unpack_from("<H", head, 18)[0]
    if machine != _machine():
        return f"is for another processor (ELF machine {machine}, this one's is {_machine()})"
    offset = struct.unpack_from("<Q", head, 40)[0]
    entry, count = struct.unpack_from("<HH", head, 58)
    needed = offset + entry * count
    return f"is cut short: {size} bytes of {needed}" if size < needed else ""


@cache
def _machine() -> int:
    """The ELF machine number of this interpreter itself."""
    with Path("/proc/self/exe").open("rb") as file:
        return int(struct.unpack_from("<H", file.read(20), 18)[0])


def _check_torch(info: BuildInfo) -> None:
    try:
        version = metadata.version("torch")
    except metadata.PackageNotFoundError:
        raise _fault("torch is not installed", "install torch") from None
    if release(version) < info.torch:
        wanted = ".".join(map(str, info.torch))
        raise _fault(f"other torch: built for torch {wanted} and later, found {version}", f"install torch>={wanted}")


def _check_machine(info: BuildInfo) -> None:
    """Whether torch, driver and GPUs are such that its kernels can run."""
    import torch

    _check_torch(info)
    if torch.version.cuda is None:
        raise _fault(f"torch {torch.__version__} is built without CUDA", "install a torch built for CUDA")
    driver = driver_cuda()
    if driver is None:
        raise _fault("no NVIDIA driver is loaded", "run where there is an NVIDIA GPU")
    if driver[0] < info.cuda[0]:
        built, runs = (".".join(map(str, pair)) for pair in (info.cuda, driver))
        fix = f"install a driver for CUDA {info.cuda[0]}, or build with a toolkit of CUDA {driver[0]}: {BUILD}"
        raise _fault(f"other CUDA: built with CUDA {built}, the driver runs CUDA {runs} at most", fix)
    sms = _sm_versions()
    if sms and not any(info.runs_on(sm) for sm in sms):
        have = ", ".join(f"sm_{sm}" for sm in sms)
        lists = ";".join(f"{sm // 10}.{sm % 10}" for sm in sms)
        fix = f'TORCH_CUDA_ARCH_LIST="{lists}" {BUILD}'
        raise _fault(f"other architecture: built for {' '.join(info.archs)}, this machine's GPUs are {have}", fix)


@cache
def _sm_versions() -> tuple[int, ...]:
    """The SM versions of this machine's GPUs as the driver's management library tells, () if it does not.

    Asked there because torch would initialise CUDA, after which no child may be forked.
    """
    import ctypes

    try:
        library = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return ()
    count = ctypes.c_uint(0)
    if library.nvmlInit_v2() != 0:
        return ()
    found = set()
    try:
        library.nvmlDeviceGetCount_v2(ctypes.byref(count))
        for index in range(count.value):
            device, major, minor = ctypes.c_void_p(), ctypes.c_int(), ctypes.c_int()
            if library.nvmlDeviceGetHandleByIndex_v2(ctypes.c_uint(index), ctypes.byref(device)) != 0:
                continue
            if library.nvmlDeviceGetCudaComputeCapability(device, ctypes.byref(major), ctypes.byref(minor)) == 0:
                found.add(major.value * 10 + minor.value)
    finally:
        library.nvmlShutdown()
    return tuple(sorted(found))


def _refusal(text: str, path: Path, info: BuildInfo) -> ExtensionError:
    """What the loader's words mean."""
    symbol = re.search(r"undefined symbol: (\w+)", text)
    if symbol is not None:
        found = metadata.version("torch")
        return _fault(
            f"missing symbol {symbol[1]}: {path} is built {info}; found torch {found}",
            f"install a torch that has it, or build it for this one: {BUILD}",
        )
    library = re.search(r"(\S+): cannot open shared object file", text)
    if library is not None:
        return _fault(f"missing library {library[1]}, which {path} needs", f"install it, or build it here: {BUILD}")
    return _fault(f"{path} does not load: {text.strip()}", f"install it again, or build it: {BUILD}")


def _import(path: Path, info: BuildInfo) -> ModuleType:
    """Import the extension into this process and give its torch ops their fake kernels."""
    import torch

    try:
        module = importlib.import_module(NAME)
    except ImportError as error:
        if "defined already" in str(error):
            text = f"the namespace rapid_llm is taken: {error}"
            raise _fault(text, "load one copy: let nothing but rapid_llm load the extension") from error
        raise _refusal(str(error), path, info) from error
    for name, function in vars(module).items():
        if callable(function) and not name.startswith("_"):
            torch.library.register_fake(f"rapid_llm::{name}", _writes_only)
    return module


def _writes_only(*args: object, **kwargs: object) -> None:
    """The fake kernel of an op that only writes to its arguments."""
