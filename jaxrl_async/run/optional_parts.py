"""Parts that a run has only if its configuration asks for them: the core's interface to each, and a
null implementation for runs without it. features.py makes them."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Protocol, Self

from jaxrl_async.config.schema import Config, RunSection
from jaxrl_async.data.tokenizer import Tokenizer
from jaxrl_async.mesh import DeviceGuard, Slices
from jaxrl_async.model.policy import Policy
from jaxrl_async.ports.generate import Generate
from jaxrl_async.ports.rollout import ChatFormat, GroupSource, Player, Scorer
from jaxrl_async.ports.weights import Publisher
from jaxrl_async.profiling import TracedSamplers
from jaxrl_async.run.folder import Paths
from jaxrl_async.run.signals import Stop
from jaxrl_async.tasks.task import Task
from jaxrl_async.types import BoolArray, EpisodeGroup, Prompt, Ticket

if TYPE_CHECKING:
    from jaxrl_async.run.reporting import Evaluation


class Serving(Protocol):
    """The endpoint of a run (the wing `endpoint`)."""

    needed: bool  # whether the run opens it

    def open(
        self, config: Config, generate: Generate, tokenizer: Tokenizer, chat: ChatFormat | None
    ) -> None:
        """Listen and answer. Raises ConfigError and MissingExtraError."""

    def counts(self) -> dict[str, int]:
        """Return its counters since the start, by the metric's name."""

    def end_sessions(self) -> None:
        """End all sessions: agents get an error that the run stops."""

    def close(self) -> None:
        """End all sessions, and then the server. Idempotent."""


class NoServing:
    """The Serving of a run without an endpoint."""

    needed = False

    def open(
        self, config: Config, generate: Generate, tokenizer: Tokenizer, chat: ChatFormat | None
    ) -> None:
        """Do nothing."""

    def counts(self) -> dict[str, int]:
        """Return nothing."""
        return {}

    def end_sessions(self) -> None:
        """Do nothing."""

    def close(self) -> None:
        """Do nothing."""


class NamedEvaluations(Protocol):
    """The evaluations by name of a run (the wing `evals`)."""

    def oldest_s(self) -> tuple[float, float]:
        """Return the ages of the oldest call of their scorers, and of the oldest reply of their
        environments, seconds; 0: none."""

    def begin(
        self, like: "Evaluation", folder: Path, version: int, newest: Callable[[], int]
    ) -> Callable[[int, bool], Mapping[str, float]]:
        """Begin, and return a function that evaluates a live version, if due: called with its
        number, and whether it is the last; returns its metrics.

        Args:
            like: the run's own evaluation.
            folder: the run's.
            version: from which the run starts.
            newest: reads the newest version of the weights.
        """

    def close(self) -> None:
        """End what they hold. Idempotent."""


class NoNamedEvaluations:
    """The NamedEvaluations of a run without `evals`."""

    def oldest_s(self) -> tuple[float, float]:
        """Return 0: nothing is under way."""
        return 0.0, 0.0

    def begin(
        self, like: "Evaluation", folder: Path, version: int, newest: Callable[[], int]
    ) -> Callable[[int, bool], Mapping[str, float]]:
        """Return a function that evaluates nothing."""
        return lambda version, last: {}

    def close(self) -> None:
        """Do nothing."""


NO_NAMED_EVALUATIONS = NoNamedEvaluations()


class SeatFillers(Protocol):
    """The other players of a run's games (the wing `games`)."""

    def __call__(self, prompt: Prompt) -> Mapping[str, Player]:
        """Return the players of this prompt's games other than the policy, by seat."""

    def begins(self, ticket: Ticket, prompt: Prompt) -> None:
        """Record that a group begins: the version of its ticket decides about its opponents."""

    def names(self, group: EpisodeGroup) -> dict[str, str]:
        """Return the players of a group's games by seat; empty: no game, or only the policy."""

    def measures(self) -> dict[str, float]:
        """Return the metrics of the last version's games."""

    def watched(self, source: GroupSource, publisher: Publisher) -> tuple[GroupSource, Publisher]:
        """Return a trainer's source and publisher, wrapped to inform the opponents."""

    def begin(
        self, paths: Paths, version: int, policy: Policy, slices: Slices, lock: DeviceGuard
    ) -> None:
        """Start the opponents. Raises CheckpointError, ConfigError.

        Args:
            paths: of the run, with its snapshots.
            version: of the policy.
            policy: the policy at the start or after a resume.
            slices: the weights of opponents take the first sampler's devices.
            lock: held while they compute.
        """

    def close(self) -> None:
        """End all samplers and connections. Idempotent."""


class NoOpponents:
    """The Opponents of a run in which the policy plays every seat."""

    def __call__(self, prompt: Prompt) -> Mapping[str, Player]:
        """Return no players."""
        return {}

    def begins(self, ticket: Ticket, prompt: Prompt) -> None:
        """Do nothing."""

    def names(self, group: EpisodeGroup) -> dict[str, str]:
        """Return nothing."""
        return {}

    def measures(self) -> dict[str, float]:
        """Return nothing."""
        return {}

    def watched(self, source: GroupSource, publisher: Publisher) -> tuple[GroupSource, Publisher]:
        """Return both unchanged."""
        return source, publisher

    def begin(
        self, paths: Paths, version: int, policy: Policy, slices: Slices, lock: DeviceGuard
    ) -> None:
        """Do nothing."""

    def close(self) -> None:
        """Do nothing."""


