"""What a difference on the probe says: rounding of every kind is taken, a fault is not."""

import logging

import numpy as np
import pytest

from jaxrl_async.errors import WeightsError
from jaxrl_async.sampler.probe import (
    FLOAT32,
    LENGTH,
    Probe,
    ProbeJudge,
    difference,
    probe_tokens,
    rounding_share,
)

RNG = np.random.default_rng(0)
TRAINER = -RNG.gamma(1.0, 4.0, LENGTH - 1).astype(np.float32)  # as a prompt's: -0.1 to -20 nats


def probe(**settings) -> Probe:
    return Probe(token_ids=np.arange(LENGTH, dtype=np.int32), **settings)


def rounded(share: float) -> np.ndarray:
    """The trainer's log-probs, each changed by up to this share of 1 + |log-prob|."""
    return TRAINER + RNG.uniform(-1, 1, TRAINER.shape) * share * (1 - TRAINER)


@pytest.mark.parametrize("platform", ["cpu", "gpu", "tpu"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("rounded_to", [None, "int8", "float8_e4m3fn"])
@pytest.mark.parametrize("layers", [1, 30, 100])
def test_rounding_of_every_type_is_taken_in_silence(platform, dtype, rounded_to, layers):
    share = rounding_share(dtype=dtype, rounded_to=rounded_to, platform=platform, layers=layers)
    found = difference(probe(rounding=share), rounded(share * 0.99), TRAINER)
    assert not found.is_more and not found.is_fault


MEASURED = {
    "float32, a run's third version": ("float32", None, -60.0, 0.00122),
    "bfloat16, a splash trainer": ("bfloat16", None, -1.0, 0.125),
    "bfloat16, random tokens": ("bfloat16", None, -18.0, 1.34),
    "int8": ("float32", "int8", -2.0, 0.55),
}


@pytest.mark.parametrize("case", MEASURED)
def test_what_was_measured_with_a_model_of_30_layers_is_rounding(case):
    dtype, rounded_to, logprob, apart = MEASURED[case]
    share = rounding_share(dtype=dtype, rounded_to=rounded_to, platform="cpu", layers=30)
    trainer = np.full(LENGTH - 1, logprob, np.float32)
    found = difference(probe(rounding=share), trainer + np.float32(apart), trainer)
    assert not found.is_more and not found.is_fault


def test_one_token_far_away_is_told_and_half_of_them_are_a_fault():
    share = rounding_share(dtype="bfloat16", rounded_to=None, platform="cpu", layers=30)
    one, half = TRAINER.copy(), TRAINER.copy()
    one[3] -= 10
    half[: LENGTH // 2] -= 20
    found = difference(probe(rounding=share), one, TRAINER)
    assert found.is_more and not found.is_fault and found.largest == pytest.approx(10)
    assert difference(probe(rounding=share), half, TRAINER).is_fault


def test_a_tolerance_of_ones_own_is_of_every_token_and_may_widen_what_is_no_fault():
    apart = TRAINER - 0.5
    assert difference(probe(tolerance=0.1), apart, TRAINER).is_fault
    found = difference(probe(tolerance=0.6), apart, TRAINER)
    assert not found.is_fault and not found.is_more


@pytest.mark.parametrize("value", [np.nan, -np.inf])
def test_a_number_that_is_not_finite_is_a_fault_on_either_side(value):
    broken = TRAINER.copy()
    broken[5] = value
    assert difference(probe(), broken, TRAINER).is_fault
    assert difference(probe(), TRAINER, broken).is_fault
    with pytest.raises(WeightsError, match="the sampler's log-probs on the probe are not finite"):
        judge(as_trained=True).judge(1, broken, TRAINER, compared=True)


def judge(**settings) -> ProbeJudge:
    return ProbeJudge(probe(**settings), "the sampler's", "Look at it.")


def test_checksums_of_weights_as_they_are_trained_decide(caplog):
    others = TRAINER - 5
    for as_trained, compared in ((False, True), (True, False), (False, False)):
        with pytest.raises(WeightsError, match="which no rounding explains"):
            judge(as_trained=as_trained).judge(7, others, TRAINER, compared=compared)
    assert judge(as_trained=True).judge(7, others, TRAINER, compared=True) == pytest.approx(5)
    assert "the two programs compute different functions" in caplog.text


def test_a_difference_is_told_at_the_1st_2nd_4th_and_8th_time(caplog):
    caplog.set_level(logging.WARNING)
    strict = judge(tolerance=1e-9)
    for version in range(1, 11):
        strict.judge(version, TRAINER + np.float32(1e-3), TRAINER, compared=True)
    versions = [int(r.getMessage().split("version ")[1].split(":")[0]) for r in caplog.records]
    assert versions == [1, 2, 4, 8]


def test_a_probe_is_of_the_prompts_and_any_tokens_where_there_is_no_text():
    texts = [np.array([5, 6, 7]), np.array([8, 99, 9]), np.array([1, 2])]
    ids = probe_tokens(texts, vocab=50)
    assert ids.dtype == np.int32 and ids.tolist() == ([5, 6, 7, 1, 2] * 7)[:LENGTH]
    assert probe_tokens(texts[1:2], 50).tolist() == probe_tokens([], 50).tolist()
    assert len(set(probe_tokens([], 50).tolist())) > 20


@pytest.mark.full
def test_one_token_of_huge_hidden_states_is_rounding_in_float32():
    """SmolLM2's second token, in each of its first updates: 0.00143 nats, the median 0.0000134."""
    others = TRAINER.copy()
    others[0] += np.float32(1.43e-3)
    probe = Probe(token_ids=np.arange(len(TRAINER) + 1, dtype=np.int32), rounding=FLOAT32)
    found = difference(probe, others, TRAINER)
    assert found.largest == pytest.approx(1.43e-3, rel=1e-3) and not found.is_more
    others[0] += np.float32(0.01)
    assert difference(probe, others, TRAINER).is_more
