"""SamplingParams: every field has a range, and every error names field, value and range."""

from __future__ import annotations

import dataclasses
from fractions import Fraction
from typing import Any

import numpy as np
import pytest

from rapid_llm.engine.params import ParameterError, SamplingParams


def test_defaults_are_the_documented_ones() -> None:
    """E95: catches a default that moves; these are the interface's, written out."""
    given = {f.name: f.default for f in dataclasses.fields(SamplingParams)}
    assert given == {
        "n": 1,
        "temperature": 1.0,
        "top_k": -1,
        "top_p": 1.0,
        "min_p": 0.0,
        "max_tokens": 16,
        "min_tokens": 0,
        "stop": None,
        "stop_token_ids": None,
        "include_stop_str_in_output": False,
        "ignore_eos": False,
        "seed": None,
        "logprobs": None,
        "prompt_logprobs": None,
        "repetition_penalty": 1.0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "logit_bias": None,
        "skip_special_tokens": True,
    }


GOOD: list[tuple[str, Any]] = [
    ("n", 128),
    ("temperature", 0),
    ("temperature", 100),
    ("temperature", np.float32(0.5)),
    ("temperature", Fraction(1, 2)),
    ("top_k", 0),
    ("top_k", 10**6),
    ("top_k", np.int64(5)),
    ("top_p", 0),
    ("top_p", 1),
    ("min_p", 1.0),
    ("max_tokens", None),
    ("max_tokens", 1),
    ("stop", "x"),
    ("stop", ["x", "yy"]),
    ("stop", ()),
    ("stop_token_ids", [0, np.int32(3)]),
    ("seed", 0),
    ("seed", -(2**63)),
    ("seed", 2**63 - 1),
    ("logprobs", 0),
    ("logprobs", 20),
    ("repetition_penalty", 1),
    ("presence_penalty", -0.0),
    ("logit_bias", {}),
]


@pytest.mark.parametrize(("field", "value"), GOOD)
def test_accepted(field: str, value: Any) -> None:
    """Catches a bound that is off by one, and a number type refused for its class."""
    SamplingParams(**{field: value})


BAD: list[tuple[str, Any, str]] = [
    ("n", 0, "from 1 to 128"),
    ("n", 10**9, "from 1 to 128"),
    ("n", True, "an integer"),
    ("n", 1.0, "an integer"),
    ("n", None, "an integer"),
    ("temperature", -0.1, "from 0 to 100"),
    ("temperature", 100.5, "from 0 to 100"),
    ("temperature", float("nan"), "a finite number"),
    ("temperature", float("inf"), "a finite number"),
    ("temperature", "0", "a finite number"),
    ("temperature", True, "a finite number"),
    ("temperature", None, "a finite number"),
    ("temperature", 10**400, "a finite number"),
    ("top_k", -2, "from -1 to 2147483647 .-1 and 0 are off."),
    ("top_k", 2**31, "from -1 to 2147483647"),
    ("top_k", 5.0, "an integer"),
    ("top_p", 1.0001, "from 0 to 1"),
    ("top_p", -1e-9, "from 0 to 1"),
    ("top_p", np.float64("nan"), "from 0 to 1"),
    ("min_p", 2, "from 0 to 1"),
    ("max_tokens", 0, "from 1 to"),
    ("max_tokens", "16", "an integer"),
    ("min_tokens", -1, "from 0 to"),
    ("min_tokens", 17, "at most max_tokens, which is 16"),
    ("stop", "", "a non-empty string"),
    ("stop", ["a", ""], "a non-empty string"),
    ("stop", [1], "a non-empty string"),
    ("stop", 1, "a non-empty string"),
    ("stop", b"x", "a non-empty string"),
    ("stop", {"a": 1}, "a non-empty string"),
    ("stop", "\ud83d", "without lone surrogates"),
    ("stop_token_ids", [-1], "from 0 to"),
    ("stop_token_ids", [True], "token ids"),
    ("stop_token_ids", [2**31], "token ids"),
    ("stop_token_ids", "12", "token ids"),
    ("stop_token_ids", 5, "token ids"),
    ("include_stop_str_in_output", 1, "True or False"),
    ("ignore_eos", None, "True or False"),
    ("skip_special_tokens", "no", "True or False"),
    ("seed", 2**63, "an integer"),
    ("seed", "7", "an integer"),
    ("seed", True, "an integer"),
    ("logprobs", 21, "from 0 to 20"),
    ("logprobs", -1, "from 0 to 20"),
    ("logprobs", True, "an integer"),
]


