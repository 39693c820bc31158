"""Engines of several ranks on a CPU: the same answers as one process, and an end for everybody when a rank ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import distributed

from rapid_llm import LLM, SamplingParams
from rapid_llm.engine import parallel
from rapid_llm.engine.agreement import RowChoice, disagreement
from rapid_llm.engine.options import EngineOptions
from rapid_llm.engine.outputs import RequestOutput
from rapid_llm.engine.parallel import RankError, Team
from rapid_llm.engine.random_llm import random_llm
from rapid_llm.engine.request import Request
from rapid_llm.engine.scheduler import Chunk
from rapid_llm.models.parallel import ParallelError
from tests import warm
from tests.models import tiny

from .conftest import make_llm
from .mocks import random_logits
from .parallel_recipe import TinyRecipe

gguf = pytest.importorskip("gguf")

ROOT = Path(__file__).resolve().parents[2]
PYTHON = sys.executable
PROMPTS = [[*b"a prompt of some length, which takes several chunks"], [*b"two"], [7] * 17, [*range(40)], [3]]
GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
SAMPLED = SamplingParams(temperature=0.9, top_k=20, seed=11, max_tokens=9, ignore_eos=True)
TOLD = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True, logprobs=2, prompt_logprobs=2)


@pytest.fixture(scope="module", autouse=True)
def _start_ranks_quickly() -> Iterator[None]:
    """Ranks are forks of a process that has imported torch."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "executable", warm.executable())
        yield


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Six heads, and an odd vocabulary of more rows than the tokenizer has ids."""
    shape = tiny.Shape(heads=6, kv_heads=6, vocab=261, context=128, tied=False)
    return str(tiny.make(tmp_path_factory.mktemp("model") / "tiny.gguf", shape, seed=4).path)


def start(model: str, folder: Path, count: int, recipe: dict[str, Any] | None = None, **options: Any) -> LLM:
    fixed = {"dtype": "float32", "device": "cpu", "threads": 1, "kv_cache_tokens": 1024}
    made = TinyRecipe(model, str(folder), **(recipe or {}))
    return LLM.from_recipe(made, tensor_parallel=count, **{**fixed, **options})


def ids(outputs: list[RequestOutput]) -> list[list[int]]:
    return [sample.token_ids for output in outputs for sample in output.outputs]


def check_answers(together: LLM, alone: LLM) -> None:
    """Hold an engine of several ranks against one of the same options and one process."""
    for params in (GREEDY, SAMPLED, GREEDY):  # the second time with prefixes that are known
        assert ids(together.generate(PROMPTS, params)) == ids(alone.generate(PROMPTS, params))
    mine, theirs = (llm.generate(PROMPTS[0], TOLD)[0] for llm in (together, alone))
    assert mine.prompt_logprobs is not None
    assert theirs.prompt_logprobs is not None
    for found, want in zip(mine.prompt_logprobs[1:], theirs.prompt_logprobs[1:], strict=True):
        logprobs = {token: entry.logprob for token, entry in want.items()}
        assert {token: entry.logprob for token, entry in found.items()} == pytest.approx(logprobs, abs=1e-3)
    with together.stats(every=1):  # which runs steps call by call
        assert ids(together.generate(PROMPTS, GREEDY)) == ids(alone.generate(PROMPTS, GREEDY))
    requests = [
        Request("r", 0, len(p), list(p), GREEDY, key=0, max_len=len(p) + 1) for p in (PROMPTS[1], PROMPTS[2][:13])
    ]
    hidden = [_hidden(llm, requests) for llm in (together, alone)]
    assert torch.allclose(*hidden, rtol=0, atol=1e-3)


def _hidden(llm: LLM, requests: list[Request]) -> torch.Tensor:
    pool = llm._engine.scheduler.pool
    for request in requests:
        pool.grow(request.pages, len(request.ids), len(request.ids))
    chunks = [Chunk(request, len(request.ids), False) for request in requests]
    hidden = llm._engine.runner.hidden_states(chunks).clone()
    for request in requests:
        pool.release(request.pages)
    return hidden


def test_two_ranks(model: str, tmp_path: Path) -> None:
    """Small steps, of fixed size where they decode. Catches: ranks that see another step than rank 0 (chunks, found
    prefixes, padding, a step enqueued before its tokens are known, log-probabilities of prompts), tokens that are
    sampled anywhere but there; and a rank that fails in a step, whose reason is lost."""
    options = {"max_batch_tokens": 16, "max_running": 4, "cuda_graphs": "padded"}
    llm = start(model, tmp_path, 2, **options)
    check_answers(llm, start(model, tmp_path, 1, **options))
    assert llm.prepare().ok
    assert len(llm.generate(PROMPTS[1], GREEDY)[0].outputs[0].token_ids) == GREEDY.max_tokens
    assert "2 ranks over gloo, which chose the same rows" in str(llm.explain())
    (tmp_path / "at_step-1").write_text("raise")
    for _ in range(2):
        text = "tensor_parallel=2: rank 1 failed: MemoryError: no room for the step; the engine has ended"
        with pytest.raises(RankError, match=text):
            llm.generate(PROMPTS, GREEDY)
    llm.close()
    assert not distributed.is_initialized()


def test_three_ranks(model: str, tmp_path: Path) -> None:
    """With guesses. Catches the same for rows that verify guesses, and ranks that wait for ever in an exchange with one
    that was killed."""
    options = {"speculative": {"method": "ngram", "num_tokens": 3}}
    llm = start(model, tmp_path, 3, **options)
    check_answers(llm, start(model, tmp_path, 1, **options))
    pids = [int((tmp_path / f"pid-{rank}").read_text()) for rank in (1, 2)]
    (tmp_path / "at_step-2").write_text("die")
    with pytest.raises(RankError, match="tensor_parallel=3: rank 2 failed: it was ended by signal 9"):
        llm.generate(PROMPTS, GREEDY)
    llm.close()
    for pid in pids:
        await_end(pid)


def test_a_rank_that_ends_between_steps_is_noticed(model: str, tmp_path: Path) -> None:
    """Catches: a plan sent to nobody, an exchange with nobody, an engine that was closed and goes on."""
    llm = start(model, tmp_path, 2)
    os.kill(int((tmp_path / "pid-1").read_text()), signal.SIGKILL)
    with pytest.raises(RankError, match="rank 1 failed: it was ended by signal 9"):
        llm.generate(PROMPTS, GREEDY)
    llm.close()


def test_a_step_that_rank_0_leaves_ends_the_engine(model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches: ranks that are left in the middle of a step, whose next exchange would be with the next step's; an
    engine that was closed and goes on."""
    monkeypatch.setattr(parallel, "GONE_S", 0.1)
    options = EngineOptions(device="cpu")
    team = Team(TinyRecipe(model, str(tmp_path)), options)  # the part of rank 0, with no others
    with pytest.raises(MemoryError, match="no room"), team.step("calls", []):
        raise MemoryError("no room for the step")
    with pytest.raises(RankError, match="rank 0 left a step: MemoryError: no room"), team.step("calls", []):
        pass
    team.close()
    team = Team(TinyRecipe(model, str(tmp_path)), options)
    team.close()
    team.close()
    with pytest.raises(RankError, match="it was closed"):
        team.check()


