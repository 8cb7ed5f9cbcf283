"""Teachers that compute in this process: what is computed together, failures and their counts."""

import asyncio
import threading
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from builders import episode_of

from jaxrl_async.errors import CheckpointError
from jaxrl_async.teachers.in_process_teacher import InProcessTeacher
from jaxrl_async.testing.fakes import make_prompt


class Model:
    """Log-probs that depend on the tokens alone; its calls can be held up."""

    def __init__(self) -> None:
        self.calls: list[list[int]] = []  # the lengths of each call's sequences
        self.loads = 0
        self.may_go = threading.Event()
        self.may_go.set()
        self.failure: Exception | None = None

    def load(self) -> Any:
        self.loads += 1
        if self.failure is not None:
            raise self.failure
        return self

    def __call__(self, sequences: Sequence[np.ndarray]) -> Any:
        self.calls.append([len(s) for s in sequences])
        assert self.may_go.wait(10)
        return [
            (-s.astype(np.float32), np.zeros((len(s), 0), np.int32), np.zeros((len(s), 0), "f4"))
            for s in sequences
        ]


def teacher(model: Model, max_tokens: int = 64) -> InProcessTeacher:
    return InProcessTeacher("t", model.load, max_tokens=max_tokens, top_k=0, named_tokens=100)


def ids(length: int, first: int = 1) -> np.ndarray:
    return np.arange(first, first + length, dtype=np.int32)


def test_an_episode_gets_the_log_probs_of_its_generated_tokens() -> None:
    model = Model()
    one = teacher(model)
    found = asyncio.run(one.of_episode(episode_of((-1, -1, 0, 0)), 0.5, make_prompt(1)))
    one.close()
    assert found.places.tolist() == [2, 3] and found.logprobs.tolist() == [-3.0, -4.0]
    assert (found.teacher, found.weight, found.spans) == ("t", 0.5, None)
    assert model.loads == 1 and one.counts()["calls"] == 1


def test_questions_that_wait_are_computed_together_up_to_so_many_tokens() -> None:
    model = Model()
    one = teacher(model, max_tokens=24)

    async def all_at_once() -> list[Any]:
        model.may_go.clear()
        first = asyncio.ensure_future(one.of_tokens(ids(2), 0))
        while not model.calls:
            await asyncio.sleep(0.001)
        rest = [asyncio.ensure_future(one.of_tokens(ids(n), 0)) for n in (8, 8, 8, 8, 30, 3)]
        await asyncio.sleep(0.01)
        model.may_go.set()
        return await asyncio.gather(first, *rest)

    answers = asyncio.run(all_at_once())
    one.close()
    assert model.calls == [[2], [8, 8, 8], [8], [30], [3]]
    for length, answer in zip((2, 8, 8, 8, 8, 30, 3), answers, strict=True):
        np.testing.assert_array_equal(answer.logprobs, -ids(length))
    assert one.counts()["calls"] == 5 and model.loads == 1


def test_a_request_that_no_one_waits_for_is_left_out() -> None:
    model = Model()
    one = teacher(model)

    async def cancelled() -> Any:
        model.may_go.clear()
        first = asyncio.ensure_future(one.of_tokens(ids(2), 0))
        while not model.calls:
            await asyncio.sleep(0.001)
        second, third = (asyncio.ensure_future(one.of_tokens(ids(n), 0)) for n in (5, 6))
        await asyncio.sleep(0.01)
        second.cancel()
        await asyncio.sleep(0.01)
        model.may_go.set()
        await asyncio.wait_for(first, 30)
        return await asyncio.wait_for(third, 30)

    assert len(asyncio.run(cancelled()).logprobs) == 6
    one.close()
    assert model.calls == [[2], [6]]


def test_a_failure_reaches_every_caller_and_is_counted() -> None:
    model = Model()
    model.failure = CheckpointError("no such folder")
    one = teacher(model)
    with pytest.raises(CheckpointError, match="no such folder"):
        asyncio.run(one.of_tokens(ids(3), 0))
    assert one.counts()["failures"] == 1
    model.failure = None
    assert len(asyncio.run(one.of_tokens(ids(3), 0)).logprobs) == 3
    one.close()
    one.close()
    assert len(asyncio.run(one.of_tokens(ids(4), 0)).logprobs) == 4, "it begins again"
    one.close()
    assert model.loads == 2
