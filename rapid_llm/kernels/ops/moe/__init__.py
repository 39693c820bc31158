"""Mixture of experts: routing, the experts, and tokens that travel to the ranks of their experts and back."""

from rapid_llm.kernels.registry import Dim, KernelSpec, Numerics, OpSpec, Out, Shape, register

_DTYPES = ("fp32", "fp16", "bf16")
_RANKS = Dim("ranks", one_of=(2, 4, 8))
_HIDDEN = Dim("hidden", multiple_of=256)

DISPATCH = OpSpec(
    id="comm.dispatch",
    schema=(
        "(Tensor input, Tensor topk_ids, Tensor topk_weights, Tensor(a!) recv, Tensor(b!) recv_ids, "
        "Tensor(c!) recv_weights, Tensor(d!) recv_source, *, int num_experts, int ranks=1, str group='') -> ()"
    ),
    group="moe",
    dims={
        "tokens": "input.shape[0]",
        "hidden": "input.shape[1]",
        "topk": "topk_ids.shape[1]",
        "capacity": "recv.shape[0]",
        "ranks": "ranks",
    },
    out=None,
    dtypes=_DTYPES,
    oracle="rapid_llm.verify.exchange:comm_dispatch",
    cases="rapid_llm.verify.cases.exchange:comm_dispatch",
    bound="rapid_llm.verify.exchange:comm_dispatch_bound",
    work="rapid_llm.verify.exchange:comm_dispatch_work",
    doc="""Send each token to every rank that has one of its experts; a collective call of all ranks of `group`.

    Rank r of `ranks` has experts r * num_experts / ranks and on. input: (tokens, hidden). topk_ids: (tokens, topk)
    int64 or int32 experts, negative for none. topk_weights: (tokens, topk) fp32. A rank receives a token once, however
    many of its experts the token chose; rows are in the order of source rank, then token. Of n received rows,
    recv: (capacity, hidden) holds the tokens, its rows from n on are left as they were; recv_ids: (capacity, topk) in
    topk_ids' dtype the experts' numbers on this rank, -1 for others and from n on; recv_weights: (capacity, topk) fp32
    their weights, 0 for others and from n on; recv_source: (capacity, 2) int32 rank and token of the source, -1 from n
    on: what `comm_combine` takes. capacity: at least n; ranks * the most tokens of a rank always suffices.
    ranks=1 moves rows within this process; else `group` names a torch.distributed process group, '' the default one.
    """,
)

COMBINE = OpSpec(
    id="comm.combine",
    schema="(Tensor input, Tensor recv_source, int tokens, *, int ranks=1, str group='') -> Tensor",
    group="moe",
    dims={"tokens": "tokens", "hidden": "input.shape[1]", "capacity": "input.shape[0]", "ranks": "ranks"},
    out=Out(shape="(tokens, input.shape[1])", dtype="input.dtype"),
    dtypes=_DTYPES,
    oracle="rapid_llm.verify.exchange:comm_combine",
    cases="rapid_llm.verify.cases.exchange:comm_combine",
    bound="rapid_llm.verify.exchange:comm_combine_bound",
    work="rapid_llm.verify.exchange:comm_combine_work",
    numerics=Numerics(accumulate="fp32"),
    doc="""Bring the rows that `comm_dispatch` delivered back and add those of one token; the inverse collective.

    input: (capacity, hidden), a result for each received row, weighted already; recv_source: (capacity, 2) int32 as
    `comm_dispatch` filled it, of the same backend; rows of source -1 are not read. tokens: this rank's number of
    tokens. Returns (tokens, hidden) in input's dtype: for each token the sum over the ranks that it was sent to, in
    fp32 and in the order of ranks, rounded once; zeros for a token that went nowhere.
    """,
)


def _deepep(op: str, function: str, *limits: Dim) -> KernelSpec:
    """The library's kernels within one node. They copy 16 bytes a thread of a warp; bf16 is all that they add."""
    return KernelSpec(
        name=f"deepep/{op}",
        op=op,
        backend="deepep",
        target=f"rapid_llm.kernels.backend.deepep.exchange:{function}",
        available="rapid_llm.kernels.backend.deepep:available",
        devices=("cuda",),
        dtypes=("bf16",),
        capability=((90, 90),),
        shape=Shape(require=(_RANKS, _HIDDEN, *limits)),
        layout=("input:contiguous",),
        # The first call of a group, or of a wider row, makes buffers: a collective that waits for every rank.
        graph_safe=False,
    )


