"""What requests may hold. No field is accepted and ignored, and null is the same as absent.

Types are checked here; values of sampling fields by `SamplingParams`, the one place that does it for every door. A
field of OpenAI's that has no effect here is refused by name, unless its value asks for nothing (`_NEUTRAL`).
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar, Final, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from rapid_llm.engine.checks import INT32_MAX
from rapid_llm.engine.params import SamplingParams

from .errors import ApiError, refused

UNSUPPORTED: Final = {
    "best_of": "answers are not ranked; use n",
    "suffix": "text is not filled in between a prompt and a suffix",
    "audio": "there is no audio output",
    "modalities": "answers are text",
    "prediction": "predicted outputs are not read; the server option --speculate guesses from the text itself",
    "functions": "use tools",
    "function_call": "use tool_choice",
    "web_search_options": "the server searches nothing",
    "reasoning_effort": "use chat_template_kwargs, for models whose template has such a switch",
    "verbosity": "no model here knows it; ask in the prompt",
    "metadata": "nothing is stored",
    "store": "nothing is stored",
    "service_tier": "there is one tier",
    "safety_identifier": "no usage policy is enforced; use user, which the log shows",
    "prompt_cache_key": "prefixes are found by themselves; use cache_salt to keep them apart",
    "prompt_cache_retention": "prefixes are kept as long as there is room",
    "moderation": "nothing is moderated",
    "dimensions": "the model's hidden size is what there is",
}
"""Fields that OpenAI's interface has and this one has not -> why, or what to use."""

_NEUTRAL: Final[dict[str, tuple[Any, ...]]] = {
    "best_of": (1,),
    "suffix": ("",),
    "modalities": (["text"],),
    "store": (False,),
    "service_tier": ("auto", "default"),
    "metadata": ({},),
}
"""Values of unsupported fields that ask for what is done anyway."""

M = TypeVar("M", bound="Body")


