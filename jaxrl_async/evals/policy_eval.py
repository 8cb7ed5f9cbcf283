"""Evaluate any policy without a run: one in a folder, one in memory, or one behind an endpoint."""

import json
import logging
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from jaxrl_async.config.schema import Config, MeshSection, NamedEvalSection, name_of
from jaxrl_async.data.prompts import EVAL_POSITION, eval_prompts, prompt_of
from jaxrl_async.data.tokenizer import Tokenizer
from jaxrl_async.errors import ConfigError, DataError
from jaxrl_async.evals.estimates import Estimate
from jaxrl_async.evals.eval_answers import (
    MAIN,
    EvalAnswer,
    answers_of,
    changes,
    estimates,
    facts,
    has_correct,
    write_answers,
)
from jaxrl_async.evals.eval_inputs import sampling_of
from jaxrl_async.evals.text_endpoint import CodePoints, EndpointSettings, TextEndpoint
from jaxrl_async.mesh import NO_DEVICE_LOCK, make_slices
from jaxrl_async.metrics.fault_counts import FaultCounts
from jaxrl_async.model.hf import read_adapter_config
from jaxrl_async.model.policy import Policy
from jaxrl_async.ports.generate import Generate
from jaxrl_async.rollout.env import MakeEnv, SingleTurn
from jaxrl_async.rollout.evaluate import EvalEffort, EvalResult
from jaxrl_async.rollout.evaluate import evaluate as play_all
from jaxrl_async.run.builders.constraints import check_constraint, prompt_constraint
from jaxrl_async.run.builders.inputs import check_references, guarded_envs, make_outages
from jaxrl_async.run.builders.playing import find_task, make_play
from jaxrl_async.run.builders.scoring import Scorers, built_in_graders, make_scorers
from jaxrl_async.run.folder import Paths
from jaxrl_async.run.optional_parts import NoOpponents, NoServing
from jaxrl_async.run.saved_policy import policy_at_end
from jaxrl_async.sampler.sampler import Sampler
from jaxrl_async.sampler.setup import SamplerSettings, roomy_section
from jaxrl_async.tasks.task import Task
from jaxrl_async.tasks.task_source import TaskSource, task_records
from jaxrl_async.tasks.usercode import run_loop
from jaxrl_async.types import Episode, Prompt, Score

log = logging.getLogger(__name__)

USUAL_ANSWER = 1024
"""Default maximum length of an answer of a policy without a run, tokens."""
PROGRESS_LINES = 10
"""Number of times that the progress of an evaluation is logged."""
GIVEN = "given"
"""Name in `evals` of the evaluation that is made."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyEvaluation:
    """The result of an evaluation."""

    policy: str
    """The policy's folder or address."""
    settings: Mapping[str, Any]
    """Samples, sampling settings and seed."""
    estimates: Mapping[str, Estimate]
    """Means with standard errors: reward, accuracy, avg_at_n, pass_at_k, maj_at_n."""
    facts: Mapping[str, float]
    """prompts, skipped, length_mean, truncated_share."""
    answers: tuple[EvalAnswer, ...]
    """All answers, by prompt and sample."""
    compared: "PolicyEvaluation | None" = None
    """The other policy's evaluation on the same prompts."""
    differences: Mapping[str, Estimate] = field(default_factory=dict)
    """Paired differences to it, of reward and accuracy: this policy's minus the other's."""

    def table(self) -> str:
        """Return the result as text: a line per estimate, with its 95 % interval."""
        samples = self.settings["samples"]
        lines = [
            f"{self.policy}: {self.facts['prompts']:g} prompts, {samples} "
            f"answer{'s' * (samples > 1)} each, temperature {self.settings['temperature']:g}"
        ]
        lines += [_row(shown_name(name), estimate) for name, estimate in self.estimates.items()]
        lines.append(
            f"length {self.facts['length_mean']:.1f} tokens, "
            f"{self.facts['truncated_share']:.1%} cut off"
        )
        if skipped := self.facts["skipped"]:
            lines.append(f"{skipped:g} prompts skipped, whose answers could not be scored")
        if self.compared is not None:
            lines += ["", self.compared.table(), "", "difference on the prompts of both"]
            lines += [_row(name, estimate, sign="+") for name, estimate in self.differences.items()]
        return "\n".join(lines)

    def save(self, folder: str | Path) -> Path:
        """Write evaluation.json and answers.jsonl (compared.jsonl for the other policy) into a
        folder; return the folder."""
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        text = json.dumps(self._as_json(), indent=2, ensure_ascii=False)
        (folder / "evaluation.json").write_text(text + "\n", "utf-8")
        write_answers(folder / "answers.jsonl", self.answers)
        if self.compared is not None:
            write_answers(folder / "compared.jsonl", self.compared.answers)
        return folder

    def _as_json(self) -> dict[str, Any]:
        content = {
            "policy": self.policy,
            "settings": dict(self.settings),
            "estimates": {name: _as_json(one) for name, one in self.estimates.items()},
            **self.facts,
        }
        if self.compared is not None:
            content["compared"] = self.compared._as_json()
            content["differences"] = {name: _as_json(one) for name, one in self.differences.items()}
        return content

    def __str__(self) -> str:
        return self.table()


