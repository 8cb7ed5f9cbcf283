"""Image inputs of a model with a tower: their form in prompts, and their embeddings."""

import logging
import tempfile
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

from jaxrl_async.data.images import ImageForm, ImageStore, Pixels, image_preparation
from jaxrl_async.data.tokenizer import Tokenizer
from jaxrl_async.model.spec import ModelSpec
from jaxrl_async.model.vision.files import write_preparation
from jaxrl_async.model.vision.tower import VisionSpec, VisionTower

log = logging.getLogger(__name__)

MARKS = {"boi_token_index": 255_999, "image_token_index": 262_144, "eoi_token_index": 256_000}
"""Fields of config.json with the tokens around and of an image, with Gemma 3's defaults."""


def image_form(
    config: Mapping[str, Any], sizes: VisionSpec, spec: ModelSpec, tokenizer: Tokenizer
) -> ImageForm | None:
    """Return the form of images in a model's prompts. None, with a warning, if its tokenizer has no
    tokens for them.

    config: its config.json, with or without the text part.
    """
    ids = [config.get(key, usual) for key, usual in MARKS.items()]
    if not all(type(i) is int and 0 <= i < min(spec.vocab, tokenizer.vocab_size) for i in ids):
        log.warning(
            "config.json: %s are %s, which are not tokens of the tokenizer: the model reads only "
            "text", ", ".join(MARKS), ids,
        )  # fmt: skip
        return None
    begin, soft, end = (tokenizer.token_text(i) for i in ids)
    return ImageForm(
        vocab=spec.vocab,
        tokens=sizes.tokens,
        width=sizes.text_width,
        soft=ids[1],
        mark=begin,
        written=f"\n\n{begin}{soft * sizes.tokens}{end}\n\n",  # as transformers' Gemma3Processor
    )


def images_of(tower: VisionTower, spec: ModelSpec, tokenizer: Tokenizer) -> ImageStore | None:
    """Return an empty store of images embedded by a tower in memory; None: see image_form."""
    form = image_form(tower.config, tower.spec, spec, tokenizer)
    if form is None:
        return None

    @cache
    def preparation() -> Callable[[Any], Pixels]:
        with tempfile.TemporaryDirectory(prefix="jaxrl-images-") as name:
            write_preparation(tower, Path(name))  # transformers reads only files
            return image_preparation(Path(name), tower.spec.image_size)

    return ImageStore(form=form, prepare=lambda image: preparation()(image), embed=tower.embeddings)
