"""Rendering the messages of a chat behind a beginning that is known, without that beginning.

A chat template is a program: it may look at any message while it writes another. So whether it writes the messages
behind a place as it would alone is found out by comparing, for each template, its arguments and the roles at the place:
made-up chats are rendered whole, and in two parts, the second behind a few short messages that stand for the first
(``_STANDS``). Only where all of them are equal, and the first part ends as it did when it was a whole chat, are chats
split there. Chats with reasoning, and with instructions behind the first message, are compared apart from those without
(``ChatShape.traits``): many templates drop the reasoning before the last question, or write all instructions first.
What templates look for in a text is text of theirs, too: a message that has any of it splits no chat, and so does one
with a field that no made-up chat has.
"""

from __future__ import annotations

import json
import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Any, Final

from dualmap.router.prompts.known_bodies import ChatShape
from dualmap.router.tokens.chat_template import ChatTemplate
from dualmap.router.tokens.conversation import TEMPLATE_FIELDS, TemplateInput, UntokenizedError
from dualmap.scheduling.values import value

_ROLES: Final = ("assistant", "tool", "user")
_INSTRUCTIONS: Final = frozenset({"developer", "system"})
"""Roles of instructions. As traits: those that a chat has behind its first message, or in place of a system's."""
_PLAIN_ROLES: Final = (*_ROLES, *_INSTRUCTIONS)
_REASONING: Final = "reasoning"
_FIELDS: Final = frozenset({"content", "role", "tool_call_id", "tool_calls"})
_REASONING_FIELDS: Final = frozenset({_REASONING, "reasoning_content"})
_PART: Final = {"text", "type"}
_TEXT_TYPES: Final = ("text", "input_text", "output_text")
"""All are one to templates."""
_COMPARED: Final = frozenset({"chat_template_kwargs", "reasoning_effort"})
"""Arguments with which templates are compared. A chat with any other has no split."""
_NOT_SPLIT: Final = TEMPLATE_FIELDS - {"tools", *_COMPARED} | {"add_special_tokens"}
_TOOLS_ALONE: Final = ("", "with tools")
"""How chats with neither are known, without and with tools."""
_MAX_RULES: Final = 64
"""Kinds of chats of a template that are known at once, without those that have neither of ``_COMPARED``, which are few.
A client can make new ones as it likes, by its arguments."""
_MAX_RULES_OF_TENANT: Final = 32
"""Kinds that one tenant may have compared: the rest is left for others."""
_KEPT_S: Final = 60.0
"""Time in which no more than these are compared."""
_CONTENTS: Final = ("Hi.", "", " a\n", "\n\nb  ", '{"a": [1, "é"]}', "你好", "x = 1\n\n    y\n")
_COMPARED_LEAST: Final = 3
"""Comparisons of made-up chats that a rule needs at least: templates refuse others."""
_SAMPLES: Final = 2 * len(_CONTENTS) + 2
"""Made-up beginnings for each pair of roles. All but two have an answer with one of these texts, alone or with calls: a
template may write it otherwise once a later question has come."""
_MOST_SAMPLES: Final = 3 * _SAMPLES
"""More of them where a template refuses many, or few are of the kind that is meant."""

_AFTER: Final = {
    "assistant": ("tool", "user"),
    "tool": ("assistant", "assistant", "tool", "user"),
    "user": ("assistant",),
}
"""The roles behind each in made-up chats."""
_AFTER_WITHOUT_TOOLS: Final = {**_AFTER, "assistant": ("user",)}
"""Templates without tools refuse most of the others."""


def _call(number: int) -> dict[str, Any]:
    function = {"name": f"f{number}", "arguments": json.dumps({"a": number, "b": "c\n"})}
    return {"id": f"call_{number}", "function": function, "type": "function"}


def _tool(name: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "description": "d", "parameters": {"type": "object"}}}


