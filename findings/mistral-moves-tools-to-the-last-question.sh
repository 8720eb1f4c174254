#!/bin/sh
# mistral-common 1.13.1 from PyPI, the renderer that vLLM uses for Mistral's models in their own format, with the
# tokenizers that it ships.
#
# Guess: tools and system prompt stand at the beginning of a prompt, so the next question of a conversation goes on
# behind what the engine has in its cache, and all users of one assistant share its beginning.
# Seen: up to version 11 of the format the tools stand in front of the last question and move with each new one; up to
# version 3 the system prompt does, too. The result of a tool changes nothing, a new question does: of 2,000 tokens that
# were computed before it, it shares the first 21 (versions 7 and 11) or 1 (version 3). In version 13 both stay at the
# front.
# For users: with these models (`version` in tekken.json, or the end of a file's name) each question computes the tools
# and the last turn again, and a long system prompt or set of tools is shared by first questions alone. Agents of many
# tools cost less with a model of version 13. The fleet counts such prompts as they are rendered
# (docs/operate/tokens.md).
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv" && "$folder/venv/bin/pip" install -q --disable-pip-version-check \
  "mistral-common[sentencepiece]==1.13.1" || exit 2
"$folder/venv/bin/python" - <<'PROGRAM'
import json, pathlib, sys, tempfile
import mistral_common
from mistral_common.protocol.instruct.request import ChatCompletionRequest
from mistral_common.tokens.tokenizers.base import SpecialTokens
from mistral_common.tokens.tokenizers.mistral import MistralTokenizer
from mistral_common.tokens.tokenizers.tekken import Tekkenizer

data = pathlib.Path(mistral_common.__file__).parent / "data"

def of_version(version):
    """The tokenizer of a tekken.json of a later version, with the words of the one that is shipped."""
    file = json.loads((data / "tekken_240911.json").read_text())
    names = [each["token_str"] for each in Tekkenizer.DEPRECATED_SPECIAL_TOKENS]
    names += [each.value for each in SpecialTokens if each.value not in names]
    file["config"]["version"] = version
    file["special_tokens"] = [{"rank": rank, "token_str": name, "is_control": True} for rank, name in enumerate(names)]
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder, "tekken.json")
        path.write_text(json.dumps(file))
        return MistralTokenizer.from_file(str(path))

tokenizers = {
    "version 3": MistralTokenizer.from_file(str(data / "tekken_240911.json")),
    "version 7": MistralTokenizer.from_file(str(data / "mistral_instruct_tokenizer_241114.model.v7")),
    "version 11": of_version("v11"),
    "version 13": of_version("v13"),
}
city = {"type": "object", "properties": {"city": {"type": "string", "description": "A city in any country."}}}
tools = [
    {"type": "function", "function": {"name": f"tool_{n}", "description": "Says what is known of a city.", "parameters": city}}
    for n in range(30)
]
first = [
    {"role": "system", "content": "You help people who travel, briefly and kindly, in their own language, always."},
    {"role": "user", "content": "What is the weather in Bern?"},
]
call = {"id": "abcdefghi", "type": "function", "function": {"name": "tool_1", "arguments": '{"city": "Bern"}'}}
called = [*first, {"role": "assistant", "content": "", "tool_calls": [call]}]
called.append({"role": "tool", "tool_call_id": "abcdefghi", "name": "tool_1", "content": "It is fine."})
second = [*called, {"role": "assistant", "content": "It is fine in Bern."}, {"role": "user", "content": "And in Rome?"}]

seen = {}
for name, tokenizer in tokenizers.items():
    def tokens(messages):
        request = ChatCompletionRequest.from_openai(messages=messages, tools=tools)
        return tokenizer.encode_chat_completion(request).tokens

    def shared(earlier, later):
        pairs = zip(tokens(earlier), tokens(later))
        return next((at for at, (one, other) in enumerate(pairs) if one != other), len(tokens(earlier)))

    computed = len(tokens(called))
    seen[name] = (shared(first, called) == len(tokens(first)), shared(called, second), computed)
    print(f"{name}: the result of a tool keeps the prefix: {seen[name][0]}; a new question shares {seen[name][1]} of {computed} tokens")
moved = all(seen[name][1] < 30 for name in ("version 3", "version 7", "version 11"))
kept = seen["version 13"][1] == seen["version 13"][2]
raise SystemExit(0 if moved and kept and seen["version 3"][1] < 3 and all(each[0] for each in seen.values()) else 1)
PROGRAM
