"""`rapid-llm doctor`: what this machine and installation are, and what is wrong with them."""

from __future__ import annotations

import importlib
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import typer

from rapid_llm import settings
from rapid_llm.platform import cpu_info, default_threads, has_nvidia

from .support import BAD, print_json, print_pairs, size

BUSY: Final = 0.5
"""Load per usable CPU, before this process, above which speed is not what it could be."""


@dataclass
class Report:
    """facts: what is there, by section. findings: what is wrong, each with its fix. notes: worth knowing."""

    facts: dict[str, dict[str, Any]] = field(default_factory=dict)
    findings: list[dict[str, str]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def find(self, what: str, fix: str) -> None:
        self.findings.append({"what": what, "fix": fix})


def run(*, env: bool, json: bool) -> None:
    """Look, print, and end with status 1 if there is a finding."""
    report = Report()
    checks: tuple[Callable[[Report], None], ...] = (
        (_environment,) if env else (_machine, _torch, _triton, _compiled, _cache, _threads, _rows, _environment)
    )
    for check in checks:
        check(report)
    if json:
        data: dict[str, Any] = {"facts": report.facts, "findings": report.findings, "notes": report.notes}
        if env:
            data["variables"] = list(_variables())
        print_json(data)
    else:
        if env:
            _print_variables()
        else:
            for name, section in report.facts.items():
                print(name)
                print_pairs((f"  {key}", value) for key, value in section.items())
        for note in report.notes:
            print(f"note: {note}")
        for finding in report.findings:
            print(f"FINDING: {finding['what']}. Fix: {finding['fix']}")
        if not report.findings and not env:
            print("no findings")
    if report.findings:
        raise typer.Exit(BAD)


def _machine(report: Report) -> None:
    cpu = cpu_info()
    report.facts["machine"] = {
        "python": f"{sys.version.split()[0]} ({sys.executable})",
        "system": " ".join(os.uname()[i] for i in (0, 2, 4)),
        "cpu": cpu.model,
        "instructions": ", ".join(cpu.isa) or "none of those that matter here",
        "cores": f"{cpu.physical_cores} physical, {cpu.affinity} usable"
        + ("" if cpu.quota is None else f", quota of {cpu.quota:g} CPUs"),
        "memory": _memory(),
    }
    busy = os.getloadavg()[0] / max(cpu.affinity, 1)
    if busy > BUSY:
        report.notes.append(f"the machine is busy (load {busy:.1f} per CPU): speeds measured now are too low")


def _memory() -> str:
    pages, page = os.sysconf("SC_PHYS_PAGES"), os.sysconf("SC_PAGE_SIZE")
    return size(pages * page)


def _torch(report: Report) -> None:
    torch = _import(report, "torch", "install it: pip install 'torch>=2.11'")
    facts = report.facts["torch"] = {"version": None if torch is None else torch.__version__}
    driver = has_nvidia()
    if torch is None:
        return
    facts["built for"] = f"CUDA {torch.version.cuda}" if torch.version.cuda else "CPU"
    facts["driver"] = "an NVIDIA driver is loaded" if driver else "no NVIDIA driver"
    if torch.cuda.is_available():
        for i in range(torch.cuda.device_count()):
            major, minor = torch.cuda.get_device_capability(i)
            total = torch.cuda.get_device_properties(i).total_memory
            facts[f"cuda:{i}"] = f"{torch.cuda.get_device_name(i)}, SM {major * 10 + minor}, {size(total)}"
    elif driver and torch.version.cuda is None:
        report.find(
            "this machine has an NVIDIA driver, but this torch is built for CPU only",
            "install torch for CUDA: pip install --force-reinstall torch",
        )
    elif driver:
        report.find(
            f"an NVIDIA driver is loaded, but torch, built for CUDA {torch.version.cuda}, sees no GPU",
            "see nvidia-smi, CUDA_VISIBLE_DEVICES, and whether the driver is new enough for that CUDA",
        )


def _triton(report: Report) -> None:
    """Triton and the C compiler that it needs: without a GPU, only for its interpreter."""
    facts = report.facts["triton"] = {}
    torch = sys.modules.get("torch")
    gpu = torch is not None and torch.cuda.is_available()
    compiler = os.environ.get("CC") or next(filter(None, map(shutil.which, ("cc", "gcc", "clang"))), None)
    try:
        facts["version"] = importlib.import_module("triton").__version__
    except Exception as error:  # a foreign import may raise anything
        facts["version"] = f"absent ({type(error).__name__}: {error})"
        if gpu:
            report.find(
                "Triton cannot be imported, so ops on the GPU run through PyTorch, slowly", "pip install 'triton>=3.6'"
            )
    facts["C compiler"] = compiler or "none"
    header = Path(_include(), "Python.h")
    facts["Python.h"] = str(header) if header.is_file() else "absent"
    if gpu and compiler is None:
        report.find("Triton needs a C compiler at its first launch and there is none", "install gcc, or set CC")
    if gpu and not header.is_file():
        report.find(f"Triton needs Python's headers and {header} is absent", "install python3-dev or the like")


def _compiled(report: Report) -> None:
    """C++ and CUDA, as `rapid-llm kernels doctor` sees them."""
    from rapid_llm.authoring.diagnosis import tools

    found = tools()
    report.facts.update(found.facts)
    report.notes += found.notes
    for what, fix in found.findings:
        report.find(what, fix)


def _include() -> str:
    import sysconfig

    return sysconfig.get_paths()["include"]


def _cache(report: Report) -> None:
    from rapid_llm.models import hub

    try:
        folder = settings.cache_dir()
    except settings.SettingError as error:  # a finding of the environment
        report.facts["cache"] = {"directory": str(error)}
        return
    facts: dict[str, Any] = {"directory": str(folder), "free": _free(folder)}
    report.facts["cache"] = facts
    problem = _cannot_write(folder)
    if problem:
        report.find(f"the cache directory {folder} cannot be written: {problem}", "set RAPID_LLM_CACHE_DIR to another")
    for model in hub.MODELS.values():
        path = hub.model_path(model)
        if not path.is_file():
            facts[model.name] = f"not here; fetched on first use ({size(model.download_nbytes)})"
        elif path.stat().st_size != model.nbytes or hub.digest(path) != model.sha256:
            facts[model.name] = f"{path}, damaged"
            report.find(f"{path} is not the published {model.name}", f"delete it; rapid-llm models pull {model.name}")
        else:
            facts[model.name] = f"{path}, checksum right"


def _cannot_write(folder: Path) -> str:
    """Why nothing can be written into `folder` or, where it doesn't exist, why it cannot be made; empty if it can."""
    existing = _existing(folder)
    try:
        with tempfile.TemporaryFile(dir=existing):
            return ""
    except OSError as error:
        return f"{existing}: {error.strerror or error}"


def _existing(folder: Path) -> Path:
    return next((p for p in (folder, *folder.parents) if p.exists()), folder)


def _free(folder: Path) -> str:
    try:
        return size(shutil.disk_usage(_existing(folder)).free)
    except OSError as error:
        return f"unknown ({error.strerror})"


def _threads(report: Report) -> None:
    wanted = default_threads()
    report.facts["threads"] = {"compute threads": wanted}
    text = os.environ.get("OMP_NUM_THREADS")
    if text is not None:
        report.facts["threads"]["OMP_NUM_THREADS"] = f"{text} (the engine sets its own number)"


def _rows(report: Report) -> None:
    """Every row's standing here, and the plugins that bring more."""
    import rapid_llm.kernels  # noqa: F401 - declares the ops
    from rapid_llm.kernels.registry import listing, notes, plugins

    listed: list[dict[str, Any]] = listing()
    found = plugins.plugins()
    facts: dict[str, Any] = {
        "ops": len({row["op"] for row in listed if row["op"] is not None}),
        "rows": f"{sum(bool(row['admitted']) for row in listed)} of {len(listed)} can run here",
        "plugins": ", ".join(p.name for p in found) or "none",
    }
    report.facts["kernels"] = facts
    for row in listed:
        for reason in row["reasons"]:
            if reason["code"] in ("broken", "plugin"):
                report.find(f"{row['name']} is dead: {reason['text'].strip()}", reason["fix"])
            elif reason["code"] == "unavailable":
                facts[row["name"]] = f"out: {reason['text'].strip().splitlines()[-1]}"
        for text in notes.of(row["name"]):
            report.notes.append(f"{row['name']}: {text}")


def _environment(report: Report) -> None:
    """Variables that mean nothing, hold what they don't take, or force what doesn't exist."""
    import rapid_llm.kernels  # noqa: F401 - declares the ops
    from rapid_llm.kernels.registry import KernelError, ops, overrides

    ids = [op.id for op in ops()]
    if (values := dict(settings.snapshot())) and "environment" not in report.facts:
        report.facts["environment"] = values
    for name, nearest in settings.unknown(ids):
        report.find(
            f"{name} is set and means nothing", f"did you mean {nearest}?" if nearest else "unset it; see doctor --env"
        )
    for read in (settings.strict, settings.jit, settings.cache_dir, settings.trace_file, settings.lock_file):
        try:
            read()
        except settings.SettingError as error:
            report.find(str(error), "correct or unset it")
    for what, variable, op in sorted(set(_forced(ids))):
        try:
            overrides.rows_of(what, op or None)
        except KernelError as error:
            report.find(f"{variable}={what} forces what does not exist: {error}", "correct or unset the variable")


def _forced(op_ids: Iterable[str]) -> Iterator[tuple[str, str, str]]:
    """(backend or row, variable, op) of every override in the environment; op is empty where it holds for all."""
    for op in op_ids:
        if (setting := settings.forced_backend(op)) is not None:
            yield *setting, op if setting[1] == settings.op_variable(op) else ""


def _variables() -> Iterator[dict[str, Any]]:
    for setting in settings.TABLE:
        yield {
            "name": setting.name,
            "takes": setting.takes,
            "default": setting.default,
            "doc": setting.doc,
            "value": os.environ.get(setting.name),
        }


def _print_variables() -> None:
    for variable in _variables():
        print(variable["name"])
        now = "" if variable["value"] is None else f" Now: {variable['value']}."
        print(f"    {variable['doc']}\n    Takes {variable['takes']}. Default: {variable['default']}.{now}\n")


def _import(report: Report, name: str, fix: str) -> Any:
    try:
        return importlib.import_module(name)
    except Exception as error:  # a broken installation may raise anything
        report.find(f"{name} cannot be imported: {type(error).__name__}: {error}", fix)
        return None
