"""Whole runs on a task that only a picture answers, with a small Gemma 3 and a random, frozen tower."""

import base64
import io
import json
from pathlib import Path

import numpy as np
import pytest
from gemma_vision import saved
from PIL import Image
from runs import config_of, metrics_of

from jaxrl_async.errors import ConfigError, DataError
from jaxrl_async.run.loop import train

COLOURS = {"r": (230, 20, 20), "g": (20, 230, 20), "b": (20, 20, 230)}
REWARD = """
def right(prompt, completion, reference):
    said = completion[:1]
    return float(said == reference) + 0.2 * float(said in "rgb" and said != "")
"""


def square(colour: tuple[int, int, int], place: int) -> Image.Image:
    """Return a grey picture with one coloured square in one of its quarters."""
    pixels = np.full((16, 16, 3), 128, np.uint8)
    row, column = divmod(place, 2)
    pixels[8 * row : 8 * row + 8, 8 * column : 8 * column + 8] = colour
    return Image.fromarray(pixels)


def data_url(image: Image.Image) -> str:
    stream = io.BytesIO()
    image.save(stream, "PNG")
    return "data:image/png;base64," + base64.b64encode(stream.getvalue()).decode()


def coloured_squares(folder: Path) -> Path:
    """Write the task's records: each colour in each place; the held-out ones are among them."""
    lines = [
        {
            "messages": [
                {
                    "role": "user",
                    "content": [
                        {"type": "image_url", "image_url": {"url": data_url(square(rgb, place))}},
                        {"type": "text", "text": "what colour"},
                    ],
                }
            ],
            "answer": colour,
        }
        for colour, rgb in COLOURS.items()
        for place in range(4)
    ]
    file = folder / "squares.jsonl"
    file.write_text("".join(json.dumps(line) + "\n" for line in 2 * lines), encoding="utf-8")
    return file


def overrides(folder: Path, *more: str) -> list[str]:
    saved(folder / "gemma", window=8, moved=0.02, tie_word_embeddings=False)
    (folder / "reward.py").write_text(REWARD, encoding="utf-8")
    return [
        f"model.path={folder / 'gemma'}",
        "data.source=jsonl",
        f"data.jsonl.path={coloured_squares(folder)}",
        "data.jsonl.messages_field=messages",
        "data.jsonl.answer_field=answer",
        "data.jsonl.eval_size=12",
        "data.max_prompt_tokens=48",
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
        "metrics.peak_flops=1e9",
        *more,
    ]


@pytest.mark.slow
@pytest.mark.exhaustive
def test_a_policy_learns_what_only_the_picture_tells(tmp_path: Path) -> None:
    config = config_of("grpo", tmp_path, *overrides(tmp_path, "run.steps=60", "eval.every=20"))
    train(config)
    lines = metrics_of(config)
    print([(m["step"], m.get("reward/mean"), m.get("eval/reward")) for m in lines][::5])
    print({k: v for k, v in lines[-1].items() if "eval" in k or "mismatch" in k})
