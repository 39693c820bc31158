"""Tokenizers from folders and from GGUF against the `tokenizers` package running the published pipeline as a whole."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from tokenizers import models

from rapid_llm.engine.text.chat import ChatTemplate
from rapid_llm.engine.text.detok import Detokenizer
from rapid_llm.engine.text.tokenizer import Tokenizer, UnsupportedTokenizerError
from rapid_llm.models.errors import MetadataError

from . import trained

KINDS = ("llama-bpe", "qwen2", "smollm", "always", "first", "never")
BYTE_LEVEL = KINDS[:3]
INSIDE = "<s>a b<|im_start|>user\n the dog<|im_end|> x<think> the</s>"


@pytest.fixture(scope="module", params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def oracle(kind: str) -> tokenizers.Tokenizer:
    return trained.byte_level(kind) if kind in BYTE_LEVEL else trained.sentencepiece(kind)


@pytest.fixture(scope="module")
def ours(kind: str, oracle: tokenizers.Tokenizer, tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer.from_folder(trained.folder(tmp_path_factory.mktemp(kind) / "m", oracle))


@pytest.fixture(scope="module")
def from_gguf(kind: str, oracle: tokenizers.Tokenizer) -> Tokenizer:
    pre = kind if kind in BYTE_LEVEL else "default"
    metadata = trained.gguf_metadata(oracle, **{"tokenizer.ggml.pre": pre})
    if kind == "never":
        metadata["tokenizer.ggml.add_space_prefix"] = False
    return Tokenizer.from_gguf(metadata)


def random_texts(count: int) -> list[str]:
    rng = random.Random(0)
    letters = sorted(set(trained.CORPUS + "\u0301\u2581 \n<s>"))
    return ["".join(rng.choices(letters, k=rng.randrange(1, 40))) for _ in range(count)]


def test_a_folder_encodes_as_published(kind: str, oracle: tokenizers.Tokenizer, ours: Tokenizer) -> None:
    """Catches a lost normaliser, pre-tokenizer, byte fallback or flag, a misplaced prefix space, a lost BOS."""
    assert ours.add_bos == (kind not in ("qwen2", "smollm"))
    for text in (*trained.TEXTS, INSIDE, *random_texts(200)):
        want = oracle.encode(text).ids
        if want[:2] == [ours.bos_id] * 2:  # the library adds BOS to one that is there; E17
            want = want[1:]
        assert ours.encode(text) == want, text


def test_gguf_encodes_as_published(kind: str, oracle: tokenizers.Tokenizer, from_gguf: Tokenizer) -> None:
    """Catches scores read as something else than ranks, byte tokens that merge, and a wrong recipe for a name.

    `first` is left to the folder: a GGUF file cannot say it, and llama.cpp puts the space behind every control token.
    """
    if kind == "first":
        pytest.skip("GGUF cannot say it")
    for text in (*trained.TEXTS, INSIDE, *random_texts(200)):
        want = oracle.encode(text, add_special_tokens=False).ids
        assert from_gguf.encode(text, add_bos=False) == want, text


def test_text_comes_back(kind: str, oracle: tokenizers.Tokenizer, ours: Tokenizer, from_gguf: Tokenizer) -> None:
    """Catches a wrong byte or space of any token: the library's decoder, and the text itself, are the judges."""
    for text in trained.TEXTS:
        for tokenizer in (ours, from_gguf):
            ids = tokenizer.encode(text, add_bos=False)
            got = tokenizer.decode(ids)
            want = oracle.decode(ids)
            assert got.removeprefix(" " if got != want else "") == want
            if kind in BYTE_LEVEL and kind != "qwen2":
                assert got == text


def test_one_by_one_equals_at_once(ours: Tokenizer) -> None:
    """E9 for every kind: catches bytes or spaces that depend on the neighbouring tokens."""
    rng = random.Random(1)
    plain = [i for i in range(ours.vocab_size) if not ours.is_control(i)]
    for _ in range(100):
        ids = rng.choices(plain, k=rng.randrange(1, 12))
        detokenizer = Detokenizer(ours)
        text = "".join(map(detokenizer.push, ids)) + detokenizer.finish()
        assert text == ours.decode(ids)


def test_no_control_token_from_ordinary_text(ours: Tokenizer, from_gguf: Tokenizer) -> None:
    """E19: catches control tokens left in an encoder's vocabulary, merges or added tokens."""
    for tokenizer in (ours, from_gguf):
        for text in trained.SPECIALS:
            ids = tokenizer.encode(text, parse_special=False, add_bos=False)
            assert len(ids) > 1
            assert not any(map(tokenizer.is_control, ids))
            assert tokenizer.decode(ids).removeprefix(" ") == text
            (own,) = tokenizer.encode(text, add_bos=False)
            assert tokenizer.tokens[own] == text


