"""What the engine itself costs for each token, beside a model that costs nothing."""

from __future__ import annotations

import time
from typing import Any

import torch

from rapid_llm import LLM, SamplingParams

from .mocks import MockConfig, byte_tokenizer

LIMIT = 0.3e-3
STEPS = 300


class FreeDecoder:
    """Answers at once, always with the same."""

    device = torch.device("cpu")
    activation_dtype = kv_dtype = torch.float32

    def __init__(self) -> None:
        self.config = MockConfig(max_model_len=4096)
        self._hidden = torch.zeros(1, 1)
        self._logits = torch.zeros(1, self.config.vocab_size)

    def forward(self, input_ids: torch.Tensor, *_: Any) -> torch.Tensor:
        return self._hidden.expand(len(input_ids), 1)

    def compute_logits(self, _: torch.Tensor) -> torch.Tensor:
        return self._logits


def test_host_overhead_of_one_decoding_request() -> None:
    """Catches work that grows with the length of the answer, re-tokenising, and buffers built anew for each step.

    CPU time of the thread, least of five runs, so that a busy machine does not decide the result.
    """
    llm = LLM.from_parts(FreeDecoder(), byte_tokenizer(), kv_cache_tokens=4096, threads=1)  # type: ignore[arg-type]
    token = torch.tensor([65])
    handle, _ = llm._sampler._row(1)
    llm._sampler._bound[1] = (handle, lambda *_: token)  # the op's own time is not the engine's
    params = SamplingParams(temperature=0.5, max_tokens=STEPS + 1, ignore_eos=True, stop=["zz", "zzz"])
    costs = []
    for _ in range(5):
        start = time.thread_time()
        (output,) = llm.generate([65] * 2000, params)
        costs.append((time.thread_time() - start) / STEPS)
        assert len(output.outputs[0].token_ids) == STEPS + 1
    print(f"engine overhead {min(costs) * 1e6:.0f} us a token")
    assert min(costs) < LIMIT
