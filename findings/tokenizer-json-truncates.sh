#!/bin/sh
# tokenizers 0.23.3, fastokens 0.3.5 and transformers 5.24.0 from PyPI, on one tokenizer.json.
#
# Guess: the three give the same tokens for the same text; they read the same file.
# Seen: a tokenizer.json may hold `truncation` and `padding`, as those of many embedding and rerank models do.
# tokenizers and fastokens obey them: with 16 in the file a text of 70 tokens has 16, and one of 2 tokens has 16.
# transformers, which engines use, resets both at each call: 70 and 2.
# For users: a router that counts with tokenizers believes that every prompt of such a model has one fixed length:
# limits and meters are wrong, and long prompts with a common head look equal. Call `no_truncation()` and
# `no_padding()` after loading, as the fleet does; fastokens has no such calls, so give it the JSON that tokenizers
# writes after them.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv" && "$folder/venv/bin/pip" install -q --disable-pip-version-check \
  tokenizers==0.23.3 fastokens==0.3.5 transformers==5.24.0 || exit 2
"$folder/venv/bin/python" - "$folder" <<'PROGRAM'
import json, pathlib, sys
import fastokens, tokenizers, transformers
from tokenizers import decoders, models, pre_tokenizers, trainers

made = tokenizers.Tokenizer(models.BPE())
made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
made.decoder = decoders.ByteLevel()
alphabet = pre_tokenizers.ByteLevel.alphabet()
trainer = trainers.BpeTrainer(vocab_size=400, special_tokens=["<|end|>"], initial_alphabet=alphabet, show_progress=False)
made.train_from_iterator(["hello world this is a test of the tokenizer "] * 50, trainer)
made.enable_truncation(16)
made.enable_padding(length=16, pad_id=0, pad_token="<|end|>")
model = pathlib.Path(sys.argv[1], "model")
model.mkdir()
made.save(str(model / "tokenizer.json"))
(model / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}))

file = str(model / "tokenizer.json")
whole = tokenizers.Tokenizer.from_file(file)
whole.no_truncation()
whole.no_padding()
readers = {
    "tokenizers": tokenizers.Tokenizer.from_file(file).encode,
    "fastokens": fastokens.Tokenizer.from_file(file).encode,
    "transformers": transformers.AutoTokenizer.from_pretrained(model).encode,
    "tokenizers after no_truncation and no_padding": whole.encode,
    "fastokens from the JSON of that": fastokens.Tokenizer.from_json_str(whole.to_str()).encode,
}
seen = {}
for name, encode in readers.items():
    found = [encode(text) for text in ("hello world this is a test " * 10, "hi")]
    seen[name] = [len(getattr(each, "ids", each)) for each in found]
    print(f"{name}: {seen[name]} tokens")
cut, full = [16, 16], [70, 2]
raise SystemExit(0 if list(seen.values()) == [cut, cut, full, full, full] else 1)
PROGRAM
