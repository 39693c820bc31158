"""What is refused: with which status, naming which field; and that the next request works."""

from __future__ import annotations

import json
import socket
from typing import Any

import pytest

from .live import Live

PATH = "/v1/completions"
CHAT = "/v1/chat/completions"


@pytest.mark.parametrize(
    ("fields", "status", "param", "says"),
    [
        ({"prompt": ""}, 400, "prompt", "empty"),  # E35
        ({"prompt": []}, 400, "prompt", "empty"),
        ({"prompt": [[]]}, 400, "prompt", "empty"),
        ({"prompt": ["a", ""]}, 400, "prompt", "prompt 1"),
        ({"prompt": [-1, 10**6]}, 400, "prompt", "-1"),  # E6
        ({"prompt": [0, 10**6]}, 400, "prompt", "1000000"),
        ({"prompt": [1.5]}, 422, "prompt", "token ids"),
        ({"prompt": 5}, 422, "prompt", "text"),
        ({"prompt": {"a": 1}}, 422, "prompt", "text"),
        ({}, 422, "prompt", "missing"),
        ({"prompt": "a" * 9000}, 400, "prompt", "9000 tokens and the context 256"),  # E39
        ({"prompt": "a", "n": 10**9}, 400, "n", "1 to 128"),  # E49
        ({"prompt": "a", "n": 0}, 400, "n", "1 to 128"),
        ({"prompt": "a", "n": 65}, 400, "n", "--max-concurrent-requests"),
        ({"prompt": "a", "n": "two"}, 422, "n", "integer"),  # E90
        ({"prompt": "a", "n": True}, 422, "n", "integer"),
        ({"prompt": "a", "max_tokens": "ten"}, 422, "max_tokens", "integer"),
        ({"prompt": "a", "max_tokens": 1.5}, 422, "max_tokens", "integer"),
        ({"prompt": "a", "max_tokens": 0}, 400, "max_tokens", "0"),
        ({"prompt": "a", "temperature": "hot"}, 422, "temperature", "number"),
        ({"prompt": "a", "temperature": -1}, 400, "temperature", "-1"),
        ({"prompt": "a", "top_p": 1.5}, 400, "top_p", "1.5"),
        ({"prompt": "a", "prompt_logprobs": -1}, 400, "prompt_logprobs", "-1"),  # E50
        ({"prompt": "a", "logprobs": 10**6}, 400, "logprobs", "20"),
        ({"prompt": "a", "logprobs": True}, 422, "logprobs", "integer"),
        ({"prompt": "a", "logit_bias": {str(10**7): 1}}, 400, "logit_bias", "10000000"),  # E51
        ({"prompt": "a", "logit_bias": {"-1": 1}}, 400, "logit_bias", "-1"),
        ({"prompt": "a", "logit_bias": {"1": 101}}, 400, "logit_bias", "101"),
        ({"prompt": "a", "logit_bias": {"1": "x"}}, 422, "logit_bias", "number"),
        ({"prompt": "a", "stop_token_ids": [10**7]}, 400, "stop_token_ids", "10000000"),
        ({"prompt": "a", "stop": [""]}, 400, "stop", "non-empty"),
        ({"prompt": "a", "stop": 5}, 422, "stop", "string"),
        ({"prompt": "a", "seed": 2**70}, 400, "seed", "integer"),
        ({"prompt": "a", "model": "x"}, 404, "model", "use one of mock"),  # E46
        ({"prompt": "a", "model": 5}, 422, "model", "string"),
        ({"prompt": "a", "stream": "yes"}, 422, "stream", "boolean"),
        ({"prompt": "a", "stream_options": {"include_usage": True}}, 400, "stream_options", "stream"),
        ({"prompt": "a", "stream": True, "stream_options": {"nonsense": 1}}, 400, "stream_options.nonsense", "field"),
        ({"prompt": "a", "best_of": 2}, 400, "best_of", "not supported"),
        ({"prompt": "a", "suffix": "b"}, 400, "suffix", "not supported"),
        ({"prompt": "a", "temprature": 1}, 400, "temprature", "temperature"),
        ({"prompt": "a", "request_id": "mine"}, 400, "request_id", "field"),  # E47: ids are the server's own
        ({"prompt": "a", "cache_salt": ""}, 400, "prompt", "cache_salt"),
        ({"prompt": "a", "response_format": {"type": "xml"}}, 400, "response_format.type", "json_schema"),
        ({"prompt": "a", "structured": {"regex": "["}}, 400, "structured.regex", "read"),
        ({"prompt": "a", "structured": {"nonsense": 1}}, 400, "structured", "exactly one"),
    ],
)
def test_a_bad_field_is_named(server: Live, fields: dict[str, Any], status: int, param: str, says: str) -> None:
    """Catches: 500, a hang, or a field that is taken and ignored; and a refusal after which nothing works any more."""
    found = server.refusal(PATH, fields)
    assert found[:2] == (status, param), found
    assert says in found[2], found
    assert len(found[2]) < 1000


