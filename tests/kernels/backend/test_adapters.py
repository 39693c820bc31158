"""The adapters to deepgemm, flashmla and deepep pass the right arguments: over stand-ins that compute with torch, each
row is right by the oracle, in the cases of its op and in some of the sizes that it is made for."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from rapid_llm.kernels.ops.gemm.fp8_block128 import pack as pack_rows
from rapid_llm.kernels.ops.triton_support import INTERPRETED
from rapid_llm.kernels.registry import ArgumentError, get_op, get_row, probes
from rapid_llm.verify.compare import compare
from rapid_llm.verify.conformance import check_callable
from rapid_llm.verify.formats import random_blocks
from tests.kernels.backend.libraries import STAND_INS, forget, install
from tests.kernels.exchange import run_group
from tests.reference import oracle

pytestmark = pytest.mark.skipif(INTERPRETED, reason="nothing here is Triton's")


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, warm_python: str) -> Iterator[Path]:
    """A folder with the stand-ins, on the import path; nothing of it is remembered afterwards."""
    monkeypatch.setenv("RAPID_LLM_CACHE_DIR", str(tmp_path / "cache"))
    libraries = tmp_path / "libraries"
    libraries.mkdir()
    monkeypatch.syspath_prepend(str(libraries))
    for module in ("deep_gemm", "flash_mla", "deep_ep"):
        install(libraries, module)
    yield libraries
    forget()


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Cases are small: one thread is faster, and does not fight other processes for the machine."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def check(row_name: str, dtype: str, least: int, scheme: str | None = None) -> None:
    """The op's own cases, as far as the row takes them."""
    row = replace(get_row(row_name), devices=("cpu",), capability=())
    report = check_callable(get_op(row.op), probes.load(row.target), dtype=dtype, scheme=scheme, row=row, seeds=(0,))
    assert report.ok, str(report)
    assert report.cases >= least


def judged(row_name: str, got: torch.Tensor, args: dict[str, Any]) -> None:
    row = get_row(row_name)
    expected = oracle(row.op)(**args)
    (bound,) = probes.load(get_op(row.op).bound)(args, expected, row.roundings)
    outcome = compare(got, expected, bound)
    assert outcome.problem is None, outcome.problem


def test_deepgemm_in_the_cases_of_linear() -> None:
    """Catches: swapped operands or scales, an output that is not `out`, groups along the wrong dimension."""
    check("deepgemm/linear", "bf16", 4, "fp8_block128")


@pytest.mark.parametrize("shape", [(1, 128, 64), (5, 512, 192), (33, 384, 320), (64, 1024, 128), (0, 128, 64)])
def test_deepgemm_in_its_own_sizes(shape: tuple[int, int, int]) -> None:
    """Catches: block scales taken of wrong rows where there are several blocks, or a last block of 64 rows."""
    tokens, features, outputs = shape
    g = torch.Generator().manual_seed(features)
    x = torch.randn(tokens, features, generator=g).mul(torch.exp2(torch.randn(tokens, 1, generator=g) * 4)).bfloat16()
    weight = random_blocks(g, outputs, features, "fp8_block128")
    row = get_row("deepgemm/linear")
    packed = probes.load(str(row.prepack))(weight, "fp8_block128")
    judged(row.name, probes.load(row.target)(x, packed), {"input": x, "weight": weight, "scheme": "fp8_block128"})


@pytest.mark.parametrize("wrong", ["block scales", "token scales", "a group left out"])
def test_deepgemm_is_not_excused(wrong: str) -> None:
    """Catches: a bound for fp8 so wide that it passes another block's scale, another token's, or a group left out."""
    g = torch.Generator().manual_seed(1)
    x = torch.randn(4, 256, generator=g).bfloat16()
    x[:, 128:] *= 0.01
    weight = random_blocks(g, 256, 256, "fp8_block128")
    row = get_row("deepgemm/linear")
    packed = probes.load(str(row.prepack))(weight, "fp8_block128")
    if wrong == "block scales":
        packed = replace(packed, scales=packed.scales.flip(0))
        got = probes.load(row.target)(x, packed)
    elif wrong == "token scales":
        got = probes.load(row.target)(x * torch.tensor([[1.0], [1.5], [1.0], [1.0]]).bfloat16(), packed)
    else:
        got = probes.load(row.target)(torch.cat((x[:, :128] * 0, x[:, 128:]), 1), packed)
    with pytest.raises(AssertionError, match="elements wrong"):
        judged(row.name, got, {"input": x, "weight": weight, "scheme": "fp8_block128"})


def test_deepgemm_packs_without_a_copy_and_takes_blocks_alone() -> None:
    """Catches: a second copy of the weights in memory, and rows quantised one by one that would be computed wrong."""
    from rapid_llm.kernels.backend.deepgemm.weight import pack

    codes = torch.randn(130, 512).to(torch.float8_e4m3fn)
    weight = pack_rows(codes, torch.rand(2, 4))
    packed = pack(weight, "fp8_block128")
    assert packed.codes.data_ptr() == weight.data_ptr()
    assert torch.equal(packed.codes.float(), codes.float())
    assert packed.nbytes == 130 * 512 + 2 * 4 * 4
    weight[129, 512] ^= 1
    with pytest.raises(ArgumentError, match="row 129 of the weight has others than row 128"):
        pack(weight, "fp8_block128")
    with pytest.raises(ArgumentError, match="scheme fp8_block128"):
        pack(weight, "q8_0")