register(
    DISPATCH,
    COMBINE,
    *(
        KernelSpec(
            name=f"native/{op}",
            op=op,
            backend="native",
            target=f"rapid_llm.kernels.ops.moe.exchange:{function}",
            dtypes=_DTYPES,
            priority=0,
            # With several ranks the counts of rows are read on the host.
            graph_safe=False,
        )
        for op, function in (("comm.dispatch", "comm_dispatch"), ("comm.combine", "comm_combine"))
    ),
    _deepep("comm.dispatch", "comm_dispatch", Dim("topk", max=32)),
    _deepep("comm.combine", "comm_combine"),
)

TOPK = OpSpec(
    id="moe.topk",
    schema="(Tensor logits, int k, bool renormalize=True) -> (Tensor, Tensor)",
    group="moe",
    dims={"tokens": "logits.shape[0]", "experts": "logits.shape[1]", "topk": "k"},
    out=None,
    outs=(
        Out(shape="(logits.shape[0], k)", dtype="torch.float32"),
        Out(shape="(logits.shape[0], k)", dtype="torch.int32"),
    ),
    dtype_of="logits",
    dtypes=_DTYPES,
    oracle="rapid_llm.verify.routing:moe_topk",
    cases="rapid_llm.verify.cases.moe:moe_topk",
    bound="rapid_llm.verify.routing:moe_topk_bound",
    work="rapid_llm.verify.routing:moe_topk_work",
    numerics=Numerics(accumulate="fp32"),
    doc="""The k experts of each token, by the largest logits, and their weights, by a softmax over all experts.

    logits: (tokens, experts), any strides. k: 1 .. experts. Returns weights (tokens, k) fp32 and ids (tokens, k) int32,
    both in falling order of logits; of equal logits the lower id comes first. renormalize: each token's k weights are
    divided by their sum (Mixtral, Qwen3-MoE); else they are the softmax's own. Computed in fp32. A NaN ranks below
    every number; a row with a NaN, with +inf or with nothing but -inf gives NaN for all its weights, and valid ids.
    """,
)

FUSED_MOE = OpSpec(
    id="fused_moe",
    schema="(Tensor input, Tensor gate_up, Tensor down, Tensor topk_weights, Tensor topk_ids) -> Tensor",
    group="moe",
    dims={
        "tokens": "input.shape[0]",
        "hidden": "input.shape[1]",
        "intermediate": "down.shape[2]",
        "experts": "gate_up.shape[0]",
        "topk": "topk_ids.shape[1]",
    },
    out=Out(shape="input.shape", dtype="input.dtype"),
    dtypes=_DTYPES,
    oracle="rapid_llm.verify.routing:fused_moe",
    cases="rapid_llm.verify.cases.moe:fused_moe",
    bound="rapid_llm.verify.routing:fused_moe_bound",
    work="rapid_llm.verify.routing:fused_moe_work",
    numerics=Numerics(accumulate="fp32"),
    doc="""The feed-forward layer of every token's experts, added up by their weights.

    input: (tokens, hidden). gate_up: (experts, 2 * intermediate, hidden), the rows of gate, then those of up. down:
    (experts, hidden, intermediate); both of input's dtype. topk_weights: (tokens, topk) fp32. topk_ids: (tokens, topk)
    int32; an id outside [0, experts) stands for no expert and adds nothing. Returns (tokens, hidden) in input's dtype:
    sum over j of topk_weights[:, j] * down[e] (silu(gate[e] x) * (up[e] x)) with e = topk_ids[:, j]. Sums in fp32; what
    goes into `down` may be rounded to input's dtype, nothing else is before the result. A token's result depends on
    that token and on the weights of its own experts alone.
    """,
)

register(
    TOPK,
    FUSED_MOE,
    *(
        KernelSpec(
            name=f"native/{op}",
            op=op,
            backend="native",
            target=f"rapid_llm.kernels.ops.moe.{module}:{function}",
            dtypes=_DTYPES,
            priority=0,
        )
        for op, module, function in (("moe.topk", "topk", "moe_topk"), ("fused_moe", "fused_moe", "fused_moe"))
    ),
)
