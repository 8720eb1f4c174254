"""A batch as its client has made it."""

from __future__ import annotations

from typing import Final

from dualmap.scheduling.batches.batch import Batch

NEW_BATCH: Final = Batch(
    batch_id="batch_1",
    tenant="acme",
    key="ci",
    endpoint="/v1/completions",
    input_file="file-1",
    completion_window="24h",
    created_s=100,
    expires_s=200,
)