class JoinedSamplers(TracedSamplers, Protocol):
    """Samplers in separate processes, on the trainer's side (the wing `remote`)."""

    def wait_for_least(self, stop: Stop, started: Callable[[], int] = lambda: 0) -> None:
        """Wait until the run has the samplers that it needs to begin. Raises RolloutError.

        started: called repeatedly; returns the number of processes that are still starting.
        """

    def begin_close(self) -> None:
        """Refuse samplers that join from now on. Idempotent."""

    def close(self) -> None:
        """Notify the samplers that the run has ended. Idempotent."""


class SamplerProcesses(Protocol):
    """The sampler processes that a run starts itself (the wing `remote`)."""

    def run(self) -> None:
        """Restart processes that ended, until `stop`. Runs on a separate thread."""

    def look(self) -> int:
        """Return the number of running processes. Raises RolloutError if one cannot be started."""

    def stop(self) -> None:
        """Start no further process. Idempotent."""

    def close(self) -> None:
        """Wait for the processes to end, and end those that do not. Idempotent."""


class Judges(Protocol):
    """Counters of a judge and of process rewards in a run (the wing `judge`)."""

    def cost(self) -> Mapping[str, float]:
        """Return the judge's cost so far; empty: no judge."""

    def tally(self) -> Mapping[str, float]:
        """Return the counters of process rewards so far; empty: no process rewards."""

    def begin(self, folder: Path, process: int, version: Callable[[], int]) -> None:
        """Begin a run.

        Args:
            folder: the run's; the judge's scores are kept there.
            process: index of this process.
            version: reads the newest version of the weights.
        """

    def close(self) -> None:
        """Close connections and the file of scores. Idempotent; they are opened again if they are
        needed again."""


class JudgeScorers(Judges, Protocol):
    """The scorers of a judge and of process rewards, in the order in which they are made."""

    def of_answers(
        self, others: Scorer | None, on_failure: Literal["fail", "neutral"] | None = None
    ) -> Scorer:
        """Return the judge of whole answers, added to `others`; on_failure None: as configured."""

    def process_trial(self) -> Scorer | None:
        """Return the trial of process rewards before a run, without a timeout; None: no process
        rewards are configured."""

    def with_process_rewards(self, outcome: Scorer) -> Scorer:
        """Return a scorer that adds the configured process rewards to an outcome's scores."""


class NoJudges:
    """The Judges of a run with neither a judge nor process rewards."""

    def cost(self) -> Mapping[str, float]:
        """Return nothing."""
        return {}

    def tally(self) -> Mapping[str, float]:
        """Return nothing."""
        return {}

    def begin(self, folder: Path, process: int, version: Callable[[], int]) -> None:
        """Do nothing."""

    def close(self) -> None:
        """Do nothing."""


class Teachers(Protocol):
    """Counters of the teachers of a run that are asked while groups wait (the wing `teachers`)."""

    def counts(self) -> Mapping[str, float]:
        """Return the counters so far, as NAME/COUNTER; empty: no such teacher."""

    def check(self, prompt: Prompt) -> None:
        """Raise ConfigError if a record names its teachers wrongly."""

    def close(self) -> None:
        """Close all connections. Idempotent; they are opened again if they are needed again."""


class TeacherScorers(Teachers, Protocol):
    """The scorers of a run's teachers, for one of its tasks."""

    def with_teachers(self, outcome: Scorer) -> Scorer:
        """Return a scorer that adds what the teachers say to an outcome's scores."""

    def trials(self) -> list[tuple[str, Scorer]]:
        """Return the settings of the teachers with an address, each with a trial before a run."""


class QueriedTeachers(Protocol):
    """The teachers of a run that are asked while groups wait; all its tasks ask the same ones."""

    def unmatched(self, vocab: int) -> BoolArray:
        """Return which of the policy's tokens a teacher's other tokenizer has not, [vocab]."""

    def of_task(self, config: Config, task: Task) -> TeacherScorers:
        """Return their scorers for a task. config: as the task has it."""


class NoTeachers:
    """The Teachers of a run without teachers by name."""

    def counts(self) -> Mapping[str, float]:
        """Return nothing."""
        return {}

    def check(self, prompt: Prompt) -> None:
        """Do nothing."""

    def close(self) -> None:
        """Do nothing."""


class CopyOfRun(Protocol):
    """The thread that copies a run's folder to run.copy_to (the wing `mirror`)."""

    def begin(self, run: RunSection, keep: int) -> None:
        """Copy from now on. keep: number of checkpoints in the copy."""

    def verdict(self) -> list[str]:
        """Return lines about the copied files, for the end of a run."""

    def __enter__(self) -> Self: ...

    def __exit__(self, *_: object) -> None: ...


class NoCopy:
    """The RunCopy of a run without run.copy_to."""

    def begin(self, run: RunSection, keep: int) -> None:
        """Do nothing."""

    def verdict(self) -> list[str]:
        """Return nothing."""
        return []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None: ...
