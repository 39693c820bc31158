"""The one timing harness: host time, interleaved comparison, and the state of the machine beside every figure.

Nothing in `benchmarks/` or in the kernels keeps a timer of its own. Clocks are arguments, so that the harness itself is
tested without time passing. Importing this package imports no torch.
"""

from .bandwidth import Bandwidth, read_bandwidth
from .compare import Arm, Comparison, compare
from .errors import BenchError, MachineBusyError, ResolutionError, SlowThreadsError
from .host import HostResult, bench_host
from .load import Load, LoadWatch, require_idle
from .machine import machine_record, machine_slug
from .process import bench_process, first_call, import_time
from .report import print_figures
from .results import Figure, Run, result_path, write_json
from .summary import Summary, summarise
from .threads import require_normal_threads

__all__ = [
    "Arm",
    "Bandwidth",
    "BenchError",
    "Comparison",
    "Figure",
    "HostResult",
    "Load",
    "LoadWatch",
    "MachineBusyError",
    "ResolutionError",
    "Run",
    "SlowThreadsError",
    "Summary",
    "bench_host",
    "bench_process",
    "compare",
    "first_call",
    "import_time",
    "machine_record",
    "machine_slug",
    "print_figures",
    "read_bandwidth",
    "require_idle",
    "require_normal_threads",
    "result_path",
    "summarise",
    "write_json",
]
