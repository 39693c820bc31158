"""The default model's tokenizer, read once a session."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from rapid_llm.engine.text.tokenizer import Tokenizer
from rapid_llm.models.gguf import GGUFFile


@pytest.fixture(scope="session")
def smollm2(model_path: Path) -> Tokenizer:
    return Tokenizer.from_gguf(GGUFFile(model_path))


@pytest.fixture(scope="session")
def reference() -> dict[str, Any]:
    """Ids and texts that other implementations gave for the default model; see the file's own notes."""
    return json.loads((Path(__file__).parents[2] / "data" / "smollm2_reference.json").read_text())
