"""Whether a chat template iterates over the parts of a message's content, or takes the content for a string.

vLLM looks into the template for it (``--chat-template-content-format auto``), and renders another text for the one than
for the other. A template expects parts if it has a loop over ``message.content``: of a variable of a loop over the
messages, or of a macro's parameter that is given such a content.
"""

from __future__ import annotations

from collections.abc import Iterator

from jinja2 import nodes

from dualmap.router.tokens.conversation import ContentFormat


def content_format_of(template: nodes.Template) -> ContentFormat:
    """``openai`` if the template has a loop over content parts."""
    message_names = set(_loop_names(template, _names_of(template, "messages")))
    return "openai" if any(_loops_over_content(template, message_names)) else "string"


def _names_of(template: nodes.Template, name: str) -> set[str]:
    """The variable, and those that it, or a part of it, is assigned to."""
    found, new = {name}, [name]
    while new:
        current = new.pop()
        for assign in template.find_all(nodes.Assign):
            target = assign.target
            if isinstance(target, nodes.Name) and target.name not in found and _is_of(assign.node, current):
                found.add(target.name)
                new.append(target.name)
    return found


def _loop_names(template: nodes.Template, iterated: set[str]) -> Iterator[str]:
    for loop in template.find_all(nodes.For):
        if isinstance(loop.target, nodes.Name) and any(_is_of(loop.iter, name) for name in iterated):
            yield loop.target.name


def _loops_over_content(template: nodes.Template, message_names: set[str]) -> Iterator[bool]:
    in_macros: dict[int, set[str]] = {}
    for macro in template.find_all(nodes.Macro):
        given = _content_parameters(template, macro, message_names)
        in_macros |= {id(loop): given for loop in macro.find_all(nodes.For)}
    for loop in template.find_all(nodes.For):
        if any(_is_of(loop.iter, name, "content") for name in message_names):
            yield True
        elif isinstance(loop.iter, nodes.Name):
            given = in_macros.get(id(loop), {"content"})
            yield loop.iter.name in given


def _content_parameters(template: nodes.Template, macro: nodes.Macro, message_names: set[str]) -> set[str]:
    """Parameters of the macro that a call gives a message's content to."""
    names = [argument.name for argument in macro.args]
    given: set[str] = set()
    for call in template.find_all(nodes.Call):
        if not (isinstance(call.node, nodes.Name) and call.node.name == macro.name):
            continue
        values = [*zip(names, call.args, strict=False), *((pair.key, pair.value) for pair in call.kwargs)]
        for name, argument in values:
            if name in names and any(_is_of(argument, message, "content") for message in message_names):
                given.add(name)
    return given


def _is_of(node: nodes.Node | None, name: str, field: str | None = None) -> bool:
    """Whether the node is the variable, or its field, perhaps filtered, tested or sliced."""
    while True:
        if isinstance(node, nodes.Filter | nodes.Test) or (
            isinstance(node, nodes.Getitem) and isinstance(node.arg, nodes.Slice)
        ):
            node = node.node
        else:
            break
    if field is not None:
        if isinstance(node, nodes.Getitem):
            if not (isinstance(node.arg, nodes.Const) and node.arg.value == field):
                return False
        elif not (isinstance(node, nodes.Getattr) and node.attr == field):
            return False
        node = node.node
    return isinstance(node, nodes.Name) and node.ctx == "load" and node.name == name
