"""Whatever is asked, it is refused at submit by the field's name, or hurts nobody."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny import VOCAB, make_sampler, request

from jaxrl_async.errors import ConfigError, RolloutError
from jaxrl_async.sampler.request_checks import RequestLimits, checked_request
from jaxrl_async.sampler.router.router import Router
from jaxrl_async.types import Request, SamplingParams

ROOM = RequestLimits(max_length=64, max_new_tokens=32, vocab=VOCAB)
GOOD = Request(request_id="one", token_ids=np.arange(5, dtype=np.int32), max_new_tokens=4)
WRONG = {
    "request_id": [3, None, b"x"],
    "token_ids": [
        "text", np.zeros((2, 2), np.int32), np.zeros(3), np.array([0, VOCAB]), np.array([-7]),
        np.array([2**40]), np.array([True]), None, [[1], [1, 2]], object(), np.array(["a"]),
    ],
    "max_new_tokens": [2.5, 0, -1, None, True, "4", 2**40, 33],
    "forced_length": [0, -1, 2.0, "4", 33],
    "key": [(2**31, 0), (0, -(2**31) - 1), (1,), (1, 2, 3), 7, "ab", (1.0, 2), (None, 1)],
    "branch": [2**31, -1, None, 1.5, "0"],
    "stop_token_ids": [
        (2**40,), "text", (-1,), (VOCAB,), tuple(range(9)), None, (1.0,), 5, np.array(3),
    ],
    "sampling": [None, {}, "greedy"],
    "extras": [None, 1, "yes"],
}  # fmt: skip
WRONG_SAMPLING = {
    "temperature": [-1, float("nan"), float("inf"), 1e-9, 1e300, None, "1", True],
    "top_k": [-5, 2.0, 2**40, None],
    "top_p": [0, 2, -0.1, float("nan"), None],
    "min_p": [1, -0.1, float("nan"), "x"],
}
CASES = [(f, {f: v}) for f, values in WRONG.items() for v in values] + [
    (f"sampling.{f}", {"sampling": replace(SamplingParams(), **{f: v})})
    for f, values in WRONG_SAMPLING.items()
    for v in values
]


@pytest.mark.parametrize(("field", "changes"), CASES, ids=range(len(CASES)))
def test_what_is_wrong_is_refused_by_the_fields_name(field, changes) -> None:
    with pytest.raises(RolloutError, match=field):
        checked_request(replace(GOOD, **changes), ROOM)


def test_an_empty_prompt_is_not_told_to_be_shorter() -> None:
    with pytest.raises(RolloutError, match=r"token_ids is empty.*Give at least one") as caught:
        checked_request(replace(GOOD, token_ids=np.zeros(0, np.int32)), ROOM)
    assert "horten" not in str(caught.value)


def test_what_is_no_request_is_refused() -> None:
    for thing in (None, "text", {"token_ids": [1]}, 5):
        with pytest.raises(RolloutError, match="is not a request"):
            checked_request(thing, ROOM)


def test_what_passes_is_a_copy_in_the_samplers_own_types() -> None:
    ids = np.arange(5, dtype=np.int64)
    sampling = SamplingParams(temperature=1, top_p=np.float32(0.5), top_k=np.int64(3))
    req = replace(GOOD, token_ids=ids, sampling=sampling, key=[np.int64(1), 2])
    passed = checked_request(req, ROOM)
    ids[:] = 40
    assert passed.token_ids.tolist() == [0, 1, 2, 3, 4] and passed.token_ids.dtype == np.int32
    assert passed.key == (1, 2) and type(passed.sampling.top_k) is int
    assert checked_request(replace(GOOD, token_ids=[1, 2]), ROOM).token_ids.tolist() == [1, 2]


anything = st.one_of(
    st.none(), st.booleans(), st.integers(-(2**70), 2**70), st.floats(), st.text(max_size=3),
    st.lists(st.integers(-2, 60), max_size=4), st.tuples(st.integers(), st.integers()),
    st.just(np.array(3)), st.just(np.arange(4).reshape(2, 2)), st.builds(dict),
)  # fmt: skip


@pytest.mark.full
@settings(max_examples=200, deadline=None)
@given(
    st.dictionaries(
        st.sampled_from([f for f in Request.__dataclass_fields__ if f != "sampling"]), anything
    ),
    st.dictionaries(st.sampled_from(list(SamplingParams.__dataclass_fields__)), anything),
)
def test_anything_at_all_is_served_or_refused(changes, sampling) -> None:
    given_ = replace(GOOD, **changes, sampling=replace(SamplingParams(), **sampling))
    try:
        passed = checked_request(given_, ROOM)
    except RolloutError:
        return
    assert passed.token_ids.min() >= 0 and passed.token_ids.max() < VOCAB
    assert len(passed.token_ids) + (passed.forced_length or passed.max_new_tokens) <= 64


@pytest.mark.full
def test_a_malformed_request_hurts_no_neighbour_in_a_sampler_or_behind_a_router() -> None:
    neighbours = [request(i) for i in range(3)]
    with make_sampler() as sampler, Router([make_sampler()]) as router:
        wanted = [c.token_ids.tolist() for c in sampler.generate(neighbours)]
        futures = sampler.start_many(neighbours)
        for _, changes in CASES:
            for part in (sampler, router):
                with pytest.raises(RolloutError):
                    part.generate([replace(GOOD, **changes)])
        assert [f.result(60).token_ids.tolist() for f in futures] == wanted
        assert [c.token_ids.tolist() for c in router.generate(neighbours)] == wanted
        assert sampler.error is None and router.living == 1


@pytest.mark.full
@pytest.mark.parametrize("where", ["_admit", "_start_running", "output"])
def test_what_raises_for_one_request_on_the_samplers_thread_is_that_requests_alone(where) -> None:
    neighbours = [request(i, key=(i, 0)) for i in range(4)]
    with make_sampler() as sampler:
        wanted = [c.token_ids.tolist() for c in sampler.generate(neighbours)]
        batch = sampler.loop.batch
        real = getattr(batch, where)

        def picky(*args):
            if args[-1].request.request_id == "bad":
                raise ValueError("injected")
            return real(*args)

        setattr(batch, where, picky)
        bad = replace(neighbours[0], request_id="bad", key=(9, 9))
        futures = sampler.start_many([neighbours[0], bad, *neighbours[1:]])
        with pytest.raises(ValueError, match="injected"):
            futures.pop(1).result(60)
        assert [f.result(60).token_ids.tolist() for f in futures] == wanted
        sampler.between_blocks(batch.check_integrity)
        assert sampler.error is None and sampler.stats().failed == 1


@pytest.mark.parametrize("seed", [1.5, "0", None, 2**31])
def test_a_seed_that_is_no_whole_number_is_refused_at_once(seed) -> None:
    with pytest.raises(ConfigError, match="seed"):
        make_sampler(seed=seed)
