"""A run that is held to a script; and, at the end, what each client's modes said."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import compress
from pathlib import Path

import jax
import pytest
from chat_tokenizers import QWEN3, byte_tokenizer
from clients_rig import table
from endpoint_rig import SHAPE
from scripted_policy import dictated, scripted_text

from jaxrl_async.model.decoder import init_params
from jaxrl_async.model.policy import Policy
from jaxrl_async.model.spec import ModelSpec
from jaxrl_async.sampler.sampler import Sampler
from jaxrl_async.types import Partial


def pytest_terminal_summary(terminalreporter):
    if rows := table():
        terminalreporter.section("clients")
        terminalreporter.write_line("\n".join(rows))


@dataclass
class HeldRun:
    """A run whose samplers say a script."""

    model: tuple[str, ...]  # overrides that train a tiny model with Qwen3's chat format
    script: Callable[[str], str | list[str]] = scripted_text
    prompts: list[str] = field(default_factory=list)
    versions: set[int] = field(default_factory=set)  # of all sampled tokens


@pytest.fixture
def held_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[HeldRun]:
    """Hold the samplers of this process to a script, by constraints."""
    pytest.importorskip("llguidance", reason="needs the extra [structured]")
    tokenizer, start_many, folder = byte_tokenizer(QWEN3), Sampler.start_many, tmp_path / "model"
    spec = ModelSpec.from_architecture(SHAPE, -(-tokenizer.vocab_size // 8) * 8)
    Policy(spec, init_params(spec, jax.random.key(3)), tokenizer).save_pretrained(folder)
    run = HeldRun((f"model.path={folder}", f"data.tokenizer={folder}"))

    def start(self, requests):
        new = [not isinstance(request, Partial) for request in requests]
        run.prompts += [tokenizer.decode(r.token_ids) for r in compress(requests, new)]
        held = (
            dictated(r, tokenizer, run.script) if n else r
            for r, n in zip(requests, new, strict=True)
        )
        futures = start_many(self, list(held))
        for future in futures:
            future.add_done_callback(keep)
        return futures

    def keep(done):
        if not done.cancelled() and done.exception() is None:
            run.versions.update(done.result().versions.tolist())

    monkeypatch.setattr(Sampler, "start_many", start)
    yield run
