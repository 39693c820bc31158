"""Rows that take the sources of an earlier row: the doors and instances are those of the launcher and kernel there."""

from __future__ import annotations

from pathlib import Path

import pytest

from rapid_llm.authoring import shared
from rapid_llm.authoring.existing import wrapper
from rapid_llm.authoring.request import AuthoringError, Request
from rapid_llm.kernels.registry import get_op

LAUNCHER = """
template <class T>
void launch_rmsnorm(const Launch& launch, Tensor& out) {}

inline void rmsnorm(Tensor& out, const Tensor& input, const Tensor& weight,
                    double eps) {
"""
KERNEL = """
template <class T, int N, bool WIDE>
__global__ void __launch_bounds__(256) rmsnorm_kernel(T* __restrict__ out, const T* __restrict__ input,
                                                      const T* weight, float eps, i64 rows, int width) {
"""


@pytest.fixture
def ask(tmp_path: Path) -> Request:
    """A request for an AOT row of rmsnorm, in a tree that has its kernel and its launcher."""
    folder = tmp_path / "rapid_llm/kernels/csrc/layernorm"
    folder.mkdir(parents=True)
    (folder / "rmsnorm_launch.h").write_text(LAUNCHER)
    (folder / "rmsnorm.cuh").write_text(KERNEL)
    return Request("rmsnorm", "layernorm", "aot", "Because.", tmp_path, True, known=get_op("rmsnorm"))


def values(request: Request) -> dict[str, str]:
    names = ("source_name", "path_import", "source", "nvrtc_source")
    return {**dict.fromkeys(names, "x"), "symbol": request.symbol}


def test_doors_take_what_the_launcher_takes(ask: Request) -> None:
    """Catches: doors of (out, input) around a launcher of more, which the compiler finds after a minute or never."""
    parameters = shared.launcher(ask)
    assert shared.schema(parameters) == "(Tensor! out, Tensor input, Tensor weight, float eps) -> ()"
    doors = shared.doors("rmsnorm", parameters)
    assert doors["ext_views"] == "  Tensor out_view = view(out);"
    assert doors["ext_call"] == "rapid_llm::rmsnorm(out_view, view(input), view(weight), eps);"
    assert doors["thin_parameters"] == "Tensor& out, const Tensor& input, const Tensor& weight, double eps"


def test_the_wrapper_is_one_call_where_the_launcher_fits(ask: Request) -> None:
    """Catches: a floor that still computes where nothing is left to write."""
    text = wrapper(ask, values(ask))
    assert "(_op if is_compiling() else _kernel)(out, input, weight, eps)" in text
    assert "_floor" not in text
    compile(text, "wrapper", "exec")


def test_a_launcher_of_other_arguments_is_refused(ask: Request) -> None:
    """Catches: arguments passed in each other's places, all of them tensors."""
    file = ask.root / "rapid_llm/kernels/csrc/layernorm/rmsnorm_launch.h"
    file.write_text(LAUNCHER.replace("Tensor& input", "Tensor& x"))
    with pytest.raises(AuthoringError, match=r"\(out, x, weight, eps\) does not take .* out, input, weight, eps"):
        shared.launcher(ask)
    file.write_text(LAUNCHER.replace("double eps", "const float* eps"))
    with pytest.raises(AuthoringError, match=r"no door can be made for `const float\* eps`"):
        shared.launcher(ask)
    file.write_text(LAUNCHER.replace("inline void rmsnorm(", "inline void norm("))
    with pytest.raises(AuthoringError, match="has no `inline void rmsnorm"):
        shared.launcher(ask)


def test_an_instance_has_the_kernels_own_letters(ask: Request) -> None:
    """Catches: a launch by NVRTC with arguments of other sizes than the kernel's, which no compiler sees."""
    assert shared.instance(ask) == ("rapid_llm::rmsnorm_kernel<{TYPES[dtype]}, 1, false>", "pppfli")
    file = ask.root / "rapid_llm/kernels/csrc/layernorm/rmsnorm.cuh"
    file.write_text(KERNEL.replace("float eps", "double eps"))
    with pytest.raises(AuthoringError, match="not all pointers, float and integers"):
        shared.instance(ask)
