"""Reading bodies that are not long, at once. Of those with plain messages, what follows from the object around the
messages is computed once for all requests that have the same one."""

from __future__ import annotations

import secrets
from collections import Counter
from collections.abc import Mapping
from functools import lru_cache, partial
from typing import Any, Final

from xxhash import xxh3_64_intdigest, xxh3_128_intdigest

from dualmap.api_bodies.listed_json import read_frame
from dualmap.api_bodies.plain_list import NAMES, Api, plain_list
from dualmap.router.http.admission import (
    LONG_BODY_BYTES,
    MAX_PROMPT_PARTS,
    check_responses,
    is_form,
    read_at_once,
    read_head,
    said_by,
    token_source,
)
from dualmap.router.http.doubled_fields import RULED_FIELDS, may_be_doubled, names_of
from dualmap.router.http.request_reader import ClientRequest
from dualmap.router.kept import Kept
from dualmap.router.prompts.inference_request import (
    CHAT_PATH,
    MESSAGES_PATH,
    RESPONSES_PATH,
    InferenceRequest,
    SentPrompt,
)
from dualmap.router.prompts.prompt import sent_prompt
from dualmap.scheduling.prompts.blocks import TextPrompt
from dualmap.scheduling.values import replaced, value

MAX_FRAME_BYTES: Final = 8 << 20
"""Most memory for frames: some thousand of usual ones."""
_FRAME_FACTOR: Final = 6
_FRAME_BYTES: Final = 3000
"""Upper bounds of the memory of a frame: by its bytes, and of what every one has."""

_APIS: Final = {CHAT_PATH: Api.CHAT, MESSAGES_PATH: Api.MESSAGES, RESPONSES_PATH: Api.RESPONSES}
_SEED: Final = secrets.randbits(64)
_ONLY: Final = secrets.token_hex(16)
_QUOTED_ONLY: Final = b'"%b"' % _ONLY.encode()
"""What a frame has in place of its messages."""
_USUAL: Final = (b"application/json", None)
_MESSAGE: Final = {"role": "user", "content": "."}
_RENDERED: Final = b"\xffuser\xfe."
"""The message as a prompt has it."""


@value
class Frame:
    """The object around plain messages, and what follows from it."""

    fields: Mapping[str, Any]
    """Its fields, with a message that stands for all. They are not changed."""
    read: InferenceRequest
    """A request with this frame, but for what its header says and for its prompt."""
    sent: SentPrompt
    """Its prompt, without text."""
    head: bytes
    """What the prompt has before the messages: tools, a system prompt of its own."""
    is_tokenizable: bool


class ShortBodies:
    """Reads requests whose bodies are not long, and keeps the frames of those with plain messages."""

    def __init__(self, *, trusts_transfers: bool, max_frame_bytes: int = MAX_FRAME_BYTES) -> None:
        self.trusts_transfers = trusts_transfers
        self._frames = Kept[int, Frame](max_frame_bytes)

    @property
    def frames(self) -> int:
        """The number of frames that are kept."""
        return len(self._frames)

    def read(self, request: ClientRequest, request_id: str) -> InferenceRequest | None:
        """The inference request of a client, whatever its path; see ``read_at_once``, which reads it to the same
        result."""
        body, path = request.body, request.path
        api = _APIS.get(path)
        # As many bytes have too few messages and parts to be beyond ``MAX_PROMPT_PARTS``.
        if api is not None and len(body) <= LONG_BODY_BYTES and not _is_other(request):
            found = plain_list(body, api, _QUOTED_ONLY)
            if found is not None:
                frame = self._frame(request, found.frame, api)
                if frame is not None:
                    return _read_with(frame, request, request_id, found.text)
        return read_at_once(request, request_id, self.trusts_transfers)

    def _frame(self, request: ClientRequest, text: bytes, api: Api) -> Frame | None:
        """The frame with this text; None where it has to be read with its messages.

        Raises:
            NotFoundError: it is for a stored response that no instance of this fleet has, or another tenant's.
        """
        caller = request.caller
        key = xxh3_128_intdigest(text, _whose(request.path, "" if caller is None else caller.tenant.name))
        frame = self._frames.get(key)
        if frame is None:
            frame = _new_frame(request, text, api, self.trusts_transfers)
            if frame is not None:
                self._frames.keep(key, frame, _FRAME_FACTOR * len(text) + _FRAME_BYTES)
        return frame


@lru_cache(maxsize=1024)
def _whose(path: str, tenant: str) -> int:
    """What the hashes of a tenant's frames begin with: no body shows whether another tenant has sent its frame."""
    return xxh3_64_intdigest(f"{path}\n{tenant}".encode("utf-8", "surrogatepass"), _SEED)


def _is_other(request: ClientRequest) -> bool:
    """Whether the body is said to be something else than JSON."""
    kind = request.get(b"content-type")
    return request.get(b"content-encoding") is not None or (kind not in _USUAL and is_form(request))


def _new_frame(request: ClientRequest, text: bytes, api: Api, trusts_transfers: bool) -> Frame | None:
    name, path = NAMES[api], request.path
    try:
        fields = read_frame(text, name, _ONLY)
        doubled = frozenset[str]()
        if may_be_doubled(text, fields, RULED_FIELDS):
            counts = Counter(names_of(text))
            doubled = frozenset(each for each in RULED_FIELDS if counts[each] > 1)
    except ValueError:  # it is none, or nested too deeply to say
        return None
    fields[name] = [_MESSAGE]
    sent = sent_prompt(path, fields, max_parts=MAX_PROMPT_PARTS)
    if sent is None or not isinstance(sent.prompt, TextPrompt) or sent.prompt.unread:
        return None
    rendered = sent.prompt.data
    assert rendered.endswith(_RENDERED)
    if api is Api.RESPONSES:
        check_responses(request, fields)
    read = said_by(path, fields, sent, trusts_transfers=trusts_transfers)
    read.prompt, read.doubled = None, doubled
    nothing = replaced(sent, prompt=TextPrompt(b""), source=None)
    return Frame(fields, read, nothing, rendered[: -len(_RENDERED)], sent.source is not None)


def _read_with(frame: Frame, request: ClientRequest, request_id: str, text: bytes) -> InferenceRequest:
    """The request of a client with this frame around its messages."""
    prompt = TextPrompt(frame.head + text if frame.head else text)
    late = partial(token_source, request.path, request.body, prompt) if frame.is_tokenizable else None
    read = replaced(frame.read, request_id=request_id, prompt=replaced(frame.sent, prompt=prompt, late_source=late))
    read_head(read, request, frame.fields)
    return read


_MOST_PARTS: Final = LONG_BODY_BYTES // len(b'{"role":""},')
assert _MOST_PARTS < MAX_PROMPT_PARTS
