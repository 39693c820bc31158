"""The one timing harness: kernels, host time, interleaved comparison, and the state of the machine beside every figure.

Nothing in `benchmarks/` or in the kernels keeps a timer of its own. Clocks and devices are arguments, so that the
harness itself is tested without time passing. Importing this package imports no torch.
"""

from . import errors
from .bandwidth import Bandwidth, read_bandwidth
from .calibration import calibrate
from .checks import against, against_oracle
from .compare import Arm, Comparison, compare_arms
from .device import Device, device_for
from .errors import BenchError, MachineBusyError, ResolutionError, SlowThreadsError
from .host import HostResult, bench_host
from .kernel import KernelResult, bench, bench_stateful
from .load import Load, LoadWatch, require_idle
from .machine import machine_record, machine_slug
from .process import bench_process, first_call, import_time
from .report import print_figures
from .results import Figure, Run, result_path, write_json
from .rows import RowComparison, compare
from .summary import Summary, summarise
from .sweep import benchmark, parametrize
from .threads import require_normal_threads
from .trial import RowArm
from .work import Work

__all__ = [
    "Arm",
    "Bandwidth",
    "BenchError",
    "Comparison",
    "Device",
    "Figure",
    "HostResult",
    "KernelResult",
    "Load",
    "LoadWatch",
    "MachineBusyError",
    "ResolutionError",
    "RowArm",
    "RowComparison",
    "Run",
    "SlowThreadsError",
    "Summary",
    "Work",
    "against",
    "against_oracle",
    "bench",
    "bench_host",
    "bench_process",
    "bench_stateful",
    "benchmark",
    "calibrate",
    "compare",
    "compare_arms",
    "device_for",
    "errors",
    "first_call",
    "import_time",
    "machine_record",
    "machine_slug",
    "parametrize",
    "print_figures",
    "read_bandwidth",
    "require_idle",
    "require_normal_threads",
    "result_path",
    "summarise",
    "write_json",
]
