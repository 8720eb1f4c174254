from __future__ import annotations

from typing import Any

import pytest

from dualmap.api_bodies.messages_api import chat_of_message
from dualmap.router.tokens.chat_template import ChatTemplate, TemplateSyntaxError
from dualmap.router.tokens.conversation import UntokenizedError

CHATML = (
    "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}</>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def render(source: str, body: dict[str, Any], **variables: Any) -> str:
    return ChatTemplate(source, {"eos_token": "</s>"}, variables).render(body)


def ask(*messages: tuple[str, str], **fields: Any) -> dict[str, Any]:
    return {"messages": [{"role": role, "content": content} for role, content in messages], **fields}


def test_a_conversation_ends_with_the_start_of_the_answer() -> None:
    assert render(CHATML, ask(("user", "hi"))) == "<user>hi</><assistant>"


def test_a_continued_message_has_no_end() -> None:
    body = ask(("user", "hi"), ("assistant", "well "), continue_final_message=True, add_generation_prompt=False)
    assert render(CHATML, body) == "<user>hi</><assistant>well "


def test_special_tokens_and_the_servers_variables_are_there_and_json_is_not_escaped() -> None:
    source = "{{ eos_token }}{{ style }}{{ messages[0] | tojson }}{% generation %}!{% endgeneration %}"
    assert render(source, ask(("user", "<é>")), style="s") == '</s>s{"role": "user", "content": "<é>"}!'


def test_developers_are_systems_to_a_template_that_does_not_know_them() -> None:
    body = ask(("system", "a"), ("user", "hi"), ("developer", "b"))
    assert render(CHATML, body) == "<system>a\n\nb</><user>hi</><assistant>"
    assert render(CHATML + "{# 'developer' #}", body) == "<system>a</><user>hi</><developer>b</><assistant>"


@pytest.mark.parametrize(
    ("source", "content_format"),
    [
        (CHATML, "string"),
        ("{% for m in messages %}{% for part in m.content %}{{ part.text }}{% endfor %}{% endfor %}", "openai"),
        (
            "{% set a = messages[1:] %}{% for m in a %}{% for p in m['content'] | list %}{% endfor %}{% endfor %}",
            "openai",
        ),
        (
            "{% for m in messages %}{% set content = m.content %}{% for p in content %}{% endfor %}{% endfor %}",
            "openai",
        ),
        (
            "{% macro show(body) %}{% for p in body %}{{ p.text }}{% endfor %}{% endmacro %}"
            "{% for m in messages %}{{ show(m.content) }}{% endfor %}",
            "openai",
        ),
        (
            "{% macro show(calls) %}{% for c in calls %}{% endfor %}{% endmacro %}{{ show(messages[0].tools) }}",
            "string",
        ),
    ],
)
def test_a_template_that_iterates_over_content_gets_parts(source: str, content_format: str) -> None:
    assert ChatTemplate(source, {}, {}).content_format == content_format


def test_a_template_that_refuses_or_fails_makes_a_prompt_untokenized() -> None:
    with pytest.raises(UntokenizedError, match="no such role"):
        render("{{ raise_exception('no such role') }}", ask(("user", "hi")))
    with pytest.raises(UntokenizedError):
        render("{{ messages.append(1) }}", ask(("user", "hi")))


def test_a_broken_template_is_reported_at_the_start() -> None:
    with pytest.raises(TemplateSyntaxError):
        ChatTemplate("{% if %}", {}, {})


def test_fields_named_like_methods_of_a_dictionary_are_read_as_jinja_reads_them() -> None:
    source = (
        "{% for m in messages %}{{ m.items is callable }}{{ m.name }}{{ m.role }}{{ m.lost is defined }}{% endfor %}"
    )
    template = ChatTemplate(source, {}, {})
    body = {"messages": [{"role": "user", "content": "x", "name": "n", "items": "own"}]}
    assert template.render(body) == "TruenuserFalse"


@pytest.mark.parametrize(
    ("source", "effort"),
    [
        ("{{ enable_thinking }}", "none"),
        ("{{ 'low' if reasoning_effort == 'low' else 'max' }}", "low"),
        ("{% if reasoning_effort == 'none' %}{{ raise_exception('think') }}{% endif %}", "low"),
        ("{{ reasoning_effort }}", "none"),
    ],
)
def test_thinking_is_disabled_by_an_effort_that_the_template_knows(source: str, effort: str) -> None:
    assert ChatTemplate(source, {}, {}).unthinking_effort == effort
    body = {"messages": [{"role": "user", "content": "hi"}], "thinking": {"type": "disabled"}}
    assert chat_of_message(body, unthinking_effort=effort)["reasoning_effort"] == effort
