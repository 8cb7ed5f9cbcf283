"""Whole runs on a task that only a picture answers: a small Gemma 3 with a random, frozen tower."""

import base64
import io
import json
from pathlib import Path

import numpy as np
import pytest
from gemma_vision import saved
from PIL import Image
from runs import config_of, metrics_of, weights_of

from jaxrl_async.errors import CheckpointError, ConfigError, DataError
from jaxrl_async.model.policy import Policy
from jaxrl_async.run.loop import train

pytestmark = pytest.mark.full

COLOURS = {"r": (230, 20, 20), "g": (20, 230, 20), "b": (20, 20, 230)}
REWARD = """
def right(prompt, completion, reference):
    said = completion[:1]
    return float(said == reference) + 0.2 * float(said in "rgb" and said != "")
"""


def square(colour: tuple[int, int, int], place: int, shade: int) -> Image.Image:
    """Return a grey picture with one coloured square in one of its quarters."""
    pixels = np.full((16, 16, 3), 128, np.uint8)
    row, column = divmod(place, 2)
    pixels[8 * row : 8 * row + 8, 8 * column : 8 * column + 8] = np.abs(np.array(colour) - shade)
    return Image.fromarray(pixels)


def data_url(image: Image.Image) -> str:
    stream = io.BytesIO()
    image.save(stream, "PNG")
    return "data:image/png;base64," + base64.b64encode(stream.getvalue()).decode()


def asked(image: str) -> list[dict]:
    parts = [
        {"type": "image_url", "image_url": {"url": image}},
        {"type": "text", "text": "what colour"},
    ]
    return [{"role": "user", "content": parts}]


def coloured_squares(folder: Path) -> Path:
    """Write the task's records: each colour in each place; the last 12 in a shade of their own."""
    lines = [
        {"messages": asked(data_url(square(rgb, place, shade))), "answer": colour}
        for shade in (0, 12, 6)
        for colour, rgb in COLOURS.items()
        for place in range(4)
    ]
    file = folder / "squares.jsonl"
    file.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    return file


def overrides(folder: Path, *more: str) -> list[str]:
    if not (folder / "gemma").exists():
        saved(folder / "gemma", window=8, moved=0.02)
    (folder / "reward.py").write_text(REWARD, encoding="utf-8")
    return [
        f"model.path={folder / 'gemma'}",
        "data.addition=null",
        f"data.jsonl.path={coloured_squares(folder)}",
        "data.jsonl.messages_field=messages",
        "data.jsonl.answer_field=answer",
        "data.jsonl.eval_size=12",
        "data.max_prompt_tokens=48",
        "metrics.peak_flops=1e9",
        f"reward.function={folder / 'reward.py'}:right",
        "warm_start.steps=0",
        "sampler.slots=64",
        "sampler.max_length=64",
        "sampler.max_new_tokens=2",
        "sampler.block=2",
        "staleness.max_staleness=0",
        "algorithm.group_size=16",
        "algorithm.groups_per_step=8",
        "algorithm.learning_rate=3e-3",
        "algorithm.kl_coefficient=0",
        "trainer.micro_batch_tokens=4096",
        "metrics.tensorboard=false",
        *more,
    ]


@pytest.mark.exhaustive
def test_a_policy_learns_what_only_the_picture_tells(tmp_path: Path) -> None:
    """Without the picture a third of the answers would be right: 0.53 with what a colour earns."""
    config = config_of("grpo", tmp_path, *overrides(tmp_path, "run.steps=80", "eval.every=20"))
    train(config)
    lines = metrics_of(config)
    assert lines[0]["eval/reward"] < 0.5 and lines[-1]["eval/reward"] > 1.0
    assert max(line.get("mismatch/max", 0.0) for line in lines) < 1e-4
    again = Policy.from_pretrained(tmp_path / "grpo" / "policy")
    before = Policy.from_pretrained(tmp_path / "gemma")
    for name, tensor in before.tower.tensors.items():
        np.testing.assert_array_equal(again.tower.tensors[name], tensor)


@pytest.mark.exhaustive
def test_a_run_with_images_goes_on_with_the_same_pictures(tmp_path: Path) -> None:
    more = overrides(tmp_path, "eval.every=0", "checkpoint.every=2", "trainer.warmup_steps=1")
    whole = config_of("grpo", tmp_path, *more, "run.name=whole", "run.steps=4")
    half = config_of("grpo", tmp_path, *more, "run.name=half", "run.steps=2")
    again = ("run.name=half", "run.steps=4", "run.resume=true", "run.overwrite=false")
    rest = config_of("grpo", tmp_path, *more, *again)
    train(whole)
    train(half)
    train(rest)
    for name, tensor in weights_of(whole).items():
        np.testing.assert_allclose(weights_of(rest)[name], tensor, atol=1e-6, err_msg=name)