def shown_name(name: str) -> str:
    """Return an estimate's name as people write it: pass@8."""
    return name.replace("_at_", "@")


def _row(name: str, estimate: Estimate, sign: str = "") -> str:
    between = ""
    if estimate.interval is not None:
        low, high = estimate.interval
        between = f"   95 % {low:{sign}.4f} to {high:{sign}.4f}"
    return f"  {name:<10} {estimate.mean:{sign}.4f}{between}"


def _as_json(one: Estimate) -> dict[str, Any]:
    interval = None if one.interval is None else list(one.interval)
    return {"mean": one.mean, "stderr": one.stderr, "interval_95": interval}


# ---- policies


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicySource:
    """Where a policy is, and how it is asked."""

    policy: Policy | str | Path
    base: str | None = None  # of an adapter; None: the base that it names
    model: str | None = None  # at an endpoint; None: the only one
    key_variable: str = "JAXRL_ASYNC_KEY"
    concurrency: int = 32  # calls of an endpoint at a time
    timeout_s: float = 600.0  # of one call of an endpoint

    @property
    def name(self) -> str:
        """Its folder or address, for people."""
        return repr(self.policy) if isinstance(self.policy, Policy) else str(self.policy)

    @property
    def is_folder(self) -> bool:
        """Whether it is not in memory."""
        return not isinstance(self.policy, Policy)

    @property
    def run(self) -> Paths | None:
        """The run whose folder this is; None: it is no run's."""
        if isinstance(self.policy, Policy) or self.endpoint is not None:
            return None
        folder = Path(self.policy)
        return Paths(folder) if (folder / "config.yaml").is_file() else None

    @property
    def endpoint(self) -> EndpointSettings | None:
        """The endpoint at this address; None: it is no endpoint's."""
        if not str(self.policy).startswith(("http://", "https://")):
            return None
        return EndpointSettings(
            url=str(self.policy),
            model=self.model,
            key_variable=self.key_variable,
            concurrency=self.concurrency,
            timeout_s=self.timeout_s,
        )

    def loaded(self) -> Policy:
        """Load the policy with its tokenizer. Raises CheckpointError, ConfigError and DataError."""
        if isinstance(self.policy, Policy):
            policy = self.policy.merged()
        elif self.run is not None:
            policy = policy_at_end(self.run, None, None)
        else:
            policy = self._of_folder(Path(self.policy))
        if policy.tokenizer is None:
            raise DataError(f"{self.name} has no tokenizer. Give the directory of one that has.")
        return policy

    def _of_folder(self, folder: Path) -> Policy:
        is_adapter = (folder / "adapter_config.json").is_file()
        if not is_adapter or (folder / "config.json").is_file():
            if self.base is not None:
                raise ConfigError(f"{folder} is no adapter, so it has no base. Leave base out.")
            return Policy.from_pretrained(self.policy if isinstance(self.policy, str) else folder)
        base = self.base or read_adapter_config(folder).get("base_model_name_or_path")
        if not base:
            raise ConfigError(f"{folder} names no base of its adapter. Give base=DIR (--base).")
        return Policy.from_pretrained(base, adapter=folder).merged()


# ---- evaluating


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalQuestions:
    """What a policy is asked, and what scores its answers."""

    tokenizer: Tokenizer
    task: Task
    prompts: Sequence[Prompt]
    scorers: Scorers
    make_env: MakeEnv
    stop_token_ids: tuple[int, ...]
    faults: FaultCounts
    effort: EvalEffort


