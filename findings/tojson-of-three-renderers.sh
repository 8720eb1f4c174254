#!/bin/sh
# jinja2 3.1.6, minijinja 3.1.0 and transformers 5.24.0 from PyPI, on the `tojson` of a chat template.
#
# Guess: `{{ tools[0] | tojson }}`, by which most templates write their tools, gives one text in all three; templates
# are plain Jinja.
# Seen: three texts. transformers, which engines use, replaces the filter: keys stay in order, characters as they are.
# jinja2 sorts keys, and writes `<`, `>`, `&` and `'` as \u003c and so on. minijinja keeps the order and escapes as
# well.
# For users: a router, a proxy or a test that renders by another library than the engine has other tokens from the
# first apostrophe of a tool's description on: hit forecasts of prompts with tools are 0 behind it, token counts are
# off, and prompts that it renders itself are not what the model was trained on. Replace the filter, as the fleet
# does.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv" && "$folder/venv/bin/pip" install -q --disable-pip-version-check \
  jinja2==3.1.6 minijinja==3.1.0 transformers==5.24.0 || exit 2
"$folder/venv/bin/python" - <<'PROGRAM'
import json
import jinja2, minijinja
from transformers.utils.chat_template_utils import render_jinja_template

template = "{{ tools[0] | tojson }}"
tool = {"type": "function", "function": {"name": "find", "description": "Find the user's <id> & name", "strict": True}}
rendered, _ = render_jinja_template([[{"role": "user", "content": "hi"}]], tools=[tool], chat_template=template)
seen = {
    "transformers": rendered[0],
    "jinja2": jinja2.Environment().from_string(template).render(tools=[tool]),
    "minijinja": minijinja.Environment(templates={"chat": template}).render_template("chat", tools=[tool]),
}
for name, text in seen.items():
    print(f"{name}: {text}")

def escaped(text):
    return text.replace("<", r"\u003c").replace(">", r"\u003e").replace("&", r"\u0026").replace("'", r"\u0027")

expected = {
    "transformers": json.dumps(tool),
    "jinja2": escaped(json.dumps(tool, sort_keys=True)),
    "minijinja": escaped(json.dumps(tool)),
}
raise SystemExit(0 if seen == expected else 1)
PROGRAM
