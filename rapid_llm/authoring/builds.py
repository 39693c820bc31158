"""What rows are made of: the builds behind each, found without running them, and the result of running one.

A row names its kernels by a call in its module: `Kernel("scale", ...)`, `load_cpp("norms", ...)` or `Kernels(...)`.
Several rows may share one. Only NVRTC's, whose instances are Python's business, have their module imported.
"""

from __future__ import annotations

import ast
import importlib
import os
import subprocess
import sys
import time
from collections.abc import Callable, Container, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from rapid_llm.kernels import build, cpp, jit
from rapid_llm.kernels.build import Artifact, BuildError
from rapid_llm.kernels.build.arch import arch_list
from rapid_llm.kernels.build.toolchain import host_command
from rapid_llm.kernels.registry import KernelError, KernelSpec, get_op, get_row, ops, plugins, rows

from .project import module_file
from .request import checkout, is_checkout

PATHS: Final = ("jit", "nvrtc", "cpp", "aot")
_CALLS: Final = {"Kernel": "jit", "load_cpp": "cpp", "Kernels": "nvrtc"}
_PARTS: Final = ("nvcc", "host compiler", "CUDA headers", "cudart", "Python.h", "architectures")
BYTES_A_JOB: Final = 1 << 30


@dataclass(frozen=True, slots=True)
class Build:
    """One artifact to be. name: `jit/scale`. arch: `sm_90`, or a CPU's level. rows: those that need it."""

    name: str
    arch: str
    rows: tuple[str, ...]
    make: Callable[[], Artifact]

    @property
    def path(self) -> str:
        """jit, nvrtc, cpp or aot."""
        return self.name.partition("/")[0]


@dataclass(frozen=True, slots=True)
class Built:
    """What became of a build. status: `built` now, `cached` from before, `failed`, or `skipped` where the machine lacks
    the path's tools; the last two with the reason in text."""

    name: str
    arch: str
    rows: tuple[str, ...]
    status: str
    seconds: float
    path: str = ""
    text: str = ""


def chosen(names: Iterable[str]) -> list[KernelSpec]:
    """The rows that the names mean: rows, ops, or paths such as `jit`; raises the registry's errors on others.

    An op's name means none of the extension, which is one big build: it is named itself.
    """
    plugins.scan()
    every = [row for op in ops() for row in rows(op.id)]
    found: dict[str, KernelSpec] = {}
    for name in names:
        if name in PATHS:
            listed = [row for row in every if row.backend == name]
        elif "/" in name:
            listed = [get_row(name)]
        else:
            listed = [row for row in rows(get_op(name).id) if row.backend != "aot"]
        found.update({row.name: row for row in listed})
    return list(found.values())


def builds(listed: Iterable[KernelSpec], sms: tuple[str, ...]) -> list[Build]:
    """The builds behind the rows, each once, for every SM version where it is for a GPU."""
    made: dict[tuple[str, str], Build] = {}
    for row in listed:
        for one in _of_row(row, sms):
            known = made.get((one.name, one.arch))
            needed = (*known.rows, row.name) if known is not None else one.rows
            made[one.name, one.arch] = Build(one.name, one.arch, needed, one.make)
    return list(made.values())


def missing(path: str) -> str:
    """What this machine lacks to build anything of a path, or ''."""
    if path == "cpp":
        reason = cpp.available()
        return reason if isinstance(reason, str) else ""
    if path == "nvrtc":
        from rapid_llm.kernels.nvrtc import library

        return library().reason or ""
    return build.toolchain().reason(*_PARTS)


def run(listed: list[Build], done: Callable[[Built], None], *, skip: Container[str] = ()) -> list[Built]:
    """Make all of them, several at once as cores and memory allow; `done` hears of each in its turn.

    skip: paths whose builds are passed over where the machine lacks their tools, instead of failing.
    """
    lacking = {path: missing(path) for path in {one.path for one in listed} if path in skip}
    results = [
        Built(one.name, one.arch, one.rows, "skipped", 0.0, text=lacking[one.path])
        for one in listed
        if lacking.get(one.path)
    ]
    listed = [one for one in listed if not lacking.get(one.path)]
    with ThreadPoolExecutor(max(1, min(len(listed), build.jobs(BYTES_A_JOB)))) as pool:
        for result in pool.map(_run, listed):
            done(result)
            results.append(result)
    return results


def _run(one: Build) -> Built:
    began = time.monotonic()
    try:
        artifact = one.make()
    except KernelError as error:
        return Built(one.name, one.arch, one.rows, "failed", time.monotonic() - began, text=str(error))
    status = "cached" if artifact.cached else "built"
    return Built(one.name, one.arch, one.rows, status, time.monotonic() - began, path=str(artifact.path))


def architectures(given: Iterable[str]) -> tuple[str, ...]:
    """`sm_90` of 90, 9.0 or sm_90; without any, those of the GPUs here, else of TORCH_CUDA_ARCH_LIST, else none."""
    named = tuple(f"sm_{text.removeprefix('sm_').replace('.', '')}" for text in given)
    if named:
        return named
    here = tuple(f"sm_{sm}" for sm in device_sms())
    return here or tuple(entry.code for entry in arch_list() or ())


