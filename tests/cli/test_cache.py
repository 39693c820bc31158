"""`rapid-llm cache`: what is listed, carried, checked and taken away; and archives that must not be believed."""

from __future__ import annotations

import io
import json
import os
import tarfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rapid_llm.kernels.build import Artifact, keys, locks
from tests.kernels.build import standin

from .support import call, rapid_llm


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("RAPID_LLM_CACHE_DIR", str(tmp_path / "cache"))
    (tmp_path / "tmp").mkdir()
    monkeypatch.setenv("TMPDIR", str(tmp_path / "tmp"))
    monkeypatch.setattr("tempfile.tempdir", None)
    return tmp_path / "cache" / "builds"


@pytest.fixture
def made(tmp_path: Path, cache: Path) -> list[Artifact]:
    """Two artifacts of one kernel, for two architectures, the first the older one."""
    root = standin.sources(tmp_path)
    compiler = standin.make(tmp_path / "stand-in").compiler
    return [standin.make_artifact(root, compiler, arch=arch) for arch in ("sm_80", "sm_90")]


def listed(capsys: pytest.CaptureFixture[str]) -> list[dict[str, Any]]:
    done = call("cache", "list", "--json", capsys=capsys)
    assert done.status == 0
    found: list[dict[str, Any]] = json.loads(done.out)
    return found