def test_chat_content_never_becomes_control(ours: Tokenizer, from_gguf: Tokenizer) -> None:
    """E19 and E18 through the template: the content's own control texts stay text, and both ways give equal ids."""
    for tokenizer in (ours, from_gguf):
        content = "a<|im_end|>b</s><|im_"
        prompt = ChatTemplate(tokenizer).render([{"role": "user", "content": content}])
        names = [tokenizer.tokens[i] for i in prompt.token_ids if tokenizer.is_control(i)]
        bos = ["<s>"] if tokenizer.add_bos else []
        assert names == [*bos, "<|im_start|>", "<|im_end|>", "<|im_start|>"]


def test_one_bos_where_the_template_writes_it(ours: Tokenizer, from_gguf: Tokenizer) -> None:
    """E17: catches a second BOS where both the template and the file put one."""
    source = "{{ bos_token }}{% for m in messages %}{{ m['content'] }}{% endfor %}{{ eos_token }}"
    for tokenizer in (ours, from_gguf):
        tokenizer.add_bos = True
        prompt = ChatTemplate(tokenizer, source).render([{"role": "user", "content": "hi"}])
        assert prompt.token_ids[0] == tokenizer.bos_id
        assert prompt.token_ids.count(tokenizer.bos_id or 0) == 1
        assert prompt.token_ids[-1] == tokenizer.eos_id


@pytest.fixture
def smollm(tmp_path: Path) -> tokenizers.Tokenizer:
    return trained.byte_level("smollm")


@pytest.mark.parametrize(("stated", "expected"), [(True, True), (False, False), (None, True)])
def test_bos_as_the_configuration_says(tmp_path: Path, stated: bool | None, expected: bool) -> None:
    """Catches `add_bos_token` ignored, a post-processor ignored, or the two in the wrong order."""
    made = Tokenizer.from_folder(trained.folder(tmp_path, trained.byte_level("llama-bpe"), add_bos_token=stated))
    assert made.add_bos == expected


def test_every_end_id(tmp_path: Path, smollm: tokenizers.Tokenizer) -> None:
    """Catches an answer that runs past the end of turn, which the generation's configuration alone may name."""
    end, turn = smollm.token_to_id("</s>"), smollm.token_to_id("<|im_end|>")
    for i, files in enumerate(
        ({"generation_config.json": {"eos_token_id": [turn, end]}}, {"config.json": {"eos_token_id": turn}})
    ):
        assert Tokenizer.from_folder(trained.folder(tmp_path / str(i), smollm, files)).end_ids == {end, turn}
    bad = trained.folder(tmp_path / "bad", smollm, {"generation_config.json": {"eos_token_id": 10**6}})
    with pytest.raises(
        MetadataError, match=r"generation_config.json: eos_token_id=1000000 is no id of the 40\d tokens"
    ):
        Tokenizer.from_folder(bad)


def test_where_the_template_is(tmp_path: Path, smollm: tokenizers.Tokenizer) -> None:
    """Catches the older place winning over `chat_template.jinja`, and a list of templates taken for text."""
    several = [{"name": "tool_use", "template": "T"}, {"name": "default", "template": "D"}]
    path = trained.folder(tmp_path, smollm, chat_template=several)
    assert Tokenizer.from_folder(path).chat_template == "D"
    (path / "chat_template.jinja").write_text("J")
    assert Tokenizer.from_folder(path).chat_template == "J"
    (path / "chat_template.jinja").unlink()
    assert Tokenizer.from_folder(trained.folder(path, smollm, chat_template=None)).chat_template is None
    with pytest.raises(MetadataError, match="chat_template is 3, not text"):
        Tokenizer.from_folder(trained.folder(path, smollm, chat_template=3))


def test_special_tokens_named_by_the_configuration_alone(tmp_path: Path, smollm: tokenizers.Tokenizer) -> None:
    """Catches a token that only `tokenizer_config.json` makes special, or adds, read as text."""
    new = {str(smollm.get_vocab_size()): {"content": "<new>", "special": True, "lstrip": False, "rstrip": False}}
    path = trained.folder(tmp_path, smollm, additional_special_tokens=["<think>"], added_tokens_decoder=new)
    made = Tokenizer.from_folder(path)
    assert made.encode("<new>") == [made.vocab_size - 1]
    assert {made.tokens[i] for i in made.control} == {*trained.SPECIALS, "<think>", "<new>"}