CHATS = [
    ({"messages": []}, 400, "messages", "empty"),
    ({"messages": "hi"}, 422, "messages", "list"),
    ({"messages": ["hi"]}, 422, "messages.0", "dictionary"),
    ({"messages": [{"role": "wizard", "content": "x"}]}, 400, "messages", "wizard"),
    ({"messages": [{"role": "user"}]}, 400, "messages", "content"),
    ({"messages": [{"role": "user", "content": 5}]}, 422, "messages", "content"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, 400, "messages", "not supported"),
    ({"top_logprobs": 2}, 400, "top_logprobs", "logprobs"),
    ({"logprobs": True, "top_logprobs": 21}, 400, "top_logprobs", "20"),
    ({"logprobs": 3}, 422, "logprobs", "boolean"),
    ({"max_tokens": 3, "max_completion_tokens": 4}, 400, "max_completion_tokens", "max_tokens"),
    ({"functions": []}, 400, "functions", "tools"),
    ({"reasoning_effort": "high"}, 400, "reasoning_effort", "chat_template_kwargs"),
    ({"audio": {}}, 400, "audio", "not supported"),
    ({"store": True}, 400, "store", "stored"),
    ({"modalities": ["text", "audio"]}, 400, "modalities", "text"),
    ({"tool_choice": "auto"}, 400, "tool_choice", "needs tools"),
    ({"tools": [{"type": "function", "function": {"name": "bad name"}}]}, 400, "tools.0.function.name", "pattern"),
    ({"tools": [{"type": "retrieval"}]}, 400, "tools.0.type", "function"),
    ({"chat_template_kwargs": {"messages": []}}, 400, "chat_template_kwargs", "messages"),
]


@pytest.mark.parametrize(("fields", "status", "param", "says"), CHATS)
def test_a_bad_field_of_a_chat_is_named(
    server: Live, fields: dict[str, Any], status: int, param: str, says: str
) -> None:
    """Catches: as above, for what only conversations have."""
    found = server.refusal(CHAT, {"messages": [{"role": "user", "content": "x"}], **fields})
    assert found[:2] == (status, param), found
    assert says in found[2], found


def test_neutral_values_of_unsupported_fields_are_taken(server: Live) -> None:
    """Catches: clients that spell out the defaults turned away."""
    server.chat("x", max_tokens=1, store=False, service_tier="auto", modalities=["text"], metadata={}, n=1)
    server.complete("x", max_tokens=1, best_of=1, suffix="")


@pytest.mark.parametrize(
    ("body", "says"),
    [
        (b"{", "not JSON"),
        (b"", "not JSON"),
        (b'{"prompt": "a", "temperature": NaN}', "NaN"),
        (b'{"prompt": "a", "temperature": Infinity}', "Infinity"),
        (b'{"prompt": "\xff"}', "not UTF-8"),
        (b'{"prompt": "\xed\xa0\xbd"}', "not UTF-8"),
        (b'{"prompt": "\\ud83d"}', "lone surrogate U+D83D"),  # E7
        (b'{"prompt": "a", "\\ud83d": 1}', "lone surrogate"),
        (b'{"prompt": "a", "stop": ["\\udead"]}', "lone surrogate"),
        (b"[" * 50_000 + b"]" * 49_000, "nested"),
        (b'{"prompt": ' + b"[" * 200 + b"]" * 200 + b"}", "nested"),
        (b'{"prompt": "a", "seed": ' + b"9" * 5000 + b"}", "not JSON"),
    ],
    ids=lambda value: repr(value[:24]),
)
def test_broken_bodies(server: Live, body: bytes, says: str) -> None:
    """E90. Catches: bytes that end in 500, or that end the server."""
    status, _, message = server.refusal(PATH, body)
    assert status == 400
    assert says in message
    assert server.text("after", max_tokens=1)


@pytest.mark.parametrize("body", [b"5", b"[]", b'"x"', b"null"])
def test_a_body_that_is_no_object(server: Live, body: bytes) -> None:
    """Catches: an AttributeError on a list."""
    assert server.refusal(PATH, body)[0] == 422


@pytest.mark.parametrize("path", [PATH, CHAT, "/v1/embeddings", "/tokenize", "/detokenize"])
def test_a_body_that_is_too_long_is_refused_unread(server: Live, path: str) -> None:
    """E90. Catches: 100 MB read into memory before anyone looks at their number."""
    with socket.create_connection(("127.0.0.1", server.port), timeout=20) as client:
        client.sendall(f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Length: 100000000\r\n\r\n{{".encode())
        answer = ""
        while "body_too_long" not in answer:
            answer += client.recv(65536).decode()
        assert answer.startswith("HTTP/1.1 413 "), answer
        assert "100000 bytes" in answer
    assert server.text("after", max_tokens=1)


def test_a_body_without_a_length_is_cut_where_it_is_too_long(server: Live) -> None:
    """Catches: chunks that add up for ever."""
    connection = server.connect()
    chunks = (b"x" * 50_000 for _ in range(40))
    connection.request("POST", PATH, chunks, {"Content-Type": "application/json"}, encode_chunked=True)
    answer = connection.getresponse()
    assert (answer.status, json.loads(answer.read())["error"]["code"]) == (413, "body_too_long")
    connection.close()


def test_a_client_that_sends_all_of_it_reads_the_refusal(server: Live) -> None:
    """Catches: a connection reset in place of the 413, because nobody read what was on its way."""
    status, _, body = server.request("POST", PATH, b"x" * 5_000_000)
    assert (status, json.loads(body)["error"]["code"]) == (413, "body_too_long")


def test_what_is_not_there(server: Live) -> None:
    """Catches: another shape of error for paths and methods than for fields."""
    assert server.get("/v1/nothing")[0] == 404
    status, answer = server.get(PATH)
    assert (status, answer["error"]["code"]) == (405, "no_such_route")
    assert server.get("/v1/models/x")[1]["error"]["code"] == "model_not_found"
    assert server.get("/v1/models/mock")[1]["max_model_len"] == 256


def test_neighbours_of_a_refused_request_are_untouched(server: Live) -> None:
    """E6, E51. Catches: ids out of range that write into what others use."""
    before = server.text("neighbour", temperature=0, max_tokens=8)
    for fields in ({"prompt": [-1, 10**6]}, {"prompt": "a", "logit_bias": {"10000000": 5}}):
        assert server.refusal(PATH, fields)[0] == 400
        assert server.text("neighbour", temperature=0, max_tokens=8) == before
