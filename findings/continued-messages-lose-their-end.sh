#!/bin/sh
# transformers 5.24.0 and jinja2 3.1.6 from PyPI: `continue_final_message`, by which engines go on with an answer that
# a client has begun.
#
# Guess: the model continues the text that was given, to the character. With an empty text the prompt is that of
# `add_generation_prompt`.
# Seen: so it is with a template that writes messages as they are (ChatML). With one that trims them, as those of
# Llama 3 and Gemma 3 do, white space at the end of the text is gone, and an empty text takes the end of the header
# along: `<|end_header_id|>` stands without the two line feeds that the model was trained on.
# For users: an answer begun with "Answer: " or a line feed is continued from other tokens than the client has; put
# together, the two have the space twice or not at all. Begin answers without white space at their end, and none with
# an empty text. The fleet compares the texts where it continues answers (docs/operate/streams.md#chat-templates).
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv" && "$folder/venv/bin/pip" install -q --disable-pip-version-check \
  transformers==5.24.0 jinja2==3.1.6 || exit 2
"$folder/venv/bin/python" - "$folder" <<'PROGRAM'
import sys
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

Tokenizer(models.WordLevel({"word": 0}, unk_token="word")).save(f"{sys.argv[1]}/tokenizer.json")
tokenizer = PreTrainedTokenizerFast(tokenizer_file=f"{sys.argv[1]}/tokenizer.json")
templates = {  # the parts of the two that write messages
    "ChatML": """{% for message in messages %}<|im_start|>{{ message['role'] }}
{{ message['content'] }}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}""",
    "Llama 3": r"""{%- for message in messages %}
{{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n' + message['content'] | trim + '<|eot_id|>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{%- endif %}""",
}
question = {"role": "user", "content": "2 + 2?"}
seen = {}
for name, template in templates.items():
    begun = tokenizer.apply_chat_template([question], chat_template=template, tokenize=False, add_generation_prompt=True)
    for text in ("Answer:", "Answer: ", "Answer:\n", ""):
        messages = [question, {"role": "assistant", "content": text}]
        prompt = tokenizer.apply_chat_template(messages, chat_template=template, tokenize=False, continue_final_message=True)
        missing = (begun + text).removeprefix(prompt) if (begun + text).startswith(prompt) else None
        print(f"{name}, begun with {text!r}: the prompt ends with {prompt[-16:]!r}, missing is {missing!r}")
        seen[name, text] = missing
expected = {key: "" for key in seen} | {("Llama 3", "Answer: "): " ", ("Llama 3", "Answer:\n"): "\n", ("Llama 3", ""): "\n\n"}
raise SystemExit(0 if seen == expected else 1)
PROGRAM
