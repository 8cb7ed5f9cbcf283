"""Gemma 3 with images against transformers: the tower, and directories that keep it."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from safetensors.numpy import load_file, save_file

from jaxrl_async.errors import CheckpointError
from jaxrl_async.model.policy import Policy
from jaxrl_async.model.vision.files import read_tower
from tests.helpers.gemma_vision import IMAGE, TOKENS, saved


@pytest.fixture(scope="module")
def gemma(tmp_path_factory: pytest.TempPathFactory):
    folder = tmp_path_factory.mktemp("gemma")
    return saved(folder), folder


def pixels(count: int) -> np.ndarray:
    return np.random.default_rng(0).uniform(-1, 1, (count, 3, IMAGE, IMAGE)).astype(np.float32)


def features(model, images: np.ndarray) -> np.ndarray:
    with torch.no_grad():
        found = model.get_image_features(torch.tensor(images), return_dict=True)
    return found.pooler_output.numpy()


def test_a_tower_embeds_images_as_transformers_does(gemma) -> None:
    model, folder = gemma
    tower, images = read_tower(folder), pixels(9)  # more than one call takes
    ours = tower.embeddings(images)
    assert ours.shape == (9, TOKENS, 32)
    np.testing.assert_allclose(ours, features(model, images), atol=1e-4, rtol=0)


def test_a_saved_model_keeps_its_tower(gemma, tmp_path: Path) -> None:
    model, folder = gemma
    policy = Policy.from_pretrained(folder)
    moved = policy.with_params({**policy.params, "final_norm": policy.params["final_norm"] + 0.5})
    moved.save_pretrained(tmp_path)
    again, said = transformers.Gemma3ForConditionalGeneration.from_pretrained(
        tmp_path, output_loading_info=True
    )
    assert not any(said[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    images = pixels(2)
    np.testing.assert_allclose(features(again, images), features(model, images), atol=1e-5)
    before, after = (m.model.language_model.norm.weight.detach() for m in (model, again))
    np.testing.assert_allclose(after, before + 0.5, atol=1e-6)
    assert again.config.text_config.sliding_window == model.config.text_config.sliding_window
    prepared = [json.loads((f / "preprocessor_config.json").read_text()) for f in (folder, tmp_path)]
    assert prepared[0] == prepared[1]
    twice = Policy.from_pretrained(tmp_path)
    assert twice.tower.tensors.keys() == policy.tower.tensors.keys()
    for name, tensor in policy.tower.tensors.items():
        np.testing.assert_array_equal(twice.tower.tensors[name], tensor)
    assert twice.spec == policy.spec


def test_a_tower_that_is_not_whole_is_refused(gemma, tmp_path: Path) -> None:
    _, folder = gemma
    tensors = load_file(folder / "model.safetensors")
    short = {n: w for n, w in tensors.items() if "mm_input_projection" not in n}
    save_file(short, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    with pytest.raises(CheckpointError, match="lacks multi_modal_projector"):
        Policy.from_pretrained(tmp_path)