def test_a_rank_that_cannot_load_is_named(model: str, tmp_path: Path) -> None:
    """Catches: a start that waits for a rank which never comes, and processes that are left behind."""
    with pytest.raises(RankError, match="rank 1 failed: ValueError: this rank cannot load"):
        start(model, tmp_path, 2, {"broken": 1})
    await_end(int((tmp_path / "pid-1").read_text()))
    assert not distributed.is_initialized()


def test_a_rank_that_chose_another_row_fails_the_start(model: str, tmp_path: Path) -> None:
    """P61. Catches: ranks that run different rows for the same call and compute a model that nobody verified."""
    text = (
        r"tensor_parallel=2: ranks chose different rows: rmsnorm for 1 token, cpu fp32 .*hidden=64.*: rank 0 "
        r"native/rmsnorm \(digest \w{12}\), rank 1 planted/rmsnorm \(digest \w{12}\) \(and \d+ more"
    )
    with pytest.raises(RankError, match=text):
        start(model, tmp_path, 2, {"planted": 1})
    await_end(int((tmp_path / "pid-1").read_text()))


def test_only_what_ranks_share_is_compared() -> None:
    """P77. Catches: calls of one rank alone that count as a difference, and another digest under the same name."""
    key = '{"device": "cpu", "dims": {"rows": 3}, "dtype": "fp32", "scheme": null}'
    one = RowChoice("1 token", "linear", key, "native/linear", "a" * 64)
    other = one._replace(key=key.replace("3", "4"))
    assert disagreement([[one], [other], [one, other]]) is None
    assert disagreement([[one, one], [one._replace(bucket="2-8 tokens", row="torch/linear")]]) is None
    text = disagreement([[one], [one._replace(digest="b" * 64)], [one]])
    assert text is not None
    assert f"linear for 1 token, cpu fp32 rows=3: ranks 0, 2 native/linear (digest {'a' * 12}), rank 1" in text


