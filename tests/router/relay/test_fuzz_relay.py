"""The native relay under sanitizers, fed with streams that are nearly right.

``fuzz/harness.c`` has the relay's own source, compiled without Python under AddressSanitizer and
UndefinedBehaviorSanitizer; every read lies in memory of its own size. What it makes of each stream is compared with
what went in. More streams than by default: ``DUALMAP_FUZZ_STREAMS=200000 DUALMAP_FUZZ_SEED=7 scripts/test
tests/router/relay/test_fuzz_relay.py``.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import struct
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from random import Random
from typing import Final

import pytest

from dualmap.router.relay.event_log import unpack
from dualmap.router.relay.relay import EVENTS, HIDE_IDS, HIDE_USAGE, KEEP, MESSAGES, RESPONSES

ROOT: Final = Path(__file__).parents[3]
HARNESS: Final = Path(__file__).parent / "fuzz" / "harness.c"
SANITIZERS: Final = ("-fsanitize=address,undefined", "-fno-sanitize-recover=all")
STREAMS: Final = int(os.environ.get("DUALMAP_FUZZ_STREAMS", "2000"))
SEED: Final = int(os.environ.get("DUALMAP_FUZZ_SEED", "1"))
READ_BYTES: Final = 64 << 10
TAIL_BYTES: Final = 4096
MARK: Final = b'finish_reason":null'
MARK_FIELD: Final = b'"' + MARK
IDS: Final = re.compile(rb'token_ids":\[[^\]]*\]')
CHAT, MESSAGE, RESPONSE = (
    b"data: {",
    b"event: content_block_delta\ndata: {",
    b"event: response.output_text.delta\ndata: {",
)
PARTS: Final = (
    MARK_FIELD,
    b'"finish_reason": null',
    b'"finish_reason":"stop"',
    b'"token_ids":[1,22,333]',
    b'"token_ids":[]',
    b'"token_ids":[',
    b'"token_ids": [1]',
    b'"token_ids":null',
    b'"usage":{"prompt_tokens":3}',
    b'"usage":null',
    b'\\"usage\\":{',
    b'"error":{}',
    b'\\"error\\"',
    b'"abort"',
    b'"recomputed"',
    b'"response.failed"',
    b'"cancelled"',
    b'"message_delta"',
    b'"delta":{"content":"x"}',
    b'"',
    b"\\",
    b"}",
    b"]",
    b"\n",
    b"\r",
    b"\n\n",
    b"\0",
    b"\xff",
    b"",
)
PLAIN: Final = PARTS[0], PARTS[3], PARTS[18], PARTS[10]
FORBIDDEN: Final = re.compile(rb'(?<!\\)"(?:error|abort|recompute|response\.failed)|"finish_reason": ?"')


@dataclass(frozen=True)
class Case:
    flags: int
    log_limit: int
    reads: list[bytes]

    @property
    def wire(self) -> bytes:
        return b"".join(self.reads)

    def packed(self) -> bytes:
        head = struct.pack("=4I", self.flags, self.log_limit, len(MARK), len(self.reads))
        return head + MARK + b"".join([struct.pack("=I", len(read)) + read for read in self.reads])


def begin_of(flags: int) -> bytes:
    return MESSAGE if flags & MESSAGES else RESPONSE if flags & RESPONSES else CHAT


def event(random: Random, flags: int) -> bytes:
    begin = begin_of(flags)
    if random.random() < 0.03:
        begin = random.choice((CHAT, MESSAGE, RESPONSE, b": ping", b"data: [DONE]", b"data:{", b""))
    odd = random.random() < 0.05
    parts = [random.choice(PARTS if odd else PLAIN) for _ in range(random.randint(0, 4))]
    if random.random() < 0.9:
        parts.append(PARTS[0])
    if random.random() < 0.05:
        parts.insert(0, random.choice((b'"t":"%b"', b"%b")) % (b"x" * random.choice((10, 2000, 5000, 33_000, 70_000))))
    end = b"\n\n" if random.random() < 0.97 else random.choice((b"\n", b"\r\n\r\n", b"\n\n\n", b""))
    return begin + b",".join(parts) + b"}" + end


def chunk(random: Random, data: bytes) -> bytes:
    size = f"{len(data):x}" if random.random() < 0.9 else f"{len(data):06X}"
    framed = size.encode() + b"\r\n" + data + b"\r\n"
    if random.random() < 0.02:
        return random.choice((b"0\r\n\r\n", b"ffffff\r\n" + data, b"-1\r\n", b"7;x\r\n" + framed, framed[:-1], b"\r\n"))
    return framed


def case(random: Random) -> Case:
    kind = random.choice((0, EVENTS, EVENTS, EVENTS | MESSAGES, EVENTS | RESPONSES))
    flags = kind
    if kind:
        flags |= random.choice((0, KEEP, KEEP | HIDE_IDS)) | random.choice((0, HIDE_USAGE))
    chunks = []
    for _ in range(random.choice((1, 2, 5, 20))):
        count = random.choice((1, 2, 5, 30)) if random.random() < 0.3 else 1
        data = b"".join([event(random, flags) for _ in range(count)])
        if random.random() < 0.02:  # as many events as a chunk may have, and some more
            data = begin_of(flags) + MARK_FIELD + b"}\n\n"
            data *= random.randint(250, 260)
        chunks.append(chunk(random, data))
    wire = bytearray(b"".join(chunks))
    if random.random() < 0.2:  # a byte that is wrong
        for _ in range(random.randint(1, 3)):
            wire[random.randrange(len(wire))] = random.choice((0, 10, 13, 34, 48, 91, 92, 93, 255))
    cuts = [0, len(wire)] + [random.randrange(len(wire) + 1) for _ in range(random.choice((0, 1, 3, 12)))]
    cuts += [*range(0, len(wire), READ_BYTES)]
    places = sorted(set(cuts))
    reads = [bytes(wire[start:stop]) for start, stop in pairwise(places)]
    return Case(flags, random.choice((0, 100, 5000, 1 << 20)), reads)


@pytest.fixture(scope="module")
def harness(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The harness, compiled."""
    return compiled(ROOT / "dualmap" / "router" / "relay", tmp_path_factory.mktemp("fuzz"))


