"""A model's chat template, rendered as vLLM renders it: Jinja2 in a sandbox, with the filters that templates expect.

Source of environment and filters: transformers, ``utils/chat_template_utils.py``, which vLLM calls.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import Any

from jinja2 import TemplateError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from dualmap.router.tokens.content_format import content_format_of
from dualmap.router.tokens.conversation import (
    ContentFormat,
    Message,
    TemplateInput,
    UntokenizedError,
    first_media,
    template_input,
)

_DICT_ATTRIBUTES = frozenset(dir({}))
_MARKUP = frozenset("<>[]{}|")
_TEXT_METHODS = frozenset(
    {
        "count", "endswith", "find", "index", "lstrip", "partition", "removeprefix", "removesuffix", "replace", "rfind",
        "rindex", "rpartition", "rsplit", "rstrip", "split", "startswith", "strip",
    }
)  # fmt: skip
_TAG = "CONTINUE_FINAL_MESSAGE_TAG "


class TemplateSyntaxError(ValueError):
    """A chat template cannot be compiled."""


class ChatTemplate:
    """One compiled template, with the variables that it always has (``bos_token`` and the like)."""

    def __init__(self, source: str, special_tokens: Mapping[str, str], default_variables: Mapping[str, Any]) -> None:
        """
        Raises:
            TemplateSyntaxError: ``source`` is not a template.
        """
        environment = _environment()
        try:
            self._template = environment.from_string(source)
            parsed = environment.parse(source)
            self.content_format: ContentFormat = content_format_of(parsed)
        except TemplateError as error:
            raise TemplateSyntaxError(f"the chat template cannot be compiled: {error}") from error
        self.looks_for = _looks_for(parsed)
        """Texts that it may look for in messages; None: its output depends on the time."""
        self._knows_developers = '"developer"' in source or "'developer'" in source
        self._always = {**self._template.globals, **special_tokens, "documents": None}
        self._default_variables = dict(default_variables)
        self.system_first = self._refuses_later_systems()
        """Whether it takes no system message but the first."""
        self.unthinking_effort = self._effort_without_thinking()
        """The effort by which the messages API says that thinking is disabled."""

    def render(self, body: Mapping[str, Any], *, validated: bool = True) -> str:
        """The model's input for a chat completions body, up to where the answer begins. ``validated``: as
        ``template_input`` has it.

        Raises:
            UntokenizedError: the body is not one that can be rendered here, or the template refuses it.
        """
        try:
            given = template_input(body, self.content_format, self._default_variables, validated=validated)
            messages = given.messages
            if not self._knows_developers and "developer" in [message["role"] for message in messages]:
                messages = _system_first([_as_system(message) for message in messages])
            if given.variables.pop("continue_final_message", False):
                return self._render_continued(messages, given)
            return self._render(messages, given)
        except UntokenizedError:
            raise
        except Exception as error:  # templates run code of their own, and a body may have any shape
            raise UntokenizedError(f"the chat template fails: {error!r}") from error

    def beginning(self, body: Mapping[str, Any], *, validated: bool = True) -> TemplateInput:
        """The input of a body that ``render`` takes, for ``render_behind``. Its messages are of assistant, tool and
        user, and have no media.

        Raises:
            UntokenizedError: its last message is to be continued.
        """
        given = template_input(body, self.content_format, self._default_variables, validated=validated)
        if given.variables.pop("continue_final_message", False):
            raise UntokenizedError("the last message is continued")
        return given

    def render_behind(
        self, before: TemplateInput, messages: Sequence[Mapping[str, Any]], *, validated: bool = True
    ) -> str:
        """The text that ``render`` gives for the body of ``before`` with more messages of this kind behind its own.

        Raises:
            UntokenizedError: as ``render``.
        """
        try:
            behind = template_input({"messages": messages}, self.content_format, {}, validated=validated).messages
            return self._render([*before.messages, *behind], before)
        except UntokenizedError:
            raise
        except Exception as error:  # as in ``render``
            raise UntokenizedError(f"the chat template fails: {error!r}") from error

    def render_head(self, body: Mapping[str, Any], *, validated: bool = True) -> tuple[str, str]:
        """Render a body with media: the input up to the first message that has some, and what the template writes from
        there on, which is not the engine's.

        Raises:
            UntokenizedError: as ``render``, or what comes before depends on what follows.
        """
        messages = body["messages"]
        before = {"messages": messages[: first_media(messages)], "add_generation_prompt": False}
        if not before["messages"]:
            raise UntokenizedError("the first message has media")
        head = self.render({**body, **before, "continue_final_message": False}, validated=validated)
        whole = self.render(
            {**body, "add_generation_prompt": False, "continue_final_message": False}, validated=validated
        )
        if not whole.startswith(head):
            raise UntokenizedError("the template writes what comes before media otherwise for their sake")
        return head, whole[len(head) :]

    def _refuses_later_systems(self) -> bool:
        """Whether the template refuses later system messages, found out as vLLM does for the messages API."""
        messages = [{"role": role, "content": "t"} for role in ("system", "user", "system", "user")]
        try:
            self._template.render(messages=messages, add_generation_prompt=False)
        except TemplateError:
            return True
        except Exception:  # it needs variables that are not given here
            return False
        return False

    def _effort_without_thinking(self) -> str:
        """The effort for no thinking, found out as vLLM does for the messages API: ``none``, unless the template
        refuses or ignores it."""
        none = self._rendered_with("none")
        others = ("low", "medium", "high", "xhigh", "max")
        return "low" if none is None or none in map(self._rendered_with, others) else "none"

    def _rendered_with(self, effort: str) -> str | None:
        try:
            return self.render({"messages": [{"role": "user", "content": "Hi"}], "reasoning_effort": effort})
        except UntokenizedError:
            return None

    def _render(self, messages: list[Message], given: TemplateInput) -> str:
        variables = {**self._always, **given.variables, "messages": messages, "tools": given.tools}
        # ``Template.render`` without its copies of the variables: these have the globals already.
        context = self._template.new_context(variables, shared=True)
        return "".join(self._template.root_render_func(context))

    def _render_continued(self, messages: list[Message], given: TemplateInput) -> str:
        """Render without what the template puts after the last message."""
        messages = [*messages[:-1], copy.deepcopy(messages[-1])]
        content = messages[-1]["content"]
        if isinstance(content, list):
            text = content[-1]["text"]
            content[-1]["text"] = text + _TAG
        else:
            text = content
            messages[-1]["content"] = text + _TAG
        rendered = self._render(messages, given)
        end = rendered.rfind(_TAG.strip())
        if end < 0 or text.strip() not in rendered:
            raise UntokenizedError("the template does not write the message to continue")
        kept = rendered[:end]
        return kept if rendered[end : end + len(_TAG)] == _TAG else kept.rstrip()


def _looks_for(template: nodes.Template) -> frozenset[str] | None:
    """The constants of a template that are markup, or are given to a method of texts."""
    if any(name.name == "strftime_now" for name in template.find_all(nodes.Name)):
        return None
    constants = {const.value.strip() for const in template.find_all(nodes.Const) if isinstance(const.value, str)}
    found = {each for each in constants if not _MARKUP.isdisjoint(each)}
    for call in template.find_all(nodes.Call):
        if isinstance(call.node, nodes.Getattr) and call.node.attr in _TEXT_METHODS:
            found |= {const.value.strip() for const in call.find_all(nodes.Const) if isinstance(const.value, str)}
    return frozenset(found - {""})


def _as_system(message: Message) -> Message:
    if message["role"] != "developer":
        return message
    return {name: value for name, value in {**message, "role": "system"}.items() if name != "tools"}


def _system_first(messages: list[Message]) -> list[Message]:
    """All system messages as one, at the start; unchanged if the only one is there already."""
    system = [message for message in messages if message["role"] == "system"]
    if not system or (len(system) == 1 and messages[0]["role"] == "system"):
        return messages
    contents = [_plain(message["content"]) for message in system]
    merged = {"role": "system", "content": "\n\n".join([content for content in contents if content])}
    return [merged, *(message for message in messages if message["role"] != "system")]


def _plain(content: Any) -> str:
    return content if isinstance(content, str) else "\n".join([part["text"] for part in content if "text" in part])


class _Generation(Extension):
    """``{% generation %}``, with which templates mark the model's own words; nothing is done with it here."""

    tags = {"generation"}  # noqa: RUF012 - as Jinja declares it

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)


class _Environment(ImmutableSandboxedEnvironment):
    """Reads ``message.role`` of a dictionary at once: without, each such read raises an error inside first."""

    def getattr(self, obj: Any, attribute: str) -> Any:
        if type(obj) is dict and attribute in obj and attribute not in _DICT_ATTRIBUTES:
            return obj[attribute]
        return super().getattr(obj, attribute)


def _environment() -> ImmutableSandboxedEnvironment:
    environment = _Environment(trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols])
    environment.filters["tojson"] = _to_json
    globals_: dict[str, Callable[..., Any]] = {"raise_exception": _refuse, "strftime_now": _strftime_now}
    environment.globals.update(globals_)
    return environment


def _to_json(
    value: Any, ensure_ascii: bool = False, indent: int | None = None, separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:  # fmt: skip
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _refuse(message: str) -> None:
    raise TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)
