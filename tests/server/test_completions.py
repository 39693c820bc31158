"""/v1/completions as clients see it, on a model of bytes whose every answer the engine itself can tell."""

from __future__ import annotations

from typing import Any

import pytest

from rapid_llm import SamplingParams

from .live import Live

PATH = "/v1/completions"


def offline(server: Live, prompt: Any, **params: Any) -> Any:
    """What the engine says without the server."""
    return server.llm.generate(prompt, SamplingParams(**params))[0]


def streamed(events: list[dict[str, Any]], index: int = 0) -> str:
    return "".join(c["text"] for e in events for c in e["choices"] if c["index"] == index)


def test_an_answer_is_the_engines(server: Live) -> None:
    """E18. Catches: a parameter that is lost or changed on the way, and a shape that OpenAI's clients do not read."""
    wanted = offline(server, "hello", temperature=0.8, seed=5, max_tokens=12, top_k=20)
    answer = server.complete("hello", temperature=0.8, seed=5, max_tokens=12, top_k=20)
    (choice,) = answer["choices"]
    assert choice["text"] == wanted.outputs[0].text
    assert (choice["index"], choice["finish_reason"], choice["logprobs"]) == (0, "length", None)
    assert answer["object"] == "text_completion"
    assert answer["model"] == "mock"
    assert {k: answer["usage"][k] for k in ("prompt_tokens", "completion_tokens", "total_tokens")} == {
        "prompt_tokens": 5,
        "completion_tokens": 12,
        "total_tokens": 17,
    }


def test_ids_are_a_prompt_as_text_is(server: Live) -> None:
    """Catches: a prompt of ids that is taken for several prompts."""
    params = {"temperature": 0, "max_tokens": 6}
    assert server.text([104, 105], **params) == server.text("hi", **params)
    answer = server.complete([[104, 105], [97]], **params)
    texts = [choice["text"] for choice in answer["choices"]]
    assert texts == [server.text("hi", **params), server.text("a", **params)]
    assert answer["usage"]["prompt_tokens"] == 3


def test_several_prompts_and_samples_keep_their_order(server: Live) -> None:
    """Catches: choices numbered in another way than prompt by prompt, sample by sample."""
    answer = server.complete(["ab", "cd"], n=2, seed=3, max_tokens=5)
    wanted = [
        output.text for prompt in ("ab", "cd") for output in offline(server, prompt, n=2, seed=3, max_tokens=5).outputs
    ]
    assert [choice["text"] for choice in answer["choices"]] == wanted
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2, 3]


def test_a_stream_joins_to_the_answer(server: Live) -> None:
    """Catches: a delta that is lost, doubled, or comes after the end."""
    fields = {"prompt": "stream", "temperature": 0.9, "seed": 1, "max_tokens": 20}
    events = server.stream(PATH, fields)
    assert streamed(events) == server.complete(**fields)["choices"][0]["text"]
    reasons = [event["choices"][0]["finish_reason"] for event in events]
    assert reasons == [None] * (len(events) - 1) + ["length"]
    assert len({event["id"] for event in events}) == 1
    assert len(events) > 5, "it came all at once"


def test_streams_of_several_samples_do_not_mix(server: Live) -> None:
    """E87. Catches: n > 1 whose deltas carry another sample's index or text."""
    fields = {"prompt": ["one", "two"], "n": 3, "seed": 11, "max_tokens": 9}
    events = server.stream(PATH, fields)
    wanted = [choice["text"] for choice in server.complete(**fields)["choices"]]
    assert [streamed(events, i) for i in range(6)] == wanted
    assert len(set(wanted)) > 3
    ends = [c["index"] for e in events for c in e["choices"] if c["finish_reason"]]
    assert sorted(ends) == list(range(6))


def test_usage_comes_when_asked_for_and_then_alone(server: Live) -> None:
    """E86. Catches: a usage event with choices, or one that nobody asked for, and figures of another answer."""
    fields = {"prompt": "usage", "max_tokens": 4, "temperature": 0}
    plain = server.stream(PATH, fields)
    assert all("usage" not in event and event["choices"] for event in plain)
    assert server.stream(PATH, {**fields, "stream_options": {"include_usage": False}})[-1]["choices"]
    *events, last = server.stream(PATH, {**fields, "stream_options": {"include_usage": True}})
    assert last["choices"] == []
    assert last["usage"]["completion_tokens"] == 4
    assert all(event["usage"] is None and event["choices"] for event in events)
    assert server.refusal(PATH, {**fields, "stream_options": {"include_usage": True}})[:2] == (400, "stream_options")


def test_finish_reasons(server: Live) -> None:
    """E85. Catches: an end that is told as another, or as none."""
    full = server.text("reasons", temperature=0, max_tokens=12)
    stop = full[4:6]
    found = server.complete("reasons", temperature=0, max_tokens=12, stop=stop)["choices"][0]
    assert (found["text"], found["finish_reason"], found["stop_reason"]) == (full[: full.index(stop)], "stop", stop)
    found = server.complete("reasons", temperature=0, max_tokens=12, stop_token_ids=[ord(full[2])])["choices"][0]
    assert (found["finish_reason"], found["stop_reason"]) == ("stop", ord(full[2]))
    found = server.complete("reasons", temperature=0, max_tokens=5, logit_bias={"257": 100})["choices"][0]
    assert (found["text"], found["finish_reason"], found["stop_reason"]) == ("", "stop", None)


def test_bytes_that_are_no_text_are_answered(server: Live) -> None:
    """E5. Catches: an answer of one lone byte that kills the response at JSON."""
    answer = server.complete("x", max_tokens=1, logit_bias={"200": 100}, temperature=0, logprobs=1)
    choice = answer["choices"][0]
    assert choice["text"] == "\ufffd"
    assert choice["logprobs"]["tokens"] == ["bytes:\\xc8"]


