"""Linear layers over dense and GGUF block-quantised weights."""

from typing import Any

from rapid_llm.kernels.registry import Dim, KernelSpec, Numerics, OpSpec, Out, Shape, register

SCHEMES = ("unquantized", "q8_0", "q4_0", "q4_1")

LINEAR = OpSpec(
    id="linear",
    schema="(Tensor input, Tensor weight, Tensor? bias=None, *, str scheme='unquantized') -> Tensor",
    group="gemm",
    dims={
        "tokens": "input.numel() // max(input.shape[-1], 1)",
        "in_features": "input.shape[-1]",
        "out_features": "weight.shape[0]",
    },
    out=Out(shape="(*input.shape[:-1], weight.shape[0])", dtype="input.dtype"),
    dtypes=("fp32", "fp16", "bf16"),
    schemes=SCHEMES,
    oracle="rapid_llm.verify.oracles:linear",
    cases="rapid_llm.verify.cases:linear",
    bound="rapid_llm.verify.bounds:linear",
    work="rapid_llm.verify.work:linear",
    numerics=Numerics(accumulate="fp32", roundings=("input:bf16", "weight:bf16", "weight:fp16", "output:bf16")),
    doc="""input @ weight.T + bias.

    input: (..., in_features). weight: (out_features, in_features) dense in input's dtype for scheme 'unquantized'; for
    'q8_0', 'q4_0', 'q4_1' (out_features, in_features / 32 * block bytes) uint8, GGUF blocks of 32 values (34, 18, 20
    bytes). A quantised weight is dequantised in fp32 and rounded once to input's dtype. bias: (out_features,).
    Sums in fp32; fp32 input never uses TF32. Returns (..., out_features) in input's dtype.
    """,
)

register(
    LINEAR,
    *(
        KernelSpec(
            name="native/linear" if scheme == "unquantized" else f"native/linear.{scheme}",
            op="linear",
            backend="native",
            target="rapid_llm.kernels.ops.gemm.linear:linear",
            dtypes=("fp32", "fp16", "bf16"),
            schemes=(scheme,),
            priority=0,
        )
        for scheme in SCHEMES
    ),
)


def _cpp(suffix: str, function: str, priority: int, tokens: Dim, **fields: Any) -> list[KernelSpec]:
    """The rows of csrc/gemm/linear_blocks.cpp of one kind, one a scheme; `tokens` is where that kind is fast."""
    return [
        KernelSpec(
            name=f"cpp/linear.{scheme}{suffix}",
            op="linear",
            backend="cpp",
            target=f"rapid_llm.kernels.ops.gemm.linear_cpp:{function}",
            devices=("cpu",),
            dtypes=("fp32",),
            schemes=(scheme,),
            layout=("input:last_dim_contiguous", "weight:last_dim_contiguous"),
            shape=Shape(prefer=(tokens,)),
            priority=priority,
            **{"available": "rapid_llm.kernels.cpp:available", **fields},
        )
        for scheme in ("q8_0", "q4_0", "q4_1")
    ]


register(
    *_cpp("", "linear", 30, Dim("tokens", max=16)),
    *_cpp("_gemm", "linear_gemm", 30, Dim("tokens", min=17)),
    *_cpp(
        "_gemm_bf16",
        "linear_gemm_bf16",
        40,
        Dim("tokens", min=17),
        available="rapid_llm.kernels.cpp:available_bf16",
        roundings=("input:bf16", "weight:bf16", "output:bf16"),
    ),
)