@pytest.mark.parametrize(("field", "value", "accepted"), BAD)
def test_refused(field: str, value: Any, accepted: str) -> None:
    """E49, E50, E51: catches a value let through, and an error that does not name field, value and range."""
    with pytest.raises(ParameterError, match=rf"^{field}=.* is not accepted; use .*{accepted}") as caught:
        SamplingParams(**{field: value})
    assert caught.value.field == field
    assert repr(value)[:70] in str(caught.value) or field == "min_tokens"
    assert len(str(caught.value)) < 250


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("prompt_logprobs", 0),
        ("prompt_logprobs", -1),
        ("repetition_penalty", 1.1),
        ("repetition_penalty", None),
        ("repetition_penalty", True),
        ("presence_penalty", 0.5),
        ("presence_penalty", False),
        ("frequency_penalty", float("nan")),
        ("frequency_penalty", "0"),
        ("logit_bias", {5: 1.0}),
        ("logit_bias", 0),
    ],
)
def test_what_the_engine_does_not_do_is_refused(field: str, value: Any) -> None:
    """E45: catches a parameter that is accepted and ignored."""
    with pytest.raises(ParameterError, match=f"{field}.* does not carry out {field}"):
        SamplingParams(**{field: value})


def test_unknown_fields_are_impossible() -> None:
    with pytest.raises(TypeError, match="best_of"):
        SamplingParams(best_of=2)  # type: ignore[call-arg]
    with pytest.raises(AttributeError):
        SamplingParams().top_k = 5  # type: ignore[misc]


def test_greedy() -> None:
    """E41, E42: catches top_k 0 read as greedy, and top_p 0 turned into 1 because it is falsy."""
    assert SamplingParams(temperature=0).greedy
    assert SamplingParams(temperature=1e-6).greedy
    assert SamplingParams(top_p=0).greedy
    assert not SamplingParams(top_k=0).greedy
    assert not SamplingParams(top_k=-1).greedy
    assert not SamplingParams().greedy
    assert SamplingParams(top_p=0).top_p == 0.0


def test_values_are_normalised() -> None:
    """Catches a NumPy scalar or an iterator kept as it came: parameters are hashable and safe to read twice."""
    params = SamplingParams(
        temperature=1,
        top_k=np.int64(3),
        stop=iter(["b", "a", "b"]),
        stop_token_ids=(t for t in (3, 1, 3)),
        logit_bias={},
    )
    assert (type(params.temperature), type(params.top_k)) == (float, int)
    assert params.stop_strings == params.stop == ("b", "a")
    assert params.stop_ids == params.stop_token_ids == (3, 1)
    assert SamplingParams(stop="ab").stop_strings == ("ab",)
    assert SamplingParams().stop_strings == SamplingParams().stop_ids == ()
    assert hash(params) == hash(dataclasses.replace(params))


def test_check_vocab() -> None:
    """E51: catches an id that would write another row of a mask; the vocabulary is known only to the engine."""
    SamplingParams(stop_token_ids=[0, 99]).check_vocab(100)
    with pytest.raises(ParameterError, match="stop_token_ids=100 is not accepted; use token ids from 0 to 99"):
        SamplingParams(stop_token_ids=[5, 100]).check_vocab(100)
