"""Gemma 3 with images against transformers: the tower, and directories that keep it."""

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import transformers
from builders import mesh_of
from gemma_vision import IMAGE, SOFT, TEMPLATE, TOKENS, saved, tokenizer
from PIL import Image
from safetensors.numpy import load_file, save_file

from jaxrl_async.config import schema
from jaxrl_async.data.chat_formats.template_format import TemplateFormat
from jaxrl_async.data.images import ImageForm, ImageStore, image_preparation, take_images
from jaxrl_async.data.tokenizer import load_tokenizer
from jaxrl_async.errors import CheckpointError, RolloutError
from jaxrl_async.model.decoder import TokenRows, output_head, settings_on, token_states
from jaxrl_async.model.logprobs import token_logprobs
from jaxrl_async.model.policy import Policy
from jaxrl_async.model.vision.files import read_tower
from jaxrl_async.sampler.sampler import Sampler
from jaxrl_async.sampler.setup import SamplerSettings
from jaxrl_async.trainer.pack import TrainSequence, pack
from jaxrl_async.trainer.token_columns import SamplerColumns
from jaxrl_async.types import Request, SamplingParams

pytestmark = pytest.mark.full


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
    prepared = [
        json.loads((f / "preprocessor_config.json").read_text()) for f in (folder, tmp_path)
    ]
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


# ---- the whole model, with images among the tokens


def opened_images(count: int) -> list[Image.Image]:
    rng = np.random.default_rng(3)
    return [Image.fromarray(rng.integers(0, 255, (20, 30, 3), np.uint8)) for _ in range(count)]


def store_of(folder: Path) -> ImageStore:
    tower = read_tower(folder)
    form = ImageForm(
        vocab=48, tokens=TOKENS, width=32, soft=SOFT, mark="<boi>",
        written=f"\n\n<boi>{'<soft>' * TOKENS}<eoi>\n\n",
    )  # fmt: skip
    return ImageStore(form=form, prepare=image_preparation(folder, IMAGE), embed=tower.embeddings)


def asked(images: list[Image.Image]) -> list[dict]:
    """A conversation with its images between texts, the first one twice if there are several."""
    parts = [{"type": "text", "text": "look at "}]
    for image in [*images, images[0]] if len(images) > 1 else images:
        parts += [{"type": "image", "image": image}, {"type": "text", "text": "what is it"}]
    return [{"role": "user", "content": parts}]


def ours_of(folder: Path, messages: list[dict], store: ImageStore) -> np.ndarray:
    """Return the token ids of a conversation, as a run reads it."""
    tokenizer = load_tokenizer(folder)
    tokenizer.images = store
    texts, numbers = take_images(messages, store)
    return store.named(TemplateFormat(tokenizer).opening(texts, ()), numbers)


@pytest.mark.parametrize("count", [1, 2])
def test_a_conversation_with_images_is_read_as_transformers_does(gemma, count: int) -> None:
    model, folder = gemma
    messages, store = asked(opened_images(count)), store_of(folder)
    processor = transformers.Gemma3Processor(
        transformers.Gemma3ImageProcessorPil.from_pretrained(folder), tokenizer(),
        chat_template=TEMPLATE, image_seq_length=TOKENS,
    )  # fmt: skip
    inputs = processor.apply_chat_template(
        messages, add_generation_prompt=True, tokenize=True, return_dict=True, return_tensors="pt"
    )
    ids = ours_of(folder, messages, store)
    np.testing.assert_array_equal(store.plain(ids), inputs["input_ids"][0].numpy())
    assert len(store) == count
    with torch.no_grad():
        theirs = model(**inputs).logits[0].numpy()
    policy = Policy.from_pretrained(folder)
    rows = packed(ids, store)
    each = len(ids)
    both = logits_of(policy, rows)[: 2 * each].reshape(2, each, -1)  # two of them in one row
    np.testing.assert_allclose(both[0], theirs, atol=1e-4, rtol=0)
    np.testing.assert_allclose(both[1], theirs, atol=1e-4, rtol=0)
    blind = logits_of(policy, rows._replace(embeddings=0 * rows.embeddings))[:each]
    assert np.abs(blind - theirs).max() > 0.1


def logits_of(policy: Policy, rows: TokenRows) -> np.ndarray:
    hidden = token_states(policy.spec, policy.params, rows).hidden
    return np.asarray(hidden @ output_head(policy.spec, policy.params))


def packed(ids: np.ndarray, store: ImageStore) -> TokenRows:
    """Pack a sequence behind another of its own images, in one row."""
    columns = SamplerColumns(images=store)
    sequence = TrainSequence(
        token_ids=ids, mask=np.zeros(len(ids), bool), versions=np.full(len(ids), -1, np.int32),
        behavior_logprobs=np.zeros(len(ids), np.float32),
        advantages=np.zeros(len(ids), np.float32),
    )  # fmt: skip
    batch = pack([sequence, sequence], 2 * len(ids) + 3, columns)
    assert len(batch.token_ids) == 1
    return TokenRows.of({f: getattr(batch, f) for f in batch.__dataclass_fields__})


