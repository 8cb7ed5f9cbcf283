"""Audit a run: jaxrl-async audit RUN checks that its ledger adds up.

Every group was admitted once and has one fate: trained on (once, or up to buffer.reuse times),
dropped for a reason, or still active at the end. No token was older than max_staleness, every step
had its groups, metrics.jsonl has the same steps, and both files reach the newest checkpoint.
Exit code 0: all of this holds; 1: a check failed; 2: there is no run to audit.
"""

import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import yaml

from jaxrl_async.data.addresses import local_argument
from jaxrl_async.errors import ConfigError
from jaxrl_async.metrics.recorder import listed_lines, numbered_lines, read_lines
from jaxrl_async.run.checkpoint.bucket import open_bucket
from jaxrl_async.run.checkpoint.seal import is_sealed, saved_steps

USAGE = "usage: jaxrl-async audit RUN"
SHOWN = 20
"""Maximum number of problems that are printed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """The settings in a run's config.yaml that its ledger must obey."""

    max_staleness: int
    groups_per_step: int
    reuse: int = 1
    waits: bool = False  # the trainer waits for every admitted group (staleness.when_too_old=wait)
    task_bounds: Mapping[str, int] = field(default_factory=dict)  # lower staleness of some tasks


@dataclass(frozen=True, slots=True, kw_only=True)
class Audit:
    """The result of an audit."""

    problems: tuple[str, ...]
    steps: int
    admitted: int
    trained: int  # groups
    active: int  # at the end: neither trained on nor dropped
    uses: int  # groups times steps
    dropped: Mapping[str, int] = field(default_factory=dict)
    lags: Mapping[int, int] = field(default_factory=dict)  # version - oldest token -> groups
    tasks: Mapping[str, int] = field(default_factory=dict)  # uses of groups, by task
    resumed: int = 0
    skipped: tuple[str, ...] = ()  # lines that no run wrote


def audit(lines: Sequence[Mapping[str, object]], rules: Rules) -> Audit:
    """Check the lines of a ledger against the rules; buffer/ledger.py describes the lines."""
    books = _Books(rules)
    for number, line in enumerate(lines, start=1):
        try:
            books.read(number, line)
        except (LookupError, TypeError, ValueError, ArithmeticError) as error:
            books.problems.append(
                f"line {number}: {line.get('fate')} has no facts that are read here "
                f"({type(error).__name__}: {error})"
            )
    uses, ended = books.uses, books.ended
    return Audit(
        problems=(*books.problems, *books.open_problems()),
        steps=len(books.steps),
        admitted=len(books.admitted_at),
        trained=len(uses),
        active=len(books.admitted_at.keys() - uses.keys() - ended.keys()),
        uses=sum(uses.values()),
        dropped=dict(Counter(books.drops.values())),
        lags=dict(sorted(books.lags.items())),
        tasks=dict(sorted(books.tasks.items())),
        resumed=books.resumed,
    )


