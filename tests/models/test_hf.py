"""Models by id: the real client against a server on this machine that speaks the hub's protocol."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlparse

import pytest
import torch
from huggingface_hub import constants
from huggingface_hub.utils import disable_progress_bars, enable_progress_bars
from safetensors.torch import save

from rapid_llm.models import hf, hub
from rapid_llm.models.errors import DownloadError, UnknownModelError, UnsafeWeightsError
from rapid_llm.models.hf import HubId

COMMITS = {"main": "a" * 40, "old": "b" * 40}
WHOLE = save({"x": torch.ones(2)})
SHARDS = [f"model-0000{i}-of-00002.safetensors" for i in (1, 2)]
JSONS = {"config.json": b"{}", "tokenizer.json": b"{ }", "generation_config.json": b"{  }"}
"""Files differ, for the cache keeps equal ones once."""

NOISE = {"pytorch_model.bin": b"pickle", "onnx/model.onnx": b"o", "consolidated.safetensors": b"c", "README.md": b"r"}


class Hub:
    """What the server holds (repository -> revision -> files), and every file whose bytes it gave."""

    def __init__(self) -> None:
        self.repos: dict[str, dict[str, dict[str, bytes]]] = {}
        self.given: list[str] = []
        self.asked = 0
        self.gated: set[str] = set()

    def add(self, repo: str, files: dict[str, bytes], revision: str = "main") -> None:
        self.repos.setdefault(repo, {})[revision] = files

    def answer(self, path: str) -> tuple[int, dict[str, str], bytes, str]:
        """(status, headers, body, name of the file if it is one)."""
        self.asked += 1
        parts = [unquote(part) for part in path.strip("/").split("/")]
        api = parts[:2] == ["api", "models"]
        parts = parts[2:] if api else parts
        repo, revision = "/".join(parts[:2]), parts[3] if len(parts) > 3 else "main"
        if repo not in self.repos:
            return 404, {"X-Error-Code": "RepoNotFound"}, b"", ""
        if repo in self.gated:
            return 403, {"X-Error-Code": "GatedRepo"}, b"", ""
        branch = next((b for b, commit in COMMITS.items() if revision in (b, commit)), "")
        if branch not in self.repos[repo]:
            return 404, {"X-Error-Code": "RevisionNotFound"}, b"", ""
        files = self.repos[repo][branch]
        if api:
            siblings = [{"rfilename": name} for name in files]
            body = {"id": repo, "modelId": repo, "sha": COMMITS[branch], "siblings": siblings, "tags": []}
            return 200, {"Content-Type": "application/json"}, json.dumps(body).encode(), ""
        name = "/".join(parts[4:])
        if name not in files:
            return 404, {"X-Error-Code": "EntryNotFound"}, b"", ""
        etag = hashlib.sha256(files[name]).hexdigest()
        return 200, {"X-Repo-Commit": COMMITS[branch], "ETag": f'"{etag}"'}, files[name], name


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """A hub on this machine, with an empty cache; nothing else can be reached through the client."""
    made = Hub()

    class Handler(BaseHTTPRequestHandler):
        def do_HEAD(self) -> None:
            self.reply(body=False)

        def do_GET(self) -> None:
            self.reply(body=True)

        def reply(self, body: bool) -> None:
            status, headers, data, name = made.answer(urlparse(self.path).path)
            self.send_response(status)
            for key, value in {**headers, "Content-Length": str(len(data))}.items():
                self.send_header(key, value)
            self.end_headers()
            if body:
                made.given += [name] if name else []
                self.wfile.write(data)

        def log_message(self, *_: object) -> None:
            pass

    web = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=web.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    url = f"http://127.0.0.1:{web.server_port}"
    monkeypatch.setattr(constants, "ENDPOINT", url)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", url + "/{repo_id}/resolve/{revision}/{filename}")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    disable_progress_bars()
    yield made
    enable_progress_bars()
    web.shutdown()
    web.server_close()
    thread.join()


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("Qwen/Qwen3-0.6B", HubId("Qwen/Qwen3-0.6B")),
        ("a/b@v1.0", HubId("a/b", "v1.0")),
        ("a/b-GGUF:Q4_K_M", HubId("a/b-GGUF", "main", "Q4_K_M")),
        ("a/b@refs/pr/1:x.gguf", HubId("a/b", "refs/pr/1", "x.gguf")),
        ("smollm2", None),
        ("./a/b", None),
        ("a/b/c", None),
        ("/a/b", None),
        ("models/m.gguf", None),
        ("../b", None),
    ],
)
def test_ids(text: str, expected: HubId | None) -> None:
    """Catches a path taken for an id, which would be asked about online, and parts of an id mixed up."""
    assert HubId.parse(text) == expected
    assert expected is None or str(expected) == text


def test_only_needed_files_are_fetched(server: Hub) -> None:
    """Catches a whole repository downloaded: other formats cost many gigabytes."""
    server.add("org/one", {**JSONS, **NOISE, "model.safetensors": WHOLE})
    folder = hub.resolve_model("org/one")
    assert {p.name for p in folder.iterdir()} == {*JSONS, "model.safetensors"}
    assert sorted(server.given) == sorted([*JSONS, "model.safetensors"])
    assert (folder / "model.safetensors").read_bytes() == WHOLE


def test_shards_come_by_the_index(server: Hub) -> None:
    """Catches shards chosen by a pattern, so that one is lost or a foreign one comes along."""
    index = json.dumps({"weight_map": {"x": SHARDS[0], "y": SHARDS[1]}}).encode()
    files = {**JSONS, **NOISE, "model.safetensors.index.json": index, **dict.fromkeys(SHARDS, WHOLE)}
    server.add("org/two", {**files, "model-00001-of-00009.safetensors": b"other"})
    folder = hub.resolve_model("org/two")
    assert {p.name for p in folder.iterdir()} == {*JSONS, "model.safetensors.index.json", *SHARDS}


def test_a_whole_model_in_the_cache_is_not_asked_about(server: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a network in the way of a model that is there, and a torn one taken for whole."""
    server.add("org/one", {**JSONS, "model.safetensors": WHOLE})
    folder = hub.resolve_model("org/one")
    asked = server.asked
    assert hub.resolve_model("org/one") == folder
    assert server.asked == asked
    (folder / "model.safetensors").unlink()
    assert hf.find_cached(HubId("org/one")) is None
    assert (hub.resolve_model("org/one") / "model.safetensors").read_bytes() == WHOLE
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert hub.resolve_model("org/one", fetch=False) == folder
    assert hf.cached_models() == [("org/one", folder)]


