"""Parts that a run has only if its configuration asks for them: what the core knows of each, and
what stands in its place where it is absent. features.py makes them."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Literal, Protocol, Self

from jaxrl_async.config.schema import Config, RunSection
from jaxrl_async.data.tokenizer import Tokenizer
from jaxrl_async.mesh import Slices
from jaxrl_async.model.policy import Policy
from jaxrl_async.ports.generate import Generate
from jaxrl_async.ports.rollout import ChatFormat, GroupSource, Player, Scorer
from jaxrl_async.ports.weights import Publisher
from jaxrl_async.profiling import TracedSamplers
from jaxrl_async.run.builders.devices import Lock
from jaxrl_async.run.folder import Paths
from jaxrl_async.run.signals import Stop
from jaxrl_async.types import EpisodeGroup, Prompt, Ticket


class Serving(Protocol):
    """The endpoint of a run (the wing `endpoint`)."""

    needed: bool  # whether the run opens it

    def open(
        self, config: Config, generate: Generate, tokenizer: Tokenizer, chat: ChatFormat | None
    ) -> None:
        """Listen and answer. Raises ConfigError and MissingExtraError."""
        ...

    def counts(self) -> dict[str, int]:
        """Return what it has done since the start, by the metric's name."""
        ...

    def end_sessions(self) -> None:
        """End all sessions: agents are told that the run stops."""
        ...

    def close(self) -> None:
        """End all sessions, and then the server. Idempotent."""
        ...


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


class SeatFillers(Protocol):
    """Who fills the seats of a run's games in the policy's place (the wing `games`)."""

    def __call__(self, prompt: Prompt) -> Mapping[str, Player]:
        """Return who fills the seats of this prompt's games in the policy's place."""
        ...

    def begins(self, ticket: Ticket, prompt: Prompt) -> None:
        """Take note that a group begins: the version of its ticket decides whom it meets."""
        ...

    def names(self, group: EpisodeGroup) -> dict[str, str]:
        """Return who sat where in a group's games; empty: no game, or the policy everywhere."""
        ...

    def measures(self) -> dict[str, float]:
        """Return the metrics of the last version's games."""
        ...

    def watched(self, source: GroupSource, publisher: Publisher) -> tuple[GroupSource, Publisher]:
        """Return what a trainer draws from and publishes to, seen by those who are seated."""
        ...

    def begin(self, paths: Paths, version: int, policy: Policy, slices: Slices, lock: Lock) -> None:
        """Seat them. Raises CheckpointError, ConfigError.

        Args:
            paths: of the run, with its snapshots.
            version: of the policy.
            policy: as the run begins or continues.
            slices: the weights of opponents take the first sampler's devices.
            lock: held while they compute.
        """
        ...

    def close(self) -> None:
        """End all samplers and connections. Idempotent."""
        ...


class NoOpponents:
    """The Opponents of a run in which the policy fills every seat."""

    def __call__(self, prompt: Prompt) -> Mapping[str, Player]:
        """Return nobody."""
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
        """Return both as they are."""
        return source, publisher

    def begin(self, paths: Paths, version: int, policy: Policy, slices: Slices, lock: Lock) -> None:
        """Do nothing."""

    def close(self) -> None:
        """Do nothing."""


class JoinedSamplers(TracedSamplers, Protocol):
    """Samplers in processes of their own, on the trainer's side (the wing `remote`)."""

    def wait_for_least(self, stop: Stop, started: Callable[[], int] = lambda: 0) -> None:
        """Wait until as many sample as the run begins with. Raises RolloutError.

        started: called again and again; returns how many processes are still starting.
        """
        ...

    def begin_close(self) -> None:
        """Let no sampler join any more. Idempotent."""
        ...

    def close(self) -> None:
        """Tell the samplers that the run has ended. Idempotent."""
        ...


class SamplerProcesses(Protocol):
    """The sampler processes that a run starts itself (the wing `remote`)."""

    def run(self) -> None:
        """Start those that ended again, until `stop`. Runs on a thread of its own."""
        ...

    def look(self) -> int:
        """Return how many run. Raises RolloutError if one cannot be started."""
        ...

    def stop(self) -> None:
        """Start none any more. Idempotent."""
        ...

    def close(self) -> None:
        """Wait for the processes to end, and end those that do not. Idempotent."""
        ...


class Judges(Protocol):
    """What a judge and process rewards have done in a run (the wing `judge`)."""

    def cost(self) -> Mapping[str, float]:
        """Return what the judge has cost so far; empty: there is none."""
        ...

    def tally(self) -> Mapping[str, float]:
        """Return what became of process rewards so far; empty: there are none."""
        ...

    def begin(self, folder: Path, process: int, version: Callable[[], int]) -> None:
        """Begin a run.

        Args:
            folder: the run's; the judge's scores are kept there.
            process: index of this process.
            version: reads the newest version of the weights.
        """
        ...

    def close(self) -> None:
        """Close connections and the file of scores. Idempotent; what is needed again is made
        again."""
        ...


class JudgeScorers(Judges, Protocol):
    """The scorers of a judge and of process rewards, in the order in which they are made."""

    def of_answers(
        self, others: Scorer | None, on_failure: Literal["fail", "neutral"] | None = None
    ) -> Scorer:
        """Return what judges whole answers, beside `others`; on_failure: None: as configured."""
        ...

    def process_trial(self) -> Scorer | None:
        """Return what tries process rewards before a run, waiting as long as they take; None: none
        are configured."""
        ...

    def with_process_rewards(self, outcome: Scorer) -> Scorer:
        """Return what adds the configured process rewards to an outcome's scores."""
        ...


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


class CopyOfRun(Protocol):
    """The thread that copies a run's folder to run.copy_to (the wing `mirror`)."""

    def begin(self, run: RunSection, keep: int) -> None:
        """Copy from now on. keep: how many checkpoints the copy keeps."""
        ...

    def verdict(self) -> list[str]:
        """Return lines on what was copied, for the end of a run."""
        ...

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