def test_tokens_that_swallow_white_space(tmp_path: Path) -> None:
    """Catches Phi-3's `rstrip` (and `lstrip`) ignored: the newline behind `<|user|>` was never seen in training."""
    oracle = trained.byte_level("smollm")
    oracle.add_special_tokens([trained.special("<R>", rstrip=True), trained.special("<L>", lstrip=True)])
    made = Tokenizer.from_folder(trained.folder(tmp_path, oracle))
    for text in ("a <R> \n b", "a \n <L> b", "<L><R>  <L> <R>", "<R>\n", "a<R>b"):
        assert made.encode(text) == oracle.encode(text).ids, text


def test_phi3_in_gguf_swallows_white_space() -> None:
    """Catches Phi-3's files, which cannot say `rstrip`, read as others'."""
    metadata = trained.gguf_metadata(trained.sentencepiece("never"), **{"tokenizer.ggml.add_space_prefix": False})
    plain, phi3 = (Tokenizer.from_gguf({**metadata, "general.architecture": a}) for a in ("llama", "phi3"))
    assert phi3.encode("<|im_start|>\nhi") == plain.encode("<|im_start|>hi") != plain.encode("<|im_start|>\nhi")
    assert phi3.encode("<s> hi") == plain.encode("<s> hi")


@pytest.mark.parametrize(
    ("change", "error", "match"),
    [
        (
            {"model": {"type": "Unigram", "vocab": []}},
            UnsupportedTokenizerError,
            "type 'Unigram' is not supported; known",
        ),
        ({"decoder": {"type": "Fuse"}}, UnsupportedTokenizerError, r"decoder \['Fuse'\] is not supported"),
        ({"normalizer": {"type": "Future"}}, MetadataError, "cannot be read as a tokenizer"),
        ({"added_tokens": [{"id": 3}]}, MetadataError, "added tokens cannot be read: KeyError: 'content'"),
        ({"added_tokens": [{"id": 10**8, "content": "x"}]}, MetadataError, "the id 100000000 is out of all proportion"),
        (
            {"added_tokens": [{"id": 3, "content": "x", "single_word": True}]},
            UnsupportedTokenizerError,
            "'x' has single_word",
        ),
    ],
)
def test_unusable_files_are_named(
    tmp_path: Path, smollm: tokenizers.Tokenizer, change: dict[str, Any], error: type[Exception], match: str
) -> None:
    """Catches a guess, or a bare error of the library, where the file says what is not read."""
    path = trained.folder(tmp_path, smollm) / "tokenizer.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    with pytest.raises(error, match=rf"tokenizer.json.*{match}"):
        Tokenizer.from_folder(tmp_path)


def test_a_folder_without_a_tokenizer(tmp_path: Path, smollm: tokenizers.Tokenizer) -> None:
    """Catches a bare FileNotFoundError, and an end token that no vocabulary holds passed over."""
    with pytest.raises(UnsupportedTokenizerError, match=r"holds no tokenizer.json; transformers makes one"):
        Tokenizer.from_folder(tmp_path)
    with pytest.raises(MetadataError, match=r"tokenizer_config.json names '<eos>', which is no token"):
        Tokenizer.from_folder(trained.folder(tmp_path, smollm, eos_token="<eos>"))


def test_holes_in_the_ids_are_no_tokens(tmp_path: Path) -> None:
    """Catches ids shifted by a hole, and a hole that decodes to something or can be written."""
    made = tokenizers.Tokenizer(models.BPE({"a": 0, "b": 3}, []))
    made.decoder = tokenizers.decoders.ByteLevel()
    tokenizer = Tokenizer.from_folder(trained.folder(tmp_path, made, bos_token=None, eos_token=None))
    assert tokenizer.tokens == ["a", "", "", "b"]
    assert tokenizer.encode("ab") == [0, 3]
    assert tokenizer.decode([1, 0, 2]) == "a"
    assert tokenizer.end_ids == frozenset()


@pytest.mark.parametrize(
    ("changes", "error", "match"),
    [
        ({"tokenizer.ggml.scores": None}, MetadataError, "tokenizer.ggml.scores is missing"),
        ({"tokenizer.ggml.scores": [0.0]}, MetadataError, "1 entries for"),
        (
            {"tokenizer.ggml.remove_extra_whitespaces": True},
            UnsupportedTokenizerError,
            "remove_extra_whitespaces=True is not supported",
        ),
    ],
)
def test_unusable_sentencepiece_metadata(changes: dict[str, Any], error: type[Exception], match: str) -> None:
    """Catches a vocabulary without ranks merged in any order, and text changed in silence."""
    with pytest.raises(error, match=match):
        Tokenizer.from_gguf(trained.gguf_metadata(trained.sentencepiece("always"), **changes))
