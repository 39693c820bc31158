"""The machine and the software that a figure was measured on, for result files."""

from __future__ import annotations

import datetime
import platform as _platform
import re
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict
from importlib import metadata
from pathlib import Path
from typing import Any

from rapid_llm.platform import cpu_info, default_threads

PACKAGES = ("rapid-llm", "torch", "triton", "transformers", "numpy", "tokenizers")


def machine_record(packages: Sequence[str] = PACKAGES) -> dict[str, Any]:
    """CPU, GPUs where torch is loaded and sees any, threads, versions, source revision and date, ready for JSON."""
    torch = sys.modules.get("torch")
    return {
        "slug": machine_slug(),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "cpu": asdict(cpu_info()),
        "governor": _first_line("/sys/devices/system/cpu/cpu0/cpufreq/scaling_governor"),
        "threads": torch.get_num_threads() if torch is not None else default_threads(),
        "gpus": _gpus(),
        "system": f"{_platform.system()} {_platform.release()} {_platform.machine()}",
        "versions": {"python": _platform.python_version(), **_versions(packages)},
        "revision": _revision(Path(__file__).resolve().parent),
    }


def machine_slug() -> str:
    """A short name for file names: the first GPU if torch is loaded and sees one, else CPU model, ISA and core count.

    Virtual machines name many CPUs by one model, so the widest vector extension tells them apart."""
    gpus = _gpus()
    info = cpu_info()
    widest = next((isa for isa in ("amx_bf16", "avx512f", "avx2") if isa in info.isa), "")
    cores = min(info.physical_cores, info.affinity)
    text = gpus[0]["name"] if gpus else f"{info.model}-{widest}-{cores}-core"
    if len(gpus) > 1:
        text += f"-x{len(gpus)}"
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")


def _gpus() -> list[dict[str, Any]]:
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_available():
        return []
    found = []
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        found.append(
            {
                "name": properties.name,
                "sm": properties.major * 10 + properties.minor,
                "memory_bytes": properties.total_memory,
            }
        )
    return found


def _versions(packages: Sequence[str]) -> dict[str, str]:
    found = {}
    for name in packages:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:  # not installed: it took no part in the figure
            continue
    torch = sys.modules.get("torch")
    if torch is not None:
        found["torch"] = str(torch.__version__)  # holds the build's +cpu or +cu130, which metadata may lack
        if torch.version.cuda is not None:
            found["cuda"] = str(torch.version.cuda)
    return found


def _revision(folder: Path) -> str | None:
    """The commit of the checkout, `+changes` appended where tracked files differ from it; None outside a checkout."""
    try:
        commit = _git(folder, "rev-parse", "--short=12", "HEAD")
        changed = _git(folder, "status", "--porcelain", "--untracked-files=no")
    except (OSError, subprocess.SubprocessError):  # no git, or not a checkout
        return None
    return commit + ("+changes" if changed else "")


def _git(folder: Path, *args: str) -> str:
    run = subprocess.run(["git", "-C", str(folder), *args], capture_output=True, text=True, timeout=10, check=True)
    return run.stdout.strip()


def _first_line(path: str) -> str | None:
    try:
        return Path(path).read_text().split("\n", 1)[0].strip()
    except OSError:  # virtual machines often hide it
        return None
