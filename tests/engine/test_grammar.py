"""Structured output: which tokens a structure allows, and what becomes of a request that has one."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rapid_llm import LLM, SamplingParams
from rapid_llm.engine import grammar as grammar_module
from rapid_llm.engine.grammar import Constraint, Grammars
from rapid_llm.engine.job import BAD_LOGITS, NOTHING_ALLOWED
from rapid_llm.engine.masks import TokenMasks
from rapid_llm.engine.params import ParameterError, StructuredOutput
from rapid_llm.engine.text.tokenizer import Tokenizer

from .conftest import make_llm
from .mocks import BOS, EOS, VOCAB, byte_tokenizer, random_logits
from .text import trained

pytest.importorskip("llguidance")

TOKENIZER = byte_tokenizer()
CHOICES = ("yes", "yes, so", "no", "näh", 'a "b"\n\\', "  two  blanks ")
SCHEMA = {
    "type": "object",
    "properties": {"kind": {"enum": ["cat", "dog"]}, "age": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["kind", "age"],
    "additionalProperties": False,
}
GBNF = 'root ::= "(" root ")" | "x"'
LARK = 'start: "(" start ")" | "x"'


def allowed(constraint: Constraint) -> set[int]:
    return set(constraint.allowed())


def may_follow(tokenizer: Tokenizer, text: bytes) -> set[int]:
    """By definition: every plain token that leads on to one of CHOICES; the end where one of them is whole."""
    wanted = [choice.encode() for choice in CHOICES]
    plain = (i for i in range(tokenizer.vocab_size) if not tokenizer.is_control(i))
    found = {i for i in plain if any(w.startswith(text + tokenizer.token_bytes(i)) for w in wanted)}
    return found | (set(tokenizer.end_ids) if text in wanted else set())


def check_mask(constraint: Constraint, tokenizer: Tokenizer, text: bytes) -> None:
    """Where one byte alone can follow, the mask may insist on the tokenizer's own way to cut what is certain."""
    got, want = allowed(constraint), may_follow(tokenizer, text)
    if len({tokenizer.token_bytes(token)[:1] for token in want}) > 1:
        assert got == want, text
    else:
        assert got, text
        assert got <= want, text


def test_masks_are_those_of_the_definition() -> None:
    """Catches a bit out of place, control tokens that are let in, an end too early or too late, and letters that are
    taken for a pattern: every state of every choice, against all tokens tried one by one."""
    grammars = Grammars(TOKENIZER)
    for choice in CHOICES:
        constraint = grammars.start(StructuredOutput(choices=CHOICES))
        text = b""
        for byte in choice.encode():
            check_mask(constraint, TOKENIZER, text)
            constraint.advance(byte)
            text += bytes([byte])
        assert constraint.complete == (may_follow(TOKENIZER, text) == {EOS}), text
        if not constraint.complete:
            assert EOS in allowed(constraint)


def test_tokens_of_several_bytes_end_ids_and_control_tokens() -> None:
    """Catches a token whose later bytes leave the structure, and all but the first of the end tokens forbidden."""
    tokenizer = Tokenizer(TOKENIZER._backend, TOKENIZER.tokens, TOKENIZER.control, eos_id=EOS, end_ids=[EOS, BOS])
    constraint = Grammars(tokenizer).start(StructuredOutput(regex="(  |q)(z  )?"))
    assert allowed(constraint) == {32, ord("q"), 259}  # one blank, or the token of two
    constraint.advance(259)
    assert allowed(constraint) == {ord("z"), EOS, BOS}
    constraint.advance(ord("z"))
    assert allowed(constraint) == {259}  # nothing else can come, and this is how the tokenizer writes it


