"""The images of a run: the model that reads them, and the settings that do not support images."""

from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from jaxrl_async.algorithms.advantages import needs_critic
from jaxrl_async.config.schema import Config
from jaxrl_async.data.images import ImageStore, Pixels, image_preparation
from jaxrl_async.data.tokenizer import Tokenizer
from jaxrl_async.errors import CheckpointError, ConfigError
from jaxrl_async.later import Later
from jaxrl_async.model.hf import read_config
from jaxrl_async.model.spec import ModelSpec

if TYPE_CHECKING:
    from jaxrl_async.model.vision import files, image_form
    from jaxrl_async.model.vision.tower import VisionTower
else:
    files = Later("jaxrl_async.model.vision.files")
    image_form = Later("jaxrl_async.model.vision.image_form")

WITH_IMAGES = ("rl", "sft")
"""Values of run.job whose records may have images."""


def image_store(config: Config, spec: ModelSpec, tokenizer: Tokenizer) -> ImageStore | None:
    """Return an empty store for the images of a run's records; None: its model has no vision tower,
    or its records do not come from data.jsonl. No weight is read. Raises CheckpointError,
    ConfigError, DataError."""
    path = config.model.path
    if (
        config.run.job not in WITH_IMAGES
        or path is None
        or config.task is not None
        or config.data.records_path is None
    ):
        return None
    folder, sizes = Path(path), files.vision_spec(Path(path))
    if sizes is None:
        return None
    form = image_form.image_form(read_config(folder), sizes, spec, tokenizer)
    if form is None:
        return None

    @cache
    def tower() -> "VisionTower":
        read = files.read_tower(folder)
        if read is None:
            raise CheckpointError(
                f"{folder}: config.json describes a vision tower, and the files have none. Copy "
                "the whole directory, or leave images out of the records."
            )
        return read

    @cache
    def preparation() -> Callable[[Any], Pixels]:
        return image_preparation(folder, sizes.image_size)

    return ImageStore(
        form=form,
        prepare=lambda image: preparation()(image),
        embed=lambda pixels: tower().embeddings(pixels),
        release=tower.cache_clear,
    )


def check_images(config: Config, store: ImageStore | None) -> ImageStore | None:
    """Return the store if records have images, and refuse further ones. The first image is
    embedded.

    Raises ConfigError for settings that do not support images, and CheckpointError or DataError for
    a directory that cannot embed them.
    """
    if store is None or not len(store):
        return None
    if obstacle := next(_obstacles(config), None):
        raise ConfigError(
            f"the records of {config.data.records_path} have images, which do not work with "
            f"{obstacle}. See docs/images.md."
        )
    store.seal()
    store.embeddings(np.array([store.form.vocab], np.int32))
    return store


def _obstacles(config: Config) -> Iterator[str]:
    """Yield the settings that do not support images."""
    c, samples = config, config.run.job == "rl"
    context = c.mesh.trainer.context
    obstacles = {
        "several processes": jax.process_count() > 1,
        "samplers elsewhere (mesh.sampler, remote)": samples and c.mesh.remote,
        f"sampler.engine={c.sampler.engine}": samples and c.sampler.engine != "native",
        "endpoint.external_agents": c.serving.external_agents,
        "runs (several adapters)": bool(c.runs),
        "trainer.share_prefixes": c.trainer.share_prefixes,
        f"mesh.trainer.context={context}": context != 1,
        f"model.attention={c.model.attention} (set auto or reference)": c.model.attention
        not in ("auto", "reference"),
        "teacher.path or teachers": bool(c.teacher_folders or c.named_teachers),
        "pairs": c.pairs is not None,
        "reward.model": c.reward.model is not None,
        "a critic (algorithm.advantage)": needs_critic(c.algorithm.advantage),
    }
    yield from (setting for setting, is_set in obstacles.items() if is_set)
