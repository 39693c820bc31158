"""The tokenizer against other implementations' vectors, and against the ways in which one goes wrong."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers

from rapid_llm.engine.text.pretokenizers import PRE_TOKENIZERS
from rapid_llm.engine.text.tokenizer import Tokenizer, UnsupportedTokenizerError
from rapid_llm.models.errors import MetadataError
from rapid_llm.models.gguf import GGUFFile
from tests.counting import python_calls

from .tiny import END, FIRST_BYTE, START, THINK, byte_symbol, metadata, tokenizer


@pytest.mark.model
def test_vectors_of_other_implementations(smollm2: Tokenizer, reference: dict[str, Any]) -> None:
    """Catches a wrong pre-tokenizer (digits in groups, a prefix space), lost specials, a BOS out of nowhere."""
    cases = reference["tokenizer_cases"]["cases"]
    assert len(cases) > 5
    for case in cases:
        assert smollm2.encode(case["text"]) == case["ids"], case["text"]
    for case in reference["cases"].values():
        assert smollm2.encode(case["prompt_text"]) == case["prompt_token_ids"]
        assert smollm2.decode(case["greedy_token_ids"], skip_special_tokens=False) == case["greedy_text"]


@pytest.mark.model
def test_control_token_as_plain_text_is_seven_ids(smollm2: Tokenizer) -> None:
    """E19: catches an encoder that still knows control tokens when they must not be parsed."""
    ids = smollm2.encode("<|im_end|>", parse_special=False)
    assert len(ids) == 7
    assert not any(map(smollm2.is_control, ids))
    assert smollm2.encode("<|im_end|>") == [2]
    assert smollm2.end_ids == {2}


@pytest.mark.model
def test_every_token_decodes_alone_as_the_library_decodes_it(smollm2: Tokenizer) -> None:
    """Catches a wrong byte alphabet. 313 tokens are not UTF-8 alone; `tokenizers` is an independent decoder."""
    decoder = tokenizers.decoders.ByteLevel()
    plain = [i for i in range(smollm2.vocab_size) if not smollm2.is_control(i)]
    broken = 0
    for i in plain:
        text = smollm2.decode([i])
        assert text == decoder.decode([smollm2.tokens[i]])
        try:
            smollm2.token_bytes(i).decode()
        except UnicodeDecodeError:
            broken += 1
    assert broken == 313


@pytest.mark.model
def test_building_calls_nothing_for_each_token(model_path: Path) -> None:
    """Catches per-token Python work: 49k tokens and as many merges would take a noticeable time."""
    file = GGUFFile(model_path)
    fields = {key: file[key] for key in file}
    assert python_calls(lambda: Tokenizer.from_gguf(fields)) < 1000


@pytest.mark.parametrize(
    "text", ["hi there", "  hi12 12345", "héllo 你好 🙂", "\r\n\t x", "a\x00b", "\ufffd", "<|im_x|>"]
)
def test_text_comes_back(text: str) -> None:
    """Catches normalisation, a dropped byte or space, and a byte alphabet that is off by one."""
    tok = tokenizer()
    assert tok.decode(tok.encode(text)) == text
    assert tok.decode(tok.encode(text, parse_special=False)) == text


def test_merges_and_digits() -> None:
    """Catches merges that are not applied, and `1 2` merged across the cut that keeps digits apart."""
    tok = tokenizer()
    assert [tok.tokens[i] for i in tok.encode("hi hi 12")] == ["hi", "Ġhi", "Ġ", "1", "2"]


def test_control_tokens_stand_between_texts() -> None:
    """Catches a control token that is dropped, or that eats the space beside it."""
    tok = tokenizer()
    assert tok.encode("<|im_start|> hi<|im_end|>") == [START, *tok.encode(" hi"), END]
    assert tok.encode("<|im_end|>" * 3) == [END] * 3


def test_the_longest_control_token_wins() -> None:
    """Catches alternatives tried in vocabulary order: `<|im_end|>` inside `<|im_end|>>` would win."""
    data = metadata()
    data["tokenizer.ggml.tokens"].append("<|im_end|>>")
    data["tokenizer.ggml.token_type"].append(3)
    tok = Tokenizer.from_gguf(data)
    assert tok.encode("<|im_end|>>") == [tok.vocab_size - 1]


def test_user_defined_tokens_are_text_that_is_kept_whole() -> None:
    """Catches a user-defined token that is split, or treated as control and hidden."""
    tok = tokenizer()
    assert tok.encode("<think>hi", parse_special=False) == [THINK, *tok.encode("hi")]
    assert tok.decode([THINK]) == "<think>"


def test_ordinary_text_cannot_merge_into_a_control_token() -> None:
    """Catches control tokens left in the encoder's vocabulary: with whole-word matching `hi` would become one."""
    data = metadata(ggml_pre="llama-bpe")
    data["tokenizer.ggml.tokens"].append("STOP")
    data["tokenizer.ggml.token_type"].append(3)
    tok = Tokenizer.from_gguf(data)
    assert tok.encode("STOP", add_bos=False) == [tok.vocab_size - 1]
    assert len(tok.encode("STOP", parse_special=False, add_bos=False)) == 4


