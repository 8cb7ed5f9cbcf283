"""Images in chat messages: read, preprocessed like transformers, and identified by token ids.

    {"type": "image", "image": "dog.png"} ──read, hash──> number ──> ids beyond the vocabulary
                                                            │
                    trainer and samplers <── embeddings, computed once by the frozen tower

Token t of image i has the id `vocab + i * tokens + t`. A sequence of token ids thus identifies its
images everywhere: prefixes are shared if the images are equal, and trainer and sampler look up the
same numbers. Models see the id of the soft token instead.
"""

import base64
import binascii
import hashlib
import io
import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from jaxrl_async.errors import DataError, extra_module, in_a_line
from jaxrl_async.types import FloatArray, IntArray

log = logging.getLogger(__name__)

NO_IMAGE = -1
"""Value of `begins` for a token that is not part of an image."""
MAX_IMAGE_BYTES = 2**26
"""Maximum size of an image's file or data: URL."""
KINDS = ("image", "image_url")
"""Types of content parts that hold an image."""

Pixels = NDArray[np.float32]


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageForm:
    """A model's representation of an image."""

    vocab: int  # of the model; ids of images start here
    tokens: int  # per image
    width: int  # of an embedding
    soft: int  # id of the placeholder for each image token
    mark: str  # text of an image in a chat template
    written: str  # the model's text instead of it, with the soft tokens


@dataclass(slots=True)
class ImageStore:
    """The images of a run by number. Thread-safe."""

    form: ImageForm
    prepare: Callable[[Any], Pixels]  # a PIL image -> [3, S, S]
    embed: Callable[[Pixels], FloatArray]  # [n, 3, S, S] -> [n, tokens, width]
    release: Callable[[], None] = lambda: None  # called when `embed` is no longer needed
    _numbers: dict[bytes, int] = field(default_factory=dict)  # by content
    _waiting: dict[int, bytes] = field(default_factory=dict)  # files of images not embedded yet
    _embedded: dict[int, FloatArray] = field(default_factory=dict)  # [tokens, width] each
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _sealed: bool = False

    @property
    def end(self) -> int:
        """First id after all images."""
        return self.form.vocab + len(self._numbers) * self.form.tokens

    def __len__(self) -> int:
        return len(self._numbers)

    def add(self, image: object, where: str) -> int:
        """Return the number of an image; equal files have the same number. Raises DataError.

        Args:
            image: a PIL image, an array [height, width, 3] of bytes, a path or a data: URL.
            where: its location, for error messages.
        """
        content = file_of(image, where)
        name = hashlib.blake2b(content, digest_size=16).digest()
        with self._lock:
            if name not in self._numbers:
                if self._sealed:
                    raise DataError(f"{where}: its image was not known at the start of the run.")
                self._numbers[name] = len(self._numbers)
                self._waiting[self._numbers[name]] = content
            return self._numbers[name]

    def seal(self) -> None:
        """Accept no more images: all samplers and the trainer now share the current ones."""
        with self._lock:
            self._sealed = True

    def identity(self) -> str:
        """Return a hash of all images in order, which determines the meaning of ids in saved
        sequences."""
        return hashlib.blake2b(b"".join(self._numbers), digest_size=16).hexdigest()

    def named(self, token_ids: IntArray, images: Sequence[int]) -> IntArray:
        """Return an encoded text with its soft tokens replaced by the ids of its images, in order.
        Raises DataError if the numbers of tokens do not match."""
        positions, form = np.flatnonzero(token_ids == self.form.soft), self.form
        if len(positions) != len(images) * form.tokens:
            raise DataError(
                f"a prompt with {len(images)} images has {len(positions)} image tokens, not "
                f"{len(images) * form.tokens}: the chat template must write {form.mark!r} once for "
                "each, and no text may contain it or the soft token."
            )
        named = token_ids.copy()
        first = form.vocab + np.asarray(images, np.int32) * form.tokens
        named[positions] = (first[:, None] + np.arange(form.tokens)).reshape(-1)
        return named

    def plain(self, token_ids: IntArray) -> IntArray:
        """Return the ids for the model, with the soft token instead of image tokens."""
        return np.where(token_ids < self.form.vocab, token_ids, self.form.soft).astype(np.int32)

    def begins(self, token_ids: IntArray) -> IntArray:
        """Return the start of each token's image in a sequence, or NO_IMAGE, [length] int32."""
        offset = (token_ids - self.form.vocab) % self.form.tokens
        begins = np.arange(len(token_ids)) - offset
        return np.where(token_ids < self.form.vocab, NO_IMAGE, begins).astype(np.int32)

    def whole(self, token_ids: IntArray, end: int) -> int:
        """Return `end`, or the end of the image that it would cut."""
        if end >= len(token_ids) or token_ids[end] < self.form.vocab:
            return end
        offset = (int(token_ids[end]) - self.form.vocab) % self.form.tokens
        return end if offset == 0 else end + self.form.tokens - offset

    def embeddings(self, token_ids: IntArray) -> FloatArray:
        """Return the embeddings [length, width] float32 of image tokens; 0 for others."""
        rows = np.zeros((len(token_ids), self.form.width), np.float32)
        positions = np.flatnonzero(token_ids >= self.form.vocab)
        if len(positions):
            number, offset = divmod(token_ids[positions] - self.form.vocab, self.form.tokens)
            here = [int(i) for i in np.unique(number)]
            self._embed(here)
            for i in here:
                rows[positions[number == i]] = self._embedded[i][offset[number == i]]
        return rows

    def has_any(self, token_ids: IntArray) -> bool:
        """Return True if a sequence contains an image."""
        return bool((token_ids >= self.form.vocab).any())

    def _embed(self, numbers: Sequence[int]) -> None:
        """Embed the images that are not embedded yet."""
        with self._lock:
            new = [i for i in numbers if i not in self._embedded]
            if not new:
                return
            pixels = np.stack([self.prepare(opened(self._waiting[i])) for i in new])
            for i, embedded in zip(new, self.embed(pixels), strict=True):
                self._embedded[i] = embedded
                del self._waiting[i]
            if self._sealed and not self._waiting:
                mib = sum(e.nbytes for e in self._embedded.values()) / 2**20
                log.info("all %d images are embedded: %.1f MiB", len(self._embedded), mib)
                self.release()


