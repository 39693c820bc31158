"""Evidence on disk: which record admits which row, and what makes it lose its force."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from rapid_llm.kernels.registry import dispatch, dispatcher, evidence, explain, get_row, registry
from rapid_llm.kernels.registry import records as store
from rapid_llm.kernels.registry.digest import source_of
from rapid_llm.kernels.registry.records import Proof, Record
from rapid_llm.platform import DeviceInfo
from tests import scratch

FACTS = {"device": "cpu", "dtype": "fp32", "dims": {"tokens": 4, "hidden": 64}}
CPU = "cpu test"
H200 = "cuda sm_90 NVIDIA H200"
PROOF = Proof(30, 90, 5000, 2, 0.5, 0.75, 9, 9, "2.11.0", "CUDA 13.0", "2026-12-01")


@pytest.fixture
def row(op: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """`fast/scratch` on a machine of class `cpu test`; the name of the module that holds it."""
    monkeypatch.setattr(store, "device_class", lambda device, index=None: CPU if device == "cpu" else H200)
    evidence.reload()
    registry.register(scratch.row("fast/scratch", f"{op}:fast", priority=10))
    yield op
    evidence.reload()


def save(kind: str = CPU, key: str = "fp32", layer: str = store.USER, **changes: object) -> Path:
    spec = get_row("fast/scratch")
    source = source_of(spec, registry.get_op(spec.op))
    assert source is not None
    path = store.folder(layer) / store.file_name(kind)
    store.write(path, kind, {spec.name: Record(replace(source, **changes), {key: PROOF})}, {})  # type: ignore[arg-type]
    renew()
    return path


def renew() -> None:
    evidence.reload()
    dispatcher.forget(None)


def chosen(**changes: object) -> str:
    return dispatch("scratch", **{**FACTS, **changes}).spec.name  # type: ignore[arg-type]


def code() -> str:
    reasons = next(v for v in explain("scratch", **FACTS).rows if v.row.name == "fast/scratch").reasons
    return reasons[0].code if reasons else ""


def test_a_record_admits_its_row(row: str) -> None:
    """Catches: records that are written and never read; numbers that `explain` doesn't show."""
    assert chosen() == "native/scratch"
    save()
    assert chosen() == "fast/scratch"
    shown = explain("scratch", **FACTS).json()["rows"][0]["evidence"]  # type: ignore[index]
    assert shown["state"] == "record"
    assert shown["layer"] == "user"
    assert (shown["cases"], shown["worst_ratio"], shown["mutants"]) == (30, 0.75, "9/9")


@pytest.mark.parametrize(("kind", "key"), [(CPU, "bf16"), (H200, "fp32"), (CPU, "fp32 q8_0")])
def test_a_record_of_something_else_admits_nothing(row: str, kind: str, key: str) -> None:
    """Catches B58 and its kin: evidence of another dtype, scheme or device taken for this call's."""
    save(kind, key)
    if key == "fp32 q8_0":  # the op has no schemes: such a record is of no call
        assert store.table(store.USER, kind)["fast/scratch"].proofs
        return
    assert chosen() == "native/scratch"
    assert code() == "unverified"


def test_a_run_on_the_cpu_proves_nothing_for_a_gpu(row: str) -> None:
    """Catches B58: a CPU record, or a run in this process, that admits the row on a GPU."""
    save(CPU)
    scratch.prove("fast/scratch", "cpu")
    facts = dispatcher.facts_of("scratch", (), {**FACTS, "device": "cuda"})
    assert not evidence.of(get_row("fast/scratch"), facts).verified
    save(H200)
    assert evidence.of(get_row("fast/scratch"), facts).verified


def test_an_edit_makes_it_stale_and_a_comment_does_not(row: str, tmp_path: Path) -> None:
    """Catches P78 and its reverse: a record that outlives the code that it is of, or dies of a comment."""
    save()
    path = tmp_path / f"{row}.py"
    text = path.read_text()
    path.write_text(text.replace('CALLS.append("fast")', 'CALLS.append("fast")  # noted'))
    renew()
    assert chosen() == "fast/scratch"
    path.write_text(text.replace('CALLS.append("fast")', 'CALLS.append("fast!")'))
    renew()
    assert chosen() == "native/scratch"
    assert code() == "stale"
    reason = explain("scratch", **FACTS).rows[1].reasons[0]
    assert "rapid-llm kernels verify fast/scratch" in reason.fix
    path.write_text(text)
    renew()
    assert chosen() == "fast/scratch"