_USER: Final = {"role": "user", "content": "a"}
_CALLS: Final = {"role": "assistant", "content": "b", "tool_calls": [_call(0)]}
_RESULT: Final = {"role": "tool", "tool_call_id": "call_0", "content": "c"}
_STANDS: Final[Mapping[str, Sequence[Mapping[str, Any]]]] = {
    "assistant": (_USER, {"role": "assistant", "content": "b"}),
    "tool": (_USER, _CALLS, _RESULT),
    "user": (_USER,),
}
"""Messages that stand for the beginning of a chat, by the role of its last one."""
_STANDING_TOOL: Final = _tool("t")


@value
class _Part:
    """The rendering of the messages that stand for a beginning."""

    stands: TemplateInput
    """These messages, with the arguments that they are rendered with."""
    head: str
    opening: str
    """What the template writes behind the last message, for the answer."""


@value
class _Compared:
    """The chats that were compared."""

    arguments: str
    traits: frozenset[str]
    """The traits that each of the chats has, see ``ChatShape``."""
    instructs_behind: bool
    """Whether instructions are among the messages behind the split; False: all of them are before it."""


@value
class _Split:
    """A place at which chats are split."""

    first: str
    """The role of the next message."""
    asks: bool
    """Whether a question of a user is behind: many templates leave thoughts out of what was said before the last
    one."""


@value
class _Rules:
    """The result of comparing chats of one kind."""

    parts: Mapping[str, _Part]
    """The parts, by the role before the split."""
    splits: Mapping[str, frozenset[_Split]]
    """The places at which such chats may be split, by the role before the split."""


_NO_RULES: Final = _Rules({}, {})


@dataclass(slots=True, eq=False)
class _Share:
    """The kinds of chats that were compared for one tenant."""

    kept_until_s: float
    """Time until which none of them is dropped for another one."""
    kinds: list[_Compared] = field(default_factory=list)


@value
class ChatTail:
    """What a template writes behind the beginning of a chat."""

    text: str
    opening: str
    """The end of it, which opens the answer."""
    shape: ChatShape
    """The shape of the whole chat."""


