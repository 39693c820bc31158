"""What commands say of files that are not there, or are something else: the name and the way out, no errno."""

from __future__ import annotations

from pathlib import Path

import pytest
import typer

from rapid_llm.cli.support import USAGE, guarded

from .support import call


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAPID_LLM_CACHE_DIR", str(tmp_path / "cache"))


@pytest.mark.parametrize(("name", "says"), [("absent.tar", "does not exist"), (".", "is a folder")])
def test_an_archive_that_is_none(name: str, says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Catches: an import of a file that was mistyped, of which the user sees the system's own words."""
    file = tmp_path / name
    done = call("cache", "import", str(file), capsys=capsys)
    assert done.status == USAGE
    assert f"{file} {says}" in done.err
    assert "rapid-llm cache export" in done.err
    assert "Errno" not in done.err
    assert not (tmp_path / "cache").exists()


def test_a_folder_to_export_to_that_is_not_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Catches: a message about a temporary file that the user never named."""
    done = call("cache", "export", str(tmp_path / "absent" / "kernels.tar"), capsys=capsys)
    assert done.status == USAGE
    assert f"no folder {tmp_path / 'absent'}" in done.err


def test_any_command_names_the_files_and_no_number(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Catches: `[Errno 2]` before the name, of whatever command; one file named of two."""

    def gone() -> None:
        raise OSError("the disk is gone")

    absent, other = tmp_path / "absent", tmp_path / "other"
    for work, says in (
        (absent.read_bytes, f"{absent}: no such file or directory"),
        (lambda: absent.rename(other), f"{absent} -> {other}: no such file or directory"),
        (gone, "the disk is gone"),
    ):
        with pytest.raises(typer.Exit) as ended:
            guarded(work)()
        assert ended.value.exit_code == 1
        said = capsys.readouterr().err
        assert says in said
        assert "Errno" not in said
