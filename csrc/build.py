"""Builds the extension `rapid_llm._C`: one library for every torch from 2.11 and every Python from 3.11.

    python csrc/build.py [--output rapid_llm/_C.abi3.so]

Only torch's stable ABI is used, so the headers may be those of a torch for CPUs. TORCH_CUDA_ARCH_LIST chooses the
architectures, MAX_JOBS bounds the compilers that run at once. torch is found, not imported.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import fcntl
import hashlib
import importlib.machinery
import os
import shutil
import sys
import sysconfig
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parent.parent
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

from rapid_llm.kernels import aot  # noqa: E402  (this checkout's, torch-free)
from rapid_llm.kernels.build import BuildError, Toolchain, gencode, jobs, toolchain  # noqa: E402
from rapid_llm.kernels.build.arch import arch_list  # noqa: E402
from rapid_llm.kernels.build.process import run, spell  # noqa: E402

CSRC: Final = ROOT / "csrc"
KERNELS: Final = ROOT / "rapid_llm" / "kernels" / "csrc"
OUTPUT: Final = ROOT / "rapid_llm" / aot.FILE
OBJECTS: Final = ROOT / "build" / "objects"
"""What was compiled before, by a digest of all that it was made of: an edit compiles what it touches."""
KEPT: Final = 3
"""Objects of a source that stay there."""
ARCHS: Final = ("sm_80", "sm_89", "sm_90", "sm_100", "sm_120", "compute_120")
"""Machine code for each, and the newest as PTX too, for GPUs that are newer still."""

TORCH_TARGET: Final = (2, 11)
"""The oldest torch that loads it; the lower bound in pyproject.toml is the same."""

BYTES_A_JOB: Final = 1 << 30
TIMEOUT_S: Final = 1200.0


@dataclass(frozen=True, slots=True)
class Torch:
    """A torch to build against: its folder, and the version that its headers state."""

    folder: Path
    version: str


def find_torch() -> Torch:
    """The installed torch; raises `BuildError` if there is none, or it is too old."""
    spec = importlib.machinery.PathFinder.find_spec("torch")
    target = ".".join(map(str, TORCH_TARGET))
    if spec is None or spec.origin is None:
        raise BuildError(
            f"the extension is built against an installed torch, and this Python ({sys.executable}) has none; install "
            f"torch>={target} and build with: {aot.BUILD}"
        )
    folder = Path(spec.origin).parent
    namespace: dict[str, str] = {}
    exec((folder / "version.py").read_text(), namespace)
    version = namespace["__version__"]
    if aot.release(version) < TORCH_TARGET:
        raise BuildError(f"torch {version} is too old to build the extension against; install torch>={target}")
    return Torch(folder, version)


def architectures() -> tuple[str, ...]:
    """What TORCH_CUDA_ARCH_LIST asks for, else all that are shipped."""
    listed = arch_list()
    if listed is None:
        return ARCHS
    names = [entry.code for entry in listed] + [f"compute_{entry.sm}" for entry in listed if entry.ptx]
    return tuple(dict.fromkeys(names))


def build(output: Path = OUTPUT, archs: Sequence[str] | None = None) -> Path:
    """Compile every source, link them to `output`, and return it; raises `BuildError` with the compiler's words.

    A library that is there already, of the same sources and for the same things, is left as it is.
    """
    torch, tools, archs = find_torch(), toolchain(), tuple(archs or architectures())
    missing = tools.reason("nvcc", "host compiler", "CUDA headers", "cudart", "Python.h", "architectures")
    if missing:
        raise BuildError(f"the extension cannot be built here: {missing}")
    unknown = [arch for arch in archs if not tools.compiles_for(arch)]
    if unknown:
        raise BuildError(f"{tools.nvcc_text} does not compile for {', '.join(unknown)}; set TORCH_CUDA_ARCH_LIST")
    if _current(output, torch, tools, archs):
        return output
    sources = [*sorted(CSRC.rglob("*.cu")), *sorted(CSRC.rglob("*.cc"))]
    output.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".build-", dir=output.parent) as name:
        folder = Path(name)
        with concurrent.futures.ThreadPoolExecutor(max(1, min(jobs(BYTES_A_JOB), len(sources)))) as pool:
            objects = list(pool.map(lambda source: _object(source, folder, torch, tools, archs), sources))
        linked = folder / output.name
        _run([*_link(tools, torch, objects), "-o", str(linked)])
        linked.chmod(0o755)
        linked.replace(output)  # whole or not at all: a process that maps the old file keeps it
    return output


def _current(output: Path, torch: Torch, tools: Toolchain, archs: Sequence[str]) -> bool:
    """Whether the file is there, whole, and what would be built now."""
    try:
        found = aot.examine(output)
    except aot.ExtensionError:
        return False
    facts = (found.torch, found.headers, found.cuda, found.archs, found.sources)
    digest = aot.source_digest(CSRC, KERNELS)
    return facts == (TORCH_TARGET, torch.version.partition("+")[0], tools.version, tuple(archs), digest)


def _object(source: Path, folder: Path, torch: Torch, tools: Toolchain, archs: Sequence[str]) -> Path:
    """The source's object, compiled unless it is kept; of several processes that want the same one, one compiles it.

    folder: where it goes if this checkout cannot be written to.
    """
    command = _command(source, torch, tools, archs)
    if not os.access(ROOT, os.W_OK):
        return _compile([*command, *_threads(source)], source, folder / f"{source.stem}.o")
    OBJECTS.mkdir(parents=True, exist_ok=True)
    compiler = tools.nvcc.stat() if tools.nvcc is not None else None
    placed = [word.replace(str(KERNELS), "kernels").replace(str(CSRC), "csrc") for word in command]  # alike in a copy
    made_of = [*placed, torch.version, str(tools.version)]
    made_of += [f"{compiler.st_size} {compiler.st_mtime_ns}" if compiler is not None else ""]
    made_of += [aot.source_digest(CSRC, KERNELS, [source])]
    key = hashlib.sha256("\0".join(made_of).encode()).hexdigest()[:24]
    kept = OBJECTS / f"{source.stem}-{key}.o"
    with (OBJECTS / f"{source.stem}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not kept.is_file():
            _compile([*command, *_threads(source)], source, folder / kept.name, kept)
        kept.touch()
        every = sorted(OBJECTS.glob(f"{source.stem}-{'?' * len(key)}.o"), key=lambda path: path.stat().st_mtime_ns)
        for old in every[:-KEPT]:
            old.unlink()
    return kept


def _compile(command: Sequence[str], source: Path, output: Path, to: Path | None = None) -> Path:
    """Compile to `output`, and bring that to `to` whole or not at all."""
    _run([*command, str(source), "-o", str(output)])
    if to is None:
        return output
    draft = to.with_suffix(".draft")
    shutil.move(output, draft)
    return draft.replace(to)


def _threads(source: Path) -> list[str]:
    """How many of a source's architectures are compiled at once, which changes no object."""
    return ["--threads", "2" if jobs(BYTES_A_JOB) > 1 else "1"] if source.suffix == ".cu" else []


