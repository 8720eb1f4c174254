#!/bin/sh
# langchain 1.5.2 with langchain-openai 1.7.4 and llama-index-core 0.14.25 from PyPI: an agent whose tool call is cut.
#
# Guess: an answer that ends inside of the arguments of a tool call (`finish_reason: "length"`, or vLLM's "abort") runs
# no tool: the arguments are no JSON.
# Seen: streamed, both agents complete the JSON themselves and run the tool. A call with `{"replicas": 12`, cut in front
# of the last digit of 120, sets 12 replicas; the model is then shown the tool's answer and goes on. Not streamed, the
# same answer runs nothing in langchain. Agents of pydantic-ai 2.68.0 and openai-agents 0.24.0 run nothing, streamed too.
# For users: limits on tokens, a context that is full, or an engine's shutdown change numbers, paths and texts that
# tools get, with no exception and no line in a log; a stream that a proxy ends cleanly without any reason does too.
# Check `finish_reason` before tools run. A call that an engine's failure cuts ends with an error event in the fleet, on
# which both raise (docs/getting-started/clients.md).
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv" && "$folder/venv/bin/pip" install -q --disable-pip-version-check \
  langchain==1.5.2 langchain-openai==1.7.4 llama-index-core==0.14.25 llama-index-llms-openai-like==0.8.1 || exit 2
NLTK_DATA="$folder" "$folder/venv/bin/python" - 2>"$folder/log" <<'PROGRAM' || { status=$?; cat "$folder/log" >&2; exit $status; }
import asyncio, http.server, json, threading
from langchain.agents import create_agent
from langchain_openai import ChatOpenAI
from llama_index.core.agent.workflow import FunctionAgent
from llama_index.llms.openai_like import OpenAILike

CUT = [{"index": 0, "id": "call_1", "type": "function", "function": {"name": "scale", "arguments": '{"pool": "a", "replicas": 12'}}]

class Cutting(http.server.BaseHTTPRequestHandler):
    """The first answer is cut inside of its tool call, the second says "done"."""

    first, reason = True, ""

    def do_POST(self):
        streamed = json.loads(self.rfile.read(int(self.headers["content-length"]))).get("stream")
        message = {"role": "assistant", "content": None, "tool_calls": CUT} if Cutting.first else {"role": "assistant", "content": "done"}
        reason = Cutting.reason if Cutting.first else "stop"
        Cutting.first = False
        choice = {"index": 0, "delta" if streamed else "message": message, "finish_reason": reason}
        kind = "chat.completion.chunk" if streamed else "chat.completion"
        text = json.dumps({"id": "c", "object": kind, "created": 1, "model": "m", "choices": [choice]})
        self.send_response(200)
        self.send_header("content-type", "text/event-stream" if streamed else "application/json")
        self.end_headers()
        self.wfile.write((f"data: {text}\n\ndata: [DONE]\n\n" if streamed else text).encode())

    def log_message(self, *_):
        pass

server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Cutting)
threading.Thread(target=server.serve_forever, daemon=True).start()
base, question = f"http://127.0.0.1:{server.server_port}/v1", "Scale pool a to 120 replicas."
scaled = []

def scale(pool: str, replicas: int) -> str:
    """Set the number of replicas of a pool."""
    scaled.append(replicas)
    return "scaled"

async def by_langchain(streaming):
    model = ChatOpenAI(model="m", base_url=base, api_key="k", streaming=streaming)
    return (await create_agent(model, [scale]).ainvoke({"messages": [("user", question)]}))["messages"][-1].content

async def by_llama_index(streaming):
    model = OpenAILike(model="m", api_base=base, api_key="k", is_chat_model=True, is_function_calling_model=True)
    return str(await FunctionAgent(tools=[scale], llm=model, streaming=streaming).run(question))

seen = {}
for name, ask, streaming in (("langchain", by_langchain, True), ("llama-index", by_llama_index, True), ("langchain", by_langchain, False)):
    for reason in ("length", "abort"):
        Cutting.first, Cutting.reason = True, reason
        scaled.clear()
        answer = asyncio.run(ask(streaming))
        seen[name, streaming, reason] = list(scaled)
        print(f"{name}, {'streamed' if streaming else 'whole'}, {reason}: the tool got {scaled}; the agent says {answer!r}")
raise SystemExit(0 if all(got == ([12] if streaming else []) for (_, streaming, _), got in seen.items()) else 1)
PROGRAM
