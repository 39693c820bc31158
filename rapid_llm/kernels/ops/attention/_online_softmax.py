"""The inner step of paged attention in Triton: one block of keys folded into a running softmax.

Scores are kept in units of log2 (the factor `scale * log2(e)` is applied in fp32), so that exp2 serves. A row that has
seen no key has maximum -inf, sum 0 and accumulator 0. There is no finite sentinel: scores of any size keep their order.

Products of 16-bit operands run on tensor cores, where they are exact and are summed in fp32. The probabilities are
fp32, so they go in as PARTS 16-bit numbers whose sum is the fp32 value: 3 of bf16 (8 bits each), 2 of fp16 (11 bits
each, shifted up by 2**15 to stay clear of subnormals). PARTS 0 multiplies in fp32 itself, never TF32.
"""

from __future__ import annotations

from rapid_llm.kernels.ops.triton_support import tl, triton


@triton.jit
def block_rows(table_ptr, positions, inside, stride_entry, PAGE: tl.constexpr):
    """(page, row in page) of each key position, int64; positions that are not `inside` give page 0."""
    pages = tl.load(table_ptr + (positions // PAGE).to(tl.int64) * stride_entry, mask=inside, other=0)
    return pages.to(tl.int64), (positions % PAGE).to(tl.int64)


@triton.jit
def tanh(x):
    """tanh of fp32: near 0 x + x**3 P(x**2), with the coefficients of Cephes' tanhf; else 1 - 2 / (exp(2 |x|) + 1).

    Within 12 units roundoff everywhere; the quotient alone would lose all digits of a small x.
    """
    size = tl.abs(x)
    square = x * x
    near = -5.70498872745e-3
    near = near * square + 2.06390887954e-2
    near = near * square - 5.37397155531e-2
    near = near * square + 1.33314422036e-1
    near = near * square - 3.33332819422e-1
    near = near * square * x + x
    far = 1.0 - 2.0 / (tl.exp2(size * 2.8853900817779268) + 1.0)
    return tl.where(size < 0.625, near, tl.where(x < 0.0, -far, far))


@triton.jit
def attend_block(
    q, k, v, visible, maximum, total, acc, scale_log2, cap_log2,
    MASKED: tl.constexpr, CAPPED: tl.constexpr, PARTS: tl.constexpr, SHIFT: tl.constexpr,
):  # fmt: skip
    """Fold keys k and values v, both (N, D), into the running softmax of the queries q (M, D); visible is (M, N)."""
    if PARTS == 0:
        scores = tl.dot(q, tl.trans(k.to(tl.float32)), input_precision="ieee") * scale_log2
    else:
        scores = tl.dot(q, tl.trans(k)) * scale_log2
    if CAPPED:
        scores = cap_log2 * tanh(scores)
    if MASKED:
        scores = tl.where(visible, scores, float("-inf"))
    new_maximum = tl.maximum(maximum, tl.max(scores, 1))
    base = tl.where(new_maximum == float("-inf"), 0.0, new_maximum)
    weights = tl.exp2(scores - (base - SHIFT)[:, None])
    decay = tl.exp2(maximum - base)
    total = total * decay + tl.sum(weights, 1)
    acc = acc * decay[:, None]
    if PARTS == 0:
        acc = tl.dot(weights, v.to(tl.float32), acc, input_precision="ieee")
    else:
        high = weights.to(v.dtype)
        rest = weights - high.to(tl.float32)
        acc = tl.dot(high, v, acc)
        middle = rest.to(v.dtype)
        acc = tl.dot(middle, v, acc)
        if PARTS == 3:
            acc = tl.dot((rest - middle.to(tl.float32)).to(v.dtype), v, acc)
    return new_maximum, total, acc