def test_copies_go_their_own_way_and_rollback_returns() -> None:
    """Catches a state that sequences share, and one that a rollback leaves behind."""
    grammars = Grammars(TOKENIZER)
    first = grammars.start(StructuredOutput(regex="ab[cd]ef"))
    second = first.copy()
    for token in b"abc":
        first.advance(token)
    assert (allowed(first), allowed(second)) == ({ord("e")}, {ord("a")})
    first.rollback(1)
    assert allowed(first) == {ord("c"), ord("d")}
    for token in b"def":
        first.advance(token)
    assert first.complete
    first.rollback(2)
    assert (first.complete, allowed(first)) == (False, {ord("e")})
    with pytest.raises(ValueError, match="cannot take back 9 tokens"):
        first.rollback(9)
    second.advance(ord("x"))
    assert second.error is not None
    assert (second.complete, allowed(second)) == (False, set())


def test_structures_are_compiled_once_and_the_oldest_goes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a compilation for each request, and a cache without end."""
    compiled: list[str] = []
    compile_one = Grammars._compile
    monkeypatch.setattr(Grammars, "_compile", lambda self, s: compiled.append(s.source) or compile_one(self, s))
    monkeypatch.setattr(grammar_module, "MAX_KEPT", 2)
    grammars = Grammars(TOKENIZER)
    for regex in ("a", "b", "a", "c", "a", "b"):
        assert allowed(grammars.start(StructuredOutput(regex=regex))) == {ord(regex)}
        assert len(grammars) <= 2
    assert compiled == ["a", "b", "c", "b"]
    other_form = grammars.start(StructuredOutput(choices=["a"]))
    assert compiled[4:] == ['["a"]']
    assert allowed(other_form) == {ord("a")}


BAD: list[tuple[dict[str, Any], str]] = [
    ({"regex": "("}, "structured.regex='.'.* regex parse error"),
    ({"json_schema": {"type": "integer", "minimum": "x"}}, "structured.json_schema=.*minimum"),
    ({"json_schema": {"type": "array", "uniqueItems": True}}, "structured.json_schema=.*uniqueItems"),
    ({"json_schema": {"type": "nothing"}}, "structured.json_schema="),
    ({"json_schema": {"$ref": "#/no"}}, "structured.json_schema="),
    ({"grammar": "start: foo"}, "structured.grammar=.* foo"),
    ({"grammar": 'root ::= "a'}, "structured.grammar="),
    ({"json_schema": {"$defs": {"a": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"}}, "use one that some text fits"),
    ({"regex": "a{0}"}, "structured.regex=.* only the empty one"),
]


@pytest.mark.parametrize(("form", "says"), BAD)
def test_a_structure_that_cannot_be_read_is_refused_before_anything_runs(form: dict[str, Any], says: str) -> None:
    """Catches an error that ends a request half-way, or another request, or that does not say what is wrong."""
    llm = make_llm(random_logits())
    with pytest.raises(ParameterError, match=says) as caught:
        llm.generate(["p", "q"], [SamplingParams(), SamplingParams(structured=form)])
    assert len(str(caught.value)) < 500
    assert "<state>" not in str(caught.value)
    assert llm._decoder.steps == []
    assert llm.generate("p", SamplingParams(structured={"choices": ["fine"]}))[0].outputs[0].text == "fine"


def test_without_the_library_the_error_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches an ImportError in the middle of a request, and a structure that is silently left out."""
    monkeypatch.setitem(sys.modules, "llguidance", None)
    llm = make_llm(random_logits())
    with pytest.raises(ParameterError, match=r"install the library that structured output needs: pip install 'llgui"):
        llm.generate("p", SamplingParams(structured={"regex": "a"}))
    assert llm.generate("p", SamplingParams(max_tokens=2, ignore_eos=True))[0].outputs[0].finish_reason == "length"


def test_a_tokenizer_without_an_end_is_refused() -> None:
    """Catches an answer that could never end where its structure may."""
    endless = Tokenizer(TOKENIZER._backend, TOKENIZER.tokens, TOKENIZER.control)
    with pytest.raises(ParameterError, match="names no token that ends an answer"):
        make_llm(random_logits(), tokenizer=endless).generate("p", SamplingParams(structured={"regex": "a+"}))


