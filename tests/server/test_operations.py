"""What stands around answers: tokens, vectors, models, figures, and the parts that limit a request."""

from __future__ import annotations

import base64
import struct
import threading
from typing import Any

import numpy as np
import pytest
from prometheus_client.parser import text_string_to_metric_families

from rapid_llm.server.errors import ApiError
from rapid_llm.server.limits import Slots

from .conftest import mock_llm
from .live import Live, live, until


def figures(server: Live) -> dict[tuple[str, ...], float]:
    """(name, labels' values...) -> value, as a Prometheus reads them."""
    text = server.request("GET", "/metrics")[2].decode()
    return {
        (sample.name, *(value for _, value in sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def test_tokens_and_back(server: Live) -> None:
    """Catches: control tokens of a text lost or not shown, BOS where it was not asked for, ids that are none taken."""
    status, answer = server.post("/tokenize", {"model": "mock", "prompt": "a<|im_end|>é"})
    assert (status, answer) == (200, {"tokens": [97, 257, 195, 169], "count": 4, "max_model_len": 256})
    assert server.post("/detokenize", {"tokens": answer["tokens"]}) == (200, {"prompt": "a<|im_end|>é"})
    shown = server.post("/detokenize", {"tokens": answer["tokens"], "skip_special_tokens": True})
    assert shown == (200, {"prompt": "aé"})
    assert server.post("/detokenize", {"tokens": [195]}) == (200, {"prompt": "\ufffd"})
    assert server.post("/tokenize", {"prompt": ""})[1]["count"] == 0
    messages = [{"role": "user", "content": "x"}]
    whole = server.post("/tokenize", {"messages": messages})[1]["tokens"]
    bare = server.post("/tokenize", {"messages": messages, "add_generation_prompt": False})[1]["tokens"]
    assert whole == [*bare, 256, *b"assistant\n"]
    assert server.refusal("/detokenize", {"tokens": [260]})[:2] == (400, "tokens")
    assert server.refusal("/detokenize", {"tokens": ["a"]})[:2] == (422, "tokens.0")
    assert server.refusal("/tokenize", {"prompt": "x", "messages": messages})[:2] == (400, "prompt")
    assert server.refusal("/tokenize", {})[:2] == (400, "prompt")


def test_bos_is_put_in_front_where_the_model_asks_for_it() -> None:
    """E17. Catches: add_special_tokens accepted and ignored, and two BOS."""
    from rapid_llm import LLM
    from tests.engine.mocks import MockDecoder, byte_tokenizer, random_logits

    llm = LLM.from_parts(MockDecoder(random_logits()), byte_tokenizer(add_bos=True), threads=1, kv_cache_tokens=512)
    with live(llm) as server:

        def tokens(**fields: Any) -> list[int]:
            found: list[int] = server.post("/tokenize", fields)[1]["tokens"]
            return found

        assert tokens(prompt="a") == tokens(prompt="<|im_start|>a") == [256, 97]
        assert tokens(prompt="a", add_special_tokens=False) == [97]
        assert tokens(messages=[{"role": "user", "content": "x"}]).count(256) == 2


def test_vectors(server: Live) -> None:
    """Catches: order, form or usage of vectors that clients do not read; limits that only other paths keep."""
    path = "/v1/embeddings"
    status, answer = server.post(path, {"input": ["ab", "c", [1, 2, 3]]})
    assert status == 200
    assert [item["index"] for item in answer["data"]] == [0, 1, 2]
    assert answer["usage"] == {"prompt_tokens": 6, "total_tokens": 6}
    packed = server.post(path, {"input": "ab", "encoding_format": "base64", "pooling": "last"})[1]
    (item,) = packed["data"]
    assert np.abs(struct.unpack("<f", base64.b64decode(item["embedding"]))) == pytest.approx(1)
    for fields, status, param in (
        ({"input": ""}, 400, "input"),
        ({"input": []}, 400, "input"),
        ({"input": 5}, 422, "input"),
        ({"input": [-1]}, 400, "input"),
        ({"input": "a" * 300}, 400, "input"),
        ({"input": ["a"] * 65}, 400, "n"),
        ({"input": "a", "dimensions": 5}, 400, "dimensions"),
        ({"input": "a", "pooling": "max"}, 400, "pooling"),
        ({"input": "a", "model": "x"}, 404, "model"),
    ):
        assert server.refusal(path, fields)[:2] == (status, param), fields


def test_vectors_beside_running_answers() -> None:
    """Catches: a pass for a vector that moves the tokens of an answer, or takes the pages it needs."""
    llm = mock_llm(kv_cache_tokens=256, max_batch_tokens=64, max_running=16)
    with live(llm) as server:
        fields = {"prompt": "beside", "temperature": 0, "max_tokens": 50, "ignore_eos": True}
        wanted = server.complete(**fields)["choices"][0]["text"]
        stop, asked = threading.Event(), [0]

        def embed() -> None:
            while not stop.is_set():
                assert server.post("/v1/embeddings", {"input": ["x" * 150, "y"]})[0] == 200
                asked[0] += 1

        other = threading.Thread(target=embed)
        other.start()
        found = [server.complete(**fields)["choices"][0]["text"] for _ in range(3)]
        until(lambda: asked[0] > 1)
        stop.set()
        other.join(20)
        assert found == [wanted] * 3
        until(server.idle)
        server.engine.check()


def test_figures_count_what_happened() -> None:
    """Catches: a figure that never moves, moves twice, or that Prometheus cannot read."""
    with live(mock_llm()) as server:
        server.complete("count", max_tokens=5, n=2, ignore_eos=True)
        server.complete("stop here", max_tokens=9, logit_bias={"257": 100})
        server.refusal("/v1/completions", {"prompt": ""})
        server.get("/nowhere/at/all")
        found = figures(server)
        name = "rapid_llm_"
        assert found[f"{name}generation_tokens_total",] == 11
        assert found[f"{name}prompt_tokens_total",] == 14
        assert found[f"{name}answers_total", "length"] == 2
        assert found[f"{name}answers_total", "stop"] == 1
        assert found[f"{name}time_to_first_token_seconds_count",] == 2
        assert found[f"{name}inter_token_latency_seconds_count",] == 4
        assert found[f"{name}request_duration_seconds_count",] == 2
        assert found[f"{name}http_responses_total", "/v1/completions", "200"] == 2
        assert found[f"{name}http_responses_total", "/v1/completions", "400"] == 1
        assert found[f"{name}http_responses_total", "other", "404"] == 1
        assert found[f"{name}steps_total", "prefill"] == 2
        assert found[f"{name}row", "sample", "native/sample"] > 0
        assert found[f"{name}healthy",] == 1
        prompt = "a prompt that is much longer than one page of the cache"
        server.complete(prompt, max_tokens=1)
        server.complete(prompt, max_tokens=1)
        assert figures(server)[f"{name}prefix_cache_hit_tokens_total",] == 48


def test_a_model_has_every_name_that_it_is_given() -> None:
    """E46. Catches: an alias that is listed and not served."""
    with live(mock_llm(), ["one", "two", "one"]) as server:
        assert [model["id"] for model in server.get("/v1/models")[1]["data"]] == ["one", "two"]
        for name in ("one", "two", None):
            answer = server.post("/v1/completions", {"model": name, "prompt": "x", "max_tokens": 1})[1]
            assert answer["model"] == "one"
        assert server.refusal("/v1/completions", {"model": "mock", "prompt": "x"})[2].endswith("use one of one, two")


def test_ids_are_never_given_twice(server: Live) -> None:
    """E47. Catches: answers that cannot be told apart."""
    ids = [server.complete("x", max_tokens=1)["id"] for _ in range(5)]
    assert len(set(ids)) == 5


def test_places() -> None:
    """Catches: a place that is lost with an error, a request that can never be taken put off for ever."""
    slots = Slots(3)
    with slots.take(2), pytest.raises(ApiError, match="2 of 3") as refusal, slots.take(2):
        pass
    assert (refusal.value.status, refusal.value.headers["Retry-After"]) == (429, "1")
    with pytest.raises(ZeroDivisionError), slots.take(3):
        _ = 1 / 0
    assert slots.used == 0
    with pytest.raises(ApiError, match="asks for 4 answers") as refusal, slots.take(4):
        pass
    assert refusal.value.status == 400
    slots.closed = "shutting down"
    with pytest.raises(ApiError, match="shutting down") as refusal, slots.take(1):
        pass
    assert refusal.value.status == 503


def test_a_client_that_does_not_read_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches: a reader that has stalled and keeps its place and its request for ever.

    Its answer is far longer than what the sockets between it and the server hold.
    """
    import socket

    monkeypatch.setattr("rapid_llm.server.sse.SEND_S", 0.05)
    with (
        live(mock_llm(kv_cache_tokens=16384, max_running=40)) as server,
        socket.socket() as client,
    ):
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1024)
        client.connect(("127.0.0.1", server.port))
        body = b'{"prompt": "a", "n": 40, "max_tokens": 250, "stream": true, "logprobs": 20, "ignore_eos": true}'
        head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
        client.sendall(head.encode() + body)
        until(lambda: server.server.service.slots.used == 40)
        until(server.idle)
        assert server.engine.totals.decode_steps < 200
        assert server.text("after", max_tokens=1)