def _command(source: Path, torch: Torch, tools: Toolchain, archs: Sequence[str]) -> list[str]:
    includes = [CSRC / "include", KERNELS, KERNELS / "include"]
    system = [torch.folder / "include", Path(sysconfig.get_path("include"))]
    target = (TORCH_TARGET[0] << 56) | (TORCH_TARGET[1] << 48)
    command = [str(tools.nvcc), "-c", "-std=c++20", "-O3", "-DUSE_CUDA", f"-DTORCH_TARGET_VERSION={target:#x}ULL"]
    command += ["-Xcompiler", "-fPIC,-fvisibility=hidden,-Wall"]
    if tools.ccbin is not None:
        command += ["-ccbin", tools.ccbin]
    command += [word for path in includes for word in ("-I", str(path))]
    command += [word for path in system for word in ("-isystem", str(path))]
    if source.suffix == ".cu":
        command += [word for arch in archs for word in gencode(arch)]
    else:
        command += _facts(tools, archs)
    return command


def _facts(tools: Toolchain, archs: Sequence[str]) -> list[str]:
    """What the library says of itself."""
    facts = {
        "TORCH_TARGET": ".".join(map(str, TORCH_TARGET)),
        "CUDA": ".".join(map(str, tools.version or ())),
        "ARCHS": ",".join(archs),
        "SOURCES": aot.source_digest(CSRC, KERNELS),
    }
    return [f'-DRAPID_LLM_{name}="{value}"' for name, value in facts.items()]


def _link(tools: Toolchain, torch: Torch, objects: Sequence[Path]) -> list[str]:
    # torch's CUDA library is a dependency of libtorch where there is one, so it must stay in though nothing names it.
    linker = "--no-as-needed,-rpath,$ORIGIN/../torch/lib,--exclude-libs,ALL"
    command = [str(tools.nvcc), "-shared", "-nodlink", "-Xlinker", linker, f"-L{torch.folder / 'lib'}"]
    if tools.ccbin is not None:
        command += ["-ccbin", tools.ccbin]
    return [*command, *map(str, objects), "-ltorch_cpu", "-ltorch"]


def _run(command: Sequence[str]) -> None:
    done = run(command, timeout_s=TIMEOUT_S)
    if done.status != 0:
        said = (done.err + done.out).strip()
        raise BuildError(f"{said[-4000:]}\ncommand: {spell(command)}\nended with status {done.status}")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python csrc/build.py", description=__doc__.splitlines()[0] if __doc__ else ""
    )
    parser.add_argument("--output", type=Path, default=OUTPUT, help="the library's file (default: %(default)s)")
    options = parser.parse_args(arguments)
    began = time.monotonic()
    try:
        built = build(options.output)
    except BuildError as error:
        print(f"csrc/build.py: {error}", file=sys.stderr)
        return 1
    info = aot.read_info(built)
    size = built.stat().st_size / 1e6
    print(f"{built}: {size:.1f} MB in {time.monotonic() - began:.0f} s, {info}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
