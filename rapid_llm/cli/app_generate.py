"""`rapid-llm generate` and `rapid-llm chat`: their arguments, their help, their examples."""

from __future__ import annotations

from typing import Annotated, Final

import typer

from .declare import Json, example
from .engine import (
    CudaGraphs,
    Deterministic,
    Guesses,
    KVCacheDtype,
    LoadFormat,
    PrefixCaching,
    Quantization,
    TensorParallel,
    engine_options,
)
from .sampling import (
    Choice,
    Echo,
    FrequencyPenalty,
    Grammar,
    IgnoreEos,
    JsonObject,
    JsonSchema,
    LogitBias,
    Logprobs,
    MaxTokens,
    MinP,
    MinTokens,
    PresencePenalty,
    PromptLogprobs,
    Regex,
    RepetitionPenalty,
    Samples,
    Seed,
    Stop,
    StopTokenId,
    Temperature,
    TopK,
    TopP,
    sampling,
)
from .support import guarded

MAX_TOKENS: Final = 256
"""The command line's own limit on an answer: the library's is for programs, and too short to read."""

TEMPERATURE: Final = 0.0
"""The command line's own temperature: the same question gives the same answer."""

Model = Annotated[
    str | None,
    typer.Option(
        "--model", "-m", help="A known name, a GGUF file, a folder, or a hub's org/name. Default: SmolLM2 135M."
    ),
]
Dtype = Annotated[str, typer.Option(help="auto, float32, bfloat16 or float16. float32 is exact; auto is fastest.")]
Device = Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N.")]
Threads = Annotated[int | None, typer.Option(help="Compute threads on CPU. Default: what this machine grants.")]
Context = Annotated[int | None, typer.Option("--max-model-len", help="Longest prompt plus answer, in tokens.")]
Stats = Annotated[bool, typer.Option("--stats", help="Say afterwards where the time went, op by op.")]


def speak(app: typer.Typer) -> None:
    """Add the commands."""
    app.command(
        epilog=example(
            'rapid-llm generate "The capital of France is" --max-tokens 20',
            'rapid-llm generate --chat "Why is the sky blue?" --stats',
            "echo 'Once upon a time' | rapid-llm generate - --temperature 0.7 --seed 1",
            'rapid-llm generate --chat "Is water wet?" --choice yes --choice no',
        )
    )(generate)
    app.command(
        epilog=example(
            "rapid-llm chat",
            'rapid-llm chat --system "You answer in one sentence." --temperature 0.7',
            "printf 'Hi\\nAnd in French?\\n' | rapid-llm chat",
        )
    )(chat)


