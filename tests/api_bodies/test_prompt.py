from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dualmap.api_bodies.errors import PromptError
from dualmap.api_bodies.prompt import chat_prompt, completion_prompt
from dualmap.scheduling.prompts.blocks import TextPrompt, TokenPrompt


def chat(*messages: dict[str, Any], **body: Any) -> bytes:
    return chat_prompt({"messages": list(messages), **body}).data


def user(content: Any, **more: Any) -> dict[str, Any]:
    return {"role": "user", "content": content, **more}


texts = st.text(max_size=20)
parts = st.one_of(
    st.builds(lambda text: {"type": "text", "text": text}, texts),
    st.builds(lambda url: {"type": "image_url", "image_url": {"url": url}}, texts),
)
messages = st.fixed_dictionaries(
    {"role": st.sampled_from(["system", "user", "assistant", "tool"]), "content": texts | st.lists(parts) | st.none()},
    optional={
        "name": texts,
        "tool_call_id": texts,
        "tool_calls": st.lists(st.fixed_dictionaries({"id": texts, "function": st.dictionaries(texts, texts)})),
    },
)
tools = st.none() | st.lists(st.dictionaries(texts, texts))


@given(st.lists(messages, min_size=1, max_size=5), st.lists(messages, max_size=3), tools)
def test_the_same_leading_messages_render_to_the_same_leading_bytes(
    leading: list[dict[str, Any]], further: list[dict[str, Any]], some_tools: list[dict[str, str]] | None
) -> None:
    assert chat(*leading, *further, tools=some_tools).startswith(chat(*leading, tools=some_tools))


@given(st.lists(messages, min_size=1, max_size=4), st.lists(messages, min_size=1, max_size=4))
def test_different_conversations_render_differently(left: list[dict[str, Any]], right: list[dict[str, Any]]) -> None:
    if chat(*left) == chat(*right):
        assert [flat(message) for message in left] == [flat(message) for message in right]


def flat(message: dict[str, Any]) -> dict[str, Any]:
    """A message up to spellings that mean the same: absent content, and text as a string or as parts."""
    content = message.get("content") or ""
    if isinstance(content, list) and all(part["type"] == "text" for part in content):
        content = "\n".join(part["text"] for part in content)
    return {**message, "content": content}


def test_a_longer_text_of_the_same_message_keeps_its_leading_bytes() -> None:
    assert chat(user("a document, and a question")).startswith(chat(user("a document")))


def test_content_cannot_pretend_to_be_another_message() -> None:
    one, two = chat(user("a\xff\xfeuser\xfeb")), chat(user("a"), user("b"))

    assert one != two


def test_tools_come_before_the_messages_in_sorted_order() -> None:
    tool = {"type": "function", "function": {"name": "f", "parameters": {"b": 1, "a": 2}}}
    same = {"function": {"parameters": {"a": 2, "b": 1}, "name": "f"}, "type": "function"}

    rendered = chat(user("hi"), tools=[tool])

    assert rendered == chat(user("hi"), tools=[same])
    assert rendered.index(b'"name":"f"') < rendered.index(b"hi")
    assert not chat(user("hi")).startswith(rendered[:10])


@pytest.mark.parametrize(
    "difference",
    [
        {"chat_template": "{{ messages }}"},
        {"chat_template_kwargs": {"enable_thinking": False}},
        {"documents": [{"text": "d"}]},
        {"reasoning_effort": "high"},
        {"tools": [{"type": "function"}]},
    ],
)
def test_whatever_changes_the_start_of_the_template_changes_the_first_byte_on(difference: dict[str, Any]) -> None:
    plain, changed = chat(user("hi")), chat(user("hi"), **difference)

    assert plain[:1] != changed[:1]


@pytest.mark.parametrize("ignored", ["temperature", "stream", "max_tokens", "user", "n", "tools", "documents"])
def test_what_does_not_change_the_prompt_does_not_change_its_bytes(ignored: str) -> None:
    value = None if ignored in ("tools", "documents") else 1

    assert chat(user("hi"), **{ignored: value}) == chat(user("hi"))


def test_fields_sent_as_null_render_like_absent_ones() -> None:
    assert chat({"role": "assistant", "content": "a", "tool_calls": None, "refusal": None}) == chat(
        {"content": "a", "role": "assistant"}
    )
    assert chat({"role": "assistant"}) == chat({"role": "assistant", "content": None})


def test_one_text_part_renders_like_a_plain_string_and_several_like_lines() -> None:
    assert chat(user([{"type": "text", "text": "a"}])) == chat(user("a"))
    assert chat(user([{"type": "text", "text": "a"}, {"type": "text", "text": "b"}])) == chat(user("a\nb"))


def test_names_tool_calls_and_call_ids_are_part_of_the_prompt() -> None:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    variants = [
        user("a"),
        user("a", name="alice"),
        {"role": "user", "content": "a", "tool_calls": [call]},
        {"role": "tool", "content": "a", "tool_call_id": "1"},
        {"role": "tool", "content": "a", "tool_call_id": "2"},
    ]

    assert len({chat(variant) for variant in variants}) == len(variants)