def compiled(sources: Path, folder: Path) -> Path:
    compiler = shlex.split(os.environ.get("CC", "cc"))
    if not sys.platform.startswith("linux") or shutil.which(compiler[0]) is None:
        pytest.skip("the fuzzer of the relay needs Linux and a C compiler; set CC")
    probe, made = folder / "probe.c", folder / "harness"
    probe.write_text("int main(void) { return 0; }\n")
    done = subprocess.run([*compiler, *SANITIZERS, str(probe), "-o", str(folder / "probe")], capture_output=True)
    if done.returncode or subprocess.run([folder / "probe"], capture_output=True).returncode:
        pytest.skip(f"the fuzzer of the relay needs a C compiler with sanitizers: {' '.join(SANITIZERS)} does not work")
    how = ["-g", "-O1", "-std=gnu11", "-pthread", f"-I{HARNESS.parent}", f"-I{sources}"]
    built = subprocess.run(
        [*compiler, *SANITIZERS, *how, str(HARNESS), "-o", str(made)], capture_output=True, text=True
    )
    assert built.returncode == 0, built.stderr
    return made


def results(output: bytes) -> Iterator[list[bytes]]:
    """The seven fields of each stream."""
    at, fields = 0, list[bytes]()
    while at < len(output):
        (size,) = struct.unpack_from("=I", output, at)
        fields.append(output[at + 4 : at + 4 + size])
        at += 4 + size
        if len(fields) == 7:
            yield fields
            fields = []


def chunks_of(wire: bytes) -> list[bytes]:
    """The data of whole chunks."""
    found = []
    while wire:
        size, _, rest = wire.partition(b"\r\n")
        length = int(size, 16)
        assert rest[length : length + 2] == b"\r\n"
        found.append(rest[:length])
        wire = rest[length + 2 :]
    return found


def check(case: Case, fields: list[bytes]) -> int:
    """Compare what came of a stream with what went in; returns the chunks that passed."""
    reason, got, unread, tail, log, counted, outputs = fields
    assert case.wire.endswith(unread)
    passed = chunks_of(case.wire[: len(case.wire) - len(unread)])
    body, seen = b"".join(passed), b"".join(chunks_of(got))
    assert struct.unpack("=Q", counted) == (len(passed),) and tail == seen[-TAIL_BYTES:]
    assert seen == (IDS.sub(b'token_ids":null', body) if case.flags & HIDE_IDS else body)
    assert b"".join(unpack(log)) == (body if case.flags & KEEP else b"")
    assert len(log) <= case.log_limit
    events = body.split(b"\n\n")[:-1]
    if case.flags & EVENTS:
        assert FORBIDDEN.search(body) is None and b"\r" not in body
        assert not (case.flags & HIDE_USAGE and b'"usage"' in body)
    else:
        assert all(each.endswith(b"\n\n") and (len(each) <= 2048 or b'"usage"' not in each) for each in passed)
    expected = len(events) if case.flags & (MESSAGES | RESPONSES) else body.count(MARK)
    assert struct.unpack("=Q", outputs) == (expected,)
    still = struct.unpack("=i", reason) == (-1,)
    assert not still or len(unread) <= (32 << 10) + 16, "no more waits for its end than is allowed"
    return len(passed)


@pytest.mark.timeout(600)
def test_streams_that_are_nearly_right_pass_or_come_back_whole(harness: Path, tmp_path: Path) -> None:
    random = Random(SEED)
    passed = 0
    for start in range(0, STREAMS, 1000):
        cases = [case(random) for _ in range(min(1000, STREAMS - start))]
        given, made = tmp_path / "streams", tmp_path / "results"
        given.write_bytes(struct.pack("=I", len(cases)) + b"".join([each.packed() for each in cases]))
        done = subprocess.run([harness, given, made], capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stderr
        found = [*results(made.read_bytes())]
        assert len(found) == len(cases)
        passed += sum(map(check, cases, found))
    assert passed > STREAMS, "most streams have chunks that pass"