@pytest.mark.exhaustive
def test_a_run_does_not_go_on_with_other_pictures(tmp_path: Path) -> None:
    """What is being drawn names them by their place among the records'."""
    more = ["eval.every=0", "staleness.max_staleness=1", "trainer.warmup_steps=1"]
    more = overrides(tmp_path, *more, "run.overwrite=false")
    train(config_of("grpo", tmp_path, *more, "run.steps=1"))
    file = tmp_path / "squares.jsonl"
    lines = file.read_text().splitlines()
    file.write_text("\n".join(lines[::-1]) + "\n")
    with pytest.raises(
        CheckpointError, match=r"1: its answers refer to images .* in another order"
    ):
        train(config_of("grpo", tmp_path, *more, "run.steps=2", "run.resume=true"))
    file.write_text("\n".join(lines) + "\n")
    train(config_of("grpo", tmp_path, *more, "run.steps=2", "run.resume=true"))


@pytest.mark.exhaustive
def test_worked_answers_with_pictures_are_trained_on(tmp_path: Path) -> None:
    settings = overrides(tmp_path)[:8]
    more = ["trainer.row_length=128", "trainer.micro_batch_tokens=1024", "eval.every=50"]
    more += ["metrics.tensorboard=false", "run.steps=100", "sft.batch_size=24"]
    more += ["algorithm.learning_rate=3e-3"]
    config = config_of("sft", tmp_path, *settings, *more)
    train(config)
    lines = metrics_of(config)
    assert lines[0]["eval/accuracy"] < 0.5 and lines[-1]["eval/accuracy"] > 0.9
    warmed = config_of("grpo", tmp_path, *overrides(tmp_path), "run.steps=5", "warm_start.steps=50")
    train(warmed)
    assert metrics_of(warmed)[0]["eval/reward"] > 0.6  # above what is to be had without a picture


@pytest.mark.exhaustive
def test_an_adapter_of_a_quantised_base_trains_with_pictures(tmp_path: Path) -> None:
    settings = overrides(tmp_path, "run.steps=3", "trainer.warmup_steps=1", "model.lora.rank=4")
    config = config_of("grpo", tmp_path, *settings, "model.lora.base=int8", "eval.every=0")
    train(config)
    lines = metrics_of(config)
    assert max(line.get("mismatch/max", 0.0) for line in lines) < 1e-4
    assert Policy.from_pretrained(tmp_path / "grpo" / "policy").tower is not None


REFUSED = {
    "trainer.share_prefixes=true": "trainer.share_prefixes",
    "mesh.trainer.context=2": "mesh.trainer.context",
    "algorithm.advantage=gae": "critic",
}


@pytest.mark.exhaustive
@pytest.mark.parametrize(("setting", "named"), REFUSED.items())
def test_what_does_not_go_with_images_is_refused(tmp_path: Path, setting: str, named: str) -> None:
    config = config_of("grpo", tmp_path, *overrides(tmp_path, setting))
    with pytest.raises(ConfigError, match=f"have images, which do not work with .*{named}"):
        train(config)


def test_images_are_refused_by_name_where_they_cannot_be_read(tmp_path: Path, caplog) -> None:
    settings = overrides(tmp_path)
    file = tmp_path / "squares.jsonl"
    good = file.read_text().splitlines()
    bad = [
        json.dumps({"messages": asked(url), "answer": "r"})
        for url in ("data:image/png;base64,AAAA", "nowhere.png", "https://a.b/c.png")
    ]
    file.write_text("\n".join([*bad, *good]) + "\n")
    with pytest.raises(DataError, match="max_bad_share"):
        train(config_of("grpo", tmp_path, *settings, "data.jsonl.max_bad_share=0"))
    assert "part 0 of message 0" in caplog.text
    for reason in ("cannot identify image file", "No such file", "is not downloaded"):
        assert reason in caplog.text
    with pytest.raises(DataError):  # an image takes 4 tokens and what is around them
        train(config_of("grpo", tmp_path, *settings, "data.max_prompt_tokens=20"))
    plain = Policy.from_pretrained(tmp_path / "gemma")
    Policy(plain.spec, plain.params, plain.tokenizer).save_pretrained(tmp_path / "text")
    with pytest.raises(DataError):
        train(config_of("grpo", tmp_path, *settings, f"model.path={tmp_path / 'text'}"))
    assert "has a part of the type 'image_url'" in caplog.text
