"""`LLM`: a model, its tokenizer and an engine, behind the three calls that users make."""

from __future__ import annotations

import contextlib
import itertools
import os
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from rapid_llm.kernels import Selected
from rapid_llm.kernels.ops.gemm.linear_cublas import keep_full_sums
from rapid_llm.kernels.preparation import PrepareReport, Progress, prepare
from rapid_llm.models.hub import DEFAULT_MODEL

from . import invariance
from .assembly import Sizes, affordable, assemble, context_of, graphs_line, scheduler_of, use_threads
from .clock import now
from .core import Engine, EngineError
from .decode_graphs import GraphReport
from .explain import EngineExplanation
from .grammar import Constraint, Grammars
from .host_memory import keep_freed_memory
from .job import Job
from .kv_memory import bytes_per_token, cache_dtype, choose_tokens, free_memory
from .kv_pool import KVPool
from .loading import FileRecipe, resolve_device
from .options import DEFAULTS, PAGE_SIZE, EngineOptions
from .outputs import RequestOutput, TextDelta
from .params import SamplingParams
from .prompts import ParsedPrompt, Prompt, check_length, check_salt, params_for, parse_prompt, parse_prompts
from .runner import Model, Runner
from .sampler import Sampler, request_key
from .speculation import Speculation
from .stats import Stats
from .text.chat import ChatTemplate
from .text.tokenizer import Tokenizer
from .warmup import steps

if TYPE_CHECKING:
    from .parallel import Recipe, Team

Message = Mapping[str, Any]