def test_deepgemm_refuses_what_it_cannot_do() -> None:
    """Catches: a bias added to a product that is rounded already, another dtype quantised as if it were bf16."""
    row = get_row("deepgemm/linear")
    linear, pack = probes.load(row.target), probes.load(str(row.prepack))
    packed = pack(random_blocks(torch.Generator(), 64, 128, "fp8_block128"), "fp8_block128")
    x = torch.randn(2, 128).bfloat16()
    with pytest.raises(ArgumentError, match="bias"):
        linear(x, packed, torch.zeros(64).bfloat16())
    with pytest.raises(ArgumentError, match="bfloat16 input of 128 features"):
        linear(x.float(), packed)
    with pytest.raises(ArgumentError, match="same shape"):
        linear(x, packed, out=torch.empty(2, 65).bfloat16())


@pytest.mark.parametrize(("suffix", "dtype"), [("", "bf16"), (".fp16", "fp16")])
def test_flashmla(suffix: str, dtype: str) -> None:
    """Catches: a wrong axis for the one query token, a schedule kept for other lengths, NaN where no key is seen."""
    check(f"flashmla/attention.mla_decode{suffix}", dtype, 4)


OLD = '''
"""As the first release was: the schedule is two tensors, made from lengths and head counts."""

import torch


def get_mla_metadata(cache_seqlens, num_heads_per_head_k, num_heads_k):
    assert num_heads_k == 1
    return torch.cat((cache_seqlens, torch.tensor([num_heads_per_head_k], dtype=torch.int32))), cache_seqlens


def flash_mla_with_kvcache(
    q, k_cache, block_table, cache_seqlens, head_dim_v, tile_scheduler_metadata, num_splits, softmax_scale=None,
    causal=False,
):
    assert torch.equal(tile_scheduler_metadata[:-1], cache_seqlens) and torch.equal(num_splits, cache_seqlens)
    assert tile_scheduler_metadata[-1] == q.shape[2] and not causal
    return _decode(q, k_cache, block_table, cache_seqlens, head_dim_v, softmax_scale)

'''


def test_flashmla_of_the_first_release(folder: Path) -> None:
    """Catches: a call that only the latest interface takes; all releases carry one version."""
    source = (STAND_INS / "flash_mla.py").read_text()
    install(folder, "flash_mla", OLD + "\n" + source[source.index("def _decode(") :])
    check("flashmla/attention.mla_decode", "bf16", 4)


def test_flashmla_refuses_other_pages() -> None:
    """Catches: a page of 16 rows read as one of 64."""
    decode = probes.load(get_row("flashmla/attention.mla_decode").target)
    with pytest.raises(ArgumentError, match="pages of 64 rows"):
        decode(
            torch.zeros(1, 2, 576).bfloat16(),
            torch.zeros(2, 16, 1, 576).bfloat16(),
            torch.ones(1, dtype=torch.int32),
            torch.zeros(1, 1, dtype=torch.int32),
            0.1,
        )


def test_deepep_among_two_processes(tmp_path: Path, folder: Path) -> None:
    """Catches: counts, ids or weights handed over in another's place, sources read off the handle wrongly, a buffer
    made for every call."""
    run_group(2, "deepep", tmp_path, folder)


def test_deepep_refuses_one_rank_and_a_handle_of_another_kind() -> None:
    """Catches: an exchange with nobody that hangs, and an upstream handle read by parts that it does not have."""
    exchange = importlib.import_module("rapid_llm.kernels.backend.deepep.exchange")
    args = {
        "input": torch.zeros(2, 256).bfloat16(),
        "topk_ids": torch.zeros(2, 1, dtype=torch.int64),
        "topk_weights": torch.zeros(2, 1),
        "recv": torch.zeros(4, 256).bfloat16(),
        "recv_ids": torch.zeros(4, 1, dtype=torch.int64),
        "recv_weights": torch.zeros(4, 1),
        "recv_source": torch.zeros(4, 2, dtype=torch.int32),
    }
    with pytest.raises(ArgumentError, match="2, 4 or 8 ranks"):
        exchange.comm_dispatch(**args, num_experts=4)
    with pytest.raises(ArgumentError, match=r"torch\.distributed, which is not initialised"):
        exchange.comm_dispatch(**args, num_experts=4, ranks=2)
    with pytest.raises(ArgumentError, match=r"recv has 4, it needs at least 16"):
        exchange.comm_dispatch(**args, num_experts=8, ranks=8)
    with pytest.raises(ArgumentError, match="the very recv_source"):
        exchange.comm_combine(args["recv"], args["recv_source"], 2, ranks=2)
    assert "deep_ep" in sys.modules