class SplitChats:
    """Splits the chats of one template."""

    def __init__(
        self, template: ChatTemplate, *, validated: bool = True, now_s: Callable[[], float] = time.monotonic
    ) -> None:
        """``validated``: as ``template_input`` has it."""
        self._template = template
        self._validated = validated
        self._now_s = now_s
        self._rules: dict[_Compared, _Rules] = {}
        self._shares: dict[str, _Share] = {}
        """The kinds of each tenant, the oldest first. A kind that several of them send is in the share of one."""
        self._lock = threading.Lock()
        """Held while rules and shares are changed: several threads compare."""

    def opening(self, body: Mapping[str, Any], *, tenant: str = "") -> tuple[ChatShape, str] | None:
        """The shape of a whole chat, and what the template writes behind its last message; None where nothing may be
        split behind it. Compares, if need be, in the share of this tenant: that takes 40 to 500 ms."""
        if (key := self._key(body)) is None:
            return None
        messages = body["messages"]
        if not all(map(self._is_plain, messages)):
            return None
        if next((each["role"] for each in messages if each["role"] not in _INSTRUCTIONS), "") != "user":
            return None
        shape = ChatShape(messages[-1]["role"], _traits(messages[messages[0]["role"] == "system" :]))
        instructs = {False, not _INSTRUCTIONS.isdisjoint(shape.traits)}
        rules = [self._rules_of(_Compared(key, shape.traits, behind), body, tenant) for behind in instructs]
        part = next((each.parts[shape.role] for each in rules if shape.role in each.splits), None)
        return None if part is None else (shape, part.opening)

    def tail(self, body: Mapping[str, Any], before: ChatShape) -> ChatTail | None:
        """Return the text that the template writes for the messages of ``body`` behind a beginning of this shape; None
        where the chat has to be rendered whole."""
        key, messages = self._key(body), body["messages"]
        if key is None or not messages or not all(map(self._is_plain, messages)):
            return None
        behind = _traits(messages)
        traits = before.traits | behind
        rules = self._rules.get(_Compared(key, traits, not _INSTRUCTIONS.isdisjoint(behind)), _NO_RULES)
        asks = any(message["role"] == "user" for message in messages)
        if _Split(messages[0]["role"], asks) not in rules.splits.get(before.role, ()):
            return None
        last = messages[-1]["role"]
        ends, rendered = rules.parts.get(last), self._behind(rules.parts[before.role], messages)
        if rendered is None or ends is None or not rendered.endswith(ends.opening):
            return None
        return ChatTail(rendered, ends.opening, ChatShape(last, traits))

    def _key(self, body: Mapping[str, Any]) -> str | None:
        """What a template is compared by; None where it is not."""
        if self._template.looks_for is None:
            return None
        if not _NOT_SPLIT.isdisjoint(body) and any(body.get(name) is not None for name in _NOT_SPLIT):
            return None
        has_tools = body.get("tools") is not None
        if _COMPARED.isdisjoint(body):  # as most are
            return _TOOLS_ALONE[has_tools]
        try:
            return json.dumps([has_tools, *map(body.get, sorted(_COMPARED))], sort_keys=True)
        except (TypeError, ValueError):
            return None

    def _is_plain(self, message: Mapping[str, Any]) -> bool:
        """Whether it is made of what was compared."""
        role, content = message["role"], message.get("content")
        if role not in _PLAIN_ROLES:
            return False
        if len(message) > 2 and not all(self._is_known(message, name) for name in message.keys() - _FIELDS):
            return False
        calls = message.get("tool_calls")
        if calls is not None and (role != "assistant" or not calls or self._finds_any(json.dumps(calls))):
            return False
        if content is None:
            return calls is not None
        if isinstance(content, list):
            return all(map(_is_text, content)) and not any(self._finds_any(part["text"]) for part in content)
        return isinstance(content, str) and not self._finds_any(content)

    def _is_known(self, message: Mapping[str, Any], name: str) -> bool:
        """Whether made-up chats have this field, which not all messages have."""
        given = message[name]
        if given is None:
            return True
        if name not in _REASONING_FIELDS or message["role"] != "assistant":
            return False
        return isinstance(given, str) and not self._finds_any(given)

    def _finds_any(self, text: str) -> bool:
        looks_for = self._template.looks_for
        assert looks_for is not None
        return any(each in text for each in looks_for)

    def _rules_of(self, compared: _Compared, body: Mapping[str, Any], tenant: str) -> _Rules:
        """The rules of chats with these traits and the arguments of ``body``; none where too many others are known.
        Compares unless they are known."""
        if (rules := self._rules.get(compared)) is not None:
            return rules
        if compared.arguments in _TOOLS_ALONE:
            rules = self._rules[compared] = self._comparison(compared, body)
            return rules
        if (share := self._share_with_room(tenant, compared)) is None:
            return _NO_RULES
        rules = self._comparison(compared, body)
        with self._lock:
            if self._shares.get(tenant) is share:
                self._rules[compared] = rules
        return rules

    def _share_with_room(self, tenant: str, compared: _Compared) -> _Share | None:
        """The share of a tenant, to which this kind was added; None where it has too many, or all have. Rules that are
        old enough are dropped for it."""
        with self._lock:
            now_s, share = self._now_s(), self._shares.get(tenant)
            is_full = sum(len(each.kinds) for each in self._shares.values()) >= _MAX_RULES
            if share is not None and len(share.kinds) >= _MAX_RULES_OF_TENANT:
                dropped: str | None = tenant
            else:
                dropped = next(iter(self._shares)) if is_full else None
            if dropped is not None:
                if now_s < self._shares[dropped].kept_until_s:
                    return None
                for each in self._shares.pop(dropped).kinds:
                    self._rules.pop(each, None)
            share = self._shares.setdefault(tenant, _Share(now_s + _KEPT_S))
            share.kinds.append(compared)
            return share

    def _comparison(self, compared: _Compared, body: Mapping[str, Any]) -> _Rules:
        given = {name: body[name] for name in _COMPARED if body.get(name) is not None}
        has_tools = body.get("tools") is not None
        parts = self._parts_of({**given, "tools": [_STANDING_TOOL]} if has_tools else given)
        if has_tools:
            given["tools"] = [_tool("one"), _tool("other")]
        firsts = (*_ROLES, *sorted(compared.traits & _INSTRUCTIONS)) if compared.instructs_behind else _ROLES
        found = {
            role: frozenset(
                _Split(first, asks) for first in firsts for asks in self._splits(given, role, part, first, compared)
            )
            for role, part in parts.items()
        }
        return _Rules(parts, {role: splits for role, splits in found.items() if splits})

    def _parts_of(self, given: Mapping[str, Any]) -> dict[str, _Part]:
        found = {}
        for role, stands in _STANDS.items():
            head = self._rendered({**given, "messages": stands, "add_generation_prompt": False})
            whole = self._rendered(standing := {**given, "messages": stands})
            if head and whole and whole.startswith(head) and len(whole) > len(head):
                with suppress(UntokenizedError):
                    begins = self._template.beginning(standing, validated=self._validated)
                    found[role] = _Part(begins, head, whole[len(head) :])
        return found

    def _splits(
        self, given: Mapping[str, Any], role: str, part: _Part, first: str, compared_chats: _Compared
    ) -> set[bool]:
        """Whether made-up chats are the same in two parts, with these roles at the split: of those with a question
        behind, and of those without one."""
        chance, compared, equal = random.Random(f"{role} {first}"), Counter[bool](), {False, True}
        made_up = _MadeUp(chance, compared_chats)
        for number in range(_MOST_SAMPLES):
            if number >= _SAMPLES and all(compared[asks] >= _COMPARED_LEAST for asks in equal):
                break
            before, behind = made_up.chat(number, role, first)
            beginning = self._rendered({**given, "messages": before})
            if beginning is None:
                continue  # nothing is kept of such a chat
            quiet = [*takewhile(lambda message: message["role"] != "user", behind)]
            for each in (quiet, [*behind, *_question_behind(behind[-1])]):
                asks = each is not quiet
                if not each or asks not in equal or not made_up.is_meant(each):
                    continue
                whole = self._rendered({**given, "messages": [*before, *each]})
                tail = self._behind(part, each)
                if whole is None and tail is None:
                    continue
                compared[asks] += 1
                if tail is None or whole != beginning.removesuffix(part.opening) + tail:
                    equal.discard(asks)
            if not equal:
                break
        return {asks for asks in equal if compared[asks] >= _COMPARED_LEAST}

    def _behind(self, part: _Part, messages: Sequence[Mapping[str, Any]]) -> str | None:
        """The messages behind those that stand for a beginning; None where the template refuses them, or writes the
        beginning otherwise for their sake."""
        try:
            rendered = self._template.render_behind(part.stands, messages, validated=self._validated)
        except UntokenizedError:
            return None
        return rendered[len(part.head) :] if rendered.startswith(part.head) else None

    def _rendered(self, body: Mapping[str, Any]) -> str | None:
        """None where the template refuses it."""
        try:
            return self._template.render(body, validated=self._validated)
        except UntokenizedError:
            return None