def test_the_users_record_mends_a_stale_shipped_one(row: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches: a stale record of one layer that hides the fresh one of another."""
    monkeypatch.setattr(store, "folder", lambda layer: tmp_path / layer)
    monkeypatch.setattr(registry, "is_shipped", lambda name: name == "fast/scratch")
    save(H200, layer=store.SHIPPED, digest="old", raw="old")
    facts = dispatcher.facts_of("scratch", (), {**FACTS, "device": "cuda"})
    assert evidence.of(get_row("fast/scratch"), facts).state == "stale"
    save(H200, layer=store.USER)
    assert evidence.of(get_row("fast/scratch"), facts).layer == "user"


def test_what_ships_speaks_of_shipped_rows_alone(row: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches: another package's row that takes a proven row's name, and its proof with it."""
    monkeypatch.setattr(store, "folder", lambda layer: tmp_path / layer)
    save(layer=store.SHIPPED)
    assert chosen() == "native/scratch"


def test_the_floor_is_admitted_and_its_standing_shown(row: str) -> None:
    """Catches: a floor that is out for want of a record, or that claims one."""
    facts = dispatcher.facts_of("scratch", (), FACTS)
    found = evidence.of(get_row("native/scratch"), facts)
    assert found.verified
    assert found.state == "floor"
    assert "no run on cpu test has proved it" in found.text


def test_writing_merges_and_drops_what_no_longer_holds(row: str) -> None:
    """Catches: a run over one dtype that wipes the others; a failure that leaves the old proof standing; a proof of
    older code kept beside the new."""
    save(key="bf16")
    path = save(key="fp32")
    assert set(store.table(store.USER, CPU)["fast/scratch"].proofs) == {"bf16", "fp32"}
    store.write(path, CPU, {}, {"fast/scratch": {"bf16"}})
    assert set(store.table(store.USER, CPU)["fast/scratch"].proofs) == {"fp32"}
    save(key="fp16", digest="another")
    assert set(store.table(store.USER, CPU)["fast/scratch"].proofs) == {"fp16"}
    assert not [p for p in path.parent.iterdir() if p != path]


@pytest.mark.parametrize("text", ["", "{", '{"format": 9, "device": "cpu test", "rows": {}}', '{"format": 1}', "[]"])
def test_a_broken_file_is_reported_and_ignored(row: str, text: str, caplog: pytest.LogCaptureFixture) -> None:
    """Catches: a half-written or foreign file of records that breaks every dispatch."""
    save().write_text(text)
    renew()
    with caplog.at_level(logging.WARNING):
        assert chosen() == "native/scratch"
    assert "ignored" in caplog.text


def test_only_the_devices_own_file_is_read(row: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches: every GPU's records parsed at the start of a CPU process."""
    save(CPU)
    save(H200)
    read = []
    load = store._load
    monkeypatch.setattr(store, "_load", lambda path, kind: (read.append(kind), load(path, kind))[1])
    store.forget()
    chosen()
    assert set(read) == {CPU}


def test_device_classes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches: two devices that share a class though they run other code, or one whose class differs by process."""
    monkeypatch.setattr(store, "device_info", lambda device: DeviceInfo("cuda", 0, "NVIDIA H200", 90))
    assert store.device_class("cuda", 0) == H200
    assert store.file_name(H200) == "cuda-sm_90-nvidia-h200.json"
    monkeypatch.setattr(store, "device_info", lambda device: DeviceInfo("cuda", None, "none is visible", None))
    assert store.device_class("cuda") is None
    base = store.cpu_info()
    for isa, level in (
        (("avx2", "fma", "f16c"), "avx2"),
        (("avx2", "fma", "f16c", "avx512f", "avx512bw", "avx512vl"), "avx512"),
        (("avx512f", "avx512bw", "avx512vl", "avx512_bf16", "amx_bf16"), "avx512_bf16"),
    ):
        monkeypatch.setattr(store, "cpu_info", lambda isa=isa: replace(base, isa=isa))
        assert store.device_class("cpu") == f"cpu {level}"


def test_the_shipped_files_are_whole() -> None:
    """Catches: a file of records that no process would read, or that speaks of rows that are not there."""
    import rapid_llm.kernels.ops  # noqa: F401

    names = {row.name for op in registry.ops() for row in registry.rows(op.id)}
    for path in store.folder(store.SHIPPED).glob("*.json"):
        data = json.loads(path.read_text())
        assert path.name == store.file_name(data["device"])
        table = store._load(path, data["device"])
        assert table
        assert set(table) <= names
        assert all(p.cases and p.elements and p.of for record in table.values() for p in record.proofs.values())


def test_what_is_entered_by_a_decorator_is_part_of_the_source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches: a heuristic of tiles that changes, and with it what runs, under a record that still holds."""
    from rapid_llm.kernels.registry import digest

    package = tmp_path / "acme_tiled"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "policy.py").write_text("def tiles(name):\n    return lambda function: function\n")
    heuristic = "@tiles('op')\ndef _tiles(sm):\n    return {BLOCK}\n"
    row = f"from acme_tiled.policy import tiles\n\n{heuristic}\ndef run(x):\n    return x\n"
    monkeypatch.syspath_prepend(tmp_path)

    def parts(block: str) -> dict[str, str]:
        (package / "row.py").write_text(row.replace("BLOCK", block))
        walk = digest._Walk(tmp_path, "acme_tiled")
        walk.name("acme_tiled.row", "run")
        return walk.parts

    assert parts("128") != parts("256")


def test_how_tiles_are_found_is_no_part_of_a_row() -> None:
    """Catches: records of all Triton rows that go stale with every change of the look-up of tiles."""
    from rapid_llm.kernels.registry import digest, get_op

    source = digest.source_of(get_row("native/scale"), get_op("scale"))
    assert source is not None
    assert "rapid_llm/kernels/ops/elementwise/scale.py" in source.files
    assert "rapid_llm/kernels/ops/tile_policy.py" not in source.files