class _Part(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", hide_input_in_errors=True)


class Body(_Part):
    """A request's JSON object."""

    sampling: ClassVar[frozenset[str]] = frozenset()
    """Fields that are `SamplingParams`' own, under the same names."""

    model: str | None = None


class StreamOptions(_Part):
    include_usage: bool | None = None


class JsonSchema(_Part):
    name: str | None = None
    description: str | None = None
    schema_: dict[str, Any] | None = Field(default=None, alias="schema")
    strict: bool | None = None


class ResponseFormat(_Part):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None


class _Sampled(Body):
    """Fields that completions and chat share."""

    n: int | None = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    max_tokens: int | None = None
    min_tokens: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    seed: int | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    skip_special_tokens: bool | None = None
    structured: dict[str, Any] | None = None
    response_format: ResponseFormat | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    cache_salt: str | None = None
    user: str | None = None

    sampling: ClassVar[frozenset[str]] = frozenset(
        {
            *("n", "temperature", "top_k", "top_p", "min_p", "max_tokens", "min_tokens", "stop", "stop_token_ids"),
            *("include_stop_str_in_output", "ignore_eos", "seed", "repetition_penalty", "presence_penalty"),
            *("frequency_penalty", "logit_bias", "skip_special_tokens"),
        }
    )

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    def given(self) -> dict[str, Any]:
        """Sampling fields that are there, and the structure."""
        found = {name: getattr(self, name) for name in self.sampling if getattr(self, name) is not None}
        structure = self._structure()
        if structure is not None:
            found["structured"] = structure
        return found

    def _structure(self) -> dict[str, Any] | None:
        form = self.response_format
        if form is None or form.type == "text":
            return self.structured
        if self.structured is not None:
            raise ApiError(400, "response_format and structured are both given; use one of them", param="structured")
        if form.type == "json_object":
            return {"json_object": True}
        if form.json_schema is None or form.json_schema.schema_ is None:
            raise ApiError(
                400, "response_format of type json_schema needs json_schema.schema", param="response_format.json_schema"
            )
        return {"json_schema": form.json_schema.schema_}


class CompletionRequest(_Sampled):
    prompt: Any
    """Text, token ids, or a list of either; `engine.prompts` checks it."""
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    echo: bool | None = None

    def params(self) -> SamplingParams:
        """With `echo` and `logprobs`, the prompt's log-probabilities are wanted as well."""
        _check_stream(self)
        given = self.given()
        given |= {"logprobs": self.logprobs, "prompt_logprobs": self.prompt_logprobs, "echo": self.echo}
        if self.echo and self.logprobs is not None and self.prompt_logprobs is None:
            given["prompt_logprobs"] = self.logprobs
        if self.stream and given["prompt_logprobs"] is not None:
            name = "prompt_logprobs" if self.prompt_logprobs is not None else "echo"
            raise ApiError(
                400, f"{name}: log-probabilities of the prompt are not streamed; use stream false", param=name
            )
        return sampling_params(given)


class Function(_Part):
    name: str = Field(pattern=r"^[a-zA-Z0-9_.-]{1,64}$")
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(_Part):
    type: Literal["function"]
    function: Function


class NamedFunction(_Part):
    name: str


class NamedTool(_Part):
    type: Literal["function"]
    function: NamedFunction


class ChatRequest(_Sampled):
    messages: list[dict[str, Any]]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    tools: list[Tool] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    parallel_tool_calls: bool | None = None
    add_generation_prompt: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    def params(self, **more: Any) -> SamplingParams:
        """more: fields that the tools decide. Without a limit, an answer goes on until the context is full."""
        _check_stream(self)
        given = self.given()
        if self.max_completion_tokens is not None:
            given["max_completion_tokens"] = self.max_completion_tokens
        if self.top_logprobs is not None and not self.logprobs:
            raise ApiError(400, "top_logprobs needs logprobs true", param="top_logprobs")
        if self.logprobs:
            given["logprobs"] = self.top_logprobs or 0
        return sampling_params(given | more, {"logprobs": "top_logprobs"}, unlimited=True)


class EmbeddingRequest(Body):
    input: Any
    """Text, token ids, or a list of either; `engine.prompts` checks it."""
    encoding_format: Literal["float", "base64"] | None = None
    pooling: Literal["mean", "last"] | None = None
    user: str | None = None


class TokenizeRequest(Body):
    """prompt: text. messages: a conversation, in its place."""

    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None


class DetokenizeRequest(Body):
    tokens: list[int]
    skip_special_tokens: bool | None = None


def read(kind: type[M], body: object) -> M:
    """A request's JSON value as a model. Raises `ApiError` naming the field: 422 for a wrong type, 400 for the rest."""
    if not isinstance(body, dict):
        raise ApiError(422, f"the body must be a JSON object, not {_kind(body)}", code="invalid_type")
    known = {field.alias or name for name, field in kind.model_fields.items()}
    given = {}
    for name, value in body.items():
        if name in UNSUPPORTED and name not in known:
            if value is not None and value not in _NEUTRAL.get(name, ()):
                raise ApiError(
                    400, f"{name} is not supported: {UNSUPPORTED[name]}", param=name, code="unsupported_parameter"
                )
        elif name not in known:
            near = difflib.get_close_matches(str(name), known, n=1)
            hint = f"did you mean {near[0]}?" if near else f"known fields: {', '.join(sorted(known))}"
            raise ApiError(
                400, f"{name!r:.80} is not a field of this request; {hint}", param=name[:80], code="unknown_field"
            )
        else:
            given[name] = value
    try:
        return kind.model_validate(given)
    except ValidationError as error:
        raise _refusal(error) from error


def sampling_params(
    given: Mapping[str, Any], names: Mapping[str, str] | None = None, *, unlimited: bool = False
) -> SamplingParams:
    """`SamplingParams` of a request's fields, its refusals as `ApiError`.

    names: what the request calls a field that it names otherwise. unlimited: no `max_tokens` means no limit, not 16.
    """
    given = {name: value for name, value in given.items() if value is not None}
    unlimited = unlimited and not given.keys() & {"max_tokens", "max_completion_tokens"}
    try:
        # None would mean absent here, and `min_tokens` is held against the limit
        params = SamplingParams.of(given | {"max_tokens": INT32_MAX} if unlimited else given)
        return replace(params, max_tokens=None) if unlimited else params
    except (ValueError, TypeError) as error:
        found = refused(error)
        if found.param is not None:
            found.param = (names or {}).get(found.param, found.param)
        raise found from error


def _check_stream(request: _Sampled) -> None:
    if request.stream_options is not None and not request.stream:
        raise ApiError(400, "stream_options needs stream true", param="stream_options")


def _refusal(error: ValidationError) -> ApiError:
    """The first complaint. Parts of a place that only pydantic has words for (a union's member) are left out."""
    first = error.errors()[0]
    place = [str(part) for part in first["loc"] if isinstance(part, int) or str(part).isidentifier()]
    kind = first["type"]
    if place and place[-1] in ("str", "int", "float", "bool"):
        place.pop()
    where = ".".join(place)
    if kind == "extra_forbidden":
        return ApiError(400, f"{where} is not a field of this request", param=where, code="unknown_field")
    if kind == "missing":
        return ApiError(422, f"{where} is missing", param=where, code="missing_field")
    wrong_type = kind.endswith("_type") or kind in ("int_from_float", "none_required")
    text = f"{where}: {first['msg'][:1].lower()}{first['msg'][1:]}"
    status, code = (422, "invalid_type") if wrong_type else (400, "invalid_value")
    return ApiError(status, text, param=where, code=code)


def _kind(value: object) -> str:
    names = {type(None): "null", bool: "a boolean", int: "a number", float: "a number", str: "a string", list: "a list"}
    return names.get(type(value), type(value).__name__)