def test_revisions_are_kept_apart(server: Hub) -> None:
    """Catches a revision ignored, and the cached one of another revision used."""
    for revision in COMMITS:
        server.add("org/one", {**JSONS, "model.safetensors": WHOLE, "config.json": revision.encode()}, revision)
    for revision in ("main", "old", "b" * 40):
        folder = hub.resolve_model(f"org/one@{revision}")
        assert (folder / "config.json").read_text() == ("main" if revision == "main" else "old")
    with pytest.raises(UnknownModelError, match=r"model 'org/one@gone' is neither .* no such model or revision"):
        hub.resolve_model("org/one@gone")


def test_pull_asks_for_what_is_new(server: Hub) -> None:
    """Catches a pull that never looks, so that a fixed chat template cannot be had."""
    server.add("org/one", {**JSONS, "model.safetensors": WHOLE})
    first = hub.resolve_model("org/one")
    server.add("org/one", {**JSONS, "model.safetensors": WHOLE, "chat_template.jinja": b"new"}, "main")
    assert not (first / "chat_template.jinja").exists()
    assert (hub.pull("org/one") / "chat_template.jinja").read_bytes() == b"new"


def test_gguf_by_a_part_of_its_name(server: Hub) -> None:
    """Catches the first of several GGUF files taken, split files taken in part, and Q4 taken for Q4_0."""
    parts = [f"BF16/m-BF16-0000{i}-of-00002.gguf" for i in (1, 2)]
    names = ["m-Q4_0.gguf", "m-Q8_0.gguf", *parts]
    server.add("org/g", {name: name.encode() for name in names})
    assert hub.resolve_model("org/g:q4_0").read_bytes() == b"m-Q4_0.gguf"
    first = hub.resolve_model("org/g:BF16")
    assert [first.name, *sorted(p.name for p in first.parent.iterdir())] == ["m-BF16-00001-of-00002.gguf"] + [
        p.split("/")[1] for p in parts
    ]
    assert sorted(server.given) == sorted(["m-Q4_0.gguf", *parts])
    asked = server.asked
    assert hub.resolve_model("org/g:BF16") == first
    assert server.asked == asked
    server.add("org/h", dict.fromkeys(names, b"gguf"))
    with pytest.raises(UnknownModelError, match=r"'m' fits 3 of them; the GGUF files there: .*m-Q4_0.gguf"):
        hub.resolve_model("org/h:m")
    with pytest.raises(UnknownModelError, match="'Q4' fits none"):
        hub.resolve_model("org/h:Q4")
    with pytest.raises(UnknownModelError, match="'Q5' fits none"):
        hub.resolve_model("org/g:Q5")
    with pytest.raises(UnknownModelError, match=r"holds GGUF files; say which .*org/g:m-BF16-00001"):
        hub.resolve_model("org/g")


