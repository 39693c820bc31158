"""First use of a row that was proven elsewhere: when it is tried, what a wrong one leads to, and what is remembered."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

import rapid_llm.kernels.ops  # noqa: F401  (registers the ops)
from rapid_llm.kernels import KernelSpec, dispatch, explain, register
from rapid_llm.kernels.registry import canary, dispatcher, evidence, overrides, records, registry, unregister
from rapid_llm.kernels.registry.digest import source_of
from rapid_llm.kernels.registry.records import Proof, Record
from rapid_llm.verify.replay import load, replay

ROW = "mine/scale"
MODULE = "tests.kernels.registry.test_canary"
PROOF = Proof(30, 90, 5000, 2, 0.5, 0.75, 9, 9, "2.11.0", "none", "2026-12-01")
TRIED: list[str] = []


def right(input: Tensor, factor: float, out: Tensor | None = None) -> Tensor:
    if out is None:
        return (input.float() * factor).to(input.dtype).contiguous()
    if out is not input and out.untyped_storage().data_ptr() == input.untyped_storage().data_ptr():
        raise RuntimeError("scale: out overlaps input")
    return out.copy_(input.float() * factor)


def wrong(input: Tensor, factor: float, out: Tensor | None = None) -> Tensor:
    result = right(input, factor, out)
    return result.add_(1e-3)


def there() -> bool:
    return True


def spied(row: str, device: str, dtype: str, scheme: str | None, folder: Path) -> str:
    from rapid_llm.verify.replay import first_use

    TRIED.append(row)
    return first_use(row, device, dtype, scheme, folder)


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, warm_python: str) -> Iterator[Path]:
    """A machine that has never run anything, and a package whose records speak of `mine/scale`."""
    monkeypatch.setenv("RAPID_LLM_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(overrides, "_from_environment", {})
    monkeypatch.setattr(records, "folder", lambda layer: tmp_path / layer)
    monkeypatch.setattr(registry, "is_shipped", lambda name: name == ROW)
    monkeypatch.setattr(canary, "TRY", f"{MODULE}:spied")
    TRIED.clear()
    yield tmp_path
    unregister(ROW)
    evidence.forget(ROW)
    forget()


def forget() -> None:
    """What a new process doesn't know."""
    canary._passed.clear()
    evidence._quarantined.clear()
    evidence.reload()
    dispatcher.forget(None)


def ship(function: str, layer: str = records.SHIPPED) -> None:
    fields = {"dtypes": ("fp32",), "devices": ("cpu",), "priority": 90}
    spec = KernelSpec(
        name=ROW, op="scale", backend="mine", target=f"{MODULE}:{function}", available=f"{MODULE}:there", **fields
    )  # type: ignore[arg-type]
    register(spec)
    source = source_of(spec, registry.get_op("scale"))
    kind = records.device_class("cpu")
    assert source is not None
    assert kind is not None
    path = records.folder(layer) / records.file_name(kind)
    records.write(path, kind, {ROW: Record(source, {"fp32": PROOF})}, {})
    forget()


def chosen() -> str:
    return dispatch("scale", torch.ones(8), 2.0).spec.name


def test_a_right_row_is_tried_once_a_machine(machine: Path) -> None:
    """Catches: a canary at every start, or none at all."""
    ship("right")
    assert chosen() == ROW
    assert dispatch("scale", torch.ones(9), 2.0).spec.name == ROW
    assert TRIED == [ROW]
    forget()
    assert chosen() == ROW
    assert TRIED == [ROW]


def test_a_wrong_row_is_quarantined_with_a_file_that_replays(machine: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Catches: a row that is wrong on this machine and answers all the same; a case that cannot be made again."""
    ship("wrong")
    assert chosen() == "native/scale"
    assert "quarantined" in caplog.text
    reason = next(v for v in explain("scale", torch.ones(8), 2.0).rows if v.row.name == ROW).reasons[0]
    assert reason.code == "quarantined"
    (file,) = (machine / "cache" / "quarantine").iterdir()
    assert str(file) in reason.text
    saved = load(file)
    assert (saved.row, saved.dtype) == (ROW, "fp32")
    assert replay(saved).failures
    forget()
    assert chosen() == "native/scale"
    assert TRIED == [ROW], "the next process remembers"


def test_another_source_is_tried_anew(machine: Path) -> None:
    """Catches: a verdict on old code that is passed on the new."""
    ship("wrong")
    assert chosen() == "native/scale"
    unregister(ROW)
    ship("right")
    assert chosen() == ROW
    assert TRIED == [ROW, ROW]


def test_who_was_proven_here_or_is_named_is_not_tried(machine: Path) -> None:
    """Catches: a canary for rows that the full suite has proven on this very machine; a forced row that is refused."""
    ship("right", records.USER)
    assert chosen() == ROW
    unregister(ROW)
    ship("wrong")
    assert dispatch("scale", torch.ones(8), 2.0, backend=ROW).spec.name == ROW
    assert TRIED == []


def test_nothing_is_tried_while_a_graph_is_captured(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches: small calls that become part of the user's graph."""
    ship("right")
    monkeypatch.setattr(canary, "capturing", lambda: True)
    assert chosen() == "native/scale"
    assert TRIED == []
    monkeypatch.setattr(canary, "capturing", lambda: False)
    assert chosen() == ROW


def test_a_cache_that_cannot_be_written_is_no_error(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches P22: a read-only home that takes every row out."""
    ship("right")
    monkeypatch.setattr(canary, "_file", lambda kind: Path("/proc/nowhere/canary.json"))
    assert chosen() == ROW


def test_a_row_that_raises_is_quarantined(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches: an exception of the canary that reaches the caller of an op."""
    ship("right")
    monkeypatch.setattr(canary, "TRY", "nowhere:function")
    assert chosen() == "native/scale"


def test_a_file_that_is_no_case(tmp_path: Path) -> None:
    """Catches: a pickle that is executed, or a traceback for a wrong path."""
    path = tmp_path / "case.pt"
    path.write_bytes(b"not a case")
    with pytest.raises(ValueError, match="not a saved call"):
        load(path)
    with pytest.raises(FileNotFoundError):
        load(tmp_path / "none.pt")


def test_strides_survive_the_file(tmp_path: Path) -> None:
    """Catches: a replay with dense tensors where the failure was one of strides."""
    from rapid_llm.verify import replay as module

    for tensor in (torch.arange(12.0).view(3, 4).t(), torch.ones(1, 5).expand(3, 5), torch.arange(9.0)[::2]):
        again = module._put(tensor, "cpu")
        assert torch.equal(again, tensor)
        assert again.stride() == tensor.stride()