def ask(llm: LLM, structured: Any, prompt: Any = "p", **params: Any) -> Any:
    params = {"max_tokens": 60, "seed": 3, "structured": structured, **params}
    return llm.generate(prompt, SamplingParams(**params))[0].outputs


def test_every_form_holds_whatever_the_model_wants() -> None:
    """Catches a form whose mask is not applied, and an ending that is not `stop`; logits are random."""
    llm = make_llm(random_logits(spread=1.0), kv_cache_tokens=4096)

    def parsed(text: str) -> bool:
        value = json.loads(text)
        return list(value) == ["kind", "age"] and value["kind"] in ("cat", "dog") and 0 <= value["age"] <= 99

    forms: list[tuple[dict[str, Any], Any]] = [
        ({"choices": CHOICES}, lambda text: text in CHOICES),
        ({"regex": r"[a-f]{2,4}(-[0-9]+){1,2}z"}, lambda text: re.fullmatch(r"[a-f]{2,4}(-[0-9]+){1,2}z", text)),
        ({"json_schema": SCHEMA}, parsed),
        ({"grammar": GBNF}, lambda text: text.strip("()") == "x" and text.count("(") == text.count(")")),
        ({"grammar": LARK}, lambda text: text.strip("()") == "x" and text.count("(") == text.count(")")),
    ]
    for form, fits in forms:
        outputs = ask(llm, form, n=6, max_tokens=80)
        assert all(fits(o.text) and o.finish_reason == "stop" and o.stop_reason is None for o in outputs), form
        assert len({o.text for o in outputs}) > 1, form
    made = ask(make_llm(random_logits(likely=[*b'{}":,'])), {"json_object": True}, n=4, max_tokens=40)
    ended = [o for o in made if o.finish_reason == "stop"]
    assert ended
    assert all(isinstance(json.loads(o.text), dict) for o in ended)


def test_an_answer_ends_with_its_structure() -> None:
    """E85. Catches a token after the end, an end that takes one token more, and a whole answer that is called cut."""
    llm = make_llm(random_logits())
    for max_tokens in (3, 4):
        (output,) = ask(llm, {"choices": ["yes"]}, max_tokens=max_tokens, logprobs=0)
        assert (output.text, output.token_ids) == ("yes", [*b"yes"])
        assert (output.finish_reason, output.stop_reason, len(output.logprobs)) == ("stop", None, 3)
    (cut,) = ask(llm, {"choices": ["yes"]}, max_tokens=2)
    assert (cut.text, cut.finish_reason) == ("ye", "length")
    # where it may go on, the model's own end token ends it
    (open_end,) = ask(make_llm(random_logits(likely=[EOS], lift=40.0)), {"regex": "ab*"})
    assert (open_end.text, open_end.token_ids, open_end.finish_reason) == ("a", [97, EOS], "stop")


def test_stops_and_min_tokens_hold_within_a_structure() -> None:
    """Catches an end token forced by `min_tokens` alone, a stop string unseen, a structure that min_tokens breaks."""
    ends = make_llm(random_logits(likely=[EOS], lift=40.0))
    (output,) = ask(ends, {"regex": "[ab]+"}, min_tokens=5)
    assert (len(output.text), output.token_ids[5:], output.finish_reason) == (5, [EOS], "stop")
    (whole,) = ask(ends, {"choices": ["yes"]}, min_tokens=9)
    assert (whole.text, whole.finish_reason) == ("yes", "stop")
    (late,) = ask(ends, {"grammar": 'start: "a" /b{0}/'}, min_tokens=9)
    assert (late.text, late.token_ids, late.finish_reason) == ("a", [97], "stop")
    (stopped,) = ask(ends, {"choices": ["abcdef"]}, stop="cd")
    assert (stopped.text, stopped.finish_reason, stopped.stop_reason) == ("ab", "stop", "cd")
    (by_id,) = ask(ends, {"choices": ["abcdef"]}, stop_token_ids=[ord("c"), BOS])
    assert (by_id.text, by_id.finish_reason, by_id.stop_reason) == ("ab", "stop", ord("c"))
    (biased,) = ask(ends, {"regex": "[ab]+"}, logit_bias={ord("z"): 100, ord("b"): 100}, max_tokens=4)
    assert biased.text == "bbbb"