def device_sms() -> tuple[int, ...]:
    """The SM versions of the GPUs that torch sees here, such as 90; none without a torch that can be imported."""
    try:
        import torch
    except (ImportError, OSError):  # OSError: a library of torch's own is missing
        return ()
    if not torch.cuda.is_available():
        return ()
    from rapid_llm.kernels.ops.tile_policy import sm_version

    return tuple(sorted({sm_version(torch.device("cuda", i)) for i in range(torch.cuda.device_count())}))


def _of_row(row: KernelSpec, sms: tuple[str, ...]) -> Iterator[Build]:
    if row.backend == "aot":
        if row.target.startswith("rapid_llm."):
            yield Build(
                "aot/rapid_llm._C", " ".join(sms) or "all that are shipped", (row.name,), lambda: _extension(sms)
            )
        return
    module = row.target.partition(":")[0]
    file = module_file(module)
    if file is None or file.suffix != ".py":
        return
    for path, name, source, flags in named_kernels(file):
        if path == "cpp":
            level = cpp.levels()[-1].name if cpp.levels() else "none"
            yield Build(f"cpp/{name}", level, (row.name,), lambda n=name, s=source: _cpp(n, s))  # type: ignore[misc]
        elif path == "jit":
            for arch in sms:
                make = lambda n=name, s=source, f=flags, a=arch: _jit(n, s, f, a)  # noqa: E731
                yield Build(f"jit/{name}", arch, (row.name,), make)
    if row.backend == "nvrtc":
        yield from _nvrtc(row, module, sms)


def named_kernels(file: Path) -> Iterator[tuple[str, str, str, tuple[str, ...]]]:
    """(path, name, source, flags) of every kernel that a row's module names."""
    for node in ast.walk(ast.parse(file.read_text(), str(file))):
        if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in _CALLS):
            continue
        if len(node.args) < 2 or not isinstance(node.args[0], ast.Constant):
            continue
        flags = next((ast.literal_eval(k.value) for k in node.keywords if k.arg == "extra_cuda_cflags"), ("-O3",))
        yield _CALLS[node.func.id], str(node.args[0].value), _source(file, node.args[1]), flags


def _source(file: Path, node: ast.expr) -> str:
    """A path below csrc/, or one beside the module: `str(Path(__file__).parent / "csrc" / ...)`."""
    if isinstance(node, ast.Constant):
        return str(node.value)
    parts = [n for n in ast.walk(node) if isinstance(n, ast.Constant) and isinstance(n.value, str)]
    return str(file.parent.joinpath(*(str(n.value) for n in sorted(parts, key=lambda n: (n.lineno, n.col_offset)))))


def _jit(name: str, source: str, flags: tuple[str, ...], arch: str) -> Artifact:
    tools = build.toolchain()
    if lacking := missing("jit"):
        raise BuildError(f"jit/{name}: the CUDA toolkit cannot be used: {lacking}")
    if not tools.compiles_for(arch):
        raise BuildError(f"jit/{name}: nvcc does not compile for {arch}, only for {', '.join(tools.archs)}")
    return build.build(jit._unit(name, source, flags, arch), build.NvccCompiler(tools))


def _cpp(name: str, source: str) -> Artifact:
    if lacking := missing("cpp"):
        raise BuildError(f"cpp/{name}: {lacking}")
    command, _ = host_command()
    return build.build(cpp._unit(name, source, cpp.levels()[-1]), build.GxxCompiler(command))


def _nvrtc(row: KernelSpec, module: str, sms: tuple[str, ...]) -> Iterator[Build]:
    from rapid_llm.kernels.nvrtc import Kernels

    loaded = importlib.import_module(module)
    for kernels in (value for value in vars(loaded).values() if isinstance(value, Kernels)):
        for arch in sms:
            for dtype in row.dtypes or get_op(row.op).dtypes:
                make: Any = lambda k=kernels, a=arch, d=dtype: k.build(int(a.removeprefix("sm_")), d)  # noqa: E731
                yield Build(f"nvrtc/{kernels.name}-{dtype}", arch, (row.name,), make)


def _extension(sms: tuple[str, ...]) -> Artifact:
    """The whole extension, by its own build script."""
    from rapid_llm.kernels import aot

    root, output = checkout(), checkout() / "rapid_llm" / aot.FILE
    if not is_checkout(root) or not (root / "csrc" / "build.py").is_file():
        raise BuildError(
            "aot: the extension is built in a checkout, and this is an installation; install a wheel with it"
        )
    before = output.stat().st_mtime_ns if output.is_file() else 0
    numbers = [arch.removeprefix("sm_") for arch in sms]
    listed = {"TORCH_CUDA_ARCH_LIST": " ".join(f"{n[:-1]}.{n[-1]}" for n in numbers)} if numbers else {}
    began = time.monotonic()
    command = [sys.executable, str(root / "csrc" / "build.py")]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, **listed}, cwd=root)
    if done.returncode != 0:
        raise BuildError(f"aot: {done.stderr.strip() or done.stdout.strip()}")
    cached = output.stat().st_mtime_ns == before
    return Artifact(output, "", time.monotonic() - began, cached, "package")
