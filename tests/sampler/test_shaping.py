"""Biases, minimum lengths and penalties: logits by their formulas in float64."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from test_extras import log_softmax, logits_before
from tiny import PARAMS, SPEC, VOCAB, make_sampler, request

from jaxrl_async.config import schema
from jaxrl_async.errors import RolloutError
from jaxrl_async.sampler.sampler import Sampler
from jaxrl_async.types import LogitShaping, Request, SamplingParams

pytestmark = pytest.mark.full
CASES = (
    LogitShaping(bias=((3, 2.5), (7, -100.0), (11, -1.0))),
    LogitShaping(frequency_penalty=0.7),
    LogitShaping(presence_penalty=-1.5),
    LogitShaping(repetition_penalty=1.3),
    LogitShaping(repetition_penalty=0.8, frequency_penalty=-0.4, presence_penalty=0.9,
                 bias=((0, 4.0),), min_tokens=9),
)  # fmt: skip


def asked(number: int, shaping: LogitShaping | None, **more: Any) -> Request:
    base = {"sampling": SamplingParams(), "max_new_tokens": 20, "stop_token_ids": (1,)}
    return request(number, shaping=shaping, **{**base, **more})


def shaped64(logits: np.ndarray, of: LogitShaping, prompt: np.ndarray, answer: np.ndarray):
    """[vocab] float64: the formulas, token by token."""
    out = logits.copy()
    if len(answer) < of.min_tokens:
        out[1] = -np.inf
    for token, value in of.bias:
        out[token] += value
    for token in range(VOCAB):
        times = int((answer == token).sum())
        if times or token in prompt:
            factor = of.repetition_penalty
            out[token] = out[token] / factor if out[token] > 0 else out[token] * factor
        out[token] -= times * of.frequency_penalty + (times > 0) * of.presence_penalty
    return out


@pytest.mark.parametrize("number", range(len(CASES)))
@pytest.mark.parametrize("temperature", [1.0, 0.7, 0.0])
def test_log_probs_are_those_of_the_formulas(number: int, temperature: float) -> None:
    shaping = CASES[number]
    wanted = asked(50 + number, shaping, sampling=SamplingParams(temperature=temperature))
    with make_sampler(block=8) as sampler:
        done, _ = sampler.generate([wanted, asked(60, None)])
    logits = logits_before(wanted.token_ids, done.token_ids)
    for t, token in enumerate(done.token_ids):
        own = shaped64(logits[t], shaping, wanted.token_ids, done.token_ids[:t])
        if temperature == 0:
            assert own[token] >= own.max() - 1e-4
        expected = log_softmax(own / (temperature or 1.0))[token]
        assert done.logprobs[t] == pytest.approx(expected, abs=1e-4)
    assert len(done.token_ids) > shaping.min_tokens


def test_shaped_requests_do_not_depend_on_slots_or_preemption() -> None:
    requests = [asked(70 + i, CASES[i % 5], key=(i, 0)) for i in range(8)]
    plain = asked(90, None)
    roomy, crowded = make_sampler(), make_sampler(kv_memory_mib=8 * 16 * 2 * 2 * 2 * 8 * 4 / 2**20)
    with roomy, crowded, make_sampler(slots=1) as narrow:
        together = roomy.generate([*requests, plain])
        squeezed = crowded.generate([*requests, plain])
        alone = [narrow.generate([one])[0] for one in (*requests, plain)]
        assert crowded.stats().preempted
    for one, other, third in zip(together, squeezed, alone, strict=True):
        np.testing.assert_array_equal(one.token_ids, other.token_ids)
        np.testing.assert_array_equal(one.token_ids, third.token_ids)
        np.testing.assert_allclose(one.logprobs, third.logprobs, atol=1e-5)


def test_reserve_slots_have_their_own_counts() -> None:
    requests = [asked(100 + i, CASES[i % 4], max_new_tokens=3 + 5 * (i % 3)) for i in range(9)]
    section = schema.SamplerSection(
        slots=2, reserve=1.0, max_length=64, max_new_tokens=32, block=8, page_tokens=16
    )
    with Sampler((SPEC, PARAMS), section=section) as sampler, make_sampler(slots=1) as narrow:
        for req, done in zip(requests, sampler.generate(requests), strict=True):
            (own,) = narrow.generate([req])
            np.testing.assert_array_equal(done.token_ids, own.token_ids)
            np.testing.assert_allclose(done.logprobs, own.logprobs, atol=1e-5)


def test_without_shaping_nothing_more_is_compiled() -> None:
    with make_sampler() as sampler:
        sampler.generate([asked(1, None)])
        before = sampler.stats().compiled_programs
        sampler.generate([asked(1, LogitShaping())])
        assert sampler.stats().compiled_programs == before, "the default changes nothing"
        sampler.generate([asked(1, LogitShaping(min_tokens=2))])
        assert sampler.stats().compiled_programs > before


@pytest.mark.parametrize(
    ("shaping", "text"),
    [
        (LogitShaping(bias=((VOCAB, 1.0),)), "shaping.bias"),
        (LogitShaping(bias=((1, 101.0),)), "shaping.bias must be pairs with a number of -100"),
        (LogitShaping(bias=((1, 1.0), (1, 2.0))), "different token ids"),
        (LogitShaping(bias=tuple((i % 48, 1.0) for i in range(513))), "at most 512 pairs"),
        (LogitShaping(frequency_penalty=2.1), "frequency_penalty must be from -2 to 2"),
        (LogitShaping(presence_penalty=float("nan")), "presence_penalty must be a finite number"),
        (LogitShaping(repetition_penalty=0.0), "repetition_penalty must be from 1e-06"),
        (LogitShaping(repetition_penalty=1e-40), "repetition_penalty must be from 1e-06"),
        (LogitShaping(min_tokens=-1), "min_tokens"),
        (LogitShaping(min_tokens=21), "min_tokens must be at most 20"),
        ("json", "shaping must be LogitShaping or None"),
        (LogitShaping(constraint="json"), "shaping.constraint must be a Constraint"),
    ],
)
def test_wrong_values_are_refused(shaping: Any, text: str) -> None:
    with make_sampler() as sampler, pytest.raises(RolloutError, match=text):
        sampler.checked([replace(asked(1, None), shaping=shaping)])