def take_images(messages: object, store: ImageStore | None) -> tuple[Any, list[int]]:
    """Return messages with the store's mark instead of each image, and the images' numbers. Raises
    DataError with the message's number for an image that cannot be read.

    As in Gemma 3's chat template, texts next to images are stripped of white space. Without a store
    the messages are returned unchanged.
    """
    if store is None or not isinstance(messages, Sequence) or isinstance(messages, str):
        return messages, []
    images: list[int] = []
    return [_take(m, f"message {i}", store, images) for i, m in enumerate(messages)], images


def _take(message: Any, where: str, store: ImageStore, images: list[int]) -> Any:
    content = message.get("content") if isinstance(message, Mapping) else None
    if not isinstance(content, list) or not any(map(_is_image, content)):
        return message
    parts = []
    for i, part in enumerate(content):
        if _is_image(part):
            images.append(store.add(_image_of(part), f"part {i} of {where}"))
            parts.append(store.form.mark)
        else:
            text = part.get("text") if isinstance(part, Mapping) else part
            parts.append(text.strip() if isinstance(text, str) else part)
    texts = all(isinstance(p, str) for p in parts)
    return {**message, "content": "".join(parts) if texts else parts}


def holds_images(messages: Sequence[object]) -> bool:
    """Return True if a content part of any of these messages is an image."""
    contents = [m.get("content") for m in messages if isinstance(m, Mapping)]
    return any(_is_image(part) for c in contents if isinstance(c, list) for part in c)


def _is_image(part: object) -> bool:
    return isinstance(part, Mapping) and part.get("type") in KINDS


