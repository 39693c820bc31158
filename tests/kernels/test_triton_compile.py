"""Every Triton kernel of every native row compiles for sm_80 and sm_90, with no GPU at hand.

Catches: a kernel that only the interpreter accepts, a dtype that Triton's typing refuses, a tile that does not fit into
shared memory, a native row that never reaches Triton, and an op that nobody gave an example call.
"""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch

import rapid_llm.kernels.ops  # noqa: F401  (declares the ops)
from rapid_llm.kernels import registry
from rapid_llm.kernels.registry.spec import dtype_label

pytest.importorskip("triton", reason="Triton is not installed")
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("the interpreter compiles nothing", allow_module_level=True)

from tests.kernels.examples import EXAMPLES, TORCH_FLOORS, by_triton
from tests.kernels.triton_compile import (
    DTYPES,
    SHARED_LIMIT,
    Launch,
    compile_launch,
    describe,
    record,
    static_shared_memory,
)

pytestmark = pytest.mark.compiles

OPS = {op.id: op for op in registry.ops() if op.id not in TORCH_FLOORS}


def _native_rows(op_id: str) -> dict[str, str]:
    """scheme ('' for ops without schemes) -> native row name."""
    native = [r for r in registry.rows(op_id) if r.backend == "native"]
    return {s: r.name for r in native for s in (r.schemes or ("",)) if by_triton(op_id, s)}


@pytest.mark.parametrize("op_id", OPS)
def test_every_native_row_has_an_example(op_id: str) -> None:
    given = {make(torch.float32)[1].get("scheme", "") for _, make in EXAMPLES.get(op_id, [])}
    wanted = set(_native_rows(op_id))
    if "unquantized" in wanted and "" in given:
        given.add("unquantized")
    assert wanted <= given, f"{op_id}: add an example to tests/kernels/examples.py for {sorted(wanted - given)}"


def _launches(op_id: str, sm: int) -> list[Launch]:
    """Distinct compilations that the op's examples ask for, over every dtype the op has."""
    distinct: dict[tuple[object, ...], Launch] = {}
    for label, make in EXAMPLES.get(op_id, []):
        for dtype in DTYPES:
            if dtype_label(dtype) not in OPS[op_id].dtypes:
                continue
            args, kwargs = make(dtype)
            row = _native_rows(op_id).get(kwargs.get("scheme", "")) or next(iter(_native_rows(op_id).values()))
            launches = record(sm, registry.load_target(row), *args, **kwargs)
            assert launches, f"{row} ({label}, {dtype}) launched nothing: its example never reaches Triton"
            distinct.update({launch.key: launch for launch in launches})
    return list(distinct.values())


@pytest.mark.parametrize("sm", SHARED_LIMIT)
@pytest.mark.parametrize("op_id", OPS)
def test_kernels_compile(op_id: str, sm: int) -> None:
    for launch in _launches(op_id, sm):
        try:
            compiled = compile_launch(launch)
        except Exception as error:
            raise AssertionError(f"{describe(launch)} does not compile: {error}") from error
        shared = static_shared_memory(compiled)
        assert shared <= SHARED_LIMIT[sm], f"{describe(launch)} wants {shared} bytes of shared memory"


def _one_layer(tokens: int) -> list[tuple[str, tuple[Any, ...]]]:
    """What a decoder layer of a small model calls for `tokens` tokens, with the views that it passes."""
    qkv = torch.zeros(9 * 64, dtype=torch.bfloat16).expand(tokens, 9 * 64).contiguous().view(tokens, 9, 64)
    query, key, value = qkv.split((5, 2, 2), 1)
    hidden, ids = torch.zeros(tokens, 320, dtype=torch.bfloat16), torch.zeros(tokens, dtype=torch.int64)
    cache = torch.zeros(4, 16, 2, 64, dtype=torch.bfloat16)
    return [
        ("embedding", (ids, torch.zeros(99, 320, dtype=torch.bfloat16))),
        ("rmsnorm", (hidden, torch.zeros(320))),
        ("fused_add_rmsnorm", (hidden, hidden.clone(), torch.zeros(320))),
        ("rope", (query, key, ids, torch.zeros(99, 64))),
        ("kvcache.write", (key, value, cache, cache.clone(), ids)),
        ("rope_kvcache_write", (query, key, value, cache, cache.clone(), ids, torch.zeros(99, 64), ids)),
        ("silu_and_mul", (torch.zeros(tokens, 640, dtype=torch.bfloat16),)),
    ]


def test_token_counts_share_a_compilation() -> None:
    """Catches: a token count, or the odd stride of a single token, that makes a serving process compile again."""
    keys: dict[str, set[object]] = {}
    for tokens in (1, 2, 15, 16, 1000):
        for op_id, args in _one_layer(tokens):
            launches = record(90, registry.load_target(f"native/{op_id}"), *args)
            keys.setdefault(op_id, set()).update(launch.key for launch in launches)
    assert {op_id: len(found) for op_id, found in keys.items()} == dict.fromkeys(keys, 1)
