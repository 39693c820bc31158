"""How an external library is described: versions, signatures, and the texts that follow from them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest

from rapid_llm.kernels.backend._library import Call, Library, Recipe, mismatch
from tests.kernels.backend.libraries import install

RECIPE = Recipe("pip install lib", "https://example.org/lib", ("needs a GPU",))


def described(**changes: Any) -> Library:
    fields: dict[str, Any] = {"minimum": "1.2", "below": "2", "calls": MappingProxyType({}), **changes}
    return Library(module="scratch_lib", distributions=("other_name", "scratch_lib"), recipe=RECIPE, **fields)


@pytest.mark.parametrize(
    ("version", "taken"),
    [
        *(("1.2", True), ("1.2.0", True), ("1.10", True), ("1.2.1+cu128", True), ("1.2.post3", True), ("v1.9", True)),
        *(("1.1.9", False), ("1.2rc1", False), ("2.0", False), ("2", False), ("2.0rc1", False), ("nightly", False)),
    ],
)
def test_versions(version: str, taken: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches: 1.10 before 1.2, a release candidate of the next interface taken for the old one, a local part that
    counts."""
    monkeypatch.setenv("RAPID_LLM_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.syspath_prepend(str(tmp_path))
    install(tmp_path, "scratch_lib", "x = 1", version)
    probe = described().probe()
    assert probe.ok == taken
    if not taken:
        assert probe.text == f"scratch_lib is version {version}; this package calls >=1.2,<2"
        assert probe.fix == "pip install lib (needs a GPU; https://example.org/lib)"


def test_no_bounds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAPID_LLM_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.syspath_prepend(str(tmp_path))
    install(tmp_path, "scratch_lib", "x = 1", "0.0.1")
    assert described(minimum=None, below=None).probe().ok
    assert described(minimum=None, below=None).bounds == "any version"


class Upstream:
    def method(self, x: int, *, mode: str = "fast") -> None: ...

    @staticmethod
    def static(size: int) -> None: ...


def plain(a: int, b: int, c: int = 0) -> None: ...
def anything(*args: object, **kwargs: object) -> None: ...
def keyword(a: int, *, flag: bool) -> None: ...


def bound_in_cpp() -> Callable[..., None]:
    """As pybind11 leaves a function: no signature, but one in the docstring."""

    class Function:
        __doc__ = (
            "gemm(a: tuple[torch.Tensor, torch.Tensor], b: torch.Tensor, d: Optional[tuple[int, int]] = None, "
            "dims: str = 'nk', **kwargs) -> None\n\nMultiplies.\n"
        )
        __signature__ = "none"

        def __call__(self) -> None: ...

    return Function()


@pytest.mark.parametrize(
    ("function", "call", "problem"),
    [
        (plain, Call("m:plain", ("a", "b")), ""),
        (plain, Call("m:plain", ("a",), ("b", "c")), ""),
        (plain, Call("m:plain", ("a", "x|b")), ""),
        (plain, Call("m:plain", ("a", "x")), "has argument 'b' in place 2, where 'x' is passed"),
        (plain, Call("m:plain", ("a", "b", "c", "d")), "has no argument 'd' in place 4: it takes (a, b, c)"),
        (plain, Call("m:plain", ("a",), ("b", "scale")), "has no argument 'scale'"),
        (plain, Call("m:plain", ("a",)), "demands an argument 'b' that is not passed"),
        (anything, Call("m:anything", ("a", "b"), ("c",)), ""),
        (keyword, Call("m:keyword", ("a", "flag")), "has no argument 'flag' in place 2"),
        (keyword, Call("m:keyword", ("a",)), "demands an argument 'flag'"),
        (Upstream.method, Call("m:Upstream.method", ("x",), ("mode",)), ""),
        (Upstream.method, Call("m:Upstream.method", ("y",)), "has argument 'x' in place 1"),
        (Upstream.static, Call("m:Upstream.static", ("size",)), ""),
        (bound_in_cpp(), Call("m:gemm", ("a", "b"), ("dims", "extra")), ""),
        (bound_in_cpp(), Call("m:gemm", ("a", "c")), "has argument 'b' in place 2, where 'c' is passed"),
        (bound_in_cpp(), Call("m:gemm", ("a",)), "demands an argument 'b'"),
        (dict.fromkeys, Call("m:dict.fromkeys", ("iterable",)), ""),
    ],
)
def test_a_call_is_held_against_the_signature(function: Callable[..., Any], call: Call, problem: str) -> None:
    """Catches: a rename, a reorder, a new mandatory argument that would only show in the middle of a request; and a
    good call refused because of `self`, `**kwargs` or a C++ function."""
    found = mismatch(function, call)
    assert found.startswith(problem) if problem else found == ""
