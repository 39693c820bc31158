"""What an answer is made of: text, ids, log-probabilities, echo and the reason of its end."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch

from rapid_llm import SamplingParams
from rapid_llm.cli.generate import as_json
from rapid_llm.engine.job import Job
from rapid_llm.engine.outputs import Logprob
from rapid_llm.engine.sampler import RawLogprob

from .conftest import make_llm
from .mocks import BOS, EOS, byte_tokenizer, random_logits, scripted


def make_job(params: SamplingParams, ids: list[int], prompt: str | None = None) -> Job:
    tokenizer = byte_tokenizer()
    return Job(
        "1", prompt, ids, params, vocabulary=tokenizer, end_ids=tokenizer.end_ids, key=1, max_len=99, arrival=0.0,
        vocab_size=tokenizer.vocab_size,
    )  # fmt: skip


def test_echo_puts_the_prompt_in_front_of_every_sample() -> None:
    """Catches an echo that streams do not show, that samples share, that stop strings are found in, or that comes
    twice; and ids that are not decoded, or with control tokens where the answer has none."""
    llm = make_llm(scripted({tuple(b"pq"): [*b"xyz"], (BOS, *b"pq"): [*b"xyz"], (BOS,): [*b"s"]}))
    params = SamplingParams(temperature=0, echo=True, stop="pqx", n=2, logprobs=0)
    for prompt, shown in (("pq", "pq"), ([*b"pq"], "pq"), ("<|im_start|>pq", "<|im_start|>pq"), ([BOS, *b"pq"], "pq")):
        (output,) = llm.generate(prompt, params)
        deltas = list(llm.stream(prompt, params))
        for sample in output.outputs:
            assert (sample.text, sample.token_ids) == (f"{shown}xyz", [*b"xyz", EOS])
            assert len(sample.logprobs) == 4
            own = [delta for delta in deltas if delta.sample_index == sample.index]
            assert own[0].startswith(shown)
            assert "".join(own) == sample.text
    whole = SamplingParams(temperature=0, echo=True, skip_special_tokens=False)
    assert llm.generate([BOS], whole)[0].outputs[0].text == "<|im_start|>s"


def test_an_answer_that_ends_at_once_still_echoes() -> None:
    """Catches an echo that is lost where no token comes: an end token first, or a step that gave none."""
    llm = make_llm(scripted({tuple(b"p"): []}))
    params = SamplingParams(temperature=0, echo=True)
    assert llm.generate("p", params)[0].outputs[0].text == "".join(llm.stream("p", params)) == "p"
    broken = make_llm(lambda history: np.full(260, np.nan, dtype=np.float32))
    assert broken.generate("p", params)[0].outputs[0].text == "".join(broken.stream("p", params)) == "p"


@pytest.mark.parametrize("include", [False, True])
def test_a_stop_cuts_the_text_and_leaves_ids_and_logprobs_alike(include: bool) -> None:
    """E13. Catches log-probabilities that are not cut with the ids: one entry a token, whatever ended it."""
    llm = make_llm(scripted({tuple(b"p"): [*b"one, two"]}))
    ends = ({"stop": "e, t"}, {"stop_token_ids": [ord("w")]}, {"max_tokens": 3}, {"stop": "z"})
    for end in ends:
        params = SamplingParams(temperature=0, logprobs=2, include_stop_str_in_output=include, **end)
        answer = llm.generate("p", params)[0].outputs[0]
        assert len(answer.logprobs) == len(answer.token_ids) > 0
        assert all(token in entry for token, entry in zip(answer.token_ids, answer.logprobs, strict=True))
        deltas = list(llm.stream("p", params))
        assert [entry for delta in deltas for entry in delta.logprobs] == answer.logprobs


def test_reasons_are_exact() -> None:
    """E85. Catches a reason that is None, empty or another's, in the answer or in the last delta of a stream."""
    llm = make_llm(scripted({tuple(b"p"): [*b"ab:c"]}))
    table = [
        ({}, "ab:c", "stop", None),
        ({"stop": ":"}, "ab", "stop", ":"),
        ({"stop_token_ids": [ord(":")]}, "ab", "stop", ord(":")),
        ({"stop_token_ids": [EOS]}, "ab:c", "stop", EOS),
        ({"max_tokens": 2}, "ab", "length", None),
        ({"max_tokens": 4}, "ab:c", "length", None),
        ({"max_tokens": 5}, "ab:c", "stop", None),
        ({"max_tokens": 3, "stop": "b:"}, "a", "stop", "b:"),
    ]
    for given, *expected in table:
        params = SamplingParams(temperature=0, **given)
        answer = llm.generate("p", params)[0].outputs[0]
        assert [answer.text, answer.finish_reason, answer.stop_reason] == expected, given
        *others, last = llm.stream("p", params)
        assert [last.finish_reason, last.stop_reason] == expected[1:], given
        assert all(delta.finish_reason is None for delta in others)


