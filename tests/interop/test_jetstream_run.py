"""A run whose answers an engine of JetStream's interface samples: sampler.engine=jetstream."""

import importlib.util
import sys
from pathlib import Path

import jax
import numpy as np
import pytest

from jaxrl_async.config.load import load
from jaxrl_async.config.schema import ArchitectureSection
from jaxrl_async.errors import ConfigError, RolloutError
from jaxrl_async.interop.foreign import ForeignSampler
from jaxrl_async.interop.jetstream import make_engine
from jaxrl_async.interop.jetstream_samplers import engine_seed
from jaxrl_async.metrics.recorder import read_lines
from jaxrl_async.model.decoder import init_params
from jaxrl_async.model.policy import Policy
from jaxrl_async.model.spec import ModelSpec
from jaxrl_async.run.loop import train
from jaxrl_async.types import Request, SamplingParams

INSTALLED = importlib.util.find_spec("jetstream") is not None
needs_jetstream = pytest.mark.skipif(
    not INSTALLED, reason="needs google-jetstream, slim (docs/engines.md)"
)
NAIVE = f"{Path(__file__).parent / 'naive_engine.py'}"
TINY = (
    "model.architecture={layers: 2, width: 64, heads: 4, kv_heads: 2, head_dim: 16, mlp: 128}",
    "data.addition={digits: 2, eval_size: 64}",
    "data.max_prompt_tokens=16",
    "sampler={engine: jetstream, slots: 32, max_length: 32, max_new_tokens: 8}",
    "algorithm={group_size: 8, groups_per_step: 8, learning_rate: 3.0e-3}",
    "trainer={micro_batch_tokens: 1024, warmup_steps: 1}",
    "eval={temperature: 1.0, every: 12}",
    "metrics={peak_flops: 1.0e+9, tensorboard: false}",
)


def lines_of(folder: Path) -> list[dict]:
    return [line for line in read_lines(folder / "metrics.jsonl") if line["step"]]


def checked(folder: Path, versions: int) -> list[dict]:
    """Check what every such run must keep to; return its metrics."""
    lines = lines_of(folder)
    assert {line["policy/recomputed_logprob_share"] for line in lines} == {1.0}
    assert max(line["staleness/max"] for line in lines) <= 1.0
    assert lines[-1]["step"] == versions
    assert sum(line.get("faults/sampler_restarts", 0) for line in lines) == 0
    return lines


@needs_jetstream
@pytest.mark.full
@pytest.mark.exhaustive
def test_a_run_learns_from_what_our_engine_samples_behind_jetstreams_interface(
    tmp_path: Path,
) -> None:
    """The held-out accuracy of sums of two digits rises well above its noise."""
    settings = [
        *TINY,
        "data.addition={digits: 2, eval_size: 128, worked_share: 0.35}",
        "sampler={slots: 64, max_length: 64, max_new_tokens: 40, block: 4}",
        "warm_start={steps: 250, batch_size: 64, learning_rate: 3.0e-3}",
        "algorithm={learning_rate: 5.0e-4, groups_per_step: 16}",
        "trainer.warmup_steps=5",
        "run.steps=130",
        "eval.every=130",
    ]
    folder = train(load({"run": {"dir": str(tmp_path)}}, settings))
    checked(folder, 130)
    held_out = [
        line["eval/accuracy"]
        for line in read_lines(folder / "metrics.jsonl")
        if "eval/accuracy" in line
    ]
    assert held_out[-1] > held_out[0] + 0.1, held_out


@needs_jetstream
@pytest.mark.full
def test_an_engine_of_the_user_gets_every_version(tmp_path: Path) -> None:
    settings = [
        *TINY,
        f"sampler.engine_class={NAIVE}:NaiveEngine",
        "warm_start={steps: 2, batch_size: 8}",
        "run.steps=4",
        "eval.every=0",
        "algorithm.groups_per_step=2",
    ]
    folder = train(load({"run": {"dir": str(tmp_path)}}, settings))
    lines = checked(folder, 4)
    engine = type_of(NAIVE).made[-1]
    assert 1 + sum(1 for _ in lines) >= engine.swapped >= 3, "the first weights, and those after"
    assert engine.longest == 32 and engine.slots == 32