def test_images_count_by_their_hash_so_that_their_size_does_not() -> None:
    small, large, other = (
        {"type": "image_url", "image_url": {"url": url}} for url in ("data:a", "data:" + "a" * 10**6, "data:b")
    )

    rendered = {chat(user([{"type": "text", "text": "what is this"}, image])) for image in (small, large, other)}

    assert len(rendered) == 3
    assert len({len(data) for data in rendered}) == 1
    assert max(map(len, rendered)) < 100


def test_an_image_is_what_its_url_or_uuid_names_in_every_api() -> None:
    chats = {"type": "image_url", "image_url": {"url": "data:a", "detail": "low"}}
    responses = {"type": "input_image", "image_url": "data:a", "detail": "auto"}
    named = [{**part, "uuid": "a cat"} for part in (chats, {"type": "image_url", "image_url": None})]
    others = [
        {"type": "input_image", "image_url": "data:b"},
        {**chats, "uuid": "a dog"},
        {"type": "image_embeds", "x": 1},
    ]

    rendered = [chat(user([image])) for image in (chats, responses, *named, *others)]

    assert rendered[0] == rendered[1] and rendered[2] == rendered[3]
    assert len(set(rendered)) == 5


def test_it_is_known_where_images_end_and_whether_there_is_sound() -> None:
    image = {"type": "image_url", "image_url": {"url": "data:a"}}
    sound = {"type": "input_audio", "input_audio": {"data": "a"}}
    first, second = user([image, {"type": "text", "text": "and this"}, image]), user(["what?", image])

    prompt = chat_prompt({"messages": [user("hi"), first, second]})
    mark = prompt.data[prompt.image_ends[0] - 38 : prompt.image_ends[0]]

    assert prompt.media_at == len(chat(user("hi"))) and not prompt.other_media
    assert [prompt.data[end - 38 : end] for end in prompt.image_ends] == [mark] * 3 and mark.startswith(b"image\xfe")
    assert chat_prompt({"messages": [user([sound, image])]}).other_media


def test_a_lone_surrogate_is_no_reason_to_fail() -> None:
    assert chat(user("\ud800")) != chat(user("\ud801"))


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "messages"),
        ({"messages": []}, "messages"),
        ({"messages": "hi"}, "messages"),
        ({"messages": {"role": "user"}}, "messages"),
        ({"messages": [user("a"), "b"]}, "messages[1]"),
        ({"messages": [{"content": "a"}]}, "messages[0].role"),
        ({"messages": [{"role": 1, "content": "a"}]}, "messages[0].role"),
    ],
)
def test_a_chat_without_messages_has_no_prompt_and_the_part_is_named(body: dict[str, Any], param: str) -> None:
    with pytest.raises(PromptError) as refused:
        chat_prompt(body)

    assert refused.value.param == param


NESTED: Any = []
for _ in range(400):
    NESTED = [NESTED]


@pytest.mark.parametrize(
    "message",
    [
        user(3),
        user({"text": "a"}),
        user([3]),
        user([{}]),
        user([{"type": "text"}]),
        user([{"type": 3, "text": "a"}]),
        user([{"type": ["text"], "text": "a"}]),
        user([{"type": "input_text", "text": 3}]),
        user("a", name=3),
        {"role": "assistant", "content": None, "tool_calls": {}},
    ],
    ids=str,
)
def test_a_part_of_an_unknown_form_is_rendered_as_it_is_and_the_prompt_counts_as_unread(message: Any) -> None:
    before, behind = user("before"), user("behind")
    prompt = chat_prompt({"messages": [before, message, behind]})

    assert prompt.unread and not chat_prompt({"messages": [before, behind]}).unread
    assert prompt.data.startswith(chat(before))
    assert prompt.data != chat_prompt({"messages": [before, {**message, "role": "tool"}, behind]}).data


@pytest.mark.parametrize("tools", [{"f": 1}, "f", 7])
def test_tools_of_an_unknown_form_make_a_prompt_unread(tools: Any) -> None:
    assert chat_prompt({"messages": [user("a")], "tools": tools}).unread


@pytest.mark.parametrize("value", [2**70, "\ud800", {"\ud800": 1}, float("nan"), NESTED], ids=repr)
def test_any_json_value_can_stand_in_any_field(value: Any) -> None:
    called = {"role": "assistant", "content": None, "tool_calls": [value]}
    for body in ({"messages": [user("a")], "tools": [value]}, {"messages": [called]}, {"messages": [user([value])]}):
        assert chat_prompt(body).data


