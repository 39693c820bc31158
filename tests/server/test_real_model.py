"""The server with the default model, driven by the real `openai` client and by curl.

Deterministic, so that a token is the same whatever else is in a step and whatever is cached; one compute thread.
"""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rapid_llm import LLM, SamplingParams

from .live import Live, live, until

openai = pytest.importorskip("openai", reason="the client that judges these tests is not installed")

pytestmark = pytest.mark.model

NAME = "smollm2-135m-instruct"
MESSAGES = [{"role": "user", "content": "Name three colours."}]
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather of a city.",
        "parameters": {
            "type": "object",
            "properties": {"unit": {"enum": ["celsius", "kelvin"]}},
            "required": ["unit"],
            "additionalProperties": False,
        },
    },
}


@pytest.fixture(scope="module")
def server(model_path: Path) -> Iterator[Live]:
    llm = LLM(model_path, device="cpu", threads=1, kv_cache_tokens=4096, deterministic=True)
    with live(llm, [NAME, "other"], api_keys=("key",)) as found:
        yield found
        until(found.idle)
        found.engine.check()


@pytest.fixture(scope="module")
def client(server: Live) -> Iterator[Any]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="key", max_retries=0, timeout=60) as found:
        yield found


def test_models(client: Any) -> None:
    """Catches: a list that the client cannot read."""
    assert [model.id for model in client.models.list()] == [NAME, "other"]
    assert client.models.retrieve("other").id == "other"


def test_chat_and_stream_are_the_librarys(server: Live, client: Any) -> None:
    """E18. Catches: ids, text or usage that differ between the library, an answer and a stream."""
    (wanted,) = server.llm.chat(MESSAGES, SamplingParams(temperature=0, max_tokens=8))
    asked = {"model": NAME, "messages": MESSAGES, "temperature": 0, "max_tokens": 8, "logprobs": True}
    whole = client.chat.completions.create(**asked)
    assert whole.choices[0].message.content == wanted.outputs[0].text
    assert whole.choices[0].finish_reason == wanted.outputs[0].finish_reason
    ids = wanted.outputs[0].token_ids
    data = [bytes(entry.bytes) for entry in whole.choices[0].logprobs.content]
    assert data == [server.llm.tokenizer.token_bytes(token) for token in ids]
    chunks = list(client.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True}))
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == wanted.outputs[0].text
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens == len(ids)


def test_completion_by_ids_is_the_librarys(server: Live, client: Any) -> None:
    """E18. Catches: a prompt of ids or of text that gets other ids through the server."""
    prompt = "The capital of France is"
    (wanted,) = server.llm.generate(prompt, SamplingParams(temperature=0, max_tokens=6, logprobs=2))
    for given in (prompt, wanted.prompt_token_ids):
        answer = client.completions.create(model=NAME, prompt=given, temperature=0, max_tokens=6, logprobs=2)
        assert answer.choices[0].text == wanted.outputs[0].text
        found = answer.choices[0].logprobs
        expected = [
            at[token].logprob for token, at in zip(wanted.outputs[0].token_ids, wanted.outputs[0].logprobs, strict=True)
        ]
        assert found.token_logprobs == pytest.approx(expected, abs=1e-5)
        assert [max(top.values()) for top in found.top_logprobs] == found.token_logprobs


def test_several_seeded_samples(client: Any) -> None:
    """E87. Catches: samples that are all the same, or that a stream tells otherwise."""
    asked = {"model": NAME, "messages": MESSAGES, "n": 3, "seed": 4, "max_tokens": 4, "temperature": 1.0}
    whole = [choice.message.content for choice in client.chat.completions.create(**asked).choices]
    assert len(set(whole)) > 1
    texts = ["", "", ""]
    for chunk in client.chat.completions.create(**asked, stream=True):
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
    assert texts == whole


def test_a_schema_and_a_tool(client: Any) -> None:
    """Catches: structures and tools that the client asks for and does not get."""
    pytest.importorskip("llguidance")
    schema = {
        "type": "object",
        "properties": {"warm": {"type": "boolean"}},
        "required": ["warm"],
        "additionalProperties": False,
    }
    answer = client.chat.completions.create(
        model=NAME,
        messages=MESSAGES,
        max_tokens=40,
        temperature=0,
        response_format={"type": "json_schema", "json_schema": {"name": "colour", "schema": schema}},
    )
    value = json.loads(answer.choices[0].message.content)
    assert isinstance(value["warm"], bool)
    asked = {"model": NAME, "messages": [{"role": "user", "content": "Weather?"}], "tools": [WEATHER], "temperature": 0}
    answer = client.chat.completions.create(**asked, tool_choice="required", max_tokens=60)
    (call,) = answer.choices[0].message.tool_calls
    assert (answer.choices[0].finish_reason, call.function.name) == ("tool_calls", "get_weather")
    assert json.loads(call.function.arguments)["unit"] in ("celsius", "kelvin")


def test_leaving_a_stream_ends_it(server: Live, client: Any) -> None:
    """E82. Catches: a closed stream that runs on."""
    stream = client.chat.completions.create(model=NAME, messages=MESSAGES, max_tokens=500, stream=True)
    next(iter(stream))
    stream.close()
    until(server.idle)
    assert server.engine.totals.decode_steps < 400


