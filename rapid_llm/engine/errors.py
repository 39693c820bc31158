"""What a failed step raises. Torch-free, so that a server can tell one kind from the other before torch is there."""

from __future__ import annotations


class EngineError(RuntimeError):
    """A step failed, and with it every request that was in the engine. The engine itself can be used again."""


class EngineEndedError(EngineError):
    """A step failed, and the engine cannot be used again."""
