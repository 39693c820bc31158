"""The generated public functions: one look-up under a pruned key, and right whatever registers or is forced later."""

from __future__ import annotations

import contextlib
import copy
import json
import subprocess
import threading
from pathlib import Path

import pytest
import torch

import rapid_llm.kernels as kernels
from rapid_llm.kernels import Dim, Shape, dispatch, explain, profiler_ranges, register, use_backend
from rapid_llm.kernels.registry import ArgumentError, codegen, get_op, ops, trace
from rapid_llm.kernels.registry.codegen import cache_of, public_function, source
from tests import scratch, warm
from tests.kernels.registry.test_torch_ops import arguments


def tensors(tokens: int = 4) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.ones(tokens, 64), torch.ones(64)


def fast(op: str, **changes: object) -> None:
    register(scratch.row("fast/scratch", f"{op}:fast", priority=5, **changes))
    scratch.prove("fast/scratch")


def test_every_op_is_exported_under_its_function_name() -> None:
    for op in ops():
        function = getattr(kernels, op.function)
        assert function is public_function(op.id)
        assert function.__doc__ == op.doc
        assert function.__name__ in kernels._EXPORTS


def test_the_key_holds_only_what_some_row_constrains(op: str) -> None:
    call = public_function("scratch")
    for tokens in (1, 2, 3):
        assert call(*tensors(tokens)) == "native"
    assert len(cache_of("scratch")) == 1
    fast(op, shape=Shape(require=(Dim("tokens", max=2),)))
    assert [call(*tensors(tokens)) for tokens in (1, 2, 3)] == ["fast", "fast", "native"]
    assert len(cache_of("scratch")) == 3


def test_a_late_row_reaches_a_function_imported_before(op: str) -> None:
    call = kernels.scratch
    assert call(*tensors()) == "native"
    fast(op)
    assert call(*tensors()) == "fast"


def test_layout_is_read_off_the_tensors_of_each_call(op: str) -> None:
    fast(op, layout=("input:contiguous",))
    x, w = torch.ones(64, 64), torch.ones(64)
    assert [kernels.scratch(x, w), kernels.scratch(x.t(), w), kernels.scratch(x, w)] == ["fast", "native", "fast"]
    assert kernels.scratch(x[:, ::2], w) == "native"


def test_alignment_is_read_off_the_tensors_of_each_call(op: str) -> None:
    fast(op, layout=("aligned16",))
    buffer, w = torch.ones(4 * 64 + 1), torch.ones(64)
    assert kernels.scratch(buffer[:256].view(4, 64), w) == "fast"
    assert kernels.scratch(buffer[1:].view(4, 64), w) == "native"


def test_a_row_with_a_bound_on_elements_is_filtered_beyond_it(op: str) -> None:
    """P45: 32-bit offsets. Meta tensors have no memory, so any size can be asked about."""
    fast(op, shape=Shape(require=(Dim("extent", max=2**31 - 1),)), devices=())
    scratch.prove("fast/scratch", device="meta")
    w = torch.empty(64, device="meta")
    assert kernels.scratch(torch.empty(2**25 - 1, 64, device="meta"), w) == "fast"
    assert kernels.scratch(torch.empty(2**25 + 1, 64, device="meta"), w) == "native"
    wide = torch.empty_strided((2, 64), (2**31, 1), device="meta")
    assert kernels.scratch(wide, w) == "native"


def test_cpu_and_meta_tensors_do_not_share_a_decision(op: str) -> None:
    fast(op, devices=("cpu",))
    assert kernels.scratch(*tensors()) == "fast"
    assert kernels.scratch(torch.empty(4, 64, device="meta"), torch.empty(64, device="meta")) == "native"


def test_use_backend_holds_within_its_block_and_its_thread(op: str) -> None:
    fast(op)
    call = kernels.scratch
    seen: list[str] = []
    with use_backend("native", op="scratch"):
        assert call(*tensors()) == "native"
        thread = threading.Thread(target=lambda: seen.append(call(*tensors())))
        thread.start()
        thread.join()
        with use_backend("fast"):
            assert call(*tensors()) == "fast"
    assert call(*tensors()) == "fast"
    assert seen == ["fast"]


def test_bad_arguments_name_the_op_and_the_argument(op: str) -> None:
    x, w = tensors()
    with pytest.raises(ArgumentError, match="scratch: input must be a Tensor, got list"):
        kernels.scratch([1.0], w)
    with pytest.raises(ArgumentError, match="scratch: out must have the same shape"):
        kernels.scratch(x, w, out=torch.ones(4, 63))
    with pytest.raises(ArgumentError, match=r"out must be torch.float32 on cpu like the result, got torch.float16"):
        kernels.scratch(x, w, out=torch.ones(4, 64, dtype=torch.float16))
    with pytest.raises(TypeError, match="factr"):
        kernels.scratch(x, w, factr=2.0)
    with pytest.raises(ArgumentError, match="different devices"):
        kernels.scratch(x.double().to("meta"), w)


def test_out_may_be_an_input_but_not_overlap_one_in_part(op: str) -> None:
    """P50: partial overlap is refused, for outputs and for tensors written in place."""
    buffer = torch.ones(1000)
    x, shifted = buffer[:256].view(4, 64), buffer[3:259].view(4, 64)
    assert kernels.scratch(x, torch.ones(64), out=x) == "native"
    with pytest.raises(ArgumentError, match="out overlaps input in part"):
        kernels.scratch(x, torch.ones(64), out=shifted)
    with pytest.raises(ArgumentError, match="input and residual overlap"):
        kernels.fused_add_rmsnorm(x, shifted, torch.ones(64))
    with pytest.raises(ArgumentError, match="input and residual overlap"):
        kernels.fused_add_rmsnorm(x, x, torch.ones(64))