class LLM:
    """A language model on this machine. Safe to call from several threads: their requests share each step.

    model: a known name, the path of a GGUF file or of a folder in the layout of Hugging Face, or an id of that hub such
    as `org/name` (`org/name@revision`, `org/name:Q4_K_M` for a GGUF file there); the other arguments are those of
    `EngineOptions`, where they are described. tokenizer, device, max_model_len, kv_cache_tokens, threads and options
    tell what the engine really has. Raises `ValueError` for options that this model or machine cannot honour, and the
    errors of loading a model.
    """

    def __init__(
        self,
        model: str | os.PathLike[str] = DEFAULT_MODEL,
        *,
        dtype: str | torch.dtype = DEFAULTS.dtype,
        device: str | torch.device = DEFAULTS.device,
        max_model_len: int | None = DEFAULTS.max_model_len,
        kv_cache_tokens: int | None = DEFAULTS.kv_cache_tokens,
        deterministic: bool = DEFAULTS.deterministic,
        seed: int = DEFAULTS.seed,
        threads: int | None = DEFAULTS.threads,
        max_batch_tokens: int | None = DEFAULTS.max_batch_tokens,
        max_running: int = DEFAULTS.max_running,
        enable_prefix_caching: bool = DEFAULTS.enable_prefix_caching,
        speculative: Mapping[str, Any] | Speculation | None = DEFAULTS.speculative,
        load_format: str = DEFAULTS.load_format,
        quantization: str | None = DEFAULTS.quantization,
        kv_cache_dtype: str = DEFAULTS.kv_cache_dtype,
        cuda_graphs: str = DEFAULTS.cuda_graphs,
        tensor_parallel: int = DEFAULTS.tensor_parallel,
    ) -> None:
        options = EngineOptions(
            dtype=str(dtype),
            device=str(device),
            max_model_len=max_model_len,
            kv_cache_tokens=kv_cache_tokens,
            deterministic=deterministic,
            seed=seed,
            threads=threads,
            max_batch_tokens=max_batch_tokens,
            max_running=max_running,
            enable_prefix_caching=enable_prefix_caching,
            speculative=speculative,
            load_format=load_format,
            quantization=quantization,
            kv_cache_dtype=kv_cache_dtype,
            cuda_graphs=cuda_graphs,
            tensor_parallel=tensor_parallel,
        )
        self._start(FileRecipe(os.fspath(model)), options)

    @classmethod
    def from_recipe(cls, recipe: Recipe, **options: Any) -> LLM:
        """An engine whose ranks, be it one or several, make their parts of the model by `recipe`; options as in
        `LLM`."""
        self = cls.__new__(cls)
        self._start(recipe, EngineOptions.of(options))
        return self

    @classmethod
    def from_parts(cls, decoder: Model, tokenizer: Tokenizer, **options: Any) -> LLM:
        """An engine around a decoder and a tokenizer of your own; options as in `LLM`, but for dtype and device."""
        self = cls.__new__(cls)
        checked = EngineOptions(**options)
        if checked.tensor_parallel > 1:
            raise ValueError(
                f"tensor_parallel={checked.tensor_parallel}: this decoder is of one process; use LLM or LLM.from_recipe"
            )
        use_threads(checked, decoder.device)
        self._set_up(decoder, tokenizer, checked)
        return self

    def _start(self, recipe: Recipe, options: EngineOptions) -> None:
        if options.tensor_parallel == 1:
            target = resolve_device(options.device)
            use_threads(options, target)
            self._set_up(*recipe(options, target, None), options)
            return
        from .parallel import Team

        team = Team(recipe, options)
        try:
            use_threads(options, team.device)
            self._set_up(*recipe(options, team.device, team.ranks), options, team)
        except BaseException:
            team.close()
            raise
        weakref.finalize(self, team.close)

    def close(self) -> None:
        """End the processes of other ranks, where there are any; the engine then serves no more."""
        if self._team is not None:
            self._team.close()

    def _set_up(self, decoder: Model, tokenizer: Tokenizer, options: EngineOptions, team: Team | None = None) -> None:
        config, device = decoder.config, decoder.device
        asked = cache_dtype(options.kv_cache_dtype)
        if asked is not None and asked != decoder.kv_dtype:
            raise ValueError(
                f"kv_cache_dtype={options.kv_cache_dtype!r}: this decoder was bound for a cache of {decoder.kv_dtype}; "
                f"make it with kv_dtype={asked}, or leave the option out"
            )
        self.options = options
        self.tokenizer = tokenizer
        self.device = device
        context = context_of(options.max_model_len, config.max_model_len)
        self.threads = torch.get_num_threads()
        token_bytes = bytes_per_token(config, decoder.kv_dtype)
        free = free_memory(device) if team is None else team.agree(decoder)
        tokens = choose_tokens(options.kv_cache_tokens, context, token_bytes, free)
        self.max_model_len = context if options.kv_cache_tokens is not None else affordable(options, context, tokens)
        self.kv_cache_tokens = tokens
        self._kv_bytes = tokens * token_bytes
        pool = KVPool(tokens // PAGE_SIZE + 1, PAGE_SIZE)
        scheduler = scheduler_of(pool, options, device.type)
        max_batch_tokens, max_running = scheduler.max_batch_tokens, scheduler.max_running
        guesses = 0 if options.speculation is None else options.speculation.num_tokens
        self._max_rows = min(max_running * (1 + guesses), max_batch_tokens)
        # A table with more rows than the tokenizer has ids is padded; the rest must never be sampled.
        self._vocab_size = min(tokenizer.vocab_size, config.vocab_size)
        max_pages = min(pool.usable_pages, pool.pages_for(self.max_model_len))
        sizes = Sizes(pool.num_pages, max_batch_tokens, max_running, self._max_rows, max_pages, self._vocab_size)
        self._kv, builder, self._graphs = assemble(decoder, sizes, options, team and team.ranks)
        self._sampler = Sampler(self._vocab_size, device, self._max_rows)
        self._grammars = Grammars(tokenizer)
        self._decoder = decoder
        self._team = team
        runner: Any = Runner if team is None else team.lead(sizes)
        self._engine = Engine(scheduler, runner(decoder, self._kv, builder, self._sampler, self._graphs))
        self._serial = itertools.count()
        self._chat_template: ChatTemplate | None = None
        if device.type == "cpu":
            keep_freed_memory()
        else:
            keep_full_sums()

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        cache_salt: str | None = None,
    ) -> list[RequestOutput]:
        """Answers to one prompt (text, in which control tokens count, or token ids) or to a list of them, in order.

        cache_salt: take over cached prefixes only from, and leave them only to, requests of the same salt.

        Raises `ValueError` or `TypeError`, before anything runs, for prompts and parameters that cannot be served, and
        `EngineError` if a step failed in another thread.
        """
        parsed = parse_prompts(prompts, self.tokenizer)
        return self._run(parsed, params_for(sampling_params, len(parsed)), cache_salt)

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        cache_salt: str | None = None,
    ) -> list[RequestOutput]:
        """Answers to a conversation (messages with `role` and `content`) or to a list of them, in order.

        What messages say never turns into control tokens. Errors as in `generate`, and `ChatTemplateError`.
        """
        several = isinstance(messages, Sequence) and len(messages) > 0 and isinstance(messages[0], Sequence)
        conversations: Sequence[Any] = messages if several and not isinstance(messages[0], str) else [messages]
        parsed = [self._render(conversation) for conversation in conversations]
        return self._run(parsed, params_for(sampling_params, len(parsed)), cache_salt)

    def stream(
        self, prompt: Prompt, sampling_params: SamplingParams | None = None, *, cache_salt: str | None = None
    ) -> Iterator[TextDelta]:
        """The answer to one prompt as it comes: each delta is a `str`, and all of one sample join to its text.

        A prompt or parameter that cannot be served raises here; the request starts with the first `next`, and closing
        the iterator ends it.
        """
        return self._stream(parse_prompt(prompt, self.tokenizer), params_for(sampling_params, 1)[0], cache_salt)

    def stream_chat(
        self,
        messages: Sequence[Message],
        sampling_params: SamplingParams | None = None,
        *,
        cache_salt: str | None = None,
    ) -> Iterator[TextDelta]:
        """The answer to one conversation as it comes; see `stream` and `chat`."""
        return self._stream(self._render(messages), params_for(sampling_params, 1)[0], cache_salt)

    def explain(self) -> EngineExplanation:
        """Which row runs each op of this model here, and why; `str()` is a report, `json()` the same as data."""
        decoder = self._decoder
        activations, cache = (str(kind).removeprefix("torch.") for kind in (decoder.activation_dtype, decoder.kv_dtype))
        settings = {
            "device": str(self.device),
            "dtype": f"{self.options.dtype} (activations {activations}, cache {cache})",
            "threads": self.threads,
            "context": f"{self.max_model_len} tokens",
            "cache": f"{self.kv_cache_tokens} tokens"
            + (", memory taken as it fills" if self.device.type == "cpu" else ""),
            "step": f"at most {self._engine.scheduler.max_batch_tokens} tokens, "
            f"{self._engine.scheduler.max_running} requests",
            "deterministic": self.options.deterministic,
            **({"batch invariance": invariance.line(decoder.bindings())} if self.options.deterministic else {}),
            "decode graphs": graphs_line(self._graphs),
            "tensor parallel": self._team.described if self._team is not None else "off",
            "prefix cache": "on" if self.options.enable_prefix_caching else "off",
            "speculative": "off" if self.options.speculation is None else str(self.options.speculation),
        }
        memory = {**decoder.memory(), "kv_cache": self._kv_bytes}
        return EngineExplanation(settings, memory, self.bindings())

    def bindings(self) -> list[tuple[str, str, Selected]]:
        """(sizes it holds for, op id, handle) of every row that this engine calls."""
        return [*self._decoder.bindings(), *self._sampler.bindings()]

    @property
    def graphs(self) -> GraphReport | None:
        """What ran as a CUDA graph so far, what did not, and why; None where decode steps have no fixed sizes."""
        return None if self._graphs is None else self._graphs.report

    def prepare(self, *, jobs: int | None = None, progress: Progress | None = None) -> PrepareReport:
        """Build and load all that this engine will call, at every size of step, so that `freeze()` may follow.

        See `rapid_llm.kernels.prepare`. Requests may be running; their memory is not touched.
        """
        with contextlib.nullcontext() if self._team is None else self._team.preparing(jobs):
            return prepare(model=self, jobs=jobs, progress=progress)

    def rehearsals(self) -> Iterator[tuple[str, Callable[[], None]]]:
        """For `prepare`: steps of every size whose kernels are compiled for their arguments; none on a CPU."""
        if self.device.type == "cpu":
            return
        if self._graphs is not None and self._team is None:  # a graph of several ranks holds their exchanges
            yield from self._graphs.rehearse()
        most, requests = self._engine.scheduler.max_batch_tokens, self._engine.scheduler.max_running
        yield from steps(
            self._decoder,
            self._kv,
            self._sampler,
            max_tokens=most,
            max_sequences=requests,
            max_rows=self._max_rows,
        )

    def stats(self, *, every: int = 8) -> Stats:
        """Measure while a `with` block runs: `with llm.stats() as stats: llm.generate(...)`, then `stats.report()`.

        every: of the decode steps, one in so many is timed op by op, which slows that step; rates leave it out.
        """
        return Stats(self._engine, (self._decoder, self._sampler), self.device, every=every)

    def _render(self, messages: Sequence[Message]) -> ParsedPrompt:
        if self._chat_template is None:
            self._chat_template = ChatTemplate(self.tokenizer)
        prompt = self._chat_template.render(messages)
        return ParsedPrompt(prompt.text, prompt.token_ids)

    def _jobs(
        self,
        prompts: Sequence[ParsedPrompt],
        params: Sequence[SamplingParams],
        *,
        streamed: bool = False,
        cache_salt: str | None = None,
    ) -> list[Job]:
        """Jobs for the prompts, none of them submitted; raises for whatever could not run."""
        check_salt(cache_salt)
        limits = []
        constraints: list[Constraint | None] = []
        for i, (prompt, sampling) in enumerate(zip(prompts, params, strict=True)):
            what = f"prompt {i}" if len(prompts) > 1 else "prompt"
            check_length(what, len(prompt.ids), self.max_model_len)
            sampling.check_vocab(self._vocab_size)
            limit = self.max_model_len
            if sampling.max_tokens is not None:
                limit = min(limit, len(prompt.ids) + sampling.max_tokens)
            self._engine.scheduler.check_fits(limit - 1)  # the last token of an answer is never computed
            limits.append(limit)
            structure = sampling.structure
            constraints.append(None if structure is None else self._grammars.start(structure))
        jobs = []
        for prompt, sampling, limit, constraint in zip(prompts, params, limits, constraints, strict=True):
            serial = next(self._serial)
            own = (self.options.seed, serial + 1) if sampling.seed is None else (sampling.seed,)
            jobs.append(
                Job(
                    str(serial),
                    prompt.text,
                    prompt.ids,
                    sampling,
                    vocabulary=self.tokenizer,
                    end_ids=self.tokenizer.end_ids,
                    key=request_key(*own),
                    max_len=limit,
                    arrival=now(),
                    streamed=streamed,
                    vocab_size=self._vocab_size,
                    constraint=constraint,
                )
            )
            for request in jobs[-1].requests:
                request.salt = cache_salt
        return jobs

    def _run(
        self, prompts: Sequence[ParsedPrompt], params: Sequence[SamplingParams], cache_salt: str | None
    ) -> list[RequestOutput]:
        jobs = self._jobs(prompts, params, cache_salt=cache_salt)
        try:
            for job in jobs:
                self._engine.submit(job)
            self._engine.drive(lambda: all(job.finished for job in jobs))
        finally:
            self._engine.abort(jobs)
        for job in jobs:
            _raise_failure(job)
        return [job.output() for job in jobs]

    def _stream(self, prompt: ParsedPrompt, params: SamplingParams, cache_salt: str | None) -> Iterator[TextDelta]:
        (job,) = self._jobs([prompt], [params], streamed=True, cache_salt=cache_salt)
        return self._deltas(job)

    def _deltas(self, job: Job) -> Iterator[TextDelta]:
        job.metrics.arrival = now()
        self._engine.submit(job)
        try:
            finished = False
            while not finished:
                self._engine.drive(lambda: job.has_news)
                _raise_failure(job)
                finished = job.finished  # read first: once it is true, every event is in
                yield from job.deltas()
        finally:
            self._engine.abort([job])


def _raise_failure(job: Job) -> None:
    if job.failure is not None:
        raise EngineError(f"a step failed in another thread: {job.failure}") from job.failure
