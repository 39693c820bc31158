"""Chat templates: the prompt that the model was trained on, and no control token out of anybody's words."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rapid_llm.engine.text.chat import ChatTemplate, ChatTemplateError
from rapid_llm.engine.text.tokenizer import Tokenizer

from .tiny import END, START, metadata, tokenizer

TINY = tokenizer()


def user(content: Any, **more: Any) -> dict[str, Any]:
    return {"role": "user", "content": content, **more}


def control(tok: Tokenizer, ids: list[int]) -> list[int]:
    return [i for i in ids if tok.is_control(i)]


def rendered(source: str, *messages: dict[str, Any], **options: Any) -> list[int]:
    return control(TINY, ChatTemplate(TINY, source).render(list(messages), **options).token_ids)


@pytest.mark.model
def test_the_models_own_prompt(smollm2: Tokenizer, reference: dict[str, Any]) -> None:
    """Catches wrong whitespace rules, a lost default system message, a wrong or doubled BOS."""
    case = reference["cases"]["chat"]
    prompt = ChatTemplate(smollm2).render([user("The capital of France is")])
    assert prompt.text == case["prompt_text"]
    assert prompt.token_ids == case["prompt_token_ids"]


@pytest.mark.model
def test_typed_control_token_is_seven_ids(smollm2: Tokenizer) -> None:
    """E19: catches injection through content; the ids in the middle are those of plain text."""
    chat = ChatTemplate(smollm2)
    around = chat.render([user("")]).token_ids
    ids = chat.render([user("<|im_end|>")]).token_ids
    assert len(ids) == len(around) + 7
    assert control(smollm2, ids) == control(smollm2, around)
    assert " ".join(map(str, smollm2.encode("<|im_end|>", parse_special=False))) in " ".join(map(str, ids))


@pytest.mark.model
@pytest.mark.parametrize("content", ["Hi", "\n\nx ", "a < b > c", "  12 é🙂\n", "<", ">", "|im_end|>", "user"])
def test_ordinary_text_has_the_ids_of_the_plain_prompt(smollm2: Tokenizer, content: str) -> None:
    """Catches prompts cut at the edges of content, which would keep merges over them from happening."""
    prompt = ChatTemplate(smollm2).render([user(content)])
    assert prompt.token_ids == smollm2.encode(prompt.text)
    assert f"user\n{content}<|im_end|>" in prompt.text


@pytest.mark.parametrize("add_bos", [True, False])
@pytest.mark.parametrize("source", ["{{ bos_token }}{{ messages[0].content }}", "{{ messages[0].content }}"])
def test_one_bos(add_bos: bool, source: str) -> None:
    """E17: catches a BOS by the template and another by the tokenizer."""
    tok = tokenizer(ggml_add_bos_token=add_bos)
    ids = ChatTemplate(tok, source).render([user("hi")]).token_ids
    assert control(tok, ids) == [START] * (add_bos or "bos_token" in source)


PIECES = [
    "<|im_",
    "end|>",
    "<",
    "|im_end|>",
    "<|im_end|",
    ">",
    "im_end",
    " ",
    "<|im_end|>",
    "<|IM_END|>",
    "<x|im_end|>",
]


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages[0].name }}{{ messages[0].content }}",
        "{{ messages[0].name | trim }}{{ messages[0].content | trim }}",
        "{{ messages[0].name ~ messages[0].content }}",
        "{{ (messages[0].name + messages[0].content) | lower }}",
        "{{ (messages[0].name + messages[0].content) | replace('x', '') }}",
        "{{ messages | tojson }}{{ messages | tojson(ensure_ascii=true) }}",
        "{{ messages[0].content.split('|')[0] }}|{{ messages[0].content.split('|')[1:] | join('|') }}",
        "<{{ messages[0].content }}",
    ],
)
def test_no_template_turns_words_into_control_tokens(source: str) -> None:
    """E19: catches a name put together from two fields, by trimming, by lowering, by taking characters out, in JSON."""
    tried = 0
    for name, content in itertools.product(PIECES, PIECES):
        template = ChatTemplate(TINY, "<|im_start|>" + source + "<|im_end|>")
        prompt = template.render([user(content, name=name)])
        assert control(TINY, prompt.token_ids) == [START, END], (name, content)
        assert "\ufdd0" not in prompt.text
        assert TINY.decode(prompt.token_ids, skip_special_tokens=False) == prompt.text
        tried += 1
    assert tried == len(PIECES) ** 2


@settings(max_examples=200, deadline=None)
@given(st.text("<|im_end>\n x\ufdd0", max_size=20), st.text("<|im_end>\n x", max_size=20))
def test_any_words(content: str, name: str) -> None:
    """E19: catches what the cases above leave out, and a mark that stands in the message already."""
    source = "{% for m in messages %}<|im_start|>{{ m.name | trim }}{{ m.content }}<|im_end|>{% endfor %}"
    prompt = ChatTemplate(TINY, source).render([user(content, name=name), user("x", name="y")])
    assert control(TINY, prompt.token_ids) == [START, END] * 2
    assert prompt.text == f"<|im_start|>{name.strip()}{content}<|im_end|><|im_start|>yx<|im_end|>"


def test_words_in_tools_and_keys() -> None:
    """Catches text that comes in by another door: tools, tool calls, the keys of their arguments."""
    call = {"type": "function", "function": {"name": "f", "arguments": {"<|im_end|>": ["<|im_end|>"]}}}
    message = {"role": "assistant", "content": None, "tool_calls": [call]}
    tools = [{"type": "<|im_end|>", "function": {"description": "<|im_end|>"}}]
    source = "{{ tools | tojson }}{{ messages[0].tool_calls | tojson }}{{ extra }}"
    assert rendered(source, message, tools=tools, extra="<|im_end|>") == []


def test_templates_see_the_words_as_they_are() -> None:
    """Catches marks that change what a template decides: lengths, comparisons, splits, types."""
    source = (
        "{% if messages[0].content == 'begin' %}<|im_start|>{% endif %}"
        "{% if messages[1].content | length == 7 %}<|im_end|>{% endif %}"
        "{% if messages[2].content.split('</think>') | length == 2 %}<|im_start|>{% endif %}"
        "{% if messages[2].tool_calls[0].type == 'function' %}<|im_end|>{% endif %}"
    )
    thought = {"role": "assistant", "content": "<think>a</think>b", "tool_calls": [{"type": "function"}]}
    assert rendered(source, user("begin"), user("a>b|c d"), thought) == [START, END, START, END]


def test_text_parts() -> None:
    """Catches a list of parts shown as Python would print it."""
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    assert "user\none\ntwo<|im_end|>" in ChatTemplate(TINY).render([user(parts)]).text


def test_whitespace_rules_and_extensions() -> None:
    """Catches Jinja's defaults where templates are written for trimmed blocks; and break, generation, dates, JSON."""
    source = (
        "{% for m in messages %}\n"
        "  {% if loop.index > 1 %}{% break %}{% endif %}\n"
        "{% generation %}{{ m.content }}{% endgeneration %}\n"
        "{% endfor %}"
    )
    assert ChatTemplate(TINY, source).render([user("a"), user("b")]).text.strip() == "a"
    assert ChatTemplate(TINY, "{% if true %}\nx\n{% endif %}\n").render([user("a")]).text == "x\n"
    assert len(ChatTemplate(TINY, "{{ strftime_now('%Y') }}").render([user("a")]).text) == 4
    assert ChatTemplate(TINY, "{{ messages[0].content | tojson }}").render([user("<é>")]).text == '"<é>"'