def evaluate_policy(
    source: PolicySource,
    config: Config,
    task: Task | None,
    *,
    seed: int = 0,
    compare: PolicySource | None = None,
) -> PolicyEvaluation:
    """Evaluate a policy on the held-out records of a configuration.

    Args:
        source: the policy.
        config: its task or data, reward and limits, and in `evals` the evaluation GIVEN.
        task: an object of the caller; None: config.task.
        seed: of the random numbers.
        compare: another policy, asked the same.

    Raises JaxrlErrors.
    """
    result = _evaluate(source, config, task, seed)
    if compare is None:
        return result
    other = _evaluate(compare, config, task, seed)
    graded = has_correct(result.answers) or has_correct(other.answers)
    differences = changes(other.answers, result.answers, is_graded=graded)
    if not differences:
        raise DataError(f"{source.name} and {compare.name} have answered no prompt in common.")
    order = [name for name in MAIN if name in differences]
    return replace(result, compared=other, differences={name: differences[name] for name in order})


def _evaluate(
    source: PolicySource, config: Config, task: Task | None, seed: int
) -> PolicyEvaluation:
    section = config.named_evals[GIVEN]
    ask = _ask_endpoint if source.endpoint is not None else _ask_policy
    result, answers, num_asked = ask(source, config, task, seed)
    graded = has_correct(answers)
    return PolicyEvaluation(
        policy=source.name,
        settings={**_settings(section), "seed": seed},
        estimates=estimates(
            answers, samples=section.samples, pass_reward=section.pass_reward, is_graded=graded
        ),
        facts={
            "prompts": float(result.num_prompts),
            "skipped": float(num_asked - result.num_prompts),
            **facts(answers),
        },
        answers=tuple(answers),
    )


def _settings(section: NamedEvalSection) -> dict[str, Any]:
    names = ("samples", "temperature", "top_p", "top_k", "max_new_tokens", "pass_reward")
    return {name: getattr(section, name) for name in names}


Answered = tuple[EvalResult, list[EvalAnswer], int]
"""A result, its answers, and the number of prompts that were asked."""


def _ask_policy(source: PolicySource, config: Config, task: Task | None, seed: int) -> Answered:
    """Ask a policy that is loaded here."""
    policy = source.loaded()
    config = _with_room(config, policy, own_limits=source.run is None)
    own = Tokenizer(policy.tokenizer.hf, eos_ids=policy.tokenizer.eos_ids)
    own.max_tokens = config.longest_text
    with _questions(config, task, own, vocab=policy.spec.vocab) as questions:
        settings = SamplerSettings(tokenizer=own)
        with Sampler(policy, section=config.sampler, seed=seed, settings=settings) as sampler:
            result = run_loop(_play(sampler, questions, config))
        return result, _answers(result, questions), len(questions.prompts)


def _ask_endpoint(source: PolicySource, config: Config, task: Task | None, seed: int) -> Answered:
    """Ask a policy at an address, in chat completions."""
    assert source.endpoint is not None
    endpoint = source.endpoint
    config = _with_room(config, None, own_limits=source.run is None)

    async def played(questions: EvalQuestions) -> tuple[EvalResult, TextEndpoint]:
        generate = TextEndpoint(
            endpoint,
            questions.prompts,
            seed=seed,
            system_prompt=questions.task.system_prompt or config.data.system_prompt,
            template=config.data.record_fields.template,
        )
        try:
            return await _play(generate, questions, config), generate
        finally:
            await generate.close()

    with _questions(config, task, CodePoints(), vocab=None) as questions:
        result, generate = run_loop(played(questions))
        positions = {a.index: a.prompt.position for a in result.played}
        answers = [
            replace(a, length=generate.lengths.get((positions[a.index], a.sample), a.length))
            for a in _answers(result, questions)
        ]
        return result, answers, len(questions.prompts)


