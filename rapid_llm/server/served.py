"""What the server takes from an `LLM`: everything that reaches into one is here.

The functions that tokenise, render and compile may take long and are called in a thread of the server's pool; none of
them touches the engine.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from rapid_llm.engine.params import SamplingParams
from rapid_llm.engine.prompts import ParsedPrompt, Prompt, check_length, parse_prompts
from rapid_llm.engine.text.chat import ChatTemplate

from .errors import ApiError

if TYPE_CHECKING:
    from rapid_llm.engine.core import Engine
    from rapid_llm.engine.job import Job
    from rapid_llm.engine.llm import LLM
    from rapid_llm.engine.text.tokenizer import Tokenizer


class Served:
    """One model under one name or several, the first of which is the one that answers tell."""

    def __init__(self, llm: LLM, names: Sequence[str]) -> None:
        if not names or not all(isinstance(name, str) and name for name in names):
            raise ValueError(f"served_model_name={list(names)!r}: give at least one name, none of them empty")
        self.llm = llm
        self.names = tuple(dict.fromkeys(names))
        self._template: ChatTemplate | None = None

    @property
    def name(self) -> str:
        return self.names[0]

    @property
    def engine(self) -> Engine:
        return self.llm._engine

    @property
    def tokenizer(self) -> Tokenizer:
        return self.llm.tokenizer

    @property
    def max_model_len(self) -> int:
        """The longest prompt plus answer, in tokens, that is ever served."""
        return min(self.llm.max_model_len, self.engine.scheduler.pool.usable_tokens + 1)

    @property
    def template_source(self) -> str:
        """The model's chat template; empty where it has none."""
        return self.tokenizer.chat_template or ""

    def check_model(self, name: str | None) -> None:
        """Raise `ApiError` (404, with the names that exist) for a model that is not served; None is the one that is."""
        if name is not None and name not in self.names:
            raise ApiError(
                404,
                f"the model {name!r:.80} is not served here; use one of {', '.join(self.names)}",
                param="model",
                code="model_not_found",
            )

    def parse(self, prompts: Prompt | Sequence[Prompt]) -> list[ParsedPrompt]:
        """Prompts of a completion. Raises `ValueError` or `TypeError`."""
        return parse_prompts(prompts, self.tokenizer)

    def render(
        self, messages: Sequence[Mapping[str, Any]], *, tools: Sequence[Mapping[str, Any]] | None, **variables: Any
    ) -> ParsedPrompt:
        """A conversation's prompt. Raises `ValueError` or `TypeError`."""
        if self._template is None:
            self._template = ChatTemplate(self.tokenizer)
        prompt = self._template.render(messages, tools=tools, **variables)
        return ParsedPrompt(prompt.text, prompt.token_ids)

    def check_lengths(self, prompts: Sequence[ParsedPrompt], what: str = "prompt") -> None:
        """Raise `ValueError`, with both numbers, for a prompt that is as long as the context or longer."""
        for i, prompt in enumerate(prompts):
            check_length(f"{what} {i}" if len(prompts) > 1 else what, len(prompt.ids), self.max_model_len)

    def jobs(
        self, prompts: Sequence[ParsedPrompt], params: SamplingParams, *, streamed: bool, cache_salt: str | None
    ) -> list[Job]:
        """Jobs for the prompts. Raises `ValueError` for what cannot be served.

        Without `max_tokens`, an answer may be as long as the context and the whole cache allow.
        """
        self.check_lengths(prompts)
        each = [params] * len(prompts)
        if params.max_tokens is None:
            each = [replace(params, max_tokens=self.max_model_len - len(prompt.ids)) for prompt in prompts]
        return self.llm._jobs(prompts, each, streamed=streamed, cache_salt=cache_salt)