def test_a_structured_request_alone_is_what_it_is_among_others() -> None:
    """E55. Catches a mask on a neighbour's row, a state that samples share, and one lost with a preemption."""
    forms = [{"regex": "[a-m]{30}"}, None, {"json_schema": SCHEMA}, None, {"choices": CHOICES}]
    params = [SamplingParams(seed=i, max_tokens=30, structured=form, n=1 + i % 2) for i, form in enumerate(forms)]
    prompts = [[65 + i] * 18 for i in range(5)]
    large, small = make_llm(random_logits()), make_llm(random_logits(), kv_cache_tokens=128)
    alone = [large.generate(p, q)[0].outputs for p, q in zip(prompts, params, strict=True)]
    for llm in (large, small):
        outputs = llm.generate(prompts, params)
        assert [[s.token_ids for s in o.outputs] for o in outputs] == [[s.token_ids for s in o] for o in alone]
        assert [[s.finish_reason for s in o.outputs] for o in outputs] == [[s.finish_reason for s in o] for o in alone]
    assert sum(o.metrics.preemptions for o in outputs) > 0
    streamed = list(llm.stream(prompts[0], params[0]))
    assert "".join(streamed) == alone[0][0].text


def test_guessing_ahead_leaves_structures_and_penalties_alone() -> None:
    """Catches guesses that are verified against masks and counts of another position."""
    forms: list[dict[str, Any]] = [
        {"structured": {"regex": "(ab){9}c?"}},
        {"frequency_penalty": 2.0, "logit_bias": {65: 4.0}},
        {"min_tokens": 20},
        {},
    ]
    params = [SamplingParams(temperature=0, max_tokens=25, **form) for form in forms]
    logits = random_logits(likely=[65, 66, EOS], lift=9.0)
    plain = make_llm(logits).generate(["abab"] * 4, params)
    guessing = make_llm(logits, speculative={"method": "ngram", "num_tokens": 3}).generate(["abab"] * 4, params)
    assert [o.outputs[0] for o in guessing] == [o.outputs[0] for o in plain]


@pytest.mark.parametrize(
    ("logits", "reason"),
    [({97: np.nan}, NOTHING_ALLOWED), ({5: np.nan}, NOTHING_ALLOWED), ({5: np.inf}, NOTHING_ALLOWED)],
)
def test_broken_logits_end_a_structured_request_alone(logits: dict[int, float], reason: str) -> None:
    """E58. Catches a mask that hides NaN or +inf, and a neighbour that ends too."""

    def logits_of(history: Any) -> np.ndarray:
        values = np.zeros(VOCAB, dtype=np.float32)
        if history[0] == 66:
            values[list(logits)] = list(logits.values())
        return values

    bad, good = make_llm(logits_of).generate([[66], [67]], SamplingParams(structured={"choices": ["abc"]}))
    assert (bad.outputs[0].finish_reason, bad.outputs[0].stop_reason) == ("error", reason)
    assert reason.startswith(BAD_LOGITS)
    assert good.outputs[0].text == "abc"


def test_a_structure_that_no_token_can_follow_ends_its_request_alone() -> None:
    """Catches a request that goes on outside its structure: every token that it allows has logit -inf."""

    def logits_of(history: Any) -> np.ndarray:
        values = np.zeros(VOCAB, dtype=np.float32)
        values[ord("b")] = -np.inf
        return values

    bad, good = make_llm(logits_of).generate(
        ["p", "q"], [SamplingParams(structured={"choices": [choice]}) for choice in ("abc", "acc")]
    )
    assert (bad.outputs[0].text, bad.outputs[0].finish_reason) == ("a", "error")
    assert bad.outputs[0].stop_reason == NOTHING_ALLOWED
    assert good.outputs[0].text == "acc"


