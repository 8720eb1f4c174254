#!/bin/sh
# haystack-ai 3.4.1 from PyPI: an `Agent` with a system prompt, over several questions of one conversation.
#
# Guess: `agent.run(messages=result["messages"] + [question])` goes on where the last run ended: the next prompt begins
# with the last one.
# Seen: `result["messages"]` holds the system prompt, and the run puts it in front once more: two in the second turn,
# three in the third.
# For users: prompts differ from the end of the first system message on, so no turn finds more than that in the
# engine's cache, and each one computes the whole conversation; templates that allow one system message alone refuse
# the second turn. Leave it out: `[each for each in result["messages"] if not each.is_from("system")]`
# (docs/getting-started/clients.md).
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv" && "$folder/venv/bin/pip" install -q --disable-pip-version-check \
  haystack-ai==3.4.1 openai==3.57.0 || exit 2
HAYSTACK_TELEMETRY_ENABLED=False "$folder/venv/bin/python" - <<'PROGRAM'
import http.server, json, threading
from haystack.components.agents import Agent
from haystack.components.generators.chat import OpenAIChatGenerator
from haystack.dataclasses import ChatMessage
from haystack.tools import tool
from haystack.utils import Secret

prompts = []

class Serving(http.server.BaseHTTPRequestHandler):
    def do_POST(self):
        prompts.append(json.loads(self.rfile.read(int(self.headers["content-length"])))["messages"])
        choice = {"index": 0, "message": {"role": "assistant", "content": "It is so."}, "finish_reason": "stop"}
        answer = {"id": "c", "object": "chat.completion", "created": 1, "model": "m", "choices": [choice]}
        self.send_response(200)
        self.send_header("content-type", "application/json")
        self.end_headers()
        self.wfile.write(json.dumps(answer).encode())

    def log_message(self, *_):
        pass

server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Serving)
threading.Thread(target=server.serve_forever, daemon=True).start()
url = f"http://127.0.0.1:{server.server_port}/v1"

@tool
def weather(city: str) -> str:
    """The weather of a city."""
    return "fine"

def roles_of(kept):
    """The roles of the messages of three prompts, where `kept` chooses what goes from one run into the next."""
    generator = OpenAIChatGenerator(model="m", api_base_url=url, api_key=Secret.from_token("k"))
    agent = Agent(chat_generator=generator, tools=[weather], system_prompt="Be kind.")
    prompts.clear()
    messages = []
    for question in ("First?", "Second?", "Third?"):
        result = agent.run(messages=[*messages, ChatMessage.from_user(question)])
        messages = [each for each in result["messages"] if kept(each)]
    return [[message["role"] for message in prompt] for prompt in prompts]

whole = roles_of(lambda message: True)
without = roles_of(lambda message: not message.is_from("system"))
for name, found in (("whole", whole), ("without system messages", without)):
    for roles in found:
        print(f"{name}: {' '.join(roles)}")
ends = [[], ["assistant", "user"], ["assistant", "user"] * 2]
expected = [["system"] * (turn + 1) + ["user"] + end for turn, end in enumerate(ends)], [["system", "user"] + end for end in ends]
raise SystemExit(0 if (whole, without) == expected else 1)
PROGRAM
