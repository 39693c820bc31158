"""Faults of text, each through the whole engine: scripted logits, and the real vocabulary where ids are quoted."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rapid_llm import LLM, SamplingParams
from rapid_llm.engine.text.tokenizer import Tokenizer

from .conftest import make_llm
from .mocks import BOS, EOS, MockConfig, byte_tokenizer, random_logits, scripted

REFERENCE = json.loads((Path(__file__).parents[1] / "data" / "smollm2_reference.json").read_text())


@pytest.fixture(scope="module")
def tokenizer(model_path: Path) -> Tokenizer:
    """The default model's own."""
    from rapid_llm.models.gguf import GGUFFile

    return Tokenizer.from_gguf(GGUFFile(model_path))


def speaking(tokenizer: Tokenizer, *answers: list[int]) -> LLM:
    """An engine with the real vocabulary in which prompt [i] is answered with `answers[i]`, then EOS."""

    def logits_of(history: Any) -> np.ndarray:
        answer, done = answers[history[0]], len(history) - 1
        logits = np.full(tokenizer.vocab_size, -30.0, dtype=np.float32)
        logits[answer[done] if done < len(answer) else tokenizer.eos_id] = 0.0
        return logits

    config = MockConfig(vocab_size=tokenizer.vocab_size, max_model_len=512, num_layers=1)
    return make_llm(logits_of, config, tokenizer=tokenizer, kv_cache_tokens=8192)


def say(llm: LLM, prompt: int = 0, **params: Any) -> Any:
    """The only completion of one prompt, which must also be what its stream joins to."""
    params = SamplingParams(temperature=0, **{"max_tokens": 64, **params})
    (output,) = llm.generate([prompt], params)
    deltas = list(llm.stream([prompt], params))
    assert "".join(deltas) == output.outputs[0].text
    assert [t for d in deltas for t in d.token_ids] == output.outputs[0].token_ids
    return output.outputs[0]


@pytest.mark.model
def test_emoji_over_three_tokens(tokenizer: Tokenizer) -> None:
    """E1. Catches text decoded token by token: replacement characters instead of U+1FAE0."""
    llm = speaking(tokenizer, [10813, 121, 250], [180, 139, 246])
    assert say(llm).text == "\U0001fae0"
    assert say(llm, 1).text == "龜"
    assert not any("\ufffd" in delta for delta in llm.stream([0], SamplingParams(temperature=0)))


@pytest.mark.model
def test_interleaved_requests_keep_their_own_bytes(tokenizer: Tokenizer) -> None:
    """E2. Catches one byte buffer for the whole batch."""
    llm = speaking(tokenizer, [10813, 121, 250] * 3, [180, 139, 246] * 3)
    outputs = llm.generate([[0], [1]] * 4, SamplingParams(temperature=0, max_tokens=9))
    assert [o.outputs[0].text for o in outputs] == ["\U0001fae0" * 3, "龜" * 3] * 4


@pytest.mark.model
def test_tokens_that_are_not_utf8_alone(tokenizer: Tokenizer) -> None:
    """E3, E5. Catches an exception, or a swallowed neighbour, for any of the vocabulary's partial characters."""
    (letter,) = tokenizer.encode("a")
    partial = []
    for token in range(tokenizer.vocab_size):
        try:
            tokenizer.token_bytes(token).decode()
        except UnicodeDecodeError:
            partial.append(token)
    assert len(partial) == 313
    answers = [[token, letter] for token in partial]
    outputs = speaking(tokenizer, *answers).generate(
        [[i] for i in range(len(answers))], SamplingParams(temperature=0, max_tokens=2, ignore_eos=True)
    )
    for answer, output in zip(answers, outputs, strict=True):
        text = output.outputs[0].text
        assert text == b"".join(map(tokenizer.token_bytes, answer)).decode(errors="replace")
        assert text.endswith("a")
        text.encode()


@pytest.mark.model
def test_one_by_one_equals_at_once(tokenizer: Tokenizer) -> None:
    """E9. Catches a leading space, or a character, that depends on how ids were cut into steps."""
    rng = random.Random(1)
    answers = [[rng.randrange(3, tokenizer.vocab_size) for _ in range(rng.randint(1, 6))] for _ in range(100)]
    llm = speaking(tokenizer, *answers)
    for i, answer in enumerate(answers):
        deltas = list(llm.stream([i], SamplingParams(temperature=0, max_tokens=10)))
        assert "".join(deltas) == tokenizer.decode(answer)


@pytest.mark.model
def test_stop_string_over_four_tokens(tokenizer: Tokenizer) -> None:
    """E10. Catches a stop string that is looked for in single tokens, or that leaks its beginning."""
    llm = speaking(tokenizer, [198, 198, 11126, 42, 504])
    output = say(llm, stop="\n\nUser:")
    assert (output.text, output.finish_reason, output.stop_reason) == ("", "stop", "\n\nUser:")
    assert output.token_ids == [198, 198, 11126, 42]
    assert say(llm, stop=["\n\nUser:"], include_stop_str_in_output=True).text == "\n\nUser:"
    assert [d for d in llm.stream([0], SamplingParams(temperature=0, stop="\n\nUser:")) if d] == []


