"""`LLM` as users meet it, around a mock decoder."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from rapid_llm import LLM, SamplingParams
from rapid_llm.engine.core import EngineError
from rapid_llm.engine.params import ParameterError

from .conftest import make_llm
from .mocks import EOS, VOCAB, MockConfig, random_logits, scripted

GREEDY = SamplingParams(temperature=0, max_tokens=12)


def answer(text: str) -> dict[tuple[int, ...], list[int]]:
    """A script in which every prompt that begins with "p" gets `text`."""
    return {tuple(b"p"): list(text.encode())}


def test_prompts_of_every_form_come_back_in_order() -> None:
    """Catches answers in order of completion, and a list of ids taken for a list of prompts."""
    llm = make_llm(scripted({tuple(b"a"): [*b"long answer"], tuple(b"b"): [*b"x"], tuple(b"c"): [*b"yy"]}))
    outputs = llm.generate(["a", [98], "ccc"[:1]], GREEDY)
    assert [o.outputs[0].text for o in outputs] == ["long answer", "x", "yy"]
    assert [o.prompt for o in outputs] == ["a", None, "c"]
    assert [o.prompt_token_ids for o in outputs] == [[97], [98], [99]]
    assert len({o.request_id for o in outputs}) == 3
    assert [o.outputs[0].text for o in llm.generate("b", GREEDY)] == ["x"]
    assert [o.outputs[0].text for o in llm.generate([98], GREEDY)] == ["x"]
    assert [o.outputs[0].text for o in llm.generate((98,), GREEDY)] == ["x"]


def test_generate_twice_on_one_engine() -> None:
    """E81. Catches state of the first call that leaks into the second, and results kept inside the engine."""
    llm = make_llm(random_logits())
    first = [o.outputs[0].token_ids for o in llm.generate(["one", "two"], GREEDY)]
    assert [o.outputs[0].token_ids for o in llm.generate(["one", "two"], GREEDY)] == first
    assert [o.outputs[0].token_ids for o in llm.generate(["two", "one"], GREEDY)] == first[::-1]
    assert llm._engine.unfinished == 0
    llm._engine.check()


@pytest.mark.parametrize("logprobs", [None, 0, 3])
def test_each_prompt_has_its_own_parameters(logprobs: int | None) -> None:
    """Catches parameters of the first request used for all of them."""
    llm = make_llm(scripted(answer("hello")))
    params = [SamplingParams(temperature=0, max_tokens=m, logprobs=logprobs) for m in (1, 3, 2)]
    assert [o.outputs[0].text for o in llm.generate(["p", "p", "p"], params)] == ["h", "hel", "he"]
    with pytest.raises(ValueError, match="2 sampling_params were given for 3 prompts"):
        llm.generate(["p", "p", "p"], params[:2])
    with pytest.raises(TypeError, match="sampling_params"):
        llm.generate("p", {"temperature": 0})  # type: ignore[arg-type]


BAD_PROMPTS = [
    ("", ValueError, "prompt is empty"),
    ([], ValueError, "empty list"),
    (["p", ""], ValueError, "prompt 1 is empty"),
    ([[1], []], ValueError, "prompt 1 is empty"),
    ([-1], ValueError, "-1 at position 0"),
    ([5, 10**6], ValueError, f"1000000 at position 1 .* 0 to {VOCAB - 1}"),
    (["p", [VOCAB]], ValueError, f"prompt 1: {VOCAB} at position 0"),
    ([True], ValueError, "True at position 0"),
    ([1.5], TypeError, "prompt"),
    ("a\ud83d", ValueError, "lone surrogate"),
    (7, TypeError, "int"),
    (None, TypeError, "NoneType"),
    (b"p", TypeError, "not b'p'"),
    ([["p"]], TypeError, "prompt 0"),
]


@pytest.mark.parametrize(("prompt", "error", "text"), BAD_PROMPTS)
def test_bad_prompts_are_refused_before_anything_runs(prompt: Any, error: type[Exception], text: str) -> None:
    """E6, E35. Catches a bad id that reaches the embedding, an empty prompt that hangs, an engine unusable after."""
    llm = make_llm(scripted(answer("fine")))
    for call in (lambda: llm.generate(prompt, GREEDY), lambda: llm.generate(["p", prompt], GREEDY)):
        with pytest.raises((TypeError, ValueError)):
            call()
    with pytest.raises(error, match=text):
        llm.generate(prompt, GREEDY)
    assert llm._decoder.steps == []
    assert llm.generate("p", GREEDY)[0].outputs[0].text == "fine"


def test_prompt_longer_than_the_context_is_refused_with_both_numbers() -> None:
    """E39. Catches a prompt that crashes or hangs the engine, and an off-by-one at exactly the context's length."""
    llm = make_llm(random_logits(), MockConfig(max_model_len=64))
    for length in (64, 90):
        with pytest.raises(ValueError, match=rf"{length} tokens and the context 64"):
            llm.generate(["p", [65] * length], GREEDY)
        with pytest.raises(ValueError, match=rf"{length} tokens and the context 64"):
            llm.stream([65] * length, GREEDY)
    assert llm._decoder.steps == []
    (output,) = llm.generate([65] * 63, SamplingParams(temperature=0, max_tokens=50, ignore_eos=True))
    assert (len(output.outputs[0].token_ids), output.outputs[0].finish_reason) == (1, "length")


