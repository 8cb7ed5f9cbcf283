"""Evaluation: every held-out prompt once, and means that are means."""

import asyncio
from dataclasses import replace

import numpy as np
import pytest

from jaxrl_async.errors import RolloutError
from jaxrl_async.metrics.fault_counts import FaultCounts
from jaxrl_async.rollout.env import GuardedEnvs, SingleTurn
from jaxrl_async.rollout.evaluate import EvalEffort, evaluate
from jaxrl_async.run.lockstep import Lockstep
from jaxrl_async.run.reporting import Evaluation
from jaxrl_async.scorers.guard import GuardedScorer
from jaxrl_async.types import Completion, EpisodeLimits, Prompt, SamplingParams, Score, StopReason


def prompt(i):
    ids = np.array([i], np.int32)
    return Prompt(prompt_id=i, position=1000 + i, token_ids=ids, text=f"p{i}", reference=f"r{i}")


class ScriptedGenerate:
    """Answers prompt i with i + 1 tokens; the last prompt is cut off."""

    seed = None

    def __init__(self):
        self.requests = []

    def submit_many(self, requests):
        assert not self.requests, "all prompts are queued in one call"
        self.requests = list(requests)
        return [self._answer(r, last=r is requests[-1]) for r in requests]

    def _answer(self, request, last):
        future = asyncio.get_running_loop().create_future()
        count = int(request.token_ids[0]) + 1
        future.set_result(
            Completion(
                request_id=request.request_id,
                token_ids=np.full(count, 5, np.int32),
                logprobs=np.zeros(count, np.float32),
                versions=np.zeros(count, np.int32),
                stop=StopReason.LENGTH if last else StopReason.EOS,
            )
        )
        return future


async def even_scorer(episodes, prompt):
    assert len(episodes) == 1
    right = prompt.prompt_id % 2 == 0
    return (Score(reward=3.0 if right else 0.25, parts={"correct": float(right)}),)


def run(prompts, scorer=even_scorer, **change):
    generate = ScriptedGenerate()
    settings = {"stop_token_ids": (0,), "max_new_tokens": 50, "max_length": 100}
    return asyncio.run(evaluate(generate, prompts, scorer, **settings, **change)), generate


def test_every_prompt_is_played_once_greedily():
    result, generate = run([prompt(i) for i in range(20)])
    assert [r.request_id for r in generate.requests] == [f"eval/{i}/m0/t0" for i in range(20)]
    assert {r.sampling.temperature for r in generate.requests} == {0.0}
    assert result.num_prompts == 20


def test_the_means_are_over_all_prompts():
    result, _ = run([prompt(i) for i in range(4)], decode=lambda ids: "x" * len(ids), num_samples=2)
    assert result.mean_reward == pytest.approx((3 + 0.25 + 3 + 0.25) / 4)
    assert result.accuracy == 0.5
    assert result.mean_length_tokens == pytest.approx((1 + 2 + 3 + 4) / 4)
    assert result.truncated_share == 0.25
    shown = [(s.prompt, s.completion, s.reference, s.reward) for s in result.samples]
    assert shown == [("p0", "x", "r0", 3.0), ("p1", "xx", "r1", 0.25)]


def test_the_accuracy_is_the_mean_of_the_part_correct_and_of_nothing_else():
    def scored(*parts):
        async def scorer(episodes, prompt):
            return (Score(reward=7.0, parts=parts[prompt.prompt_id]),)

        return run([prompt(i) for i in range(len(parts))], scorer)[0].accuracy

    assert scored({"correct": 1.0}, {"correct": 0.5}) == 0.75
    assert scored({"right": 1.0}, {}) is None
    assert scored({"correct": 1.0}, {}) == 0.5


def test_an_evaluation_whose_answers_are_all_cut_off_has_an_accuracy_once_it_is_known():
    def scored(**parts):
        async def scorer(episodes, prompt):
            return (Score(reward=0.0, parts=parts),)

        return GuardedScorer(scorer, timeout_s=20)

    class Fresh:
        seed = None

        def submit_many(self, requests):
            return ScriptedGenerate().submit_many(requests)

    limits = EpisodeLimits(
        sampling=SamplingParams(), stop_token_ids=(0,), max_new_tokens=50, max_length=100
    )
    evaluation = Evaluation(
        generate=Fresh(),
        prompts=[prompt(0), prompt(1)],
        scorer=scored(),
        make_env=SingleTurn,
        limits=limits,
        lockstep=Lockstep(),
        faults=FaultCounts(),
        gives_up=lambda: False,
    )
    asked = [evaluation, replace(evaluation, scorer=scored(correct=0.5)), evaluation]
    assert [one.run().get("eval/accuracy") for one in asked] == [None, 0.5, 0.0]


def test_no_prompts_are_refused():
    with pytest.raises(RolloutError, match="no held-out prompts"):
        run([])


@pytest.mark.parametrize(
    "failure", [ValueError("x"), SystemExit(0), asyncio.CancelledError(), MemoryError()], ids=repr
)
def test_whatever_a_users_code_raises_is_an_evaluation_left_out(failure):
    async def broken(episodes, prompt):
        raise failure

    class Broken(SingleTurn):
        async def step(self, prompt, completion):
            raise failure

    with pytest.raises(RolloutError, match=type(failure).__name__):
        run([prompt(0), prompt(1)], GuardedScorer(broken, timeout_s=20))
    with pytest.raises(RolloutError, match=type(failure).__name__):
        broken_env = GuardedEnvs(Broken, timeout_s=20, vocab_size=9)
        run([prompt(0), prompt(1), prompt(2)], make_env=broken_env)