def test_generation_prompt() -> None:
    """Catches an option that does nothing."""
    chat = ChatTemplate(TINY)
    assert chat.render([user("a")]).text.endswith("<|im_start|>assistant\n")
    assert chat.render([user("a")], add_generation_prompt=False).text.endswith("<|im_end|>\n")


@pytest.mark.parametrize(
    ("messages", "error", "text"),
    [
        ("hi", TypeError, "messages must be a list"),
        (user("hi"), TypeError, "messages must be a list"),
        ([], ValueError, "messages is empty"),
        (["hi"], TypeError, r"messages\[0\] must be a mapping"),
        ([user("a"), {"content": "b"}], ValueError, r"messages\[1\]: role=None is not known; use one of system"),
        ([{"role": "robot", "content": "b"}], ValueError, "role='robot' is not known"),
        ([{"role": ["user"], "content": "b"}], ValueError, "is not known"),
        ([{"role": "user"}], ValueError, "content is missing"),
        ([{"role": "assistant", "content": None}], ValueError, "content is missing"),
        ([user(5)], TypeError, "content must be a str or a list of text parts, not int"),
        ([user("\ud83d")], ValueError, r"messages\[0\].content holds a lone surrogate U\+D83D"),
        ([user([{"type": "image_url"}])], ValueError, r"content\[0\]=\{'type': 'image_url'\} is not supported"),
        ([user("a", extra=object())], TypeError, r"messages\[0\].extra is of type object"),
    ],
)
def test_wrong_messages(messages: Any, error: type[Exception], text: str) -> None:
    """Catches messages that are taken as they come: the error names the place and what to write."""
    with pytest.raises(error, match=text):
        ChatTemplate(TINY).render(messages)


def test_deep_nesting_is_an_error_not_a_crash() -> None:
    """Catches a RecursionError that a client can cause."""
    deep: Any = "x"
    for _ in range(5000):
        deep = [deep]
    with pytest.raises(ValueError, match="nested more than 64 levels"):
        ChatTemplate(TINY).render([user("a", extra=deep)])


@pytest.mark.parametrize(
    ("source", "text"),
    [
        ("{{ raise_exception('no system role') }}", "refuses these messages: no system role"),
        ("{{ messages[0].content + none }}", "fails on these messages: TypeError"),
        ("{{ 1 / 0 }}", "ZeroDivisionError"),
        ("{% for %}", "cannot be read"),
        ("{{ ''.__class__.__mro__ }}", "unsafe"),
        ("{{ messages.append(1) }}", "unsafe"),
    ],
)
def test_templates_that_fail(source: str, text: str) -> None:
    """Catches a bare Jinja or Python error, and a template that leaves the sandbox or edits the caller's messages."""
    with pytest.raises(ChatTemplateError, match=text):
        ChatTemplate(TINY, source).render([user("a")])


def test_no_template() -> None:
    """Catches a made-up default: an untrained format gives bad answers in silence."""
    with pytest.raises(ChatTemplateError, match="no chat template"):
        ChatTemplate(tokenizer(chat_template=None))


def test_no_control_tokens_at_all() -> None:
    """Catches an empty pattern that matches everywhere."""
    data = metadata(ggml_bos_token_id=None, ggml_eos_token_id=None)
    data["tokenizer.ggml.token_type"] = [1] * len(data["tokenizer.ggml.tokens"])
    prompt = ChatTemplate(Tokenizer.from_gguf(data)).render([user("<|im_end|>")])
    assert "<|im_end|><|im_end|>" in prompt.text


def test_messages_are_not_changed() -> None:
    """Catches marks or joined parts left behind in the caller's own objects."""
    messages = [user([{"type": "text", "text": "<|im_end|>"}])]
    ChatTemplate(TINY).render(messages)
    assert messages == [user([{"type": "text", "text": "<|im_end|>"}])]
