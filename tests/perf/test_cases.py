"""Cases from options."""

from __future__ import annotations

import pytest

from rapid_llm.perf.cases import Case, make_cases, numbers


def test_numbers_are_read_strictly() -> None:
    """Catches: a value that is dropped, taken twice, or read as something else."""
    assert numbers("--batch", "1, 16,1") == (1, 16)
    assert numbers("--prefill", "0", none=True) == ()
    for text in ("", "1,,2", "x", "-1", "1.5", "0"):
        with pytest.raises(ValueError, match=r"--batch .* is not a whole number"):
            numbers("--batch", text)
    with pytest.raises(ValueError, match="0 stands for none"):
        numbers("--prefill", "0,5", none=True)


def test_every_batch_at_every_context() -> None:
    """Catches: a zip where a product is meant, decode cases where none are asked for."""
    found = make_cases(prefills=(8,), batches=(1, 2), contexts=(16, 32), tokens=4)
    assert found == (
        Case("prefill", 1, 8),
        *(Case("decode", b, c, 4) for c in (16, 32) for b in (1, 2)),
    )
    assert make_cases(prefills=(8, 8), batches=(1,), contexts=(1,), tokens=0) == (Case("prefill", 1, 8),)


def test_what_counts() -> None:
    """Catches: rates by the wrong number of tokens, a cache without room for the answers."""
    decode, prefill = Case("decode", 3, 100, 20), Case("prefill", 2, 50)
    assert (decode.produced, decode.steps, decode.length) == (60, 20, 121)
    assert (prefill.produced, prefill.steps, prefill.length) == (100, 1, 51)
    assert decode.cache_tokens >= 3 * 128
    assert decode.cache_tokens % 16 == 0
