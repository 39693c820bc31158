"""Linear layers over dense weights, GGUF's blocks, and fp8, int8 and int4 codes with scales."""

from typing import Any

from rapid_llm.kernels.ops.block_formats import DECODED, FORMATS, FP8, FP8_CHANNEL, INT8_CHANNEL
from rapid_llm.kernels.ops.gemm import fused  # noqa: F401  (declares its ops)
from rapid_llm.kernels.registry import Dim, KernelSpec, Numerics, OpSpec, Out, Shape, register

SCHEMES = ("unquantized", "q8_0", "q4_0", "q4_1")
"""Dense, and the formats of GGUF that have rows of their own."""

LINEAR = OpSpec(
    id="linear",
    schema="(Tensor input, Tensor weight, Tensor? bias=None, *, str scheme='unquantized') -> Tensor",
    group="gemm",
    dims={
        "tokens": "input.numel() // max(input.shape[-1], 1)",
        "in_features": "input.shape[-1]",
        "out_features": "weight.shape[0]",
        "biased": "0 if bias is None else 1",
    },
    out=Out(shape="(*input.shape[:-1], weight.shape[0])", dtype="input.dtype"),
    dtypes=("fp32", "fp16", "bf16"),
    schemes=("unquantized", *FORMATS),
    oracle="rapid_llm.verify.oracles:linear",
    cases="rapid_llm.verify.cases:linear",
    bound="rapid_llm.verify.bounds:linear",
    work="rapid_llm.verify.work:linear",
    numerics=Numerics(
        accumulate="fp32",
        roundings=("input:bf16", "input:int16", "input:fp8_block128", "weight:bf16", "weight:fp16", "output:bf16"),
    ),
    doc="""input @ weight.T + bias.

    input: (..., in_features). weight: (out_features, in_features) dense in input's dtype for scheme 'unquantized', else
    (out_features, bytes) uint8. GGUF's blocks, one after another: of 32 values for 'q8_0', 'q4_0', 'q4_1', 'q5_0',
    'q5_1', 'iq4_nl' (34, 18, 20, 22, 24, 18 bytes), of 256 for 'q2_k', 'q3_k', 'q4_k', 'q5_k', 'q6_k' (84, 110, 144,
    176, 210 bytes). Rows of codes, then scales, then zeros up to a multiple of 16 bytes: 'fp8_block128', e4m3 codes and
    an fp32 scale for each 128 of them (`ops.gemm.fp8_block128:pack`); 'fp8_channel' and 'int8_channel', e4m3 or int8
    codes and one fp32 scale (`ops.gemm.scaled_rows:pack_channel`); 'int4_group32', '64' and '128', two codes a byte and
    an fp16 scale and zero point for each group of so many (`ops.gemm.scaled_rows:pack_groups`). in_features is a
    multiple of the block, of 16 for a scale a row. A quantised weight is dequantised in fp32 and rounded once to
    input's dtype.
    bias: (out_features,). Sums in fp32; fp32 input never uses TF32. Returns (..., out_features) in input's dtype.
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
        for scheme in LINEAR.schemes
    ),
)


_BLOCKS_CPP = "rapid_llm.kernels.ops.gemm.linear_cpp"
_FORMATS_CPP = "rapid_llm.kernels.ops.gemm.linear_formats_cpp"


def _cpp(suffix: str, function: str, priority: int, tokens: Dim, schemes: str = "", **fields: Any) -> list[KernelSpec]:
    """C++ rows of one kind, one a scheme; `tokens` is where that kind is fast. Those of the formats that have rows of
    their own are of csrc/gemm/linear_blocks.cpp, those of `schemes="decoded"` of linear_formats.cpp."""
    return [
        KernelSpec(
            name=f"cpp/linear.{scheme}{suffix}",
            op="linear",
            backend="cpp",
            target=f"{_FORMATS_CPP if schemes else _BLOCKS_CPP}:{function}",
            devices=("cpu",),
            dtypes=("fp32",),
            schemes=(scheme,),
            layout=("input:last_dim_contiguous", "weight:last_dim_contiguous"),
            shape=Shape(
                require=(Dim("in_features", multiple_of=32),) if scheme in (FP8_CHANNEL, INT8_CHANNEL) else (),
                prefer=(tokens,),
            ),
            priority=priority,
            **{"available": "rapid_llm.kernels.cpp:available", **fields},
        )
        for scheme in (DECODED if schemes else SCHEMES[1:])
    ]


register(
    *_cpp("", "linear", 30, Dim("tokens", max=16)),
    *_cpp("", "linear", 30, Dim("tokens", max=16), "decoded"),
    *_cpp("_gemm", "linear_gemm", 30, Dim("tokens", min=17), "decoded"),
    *_cpp("_int16", "linear_int16", 40, Dim("tokens", max=16), roundings=("input:int16",)),
    *_cpp("_gemm", "linear_gemm", 30, Dim("tokens", min=17)),
    *_cpp(
        "_gemm_bf16",
        "linear_gemm_bf16",
        40,
        Dim("tokens", min=17),
        available="rapid_llm.kernels.cpp:available_bf16",
        roundings=("input:bf16", "weight:bf16", "output:bf16"),
    ),
    # Against torch on an AVX-512 CPU with bf16 arithmetic, one thread: bf16 2.8 times as fast for one token of 1536 x
    # 576, 1.8 for four and 1.2 for eight; fp16, which torch multiplies row by row, 3 to 6 times for 1 to 64.
    *(
        KernelSpec(
            name=f"cpp/linear.{dtype}",
            op="linear",
            backend="cpp",
            target="rapid_llm.kernels.ops.gemm.linear_dense_cpp:linear",
            available="rapid_llm.kernels.cpp:available",
            devices=("cpu",),
            dtypes=(dtype,),
            schemes=("unquantized",),
            layout=("input:last_dim_contiguous", "weight:last_dim_contiguous"),
            shape=Shape(prefer=(Dim("tokens", max=tokens),)),
            priority=30,
        )
        for dtype, tokens in (("bf16", 8), ("fp16", 64))
    ),
)


_TORCH = "rapid_llm.kernels.ops.gemm.linear_torch"
_ROWWISE = "rapid_llm.kernels.ops.gemm.linear_rowwise"
_BAGS, _BLOCKS, _UNPACK = f"{_ROWWISE}:pack_bags", f"{_ROWWISE}:pack_blocks", f"{_ROWWISE}:linear_unpack"
_4BIT = ("q4_0", "q4_1")
_ONE, _FEW, _MANY = Dim("tokens", max=1), Dim("tokens", max=31), Dim("tokens", min=32)


def _torch(
    variant: str, target: str, available: str, priority: int, tokens: Dim, schemes: tuple[str, ...], **fields: Any
) -> list[KernelSpec]:
    """CPU rows made of operators that torch ships, one a scheme: for machines that cannot build the C++ rows, and for
    dense weights. `tokens` is where the row is fast."""
    return [
        KernelSpec(
            name="torch/linear." + (variant if scheme == "unquantized" else f"{scheme}_{variant}"),
            op="linear",
            backend="torch",
            target=target,
            available=available,
            devices=("cpu",),
            dtypes=("fp32",),
            schemes=(scheme,),
            priority=priority,
            **{"shape": Shape(prefer=(tokens,)), **fields},
        )
        for scheme in schemes
    ]


register(
    # A view of the weight, no copy.
    *_torch(
        *("gemv", f"{_TORCH}:linear_gemv", f"{_TORCH}:available_gemv", 20, _FEW, SCHEMES[:1]),
        shape=Shape(require=(Dim("out_features", multiple_of=8),), prefer=(_FEW,)),
        layout=("weight:last_dim_contiguous",),
    ),
    # Dense fp32, 4 bytes a weight: where FBGEMM is missing.
    *_torch(
        *("gemv32", f"{_TORCH}:linear_gemv", f"{_TORCH}:available_gemv", 10, _FEW, SCHEMES[1:]),
        shape=Shape(require=(Dim("out_features", multiple_of=8),), prefer=(_FEW,)),
        prepack=f"{_TORCH}:pack_dense",
    ),
    # Codes, 1 byte a weight and a quarter for scales. One token by q8_0 is faster so than in C++: 1.6 ms against 2.7
    # for 49152 x 576 with two threads of an AVX2 machine; more tokens are not.
    *_torch("bag", f"{_ROWWISE}:linear_bag", f"{_ROWWISE}:available", 35, _ONE, ("q8_0",), prepack=_BAGS),
    *_torch("bag", f"{_ROWWISE}:linear_bag", f"{_ROWWISE}:available", 20, Dim("tokens", max=8), _4BIT, prepack=_BAGS),
    # The blocks, reordered: as big as they were, q8_0 a sixth bigger.
    *_torch("unpack", _UNPACK, f"{_ROWWISE}:available", 15, Dim("tokens", min=2), ("q8_0",), prepack=_BLOCKS),
    *_torch("unpack", _UNPACK, f"{_ROWWISE}:available", 15, Dim("tokens", min=9), _4BIT, prepack=_BLOCKS),
    *_torch(
        *("unpack_bf16", f"{_ROWWISE}:linear_unpack_bf16", f"{_ROWWISE}:available_bf16", 25, _MANY, SCHEMES[1:]),
        prepack=_BLOCKS,
        roundings=("input:bf16", "weight:bf16", "output:bf16"),
    ),
    # Dense fp16, 2 bytes a weight. The fastest of these rows for 2 to 31 tokens, yet ranked last: FBGEMM packs some 40
    # million weights a second, on one thread, so choosing it for a model costs minutes of loading for each 10 GB.
    *_torch(
        *("fp16", f"{_TORCH}:linear_fp16", f"{_TORCH}:available_fp16", 5, _FEW, SCHEMES),
        prepack=f"{_TORCH}:pack_fp16",
        roundings=("weight:fp16",),
    ),
)

register(
    KernelSpec(
        name="torch/linear",
        op="linear",
        backend="torch",
        target="rapid_llm.kernels.ops.gemm.linear_cublas:linear",
        available="rapid_llm.kernels.ops.gemm.linear_cublas:available",
        # torch rounds a product to the result's dtype before it adds the bias, on some shapes.
        shape=Shape(require=(Dim("biased", max=0),)),
        devices=("cuda",),
        dtypes=("fp32", "bf16", "fp16"),
        schemes=("unquantized",),
    ),
)

register(
    KernelSpec(
        name="deepgemm/linear",
        op="linear",
        backend="deepgemm",
        target="rapid_llm.kernels.backend.deepgemm.linear:linear",
        available="rapid_llm.kernels.backend.deepgemm:available",
        devices=("cuda",),
        dtypes=("bf16",),
        # On SM 100 the library rounds the blocks' scales to powers of two.
        capability=((90, 90),),
        shape=Shape(
            require=(Dim("in_features", multiple_of=128), Dim("out_features", multiple_of=64), Dim("biased", max=0))
        ),
        layout=("input:last_dim_contiguous",),
        schemes=(FP8,),
        roundings=("input:fp8_block128",),
        prepack="rapid_llm.kernels.backend.deepgemm.weight:pack",
        # A number of tokens that it has not met may make it compile, also while a graph is captured.
        graph_safe=False,
    ),
)

_JIT = "rapid_llm.kernels.ops.gemm.linear_jit"
_TILED = "rapid_llm.kernels.ops.gemm.linear_tiled_jit"


def _jit(name: str, module: str, function: str, scheme: str, layout: str, prepack: str | None = None) -> KernelSpec:
    """A row of csrc/gemm/linear_gemv.cu or linear_tiled.cu; `layout` is asked of the input beside contiguous rows."""
    return KernelSpec(
        name=name,
        op="linear",
        backend="jit",
        target=f"{module}:{function}",
        available="rapid_llm.kernels.jit:available",
        devices=("cuda",),
        dtypes=("bf16", "fp16"),
        capability=((80, None),),
        shape=Shape(require=(Dim("tokens", max=8), Dim("in_features", max=2**30 - 1))),
        layout=("input:last_dim_contiguous", layout),
        schemes=(scheme,),
        prepack=None if prepack is None else f"{module}:{prepack}",
        prepare=f"{module}:prepare",
    )


register(
    _jit("jit/linear", _JIT, "linear", "unquantized", "weight:last_dim_contiguous"),
    # Reads weights while the previous kernel still runs, so it takes only those that nothing writes any more.
    _jit("jit/linear.settled", _JIT, "linear_settled", "unquantized", "weight:last_dim_contiguous", "settle"),
    *(_jit(f"jit/linear.{scheme}", _TILED, "linear", scheme, "input:aligned16", "pack") for scheme in SCHEMES[1:]),
)

_AOT = "rapid_llm.kernels.ops.gemm.linear_aot"


def _aot(name: str, function: str, prepack: str | None = None) -> KernelSpec:
    """The launcher of `jit/linear`, from the extension."""
    return KernelSpec(
        name=name,
        op="linear",
        backend="aot",
        target=f"{_AOT}:{function}",
        available="rapid_llm.kernels.aot:available",
        devices=("cuda",),
        dtypes=("bf16", "fp16"),
        capability=((80, None),),
        shape=Shape(require=(Dim("tokens", max=8), Dim("in_features", max=2**30 - 1))),
        layout=("input:last_dim_contiguous", "weight:last_dim_contiguous"),
        schemes=("unquantized",),
        prepack=prepack,
    )


register(_aot("aot/linear", "linear"), _aot("aot/linear.settled", "linear_settled", f"{_JIT}:settle"))
