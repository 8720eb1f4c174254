"""The form by which a client uploads a file, cut anywhere."""

from __future__ import annotations

import pytest

from dualmap.router.batches.upload_form import UploadForm
from dualmap.router.errors import InvalidRequestError
from tests.support.batches import FORM_TYPE, form_of


@pytest.mark.parametrize("size", [1, 7, 100, 10_000])
@pytest.mark.parametrize("file_first", [False, True])
def test_a_form_is_read_the_same_however_it_is_cut(size: int, file_first: bool) -> None:
    data = b"{}\r\n--boundary\r\n" * 20
    body, form, found = form_of(data, file_first=file_first), UploadForm(FORM_TYPE), b""

    for start in range(0, len(body), size):
        found += form.feed(body[start : start + size])
    form.end()

    assert found == data
    assert form.fields == {"purpose": "batch"}
    assert form.file_name == "lines.jsonl"


def test_a_body_that_is_no_form_is_refused() -> None:
    for content_type in ("", "application/json", "multipart/form-data"):
        with pytest.raises(InvalidRequestError, match="multipart/form-data"):
            UploadForm(content_type)
    with pytest.raises(InvalidRequestError, match="not valid"):
        UploadForm(FORM_TYPE).feed(b"{}")
    with pytest.raises(InvalidRequestError, match="not valid"):
        UploadForm(f"multipart/form-data; boundary={'x' * 5000}")


def test_a_form_that_is_not_whole_or_has_no_file_is_refused() -> None:
    cut = UploadForm(FORM_TYPE)
    cut.feed(form_of(b"{}")[:-6])
    with pytest.raises(InvalidRequestError, match="breaks off"):
        cut.end()
    empty = UploadForm(FORM_TYPE)
    empty.feed(b'--edge\r\ncontent-disposition: form-data; name="purpose"\r\n\r\nbatch\r\n--edge--\r\n')
    with pytest.raises(InvalidRequestError, match="has no file"):
        empty.end()


def test_a_form_has_one_file_and_little_else() -> None:
    body = form_of(b"{}")
    with pytest.raises(InvalidRequestError, match="two files"):
        UploadForm(FORM_TYPE).feed(body.removesuffix(b"--edge--\r\n") + form_of(b"{}"))
    with pytest.raises(InvalidRequestError, match="fields of the form are over"):
        UploadForm(FORM_TYPE).feed(form_of(b"{}", purpose="x" * 5000))
    fields = b"".join(b'--edge\r\ncontent-disposition: form-data; name="f%d"\r\n\r\nv\r\n' % n for n in range(20))
    with pytest.raises(InvalidRequestError, match="has over 16 fields"):
        UploadForm(FORM_TYPE).feed(fields + body)
