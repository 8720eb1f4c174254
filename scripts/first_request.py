"""Runs the `dualmap` beside this Python: a fleet with emulated instances, and one request that it answers.

It needs nothing but the standard library, and finds no checkout, as it runs in an empty folder. `scripts/check-release`
runs it in the environment of a wheel, and in an image by
`docker run --rm --interactive --entrypoint python3 IMAGE - <scripts/first_request.py`.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path
from typing import Any

READY_S = 120.0
ANSWER_S = 30.0
STOP_S = 30.0


def main() -> None:
    dualmap = Path(sys.executable).parent / "dualmap"
    with tempfile.TemporaryDirectory(prefix="first-request-") as name:
        folder = Path(name)
        kept = {key: text for key, text in os.environ.items() if key not in ("PYTHONPATH", "PYTHONHOME")}
        environment = {**kept, "HOME": name, "XDG_RUNTIME_DIR": name, "PYTHONUNBUFFERED": "1"}
        version = subprocess.run(
            [dualmap, "--version"], cwd=folder, env=environment, check=True, capture_output=True, text=True, timeout=60
        ).stdout.split()[-1]
        command = [dualmap, "up", "--replicas", "2", "--instances", "2", "--port", "0"]
        with (folder / "output").open("wb") as output:
            fleet = subprocess.Popen(command, cwd=folder, env=environment, stdout=output, stderr=output)
        try:
            ask(fleet, folder / "output", version)
            fleet.send_signal(signal.SIGINT)
            if fleet.wait(STOP_S) not in (0, 130):
                raise SystemExit(f"dualmap up ended with {fleet.returncode}:\n{read(folder / 'output')}")
        finally:
            if fleet.poll() is None:
                fleet.kill()
                fleet.wait()
    print(f"dualmap {version} started a fleet and answered a request")


def ask(fleet: subprocess.Popen[bytes], output: Path, version: str) -> None:
    endpoint, model = found_in(fleet, output)
    running = fetched(f"{endpoint}/version")["version"]
    if running != version:
        raise SystemExit(f"`dualmap --version` says {version}, and its router {running}")
    body = {"model": model, "messages": [{"role": "user", "content": "Say a word."}], "max_tokens": 4}
    answer = fetched(f"{endpoint}/v1/chat/completions", body)
    if not answer["choices"][0]["message"]["content"] or not answer["usage"]["completion_tokens"]:
        raise SystemExit(f"the request has no answer: {answer}")


def found_in(fleet: subprocess.Popen[bytes], output: Path) -> tuple[str, str]:
    """The endpoint and the model of a fleet, once it is ready."""
    end_s = time.monotonic() + READY_S
    while fleet.poll() is None and time.monotonic() < end_s:
        text = read(output)
        endpoint, model = re.search(r"endpoint +(\S+)/v1", text), re.search(r"model '([^']+)'", text)
        if "Try it:" in text and endpoint and model:
            return endpoint[1], model[1]
        time.sleep(0.1)
    raise SystemExit(f"the fleet is not ready after {READY_S:g} s, or ended:\n{read(output)}")


def fetched(url: str, body: Any = None) -> Any:
    content = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, content, {"content-type": "application/json"})
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(request, timeout=ANSWER_S) as response:
        return json.load(response)


def read(output: Path) -> str:
    return output.read_text("utf-8", "replace")


if __name__ == "__main__":
    main()
