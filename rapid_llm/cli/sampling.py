"""How a request is to be sampled, as options: their declarations, and what they are to `SamplingParams`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from .support import USAGE, fail

MaxTokens = Annotated[int, typer.Option(help="At most this many tokens of answer.")]
MinTokens = Annotated[int | None, typer.Option(help="No end before so many tokens of answer.")]
Temperature = Annotated[float, typer.Option(help="0 takes the most probable token; 1 samples as the model says.")]
TopK = Annotated[int | None, typer.Option(help="Sample among the K most probable tokens. Default: off.")]
TopP = Annotated[float | None, typer.Option(help="Sample among the fewest tokens of this total probability.")]
MinP = Annotated[float | None, typer.Option(help="Leave out tokens less probable than this times the best one.")]
RepetitionPenalty = Annotated[
    float | None, typer.Option(help="Above 1: tokens of the prompt and the answer become less probable.")
]
PresencePenalty = Annotated[
    float | None, typer.Option(help="Taken from the logits of tokens that are in the answer, -2 to 2.")
]
FrequencyPenalty = Annotated[
    float | None, typer.Option(help="Taken from a token's logit for each time that it is in the answer, -2 to 2.")
]
LogitBias = Annotated[
    list[str] | None,
    typer.Option(metavar="ID=BIAS", help="Added to the logit of a token, -100 to 100. May be given several times."),
]
Seed = Annotated[int | None, typer.Option(help="Makes the drawn tokens repeatable.")]
Samples = Annotated[int | None, typer.Option("--n", help="So many answers; several need --json.")]
Stop = Annotated[list[str] | None, typer.Option(help="End the answer at this text. May be given several times.")]
StopTokenId = Annotated[
    list[int] | None, typer.Option(help="End the answer at this token. May be given several times.")
]
IgnoreEos = Annotated[bool, typer.Option("--ignore-eos", help="Go on after the model's own end token.")]
JsonSchema = Annotated[str | None, typer.Option(metavar="JSON|@FILE", help="The answer is JSON of this schema.")]
JsonObject = Annotated[bool, typer.Option("--json-object", help="The answer is a JSON object.")]
Regex = Annotated[str | None, typer.Option(help="The answer matches this regular expression.")]
Choice = Annotated[list[str] | None, typer.Option(help="The answer is this text, or one of several. May be repeated.")]
Grammar = Annotated[
    str | None, typer.Option(metavar="TEXT|@FILE", help="The answer is of this grammar, in Lark's or GBNF notation.")
]
Echo = Annotated[bool, typer.Option("--echo", help="Print the prompt in front of the answer.")]
Logprobs = Annotated[
    int | None, typer.Option(help="With --json: log-probabilities of each token and the K most probable ones.")
]
PromptLogprobs = Annotated[int | None, typer.Option(help="With --json: the same of each token of the prompt.")]


def sampling(structured: Mapping[str, Any], *, logit_bias: Sequence[str] | None, **given: Any) -> dict[str, Any]:
    """What `SamplingParams.of` takes: only what was given, the rest keeps its defaults.

    structured: forms by the names of `StructuredOutput`'s fields, of which a schema or a grammar may be @FILE.
    """
    forms = {name: value for name, value in structured.items() if value not in (None, False, [])}
    for name in ("json_schema", "grammar"):
        if name in forms:
            forms[name] = _text(name, forms[name])
    biases = [_bias(entry) for entry in logit_bias or ()]
    twice = next((token for i, (token, _) in enumerate(biases) if token in dict(biases[:i])), None)
    if twice is not None:
        fail(f"--logit-bias names token {twice} twice; give it once", USAGE)
    given |= {"logit_bias": dict(biases) or None, "structured": forms or None}
    return {name: value for name, value in given.items() if value is not None and value != []}


def _bias(entry: str) -> tuple[int, float]:
    token, _, bias = entry.partition("=")
    try:
        return int(token), float(bias)
    except ValueError:
        fail(f"--logit-bias {entry!r} is not accepted; use ID=BIAS, such as 42=-100", USAGE)


def _text(name: str, value: str) -> str:
    """`value` itself, or what is in the file that it names."""
    if not value.startswith("@"):
        return value
    option = f"--{name.replace('_', '-')}"
    try:
        return Path(value[1:]).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        fail(f"{option} {value}: {error}", USAGE)