def test_answer_ends_where_the_context_does() -> None:
    """Catches positions beyond the rotary table, and max_tokens=None that means 16."""
    llm = make_llm(random_logits(), MockConfig(max_model_len=64))
    for max_tokens in (None, 1000):
        params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
        (output,) = llm.generate([65] * 10, params)
        assert (len(output.outputs[0].token_ids), output.outputs[0].finish_reason) == (54, "length")


def test_request_larger_than_the_pool_is_refused_and_others_run() -> None:
    """E69. Catches a request that waits for ever for pages that do not exist."""
    llm = make_llm(scripted(answer("fine")), kv_cache_tokens=32)
    with pytest.raises(ValueError, match=r"may need 99 tokens .* 32: .*max_tokens.*kv_cache_tokens"):
        llm.generate(["p", "p"], SamplingParams(max_tokens=99))
    assert llm.generate("p", GREEDY)[0].outputs[0].text == "fine"


def test_stop_token_id_outside_the_vocabulary_is_refused() -> None:
    """E51. Catches an id that would mask another row's logits."""
    llm = make_llm(scripted(answer("fine")))
    with pytest.raises(ParameterError, match="stop_token_ids=10000000"):
        llm.generate("p", SamplingParams(stop_token_ids=[10**7]))


def test_n_samples_differ_are_repeatable_and_stream_alike() -> None:
    """E87. Catches samples that share a random stream or overwrite each other's text."""
    params = SamplingParams(n=3, seed=7, max_tokens=10, ignore_eos=True)
    (output,) = make_llm(random_logits()).generate("abc", params)
    assert [o.index for o in output.outputs] == [0, 1, 2]
    assert len({tuple(o.token_ids) for o in output.outputs}) == 3
    deltas = list(make_llm(random_logits()).stream("abc", params))
    for o in output.outputs:
        own = [d for d in deltas if d.sample_index == o.index]
        assert "".join(own) == o.text
        assert [t for d in own for t in d.token_ids] == o.token_ids
        assert own[-1].finish_reason == "length"
    (one,) = make_llm(random_logits()).generate("abc", SamplingParams(seed=7, max_tokens=10, ignore_eos=True))
    assert one.outputs[0].token_ids == output.outputs[0].token_ids


def test_a_seeded_request_is_the_same_alone_and_in_a_batch() -> None:
    """E55. Catches a generator shared by the batch."""
    seeded = SamplingParams(seed=7, max_tokens=12)
    alone = make_llm(random_logits()).generate("abc", seeded)[0].outputs[0].token_ids
    llm = make_llm(random_logits(), seed=99)
    llm.generate("something before")
    params = [SamplingParams(max_tokens=20)] * 3 + [seeded] + [SamplingParams(max_tokens=3, seed=1)] * 4
    assert llm.generate(["x", "yy", "zzz", "abc", "1", "2", "3", "4"], params)[3].outputs[0].token_ids == alone


def test_the_engine_seed_means_something() -> None:
    """Catches a seed that is accepted and ignored, and one under which every unseeded request draws alike."""

    def run(seed: int) -> list[list[int]]:
        llm = make_llm(random_logits(), seed=seed)
        return [o.outputs[0].token_ids for o in [*llm.generate(["abc", "abc"]), *llm.generate("abc")]]

    assert run(1) == run(1)
    assert len({tuple(ids) for ids in run(1)}) == 3
    assert run(1) != run(2)


