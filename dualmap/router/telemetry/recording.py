"""Recording live traffic: when requests came, how long they were, which prefixes they shared; never any text.

One line a finished request, as it finishes, in files of this replica's own. ``dualmap record`` makes one trace
(Mooncake's format) out of the files of all replicas. Hashes of blocks and of runs are salted: without the salt, a
reader of the file cannot confirm a guess at a prompt. Each line names its salt by a fingerprint, as hashes of different
salts cannot be compared.

A recording is bounded: a replica keeps two files, and begins the older one again when the newer one has half of what it
may write. Of each hour it records the first minutes, so that all replicas record the same ones, and whole: a sample of
requests would be another load, and would share other prefixes.
"""

from __future__ import annotations

import logging
import secrets
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import BinaryIO

import orjson
import xxhash

from dualmap.router.settings import RouterSettings
from dualmap.scheduling.prompts.chain import Chain

log = logging.getLogger(__name__)


HOUR_S = 3600


@dataclass(kw_only=True, frozen=True, slots=True)
class Recorded:
    """A request that was answered, as far as it is recorded. Times in seconds since it was received."""

    received_unix_s: float
    chain: Chain
    prompt_tokens: int
    output_tokens: int
    duration_s: float
    """Time until its answer had ended."""
    ttft_s: float | None = None
    """None: its first token was not seen."""
    cached_tokens: int | None = None
    """Prompt tokens that its instance found in its cache; None: it does not say."""
    slo_s: float | None = None
    """The TTFT SLO that it named."""
    tenant: str = ""
    priority: str = ""
    """The name of its priority class, where there are any."""
    adapter: str = ""
    run: str = ""
    """The agent of a run whose turn it is, as 64 bits of hash in hexadecimal digits; empty: none that is known."""


class TrafficRecorder:
    """Appends whole lines to the files of one replica, one write each. Stops, and logs it once, when they cannot be
    written."""

    def __init__(self, path: Path, salt: str, *, max_bytes: int = 1 << 30, minutes_of_hour: int = 60) -> None:
        """``path`` is that of the newer file; the older one ends in ``.old.jsonl`` beside it.

        Raises:
            OSError: the file cannot be opened.
        """
        self._path = path
        self._older = path.with_suffix(f".old{path.suffix}")
        self._most_bytes = max_bytes // 2
        self._recorded_s = minutes_of_hour * 60
        self._file: BinaryIO | None = path.open("ab", buffering=0)
        self._written = path.stat().st_size
        self._seed = xxhash.xxh3_64_intdigest(salt.encode())
        self._fingerprint = sha256(salt.encode()).hexdigest()[:8]  # enough to tell salts apart, not to find one

    def record(self, request: Recorded) -> None:
        """Record one request, if it was received in the part of the hour that is recorded; never raises."""
        if self._file is None or request.received_unix_s % HOUR_S >= self._recorded_s:
            return
        line = orjson.dumps(self._row(request), option=orjson.OPT_APPEND_NEWLINE)
        try:
            if self._written and self._written + len(line) > self._most_bytes:
                self._begin_again()
            self._file.write(line)
            self._written += len(line)
        except OSError as error:
            log.error("recording stops, its file cannot be written: %s", error)
            self.close()

    def _row(self, request: Recorded) -> dict[str, object]:
        """What was measured, and fields that say nothing, are left out."""
        optional = {
            "slo_ttft_ms": _milliseconds(request.slo_s),
            "tenant": request.tenant or None,
            "priority": request.priority or None,
            "adapter": request.adapter or None,
            "session_id": self._salted(int(request.run, 16)) if request.run else None,
            "ttft_ms": _milliseconds(request.ttft_s),
            "duration_ms": _milliseconds(request.duration_s),
            "cached_tokens": request.cached_tokens,
        }
        return {
            "timestamp": round(request.received_unix_s * 1000),
            "input_length": request.prompt_tokens,
            "output_length": request.output_tokens,
            "hash_ids": [self._salted(block_hash) for block_hash in request.chain.hashes],
            "block_tokens": request.chain.block_tokens,
            "salt": self._fingerprint,
        } | {name: value for name, value in optional.items() if value is not None}

    def _begin_again(self) -> None:
        """Put the newer file in the place of the older one. Raises OSError."""
        assert self._file is not None
        self._file.close()
        self._path.replace(self._older)
        self._file, self._written = self._path.open("ab", buffering=0), 0

    def _salted(self, number: int) -> int:
        """63 bits, which every reader's signed integers hold."""
        return xxhash.xxh3_64_intdigest(number.to_bytes(8, "big"), self._seed) >> 1

    def close(self) -> None:
        file, self._file = self._file, None
        if file is not None:
            file.close()


def _milliseconds(time_s: float | None) -> int | None:
    return None if time_s is None else round(time_s * 1000)


def open_recorder(settings: RouterSettings, replica_id: str) -> TrafficRecorder | None:
    """The recorder, if the settings want one; else None.

    Raises:
        OSError: the folder or the file cannot be written.
    """
    if settings.record_dir is None:
        return None
    folder = Path(settings.record_dir)
    folder.mkdir(parents=True, exist_ok=True)
    salt = settings.record_salt.get_secret_value() if settings.record_salt else secrets.token_hex(16)
    return TrafficRecorder(
        folder / f"{replica_id.replace(':', '_')}.jsonl",
        salt,
        max_bytes=settings.record_max_bytes,
        minutes_of_hour=settings.record_minutes_of_hour,
    )