def test_a_record_whose_scoring_fails_costs_that_record_alone(caplog):
    async def picky(episodes, prompt):
        if prompt.prompt_id == 1:
            raise RolloutError("no right answer to compare with")
        return await even_scorer(episodes, prompt)

    counted = []
    result, _ = run([prompt(i) for i in range(4)], picky, effort=EvalEffort(count=counted.append))
    assert result.num_prompts == 3 and result.mean_reward == pytest.approx((3 + 3 + 0.25) / 3)
    assert counted == ["eval_left_out"]
    assert "skipping held-out prompt 1 in this evaluation: no right answer" in caplog.text
    with pytest.raises(RolloutError, match="no right answer"):
        run([prompt(1), prompt(1), prompt(0)], picky)


def test_a_failing_scorer_is_raised():
    async def broken(episodes, prompt):
        raise RolloutError("scorer is broken")

    with pytest.raises(RolloutError, match="scorer is broken"):
        run([prompt(0), prompt(1)], broken)


class SampledGenerate(ScriptedGenerate):
    """Each sample has other tokens; the first tries of sample 1 of prompt 2 fail."""

    failures = 0

    def submit_many(self, requests):
        self.requests += requests
        return [self._sampled(request) for request in requests]

    def _sampled(self, request):
        position, sample = request.key
        future = asyncio.get_running_loop().create_future()
        if (position, sample) == (1002, 1) and self.failures:
            self.failures -= 1
            future.set_exception(RolloutError("the line is dead"))
            return future
        tokens = np.full(sample + 1, 10 * (position - 1000) + sample, np.int32)
        zeros = np.zeros(len(tokens))
        future.set_result(
            Completion(
                request_id=request.request_id,
                token_ids=tokens,
                logprobs=zeros.astype(np.float32),
                versions=zeros.astype(np.int32),
                stop=StopReason.EOS,
            )
        )
        return future


async def by_token(episodes, prompt):
    return tuple(Score(reward=float(episode.token_ids[-1])) for episode in episodes)


def sampled(failures=0, retries=0, counted=None):
    generate = SampledGenerate()
    generate.failures = failures
    effort = EvalEffort(
        retries=retries, backoff_s=0.001, count=([] if counted is None else counted).append
    )
    settings = {"stop_token_ids": (0,), "max_new_tokens": 50, "max_length": 100}
    prompts = [prompt(i) for i in range(4)]
    work = evaluate(
        generate, prompts, by_token, samples=3, label="eval/x", effort=effort, **settings
    )
    return asyncio.run(work), generate


def test_each_sample_of_a_prompt_has_its_own_randomness_and_all_are_scored_together():
    result, generate = sampled()
    ids = [f"eval/x/{i}/m{m}/t0" for i in range(4) for m in range(3)]
    assert [r.request_id for r in generate.requests] == ids
    assert {r.key for r in generate.requests} == {(1000 + i, m) for i in range(4) for m in range(3)}
    assert [p.index for p in result.played] == [0, 1, 2, 3] and result.num_prompts == 4
    assert [p.samples for p in result.played] == [(0, 1, 2)] * 4
    assert [p.rewards for p in result.played][2] == (20.0, 21.0, 22.0)
    assert result.mean_reward == 16.0 and result.mean_length_tokens == 2.0


def test_a_sample_that_fails_is_tried_again_alone_and_else_its_prompt_is_left_out():
    counted = []
    result, generate = sampled(failures=1, retries=1, counted=counted)
    assert counted == ["eval_retries"] and result.num_prompts == 4
    assert [r.request_id for r in generate.requests][12:] == ["eval/x/2.1/m1/t0"]
    assert result.played[2].rewards == (20.0, 21.0, 22.0)
    counted.clear()
    result, _ = sampled(failures=2, retries=1, counted=counted)
    assert counted == ["eval_retries", "eval_left_out"]
    assert [p.index for p in result.played] == [0, 1, 3]


def test_the_errors_of_the_runs_own_evaluation_are_over_its_prompts():
    async def scorer(episodes, prompt):
        right = float(prompt.prompt_id % 3 == 0)
        return (Score(reward=2 * right, parts={"correct": right}),)

    limits = EpisodeLimits(
        sampling=SamplingParams(), stop_token_ids=(0,), max_new_tokens=50, max_length=100
    )
    evaluation = Evaluation(
        generate=ScriptedGenerate(),
        prompts=[prompt(i) for i in range(6)],
        scorer=GuardedScorer(scorer, timeout_s=20),
        make_env=SingleTurn,
        limits=limits,
        lockstep=Lockstep(),
        faults=FaultCounts(),
        gives_up=lambda: False,
    )
    measured = evaluation.run()
    usual = np.std([1, 0, 0, 1, 0, 0], ddof=1) / np.sqrt(6)
    assert measured["eval/accuracy_stderr"] == pytest.approx(usual)
    assert measured["eval/reward_stderr"] == pytest.approx(2 * usual)