def tiny_policy() -> Policy:
    shape = ArchitectureSection(layers=2, width=32, heads=4, kv_heads=2, head_dim=8, mlp=64)
    spec = ModelSpec.from_architecture(shape, 48)
    return Policy(spec, init_params(spec, jax.random.key(0)))


def type_of(file: str):
    """The class as the run has loaded it."""
    return sys.modules[f"user_{Path(file).stem}"].NaiveEngine


@pytest.mark.full
@needs_jetstream
def test_a_request_of_another_sampling_is_refused() -> None:
    engine = make_engine(tiny_policy(), slots=2, max_length=64)
    with ForeignSampler(engine, sampling=SamplingParams()) as sampler:
        for changes, says in (
            ({"sampling": SamplingParams(temperature=0.5)}, "sampling is"),
            ({"adapter": "mine"}, "adapter is 'mine'"),
            ({"extras": True}, "extras"),
            ({"forced_length": 3}, "forced_length"),
        ):
            request = Request(
                request_id="r", token_ids=np.arange(3, dtype=np.int32), max_new_tokens=4, **changes
            )
            with pytest.raises(RolloutError, match=says):
                sampler.start_many([request])


@pytest.mark.full
@needs_jetstream
def test_an_answer_that_the_engine_ends_is_an_answer() -> None:
    """An engine that samples nothing more for a slot has ended it: nobody waits for ever."""
    engine = make_engine(tiny_policy(), slots=1, max_length=64, max_new_tokens=3)
    with ForeignSampler(engine, sampling=SamplingParams()) as sampler:
        request = Request(request_id="r", token_ids=np.arange(3, dtype=np.int32), max_new_tokens=20)
        assert len(sampler.start_many([request])[0].result(60).token_ids) == 3


@pytest.mark.full
@needs_jetstream
@pytest.mark.parametrize(
    ("settings", "says"),
    [
        (["sampler.engine_class=/nowhere/engine.py:Engine"], "there is no file"),
        ([f"sampler.engine_class={NAIVE}:api"], "has no subclass of jetstream"),
        ([f"sampler.engine_class={NAIVE}:DeafEngine"], "has no method take_params"),
        (["sampler.max_length=24", "data.max_prompt_tokens=20"], "the engine accepts at most 16"),
    ],
)
def test_an_engine_that_cannot_serve_the_run_is_refused(
    tmp_path: Path, settings: list[str], says: str
) -> None:
    given = [*TINY, "warm_start.steps=0", "run.steps=1", "sampler.max_new_tokens=4", *settings]
    with pytest.raises(ConfigError) as found:
        train(load({"run": {"dir": str(tmp_path)}}, given))
    assert says in str(found.value)


@pytest.mark.parametrize(
    ("setting", "says"),
    [
        ("mesh.samplers_in=processes", "Set mesh.samplers_in=threads"),
        ("sampler.on_new_weights=drain", "Set on_new_weights=continue"),
        ("algorithm.correction=tis", "Set correction=null"),
        ("staleness={max_staleness: 2, adapt: ess}", "staleness.adapt=ess needs importance"),
        ("eval.temperature=0.0", "eval.temperature (0)"),
        ("sampler.top_k=5", "sampling mask of each token"),
        ("model.lora={rank: 4, alpha: 8}", "lora"),
        ("weights.dtype=int8", "a format of our sampler"),
        ("sampler.slots=null", "sampler.slots=null"),
        ("sampler.prefix_cache=false", "sampler.prefix_cache (False) has no effect"),
        ("sampler.engine_urls=[http://a]", "exactly with sampler.engine=vllm"),
        ("sampler.engine=native", None),
    ],
)
def test_what_the_interface_has_no_words_for_is_refused_by_name(setting: str, says: str) -> None:
    if says is None:
        load({}, [*TINY, setting])
        with pytest.raises(ConfigError, match=r"sampler\.engine_class .* has no effect"):
            load({}, [*TINY, setting, "sampler.engine_class=a.py:B"])
        return
    with pytest.raises(ConfigError) as found:
        load({}, [*TINY, setting])
    assert says in str(found.value)


def test_an_engines_random_numbers_are_others_after_a_resume() -> None:
    seeds = {engine_seed(0, i, version) for i in range(4) for version in range(50)}
    assert len(seeds) == 200 and engine_seed(0, 1, 7) == engine_seed(0, 1, 7)