def test_pickles_need_to_be_asked_for(server: Hub) -> None:
    """Catches pickles fetched, many gigabytes, to be refused; and `pt` that fetches something else."""
    server.add("org/p", {**JSONS, "pytorch_model.bin": b"pickle"})
    with pytest.raises(UnsafeWeightsError, match="load_format='pt'"):
        hub.resolve_model("org/p")
    assert server.given == []
    assert (hub.resolve_model("org/p", load_format="pt") / "pytorch_model.bin").read_bytes() == b"pickle"
    server.add("org/both", {**JSONS, **NOISE, "model.safetensors": WHOLE})
    assert not (hub.resolve_model("org/both", load_format="pt") / "pytorch_model.bin").exists()


def test_what_is_no_model(server: Hub) -> None:
    """Catches a data set or an adapter fetched and found useless afterwards."""
    server.add("org/none", {"README.md": b"r"})
    with pytest.raises(UnknownModelError, match=r"has neither model.safetensors nor"):
        hub.resolve_model("org/none")
    server.add("org/bare", {"model.safetensors": WHOLE, "config.json": b"{}"})
    with pytest.raises(UnknownModelError, match=r"org/bare has no tokenizer.json on the hub"):
        hub.resolve_model("org/bare")
    with pytest.raises(
        UnknownModelError, match=r"model 'org/typo' is neither a file nor a folder here, and the Hugging"
    ):
        hub.resolve_model("org/typo")
    server.add("org/gated", {})
    server.gated.add("org/gated")
    with pytest.raises(DownloadError, match=r"accepted its terms: do so at .*org/gated and log in"):
        hub.resolve_model("org/gated")


def test_without_a_network(server: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches the client's own traceback; the message says how to bring the model here by hand."""
    with pytest.raises(DownloadError, match=r"^org/one is not on this machine; fetch it with: rapid-llm models pull"):
        hub.resolve_model("org/one", fetch=False)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(DownloadError, match=r"not whole in .*OfflineModeIsEnabled.*hf download org/one --local-dir"):
        hub.resolve_model("org/one")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:1")
    with pytest.raises(DownloadError, match=r"the hub cannot be asked \(\w+: .*hf download"):
        hub.resolve_model("org/one")


def test_a_path_wins_over_an_id(server: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a folder here passed over for a download of the same name."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "org" / "one").mkdir(parents=True)
    assert hub.resolve_model("org/one") == Path("org/one")
    assert server.asked == 0
