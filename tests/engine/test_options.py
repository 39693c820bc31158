"""Options: one table of defaults, and nothing in it without an effect or a refusal."""

from __future__ import annotations

import inspect
from dataclasses import asdict
from typing import Any

import pytest
import torch

from rapid_llm import LLM, SamplingParams
from rapid_llm.engine.kv_memory import allocate, bytes_per_token, choose_tokens, free_memory
from rapid_llm.engine.loading import resolve_device
from rapid_llm.engine.options import BATCH_TOKENS, DEFAULTS, KV_CONTEXTS, KV_MEMORY_SHARE, PAGE_SIZE, EngineOptions

from .conftest import make_llm
from .mocks import MockConfig, random_logits


def test_llm_takes_its_defaults_from_the_table() -> None:
    """E95. Catches a second default in `LLM`, and an option that exists in only one of the two places."""
    parameters = dict(inspect.signature(LLM.__init__).parameters)
    del parameters["self"], parameters["model"]
    assert {name: p.default for name, p in parameters.items()} == asdict(DEFAULTS)
    assert all(p.kind is inspect.Parameter.KEYWORD_ONLY for p in parameters.values())


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"dtype": "fp8"}, "dtype='fp8'"),
        ({"max_model_len": 0}, "max_model_len=0"),
        ({"kv_cache_tokens": -5}, "kv_cache_tokens=-5"),
        ({"kv_cache_tokens": 1.5}, "kv_cache_tokens=1.5"),
        ({"deterministic": 1}, "deterministic=1"),
        ({"seed": None}, "seed=None"),
        ({"threads": 0}, "threads=0"),
        ({"max_running": True}, "max_running=True"),
        ({"max_batch_tokens": 8, "max_running": 9}, "max_batch_tokens=8 is below max_running=9"),
    ],
)
def test_bad_options_are_refused_by_name(options: dict[str, Any], text: str) -> None:
    """Catches an option that is accepted and ignored, or read by truth value."""
    with pytest.raises(ValueError, match=text):
        EngineOptions(**options)


def test_dtype_spellings() -> None:
    """Catches a label that is known in one spelling only."""
    spelt = {"fp32": "float32", "float32": "float32", "torch.bfloat16": "bfloat16", "fp16": "float16", "auto": "auto"}
    assert {name: EngineOptions(dtype=name).dtype for name in spelt} == spelt
    assert EngineOptions(dtype=torch.float16).dtype == "float16"  # type: ignore[arg-type]


def test_unknown_option_is_named() -> None:
    """Catches a misspelt option that is swallowed."""
    with pytest.raises(TypeError, match="kv_cache_token"):
        LLM.from_parts(None, None, kv_cache_token=5)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"'kv_cache_token'.*kv_cache_tokens"):
        EngineOptions.of({"kv_cache_token": 5})


def test_max_model_len_shortens_but_never_stretches_the_context() -> None:
    """Catches a context beyond what the rotary table holds."""
    config = MockConfig(max_model_len=64)
    assert make_llm(random_logits(), config).max_model_len == 64
    llm = make_llm(random_logits(), config, max_model_len=32)
    with pytest.raises(ValueError, match="40 tokens and the context 32"):
        llm.generate([65] * 40)
    with pytest.raises(ValueError, match="max_model_len=65 exceeds the 64"):
        make_llm(random_logits(), config, max_model_len=65)


def test_kv_cache_tokens_is_what_the_pool_holds() -> None:
    """Catches a size that is rounded down, or taken for pages."""
    llm = make_llm(random_logits(), kv_cache_tokens=100)
    assert llm.kv_cache_tokens == 112
    assert llm._engine.scheduler.pool.usable_tokens == 112


