"""Tokens per second and the FLOP utilisation of a step: each token once, evaluations apart."""

from dataclasses import replace
from pathlib import Path

import jax
import numpy as np
import pytest
from runs import many_digits, run_job

from jaxrl_async.buffer.contents import BufferStats
from jaxrl_async.config import schema
from jaxrl_async.model.decoder import init_params
from jaxrl_async.model.policy import Policy
from jaxrl_async.model.spec import ModelSpec
from jaxrl_async.run.rates import Counters, Observer, Utilisation, combined_rates, rates
from jaxrl_async.sampler.sampler import Sampler
from jaxrl_async.sampler.stats import SamplerStats
from jaxrl_async.types import Request
from jaxrl_async.weights.exchange import ChannelStats

EMPTY = Counters(
    at_s=0.0,
    sampler=SamplerStats(),
    channel=ChannelStats(),
    buffer=BufferStats(
        capacity=1, active=0, in_flight=0, ready=0, admitted=0, trained=0, dropped={}
    ),
    gate_wait_s=0.0,
    living=1,
    faults={},
)
TINY = (
    "model.architecture={layers: 1, width: 16, heads: 2, kv_heads: 1, head_dim: 8, mlp: 16, "
    "vocab: 64}",  # of which the tokenizer has few
    "data.addition.eval_size=16",
    "warm_start.steps=0",
    "sampler.slots=16",
    "sampler.max_new_tokens=8",
    "algorithm.group_size=4",
    "algorithm.groups_per_step=2",
    "staleness.max_staleness=0",
    "metrics.tensorboard=false",
    "metrics.peak_flops=1e3",
)


def test_tokens_of_evaluations_and_guests_are_a_rate_of_their_own() -> None:
    sampler = SamplerStats(generated_tokens=1000, aside_tokens=400)
    after = EMPTY._replace(at_s=2.0, sampler=sampler)
    found = rates(EMPTY, after, 2.0)
    assert found["throughput/generated_tokens_per_s"] == 300.0
    assert found["throughput/aside_tokens_per_s"] == 200.0
    assert combined_rates([found, found])["throughput/aside_tokens_per_s"] == 400.0


@pytest.mark.full
def test_a_sampler_counts_the_tokens_that_are_not_trained_on() -> None:
    shape = schema.ArchitectureSection(layers=1, width=16, heads=2, kv_heads=1, head_dim=8, mlp=16)
    spec = ModelSpec.from_architecture(shape, 32)
    request = Request(request_id="a", token_ids=np.array([1, 2], np.int32), max_new_tokens=5)
    guest = replace(request, request_id="b", max_new_tokens=3, for_training=False)
    with Sampler(Policy(spec, init_params(spec, jax.random.key(0)))) as sampler:
        sampler.generate([request, guest])
        stats = sampler.stats()
    assert (stats.generated_tokens, stats.aside_tokens) == (8, 3)


@pytest.mark.full
def test_a_step_with_an_evaluation_and_two_epochs_counts_each_token_once(tmp_path: Path) -> None:
    more = ("run.steps=2", "eval.every=1", "algorithm.epochs=2", "algorithm.minibatches=2")
    lines = run_job("addition", tmp_path, *TINY, many_digits(tmp_path), *more)[1:]
    assert len(lines) == 2
    for line in lines:
        sampled = 8 * line["rollout/length_mean"]  # of 2 groups of 4
        assert line["train/tokens"] == pytest.approx(sampled)
        assert line["train/updates"] == 4
        trained = line["throughput/trained_tokens_per_s"]
        assert line["throughput/generated_tokens_per_s"] == pytest.approx(trained)
        assert line["throughput/aside_tokens_per_s"] > 0
        assert 0 < line["rollout/unknown_tokens"] < sampled
        assert 0 < line["throughput/mfu"] <= 1  # though the peak is set a million times too low


@pytest.mark.parametrize("measured", [True, False])
def test_no_share_of_the_peak_is_above_1(measured: bool, caplog: pytest.LogCaptureFixture) -> None:
    share = Utilisation(100.0, measured=measured)
    assert share.of(50.0, 1.0) == 0.5
    assert share.of(400.0, 2.0) == 1.0
    assert share.of(100.0, 1.0) == 0.5  # of the faster peak
    assert ("metrics.peak_flops is too low" in caplog.text) is not measured


@pytest.mark.full
def test_an_observer_divides_by_the_wall_time_of_the_step() -> None:
    readings = iter([EMPTY, EMPTY._replace(at_s=4.0)])
    observer = Observer(lambda: next(readings), utilisation=Utilisation(10.0, measured=True))
    values = {"train/flops": 40.0, "time/train_s": 2.0, "train/tokens": 100.0}
    found = observer.complete(values)
    assert found["throughput/trained_tokens_per_s"] == 25.0
    assert found["throughput/mfu"] == 1.0
