"""Schema strings are read exactly: a wrong default or a lost mutation mark would reach every generated function."""

from __future__ import annotations

import pytest

from rapid_llm.kernels.registry.schema import REQUIRED, parse


def test_every_part_of_a_schema_is_read() -> None:
    schema = parse("(Tensor(a!) x, Tensor? bias=None, float eps=1e-06, *, str scheme='a,b', bool flag=True) -> ()")
    assert [a.name for a in schema.args] == ["x", "bias", "eps", "scheme", "flag"]
    assert schema.mutated == ("x",)
    assert [a.optional for a in schema.args] == [False, True, False, False, False]
    assert [a.default for a in schema.args[1:]] == [None, 1e-6, "a,b", True]
    assert [a.name for a in schema.keyword_only] == ["scheme", "flag"]
    assert schema.returns == 0


def test_out_is_added_only_to_ops_with_one_result() -> None:
    names = [name for name, _, _ in parse("(Tensor x, *, int n=2) -> Tensor").parameters()]
    assert names == ["x", "out", "n"]
    assert parse("(Tensor x) -> Tensor").parameters()[0] == ("x", "pos", REQUIRED)
    assert [n for n, _, _ in parse("(Tensor(a!) x) -> ()").parameters()] == ["x"]
    assert parse("(Tensor x) -> (Tensor, Tensor)").returns == 2


@pytest.mark.parametrize(
    "text",
    [
        "Tensor x -> Tensor",
        "(Tensr x) -> Tensor",
        "(Tensor x, Tensor x) -> Tensor",
        "(Tensor out) -> Tensor",
        "(Tensor x) -> int",
    ],
)
def test_what_is_not_understood_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"schema|argument"):
        parse(text)