def test_deterministic_mode_runs_one_request_at_a_time() -> None:
    """Catches a flag that is accepted and ignored: no step may hold two requests, as rows may round differently."""
    llm = make_llm(random_logits(), deterministic=True)
    llm.generate(["a", "bb", "ccc"], SamplingParams(n=2, max_tokens=4, ignore_eos=True))
    assert {len(meta.seq_lens) for meta in llm._decoder.steps} == {1}
    together = make_llm(random_logits())
    together.generate(["a", "bb", "ccc"], SamplingParams(n=2, max_tokens=4, ignore_eos=True))
    assert max(len(meta.seq_lens) for meta in together._decoder.steps) == 6


def test_stream_joins_to_generate_and_raises_early() -> None:
    """Catches a stream that loses its tail, and an error that appears only at the first `next`."""
    llm = make_llm(random_logits())
    params = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True, logprobs=2)
    (whole,) = llm.generate("hello", params)
    deltas = list(llm.stream("hello", params))
    assert "".join(deltas) == whole.outputs[0].text
    assert all(isinstance(d, str) and d.text == d for d in deltas)
    assert [p for d in deltas for p in d.logprobs or []] == whole.outputs[0].logprobs
    with pytest.raises(ValueError, match="empty"):
        llm.stream("")
    with pytest.raises(TypeError, match="one prompt"):
        llm.stream(["a", "b"])  # type: ignore[list-item]


def test_closing_a_stream_frees_its_request() -> None:
    """E82. Catches a request that runs on, or keeps its pages, after its reader has gone."""
    llm = make_llm(random_logits())
    stream = llm.stream("hello", SamplingParams(max_tokens=100, ignore_eos=True))
    next(stream)
    assert llm._engine.unfinished == 1
    stream.close()
    assert llm._engine.unfinished == 0
    llm._engine.check()
    never_started = llm.stream("hello")
    del never_started
    assert llm._engine.unfinished == 0


def test_a_paused_stream_does_not_disturb_other_calls() -> None:
    """Catches a stream that owns the engine, and one whose text is mixed with another's."""
    llm = make_llm(scripted({tuple(b"p"): [*b"stream"], tuple(b"q"): [*b"answer"]}))
    stream = llm.stream("p", GREEDY)
    got = [next(stream), next(stream)]
    assert llm.generate("q", GREEDY)[0].outputs[0].text == "answer"
    assert "".join([*got, *stream]) == "stream"


def test_two_streams_interleave() -> None:
    """E2. Catches text state that is shared between requests: their characters are cut at every byte."""
    a, b = "\U0001fae0\U0001f600 ok", "龜é\U0001fae0"
    llm = make_llm(scripted({tuple(b"p"): [*a.encode()], tuple(b"q"): [*b.encode()]}))
    params = SamplingParams(temperature=0, max_tokens=50)
    pairs = list(itertools.zip_longest(llm.stream("p", params), llm.stream("q", params), fillvalue=""))
    assert "".join(x for x, _ in pairs) == a
    assert "".join(y for _, y in pairs) == b
    assert not any("\ufffd" in x or "\ufffd" in y for x, y in pairs)


def test_a_failing_step_ends_its_requests_and_leaves_the_engine_usable() -> None:
    """Catches pages lost to an exception, and an engine that is dead or wrong after one."""
    llm = make_llm(random_logits())
    want = llm.generate(["abc", "d"], GREEDY)
    llm._decoder.fail_at = {len(llm._decoder.steps) + 3: MemoryError("no room")}
    stream = llm.stream("zzz", GREEDY)
    next(stream)
    with pytest.raises(MemoryError, match="no room"):
        llm.generate(["abc", "d"], GREEDY)
    assert llm._engine.unfinished == 0
    llm._engine.check()
    assert llm._engine.scheduler.pool.free_pages == llm._engine.scheduler.pool.usable_pages
    with pytest.raises(EngineError, match="no room"):
        list(stream)
    again = llm.generate(["abc", "d"], GREEDY)
    assert [o.outputs[0].token_ids for o in again] == [o.outputs[0].token_ids for o in want]


def test_an_interrupt_ends_the_call_and_nothing_else() -> None:
    """Catches Ctrl-C that leaves requests running behind the next call."""
    llm = make_llm(random_logits())
    llm._decoder.fail_at = {2: KeyboardInterrupt()}
    with pytest.raises(KeyboardInterrupt):
        llm.generate(["abc", "d"], GREEDY)
    assert llm._engine.unfinished == 0
    assert llm.generate("abc", GREEDY)[0].outputs[0].token_ids


