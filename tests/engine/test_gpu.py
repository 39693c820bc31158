"""The engine on a GPU: pinned uploads, the cache on the device, and the same tokens as on the CPU."""

from __future__ import annotations

import pytest
import torch

from rapid_llm import LLM, SamplingParams
from rapid_llm.models.config import ModelConfig
from rapid_llm.models.decoder import Decoder
from rapid_llm.models.weights import LayerWeights, ModelWeights, Weight

from .mocks import EOS, VOCAB, byte_tokenizer

pytestmark = pytest.mark.gpu

HIDDEN, WIDE, HEADS, KV_HEADS, HEAD_DIM, LAYERS = 256, 512, 4, 2, 64, 3
PROMPTS = [[3], [*b"a longer prompt than the others, so that it fills pages"], [*b"two"], [7] * 17, [*range(40)]]


def config() -> ModelConfig:
    return ModelConfig(
        architecture="llama",
        name="random",
        hidden_size=HIDDEN,
        intermediate_size=WIDE,
        num_layers=LAYERS,
        num_heads=HEADS,
        num_kv_heads=KV_HEADS,
        head_dim=HEAD_DIM,
        rotary_dim=HEAD_DIM,
        vocab_size=VOCAB + 4,
        num_tokens=VOCAB,
        max_model_len=256,
        rope_theta=10_000.0,
        rms_norm_eps=1e-5,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_ids=(EOS,),
        add_bos=False,
        chat_template=None,
    )


def random_weights(device: torch.device, dtype: torch.dtype) -> ModelWeights:
    """The same numbers on every device."""
    generator = torch.Generator().manual_seed(5)

    def matrix(rows: int, columns: int, scale: float = 1.0) -> Weight:
        data = torch.randn(rows, columns, generator=generator) * scale / columns**0.5
        return Weight(data.to(device, dtype), "unquantized", (rows, columns))

    def ones() -> torch.Tensor:
        return torch.ones(HIDDEN, device=device)

    table = matrix(VOCAB + 4, HIDDEN, 12.0)
    layers = tuple(
        LayerWeights(
            attn_norm=ones(),
            qkv=matrix((HEADS + 2 * KV_HEADS) * HEAD_DIM, HIDDEN),
            qkv_bias=None,
            q_norm=None,
            k_norm=None,
            o=matrix(HIDDEN, HEADS * HEAD_DIM),
            ffn_norm=ones(),
            gate_up=matrix(2 * WIDE, HIDDEN),
            down=matrix(HIDDEN, WIDE),
        )
        for _ in range(LAYERS)
    )
    return ModelWeights(embedding=table, layers=layers, final_norm=ones(), head=table, rope_factors=None)


def engine(device: str, dtype: str = "float32", **options: int) -> LLM:
    where = torch.device(device)
    activations = {"float32": torch.float32, "bfloat16": torch.bfloat16}[dtype]
    decoder = Decoder(config(), random_weights(where, activations), device=where, dtype=dtype)
    return LLM.from_parts(decoder, byte_tokenizer(), **{"kv_cache_tokens": 2048, **options})


def ids(llm: LLM, params: SamplingParams) -> list[list[int]]:
    return [o.outputs[0].token_ids for o in llm.generate(PROMPTS, params)]


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(temperature=0, max_tokens=40, ignore_eos=True),
        SamplingParams(temperature=0.9, top_k=20, top_p=0.9, seed=11, max_tokens=40, ignore_eos=True),
    ],
    ids=["greedy", "sampled"],
)
def test_gpu_tokens_are_the_cpus(params: SamplingParams) -> None:
    """Catches a buffer that is overwritten while it is copied, a mask or a draw that differs, TF32 in fp32."""
    cpu = ids(engine("cpu", threads=1), params)
    gpu = engine("cuda:0")
    assert ids(gpu, params) == cpu
    assert [gpu.generate([p], params)[0].outputs[0].token_ids for p in PROMPTS] == cpu
    assert ids(engine("cuda:0", max_batch_tokens=7, max_running=3), params) == cpu
    assert ids(engine("cuda:0", kv_cache_tokens=112), params) == cpu


def test_gpu_default_cache_and_logprobs() -> None:
    """Catches a cache sized by the host's memory, and logprobs that stay on the wrong device."""
    llm = engine("cuda:0", "bfloat16", kv_cache_tokens=None)  # type: ignore[arg-type]
    assert llm.kv_cache_tokens == 4 * 256
    (output,) = llm.generate([PROMPTS[1]], SamplingParams(temperature=0, max_tokens=8, logprobs=3, min_tokens=4))
    assert all(len(entry) >= 3 for entry in output.outputs[0].logprobs)
    assert "cuda:0" in str(llm.explain())


def test_gpu_stats() -> None:
    """Catches events that are read before they are recorded, and ops without time."""
    llm = engine("cuda:0", "bfloat16")
    params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    llm.generate(PROMPTS, params)
    with llm.stats(every=4) as stats:
        llm.generate(PROMPTS, params)
    report = stats.report()
    print(report)
    assert report.read_bandwidth > 1e11
    assert all(f.seconds > 0 for f in report.ops if f.row)