@pytest.mark.exhaustive
def test_a_mesh_of_eight_devices_gives_the_same(gemma) -> None:
    _, folder = gemma
    store, mesh = store_of(folder), mesh_of(fsdp=4, tensor=2)
    alone, split = Policy.from_pretrained(folder), Policy.from_pretrained(folder, mesh=mesh)
    rows = packed(ours_of(folder, asked(opened_images(2)), store), store)
    rows = TokenRows(*(None if x is None else np.tile(x, (4,) + (1,) * (x.ndim - 1)) for x in rows))
    settings = settings_on(mesh, alone.spec, dtype=jnp.float32, attention="auto")
    ours = token_logprobs(alone.spec, alone.params, rows).logprobs
    theirs = jax.jit(lambda p: token_logprobs(split.spec, p, rows, settings).logprobs)(split.params)
    np.testing.assert_allclose(theirs, ours, atol=1e-5, rtol=0)


# ---- drawn by a sampler


def prompts_of(folder: Path, store: ImageStore) -> list[np.ndarray]:
    """Return prompts of which some begin alike, with the same images or with others."""
    first, second, third = opened_images(3)
    seen = [
        [{"type": "text", "text": "look at "}, *({"type": "image", "image": i} for i in images)]
        for images in ([first], [second], [first, third], [first, third, second], [third, first])
    ]
    asks = [[*parts, {"type": "text", "text": "what"}] for parts in seen]
    return [ours_of(folder, [{"role": "user", "content": parts}], store) for parts in asks]


@pytest.mark.exhaustive
def test_a_sampler_draws_from_what_the_trainer_computes(gemma) -> None:
    model, folder = gemma
    store, policy = store_of(folder), Policy.from_pretrained(folder)
    prompts = prompts_of(folder, store)
    section = schema.SamplerSection(
        slots=4, max_length=96, max_new_tokens=6, block=2, page_tokens=4, prefill_chunk=7
    )
    settings = SamplerSettings(images=store)
    sampler = Sampler(policy, section=section, seed=0, settings=settings)
    for turn in (0, 1):  # the second time, most of the prompts' pages are in the store
        requests = [
            Request(
                request_id=f"g{i}/m0/t{turn}", token_ids=ids, max_new_tokens=6, key=(i, turn),
                sampling=SamplingParams(temperature=0.0 if i % 2 else 1.0),
            )
            for i, ids in enumerate(prompts)
        ]  # fmt: skip
        for request, done in zip(requests, sampler.generate(requests), strict=True):
            whole = np.concatenate([request.token_ids, done.token_ids])
            n, start = len(done.token_ids), len(request.token_ids) - 1
            logits = theirs_of(model, whole, store)[start : start + n]
            said = torch.log_softmax(torch.tensor(logits), dim=-1).numpy()
            if request.sampling.temperature == 0:
                assert done.token_ids.tolist() == said.argmax(-1).tolist()
            wanted = said[np.arange(n), done.token_ids]
            np.testing.assert_allclose(done.logprobs, wanted, atol=1e-4, rtol=0)
            trained = token_logprobs(policy.spec, policy.params, packed(whole, store)).logprobs
            np.testing.assert_allclose(
                done.logprobs, trained[0, start + 1 : start + 1 + n], atol=1e-5, rtol=0
            )
    assert sampler.stats().prefix_hit_tokens > 0
    sampler.close()


def theirs_of(model, ids: np.ndarray, store: ImageStore) -> np.ndarray:
    """Return transformers' logits of a sequence, whose images it finds in the store by number."""
    numbers = [(i - 48) // TOKENS for i in ids if i >= 48 and (i - 48) % TOKENS == 0]
    pixels = [
        store.prepare(opened_images(3)[k].convert("RGB")) for k in numbers
    ]  # numbered as they were seen
    with torch.no_grad():
        return model(
            input_ids=torch.tensor(store.plain(ids)[None], dtype=torch.long),
            pixel_values=torch.tensor(np.stack(pixels)),
            token_type_ids=torch.tensor((ids >= 48).astype(np.int64)[None]),
        ).logits[0].numpy()  # fmt: skip


def test_a_prompt_of_an_image_that_is_not_there_is_refused(gemma) -> None:
    _, folder = gemma
    store, policy = store_of(folder), Policy.from_pretrained(folder)
    ids = prompts_of(folder, store)[0]
    sampler = Sampler(policy, seed=0)  # without the store
    with pytest.raises(RolloutError, match="vocabulary"):
        sampler.generate([Request(request_id="a", token_ids=ids, max_new_tokens=2)])
    sampler.close()