def _is_text(part: Any) -> bool:
    return (
        isinstance(part, dict)
        and part.keys() == _PART
        and part["type"] in _TEXT_TYPES
        and isinstance(part["text"], str)
    )


def _traits(messages: Iterable[Mapping[str, Any]]) -> frozenset[str]:
    """Return the traits by which chats with these messages are compared apart from others."""
    found = set()
    for message in messages:
        if message["role"] in _INSTRUCTIONS:
            found.add(message["role"])
        elif len(message) > 2 and any(message.get(name) is not None for name in _REASONING_FIELDS):
            found.add(_REASONING)
    return frozenset(found)


class _MadeUp:
    """Made-up chats with the traits of those that are compared."""

    def __init__(self, chance: random.Random, compared: _Compared) -> None:
        self._chance = chance
        self._instructions = sorted(compared.traits & _INSTRUCTIONS)
        self._instructs_behind = compared.instructs_behind
        self._reasons = _REASONING in compared.traits

    def chat(self, number: int, role: str, first: str) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
        """The messages before the split, the last of which has this role, and those behind it, which begin with one of
        that role."""
        chance, answers = self._chance, _answered(number)
        after = _AFTER_WITHOUT_TOOLS if len(answers) == 1 else _AFTER
        roles = _roles(chance, after, begins="user", said=[each["role"] for each in answers], ends=role)
        before = self._messages(roles, answers)
        if not self._instructs_behind or chance.random() < 0.5:
            for each in self._instructions:
                before.insert(chance.randrange(len(before)), self._instruction(each))
        if chance.random() < 0.5:
            before.insert(0, self._instruction("system"))
        instructs_first = first in _INSTRUCTIONS
        behind = self._messages(_roles(chance, after, begins=chance.choice(after[role]) if instructs_first else first))
        if instructs_first:
            behind.insert(0, self._instruction(first))
        elif self._instructs_behind:
            if len(behind) == 1:
                behind += self._messages([chance.choice(after[first])])
            behind.insert(chance.randrange(1, len(behind)), self._instruction(chance.choice(self._instructions)))
        return before, behind

    def is_meant(self, behind: Sequence[Mapping[str, Any]]) -> bool:
        """Whether these messages behind a split are like those that are split."""
        if behind[-1]["role"] in _INSTRUCTIONS:
            return False
        return not self._instructs_behind or any(each["role"] in _INSTRUCTIONS for each in behind)

    def _messages(self, roles: Sequence[str], answers: Sequence[Mapping[str, Any]] = ()) -> list[dict[str, Any]]:
        """Messages of these roles; ``answers`` are behind the first."""
        chance, found = self._chance, list[dict[str, Any]]()
        for place, role in enumerate(roles):
            if 0 < place <= len(answers):
                message = dict(answers[place - 1])
            else:
                content = _content(chance)
                message = {"role": role, "content": content}
                if role == "assistant" and (roles[place + 1 : place + 2] == ["tool"] or chance.random() < 0.3):
                    message["tool_calls"] = [_call(number) for number in range(chance.choice((1, 1, 2)))]
                    message["content"] = chance.choice((None, content))
                if role == "tool":
                    message["tool_call_id"] = "call_0"
            if self._reasons and role == "assistant" and (place == 1 or chance.random() < 0.7):
                message["reasoning"] = chance.choice(_CONTENTS)
            found.append(message)
        return found

    def _instruction(self, role: str) -> dict[str, Any]:
        return {"role": role, "content": _content(self._chance)}


