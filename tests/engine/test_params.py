"""SamplingParams: every field has a range, and every error names field, value and range."""

from __future__ import annotations

import dataclasses
from fractions import Fraction
from typing import Any

import numpy as np
import pytest

from rapid_llm.engine.params import ParameterError, SamplingParams, StructuredOutput


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
        "structured": None,
        "echo": False,
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
    ("stop", [str(i) for i in range(64)]),
    ("stop_token_ids", [0, np.int32(3)]),
    ("seed", 0),
    ("seed", -(2**63)),
    ("seed", 2**63 - 1),
    ("logprobs", 0),
    ("logprobs", 20),
    ("prompt_logprobs", 0),
    ("prompt_logprobs", 20),
    ("repetition_penalty", 1),
    ("repetition_penalty", 0.01),
    ("repetition_penalty", 100),
    ("presence_penalty", -0.0),
    ("presence_penalty", -2),
    ("frequency_penalty", 2.0),
    ("logit_bias", {}),
    ("logit_bias", {0: -100, "17": 100, np.int64(5): np.float32(0.5)}),
    ("logit_bias", ((3, 1.0),)),
    ("logit_bias", dict.fromkeys(range(1024), 1.0)),
    ("structured", {"regex": "a+", "grammar": None}),
    ("structured", StructuredOutput(choices=["a"])),
    ("echo", True),
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
    ("stop", [str(i) for i in range(65)], "at most 64 strings, not 65"),
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
    ("prompt_logprobs", -1, "from 0 to 20"),
    ("prompt_logprobs", 21, "from 0 to 20"),
    ("repetition_penalty", 0, "from 0.01 to 100 .1 is off."),
    ("repetition_penalty", -1.5, "from 0.01 to 100"),
    ("repetition_penalty", None, "a finite number"),
    ("repetition_penalty", True, "a finite number"),
    ("presence_penalty", 2.01, "from -2 to 2 .0 is off."),
    ("presence_penalty", False, "a finite number"),
    ("frequency_penalty", float("nan"), "from -2 to 2"),
    ("frequency_penalty", "0", "a finite number"),
    ("logit_bias", 0, "token ids, integers from 0 to 2147483647"),
    ("logit_bias", [5], "token ids"),
    ("logit_bias", "5", "token ids"),
    ("logit_bias", {-1: 1.0}, "each with a finite number from -100 to 100"),
    ("logit_bias", {2**31: 1.0}, "token ids"),
    ("logit_bias", {"x": 1.0}, "token ids"),
    ("logit_bias", {"-1": 1.0}, "token ids"),
    ("logit_bias", {"\u0663": 1.0}, "token ids"),
    ("logit_bias", {True: 1.0}, "token ids"),
    ("logit_bias", {5: 101}, "from -100 to 100"),
    ("logit_bias", {5: float("nan")}, "from -100 to 100"),
    ("logit_bias", {5: float("-inf")}, "from -100 to 100"),
    ("logit_bias", {5: True}, "from -100 to 100"),
    ("logit_bias", {5: None}, "from -100 to 100"),
    ("logit_bias", dict.fromkeys(range(1025), 1.0), "at most 1024 token ids, not 1025"),
    ("structured", "a+", "a StructuredOutput or a mapping with exactly one of json_schema, json_object"),
    ("structured", {"regexp": "a"}, "exactly one of"),
    ("echo", 1, "True or False"),
]


@pytest.mark.parametrize(("field", "value", "accepted"), BAD)
def test_refused(field: str, value: Any, accepted: str) -> None:
    """E49, E50, E51: catches a value let through, and an error that does not name field, value and range."""
    with pytest.raises(ParameterError, match=rf"^{field}=.* is not accepted; use .*{accepted}") as caught:
        SamplingParams(**{field: value})
    assert caught.value.field == field
    assert repr(value)[:70] in str(caught.value) or field == "min_tokens"
    assert len(str(caught.value)) < 250


def test_values_that_exclude_each_other_are_refused() -> None:
    """Catches a combination of which one half would be ignored, and a token that has two biases."""
    with pytest.raises(ParameterError, match="ignore_eos=True is not accepted; use False with structured"):
        SamplingParams(structured={"regex": "a"}, ignore_eos=True)
    with pytest.raises(ParameterError, match="use token 5 once"):
        SamplingParams(logit_bias={"5": 1.0, 5: 2.0})


def test_null_is_the_same_as_absent() -> None:
    """E37. Catches a null that reaches a range check, or that replaces a default by None."""
    names = [f.name for f in dataclasses.fields(SamplingParams)]
    assert SamplingParams.of(dict.fromkeys([*names, "max_completion_tokens"])) == SamplingParams.of({})
    assert SamplingParams.of({}) == SamplingParams()
    given = SamplingParams.of(
        {"temperature": 0, "top_k": None, "stop": None, "structured": {"regex": "a", "grammar": None}}
    )
    assert given == SamplingParams(temperature=0, structured={"regex": "a"})


def test_max_completion_tokens_is_max_tokens() -> None:
    """E38. Catches the newer name passed over: the answer would have another length."""
    assert SamplingParams.of({"max_completion_tokens": 3}).max_tokens == 3
    assert SamplingParams.of({"max_completion_tokens": 3, "max_tokens": 3}).max_tokens == 3
    assert SamplingParams.of({"max_completion_tokens": 3, "max_tokens": None}).max_tokens == 3
    with pytest.raises(ParameterError, match=r"max_completion_tokens=3 .* the same value as max_tokens") as caught:
        SamplingParams.of({"max_tokens": 4, "max_completion_tokens": 3})
    assert caught.value.field == "max_completion_tokens"
    with pytest.raises(ParameterError, match="max_tokens=0"):
        SamplingParams.of({"max_completion_tokens": 0})


def test_an_unknown_name_is_refused_with_the_nearest() -> None:
    """Catches a misspelt field that is accepted and ignored."""
    with pytest.raises(ParameterError, match=r"temprature=0.5 .* a parameter that exists: temperature"):
        SamplingParams.of({"temprature": 0.5})
    with pytest.raises(ParameterError, match=r"best_of=2 .* one of echo, frequency_penalty"):
        SamplingParams.of({"best_of": 2})


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
        logit_bias={"7": 1, 3: np.float64(-2.5)},
    )
    assert (type(params.temperature), type(params.top_k)) == (float, int)
    assert params.stop_strings == params.stop == ("b", "a")
    assert params.stop_ids == params.stop_token_ids == (3, 1)
    assert params.biases == params.logit_bias == ((3, -2.5), (7, 1.0))
    assert [type(part) for part in params.biases[1]] == [int, float]
    assert SamplingParams(stop="ab").stop_strings == ("ab",)
    assert SamplingParams().stop_strings == SamplingParams().stop_ids == ()
    assert hash(params) == hash(dataclasses.replace(params))
    structured = SamplingParams(structured={"json_schema": {"type": "integer"}})
    assert hash(structured) == hash(dataclasses.replace(structured))


def test_check_vocab() -> None:
    """E51: catches an id that would write another row of a mask; the vocabulary is known only to the engine."""
    SamplingParams(stop_token_ids=[0, 99]).check_vocab(100)
    with pytest.raises(ParameterError, match="stop_token_ids=100 is not accepted; use token ids from 0 to 99"):
        SamplingParams(stop_token_ids=[5, 100]).check_vocab(100)
    SamplingParams(logit_bias={0: 1, 99: 1}).check_vocab(100)
    with pytest.raises(ParameterError, match="logit_bias=100 is not accepted; use token ids from 0 to 99"):
        SamplingParams(logit_bias={5: 1, 100: 1}).check_vocab(100)