def test_a_part_without_a_type_is_what_its_fields_say() -> None:
    typed = {"type": "image_url", "image_url": {"url": "http://h/a.png"}}
    untyped = {"image_url": "http://h/a.png"}
    first, second = (chat_prompt({"messages": [user([part])]}) for part in (typed, untyped))

    assert first == second and not second.unread
    assert chat(user([{"text": "a"}])) == chat(user("a"))
    assert chat_prompt({"messages": [user([{"input_audio": {"data": "AA"}}])]}).other_media


def test_a_text_completion_is_its_text() -> None:
    assert completion_prompt({"prompt": "once upon"}) == TextPrompt(b"once upon")
    assert completion_prompt({"prompt": ""}) == TextPrompt(b"")


def test_several_texts_follow_each_other_distinctly() -> None:
    both = completion_prompt({"prompt": ["a", "b"]})
    joined = completion_prompt({"prompt": ["ab"]})

    assert isinstance(both, TextPrompt)
    assert both.data.startswith(b"a")
    assert both != joined


def test_token_ids_stay_token_ids() -> None:
    one, several = completion_prompt({"prompt": [5, 6]}), completion_prompt({"prompt": [[5, 6], [7]]})

    assert isinstance(one, TokenPrompt)
    assert isinstance(several, TokenPrompt)
    assert list(one.token_ids) == [5, 6]
    assert list(several.token_ids) == [5, 6, 0xFFFFFFFF, 7]


@pytest.mark.parametrize("no_prompt", [{}, {"prompt": ""}, {"prompt": []}, {"prompt": None}])
def test_prompt_embeddings_stand_in_for_a_prompt_with_about_their_number_of_tokens(no_prompt: dict[str, Any]) -> None:
    tokens = ["QUJD" * 2048, "REVG" * 2048, "R0hJ" * 1024]
    whole, shorter, several = (
        completion_prompt({**no_prompt, "prompt_embeds": embeds})
        for embeds in ("".join(tokens), "".join(tokens[:2]), tokens)
    )

    assert isinstance(whole, TokenPrompt)
    assert isinstance(shorter, TokenPrompt)
    assert len(whole.token_ids) == 3 and len(set(whole.token_ids)) == 3
    assert shorter.token_ids == whole.token_ids[:2]
    assert whole != several


def test_a_prompt_comes_before_embeddings() -> None:
    assert completion_prompt({"prompt": "a", "prompt_embeds": "QUJD"}) == TextPrompt(b"a")


@pytest.mark.parametrize(
    ("embeds", "param"), [(7, "prompt_embeds"), ({"a": 1}, "prompt_embeds"), (["a", 7], "prompt_embeds[1]")]
)
def test_embeddings_that_are_no_text_are_no_prompt(embeds: object, param: str) -> None:
    with pytest.raises(PromptError) as refused:
        completion_prompt({"prompt_embeds": embeds})

    assert refused.value.param == param


@pytest.mark.parametrize(
    ("prompt", "param"),
    [
        (None, "prompt"),
        ([], "prompt"),
        ({}, "prompt"),
        (3, "prompt"),
        ([1, "a"], "prompt"),
        ([1.5], "prompt"),
        ([-1], "prompt"),
        ([2**32], "prompt"),
        ([None], "prompt"),
        (["a", 1], "prompt[1]"),
        ([[1], []], "prompt[1]"),
        ([[1], "a"], "prompt[1]"),
        ([[1], ["a"]], "prompt[1]"),
    ],
)
def test_completions_without_a_readable_prompt_have_none_and_the_part_is_named(prompt: Any, param: str) -> None:
    with pytest.raises(PromptError) as refused:
        completion_prompt({"prompt": prompt})

    assert refused.value.param == param


@pytest.mark.parametrize("text", ["", "plain", "é你好🙂", "lone \ud800 surrogate"])
def test_the_size_of_a_prompt_is_known_before_its_bytes_are_made(text: str) -> None:
    body = {"messages": [{"role": "user", "content": text}, {"role": "narrator", "content": text}]}
    prompt = chat_prompt(body)
    size = prompt.size

    assert size == len(prompt.data) == prompt.size
    assert prompt == TextPrompt(prompt.data) and not prompt.is_empty


@pytest.mark.parametrize("shape", ["text", "part", "long"])
@pytest.mark.parametrize(("role", "drops"), [("system", True), ("user", False), ("developer", False)])
def test_the_line_that_differs_in_every_request_is_no_part_of_a_system_message(
    shape: str, role: str, drops: bool
) -> None:
    def rendered(text: str) -> bytes:
        content: Any = [{"type": "text", "text": text}] if shape == "part" else "name" if shape == "long" else text
        long_texts = {"name": text.encode()} if shape == "long" else {}
        return bytes(chat_prompt({"messages": [{"role": role, "content": content}]}, long_texts).data)

    first, second = (rendered(f"x-anthropic-billing-header: cch={number};\nBe brief.") for number in (1, 2))
    assert (first == second) is drops
    assert (first == rendered("Be brief.")) is drops
    assert rendered("x-anthropic-billing-headers of mine") != rendered("") or drops
