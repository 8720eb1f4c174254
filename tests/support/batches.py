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

FORM_TYPE: Final = "multipart/form-data; boundary=edge"


def form_of(data: bytes, *, purpose: str = "batch", file_first: bool = False) -> bytes:
    """The body of a form that uploads a file."""
    parts = [
        b'--edge\r\ncontent-disposition: form-data; name="purpose"\r\n\r\n%b\r\n' % purpose.encode(),
        b'--edge\r\ncontent-disposition: form-data; name="file"; filename="lines.jsonl"\r\n\r\n%b\r\n' % data,
    ]
    return b"".join((*(reversed(parts) if file_first else parts), b"--edge--\r\n"))
