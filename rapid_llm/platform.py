"""What machine this is: a torch-free record of the CPU, and of one GPU where torch is loaded and sees it."""

from __future__ import annotations

import os
from dataclasses import dataclass
from functools import cache


@dataclass(frozen=True, slots=True)
class CPUInfo:
    """model: as the kernel names it. isa: the vector extensions that matter here, without those that torch's own
    variables (ATEN_CPU_CAPABILITY, ONEDNN_MAX_CPU_ISA) rule out. physical_cores, affinity: counts.
    quota: CPUs' worth of time that the control group grants, None where it grants all."""

    model: str
    isa: tuple[str, ...]
    physical_cores: int
    affinity: int
    quota: float | None


@dataclass(frozen=True, slots=True)
class DeviceInfo:
    """One device: type `cpu` or `cuda`, index, name, and SM version (90 for compute capability 9.0; None on CPU)."""

    type: str
    index: int | None
    name: str
    sm: int | None


_LIMITS = (
    ("ATEN_CPU_CAPABILITY", ("avx2",), ("avx512", "amx")),
    ("ATEN_CPU_CAPABILITY", ("default",), ("avx", "fma", "f16c", "amx")),
    ("ONEDNN_MAX_CPU_ISA", ("avx2", "avx2_vnni", "avx2_vnni_2"), ("avx512", "amx")),
    ("ONEDNN_MAX_CPU_ISA", ("avx512_core", "avx512_core_vnni"), ("avx512_bf16", "amx")),
)
"""torch's own variables, the values by which they limit its kernels, and the extensions that are then as if absent."""

_ISA = ("avx2", "fma", "f16c", "avx512f", "avx512bw", "avx512vl", "avx512_vnni", "avx512_bf16", "amx_bf16", "amx_int8")


@cache
def cpu_info() -> CPUInfo:
    """Read once from /proc, /sys and the scheduler."""
    model, flags, cores = "unknown CPU", set[str](), set[tuple[str, str]]()
    package = core = ""
    for line in _read("/proc/cpuinfo").splitlines():
        key, _, value = line.partition(":")
        key, value = key.strip(), value.strip()
        if key == "model name":
            model = value
        elif key in ("flags", "Features"):
            flags = set(value.split())
        elif key == "physical id":
            package = value
        elif key == "core id":
            core = value
        elif not key and core:
            cores.add((package, core))
            package = core = ""
    if core:
        cores.add((package, core))
    affinity = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else (os.cpu_count() or 1)
    return CPUInfo(
        model=model,
        isa=tuple(i for i in _ISA if i in flags and not i.startswith(_withheld())),
        physical_cores=len(cores) or os.cpu_count() or 1,
        affinity=affinity,
        quota=_quota(),
    )


def _withheld() -> tuple[str, ...]:
    """Beginnings of the names of extensions that torch was told not to use, and that nothing else here uses then."""
    return tuple(
        name
        for variable, values, names in _LIMITS
        if os.environ.get(variable, "").strip().lower() in values
        for name in names
    )


def default_threads() -> int:
    """Compute threads to use: the least of physical cores, CPU affinity and the control group's quota, at least 1.

    One thread more than that spins against its neighbours and costs far more than it brings.
    """
    info = cpu_info()
    affinity = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else info.affinity
    limit = min(info.physical_cores, affinity)
    if info.quota is not None:
        limit = min(limit, int(info.quota))
    return max(limit, 1)


def has_nvidia() -> bool:
    """Whether an NVIDIA driver is loaded, without touching CUDA."""
    return os.path.exists("/dev/nvidiactl") or os.path.exists("/proc/driver/nvidia/version")


def device_info(device: object = "cpu") -> DeviceInfo:
    """Describe `device` (a torch.device or its string). A CUDA device asks torch, and so initialises CUDA."""
    kind, _, number = str(device).partition(":")
    if kind != "cuda":
        return DeviceInfo(kind, None, cpu_info().model if kind == "cpu" else kind, None)
    return _cuda_info(int(number) if number else None)


@cache
def _cuda_info(index: int | None) -> DeviceInfo:
    import torch

    if not torch.cuda.is_available():
        return DeviceInfo("cuda", index, "no CUDA device is visible", None)
    major, minor = torch.cuda.get_device_capability(index)
    return DeviceInfo("cuda", index, torch.cuda.get_device_name(index), major * 10 + minor)


def _read(path: str | os.PathLike[str]) -> str:
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            return file.read()
    except OSError:  # absent outside Linux, or hidden in a sandbox: the fact is then unknown
        return ""


def _quota() -> float | None:
    """The tightest CPU quota of this process's control group and its ancestors (v2), or the v1 controller's."""
    limits = []
    for line in _read("/proc/self/cgroup").splitlines():
        number, controllers, path = line.split(":", 2)
        if number == "0":
            folder = "/sys/fs/cgroup"
            for name in path.strip("/").split("/"):
                folder = os.path.join(folder, name)
                limits.append(_v2_quota(folder))
        elif "cpu" in controllers.split(","):
            limits.append(_v1_quota(os.path.join("/sys/fs/cgroup/cpu", path.lstrip("/"))))
    limits += [_v2_quota("/sys/fs/cgroup"), _v1_quota("/sys/fs/cgroup/cpu")]
    known = [limit for limit in limits if limit is not None]
    return min(known) if known else None


def _v2_quota(folder: str | os.PathLike[str]) -> float | None:
    parts = _read(os.path.join(folder, "cpu.max")).split()
    return int(parts[0]) / int(parts[1]) if len(parts) == 2 and parts[0] != "max" else None


def _v1_quota(folder: str | os.PathLike[str]) -> float | None:
    quota, period = (
        _read(os.path.join(folder, "cpu.cfs_quota_us")).strip(),
        _read(os.path.join(folder, "cpu.cfs_period_us")).strip(),
    )
    return int(quota) / int(period) if quota and period and int(quota) > 0 else None
