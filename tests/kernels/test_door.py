"""The Python door of CUDA modules and the launchers' host headers, in a module that a C++ compiler built here."""

from __future__ import annotations

import subprocess
import sysconfig
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from rapid_llm.kernels import jit
from rapid_llm.kernels.build.extension import import_extension
from rapid_llm.kernels.build.toolchain import host_command

COMPILER, PROBLEM = host_command()
PYTHON_H = Path(sysconfig.get_path("include"), "Python.h")

pytestmark = [
    pytest.mark.skipif(bool(PROBLEM), reason=PROBLEM),
    pytest.mark.skipif(not PYTHON_H.is_file(), reason=f"{PYTHON_H} does not exist"),
]


@pytest.fixture(scope="module")
def door(tmp_path_factory: pytest.TempPathFactory) -> ModuleType:
    output = tmp_path_factory.mktemp("door") / "door.so"
    includes = [word for folder in (*jit.INCLUDES, PYTHON_H.parent) for word in ("-I", str(folder))]
    flags = ["-std=c++17", "-O1", "-shared", "-fPIC", "-Wall", "-Werror", "-DRAPID_LLM_MODULE_NAME=door"]
    source = Path(__file__).with_name("door.cpp")
    done = subprocess.run(
        [*COMPILER, *flags, *includes, str(source), "-o", str(output)], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    return import_extension("door", output)


def test_cpu_tensors_are_refused(door: ModuleType) -> None:
    """Catches: a host address that is handed to a kernel."""
    x = torch.ones(3)
    with pytest.raises(RuntimeError, match="on_cuda: input must be a CUDA tensor"):
        door.on_cuda(x, x, 1.0)


def test_arguments_arrive_as_they_were_given(door: ModuleType) -> None:
    """Catches: arguments out of order, None read as a tensor, -1 taken for an error, an int refused for a float."""
    out = torch.zeros(4, dtype=torch.float64)
    door.arrive(out, None, -1, -1, False)
    assert out.tolist() == [-1.0, -1.0, -1.0, 0.0]
    door.arrive(out, torch.nn.Parameter(torch.ones(2, 3)), 0.3, 2**40, True)
    assert out.tolist() == [6.0, 0.3, float(2**40), 1.0]


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        ((), TypeError, "takes 3 positional arguments, got 0"),
        ((torch.ones(1), torch.ones(1)), TypeError, "takes 3 positional arguments, got 2"),
        ((torch.ones(1), torch.ones(1), 1.0, 2.0), TypeError, "takes 3 positional arguments, got 4"),
        ((torch.ones(1), torch.ones(1), "1"), TypeError, "must be real number"),
        ((torch.ones(1), None, 1.0), RuntimeError, "plain tensors.*CUDA"),
        ((torch.ones(1), [1.0], 1.0), RuntimeError, "plain tensors.*CUDA"),
    ],
)
def test_calls_that_do_not_fit_are_errors(
    door: ModuleType, arguments: tuple[object, ...], error: type[Exception], text: str
) -> None:
    """Catches: a wrong call that reads past its arguments or an object that is no tensor, and crashes."""
    with pytest.raises(error, match=text):
        door.on_cuda(*arguments)


def test_tensors_without_plain_memory_are_refused(door: ModuleType) -> None:
    """Catches: a fake tensor's missing memory, or a lazily negated view, read as if it were numbers."""
    with FakeTensorMode():
        fake = torch.ones(3)
    with pytest.raises(RuntimeError, match=r"plain tensors.*CUDA"):
        door.on_cuda(fake, fake, 1.0)
    negated = torch._neg_view(torch.ones(3))
    with pytest.raises(RuntimeError, match="lazy negation; call resolve_neg"):
        door.on_cuda(negated, negated, 1.0)


def test_what_launchers_return_and_throw_arrives(door: ModuleType) -> None:
    """Catches: a bool that is lost, and an index error that arrives as another kind."""
    assert door.is_cpu(torch.ones(1)) is True
    assert door.arrive(torch.zeros(4, dtype=torch.float64), None, 0.0, 0, False) is None
    with pytest.raises(IndexError, match="outside: slot 7 is not there"):
        door.outside(7)
    with pytest.raises(RuntimeError, match=r"^is_cpu: needs plain tensors with memory: .*meta$"):
        door.is_cpu(torch.ones(1, device="meta"))
    assert door.is_cpu(torch.ones(1)) is True, "an error of the call before is still set"


def test_other_threads_run_while_a_launcher_computes(door: ModuleType) -> None:
    """Catches: a long kernel for the CPU that holds up the server's threads, by the interpreter's lock."""
    flag = torch.zeros(1)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(door.wait_for, flag)
        flag.fill_(1.0)
        waiting.result()


