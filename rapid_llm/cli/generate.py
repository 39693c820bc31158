"""`rapid-llm generate`: one prompt, streamed to standard output."""

from __future__ import annotations

import contextlib
import dataclasses
import sys
from collections.abc import Generator, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from .support import USAGE, fail, print_json, usage

if TYPE_CHECKING:
    from rapid_llm.engine.llm import LLM
    from rapid_llm.engine.outputs import RequestOutput
    from rapid_llm.engine.params import SamplingParams


def run(
    prompt: str,
    *,
    as_chat: bool,
    model: str | None,
    options: Mapping[str, Any],
    sampling: Mapping[str, Any],
    stats: bool,
    json: bool,
) -> None:
    """Generate for `prompt` and print: the text as it comes, or everything as JSON once it is done."""
    from rapid_llm.engine.text.tokenizer import require_text

    params = make_params(sampling)
    if not json:
        _require_json(params)
    text = _read_stdin() if prompt == "-" else prompt
    if not text:
        fail("the prompt is empty; give at least one character", USAGE)
    with usage():
        require_text(text, "the prompt")
    llm = make_llm(model, options)
    with contextlib.ExitStack() as stack:
        watch = stack.enter_context(llm.stats()) if stats else None
        if json:
            output = _complete(llm, text, params, as_chat)
        else:
            _stream(llm, text, params, as_chat)
    report = watch.report() if watch is not None else None
    if json:
        result = as_json(output)
        if report is not None:
            result["stats"] = report.json()
        print_json(result)
        for answer in output.outputs:
            if answer.finish_reason == "error":
                fail(answer.stop_reason)
    elif report is not None:
        print(f"\n{report}", file=sys.stderr)


def _require_json(params: SamplingParams) -> None:
    """Some of what can be asked for has no place in a text that is printed as it comes."""
    asked = {"n": params.n > 1, "logprobs": params.logprobs is not None}
    asked["prompt-logprobs"] = params.prompt_logprobs is not None
    for option, is_asked in asked.items():
        if is_asked:
            fail(f"--{option} is shown as JSON alone; give --json too", USAGE)


def make_params(sampling: Mapping[str, Any]) -> SamplingParams:
    """Checked before the model is loaded, so that a mistake costs no wait."""
    from rapid_llm.engine.params import SamplingParams

    with usage():
        return SamplingParams.of(sampling)


def make_llm(model: str | None, options: Mapping[str, Any]) -> LLM:
    """Load the model; options that it or the machine cannot honour are usage errors, a damaged file is not."""
    from rapid_llm.engine.options import EngineOptions

    given: dict[str, Any] = {name: value for name, value in options.items() if value is not None}
    with usage():
        EngineOptions(**given)  # before torch is imported, which takes a second
    if model is not None:
        given["model"] = model
    from rapid_llm.engine.llm import LLM
    from rapid_llm.models.errors import ModelError

    try:
        return LLM(**given)
    except ModelError:
        raise
    except ValueError as error:
        fail(error, USAGE)


def _messages(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


def _complete(llm: LLM, text: str, params: SamplingParams, as_chat: bool) -> RequestOutput:
    with usage():
        outputs = llm.chat(_messages(text), params) if as_chat else llm.generate(text, params)
    return outputs[0]


def _stream(llm: LLM, text: str, params: SamplingParams, as_chat: bool) -> None:
    with usage():
        deltas = llm.stream_chat(_messages(text), params) if as_chat else llm.stream(text, params)
    last, end = "", None
    for end in write(deltas):
        last = end or last
    if not last.endswith("\n"):
        print(flush=True)
    if end is not None and end.finish_reason == "error":
        fail(end.stop_reason)


def write(deltas: Iterator[Any]) -> Generator[Any, None, None]:
    """Print each delta at once, and pass it on; closing this ends the request."""
    try:
        for delta in deltas:
            sys.stdout.write(delta)
            sys.stdout.flush()
            yield delta
    finally:
        deltas.close()  # type: ignore[attr-defined]


def _read_stdin() -> str:
    try:
        return sys.stdin.read()
    except UnicodeDecodeError as error:
        fail(f"standard input is not {error.encoding}: {error.reason} at byte {error.start}", USAGE)


def as_json(output: RequestOutput) -> dict[str, Any]:
    """A `RequestOutput` as plain data, with the two derived figures of its metrics."""
    data = dataclasses.asdict(output)
    if output.metrics is not None:
        data["metrics"]["time_to_first_token"] = output.metrics.time_to_first_token
        data["metrics"]["tokens_per_second"] = output.metrics.tokens_per_second
    return data