def test_cache_size_follows_the_free_memory() -> None:
    """Catches a default that takes all memory, or that ignores how much there is."""
    assert choose_tokens(None, 8192, 46080, None) == KV_CONTEXTS * 8192
    assert choose_tokens(None, 8192, 46080, 1 << 40) == KV_CONTEXTS * 8192
    small = choose_tokens(None, 8192, 46080, 1 << 30)
    assert small % PAGE_SIZE == 0
    assert 0.9 * KV_MEMORY_SHARE * 2**30 < small * 46080 <= KV_MEMORY_SHARE * 2**30
    with pytest.raises(ValueError, match="no room for a key/value cache"):
        choose_tokens(None, 8192, 46080, 1 << 20)
    with pytest.raises(ValueError, match=r"kv_cache_tokens=1000000 takes 42\.92 GiB and 1\.00 GiB are free"):
        choose_tokens(10**6, 8192, 46080, 1 << 30)


def test_little_memory_shortens_the_context_aloud(monkeypatch: Any, caplog: Any) -> None:
    """Catches a context that no cache holds: every request without max_tokens would be refused."""
    config = MockConfig(max_model_len=256)  # 16 bytes a token
    monkeypatch.setattr("rapid_llm.engine.llm.free_memory", lambda device: 4096)
    llm = make_llm(random_logits(), config, kv_cache_tokens=None)
    assert llm.max_model_len == llm.kv_cache_tokens == 128
    assert "holds 128 tokens of key/value cache: the context is that, not 256" in caplog.text
    assert llm.generate("p", SamplingParams(max_tokens=None, seed=0, ignore_eos=True))[0].outputs[0].token_ids
    with pytest.raises(ValueError, match=r"max_model_len=200 .* holds 128"):
        make_llm(random_logits(), config, kv_cache_tokens=None, max_model_len=200)


def test_free_memory_is_a_plausible_number() -> None:
    """Catches a unit slip: the machine that runs this has more than 100 MB and less than 100 TB."""
    found = free_memory(torch.device("cpu"))
    assert found is None or 1e8 < found < 1e14


def test_cache_tensors_are_lazy_zeros_in_the_kernels_layout() -> None:
    """Catches another layout, garbage in fresh pages, and a cache that takes its memory before it is used."""
    config = MockConfig(num_layers=3, num_kv_heads=2, head_dim=8)
    for dtype in (torch.float32, torch.bfloat16):
        kv = allocate(config, 5, dtype, torch.device("cpu"))
        assert len(kv) == 3
        for tensor in (t for pair in kv for t in pair):
            assert tensor.shape == (5, PAGE_SIZE, 2, 8)
            assert tensor.is_contiguous()
            assert tensor.dtype == dtype
            assert not tensor.any()
        assert bytes_per_token(config, dtype) * 5 * PAGE_SIZE == sum(t.nbytes for pair in kv for t in pair)
    before = _resident()
    kept = allocate(MockConfig(num_layers=4, num_kv_heads=8, head_dim=64), 8192, torch.float32, torch.device("cpu"))
    assert len(kept) == 4
    assert _resident() - before < 64 << 20  # of 2 GiB


def _resident() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096


def test_batch_budget_is_the_devices() -> None:
    """Catches a budget default beside the table's."""
    llm = make_llm(random_logits())
    assert llm._engine.scheduler.max_batch_tokens == BATCH_TOKENS["cpu"]
    assert make_llm(random_logits(), max_running=1000)._engine.scheduler.max_batch_tokens == 1000


def test_devices_that_are_not_there_are_refused() -> None:
    """Catches a torch error without a fix, and a device that is silently replaced by another."""
    assert resolve_device("cpu") == torch.device("cpu")
    for name in ("gpu", "cuda:x"):
        with pytest.raises(ValueError, match="is not a device"):
            resolve_device(name)
    with pytest.raises(ValueError, match="not supported"):
        resolve_device("meta")
    with pytest.raises(ValueError, match="torch sees"):
        resolve_device("cuda:99")
    if not torch.cuda.is_available():
        assert resolve_device("auto") == torch.device("cpu")
