"""GRPO in one thread, written anew, against the run with its threads: the same bit for bit.

    weights ──Sampler──> answers ──> rewards ──> (r - mean) / std ──> rows ──Update──> weights

What is written anew: the order of things, the requests, rewards, advantages and rows, and how new
weights reach a sampler (each version has a sampler of its own, which nothing outlives). What is the
run's: the prompts, the compiled programs, and which requests met in the sampler after which block
(schedule.jsonl), since another program or other company rounds the last bit differently.
"""

import json
from functools import partial
from pathlib import Path

import jax
import numpy as np
import pytest

from jaxrl_async.config.load import load
from jaxrl_async.config.schema import Config
from jaxrl_async.data.addition import addition_tokenizer
from jaxrl_async.data.prompts import eval_prompts, make_prompts
from jaxrl_async.mesh import make_slices
from jaxrl_async.metrics.recorder import read_lines
from jaxrl_async.model.decoder import init_params
from jaxrl_async.model.policy import Policy
from jaxrl_async.model.spec import ModelSpec
from jaxrl_async.ports.run import Intake
from jaxrl_async.run.builders.learning import make_step
from jaxrl_async.run.loop import train
from jaxrl_async.sampler.sampler import Sampler
from jaxrl_async.sampler.setup import SamplerSettings
from jaxrl_async.trainer.objectives.policy_objective import PolicyData
from jaxrl_async.types import NOT_DRAWN, PackedBatch, Request, SamplingParams

pytestmark = pytest.mark.full

ROOT = Path(__file__).parents[2]
STEPS, GROUPS, MEMBERS, LONGEST, ROW = 3, 3, 4, 16, 48
REWARD = """
def digits(prompt, completion, reference):
    return sum(c.isdigit() for c in completion) / 16
"""
WISHES = (
    "model.architecture={layers: 1, width: 16, heads: 2, kv_heads: 1, head_dim: 8, mlp: 32, "
    "vocab: 24}",
    "data.addition.eval_size=4",
    "warm_start.steps=0",
    f"sampler={{slots: 16, max_length: {ROW}, max_new_tokens: {LONGEST}, block: 4}}",
    f"algorithm={{group_size: {MEMBERS}, groups_per_step: {GROUPS}, learning_rate: 1.0e-2, "
    "epochs: 1, minibatches: 1}",
    # several micro-batches of two rows; the loop packs answers apart (test_shared_prompts has both)
    "trainer={micro_batch_tokens: 96, warmup_steps: 0, share_prefixes: false}",
    "staleness.max_staleness=0",
    f"run.steps={STEPS}",
    "eval.every=2",
    "checkpoint.every=0",
    "metrics={peak_flops: 1.0e+9, tensorboard: false}",
)


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Config:
    folder = tmp_path_factory.mktemp("runs")
    reward = folder / "reward.py"
    reward.write_text(REWARD)
    named = (f"run.dir={folder}", f"reward.function={reward}:digits")
    return load(ROOT / "configs" / "addition.yaml", [*WISHES, *named])


@pytest.fixture(scope="module")
def threaded(config: Config) -> tuple[list[dict], Policy]:
    """Metrics and last weights of the run as it is used."""
    train(config)
    folder = Path(config.run.dir) / config.run.name
    return read_lines(folder / "metrics.jsonl"), Policy.from_pretrained(folder / "policy")


# ---- the loop of one thread


class Company:
    """Who met in the run's sampler: a ports.Schedule of one version's blocks."""

    def __init__(self, config: Config, version: int) -> None:
        schedule = Path(config.run.dir) / config.run.name / "schedule.jsonl"
        events = [json.loads(line) for line in schedule.read_text().splitlines()]
        events = [e for e in events if "sampler" in e]
        begins = {e["version"]: e["block"] for e in events if e["version"]} | {0: 0}
        first, last = begins[version], begins.get(version + 1, 1 << 30)
        taken = [(e["block"] - first, e["take"]) for e in events if first <= e["block"] < last]
        self._taken = [(block, take) for block, take in taken if take]

    def due(self, sampler: str, block: int, working: bool) -> Intake:
        now = self._taken[0][1] if self._taken and self._taken[0][0] == block else ()
        return Intake(requests=tuple(now), cancelled=(), version=None)

    def write(self, **event: object) -> None:
        assert event["take"] == self._taken.pop(0)[1]


@pytest.fixture(scope="module")
def plain(config: Config, threaded) -> tuple[list[dict], dict]:
    """The same of the loop."""
    tokenizer, slices = addition_tokenizer(), make_slices(config.mesh)
    prompts = make_prompts(config.data, tokenizer, config.run.seed)
    spec = ModelSpec.from_architecture(config.model.architecture, 24)
    step = make_step(config, spec, slices, STEPS)
    first = jax.jit(partial(init_params, spec))(jax.random.key(config.run.seed))
    state = step.init(first)
    lines = []
    for version in range(STEPS + 1):
        params = jax.tree.map(np.asarray, state.params)
        sampler = Sampler(
            (spec, params),
            section=config.sampler,
            mesh=slices.samplers[0],
            seed=config.run.seed,
            version=version,
            settings=SamplerSettings(one_thread=True, schedule=Company(config, version)),
        )
        evaluation = {}
        if version in (0, 2, STEPS):
            held_out = dict(enumerate(eval_prompts(config.data, tokenizer)))
            evaluation = evaluated(sampler, held_out, tokenizer)
        lines.append({**(lines.pop() if version else {}), **evaluation})
        if version < STEPS:
            first = version * GROUPS
            requests = {first + index: next(prompts) for index in range(GROUPS)}
            answers = answers_to(sampler, requests, tokenizer)
            rewards = rewards_of(answers, tokenizer)
            data = PolicyData(packed(answers, rewards, version), version=version)
            state, stats = step.update(state, data, at=version)
            del stats["train/flops"]  # the run reports a share of the peak instead
            lines.append({"reward/mean": rewards.mean(), "reward/std": rewards.std(), **stats})
        sampler.close()
    return lines, jax.tree.map(np.asarray, state.params)