class _Books:
    """The state of every group after the lines read so far, and the problems found in them."""

    def __init__(self, rules: Rules) -> None:
        self.rules, self.problems = rules, list[str]()
        self.admitted_at: dict[int, int] = {}  # group -> version
        self.uses: Counter[int] = Counter()
        self.ended: dict[int, str] = {}  # group -> its fate, after which no line may follow
        self.drops: dict[int, str] = {}  # group -> reason
        self.steps: Counter[int] = Counter()
        self.lags: Counter[int] = Counter()
        self.tasks: Counter[str] = Counter()
        self.task_of: dict[int, str] = {}
        self.newest, self.processes, self.resumed = -1, 1, 0

    def read(self, number: int, line: Mapping[str, Any]) -> None:
        """Enter a line; its number is for messages."""
        fate: str = line["fate"]
        if fate == "resumed":
            self._resumed(line)
            return
        group: int = line["group"]
        where = f"line {number}: group {group}"
        if fate == "admitted":
            if group in self.admitted_at:
                self.problems.append(f"{where} was admitted before")
            self.admitted_at[group] = line["version"]
            return
        if group not in self.admitted_at:
            self.problems.append(f"{where} is {fate} and was never admitted")
        if group in self.ended and fate != "returned":
            self.problems.append(f"{where} is {fate} after it was {self.ended[group]}")
        if fate == "trained":
            self._trained(group, line, where)
        elif fate == "returned":
            self._returned(group, line)
        elif fate == "dropped":
            self.drops[group] = line["reason"]
            self.ended[group] = f"dropped ({line['reason']})"
        elif fate == "retired":
            self.ended[group] = "retired"
        else:
            self.problems.append(f"line {number}: unknown fate {fate!r}")

    def _resumed(self, line: Mapping[str, Any]) -> None:
        """Forget the records of groups whose numbers the resumed run assigns again."""
        next_groups = line.get("places") or [line["next_group"]]
        self.processes = count = len(next_groups)
        old = {g for g in self.admitted_at if g // count < next_groups[g % count]}
        for by_group in (self.admitted_at, self.ended, self.drops):
            for group in by_group.keys() - old:
                del by_group[group]
        self.resumed += 1

    def _trained(self, group: int, line: Mapping[str, Any], where: str) -> None:
        self.uses[group] += 1
        version, lag = line["version"], line["version"] - line["oldest"]
        self.steps[version] += 1
        self.lags[lag] += 1
        use, most = self.uses[group], self.rules.max_staleness
        if task := line.get("task"):
            self.tasks[task] += 1
            self.task_of[group] = task
            most = min(most, self.rules.task_bounds.get(task, most))
        if line.get("use", 1) != use:
            self.problems.append(f"{where} is at use {line.get('use')}, the ledger at {use}")
        if not 0 <= lag <= most:
            self.problems.append(f"{where} had a token {lag} versions old; at most {most}")
        if version < self.newest:
            self.problems.append(f"{where} was trained on at version {version} after {self.newest}")
        self.newest = max(self.newest, version)
        if use == self.rules.reuse:
            self.ended[group] = "trained on as often as it may be"

    def _returned(self, group: int, line: Mapping[str, Any]) -> None:
        """Undo a use whose step did not take place."""
        self.ended.pop(group, None)
        for counts, key in (
            (self.uses, group),
            (self.steps, line["version"]),
            (self.lags, line["version"] - line["oldest"]),
        ):
            counts[key] -= 1
            if not counts[key]:
                del counts[key]
        if (task := self.task_of.get(group)) is not None:
            self.tasks[task] -= 1

    def open_problems(self) -> Iterator[str]:
        """Yield the problems at the end of the ledger: steps, lost groups, gaps in the numbers."""
        rules = self.rules
        last = max(self.steps, default=-1)
        for version in range(last + 1):
            if self.steps[version] != rules.groups_per_step:
                yield (
                    f"the step that improved version {version} had {self.steps[version]} groups, "
                    f"not {rules.groups_per_step}"
                )
        unused = self.admitted_at.keys() - self.uses.keys() - self.ended.keys()
        too_old = max(last, 0) - rules.max_staleness
        lost = sorted(g for g in unused if self.admitted_at[g] < too_old)
        if lost and rules.waits and rules.reuse == 1:
            yield f"groups {_listed(lost)} are lost: too old to be trained on, and not dropped"
        missing = sorted(
            gap
            for process in range(self.processes)
            for gap in self._numbers(process) - self.admitted_at.keys()
        )
        if missing:
            yield f"groups {_listed(missing)} were never admitted, and later ones were"

    def _numbers(self, process: int) -> set[int]:
        """Return the numbers of a process's groups up to the last one admitted."""
        count = self.processes
        last = max((g for g in self.admitted_at if g % count == process), default=-1)
        return set(range(process, last, count))


def _listed(numbers: Iterable[int]) -> str:
    first = list(numbers)
    return ", ".join(map(str, first[:5])) + (f" and {len(first) - 5} more" if first[5:] else "")


def audit_run(folder: Path) -> Audit:
    """Audit a run folder. Raises FileNotFoundError if it holds no run of run.job=rl."""
    config = yaml.safe_load((folder / "config.yaml").read_text(encoding="utf-8"))
    if not (folder / "ledger.jsonl").exists():
        raise FileNotFoundError(f"{folder / 'ledger.jsonl'}: only runs of run.job=rl have one")
    tasks = config.get("tasks") or {}
    rules = Rules(
        max_staleness=config["staleness"]["max_staleness"],
        groups_per_step=config["algorithm"]["groups_per_step"],
        reuse=config["buffer"]["reuse"],
        waits=config["staleness"].get("when_too_old", "wait") == "wait"
        and all(one.get("trainer_waits", True) for one in tasks.values()),
        task_bounds={
            name: one["max_staleness"]
            for name, one in tasks.items()
            if one.get("max_staleness") is not None
        },
    )
    ledger, metrics = folder / "ledger.jsonl", folder / "metrics.jsonl"
    # The run may still be training: files read later contain at least what earlier ones did.
    sealed = _sealed(folder, config)
    before = _reported(metrics)
    lines = [x for x in read_lines(ledger) if "fate" in x]
    reported = _reported(metrics)
    skipped = tuple(skipped_lines(ledger)), tuple(skipped_lines(metrics))
    result = replace(audit(lines, rules), skipped=skipped[0] + skipped[1])
    made, last = set(range(result.steps + 1)), max(reported, default=0)
    problems = list(result.problems)
    # The ledger may have one step more than the metrics if the run was killed in that step.
    if not (made - {result.steps} <= reported and before <= made):
        problems.append(
            f"metrics.jsonl has {len(reported)} steps up to {last}, the ledger {result.steps}"
        )
    if (newest := max(sealed, default=0)) > min(result.steps, last):
        problems.append(
            f"lines are missing: the newest checkpoint is of step {newest}, ledger.jsonl ends at "
            f"step {result.steps}, metrics.jsonl at {last}"
        )
    return replace(result, problems=tuple(problems))


def _sealed(folder: Path, config: Mapping[str, Any]) -> list[int]:
    """Return the steps of the run's checkpoints with checksums, in its folder or on its bucket."""
    address = config.get("checkpoint", {}).get("dir")
    if address is not None:
        return open_bucket(address, config["run"]["name"]).steps()
    checkpoints = folder / "checkpoints"
    return [s for s in saved_steps(checkpoints) if is_sealed(checkpoints / str(s))]


def _reported(metrics: Path) -> set[int]:
    """Return the steps that have metrics."""
    return {line["step"] for line in read_lines(metrics) if "step" in line}


def skipped_lines(path: Path) -> Iterator[str]:
    """Yield a message about the lines of a file that no run wrote, if there are any."""
    numbers = [number for number, line in numbered_lines(path) if line is None]
    if numbers:
        yield f"{path.name}: {listed_lines(numbers)} is torn, or not written by a run: skipped"


def audit_report(result: Audit) -> str:
    """Describe an audit in words."""
    lines = [
        f"{result.steps} steps, {result.admitted} groups admitted, {result.trained} trained on "
        f"({result.uses} uses), {sum(result.dropped.values())} dropped, {result.active} active; "
        f"resumed {result.resumed} times",
        *(f"dropped, {reason}: {count}" for reason, count in sorted(result.dropped.items())),
        *(f"trained, task {task}: {count}" for task, count in result.tasks.items()),
        "lag of the oldest token, versions: groups  "
        + "  ".join(f"{lag}: {count}" for lag, count in result.lags.items()),
        *result.skipped,
        *result.problems[:SHOWN],
    ]
    if len(result.problems) > SHOWN:
        lines.append(f"... and {len(result.problems) - SHOWN} more problems")
    lines.append(
        f"{len(result.problems)} PROBLEMS" if result.problems else "clean: every group has one fate"
    )
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit code."""
    args = list(sys.argv[1:] if argv is None else argv)
    if "--help" in args or "-h" in args:
        print(USAGE, "", __doc__, sep="\n")
        return 0
    if len(args) != 1 or args[0].startswith("-"):
        print(USAGE, file=sys.stderr)
        return 2
    try:
        result = audit_run(local_argument(args[0], "records of a run"))
    except ConfigError as error:
        print(f"config error: {error}", file=sys.stderr)
        return 2
    except (OSError, KeyError, TypeError, ValueError, yaml.YAMLError) as error:
        print(f"{args[0]} cannot be audited: {error}. Give the folder of a run.", file=sys.stderr)
        return 2
    print(audit_report(result))
    return 1 if result.problems else 0


if __name__ == "__main__":
    sys.exit(main())
