"""Recording live traffic: when requests came, how long they were, which prefixes they shared; never any text.

One line a finished request, as it finishes, in a file of this replica's own. ``dualmap record`` makes one trace
(Mooncake's format) out of the files of all replicas. Block hashes are salted: without the salt, a reader of the file
cannot confirm a guess at a prompt. Each line names its salt by a fingerprint, as hashes of different salts cannot be
compared.
"""

from __future__ import annotations

import logging
import secrets
from hashlib import sha256
from pathlib import Path
from typing import BinaryIO

import orjson
import xxhash

from dualmap.router.settings import RouterSettings
from dualmap.scheduling.prompts.chain import Chain

log = logging.getLogger(__name__)


class TrafficRecorder:
    """Appends whole lines to a file, one write each. Stops, and logs it once, when the file cannot be written."""

    def __init__(self, file: BinaryIO, salt: str) -> None:
        self._file: BinaryIO | None = file
        self._seed = xxhash.xxh3_64_intdigest(salt.encode())
        self._fingerprint = sha256(salt.encode()).hexdigest()[:8]  # enough to tell salts apart, not to find one

    def record(
        self, received_unix_s: float, chain: Chain, prompt_tokens: int, output_tokens: int, slo_s: float | None = None
    ) -> None:
        """Record one request, by the wall clock of its arrival, with its TTFT SLO; never raises."""
        if self._file is None:
            return
        row = {
            "timestamp": round(received_unix_s * 1000),
            "input_length": prompt_tokens,
            "output_length": output_tokens,
            "hash_ids": [self._salted(block_hash) for block_hash in chain.hashes],
            "block_tokens": chain.block_tokens,
            "salt": self._fingerprint,
        }
        if slo_s is not None:
            row["slo_ttft_ms"] = round(slo_s * 1000)
        try:
            self._file.write(orjson.dumps(row, option=orjson.OPT_APPEND_NEWLINE))
        except OSError as error:
            log.error("recording stops, its file cannot be written: %s", error)
            self.close()

    def _salted(self, block_hash: int) -> int:
        """63 bits, which every reader's signed integers hold."""
        return xxhash.xxh3_64_intdigest(block_hash.to_bytes(8, "big"), self._seed) >> 1

    def close(self) -> None:
        file, self._file = self._file, None
        if file is not None:
            file.close()


def open_recorder(settings: RouterSettings, replica_id: str) -> TrafficRecorder | None:
    """The recorder, if the settings want one; else None.

    Raises:
        OSError: the folder or the file cannot be written.
    """
    if settings.record_dir is None:
        return None
    folder = Path(settings.record_dir)
    folder.mkdir(parents=True, exist_ok=True)
    file = (folder / f"{replica_id.replace(':', '_')}.jsonl").open("ab", buffering=0)
    salt = settings.record_salt.get_secret_value() if settings.record_salt else secrets.token_hex(16)
    return TrafficRecorder(file, salt)