def test_columns_of_one_buffer_do_not_count_as_overlap() -> None:
    from rapid_llm.kernels.registry.codegen import _overlap

    fused = torch.zeros(5, 96)
    assert not _overlap(fused[:, :64].unflatten(1, (2, 32)), fused[:, 64:].unflatten(1, (1, 32)))
    assert not _overlap(fused[:, :64], fused[:, 64:])
    assert _overlap(fused[:, :64], fused[:, 32:])
    assert _overlap(fused, fused[2:])
    assert not _overlap(fused[:2], fused[2:])
    assert _overlap(fused.t(), fused)


def test_selected_is_a_callable_that_survives_copying(op: str) -> None:
    fast(op)
    x, w = tensors()
    selected = dispatch("scratch", x, w)
    assert selected.spec.name == "fast/scratch"
    assert selected(x, w) == "fast"
    assert copy.deepcopy(selected)(x, w) == "fast"
    assert selected.prepack(w) is w
    assert "-> fast/scratch" in str(selected.explain())
    assert explain("scratch", x, w).selected == "fast/scratch"


def test_threads_decide_alike(op: str) -> None:
    fast(op, shape=Shape(require=(Dim("tokens", max=50),)))
    results: list[list[str]] = []

    def work() -> None:
        results.append([kernels.scratch(*tensors(tokens)) for tokens in range(1, 100)])

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [["fast"] * 50 + ["native"] * 49] * 4


def test_the_trace_counts_calls_and_is_written_at_exit(tmp_path: Path) -> None:
    code = """
        import torch, rapid_llm.kernels as k
        x = torch.ones(4, 64)
        for _ in range(3): k.scale(x, 2.0)
        k.dispatch("scale", x, 2.0)(x, 2.0)
    """
    import textwrap

    file = tmp_path / "trace.json"
    env = {"RAPID_LLM_TRACE": str(file), "PATH": "/usr/bin:/bin", "HOME": str(tmp_path)}
    root = Path(kernels.__file__).parents[2]
    subprocess.run([warm.executable(), "-c", textwrap.dedent(code)], env=env, check=True, cwd=root)
    (entry,) = json.loads(file.read_text())["decisions"]
    key = entry.pop("key")
    assert entry == {"op": "scale", "row": "native/scale", "dtype": "fp32", "shape": entry["shape"], "count": 4}
    assert "numel=256" in entry["shape"]
    assert (key["op"], key["device"], key["dims"]["numel"]) == ("scale", "cpu", 256)
    assert kernels.prepare(file).keys[0].row == "native/scale"


def test_profiler_ranges_carry_op_and_row() -> None:
    with torch.profiler.profile() as profile, profiler_ranges():
        kernels.scale(torch.ones(8), 2.0)
    assert "scale [native/scale]" in {event.key for event in profile.key_averages()}
    assert not trace.enabled()


def test_the_source_reads_no_shape_where_no_row_asks() -> None:
    text = source(next(op for op in ops() if op.id == "scale"))
    assert "shape" not in text
    assert "type(input), input.dtype, input.device" in text


@pytest.mark.parametrize("op_id", [op.id for op in ops()])
def test_a_tensor_without_dimensions_is_no_index_error(op_id: str) -> None:
    """Catches: `tuple index out of range`, which says neither op nor argument, from the look-up of a decision."""
    op = get_op(op_id)
    values = arguments(op_id)
    first = op.parsed.tensors[0].name
    values[first] = values[first].new_zeros(())
    with contextlib.suppress(RuntimeError):  # of the op, with its name; scale takes a scalar
        getattr(kernels, op.function)(**values)


def test_a_number_that_is_not_whole_is_named() -> None:
    """Catches: `'float' object has no attribute 'bit_length'` for an int argument that is a dimension."""
    with pytest.raises(ArgumentError, match=r"value_dim.* must be a whole number, got 6\.5"):
        kernels.attention_mla_decode(**{**arguments("attention.mla_decode"), "value_dim": 6.5})


@pytest.mark.filterwarnings("error")
def test_a_fake_tensor_is_not_asked_for_its_address() -> None:
    """Catches: a key with alignment that reads the address of a tensor without memory, which torch warns of."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        x, weight = torch.empty(4, 64), torch.empty(64)
        assert kernels.rmsnorm(x, weight, 1e-6).shape == (4, 64)
        assert kernels.linear(torch.empty(2, 64), torch.empty(8, 64)).shape == (2, 8)


def test_plugins_are_looked_for_without_a_lock(op: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches: two threads that wait for each other, one in its first op, whose scan meets a plugin that registers, the
    other in a dispatch whose row imports an op."""
    free: list[bool] = []

    def scan() -> None:
        def take() -> None:
            free.append(codegen._lock._inner.acquire(timeout=10.0))
            if free[-1]:
                codegen._lock._inner.release()

        other = threading.Thread(target=take)
        other.start()
        other.join()

    monkeypatch.setattr(codegen.plugins, "scan", scan)
    assert public_function("scratch")
    assert free == [True]
