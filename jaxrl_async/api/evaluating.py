"""Evaluate a policy from Python: on a task or records, with standard errors."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import yaml

from jaxrl_async.api.arguments import ConfigLike, Data, Reward, TaskLike, TrainInputs, configured
from jaxrl_async.config.load import load
from jaxrl_async.config.schema import Config
from jaxrl_async.config.section import MAX_WHOLE
from jaxrl_async.config.userfile import end_loading
from jaxrl_async.errors import ConfigError
from jaxrl_async.evals.policy_eval import (
    GIVEN,
    PolicyEvaluation,
    PolicySource,
    evaluate_policy,
)
from jaxrl_async.model.policy import Policy
from jaxrl_async.run.folder import Paths
from jaxrl_async.run.start_checks import with_records_here
from jaxrl_async.tasks.task import Task

KEY_VARIABLE = "JAXRL_ASYNC_KEY"
"""Environment variable with an endpoint's key."""
ANSWERS = re.compile(r"it is (algorithm\.)?group_size \(answers to a prompt\) here")
"""A hint about the number of answers to a prompt, as `usual_hint` gives for training."""


def evaluate(
    policy: Policy | str | Path,
    *,
    data: Data | Mapping[str, object] | None = None,
    task: str | Mapping[str, object] | Task | type | None = None,
    reward: Reward | Sequence[Reward] | None = None,
    samples: int = 1,
    temperature: float = 0.0,
    top_p: float = 1.0,
    top_k: int = 0,
    max_new_tokens: int | None = None,
    prompts: int | None = None,
    pass_reward: float = 1.0,
    seed: int = 0,
    compare: Policy | str | Path | None = None,
    base: str | Path | None = None,
    model: str | None = None,
    key_variable: str = KEY_VARIABLE,
    concurrency: int = 32,
    config: str | Path | Mapping[str, object] | Config | None = None,
    overrides: Sequence[str] = (),
    **settings: object,
) -> PolicyEvaluation:
    """Evaluate a policy; return means with standard errors, and all answers. Blocks.

    Args:
        policy: a policy, its directory or name on the hub, the folder of a run or of an adapter, or
            the address of an OpenAI-compatible endpoint (http://HOST:PORT/v1).
        data: held-out records, or a file of them; None: the task's, or the run's.
        task: a task with held-out records, environment and reward, or the name of one of a run's
            tasks; None: the run's.
        reward: as of train; None: the task's, the run's, or `exact`.
        samples: answers to each prompt, n, for avg@n, pass@k up to n, and maj@n.
        temperature: 0: the most likely tokens, only for samples=1.
        top_p: total probability of the likeliest tokens to choose among.
        top_k: number of tokens to choose among; 0: all.
        max_new_tokens: longest answer, tokens; None: the run's, or 1,024.
        prompts: number of prompts, the first ones; None: all.
        pass_reward: least part `correct`, or else reward, of an answer that passes.
        seed: of the random numbers.
        compare: another policy, asked the same; the result has the paired differences.
        base: of an adapter; None: the base that it names.
        model: name of the model at an endpoint; None: its only one.
        key_variable: environment variable with the endpoint's key.
        concurrency: calls of an endpoint at a time.
        config: as of train; None: the run's.
        overrides: settings, as `section.key=value`.
        settings: any setting, as of train.

    Raises ConfigError for arguments that do not fit, JaxrlError if the evaluation
    failed.
    """
    end_loading()
    source = PolicySource(
        policy=policy,
        base=None if base is None else str(base),
        model=model,
        key_variable=key_variable,
        concurrency=concurrency,
    )
    if config is None and source.run is not None:
        config, task = _of_run(source.run, data, task)
    _check_inputs(source, config, data, task, settings, overrides)
    own = {
        "samples": samples,
        "temperature": temperature,
        "top_p": top_p,
        "top_k": top_k,
        "prompts": prompts,
        "pass_reward": pass_reward,
        "max_new_tokens": max_new_tokens,
    }
    if max_new_tokens is not None:
        settings = {"max_new_tokens": max_new_tokens, **settings}
    inputs = TrainInputs(
        data=data,
        eval_data=None if isinstance(data, Mapping) else data,
        reward=reward,
        task=task,
    )
    is_file = isinstance(data, str | Path)  # all of its records are held out
    tree = {**({"eval_size": MAX_WHOLE} if is_file else {}), **settings, "evals": {GIVEN: own}}
    resolved, own_task = _resolved(inputs, config, tree, overrides)
    resolved = with_records_here(resolved)
    other = None if compare is None else replace(source, policy=compare, base=None, model=None)
    return evaluate_policy(source, resolved, own_task, seed=seed, compare=other)


def _of_run(run: Paths, data: object, task: TaskLike) -> tuple[Path | Config, TaskLike]:
    """Return the configuration of a run, of one of its tasks if it has several, and the task that
    is left to find. Raises ConfigError."""
    written = yaml.safe_load(run.config.read_text("utf-8"))
    if isinstance(written, dict) and written.get("tasks"):
        return _config_of_task(load(run.config), data, task)
    return run.config, task


def _resolved(
    inputs: TrainInputs,
    config: ConfigLike,
    settings: Mapping[str, object],
    overrides: Sequence[str],
) -> tuple[Config, Task | None]:
    """Return the configuration, and the task if it is an object. Raises ConfigError, in which an
    argument has its own name, not that of the setting."""
    try:
        resolved, own_task = configured(inputs, config, settings)
        if overrides:
            resolved = load(resolved.model_dump(), overrides, where="eval")
    except ConfigError as error:
        text = str(error).replace(f"evals.{GIVEN}.", "").replace("train: ", "evaluate: ", 1)
        text = ANSWERS.sub("it is samples (--samples) here", text)
        raise ConfigError(text) from error
    return resolved, own_task


def _config_of_task(config: Config, data: object, task: TaskLike) -> tuple[Config, TaskLike]:
    """Return the configuration of one of a run's several tasks, and the task that is left to find:
    None, or another one that was asked for. Raises ConfigError if none was."""
    names = [*config.named_tasks]
    if isinstance(task, str) and task in names:
        return config.of_task(task), None
    if data is None and task is None:
        if len(names) > 1:
            raise ConfigError(
                f"evaluate: the run has several tasks ({', '.join(names)}). Name one of them as "
                "task (--task)."
            )
        return config.of_task(names[0]), None
    return config.model_copy(update={"tasks": None, "mixing": None, "evals": None}), task


def _check_inputs(
    source: PolicySource,
    config: object,
    data: object,
    task: object,
    settings: Mapping[str, object],
    overrides: Sequence[str],
) -> None:
    """Raise ConfigError if nothing says what the policy is asked, or if what names a base or a
    model at an endpoint would not be used."""
    if source.base is not None and (source.run or source.endpoint or not source.is_folder):
        raise ConfigError(
            f"evaluate: base (--base) is of an adapter's folder, and {source.name} is none. Leave "
            "it out."
        )
    if source.model is not None and source.endpoint is None:
        raise ConfigError(
            f"evaluate: model (--model) names a model at an endpoint, and {source.name} is none. "
            "Leave it out."
        )
    overridden = any(text.startswith(("task", "data")) for text in overrides)
    named = overridden or {"data", "jsonl"} & {*settings}
    if (data, task, config) == (None, None, None) and not named:
        raise ConfigError(
            f"evaluate: {source.name} is no run's folder, so its questions must be given: data "
            "(a file or records) or task."
        )
