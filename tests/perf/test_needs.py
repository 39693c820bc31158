"""What steps must move and compute, against counts by other means."""

from __future__ import annotations

from dataclasses import replace

import pytest
from torch.utils.flop_counter import FlopCounterMode

from rapid_llm.models.config import ModelConfig
from rapid_llm.models.shapes import shape_config
from rapid_llm.perf.cases import Case
from rapid_llm.perf.needs import StepNeeds
from rapid_llm.perf.peers import TransformersArm

from .support import STATED, TINY


def needs(config: ModelConfig = TINY, dense: int = 1000, experts: int = 0, kv: float = 512.0) -> StepNeeds:
    return StepNeeds(config, lambda tokens: (dense, experts), kv, row_bytes=0.0)


@pytest.mark.parametrize(("batch", "context"), [(1, 7), (3, 20)])
def test_flops_of_a_decode_step_are_those_that_torch_counts(batch: int, context: int) -> None:
    """Catches: a product left out or counted twice, keys without the token's own, heads of keys for queries'."""
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(**{k: v for k, v in STATED.items() if k != "model_type"})
    config._attn_implementation = "eager"
    peer = TransformersArm(transformers.LlamaForCausalLM(config).eval())
    peer.ready(case := Case("decode", batch, context, 1), [[1] * context] * batch)
    with FlopCounterMode(display=False) as counter:
        peer.run(case, [], 0)
    more = counter.get_total_flops() - needs().decode(batch, context, 1).flops
    angles = 2 * (TINY.head_dim // 2)  # that some versions of transformers make by a product
    assert more in (0, angles, batch * angles)


@pytest.mark.parametrize("windows", [(), (5, 0), (300, 16)])
def test_keys_and_windows(windows: tuple[int, ...]) -> None:
    """Catches: a window that is ignored, or forgotten while the context grows; a step's context off by one."""
    config = replace(TINY, windows=windows)
    batch, context, steps = 3, 9, 6
    keys = 0
    for step in range(steps):
        for layer in range(2):
            window = windows[layer] if windows else 0
            length = context + 1 + step
            keys += length if not window or length < window else window
    found = needs(config).decode(batch, context, steps)
    assert found.bytes == pytest.approx(steps * 1000 + batch * keys * 512 / 2)
    longer = needs(config).decode(batch, context, steps + 1)
    assert longer.bytes > found.bytes + 1000


@pytest.mark.parametrize("windows", [(), (5, 0)])
def test_a_prefill_is_its_tokens_one_by_one_with_the_weights_once(windows: tuple[int, ...]) -> None:
    """Catches: attention counted as a full square, logits of every token, weights read once for each token."""
    config = replace(TINY, windows=windows)
    tokens, head = 12, 2 * TINY.vocab_size * TINY.hidden_size
    single = sum(needs(config).decode(1, t, 1).flops - head for t in range(tokens))
    found = needs(config).prefill(2, tokens)
    assert found.flops == pytest.approx(2 * (single + head))
    assert found.bytes == pytest.approx(1000 + 2 * tokens * 512)


def test_experts_that_tokens_reach() -> None:
    """Catches: all experts counted for one token, or only two for many."""
    config = shape_config("mixtral-8x7b")
    made = needs(config, dense=0, experts=8_000, kv=0.0)
    assert made.decode(1, 1, 1).bytes == pytest.approx(2_000)
    assert made.decode(2, 1, 1).bytes == pytest.approx(8_000 * (1 - 0.75**2))
    assert made.decode(256, 1, 1).bytes == pytest.approx(8_000)
    dense = replace(config, num_experts=0, experts_per_token=0, expert_size=0)
    sparse = made.decode(1, 1, 1).flops - 2 * 32 * 4096 * 8  # the router
    two = 2 * 32 * 3 * 4096 * 14336
    assert sparse == pytest.approx(needs(dense).decode(1, 1, 1).flops + two)


def test_the_published_size_of_the_8b_step() -> None:
    """Catches: a unit wrong by a factor: 16.06 GB of bf16 weights less 1.05 of the embedding, 131 kB a token."""
    config = shape_config("llama-3.1-8b")
    weights = 2 * (8_030_261_248 - 128_256 * 4096)
    made = StepNeeds(config, lambda tokens: (weights, 0), kv_bytes=2 * 2 * 32 * 8 * 128, row_bytes=8192)
    one = made.decode(1, 0, 1)
    assert one.bytes == pytest.approx(15.01e9, rel=1e-3)
    assert one.flops == pytest.approx(2 * 7.5e9, rel=2e-3)
    assert made.decode(64, 8191, 1).bytes - made.decode(64, 0, 1).bytes == pytest.approx(64 * 8191 * 131_072)


def test_devices_share_the_arithmetic_and_not_what_each_of_them_reads() -> None:
    """Catches: a device of two held to the FLOPs of both, or its own bytes halved a second time."""
    whole, half = needs(), replace(needs(), ranks=2)
    for one, other in ((whole.decode(2, 9, 3), half.decode(2, 9, 3)), (whole.prefill(1, 9), half.prefill(1, 9))):
        assert other.flops == one.flops / 2
        assert other.bytes == one.bytes
