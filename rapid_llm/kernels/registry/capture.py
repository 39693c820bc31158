"""Whether a CUDA graph is being captured, asked without importing torch."""

from __future__ import annotations

import sys


def capturing() -> bool:
    """Whether the current stream records a CUDA graph; False where no torch or no CUDA context is."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        return False
    return bool(torch.cuda.is_current_stream_capturing())