def _with_room(config: Config, policy: Policy | None, *, own_limits: bool) -> Config:
    """Return a configuration whose sampler has the policy's own length, unless a run's or the
    caller's is given.

    own_limits: the policy is not a run's. policy: None: it is at an endpoint.
    """
    own = config.sampler
    if not own_limits or own.is_set("max_length"):
        return config
    room = own if policy is None else roomy_section(policy.spec, "float32")
    longest = 2**20 if policy is None else room.max_length
    usual = min(USUAL_ANSWER, max(longest // 2, 1))
    answer = own.max_new_tokens if own.is_set("max_new_tokens") else usual
    limits = {"max_length": longest, "max_new_tokens": min(answer, longest - 1)}
    sampler = own.model_copy(update={"kv_memory_mib": room.kv_memory_mib, **limits})
    return config.model_copy(update={"sampler": sampler})


@contextmanager
def _questions(config: Config, passed: Task | None, tokenizer: Tokenizer, vocab: int | None) -> Any:
    """Yield the prompts with environments and scorers, checked. Raises ConfigError, DataError.

    vocab: of the policy; None: it answers in text, and cannot play environments.
    """
    faults = FaultCounts()
    outages = make_outages(config.faults, faults, resumed=config.run.resume)
    task, section = find_task(config, passed), config.named_evals[GIVEN]
    where = f"task = {name_of(config.task)!r}" if config.task else "the task"
    if task.program is not None or task.game is not None:
        raise ConfigError(f"{where} has a program or a game, which only a run plays (evals).")
    graders = built_in_graders(config.reward, task)
    if vocab is None:
        if task.environment is not None or task.tools:
            raise ConfigError(
                f"{where} has an environment or tools, and an endpoint answers single questions. "
                "Evaluate the policy's folder instead."
            )
        make_env: MakeEnv = SingleTurn
        stops: tuple[int, ...] = ()
        prompts = _text_prompts(config, task, tokenizer, graded=bool(graders))
    else:
        play = make_play(config, task, tokenizer, faults.add, NoServing(), NoOpponents(), outages)
        task = play.task
        make_env = guarded_envs(config.faults, config.sampler, play, tokenizer, faults)
        stops = play.stop_token_ids
        data = config.limited_data
        prompts = eval_prompts(data, tokenizer, play.own, graded=bool(graders))[: section.prompts]
        check_constraint(config.algorithm, config.sampler, task, prompts, tokenizer, vocab)
    scorers = make_scorers(
        config, tokenizer, prompts, make_slices(MeshSection(colocated=True)), NO_DEVICE_LOCK,
        faults, task, outages,
    )  # fmt: skip
    references = [prompt.reference for prompt in prompts]
    check_references(graders, references, config.data.record_fields.max_bad_share)
    with tempfile.TemporaryDirectory() as folder:
        scorers.begin(Path(folder), 0, lambda: 0)
        try:
            yield EvalQuestions(
                tokenizer=tokenizer,
                task=task,
                prompts=prompts,
                scorers=scorers,
                make_env=make_env,
                stop_token_ids=stops,
                faults=faults,
                effort=EvalEffort(
                    at_once=config.eval.episodes_at_once,
                    retries=0 if vocab is None else config.env.retries,  # it repeats its calls
                    backoff_s=config.faults.backoff_s,
                    count=faults.add,
                    outages=None if vocab is None else outages,
                ),
            )
        finally:
            scorers.close()


def _text_prompts(
    config: Config, task: Task, tokenizer: Tokenizer, *, graded: bool
) -> Sequence[Prompt]:
    """Return the held-out prompts for a policy that is asked in text."""
    most = config.named_evals[GIVEN].prompts
    if task.records is None:
        return eval_prompts(config.limited_data, tokenizer, graded=graded)[:most]
    source = TaskSource(task_records(task, "eval"))
    return [prompt_of(source[i], i, EVAL_POSITION + i) for i in range(len(source))[:most]]


async def _play(generate: Generate, questions: EvalQuestions, config: Config) -> EvalResult:
    section, count, done = config.named_evals[GIVEN], len(questions.prompts), 0
    each = "1 answer" if section.samples == 1 else f"{section.samples} answers"
    log.info("evaluating %d prompts, %s each", count, each)

    async def scored(episodes: tuple[Episode, ...], prompt: Prompt) -> tuple[Score, ...]:
        nonlocal done
        scores = await questions.scorers.evaluation(episodes, prompt)
        done += 1
        if done * PROGRESS_LINES // count > (done - 1) * PROGRESS_LINES // count:
            log.info("%d of %d prompts", done, count)
        return scores

    return await play_all(
        generate,
        questions.prompts,
        scored,
        sampling=sampling_of(section),
        stop_token_ids=questions.stop_token_ids,
        max_new_tokens=section.max_new_tokens or config.sampler.max_new_tokens,
        max_length=config.sampler.max_length,
        make_env=questions.make_env,
        effort=questions.effort,
        constraint=prompt_constraint(questions.task),
        samples=section.samples,
    )


def _answers(result: EvalResult, questions: EvalQuestions) -> list[EvalAnswer]:
    return answers_of(result.played, questions.tokenizer.decode, questions.scorers.final_answer)
