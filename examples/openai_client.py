"""The OpenAI client against a fleet: an SLO for each request, and what the answer says of its placement.

.venv/bin/pip install openai
.venv/bin/python examples/openai_client.py [http://127.0.0.1:8000/v1]
"""

import sys

from openai import OpenAI

url = sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8000/v1"
client = OpenAI(base_url=url, api_key="any")
model = client.models.list().data[0].id

for question, slo_ms in (("Hello!", 500), ("Tell me about consistent hashing, at length.", 10_000)):
    stream = client.chat.completions.with_raw_response.create(
        model=model,
        messages=[{"role": "system", "content": "You are brief. " * 80}, {"role": "user", "content": question}],
        max_tokens=32,
        stream=True,
        extra_headers={"x-slo-ttft-ms": str(slo_ms)},
    )
    headers = stream.headers
    words = [chunk.choices[0].delta.content or "" for chunk in stream.parse() if chunk.choices]
    print(f"{headers['x-request-id']} on {headers['x-dualmap-instance']}: {''.join(words)!r}")
    print(f"  {headers['x-dualmap-cached-tokens']} tokens of its prompt were expected in the cache there")
    print(f"  first token expected in {headers['x-dualmap-expected-ttft-ms']} ms, wanted in {slo_ms} ms")
print(f"Why there? .venv/bin/dualmap explain {headers['x-request-id']}, or {url.removesuffix('/v1')}/ui")