def test_torch_has_the_exchange_api_that_the_door_reads() -> None:
    """Catches: a torch whose exchange API has moved on, which would leave every module out with an ImportError."""
    import ctypes

    get = ctypes.pythonapi.PyCapsule_GetPointer
    get.restype, get.argtypes = ctypes.c_void_p, (ctypes.py_object, ctypes.c_char_p)
    address = get(torch.Tensor.__dlpack_c_exchange_api__, b"dlpack_exchange_api")
    assert address is not None
    major = ctypes.c_uint32.from_address(address).value
    assert major == 1, "module.h reads version 1 of the DLPack exchange API"


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64, torch.int32])
def test_dtypes_are_told_apart(door: ModuleType, dtype: torch.dtype) -> None:
    """Catches: two dtypes of one size taken for the same."""
    others = (torch.float32, torch.float16, torch.bfloat16, torch.float64, torch.int8, torch.uint8, torch.int32)
    for other in (*others, torch.int64, torch.bool, torch.float8_e4m3fn):
        a, b = torch.zeros(2, dtype=dtype), torch.zeros(2, dtype=other)
        if other is dtype:
            door.same_kind(a, b)
        else:
            name = str(dtype).removeprefix("torch.")
            with pytest.raises(RuntimeError, match=f"must have dtype {name}, got {str(other).removeprefix('torch.')}"):
                door.same_kind(a, b)
    with pytest.raises(RuntimeError, match=r"same shape, \(2\): got \(2, 1\)"):
        door.same_kind(torch.zeros(2), torch.zeros(2, 1))


@st.composite
def views(draw: st.DrawFn) -> Tensor:
    """A view of a small float buffer: permuted, sliced with steps and, at times, expanded."""
    dims = draw(st.integers(1, 5))
    sizes = [draw(st.integers(1, 4)) for _ in range(dims)]
    base = torch.arange(4**5 + 7, dtype=torch.float32)
    offset = draw(st.integers(0, 3))
    total = 1
    for size in sizes:
        total *= size
    view = base[offset : offset + total].view(sizes).permute(draw(st.permutations(range(dims))))
    for dim in range(dims):
        start = draw(st.integers(0, view.shape[dim] - 1))
        view = view[(slice(None),) * dim + (slice(start, None, draw(st.integers(1, 2))),)]
    if draw(st.booleans()):
        view = view[..., :1].expand(*view.shape[:-1], draw(st.integers(1, 3)))
    return view


def elements(view: Tensor) -> list[int]:
    """The address of every element."""
    offsets = torch.zeros((), dtype=torch.int64)
    for dim, (size, stride) in enumerate(zip(view.shape, view.stride(), strict=True)):
        steps = torch.arange(size) * stride
        offsets = offsets + steps.view(-1, *(1,) * (view.dim() - 1 - dim))
    return (view.data_ptr() + 4 * offsets).flatten().tolist()


def refused(function: object, *arguments: Tensor) -> bool:
    try:
        function(*arguments)  # type: ignore[operator]
    except RuntimeError:
        return True
    return False


@settings(max_examples=300, deadline=None)
@given(view=views())
def test_layouts_are_read_as_torch_reads_them(door: ModuleType, view: Tensor) -> None:
    """Catches: an element that two indices share taken for written once; a stride of a single element minded."""
    assert refused(door.dense, view) == (not view.is_contiguous())
    addresses = elements(view)
    if not refused(door.written, view):
        assert len(set(addresses)) == len(addresses)
    if view.is_contiguous():
        door.written(view)
    assert refused(door.dense_rows, view) == (view.shape[-1] > 1 and view.stride(-1) != 1)


@settings(max_examples=300, deadline=None)
@given(a=views(), data=st.data())
def test_memory_that_is_shared_is_never_called_apart(door: ModuleType, a: Tensor, data: st.DataObject) -> None:
    """Catches: an overlap that goes unseen, and would give a silently wrong result."""
    size, dim = data.draw(st.integers(1, 40)), data.draw(st.sampled_from([1, 2]))
    shift = data.draw(st.integers(0, 60))
    whole = torch.as_strided(a, (4**5,), (1,), 0)
    b = whole[shift : shift + size] if dim == 1 else whole[shift : shift + 2 * size : 2].view(-1, 1)
    if set(elements(a)) & set(elements(b)):
        assert refused(door.apart, a, b)
        assert refused(door.alias, a, b) or elements(a) == elements(b)


def test_neighbours_are_apart(door: ModuleType) -> None:
    """Catches: column slices of one buffer, or two of its ends, refused although they share no element."""
    grid = torch.zeros(4, 10, 3)
    door.apart(grid[:, :5], grid[:, 5:])
    door.apart(grid[:2], grid[2:])
    door.alias(grid[:, :5], grid[:, 5:])
    door.alias(grid, grid)
    door.alias(grid, grid.view(4, 10, 3))
    assert refused(door.apart, grid[:, :6], grid[:, 5:])
    assert refused(door.alias, grid[:, :5], grid[:, 1:6])
    assert refused(door.apart, grid, grid[1:2])


@settings(max_examples=300, deadline=None)
@given(view=views(), data=st.data())
def test_every_row_is_walked_once_in_its_place(door: ModuleType, view: Tensor, data: st.DataObject) -> None:
    """Catches: dimensions merged that do not step evenly in both tensors, and rows lost beyond two dimensions."""
    if view.shape[-1] > 1 and view.stride(-1) != 1:
        view = view.contiguous()
    order = data.draw(st.permutations(range(view.dim() - 1)))
    shape = [view.shape[i] for i in order]
    out = torch.full((*shape, view.shape[-1] + 2), -1.0)[..., 1:-1]
    out = out.permute(*(order.index(i) for i in range(view.dim() - 1)), view.dim() - 1)
    door.copy_rows(out, view)
    assert torch.equal(out, view)
