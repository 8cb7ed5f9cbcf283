"""The evaluations by name of a run: each with its inputs, its files and its cadence.

    version ──is_due──> each evaluation: EvalInputs ──sampler──> answers ──> RUN/evals/NAME/VERSION.jsonl
                                                                    └──> metrics eval/NAME/...

The previous evaluation, to which the next one is compared, is read from its file: it survives a
resume.
"""  # noqa: E501

import logging
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from jaxrl_async.config.schema import Config
from jaxrl_async.evals.eval_answers import (
    EvalAnswer,
    answers_of,
    changes,
    estimates,
    facts,
    flat,
    has_correct,
    read_answers_of,
    write_answers,
)
from jaxrl_async.evals.eval_inputs import EvalInputs, RunInputs, make_eval_inputs, sampling_of
from jaxrl_async.run.builders.inputs import Inputs
from jaxrl_async.run.lockstep import Lockstep
from jaxrl_async.run.reporting import Evaluation
from jaxrl_async.trainer.evaluation import is_due

log = logging.getLogger(__name__)

SUFFIX = ".jsonl"
UNDONE = ".superseded.jsonl"
"""Suffix of the answers of versions that a resumed run makes again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NamedEvaluation:
    """One evaluation of a run."""

    name: str
    inputs: EvalInputs
    evaluation: Evaluation  # of this process's share
    folder: Path  # of its answers

    def run(self, version: int) -> Mapping[str, float]:
        """Evaluate the live weights; write all answers. After a failure, only the time is
        reported (`Evaluation.run`)."""
        start, evaluation = time.perf_counter(), self.evaluation
        result = evaluation.own_result()
        measured: dict[str, float] = {}
        if result is not None:
            lockstep, decode = evaluation.lockstep, evaluation.decode
            assert decode is not None, "trainer_parts.make_evaluation gives one"
            own = answers_of(
                result.played,
                decode,
                self.inputs.scorers.final_answer,
                lambda index: index * lockstep.players + lockstep.player,
            )
            measured = self._metrics_of(version, self._gather(own))
        measured["time_s"] = time.perf_counter() - start
        return {f"eval/{self.name}/{key}": value for key, value in measured.items()}

    def _gather(self, own: list[EvalAnswer]) -> list[EvalAnswer]:
        """Return the answers of all processes, by prompt."""
        if self.evaluation.lockstep.count == 1:
            return own
        shares = self.evaluation.lockstep.gather_json([asdict(answer) for answer in own])
        answers = [EvalAnswer(**answer) for share in shares for answer in share]
        return sorted(answers, key=lambda answer: (answer.index, answer.sample))

    def _metrics_of(self, version: int, answers: list[EvalAnswer]) -> dict[str, float]:
        """Return the metrics of answers, and write them."""
        section = self.inputs.section
        before = self._before(version)
        is_graded = has_correct(answers) or has_correct(before)
        results = estimates(
            answers,
            samples=section.samples,
            pass_reward=section.pass_reward,
            is_graded=is_graded,
        )
        changed = changes(before, answers, is_graded=is_graded)
        if self.evaluation.lockstep.writes:
            write_answers(self.folder / f"{version}{SUFFIX}", answers)
        return {
            **flat(results),
            **flat(changed, "_change"),
            **facts(answers),
            "prompts": float(len({answer.index for answer in answers})),
        }

    def _before(self, version: int) -> list[EvalAnswer]:
        """Return the answers of the newest evaluation of an earlier version; []: none exists."""
        earlier = [step for step in steps_in(self.folder) if step < version]
        return read_answers_of(self.folder / f"{max(earlier)}{SUFFIX}") if earlier else []


class RunEvaluations:
    """The evaluations by name of one run; optional_parts.NamedEvaluations."""

    def __init__(self, config: Config, inputs: Inputs, lockstep: Lockstep) -> None:
        """Read and check their inputs; inputs: the run's. Raises JaxrlErrors that name the
        evaluation."""
        self._lockstep, run = lockstep, RunInputs.of(inputs)
        self._inputs = {
            name: make_eval_inputs(name, section, config, run, lockstep.players)
            for name, section in config.named_evals.items()
        }
        of_run = [run.scorers, *(task.scorers for task in run.tasks.values())]
        self._own = {
            name: part
            for name, part in self._inputs.items()
            if not any(part.scorers is scorers for scorers in of_run)
        }

    def oldest_s(self) -> tuple[float, float]:
        """Return the ages of the oldest call of a scorer, and of the oldest reply of an
        environment, seconds; 0: none."""
        scorers = (part.scorers.oldest_s() for part in self._own.values())
        envs = (part.envs.oldest_s() for part in self._inputs.values())
        return max(scorers, default=0.0), max(envs, default=0.0)

    def begin(
        self, like: Evaluation, folder: Path, version: int, newest: Callable[[], int]
    ) -> Callable[[int, bool], Mapping[str, float]]:
        """Begin, and return what evaluates a version that is live: called with its number, and
        whether it is the last.

        Args:
            like: the run's evaluation.
            folder: the run's.
            version: from which the run starts; answers of later ones are moved aside.
            newest: reads the newest version of the weights.
        """
        named = [
            NamedEvaluation(
                name=name,
                inputs=part,
                evaluation=self._evaluation(name, part, like),
                folder=folder / "evals" / name,
            )
            for name, part in self._inputs.items()
        ]
        if self._lockstep.writes:
            for part in named:
                part.folder.mkdir(parents=True, exist_ok=True)
                move_later_aside(part.folder, version)
        for own in self._own.values():
            own.scorers.begin(folder, self._lockstep.player, newest)

        def evaluate(version: int, last: bool) -> Mapping[str, float]:
            measured: dict[str, float] = {}
            for part in named:
                if is_due(part.inputs.section.every, version, last=last):
                    measured |= part.run(version)
            return measured

        return evaluate

    def close(self) -> None:
        """End the processes of their functions. Idempotent."""
        for part in self._own.values():
            part.scorers.close()

    def _evaluation(self, name: str, inputs: EvalInputs, like: Evaluation) -> Evaluation:
        section, lockstep = inputs.section, self._lockstep
        return replace(
            like,
            prompts=inputs.prompts[lockstep.player :: lockstep.players],
            scorer=inputs.scorer,
            make_env=inputs.envs,
            limits=replace(
                like.limits,
                sampling=sampling_of(section),
                stop_token_ids=inputs.stop_token_ids,
                max_new_tokens=section.max_new_tokens or like.limits.max_new_tokens,
                constraint=inputs.constraint,
                by_task={},
            ),
            samples=section.samples,
            label=f"eval/{name}",
        )


def steps_in(folder: Path) -> list[int]:
    """Return the versions whose answers are in a folder, ascending."""
    names = [path.name.removesuffix(SUFFIX) for path in folder.glob(f"*{SUFFIX}")]
    return sorted(int(name) for name in names if name.isascii() and name.isdigit())


def move_later_aside(folder: Path, version: int) -> None:
    """Rename the answers of later versions than this, which the run will make again."""
    for step in steps_in(folder):
        if step > version:
            os.replace(folder / f"{step}{SUFFIX}", folder / f"{step}{UNDONE}")
            log.info("%s: the answers of version %d are moved aside", folder, step)
