"""A prompt with images as an instance renders it: token ids, and which of them stand for which image.

An engine replaces each image by a run of placeholder tokens, whose number follows from the image's size by rules of the
model's processor, and tells blocks with placeholders apart by the image's identifier. Both depend on the image alone.
So what was once seen of an image serves every prompt that has it: such a prompt is rendered with a tiny *stand-in* in
its place, and the image's own run is put where the stand-in's is. A few models number images in their runs: two
stand-ins in one prompt show it, and what was seen of an image then serves prompts that have it at the same place.

``/v1/chat/completions/render`` takes all APIs' prompts, as the chats that they are converted to.
"""

from __future__ import annotations

from array import array
from collections.abc import Container, Iterator, Mapping, Sequence
from operator import index
from typing import Any, Final

import orjson
import xxhash

from dualmap.api_bodies.prompt import is_image
from dualmap.router.prompts.inference_request import TokenSource
from dualmap.router.tokens.instance_tokenizer import chat_message, tenant_digest
from dualmap.scheduling.prompts.chain import Chain
from dualmap.scheduling.prompts.engine_blocks import TOKEN_BYTES, BlockExtras, Medium, engine_chain
from dualmap.scheduling.values import value

RENDER_PATH: Final = "/v1/chat/completions/render"
STAND_IN: Final = (
    "data:image/png;base64,iVBORw0KGgoAAAANSUhEUgAAAEAAAABACAIAAAAlC+aJAAAAS0lEQVR42u3PMQ0AAAwDoEqv9ErYvQQckD4XAQEBAQEBAQEB"
    "AQEBAQEBAQEBAQEBAQEBAQEBAQEBAQEBAQEBAQEBAQEBAQEBAYHLAB8+AWnmfUycAAAAAElFTkSuQmCC"
)
"""An image of 64 by 64 pixels: large enough for every processor, and few tokens."""
_BYTES: Final = 300
"""Memory of an object here, roughly, beside its tokens."""
_RENDERED_FIELDS: Final = (
    "add_generation_prompt", "add_special_tokens", "chat_template", "chat_template_kwargs", "continue_final_message",
    "documents", "media_io_kwargs", "mm_processor_kwargs", "reasoning_effort", "tool_choice", "tools",
)  # fmt: skip
"""Fields of a chat, besides the messages, that change its prompt."""
_IMAGE_FIELDS: Final = ("media_io_kwargs", "mm_processor_kwargs")
"""Those that change the tokens of an image."""


class UnrenderedError(Exception):
    """The prompt cannot be rendered; the message says why."""


@value
class ImageTokens:
    """The tokens of an image, whichever prompt it is in."""

    identifier: str
    ids: array[int]

    @property
    def memory_bytes(self) -> int:
        return _BYTES + TOKEN_BYTES * len(self.ids)


@value
class RenderedPrompt:
    """The engine's input."""

    ids: array[int]
    images: tuple[Medium, ...]
    """In order, and apart from each other."""

    @property
    def memory_bytes(self) -> int:
        return _BYTES * (1 + len(self.images)) + TOKEN_BYTES * len(self.ids)

    def image(self, place: int) -> ImageTokens:
        medium = self.images[place]
        return ImageTokens(medium.identifier, self.ids[medium.offset : medium.offset + medium.length])

    def with_images(self, known: Sequence[ImageTokens | None]) -> RenderedPrompt:
        """The prompt with these images in place of its own; None leaves one as it is."""
        ids, images, at = array("I"), [], 0
        for medium, own in zip(self.images, known, strict=True):
            end = medium.offset + medium.length
            ids += self.ids[at : medium.offset]
            identifier, run = (
                (medium.identifier, self.ids[medium.offset : end]) if own is None else (own.identifier, own.ids)
            )
            images.append(Medium(identifier, len(ids), len(run)))
            ids += run
            at = end
        return RenderedPrompt(ids + self.ids[at:], tuple(images))

    def chain(self, block_tokens: int, lora: str | None, cache_salt: str | None) -> Chain:
        extras = BlockExtras.of_media(self.images, block_tokens, lora, cache_salt)
        return engine_chain(self.ids, block_tokens, extras)