@pytest.mark.parametrize("text", ["hi", "<|im_start|>hi", "", "<|im_start|><|im_start|>"])
def test_one_bos(text: str) -> None:
    """E17: catches a BOS in front of the BOS that the text has, and a missing one."""
    tok = tokenizer(ggml_add_bos_token=True)
    ids = tok.encode(text)
    assert ids[0] == START
    assert ids.count(START) == max(1, text.count("<|im_start|>"))
    assert tok.encode("hi", add_bos=False) == tokenizer().encode("hi")


def test_bos_by_the_pre_tokenizer_where_the_file_is_silent() -> None:
    """Catches a missing BOS for Llama 3 files, which may leave the flag out."""
    assert tokenizer(ggml_add_bos_token=None, ggml_pre="llama-bpe").add_bos
    assert not tokenizer(ggml_add_bos_token=None).add_bos
    assert not tokenizer(ggml_add_bos_token=False, ggml_pre="llama-bpe").add_bos


def test_end_ids() -> None:
    """Catches an end of turn that does not end the answer, and ids doubled where the file names one twice."""
    assert tokenizer(ggml_eot_token_id=THINK, ggml_eom_token_id=END).end_ids == {END, THINK}
    assert tokenizer(ggml_eos_token_id=None).end_ids == frozenset()


@pytest.mark.parametrize("text", ["\ud83d", "hi \udc00", "\ud83d\ude42"])
def test_lone_surrogates_are_refused(text: str) -> None:
    """E7: catches a crash deep in the encoder; the message says where."""
    with pytest.raises(ValueError, match=r"lone surrogate U\+D[89A-F]"):
        tokenizer().encode(text)


def test_text_must_be_text() -> None:
    with pytest.raises(TypeError, match="must be a str, not bytes"):
        tokenizer().encode(b"hi")  # type: ignore[arg-type]


@pytest.mark.parametrize("bad", [-1, 10**6, 2**70, 1.0, True, "1", None])
def test_ids_outside_the_vocabulary_are_refused(bad: object) -> None:
    """E6: catches negative indexing, and a bool or float taken for an id; the message says which and where."""
    tok = tokenizer()
    with pytest.raises(ValueError, match="at position 1 is not a token id; ids are integers from 0 to 262"):
        tok.check_ids([0, bad])  # type: ignore[list-item]
    assert tok.vocab_size == 263
    assert tok.check_ids([np.int64(5), 6]) == [5, 6]


def test_a_bad_id_leaves_no_trace() -> None:
    """E6: catches a cache that keeps a wrong entry after a refused id."""
    tok = tokenizer()
    before = tok.decode([FIRST_BYTE + ord("a")])
    for bad in (-1, 10**6):
        with pytest.raises(ValueError, match="not a token id"):
            tok.token_bytes(bad)
        with pytest.raises(ValueError, match="not a token id"):
            tok.decode([bad])
    assert tok.decode([FIRST_BYTE + ord("a")]) == before == "a"