def test_bytes_that_are_no_text_come_out_as_json() -> None:
    """E5. Catches invalid UTF-8 that leaves the library: it kills whoever writes the answer down."""
    llm = make_llm(scripted({tuple(b"p"): [0xFF]}))
    (output,) = llm.generate("p", SamplingParams(temperature=0, logprobs=1))
    data = json.loads(json.dumps(as_json(output), ensure_ascii=False).encode())
    assert data["outputs"][0]["text"] == "\ufffd"
    assert data["outputs"][0]["logprobs"][0]["255"]["decoded_token"] == "\ufffd"


def test_prompt_logprobs_are_kept_by_position() -> None:
    """E61. Catches a first entry that is made up, chunks in the wrong place, and a chunk that comes twice."""
    job = make_job(SamplingParams(prompt_logprobs=1), [65, 66, 67, 68])
    job.take_prompt_logprobs(1, [[RawLogprob(66, -1.0, 2), RawLogprob(9, -0.5, 1)]])
    for _ in range(2):
        job.take_prompt_logprobs(2, [[RawLogprob(67, -2.0, 1)], [RawLogprob(68, -3.0, 1)]])
    found = job.output().prompt_logprobs
    assert found[0] is None
    assert found[1] == {66: Logprob(-1.0, 2, "B"), 9: Logprob(-0.5, 1, "\t")}
    assert [list(entry) for entry in found[2:]] == [[67], [68]]
    for start, rows in ((0, 1), (3, 2)):
        with pytest.raises(IndexError, match="prompt positions"):
            job.take_prompt_logprobs(start, [[RawLogprob(1, -1.0, 1)]] * rows)
    silent = make_job(SamplingParams(), [65, 66])
    silent.take_prompt_logprobs(1, [[RawLogprob(66, -1.0, 2)]])
    assert silent.output().prompt_logprobs is None


def test_logprobs_do_not_depend_on_what_shapes_the_draw() -> None:
    """E59. Catches log-probabilities after penalties, biases, temperature or filters: each against float64."""
    logits = random_logits()
    llm = make_llm(logits)
    shapes = [
        {"top_p": 0.1},
        {"temperature": 4.0, "top_k": 3},
        {"repetition_penalty": 3.0, "frequency_penalty": 2.0},
        {"logit_bias": {70: 100}},
        {"min_tokens": 3},
        {"min_p": 0.5},
    ]
    for shape in shapes:
        params = SamplingParams(max_tokens=4, seed=1, logprobs=3, **{"min_tokens": 4, **shape})
        answer = llm.generate([65, 66], params)[0].outputs[0]
        history = [65, 66]
        for token, entry in zip(answer.token_ids, answer.logprobs, strict=True):
            raw = torch.log_softmax(torch.from_numpy(logits(history).astype(np.float64)), 0)
            best = raw.topk(3).indices.tolist()
            assert set(entry) == {token, *best}
            for other, found in entry.items():
                # a sum of 260 exponentials and its logarithm, in fp32: far below 260 roundings of 1
                assert abs(found.logprob - float(raw[other])) < 260 * 2.0**-23
                assert found.rank == int((raw > raw[other]).sum()) + 1
            history.append(token)