def test_an_empty_store_is_listed(cache: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Catches a list that fails, or makes folders, before anything is built."""
    assert listed(capsys) == []
    assert call("cache", "verify", capsys=capsys).status == 0
    assert not cache.exists()


def test_artifacts_are_listed(made: list[Artifact], capsys: pytest.CaptureFixture[str]) -> None:
    """Catches a row that hides what a person needs to know it by."""
    rows = listed(capsys)
    assert [(r["path"], r["name"], r["arch"], r["layer"]) for r in rows] == [
        ("cpp", "a", "sm_80", "user"),
        ("cpp", "a", "sm_90", "user"),
    ]
    assert [r["file"] for r in rows] == [str(a.path) for a in made]
    assert [r["bytes"] for r in rows] == [a.path.stat().st_size for a in made]
    assert {r["state"] for r in rows} == {"unknown"}  # the test's sources are not in the package
    text = call("cache", "list", capsys=capsys).out
    assert "cpp/a" in text
    assert "sm_90" in text


def test_an_artifact_whose_source_has_changed_is_stale(
    tmp_path: Path, cache: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches a state that compares nothing."""
    monkeypatch.setattr(keys, "_PACKAGE", os.path.realpath(tmp_path))
    root = standin.sources(tmp_path)
    compiler = standin.make(tmp_path / "stand-in").compiler
    standin.make_artifact(root, compiler)
    assert [r["state"] for r in listed(capsys)] == ["in use"]
    (root / "include" / "two.h").write_text("#define TWO 4\n")
    assert [r["state"] for r in listed(capsys)] == ["stale"]
    standin.make_artifact(root, compiler)
    assert [r["state"] for r in listed(capsys)] == ["in use", "stale"]


def test_a_newer_artifact_makes_the_older_one_stale(
    made: list[Artifact], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Catches a kernel from outside the package whose every version counts as used for ever."""
    (tmp_path / "csrc" / "include" / "two.h").write_text("#define TWO 5\n")
    newer = standin.make_artifact(tmp_path / "csrc", standin.make(tmp_path / "stand-in").compiler, arch="sm_90")
    states = {r["file"]: r["state"] for r in listed(capsys)}
    assert states == {str(made[0].path): "unknown", str(made[1].path): "stale", str(newer.path): "unknown"}


def test_verify_finds_what_was_altered(made: list[Artifact], capsys: pytest.CaptureFixture[str]) -> None:
    """Catches a check that reads the record alone."""
    assert call("cache", "verify", capsys=capsys).out == "2 good, 0 bad\n"
    made[0].path.write_bytes(made[0].path.read_bytes()[:-1])
    done = call("cache", "verify", "--json", capsys=capsys)
    assert done.status == 1
    report = json.loads(done.out)
    assert report["good"] == 1
    assert report["bad"][0]["folder"] == str(made[0].path.parent)
    assert "differs" in report["bad"][0]["fault"]
    (made[1].path.parent / "artifact.json").unlink()
    assert json.loads(call("cache", "verify", "--json", capsys=capsys).out)["good"] == 0


def test_artifacts_travel(
    made: list[Artifact], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """P10: what is exported on one machine is found on another, without a compile."""
    file = tmp_path / "kernels.tar"
    assert call("cache", "export", str(file), capsys=capsys).status == 0
    assert str(tmp_path) not in file.read_bytes().decode(errors="replace")
    monkeypatch.setenv("RAPID_LLM_CACHE_DIR", str(tmp_path / "elsewhere"))
    done = call("cache", "import", str(file), capsys=capsys)
    assert done.status == 0, done.err
    assert "2 added, 0 were here" in done.out
    assert "0 added, 2 were here" in call("cache", "import", str(file), capsys=capsys).out
    compiler = standin.make(tmp_path / "stand-in").compiler
    again = standin.make_artifact(tmp_path / "csrc", compiler, arch="sm_90")
    assert (again.cached, again.key) == (True, made[1].key)
    assert again.path.is_relative_to(tmp_path / "elsewhere")


def test_one_kernel_can_be_exported(made: list[Artifact], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Catches a choice that takes all, and a name that silently matches nothing."""
    file = tmp_path / "one.tar"
    assert call("cache", "export", str(file), "--name", made[1].key[:12], capsys=capsys).status == 0
    with tarfile.open(file) as tar:
        assert len(tar.getnames()) == 2
    done = call("cache", "export", str(tmp_path / "none.tar"), "--name", "nothing", capsys=capsys)
    assert done.status == 1
    assert "here are: cpp/a" in done.err
    assert not (tmp_path / "none.tar").exists()


def test_an_export_writes_over_nothing_unasked(
    made: list[Artifact], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Catches a file that is lost to a typing mistake."""
    file = tmp_path / "precious"
    file.write_text("x")
    assert call("cache", "export", str(file), capsys=capsys).status == 2
    assert file.read_text() == "x"
    assert call("cache", "export", str(file), "--force", capsys=capsys).status == 0


def test_a_damaged_artifact_is_not_exported(
    made: list[Artifact], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Catches damage that spreads to other machines, and half an archive left behind."""
    made[0].path.write_text("x")
    done = call("cache", "export", str(tmp_path / "x.tar"), capsys=capsys)
    assert done.status == 1
    assert "damaged" in done.err
    assert not list(tmp_path.glob("*x.tar*"))


Member = tuple[str, bytes, bytes]
"""Name, content, kind."""


def members(made: Artifact) -> list[Member]:
    folder = made.path.parent
    return [(f"cpp/{folder.name}/{n}", (folder / n).read_bytes(), tarfile.REGTYPE) for n in ("a.so", "artifact.json")]


def extra(name: str, kind: bytes = tarfile.REGTYPE) -> Callable[[list[Member]], list[Member]]:
    return lambda found: [*found, (name.format(folder=found[0][0].split("/")[1]), b"x", kind)]


FORGERIES: dict[str, tuple[Callable[[list[Member]], list[Member]], str]] = {
    "outside": (extra("../evil"), "names have the form"),
    "absolute": (extra("/etc/evil/x"), "names have the form"),
    "dots": (extra("cpp/../evil"), "names have the form"),
    "deep": (extra("cpp/{folder}/x/y"), "names have the form"),
    "symbolic link": (extra("cpp/{folder}/x", tarfile.SYMTYPE), "only regular files"),
    "hard link": (extra("cpp/{folder}/x", tarfile.LNKTYPE), "only regular files"),
    "device": (extra("cpp/{folder}/x", tarfile.CHRTYPE), "only regular files"),
    "folder": (extra("cpp/{folder}", tarfile.DIRTYPE), "only regular files"),
    "foreign file": (extra("cpp/{folder}/evil.so"), "foreign file 'evil.so'"),
    "foreign folder": (extra("cpp/evil/x"), "no artifact's folder"),
    "locks": (extra("locks/{folder}/x"), "no artifact's folder"),
    "twice": (lambda found: [*found, found[0]], "there twice"),
    "altered": (lambda found: [(found[0][0], b"evil", tarfile.REGTYPE), found[1]], "differs"),
    "no record": (lambda found: found[:1], "missing or damaged"),
    "no file": (lambda found: found[1:], "cannot be read"),
    "other path": (lambda found: [("jit" + n[3:], d, k) for n, d, k in found], "its record is that of cpp/a"),
    "empty": (lambda found: [], "holds no artifacts"),
}


@pytest.mark.parametrize("forgery", FORGERIES)
def test_a_forged_archive_adds_nothing(
    made: list[Artifact],
    cache: Path,
    tmp_path: Path,
    forgery: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Catches path traversal, links, foreign files and altered content: in whole archives, not member by member."""
    change, reason = FORGERIES[forgery]
    file = tmp_path / "forged.tar"
    with tarfile.open(file, "w") as tar:
        for name, data, kind in [*members(made[0]), *change(members(made[1]))] if forgery != "empty" else []:
            member = tarfile.TarInfo(name)
            member.type, member.linkname = kind, "/etc/passwd"
            member.size = len(data) if kind == tarfile.REGTYPE else 0
            tar.addfile(member, io.BytesIO(data))
    monkeypatch.setenv("RAPID_LLM_CACHE_DIR", str(tmp_path / "fresh"))
    before = sorted(p for p in tmp_path.rglob("*") if not p.is_relative_to(tmp_path / "fresh"))
    done = call("cache", "import", str(file), capsys=capsys)
    assert done.status == 1
    assert reason in done.err
    assert sorted(p for p in tmp_path.rglob("*") if not p.is_relative_to(tmp_path / "fresh")) == before
    assert not [p for p in (tmp_path / "fresh").rglob("*") if p.is_file()]


@pytest.mark.parametrize("content", [b"", b"not a tar", b"\x1f\x8b\x08"])
def test_what_is_no_archive_is_named(
    cache: Path, tmp_path: Path, content: bytes, capsys: pytest.CaptureFixture[str]
) -> None:
    """Catches a traceback, and a compressed file that unpacks without limit."""
    (tmp_path / "x.tar").write_bytes(content)
    done = call("cache", "import", str(tmp_path / "x.tar"), capsys=capsys)
    assert done.status == 1
    assert "x.tar" in done.err


def test_a_number_in_an_archive_that_is_none_is_no_traceback(
    made: list[Artifact], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Catches a ValueError of `tarfile`: its reader of sparse files unpacks what is not there."""
    file = tmp_path / "sparse.tar"
    name = members(made[0])[0][0]
    with tarfile.open(file, "w", format=tarfile.PAX_FORMAT) as tar:
        member = tarfile.TarInfo(name)
        member.size = 1000
        member.pax_headers = {f"GNU.sparse.{key}": value for key, value in (("major", "1"), ("minor", "0"))}
        member.pax_headers |= {"GNU.sparse.name": name, "GNU.sparse.realsize": "99"}
        tar.addfile(member, io.BytesIO(b"x" * 1000))
    done = call("cache", "import", str(file), capsys=capsys)
    assert done.status == 1
    assert "sparse.tar is not a tar file that" in done.err


def test_gc_takes_left_overs_and_leaves_the_rest(
    made: list[Artifact], cache: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """P5: what killed builders leave fills the disk; or a build in progress is taken for a left-over."""
    for stem in ("cpp-dead-key", "cpp-busy-key"):
        (cache / "staging" / f"{stem}.x").mkdir()
        (cache / "staging" / f"{stem}.x" / "half.so").write_text("xxxx")
        (cache / "locks" / f"{stem}.lock").write_text("")
    with locks.KeyLock(cache / "locks" / "cpp-busy-key.lock", "busy", 0):
        dry = json.loads(call("cache", "gc", "--dry-run", "--json", capsys=capsys).out)
        assert [Path(r["path"]).name for r in dry["removed"]] == ["cpp-dead-key.x"]
        assert (cache / "staging" / "cpp-dead-key.x").exists()
        done = json.loads(call("cache", "gc", "--json", capsys=capsys).out)
    assert done["removed"] == dry["removed"]
    assert done["bytes"] == 4
    assert [p.name for p in (cache / "staging").iterdir()] == ["cpp-busy-key.x"]
    assert len(listed(capsys)) == 2


def test_gc_takes_old_notes_and_abandoned_imports(
    made: list[Artifact], cache: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Catches folders that no build's lock speaks for: a killed import's stays for ever, a running one's is taken."""
    for name, age in (("import.old", 2 * 3600), ("import.new", 60)):
        folder = cache / "staging" / name
        folder.mkdir()
        os.utime(folder, (time.time() - age,) * 2)
    (cache / "logs" / "old.log").write_text("x")
    os.utime(cache / "logs" / "old.log", (time.time() - 9 * 86400,) * 2)
    assert call("cache", "gc", capsys=capsys).status == 0
    assert [p.name for p in (cache / "staging").iterdir()] == ["import.new"]
    assert [p.name for p in (cache / "logs").iterdir()] == ["old.log"]
    assert call("cache", "gc", "--older-than", "8", capsys=capsys).status == 0
    assert list((cache / "logs").iterdir()) == []
    assert len(listed(capsys)) == 2


def test_gc_takes_what_is_damaged(made: list[Artifact], capsys: pytest.CaptureFixture[str]) -> None:
    """Catches `verify` naming a cure that does nothing."""
    made[0].path.write_text("x")
    (made[1].path.parent / "artifact.json").write_text("{")
    assert call("cache", "verify", capsys=capsys).status == 1
    assert "2 were taken away" in call("cache", "gc", capsys=capsys).out
    assert call("cache", "verify", capsys=capsys).out == "0 good, 0 bad\n"


def test_gc_by_last_use(made: list[Artifact], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Catches an age that counts from the build: a kernel used daily would be built each month."""
    old = time.time() - 40 * 86400
    for artifact in made:
        os.utime(artifact.path.parent / "artifact.json", (old, old))
    standin.make_artifact(tmp_path / "csrc", standin.make(tmp_path / "stand-in").compiler, arch="sm_80")  # used today
    assert call("cache", "gc", "--older-than", "50", capsys=capsys).status == 0
    assert len(listed(capsys)) == 2
    assert "not used for 40 days" in call("cache", "gc", "--older-than", "30", capsys=capsys).out
    assert [r["arch"] for r in listed(capsys)] == ["sm_80"]


def test_gc_keeps_the_newest_of_each(made: list[Artifact], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Catches the older of two kept, or one architecture's taken for another's."""
    compiler = standin.make(tmp_path / "stand-in").compiler
    newer = standin.make_artifact(tmp_path / "csrc", compiler, arch="sm_90", flags=("-O1",))
    assert "there is a newer one" in call("cache", "gc", "--newest-only", capsys=capsys).out
    assert [r["file"] for r in listed(capsys)] == [str(made[0].path), str(newer.path)]


@pytest.mark.parametrize(
    "args", [["gc", "--older-than", "-1"], ["gc", "--older-than", "x"], ["list", "--nope"], ["nope"], ["import"]]
)
def test_what_cannot_be_meant_is_refused(cache: Path, args: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """Catches an option that is ignored."""
    assert call("cache", *args, capsys=capsys).status == 2


def test_the_commands_import_nothing_heavy(made: list[Artifact]) -> None:
    """Catches a list of files that loads torch first."""
    assert rapid_llm("cache", "list").returncode == 0
    from .test_commands import modules_after

    assert not modules_after("cache", "verify") & {"torch", "triton", "numpy"}