def test_a_structure_beyond_the_librarys_limits_ends_its_request_alone() -> None:
    """Catches an error of the library that is passed over, or that ends the step and with it everybody's requests."""
    doubling = "start: a0\n" + "\n".join(f"a{i}: a{i + 1} a{i + 1}" for i in range(30)) + '\na30: "x"'
    params = [SamplingParams(structured={"grammar": doubling}, max_tokens=40), SamplingParams(seed=1, max_tokens=40)]
    large, other = make_llm(random_logits(likely=[120])).generate(["p", "q"], params)
    answer = large.outputs[0]
    assert (answer.finish_reason, answer.text) == ("error", "x" * len(answer.token_ids))
    assert answer.stop_reason.startswith("the structure cannot be followed: ")
    alone = make_llm(random_logits(likely=[120])).generate("q", params[1])[0]
    assert other.outputs[0].token_ids == alone.outputs[0].token_ids


def test_logprobs_are_of_the_unmasked_model() -> None:
    """E59. Catches log-probabilities of the masked distribution, which would all be near 0 here."""
    llm = make_llm(random_logits())
    (output,) = ask(llm, {"choices": ["q"]}, logprobs=2)
    raw = torch.log_softmax(torch.from_numpy(random_logits()([*b"p"]).astype(np.float64)), 0)
    (entry,) = output.logprobs
    assert entry[ord("q")].logprob == pytest.approx(float(raw[ord("q")]), abs=1e-5)
    assert entry[ord("q")].rank == int((raw > raw[ord("q")]).sum()) + 1


def test_a_vocabulary_that_the_model_pads_or_cuts() -> None:
    """Catches masks as wide as the tokenizer put over logits that are wider or narrower."""
    constraint = Grammars(TOKENIZER).start(StructuredOutput(regex="[ab]"))
    for width in (90, 98, VOCAB):
        logits = torch.zeros(3, width + 5)[:, :width]
        TokenMasks(torch.device("cpu"), 3)(logits, [(1, constraint)])
        assert torch.equal(logits[0], torch.zeros(width))
        assert torch.isfinite(logits[1]).nonzero().flatten().tolist() == [i for i in (97, 98) if i < width]


@pytest.mark.gpu
def test_masks_on_a_gpu_are_those_of_the_cpu() -> None:
    """Catches a shift of signed words that differs, and a buffer that is written again too early."""
    grammars = Grammars(TOKENIZER)
    masks = [TokenMasks(torch.device(device), 4) for device in ("cpu", "cuda")]
    for regex in ("[a-z]+", "[^a-z]", "x"):
        rows = [(row, grammars.start(StructuredOutput(regex=regex))) for row in (0, 2)]
        logits = torch.randn(3, VOCAB)
        results = [logits.clone(), logits.cuda()]
        for mask, result in zip(masks, results, strict=True):
            mask(result, rows)
        assert torch.equal(results[0], results[1].cpu())


@pytest.mark.parametrize("kind", ["llama-bpe", "always", "never"])
def test_masks_over_vocabularies_of_every_kind(kind: str, tmp_path: Path) -> None:
    """Catches tokens spelled otherwise than they are shown (blanks of SentencePiece, byte tokens), and text that is
    certain but for which the tokenizer, which puts a blank in front, is asked in vain."""
    made = trained.byte_level(kind) if kind == "llama-bpe" else trained.sentencepiece(kind)
    tokenizer = Tokenizer.from_folder(trained.folder(tmp_path / "m", made))
    grammars = Grammars(tokenizer)
    for choice in CHOICES:
        constraint, text = grammars.start(StructuredOutput(choices=CHOICES)), b""
        while text != choice.encode():
            check_mask(constraint, tokenizer, text)
            wanted = [t for t in constraint.allowed() if choice.encode().startswith(text + tokenizer.token_bytes(t))]
            token = max((t for t in wanted if not tokenizer.is_control(t)), key=lambda t: len(tokenizer.token_bytes(t)))
            constraint.advance(token)
            text += tokenizer.token_bytes(token)
        assert constraint.error is None
        assert constraint.complete or set(tokenizer.end_ids) <= allowed(constraint)