def test_errors_are_the_clients_own(server: Live, client: Any) -> None:
    """Catches: errors in a shape that the client cannot tell apart."""
    with pytest.raises(openai.NotFoundError, match="use one of"):
        client.chat.completions.create(model="x", messages=MESSAGES)
    with pytest.raises(openai.BadRequestError, match="9001 tokens and the context 4097") as refusal:
        client.completions.create(model=NAME, prompt=[5] * 9001)
    assert refusal.value.param == "prompt"
    with (
        openai.OpenAI(base_url=f"{server.url}/v1", api_key="wrong", max_retries=0) as stranger,
        pytest.raises(openai.AuthenticationError),
    ):
        stranger.models.list()


def test_embeddings(server: Live, client: Any) -> None:
    """Catches: vectors that the client cannot unpack, of another text or of another layer.

    The oracle is one pass over each text alone, pooled in float64 by numpy; kernels of other sizes round otherwise,
    which turns a vector by less than 0.02. `tests/engine/test_embedding.py` has the exact figures.
    """
    texts = ["The sky is blue.", "A much longer text about something else entirely: " + "water, " * 10, "x"]
    found = client.embeddings.create(model=NAME, input=texts)
    assert [item.index for item in found.data] == [0, 1, 2]
    hidden = [hidden_states(server.llm, text) for text in texts]
    assert found.usage.prompt_tokens == sum(map(len, hidden))
    for item, states in zip(found.data, hidden, strict=True):
        assert angle(item.embedding, states.mean(0)) < 0.02
        assert np.linalg.norm(item.embedding) == pytest.approx(1, abs=1e-6)
    last = client.embeddings.create(model=NAME, input=texts[1], encoding_format="float", extra_body={"pooling": "last"})
    assert angle(last.data[0].embedding, hidden[1][-1]) < 0.02
    assert angle(hidden[1][-1], hidden[1].mean(0)) > 0.1, "the bound could not tell them apart"


def angle(a: Any, b: Any) -> float:
    """Between two vectors, as its sine."""
    a, b = np.asarray(a) / np.linalg.norm(a), np.asarray(b) / np.linalg.norm(b)
    return float(np.linalg.norm(a - (a @ b) * b))


def hidden_states(llm: LLM, text: str) -> np.ndarray:
    """Final hidden states of a text in one pass of its own, in a cache of its own."""
    import torch

    from rapid_llm.engine.kv_memory import allocate
    from rapid_llm.models.attention_metadata import AttentionMetadata

    ids = torch.tensor(llm.tokenizer.encode(text))
    count, decoder = len(ids), llm._decoder
    pages = -(-count // 16)
    meta = AttentionMetadata(
        positions=torch.arange(count),
        slot_mapping=torch.arange(count) + 16,
        cu_seqlens_q=torch.tensor([0, count], dtype=torch.int32),
        seq_lens=torch.tensor([count], dtype=torch.int32),
        block_table=torch.arange(1, pages + 1, dtype=torch.int32).view(1, -1),
        decode=count == 1,
    )
    with torch.inference_mode():
        kv = allocate(decoder.config, pages + 1, decoder.activation_dtype, decoder.device)
        return decoder.forward(ids, meta, kv).double().numpy()


@pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed")
def test_curl(server: Live, tmp_path: Path) -> None:
    """Catches: what only a client outside of Python notices: framing of events, the refusal of a long body."""

    def curl(*args: str) -> str:
        done = subprocess.run(
            [
                "curl",
                "-sS",
                "--max-time",
                "30",
                "-H",
                "Authorization: Bearer key",
                "-H",
                "Content-Type: application/json",
                *args,
            ],
            capture_output=True,
            text=True,
            check=True,
        )
        return done.stdout

    body = json.dumps({"messages": MESSAGES, "max_tokens": 3, "temperature": 0, "stream": True})
    lines = curl("-N", f"{server.url}/v1/chat/completions", "-d", body).split("\n\n")
    assert lines[-2:] == ["data: [DONE]", ""]
    said = "".join(json.loads(line[6:])["choices"][0]["delta"].get("content", "") for line in lines[:-2])
    (wanted,) = server.llm.chat(MESSAGES, SamplingParams(temperature=0, max_tokens=3))
    assert said == wanted.outputs[0].text
    assert json.loads(curl(f"{server.url}/health")) == {"status": "ok"}
    long = tmp_path / "long"
    with long.open("wb") as file:
        file.truncate(100_000_000)
    answer = curl("-w", "\n%{http_code}", f"{server.url}/v1/completions", "--data-binary", f"@{long}")
    assert answer.splitlines()[-1] == "413"
    assert "--max-body-bytes" in answer


def test_a_report_of_what_runs(server: Live) -> None:
    """Catches: figures of ops that the page shows and that no step has made; a watch that never ends."""
    key = {"Authorization": "Bearer key"}
    server.server.report.watch_s = 60.0
    status, first = server.get("/v1/report", **key)
    assert (status, first["live"]) == (200, None)
    assert {"op", "where", "row", "why"} == set(first["choices"][0])
    assert server.engine.step_hook is not None
    asked = {"prompt": "a b c", "max_tokens": 12, "ignore_eos": True}
    assert server.post("/v1/completions", asked, **key)[0] == 200
    live_figures = server.get("/v1/report", **key)[1]["live"]
    server.server.report.watch_s = 0.1
    ops = {figure["op"]: figure for figure in live_figures["ops"] if figure["phase"] == "decode"}
    assert ops["linear"]["row"] in {choice["row"] for choice in first["choices"]}
    assert ops["linear"]["gb_per_s"] > 0
    assert ops["linear"]["bandwidth_share"] == pytest.approx(ops["linear"]["gb_per_s"] / 40, rel=1e-6)
    until(lambda: server.engine.step_hook is None)
