"""Environment variables: misspelt ones are reported with the nearest name, bad values are errors (P53)."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from rapid_llm import settings
from rapid_llm.kernels import explain
from rapid_llm.kernels.registry import dispatcher


def test_unknown_variables_are_reported_with_the_nearest_name(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("RAPID_LLM_FORCE_BACKND", "native")
    monkeypatch.setenv("RAPID_LLM_RMSNRM_BACKEND", "native")
    monkeypatch.setattr(dispatcher, "_seen", [None])
    with caplog.at_level(logging.WARNING, "rapid_llm"):
        explain("scale", device="cpu", dtype="fp32")
    assert "RAPID_LLM_FORCE_BACKND is ignored; did you mean RAPID_LLM_FORCE_BACKEND?" in caplog.text
    assert "did you mean RAPID_LLM_RMSNORM_BACKEND?" in caplog.text


def test_a_flag_takes_only_flag_values(monkeypatch: pytest.MonkeyPatch) -> None:
    for text, value in (("1", True), ("true", True), ("0", False), ("", False), ("off", False)):
        monkeypatch.setenv("RAPID_LLM_STRICT", text)
        assert settings.strict() is value
    monkeypatch.setenv("RAPID_LLM_STRICT", "maybe")
    with pytest.raises(settings.SettingError, match="RAPID_LLM_STRICT='maybe': use 1 or 0"):
        settings.strict()


def test_the_cache_follows_its_variable_then_xdg_then_home(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAPID_LLM_CACHE_DIR", "/a")
    monkeypatch.setenv("XDG_CACHE_HOME", "/x")
    monkeypatch.setenv("HOME", "/h")
    assert settings.cache_dir() == Path("/a")
    monkeypatch.delenv("RAPID_LLM_CACHE_DIR")
    assert settings.cache_dir() == Path("/x/rapid_llm")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert settings.cache_dir() == Path("/h/.cache/rapid_llm")


def test_the_prefix_is_no_likeness(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches: the nearest name found by the ten letters that all names share."""
    for name, _ in settings.snapshot():
        monkeypatch.delenv(name)
    for name, nearest in (
        ("RAPID_LLM_JITT", "RAPID_LLM_JIT"),
        ("RAPID_LLM_SCALE_BACKNED", "RAPID_LLM_SCALE_BACKEND"),
        ("RAPID_LLM_QUIET", None),
    ):
        monkeypatch.setenv(name, "1")
        assert settings.unknown(["scale"]) == [(name, nearest)]
        monkeypatch.delenv(name)


def test_a_home_that_is_nobodys_is_an_error_with_the_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches: pathlib's own error, which names neither the variable nor its value."""
    for name, read in (("RAPID_LLM_CACHE_DIR", settings.cache_dir), ("RAPID_LLM_TRACE", settings.trace_file)):
        monkeypatch.setenv(name, "~nosuchuser/x")
        with pytest.raises(settings.SettingError, match=f"{name}='~nosuchuser/x': ~nosuchuser is no user's home"):
            read()