def test_logprobs_are_the_engines(server: Live) -> None:
    """Catches: log-probabilities of another token or position, alternatives out of order, and offsets that drift."""
    fields = {"temperature": 0, "max_tokens": 6}
    wanted = offline(server, "probs", logprobs=3, **fields).outputs[0]
    found = server.complete("probs", logprobs=3, **fields)["choices"][0]["logprobs"]
    assert found["tokens"] == [bytes([token]).decode(errors="replace") for token in wanted.token_ids]
    for i, token in enumerate(wanted.token_ids):
        at = wanted.logprobs[i]
        assert found["token_logprobs"][i] == at[token].logprob
        best = sorted((entry.rank, entry.logprob) for entry in at.values() if entry.rank <= 3)
        assert list(found["top_logprobs"][i].values()) == [logprob for _, logprob in best]
    assert found["text_offset"] == list(range(6))
    events = server.stream(PATH, {"prompt": "probs", "logprobs": 3, **fields})
    parts = [c["logprobs"] for e in events for c in e["choices"] if c["logprobs"]]
    joined = {name: [value for part in parts for value in part[name]] for name in found}
    assert joined == found


def test_echo_puts_the_prompt_in_front_of_text_and_logprobs(server: Live) -> None:
    """Catches: an echo without the prompt's log-probabilities, which evaluation harnesses read, or with others."""
    fields = {"temperature": 0, "max_tokens": 3}
    plain = server.text("echo", **fields)
    choice = server.complete("echo", echo=True, logprobs=0, **fields)["choices"][0]
    assert choice["text"] == "echo" + plain
    assert choice["logprobs"]["tokens"] == list("echo" + plain)
    prompt = offline(server, "echo", prompt_logprobs=0, **fields).prompt_logprobs
    wanted = [None, *(prompt[i][ord("echo"[i])].logprob for i in range(1, 4))]
    assert choice["logprobs"]["token_logprobs"][:4] == wanted
    assert choice["logprobs"]["text_offset"] == list(range(7))
    assert streamed(server.stream(PATH, {"prompt": "echo", "echo": True, **fields})) == "echo" + plain


def test_prompt_logprobs_stand_beside_the_choice(server: Live) -> None:
    """Catches: a field that is taken and not answered."""
    choice = server.complete("abc", prompt_logprobs=1, max_tokens=1)["choices"][0]
    assert choice["prompt_logprobs"][0] is None
    assert [at[0]["token"] for at in choice["prompt_logprobs"][1:]]
    assert len(choice["prompt_logprobs"]) == 3
    assert server.refusal(PATH, {"prompt": "abc", "prompt_logprobs": 1, "stream": True})[:2] == (400, "prompt_logprobs")


def test_zero_values_are_values(server: Live) -> None:
    """E42. Catches: `x or default` on 0: top_p 0 is greedy, temperature 0 is, top_k 0 is off."""
    greedy = server.text("zero", temperature=0, max_tokens=8)
    assert server.text("zero", top_p=0, max_tokens=8) == greedy
    assert server.text("zero", top_k=0, seed=4, max_tokens=8) == server.text("zero", top_k=-1, seed=4, max_tokens=8)
    assert server.complete("zero", logprobs=0, max_tokens=2)["choices"][0]["logprobs"]["top_logprobs"] == [{}, {}]


def test_every_optional_field_may_be_null(server: Live) -> None:
    """E37. Catches: a null that is taken for a value, or fails: all null is the same as all absent."""
    from rapid_llm.server.protocol import UNSUPPORTED, CompletionRequest

    names = set(CompletionRequest.model_fields) - {"prompt"}
    nulls = dict.fromkeys([*names, *UNSUPPORTED], None)
    assert len(nulls) > 30
    base = {"prompt": "null", "max_tokens": 5, "seed": 9}
    status, answer = server.post(PATH, {**nulls, **base})
    assert status == 200, answer
    assert answer["choices"] == server.complete(**base)["choices"]


def test_the_default_length_is_the_librarys(server: Live) -> None:
    """Catches a second table of defaults."""
    assert server.complete("d", ignore_eos=True)["usage"]["completion_tokens"] == SamplingParams().max_tokens == 16


def test_a_schema_holds_the_answer(server: Live) -> None:
    """Catches: response_format accepted and ignored."""
    import json

    pytest.importorskip("llguidance")
    schema = {
        "type": "object",
        "properties": {"ok": {"type": "boolean"}},
        "required": ["ok"],
        "additionalProperties": False,
    }
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    text = server.text("json", response_format=form, max_tokens=60, seed=1)
    assert isinstance(json.loads(text)["ok"], bool)
    assert server.text("pick", structured={"choices": ["yes", "no"]}, max_tokens=9, seed=2) in ("yes", "no")
    bad = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "nonsense"}}}
    assert server.refusal(PATH, {"prompt": "x", "response_format": bad})[0] == 400
    missing = {"type": "json_schema", "json_schema": {"name": "x"}}
    assert server.refusal(PATH, {"prompt": "x", "response_format": missing})[:2] == (400, "response_format.json_schema")


def test_requests_of_another_salt_share_no_prefix(server: Live) -> None:
    """Catches: cache_salt accepted and ignored."""
    prompt = "a prompt that is much longer than one page of the cache, so that it can be found again"

    def cached(salt: str) -> int:
        answer = server.complete(prompt, max_tokens=1, cache_salt=salt)
        return answer["usage"]["prompt_tokens_details"]["cached_tokens"]

    assert cached("one") == 0
    assert cached("one") > 16
    assert cached("two") == 0
