"""From the engine's outputs and deltas to OpenAI's JSON."""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final, NamedTuple, Protocol

from rapid_llm.engine.outputs import CompletionOutput, RequestOutput, TokenLogprobs

from .errors import ApiError

LEAST_LOGPROB: Final = -9999.0
"""Stands for the log of zero, which JSON cannot hold."""


class TokenSpeller(Protocol):
    """The part of a tokenizer that log-probabilities need."""

    def token_bytes(self, token_id: int) -> bytes: ...


class Usage(NamedTuple):
    prompt: int
    completion: int
    cached: int

    def json(self) -> dict[str, Any]:
        """cached_tokens: of the prompt, those that the prefix cache knew; of `n` answers, the first one's."""
        return {
            "prompt_tokens": self.prompt,
            "completion_tokens": self.completion,
            "total_tokens": self.prompt + self.completion,
            "prompt_tokens_details": {"cached_tokens": self.cached},
        }


def usage(outputs: Iterable[Any]) -> Usage:
    """Of anything that has `metrics`: outputs, or jobs that have ended. Each prompt counts once, whatever `n`."""
    metrics = [output.metrics for output in outputs]
    return Usage(
        sum(m.prompt_tokens for m in metrics),
        sum(m.output_tokens for m in metrics),
        sum(m.cached_tokens // m.samples for m in metrics),
    )


def spell(speller: TokenSpeller, token: int) -> str:
    """A token's text; for one that is no UTF-8 alone, `bytes:` and the bytes in hexadecimal: no two look alike."""
    data = speller.token_bytes(token)
    try:
        return data.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


def chat_logprobs(
    speller: TokenSpeller, token_ids: Sequence[int], found: Sequence[TokenLogprobs], top: int
) -> dict[str, Any]:
    """`{"content": [{token, logprob, bytes, top_logprobs}]}`, one entry for each token."""

    content = []
    for token, at in zip(token_ids, found, strict=True):
        best = [_entry(speller, other, at[other].logprob) for other in _best(at, top)]
        content.append({**_entry(speller, token, at[token].logprob), "top_logprobs": best})
    return {"content": content, "refusal": None}


class TextLogprobs:
    """The completions' shape, over one answer's tokens as they come: lists of the same length.

    text_offset: how many characters the tokens before it make, those of the prompt among them where it is echoed.
    """

    def __init__(self, speller: TokenSpeller, top: int) -> None:
        self._speller = speller
        self._top = top
        self._offset = 0
        self._characters = codecs.getincrementaldecoder("utf-8")("replace")

    def take(self, token_ids: Sequence[int], found: Sequence[TokenLogprobs | None]) -> dict[str, Any]:
        """The next tokens; None for the first one of a prompt, which nothing predicts."""
        shape: dict[str, Any] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
        for token, at in zip(token_ids, found, strict=True):
            shape["tokens"].append(spell(self._speller, token))
            shape["token_logprobs"].append(None if at is None else _number(at[token].logprob))
            best = (
                None if at is None else {spell(self._speller, t): _number(at[t].logprob) for t in _best(at, self._top)}
            )
            shape["top_logprobs"].append(best)
            shape["text_offset"].append(self._offset)
            self._offset += len(self._characters.decode(self._speller.token_bytes(token)))
        return shape


def joined(parts: Iterable[Mapping[str, list[Any]]]) -> dict[str, Any]:
    """Several of `TextLogprobs.take` as one."""
    found: dict[str, Any] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
    for part in parts:
        for name, values in part.items():
            found[name] += values
    return found


def text_choice(
    speller: TokenSpeller, output: RequestOutput, answer: CompletionOutput, index: int, *, top: int | None, echo: bool
) -> dict[str, Any]:
    """One choice of a completion. top: of its log-probabilities, None for none."""
    logprobs = None
    if top is not None:
        parts, shape = [], TextLogprobs(speller, top)
        if echo and output.prompt_logprobs is not None:
            parts.append(shape.take(output.prompt_token_ids, output.prompt_logprobs))
        parts.append(shape.take(answer.token_ids, answer.logprobs or []))
        logprobs = joined(parts)
    choice = {"index": index, "text": answer.text, "logprobs": logprobs}
    if output.prompt_logprobs is not None and not echo:
        choice["prompt_logprobs"] = [
            None if at is None else [_entry(speller, token, at[token].logprob) for token in at]
            for at in output.prompt_logprobs
        ]
    return choice | ending(answer.finish_reason, answer.stop_reason)


def ending(reason: str | None, stop_reason: int | str | None) -> dict[str, Any]:
    """finish_reason, and the stop string or id behind it. Raises `ApiError` for an answer that went wrong."""
    if reason == "error":
        raise ApiError(500, f"the answer cannot go on: {stop_reason}", code="answer_failed")
    if reason == "abort":
        raise ApiError(503, "the request was ended", code="aborted")
    return {"finish_reason": reason, "stop_reason": stop_reason}


def _entry(speller: TokenSpeller, token: int, logprob: float) -> dict[str, Any]:
    return {
        "token": spell(speller, token),
        "logprob": _number(logprob),
        "bytes": list(speller.token_bytes(token)),
    }


def _number(logprob: float) -> float:
    return max(logprob, LEAST_LOGPROB)


def _best(at: TokenLogprobs, top: int) -> list[int]:
    """The `top` most probable tokens, best first."""
    return [token for token in sorted(at, key=lambda t: at[t].rank) if at[token].rank <= top][:top]
