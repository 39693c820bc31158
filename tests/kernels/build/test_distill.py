"""What is told of a compiler's output."""

from __future__ import annotations

import pytest

from rapid_llm.kernels.build.distill import distill

GCC = """In file included from /a/x.cpp:1:
/a/y.h: In function 'int f()':
/a/y.h:12:9: warning: unused variable 'error' [-Wunused-variable]
/a/y.h:14:3: error: 'foo' was not declared in this scope; did you mean 'bool'?
/a/x.cpp:3:1: error: expected ';'
"""
NVCC = """/a/scale.cu(3): warning #177-D: variable "x" was declared but never referenced
Remark: The warnings can be suppressed with "-diag-suppress <warning-number>"
/a/scale.cu(12): error: identifier "blockDimm" is undefined
1 error detected in the compilation of "/a/scale.cu".
"""
LINKER = """/usr/bin/ld: /tmp/cc1.o: in function `f':
a.cpp:(.text+0x5): undefined reference to `missing'
collect2: error: ld returned 1 exit status
"""


@pytest.mark.parametrize(
    ("text", "first"),
    [
        (GCC, "/a/y.h:14: error: 'foo' was not declared in this scope; did you mean 'bool'?"),
        ("a.cpp:1:10: fatal error: gone.h: No such file or directory\n", "a.cpp:1: error: gone.h: No such file"),
        (NVCC, '/a/scale.cu:12: error: identifier "blockDimm" is undefined'),
        ("scale.cuh(7): error #20: identifier is undefined\n", "scale.cuh:7: error: identifier is undefined"),
        ("default_program(1): catastrophic error: cannot open source file", "default_program:1: error: cannot open"),
        (LINKER, "undefined reference to `missing'"),
        ("/usr/bin/ld: cannot find -lcudart: No such file\ncollect2: error: x\n", "cannot find -lcudart"),
        ("ptxas /tmp/x.ptx, line 9; error   : Unknown symbol\nptxas fatal   : aborted\n", "Unknown symbol"),
        ("ptxas fatal   : Value 'sm_999' is not defined for option 'gpu-name'\n", "sm_999"),
        ("nvcc fatal   : Unsupported gpu architecture 'compute_50'\n", "compute_50"),
        ("something went wrong\n\n", "something went wrong"),
        ("", "said nothing (exit status 3)"),
    ],
)
def test_the_first_error_is_found(text: str, first: str) -> None:
    """P29: a warning, a remark or the last line is shown instead of the error."""
    assert first in distill(text, 3).first


@pytest.mark.parametrize(
    ("text", "status"),
    [
        ("g++: fatal error: Killed signal terminated program cc1plus\ncompilation terminated.\n", 1),
        ("cc1plus: out of memory allocating 65536 bytes\n", 1),
        ("virtual memory exhausted: Cannot allocate memory\n", 1),
        ("nvcc error   : 'cicc' died due to signal 9 (Kill signal)\n", 1),
        ("", -9),
    ],
)
def test_a_compiler_killed_for_memory_is_named(text: str, status: int) -> None:
    """P27: the user looks for a fault in the source."""
    assert "out of memory" in distill(text, status).first
    assert "MAX_JOBS" in distill(text, status).first


def test_an_error_about_memory_in_the_source_is_the_sources() -> None:
    """Catches any line with 'out of memory' taken for the compiler's own."""
    text = "a.cpp:2:3: error: static assertion failed: tile out of memory\n"
    assert distill(text, 1).first.startswith("a.cpp:2: error: static assertion failed")


def test_a_full_disk_is_the_disks() -> None:
    """P22: ENOSPC reported as a fault of the source."""
    assert distill("/a/x.cpp:1:1: error: x\n/tmp/ccX.s: No space left on device\n").disk_full
    assert not distill(GCC).disk_full