def read_rendered(answer: bytes, images: int) -> RenderedPrompt:
    """An instance's answer for a prompt with so many images.

    Raises:
        UnrenderedError: it is none, or has other media.
    """
    try:
        rendered = orjson.loads(answer)
        # The emulator gives a partial last token a length above its 32 bits.
        ids = array("I", [token & 0xFFFFFFFF for token in rendered["token_ids"]])
        features = rendered["features"] or {"mm_hashes": {}, "mm_placeholders": {}}
        hashes, places = features["mm_hashes"], features["mm_placeholders"]
        if set(hashes) - {"image"}:
            raise UnrenderedError(f"it has other media than images: {sorted(hashes)}")
        pairs = zip(hashes.get("image", ()), places.get("image", ()), strict=True)
        found = [Medium(str(name), index(at["offset"]), index(at["length"])) for name, at in pairs]
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError) as error:
        raise UnrenderedError(f"the answer is not a rendered prompt: {error!r}") from error
    if len(found) != images:
        raise UnrenderedError(f"it has {len(found)} images, and the request {images}")
    found.sort(key=lambda each: each.offset)
    ends = [0, *(each.offset + each.length for each in found)]
    starts = [*(each.offset for each in found), len(ids)]
    if any(each.length < 1 for each in found) or any(end > start for end, start in zip(ends, starts, strict=True)):
        raise UnrenderedError("the places of its images are not apart, or outside of it")
    return RenderedPrompt(ids, tuple(found))


def two_stand_ins(model: str) -> bytes:
    """A body whose rendering shows whether the model numbers images."""
    part = {"type": "image_url", "image_url": {"url": STAND_IN}}
    messages = [{"role": "user", "content": [part, part]}]
    return orjson.dumps({"model": model, "max_tokens": 1, "mm_payload": "none", "messages": messages})


class RenderQuestion:
    """A prompt with images, as it is to be rendered for a model."""

    def __init__(self, source: TokenSource, model: str, *, numbered: bool = False, tenant: str = "") -> None:
        """``numbered``: an image's tokens depend on its place among the prompt's images. What is known of images is
        apart for each ``tenant``: clients name images as they like. Raises UnrenderedError."""
        body = source.body()
        fields = {name: body[name] for name in _RENDERED_FIELDS if body.get(name) is not None}
        fields.setdefault("add_special_tokens", source.adds_special_tokens)
        self._fields = {"model": model, "max_tokens": 1, "mm_payload": "none", **fields}
        self._messages = [chat_message(message) for message in body["messages"]]
        self._long_texts = source.long_texts
        marks = source.prompt.image_marks
        if len(marks) != sum(map(is_image, self._parts())):
            raise UnrenderedError("its images are not those that its prompt has marks of")
        settings = _dumps([fields.get(name) for name in _IMAGE_FIELDS])
        seed = tenant_digest(tenant, settings) >> 32
        places = [place if numbered else 0 for place in range(len(marks))]
        keys = [xxhash.xxh3_64_intdigest(mark, seed + place) for mark, place in zip(marks, places, strict=True)]
        self.images: tuple[int, ...] = tuple(keys)
        """A key of each image's tokens, in order."""
        text = self.body(frozenset(self.images))
        self.key = xxhash.xxh3_64_intdigest(array("Q", self.images).tobytes(), xxhash.xxh3_64_intdigest(text))
        """A key of the whole prompt."""

    def sent_bytes(self, known: Container[int]) -> int:
        """Bytes of the images that are not known. Raises UnrenderedError."""
        parts = filter(is_image, self._parts())
        return sum(len(self._url(part)) for key, part in zip(self.images, parts, strict=True) if key not in known)

    def body(self, known: Container[int]) -> bytes:
        """The body for ``RENDER_PATH``, with stand-ins for the images whose keys are known. Raises UnrenderedError."""
        keys = iter(self.images)
        messages = [
            {**message, "content": [self._shown(part, keys, known) for part in message["content"]]}
            if isinstance(message.get("content"), list)
            else message
            for message in self._messages
        ]
        return _dumps({**self._fields, "messages": messages})

    def _parts(self) -> Iterator[Any]:
        for message in self._messages:
            if isinstance(message.get("content"), list):
                yield from message["content"]

    def _shown(self, part: Any, keys: Iterator[int], known: Container[int]) -> Any:
        if not is_image(part):
            return part
        if next(keys) in known:
            return {"type": "image_url", "image_url": {"url": STAND_IN}}
        named = {"uuid": part["uuid"]} if part.get("uuid") else {}
        url = self._url(part).decode("utf-8", "surrogatepass")
        return {"type": "image_url", "image_url": {"url": url}, **named}

    def _url(self, part: Mapping[str, Any]) -> bytes:
        """The URL of an image, of which the last part may be a name of a long text."""
        given = part.get("image_url")
        url = given.get("url") if isinstance(given, Mapping) else given
        if not isinstance(url, str):
            raise UnrenderedError("an image has no URL")
        before, comma, name = url.rpartition(",")
        long_text = self._long_texts.get(name)
        short = url if long_text is None else before + comma
        return short.encode("utf-8", "surrogatepass") + (long_text or b"")


def _dumps(value: Any) -> bytes:
    try:
        return orjson.dumps(value)
    except TypeError as error:  # a lone surrogate
        raise UnrenderedError("it is not JSON in UTF-8") from error