def _image_of(part: Mapping[str, object]) -> Any:
    """Return the image reference of a content part, in OpenAI's or transformers' form."""
    names = ("image", "image_url", "url", "path")
    image = next((part[k] for k in names if part.get(k) is not None), None)
    if image is None and isinstance(part.get("base64"), str):
        return f"data:image;base64,{part['base64']}"
    return image.get("url") if isinstance(image, Mapping) and "url" in image else image


def file_of(image: object, where: str) -> bytes:
    """Return an image as the bytes of a file that PIL can read. Raises DataError."""
    images = _pillow()
    try:
        if isinstance(image, np.ndarray):
            image = images.fromarray(image)
        if isinstance(image, images.Image):
            stream = io.BytesIO()
            upright(image).save(stream, "PNG")
            return stream.getvalue()
        content = _bytes_of(image, where)
        opened(content)
    except DataError:
        raise
    except Exception as error:  # many types, also for images with too many pixels
        reason = in_a_line(error, 120)
        raise DataError(f"{where}: its image cannot be read: {reason}.") from None
    return content


def opened(content: bytes) -> Any:
    """Return a file's image as an upright PIL image in RGB."""
    return upright(_pillow().open(io.BytesIO(content)))


def upright(image: Any) -> Any:
    """Return a PIL image in RGB, rotated by its EXIF orientation, like transformers' load_image."""
    from PIL import ImageOps

    return ImageOps.exif_transpose(image).convert("RGB")


def _pillow() -> Any:
    return extra_module("PIL.Image", "images", "images need Pillow")


def _bytes_of(image: object, where: str) -> bytes:
    if not isinstance(image, str):
        raise DataError(
            f"{where}: its image is a {type(image).__name__}. Give a path, a data: URL, a PIL "
            "image or an array [height, width, 3] of bytes."
        )
    if image.startswith(("http://", "https://")):
        raise DataError(f"{where}: {image[:80]} is not downloaded. Give a path or a data: URL.")
    if image.startswith("data:"):
        head, _, content = image.partition(",")
        if not head.endswith(";base64") or len(content) > MAX_IMAGE_BYTES:
            raise DataError(
                f"{where}: its data: URL is not base64, or longer than {MAX_IMAGE_BYTES:,} bytes."
            )
        try:
            return base64.b64decode(content, validate=True)
        except binascii.Error as error:
            raise DataError(f"{where}: its data: URL is not base64: {error}.") from None
    with Path(image.removeprefix("file://")).open("rb") as file:
        content_bytes = file.read(MAX_IMAGE_BYTES + 1)
    if len(content_bytes) > MAX_IMAGE_BYTES:
        raise DataError(f"{where}: {image[:80]} is longer than {MAX_IMAGE_BYTES:,} bytes.")
    return content_bytes


def image_preparation(folder: Path, size: int) -> Callable[[Any], Pixels]:
    """Return a function from a PIL image to pixels [3, size, size], like a directory's image
    processor. Raises DataError for settings that split images or produce another size."""
    from transformers import Gemma3ImageProcessorPil

    named = ("preprocessor_config.json", "processor_config.json")
    if any((folder / name).is_file() for name in named):
        processor = Gemma3ImageProcessorPil.from_pretrained(str(folder), local_files_only=True)
    else:
        processor = Gemma3ImageProcessorPil(size={"height": size, "width": size})
    sides = {processor.size["height"], processor.size["width"]}
    if processor.do_pan_and_scan or sides != {size}:
        raise DataError(
            f"{folder}: its image processor makes images of {sorted(sides)} pixels, with pan and "
            f"scan {processor.do_pan_and_scan}; the tower needs one of {size}. Set size and "
            "do_pan_and_scan=false in preprocessor_config.json."
        )

    def prepare(image: object) -> Pixels:
        made = processor(images=[image], return_tensors="np")["pixel_values"]
        return np.asarray(made[0], np.float32)

    return prepare