@pytest.mark.parametrize("votes", [[False], [True, False]], ids=["not captured", "captured, and wrong"])
def test_ranks_replay_a_graph_together_or_not_at_all(votes: list[bool], monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches: a rank that replays the exchanges of a graph which another rank does not have."""
    llm, plain = (make_llm(random_logits(), cuda_graphs=mode, max_running=1) for mode in ("padded", "off"))
    graphs, replays = llm._graphs, []
    assert graphs is not None

    def captured(padded: int, size: Any) -> bool:
        def replay() -> None:
            replays.append(padded)
            size.logits = graphs._forward(size)

        size.graph, size.logits = SimpleNamespace(replay=replay), torch.empty(0)
        return True

    left = list(votes)
    monkeypatch.setattr(graphs, "_captures", True)
    monkeypatch.setattr(graphs._model, "handles", lambda tokens: [], raising=False)
    monkeypatch.setattr(graphs, "_capture", captured)
    monkeypatch.setattr(graphs, "_agree", lambda mine: mine and left.pop(0))
    assert ids(llm.generate([PROMPTS[1]], GREEDY)) == ids(plain.generate([PROMPTS[1]], GREEDY))
    assert replays == [1] * votes.count(True)
    assert "another rank" in graphs.report.refused[1]
    assert left == []


def test_what_cannot_be_is_refused_before_a_process_starts(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches: a head cut in two, a group joined twice, a GPU that is not there, a decoder of one process."""

    def never(*args: Any, **kwargs: Any) -> Any:
        raise AssertionError("a process was started")

    monkeypatch.setattr(subprocess, "Popen", never)
    with pytest.raises(ParallelError, match=r"tensor_parallel=4: the 6 query heads .* for which 1, 2, 3, 6 work"):
        start(model, tmp_path, 4)
    with pytest.raises(ParallelError, match=r"device='cuda:1' with tensor_parallel=2: rank r runs on cuda:r"):
        start(model, tmp_path, 2, device="cuda:1")
    with pytest.raises(ValueError, match="tensor_parallel=0: use 1 or more"):
        start(model, tmp_path, 0)
    with pytest.raises(ValueError, match=r"of one process; use LLM or LLM\.from_recipe"):
        LLM.from_parts(None, None, tensor_parallel=2)  # type: ignore[arg-type]
    count = torch.cuda.device_count() + 1
    with pytest.raises(ParallelError, match=f"takes {count} CUDA devices, and torch sees {count - 1}"):
        parallel.device_of(replace(EngineOptions(), device="cuda", tensor_parallel=count), 0)
    monkeypatch.setattr(distributed, "is_initialized", lambda: True)
    with pytest.raises(ParallelError, match=r"is in a torch\.distributed group already"):
        start(model, tmp_path, 2)


def test_ranks_do_not_outlive_rank_0(model: str, tmp_path: Path) -> None:
    """Catches: processes that hold memory and GPUs after their engine was killed."""
    code = (
        "import os, signal, sys; from pathlib import Path; from tests.engine.test_parallel import start; "
        f"sys.executable = {warm.executable()!r}; llm = start({model!r}, Path({str(tmp_path)!r}), 2); "
        "os.kill(os.getpid(), signal.SIGKILL)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)}, timeout=60, check=False
    )
    assert done.returncode == -signal.SIGKILL
    await_end(int((tmp_path / "pid-1").read_text()))


def await_end(pid: int) -> None:
    """A process that was told to end, or lost its peers, is gone within seconds."""
    for _ in range(200):
        try:
            status = Path(f"/proc/{pid}/stat").read_text()
        except OSError:
            return
        if status.rpartition(")")[2].split()[0] == "Z":
            return
        time.sleep(0.05)
    pytest.fail(f"process {pid} is still there")


TWO_GPUS = pytest.mark.skipif(
    torch.cuda.device_count() < 2, reason=f"needs two GPUs, and torch sees {torch.cuda.device_count()}"
)


@pytest.mark.gpu
@TWO_GPUS
def test_two_gpus_give_the_greedy_ids_of_one() -> None:
    """NCCL, fp32. Catches: exchanges on a stream of their own, TF32 in a part of a sum, a graph whose exchanges are not
    those of the calls, steps enqueued behind one whose tokens only rank 0 has."""
    options = {"dtype": "float32", "device": "cuda", "kv_cache_tokens": 4096, "max_running": 8}
    alone = random_llm("llama-3.2-1b", **options)
    want = [ids(alone.generate(PROMPTS, params)) for params in (GREEDY, SAMPLED)]
    del alone
    together = random_llm("llama-3.2-1b", tensor_parallel=2, **options)
    try:
        for _ in range(2):
            assert [ids(together.generate(PROMPTS, params)) for params in (GREEDY, SAMPLED)] == want
        assert together.graphs is not None
        assert together.graphs.captured
        assert together.graphs.refused == {}
        assert together.graphs.ahead > 0
    finally:
        together.close()


@pytest.mark.gpu
@TWO_GPUS
def test_two_gpus_give_the_logits_of_one_in_bf16() -> None:
    """Teacher-forced: the log-probabilities of one long prompt. Catches: sums that are rounded where they need not be.

    With TP 2, what o and down give is the sum of two numbers in bf16, of relative error u = 2**-8 each, once for each
    of the 2 * layers sums that a residual takes; TP 1 rounds each such sum once. Errors of single sums are independent,
    so they grow by the square root of their number; the factor 3 covers the largest of many, and 2 both sides.
    """
    options = {"dtype": "bfloat16", "device": "cuda", "kv_cache_tokens": 4096}
    prompt = torch.randint(0, 128_000, (512,), generator=torch.Generator().manual_seed(1)).tolist()
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)
    found = []
    for count in (1, 2):
        llm = random_llm("llama-3.2-1b", tensor_parallel=count, **options)
        (output,) = llm.generate([prompt], params)
        llm.close()
        assert output.prompt_logprobs is not None
        found.append(
            [entry[token].logprob for token, entry in zip(prompt[1:], output.prompt_logprobs[1:], strict=True)]
        )
    one, two = map(torch.tensor, found)
    layers, spread = 16, one.std().item()
    bound = 2 * 3 * 2.0**-8 * (2 * layers) ** 0.5 * spread
    assert (one - two).abs().max() <= bound


@pytest.mark.gpu
@TWO_GPUS
def test_two_gpus_notice_a_rank_that_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches: kernels of NCCL that wait for ever for a rank that was killed, and a watchdog that ends this process."""
    monkeypatch.setattr(sys, "executable", PYTHON)
    llm = random_llm("qwen2.5-0.5b", tensor_parallel=2, dtype="bfloat16", device="cuda", kv_cache_tokens=4096)
    deltas = llm.stream("x", SamplingParams(temperature=0, max_tokens=2000, ignore_eos=True))
    next(deltas)
    assert llm._team is not None
    llm._team._workers[0].process.kill()
    with pytest.raises(RankError, match="rank 1 failed: it was ended by signal 9"):
        list(deltas)
    llm.close()