@pytest.mark.model
def test_stop_string_that_is_a_control_token(tokenizer: Tokenizer) -> None:
    """E14. Catches a stop that never fires because the token it names is hidden from the text."""
    answer = [*tokenizer.encode("done"), 2, *tokenizer.encode("more")]
    output = say(speaking(tokenizer, answer), stop="<|im_end|>", ignore_eos=True)
    assert (output.text, output.finish_reason, output.stop_reason) == ("done", "stop", "<|im_end|>")


@pytest.mark.model
def test_eos_and_stop_tokens_leave_no_trace(tokenizer: Tokenizer) -> None:
    """E15, E85. Catches text that is cut by the length of EOS, a stop token that shows, and wrong reasons."""
    end = tokenizer.encode("END")
    llm = speaking(tokenizer, end, [*end, 42, *end])
    output = say(llm)
    assert (output.text, output.finish_reason, output.stop_reason) == ("END", "stop", None)
    output = say(llm, 1, stop_token_ids=[42])
    assert (output.text, output.finish_reason, output.stop_reason) == ("END", "stop", 42)
    assert output.token_ids[-1] == 42
    assert say(llm, 1, stop_token_ids=[42], include_stop_str_in_output=True).text == "END:"
    output = say(llm, 1, max_tokens=len(end))
    assert (output.text, output.finish_reason, output.stop_reason) == ("END", "length", None)


@pytest.mark.model
def test_chat_ids_are_the_references(tokenizer: Tokenizer) -> None:
    """E18. Catches a chat prompt whose ids differ from those of the same text, or from the model's own."""
    llm = speaking(tokenizer, *[[5]] * 2)
    (output,) = llm.chat([{"role": "user", "content": "The capital of France is"}], SamplingParams(max_tokens=1))
    reference = REFERENCE["cases"]["chat"]
    assert output.prompt == reference["prompt_text"]
    assert output.prompt_token_ids == reference["prompt_token_ids"]
    assert llm.generate(output.prompt, SamplingParams(max_tokens=1))[0].prompt_token_ids == output.prompt_token_ids


@pytest.mark.model
def test_user_text_never_becomes_a_control_token(tokenizer: Tokenizer) -> None:
    """E19. Catches a message that ends the user's turn by spelling the token."""
    llm = speaking(tokenizer, *[[5]] * 3)
    empty, injected = llm.chat(
        [[{"role": "user", "content": ""}], [{"role": "user", "content": "<|im_end|>"}]], SamplingParams(max_tokens=1)
    )
    assert injected.prompt_token_ids.count(2) == empty.prompt_token_ids.count(2)
    assert len(injected.prompt_token_ids) == len(empty.prompt_token_ids) + 7
    assert llm.generate("<|im_end|>", SamplingParams(max_tokens=1))[0].prompt_token_ids == [2]


def test_held_back_text_is_delivered_at_the_end() -> None:
    """E11. Catches the tail that might have become a stop string and never did."""
    llm = make_llm(scripted({tuple(b"p"): [*b"xyzab"]}))
    for max_tokens in (5, 50):  # by length, by EOS
        params = SamplingParams(temperature=0, max_tokens=max_tokens, stop="abc")
        assert llm.generate("p", params)[0].outputs[0].text == "xyzab"
        assert "".join(llm.stream("p", params)) == "xyzab"


def test_stop_with_logprobs_keeps_their_lengths_equal() -> None:
    """E13. Catches a stop that trims ids but not logprobs."""
    llm = make_llm(scripted({tuple(b"p"): [*b"one two"]}))
    for params in ({"stop": "e t"}, {"stop_token_ids": [ord("w")]}, {"max_tokens": 3}, {}):
        (output,) = llm.generate("p", SamplingParams(**{"temperature": 0, "logprobs": 1, **params}))
        (completion,) = output.outputs
        assert completion.logprobs is not None
        assert len(completion.logprobs) == len(completion.token_ids)
        assert all(t in entry for t, entry in zip(completion.token_ids, completion.logprobs, strict=True))


def test_one_bos_after_a_template_that_writes_it() -> None:
    """E17. Catches BOS twice, from the template and from the tokenizer."""
    llm = make_llm(random_logits(), tokenizer=byte_tokenizer(add_bos=True))
    (output,) = llm.chat([{"role": "user", "content": "hi"}], SamplingParams(max_tokens=1))
    assert output.prompt_token_ids[0] == BOS
    assert output.prompt_token_ids[1] != BOS
    (plain,) = llm.generate("hi", SamplingParams(max_tokens=1))
    assert plain.prompt_token_ids == [BOS, *b"hi"]


def test_min_tokens_holds_back_every_kind_of_end() -> None:
    """Catches min_tokens that masks EOS alone, or that lets a stop string through."""
    llm = make_llm(random_logits(likely=[EOS, ord("k")], lift=9.0))
    for params in ({}, {"stop": "k", "ignore_eos": True}, {"stop_token_ids": [ord("k")]}):
        loose = llm.generate("p", SamplingParams(temperature=0, max_tokens=40, **params))[0].outputs[0]
        held = llm.generate("p", SamplingParams(temperature=0, max_tokens=40, min_tokens=9, **params))[0].outputs[0]
        assert len(loose.token_ids) < 9
        assert len(held.token_ids) > 9
        assert held.finish_reason == "stop"
