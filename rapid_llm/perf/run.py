"""One offline benchmark from its request to its record: refusals first, then limits, engine, cases and peers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from rapid_llm.bench import Figure, Run, device_for
from rapid_llm.bench.device import Device
from rapid_llm.bench.load import PATIENCE_S

from . import earlier
from .arms import OURS, Arm, EngineArm
from .busy import require_idle_device
from .cases import Case
from .engine import Built, build
from .limits import Limits, dtypes_of_products, measure_limits
from .offline import CaseResult, measure, out_of_memory, prompts_of

if TYPE_CHECKING:
    from rapid_llm.models.config import ModelConfig

PEERS: Final = ("transformers",)
PROFILED: Final = 12
"""Lines of a profile that are kept."""


@dataclass(frozen=True, slots=True)
class Request:
    """What is asked for. shape: a name, or a configuration of your own; model: a file or a folder, where shape is None.
    options: of the engine. max_seconds: for the rounds of one case, peers included."""

    shape: str | ModelConfig | None
    model: str | None
    options: Mapping[str, Any]
    cases: Sequence[Case]
    rounds: int = 10
    max_seconds: float = 60.0
    seed: int = 0
    peers: Sequence[str] = ()
    profile: bool = False
    force_busy: bool = False
    patience: float = PATIENCE_S
    command: str = ""


@dataclass(slots=True)
class Outcome:
    """results: of every case that fits, in order. record: everything, ready for JSON."""

    results: list[CaseResult]
    limits: Limits
    record: dict[str, Any] = field(default_factory=dict)

    @property
    def measured(self) -> int:
        """Cases with figures of ours."""
        return sum(OURS in result.arms for result in self.results)


def run_offline(
    request: Request,
    *,
    told: Callable[[CaseResult, Limits], None] = lambda result, limits: None,
    device: Device | None = None,
    limits: Callable[..., Limits] = measure_limits,
) -> Outcome:
    """Measure. told: is called with each case as soon as it is done. device, limits: stand-ins for tests.

    Raises `MachineBusyError`, `SlowThreadsError` or `TooLargeError` where nothing can be quoted, and `ValueError` for a
    request that the model cannot serve.
    """
    from rapid_llm.engine.loading import resolve_device

    unknown = next((name for name in request.peers if name not in PEERS), None)
    if unknown is not None:
        raise ValueError(f"--peer {unknown!r} is not known; known: {', '.join(PEERS)}")
    where = resolve_device(str(request.options.get("device", "auto")))
    harness = device_for(str(where)) if device is None else device
    others = range(1, int(request.options.get("tensor_parallel", 1))) if where.type == "cuda" else ()
    gpus = [
        require_idle_device(one, force=request.force_busy, patience=request.patience)
        for one in (harness, *(device_for(f"cuda:{rank}") for rank in others))
    ]
    run = Run(
        "engine",
        command=request.command,
        force_busy=request.force_busy,
        patience=request.patience,
        threads_checked=where.type == "cpu",
    )
    labels = dtypes_of_products(str(request.options.get("dtype", "auto")), where)
    ceiling = limits(harness, where, labels)
    built = build(request.shape, request.model, request.options, request.cases)
    try:
        return _outcome(
            request, run, built, harness, where, ceiling, partial(limits, harness, where, labels), gpus, told
        )
    finally:
        built.llm.close()


def _outcome(
    request: Request,
    run: Run,
    built: Built,
    harness: Device,
    where: Any,
    ceiling: Limits,
    again: Callable[..., Limits],
    gpus: Sequence[int | None],
    told: Callable[[CaseResult, Limits], None],
) -> Outcome:
    arms, missing = _arms(request, built, where)
    results = [CaseResult(case, _needs(built, case), code="left_out", failure=r) for case, r in built.left_out.items()]
    for case in request.cases:
        if case in built.left_out:
            continue
        result = _measure(request, built, case, arms, ceiling, harness)
        result.missing |= missing
        results.append(result)
        told(result, ceiling)
    ceiling, twice = _better(ceiling, again)
    for result in results:
        if OURS in result.arms:
            rate = result.case.produced / result.arms[OURS].seconds.median
            run.add(Figure(result.case.title, rate, "tok/s"))
    outcome = Outcome(results, ceiling)
    outcome.record = {
        **run.record(),
        "perf_kind": earlier.KIND,
        "perf_schema": earlier.SCHEMA,
        "model": _model(request, built),
        "busy": {"device_percent": gpus, "forced": request.force_busy},
        "limits": {**ceiling.json(), "measured_twice": twice},
        "cases": [result.json(ceiling) for result in results],
        "engine": _engine(built.llm),
        "profile": _profile(request, built, ceiling) if request.profile else None,
    }
    return outcome


def _better(limits: Limits, again: Callable[..., Limits]) -> tuple[Limits, bool]:
    """The better of what was measured before and is measured now, if the engine left memory for that."""
    try:
        return limits.better(again(again=True)), True
    except Exception as error:
        if not out_of_memory(error):
            raise
        return limits, False


def _measure(
    request: Request, built: Built, case: Case, arms: Sequence[Arm], limits: Limits, device: Device
) -> CaseResult:
    return measure(
        case,
        _needs(built, case),
        arms,
        limits,
        device,
        prompts=partial(prompts_of, case, built.vocab, request.seed),
        rounds=request.rounds,
        max_seconds=request.max_seconds,
        graphs=lambda: None if built.llm.graphs is None else built.llm.graphs.json(),
    )


def _needs(built: Built, case: Case) -> Any:
    if case.kind == "prefill":
        return built.needs.prefill(case.batch, case.context)
    return built.needs.decode(case.batch, case.context, case.tokens)


def _arms(request: Request, built: Built, device: Any) -> tuple[list[Arm], dict[str, str]]:
    """Ours and the peers; peers that cannot be had, with the reason."""
    arms: list[Arm] = [EngineArm(built.llm)]
    missing: dict[str, str] = {}
    for name in request.peers:
        try:
            arms.append(_peer(request, built, device))
        except (ImportError, OSError, ValueError) as error:
            missing[name] = str(error).strip().splitlines()[0]
    return arms, missing


def _peer(request: Request, built: Built, device: Any) -> Arm:
    from rapid_llm.models.hub import resolve_model
    from rapid_llm.models.shapes import SHAPES

    from .peers import transformers_arm

    if request.options.get("quantization") is not None:
        raise ValueError("transformers has no weights of this quantization: leave out --quantization to compare")
    stated = folder = None
    if isinstance(request.shape, str):
        stated = SHAPES[request.shape]
    elif request.shape is None and (path := resolve_model(request.model or "")).is_dir():
        folder = str(path)
    if stated is None and folder is None:
        raise ValueError("transformers runs a named --shape, or a --model that is a folder")
    return transformers_arm(stated, folder, device=device, dtype=built.dtype, seed=request.seed)


def _model(request: Request, built: Built) -> dict[str, Any]:
    from rapid_llm.models.shapes import parameter_count

    config = built.config
    weights, experts = built.needs.weight_bytes(1)
    return {
        "name": config.name,
        "random_weights": request.shape is not None,
        "seed": request.seed,
        "architecture": config.architecture,
        "parameters": parameter_count(config),
        "dtype": built.llm.explain().settings["dtype"],
        "quantization": request.options.get("quantization"),
        "device": built.llm.device.type,
        "ranks": built.needs.ranks,
        "read_bytes": {"weights": weights, "experts": experts},
        "kv_bytes_per_token": built.needs.kv_bytes,
    }


def _engine(llm: Any) -> dict[str, Any]:
    """Settings, memory, and the row that runs each op, of the engine that was timed."""
    explained = llm.explain()
    return {
        "settings": explained.settings,
        "memory": explained.memory,
        "rows": [binding.json() for binding in explained.bindings],
        "graphs": None if llm.graphs is None else llm.graphs.json(),
    }


def _profile(request: Request, built: Built, limits: Limits) -> dict[str, Any]:
    """The last decode case and the longest prefill once more, each step timed op by op: no graphs, and slower."""
    decode = [case for case in request.cases if case not in built.left_out and case.kind == "decode"]
    prefill = [case for case in request.cases if case not in built.left_out and case.kind == "prefill"]
    chosen = [*sorted(prefill, key=lambda case: case.context)[-1:], *decode[-1:]]
    arm = EngineArm(built.llm, salt="profile")
    prompts = {case: prompts_of(case, built.vocab, request.seed, -9) for case in chosen}
    for case in decode[-1:]:
        arm.ready(case, prompts[case])  # so that its prompts are no part of what is timed
    with built.llm.stats(every=2) as stats:
        for case in chosen:
            arm.run(case, prompts[case], -9)
    report = stats.report(read_bandwidth=(limits.bytes_per_second, limits.bytes_by)).json()
    ops = sorted(report["ops"], key=lambda line: (line["phase"], -line["seconds"]))
    kept = [line for phase in ("prefill", "decode") for line in [o for o in ops if o["phase"] == phase][:PROFILED]]
    return {"cases": [case.title for case in chosen], "phases": report["phases"], "ops": kept}