def answers_to(sampler, prompts, tokenizer, name="g{}", members=MEMBERS, temperature=1.0):
    """(prompt, completion) of each member of each group; prompts: by the group's number."""
    requests = [
        Request(
            request_id=f"{name.format(number)}/m{member}/t0",
            token_ids=prompt.token_ids,
            max_new_tokens=LONGEST,
            sampling=SamplingParams(temperature=temperature),
            stop_token_ids=tokenizer.eos_ids,
            key=(prompt.position, member),
        )
        for number, prompt in prompts.items()
        for member in range(members)
    ]
    completions = sampler.generate(requests)
    return [(r.token_ids, c) for r, c in zip(requests, completions, strict=True)]


def evaluated(sampler, prompts, tokenizer) -> dict[str, float]:
    answers = answers_to(sampler, prompts, tokenizer, "eval/{}", members=1, temperature=0.0)
    lengths = [len(c.token_ids) for _, c in answers]
    reward = rewards_of(answers, tokenizer, members=1).mean()
    return {"eval/reward": reward, "eval/length_mean": np.mean(lengths)}


def rewards_of(answers, tokenizer, members=MEMBERS) -> np.ndarray:
    """[groups, members] float64."""
    texts = [tokenizer.decode(c.token_ids) for _, c in answers]
    found = [sum(c.isdigit() for c in text) / 16 for text in texts]
    return np.array(found).reshape(-1, members)


def packed(answers, rewards, version: int) -> PackedBatch:
    """Each sequence, the longest first, in the first row that has room for it."""
    sizes = [len(prompt) + len(c.token_ids) for prompt, c in answers]
    rows: list[list[int]] = []
    for number in sorted(range(len(sizes)), key=lambda n: -sizes[n]):
        fitting = [r for r in rows if sum(sizes[n] for n in r) + sizes[number] <= ROW]
        if not fitting:
            rows.append([])
        (fitting or rows[-1:])[0].append(number)
    centered = rewards - rewards.mean(1, keepdims=True)
    advantages = (centered / (rewards.std(1, keepdims=True) + 1e-6)).ravel()
    ints = {"token_ids": 0, "positions": 0, "segment_ids": 0, "versions": NOT_DRAWN}
    ints |= {"sequence_ids": -1, "group_ids": -1}
    shape = (len(rows), ROW)
    out = {name: np.full(shape, fill, np.int32) for name, fill in ints.items()}
    out |= {n: np.zeros(shape, np.float32) for n in ("behavior_logprobs", "advantages")}
    out |= {n: np.zeros(shape, bool) for n in ("mask", "supervised")}
    for row, members in enumerate(rows):
        start = 0
        for segment, number in enumerate(members, 1):
            prompt, completion = answers[number]
            first, end = start + len(prompt), start + sizes[number]
            out["token_ids"][row, start:end] = [*prompt, *completion.token_ids]
            out["positions"][row, start:end] = range(sizes[number])
            out["segment_ids"][row, start:end] = segment
            out["sequence_ids"][row, start:end] = number
            out["group_ids"][row, start:end] = number // MEMBERS
            out["mask"][row, first:end] = True
            out["behavior_logprobs"][row, first:end] = completion.logprobs
            out["versions"][row, first:end] = version
            out["advantages"][row, first:end] = advantages[number]
            start = end
    return PackedBatch(**out)


# ---- the two side by side


def test_the_threaded_run_has_the_metrics_of_one_thread_bit_for_bit(threaded, plain) -> None:
    assert len(threaded[0]) == len(plain[0]) == STEPS + 1
    for line, evaluation in zip(threaded[0], plain[0], strict=True):
        assert {k: line[k] for k in evaluation} == {k: float(v) for k, v in evaluation.items()}
    assert all("eval/reward" in plain[0][version] for version in (0, 2, STEPS))


def test_the_threaded_run_ends_with_the_weights_of_one_thread_bit_for_bit(threaded, plain) -> None:
    jax.tree.map(np.testing.assert_array_equal, threaded[1].params, plain[1])


def test_the_comparison_is_of_steps_that_learn(plain) -> None:
    """Rewards differ in the groups, rows hold several sequences, and the weights move."""
    steps = plain[0][1:]
    assert all(line["reward/std"] > 0 and line["train/grad_norm"] > 1e-3 for line in steps)
    assert all(line["train/micro_batches"] > 1 for line in steps)
    assert len({line["eval/reward"] for line in plain[0] if "eval/reward" in line}) > 1