def test_metrics_tell_what_happened() -> None:
    """Catches counters that are never filled in."""
    llm = make_llm(random_logits())
    (output,) = llm.generate("hello", SamplingParams(n=2, max_tokens=5, ignore_eos=True))
    metrics = output.metrics
    assert metrics is not None
    assert (metrics.prompt_tokens, metrics.output_tokens, metrics.preemptions) == (5, 10, 0)
    assert 0 < metrics.time_to_first_token < 10
    assert metrics.first_token < metrics.finished
    assert metrics.tokens_per_second == pytest.approx(8 / (metrics.finished - metrics.first_token))
    totals = llm._engine.totals
    assert (totals.prefill_tokens, totals.decode_tokens) == (10, 8)
    assert (totals.prefill_steps, totals.decode_steps) == (1, 4)


def test_padded_vocabulary_is_never_sampled() -> None:
    """Catches ids beyond the tokenizer's: the mock gives them the highest logits of all."""
    llm = make_llm(random_logits(), MockConfig(vocab_size=VOCAB + 4))
    for params in (GREEDY, SamplingParams(max_tokens=20, logprobs=5)):
        (output,) = llm.generate("abc", params)
        assert all(token < VOCAB for token in output.outputs[0].token_ids)
        assert all(token < VOCAB for entry in output.outputs[0].logprobs or [] for token in entry)


def test_more_prompts_than_can_run_at_once() -> None:
    """Catches buffers that overflow, and requests that are dropped when all places are taken."""
    llm = make_llm(random_logits(), max_running=3, max_batch_tokens=8)
    prompts = [[65 + i] * (1 + i) for i in range(12)]
    together = [o.outputs[0].token_ids for o in llm.generate(prompts, GREEDY)]
    assert together == [llm.generate(p, GREEDY)[0].outputs[0].token_ids for p in prompts]


def test_chat_renders_the_template_and_takes_several_conversations() -> None:
    """Catches a chat that ignores the template, and a list of conversations taken for one."""
    said = [{"role": "user", "content": "hi"}]
    llm = make_llm(random_logits())
    (output,) = llm.chat(said, GREEDY)
    assert output.prompt == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    assert output.prompt_token_ids == llm.generate(output.prompt, GREEDY)[0].prompt_token_ids
    both = llm.chat([said, [{"role": "user", "content": "yo"}]], GREEDY)
    assert both[0].outputs[0].token_ids == output.outputs[0].token_ids
    assert both[1].prompt.startswith("<|im_start|>user\nyo")
    assert "".join(llm.stream_chat(said, GREEDY)) == output.outputs[0].text
    for wrong in ([], "hi", [{"role": "user"}], [[]]):
        with pytest.raises((TypeError, ValueError)):
            llm.chat(wrong, GREEDY)  # type: ignore[arg-type]


def test_threads_are_set_and_reported() -> None:
    """E93. Catches a thread count that is accepted and not applied."""
    import torch

    from rapid_llm.platform import default_threads

    assert make_llm(random_logits(), threads=1).threads == 1
    assert torch.get_num_threads() == 1
    assert make_llm(random_logits(), threads=None).threads == default_threads() == torch.get_num_threads()


def test_eos_id_is_the_tokenizers() -> None:
    """Catches end ids read from two places: the mock's EOS ends an answer, and ignore_eos lets it pass."""
    llm = make_llm(scripted({tuple(b"p"): [*b"hi", EOS, *b"there"]}))
    (output,) = llm.generate("p", GREEDY)
    assert (output.outputs[0].text, output.outputs[0].finish_reason, output.outputs[0].stop_reason) == (
        "hi",
        "stop",
        None,
    )
    assert output.outputs[0].token_ids == [*b"hi", EOS]
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    assert llm.generate("p", params)[0].outputs[0].text == "hithere"


def test_lazy_exports() -> None:
    """Catches an export that is missing or is not the class it names."""
    import rapid_llm

    assert rapid_llm.LLM is LLM
    assert rapid_llm.StructuredOutput(regex="a").form == "regex"
    assert {"LLM", "SamplingParams", "StructuredOutput"} <= set(dir(rapid_llm))
    with pytest.raises(AttributeError, match="nothing"):
        rapid_llm.nothing  # noqa: B018