@guarded
def generate(
    prompt: Annotated[str, typer.Argument(metavar="PROMPT", help="Text to continue; - reads it from standard input.")],
    chat: Annotated[
        bool, typer.Option("--chat", help="Ask PROMPT as a user, through the model's chat template.")
    ] = False,
    model: Model = None,
    max_tokens: MaxTokens = MAX_TOKENS,
    min_tokens: MinTokens = None,
    temperature: Temperature = TEMPERATURE,
    top_k: TopK = None,
    top_p: TopP = None,
    min_p: MinP = None,
    repetition_penalty: RepetitionPenalty = None,
    presence_penalty: PresencePenalty = None,
    frequency_penalty: FrequencyPenalty = None,
    logit_bias: LogitBias = None,
    seed: Seed = None,
    n: Samples = None,
    stop: Stop = None,
    stop_token_id: StopTokenId = None,
    ignore_eos: IgnoreEos = False,
    json_schema: JsonSchema = None,
    json_object: JsonObject = False,
    regex: Regex = None,
    choice: Choice = None,
    grammar: Grammar = None,
    echo: Echo = False,
    logprobs: Logprobs = None,
    prompt_logprobs: PromptLogprobs = None,
    dtype: Dtype = "auto",
    quantization: Quantization = None,
    kv_cache_dtype: KVCacheDtype = None,
    load_format: LoadFormat = "auto",
    device: Device = "auto",
    threads: Threads = None,
    max_model_len: Context = None,
    deterministic: Deterministic = False,
    prefix_caching: PrefixCaching = None,
    speculate: Guesses = None,
    cuda_graphs: CudaGraphs = None,
    tensor_parallel: TensorParallel = None,
    stats: Stats = False,
    json: Json = False,
) -> None:
    """Continue a text, printed as it comes."""
    from .generate import run

    run(
        prompt,
        as_chat=chat,
        model=model,
        options={
            "dtype": dtype,
            "quantization": quantization,
            "load_format": load_format,
            "device": device,
            "threads": threads,
            "max_model_len": max_model_len,
            **engine_options(
                deterministic=deterministic,
                prefix_caching=prefix_caching,
                speculate=speculate,
                cuda_graphs=cuda_graphs,
                kv_cache_dtype=kv_cache_dtype,
                tensor_parallel=tensor_parallel,
            ),
        },
        sampling=sampling(
            {
                "json_schema": json_schema,
                "json_object": json_object,
                "regex": regex,
                "choices": choice,
                "grammar": grammar,
            },
            logit_bias=logit_bias,
            max_tokens=max_tokens,
            min_tokens=min_tokens,
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            min_p=min_p,
            repetition_penalty=repetition_penalty,
            presence_penalty=presence_penalty,
            frequency_penalty=frequency_penalty,
            seed=seed,
            n=n,
            stop=stop,
            stop_token_ids=stop_token_id,
            ignore_eos=ignore_eos,
            echo=echo,
            logprobs=logprobs,
            prompt_logprobs=prompt_logprobs,
        ),
        stats=stats,
        json=json,
    )


@guarded
def chat(
    model: Model = None,
    system: Annotated[str | None, typer.Option(help="What the model is told before you speak.")] = None,
    max_tokens: MaxTokens = 2 * MAX_TOKENS,
    temperature: Temperature = TEMPERATURE,
    top_k: TopK = None,
    top_p: TopP = None,
    min_p: MinP = None,
    repetition_penalty: RepetitionPenalty = None,
    presence_penalty: PresencePenalty = None,
    frequency_penalty: FrequencyPenalty = None,
    logit_bias: LogitBias = None,
    seed: Seed = None,
    stop: Stop = None,
    json_schema: JsonSchema = None,
    json_object: JsonObject = False,
    regex: Regex = None,
    choice: Choice = None,
    grammar: Grammar = None,
    dtype: Dtype = "auto",
    quantization: Quantization = None,
    kv_cache_dtype: KVCacheDtype = None,
    load_format: LoadFormat = "auto",
    device: Device = "auto",
    threads: Threads = None,
    max_model_len: Context = None,
    deterministic: Deterministic = False,
    prefix_caching: PrefixCaching = None,
    speculate: Guesses = None,
    cuda_graphs: CudaGraphs = None,
    tensor_parallel: TensorParallel = None,
) -> None:
    """Talk to a model.

    Each line is a message; /help lists what else can be typed, /exit or Ctrl-D ends.
    """
    from .chat import run

    run(
        model=model,
        system=system,
        options={
            "dtype": dtype,
            "quantization": quantization,
            "load_format": load_format,
            "device": device,
            "threads": threads,
            "max_model_len": max_model_len,
            **engine_options(
                deterministic=deterministic,
                prefix_caching=prefix_caching,
                speculate=speculate,
                cuda_graphs=cuda_graphs,
                kv_cache_dtype=kv_cache_dtype,
                tensor_parallel=tensor_parallel,
            ),
        },
        sampling=sampling(
            {
                "json_schema": json_schema,
                "json_object": json_object,
                "regex": regex,
                "choices": choice,
                "grammar": grammar,
            },
            logit_bias=logit_bias,
            max_tokens=max_tokens,
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            min_p=min_p,
            repetition_penalty=repetition_penalty,
            presence_penalty=presence_penalty,
            frequency_penalty=frequency_penalty,
            seed=seed,
            stop=stop,
        ),
    )