def _content(chance: random.Random) -> Any:
    if chance.random() < 0.6:
        return chance.choice(_CONTENTS)
    return [{"type": "text", "text": chance.choice(_CONTENTS)} for _ in range(chance.randrange(3))]


def _answered(number: int) -> list[dict[str, Any]]:
    """The answer that the made-up chat of this number has behind its first question, and the result of its call."""
    calls, place = divmod(number, len(_CONTENTS))
    if calls > 1:
        return []
    answer: dict[str, Any] = {"role": "assistant", "content": _CONTENTS[place]}
    return [{**answer, "tool_calls": [_call(0)]}, _RESULT] if calls else [answer]


def _question_behind(last: Mapping[str, Any]) -> list[dict[str, Any]]:
    """A question behind a last message."""
    return [{"role": "assistant", "content": "b"}, _USER] if last["role"] == "user" else [_USER]


def _roles(
    chance: random.Random, after: Mapping[str, Sequence[str]], *, begins: str, said: Sequence[str] = (), ends: str = ""
) -> list[str]:
    """The roles of made-up messages. ``after`` has the roles behind each, ``said`` are behind the first."""
    roles = [begins, *said]
    for _ in range(chance.randrange(5)):
        roles.append(chance.choice(after[roles[-1]]))
    if ends and roles[-1] != ends:
        roles += {"assistant": ["assistant"], "tool": ["assistant", "tool"], "user": ["user"]}[ends]
    return roles