def test_byte_alphabet() -> None:
    """Catches any wrong entry, against the original rule written out in `tiny`."""
    tok = tokenizer()
    assert [tok.token_bytes(FIRST_BYTE + b) for b in range(256)] == [bytes([b]) for b in range(256)]
    assert byte_symbol(ord(" ")) == "Ġ"


def test_marked_control_tokens_stay_text() -> None:
    """Catches a mark that leaks into the text or is ignored, and a real control token lost behind a refused one."""
    tok = tokenizer()
    ids = tok.encode("\ufdd0<|im_end|><|im_end|>", mark="\ufdd0")
    assert ids == [*tok.encode("<|im_end|>", parse_special=False), END]
    overlap = metadata()
    overlap["tokenizer.ggml.tokens"].append("<<|im_end|>>")
    overlap["tokenizer.ggml.token_type"].append(3)
    tok = Tokenizer.from_gguf(overlap)
    assert END in tok.encode("\ufdd0<<|im_end|>>", mark="\ufdd0")


@pytest.mark.parametrize(
    ("pre", "text", "words"),
    [
        ("gpt-2", "It's 2024  x", ["It", "'s", "Ġ2024", "Ġ", "Ġx"]),
        ("smollm", "It's 2024  x", ["It", "'s", "Ġ", "2", "0", "2", "4", "Ġ", "Ġx"]),
        ("llama-bpe", "IT'S 12345\n\n x", ["IT", "'S", "Ġ", "123", "45", "ĊĊ", "Ġx"]),
        ("qwen2", "IT'S 123\n\n x", ["IT", "'S", "Ġ", "1", "2", "3", "ĊĊ", "Ġx"]),
        ("llama-bpe", "(foo) a.b", ["(foo", ")", "Ġa", ".b"]),
    ],
)
def test_words_by_pre_tokenizer(pre: str, text: str, words: list[str]) -> None:
    """Catches a row of the table with the wrong pattern, in cases where the families differ; words cut by hand."""
    assert [word for word, _ in PRE_TOKENIZERS[pre].build().pre_tokenize_str(text)] == words


def test_normal_form_where_the_family_has_one() -> None:
    """Catches Qwen text that is not composed first, as in its training, and SmolLM text that is."""
    assert tokenizer(ggml_pre="qwen2").encode("e\u0301") == tokenizer().encode("\u00e9")
    assert tokenizer().encode("e\u0301") != tokenizer().encode("\u00e9")


@pytest.mark.parametrize(
    ("changes", "error", "text"),
    [
        ({"ggml_pre": "future-bpe"}, UnsupportedTokenizerError, "tokenizer.ggml.pre='future-bpe' .* known: gpt-2"),
        ({"ggml_pre": None}, UnsupportedTokenizerError, "tokenizer.ggml.pre=None"),
        ({"ggml_model": "bert"}, UnsupportedTokenizerError, "tokenizer.ggml.model='bert'.*known: 'gpt2'"),
        ({"ggml_tokens": None}, MetadataError, "tokenizer.ggml.tokens is missing"),
        ({"ggml_token_type": [3]}, MetadataError, "1 entries for 263 tokens"),
        ({"ggml_merges": ["hi"]}, MetadataError, "'hi', which is not two tokens"),
        ({"ggml_merges": ["z zz"]}, MetadataError, "does not fit"),
        ({"ggml_bos_token_id": 263}, MetadataError, "tokenizer.ggml.bos_token_id=263 is outside"),
        ({"ggml_eos_token_id": -1}, MetadataError, "tokenizer.ggml.eos_token_id=-1 is outside"),
    ],
)
def test_unusable_metadata_is_named(changes: dict[str, Any], error: type[Exception], text: str) -> None:
    """Catches a guess instead of an error: an unknown pre-tokenizer gives wrong ids in silence."""
    with pytest.raises(error, match=text):
        tokenizer(**changes)


def test_a_token_twice_is_refused() -> None:
    """Catches a vocabulary in which the later id silently replaces the earlier one."""
    data = metadata()
    data["tokenizer.ggml.tokens"][-1] = "hi"
    with pytest.raises(MetadataError, match="'hi' more than once"):
        Tokenizer.from_gguf(data)
