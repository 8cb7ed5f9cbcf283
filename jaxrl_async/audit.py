"""python -m jaxrl_async.audit RUN: does the ledger of a run add up?

Every group was admitted once and has one fate: trained on, once or as often as buffer.reuse says,
dropped for a reason, or still under way at the end; no token was older than max_staleness; every
step had its groups; metrics.jsonl tells of the same steps. Exit code 0 where all of it holds, 1
where something does not, 2 where there is no run to audit.
"""

import sys
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import yaml

from jaxrl_async.metrics.recorder import read_lines

USAGE = "usage: python -m jaxrl_async.audit RUN_FOLDER"
SHOWN = 20
"""Problems that are printed one by one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """What the ledger is held against, from the run's config.yaml."""

    max_staleness: int
    groups_per_step: int
    reuse: int = 1
    waits: bool = False  # for each group that is admitted (staleness.when_too_old=wait)


@dataclass(frozen=True, slots=True, kw_only=True)
class Audit:
    """What was found."""

    problems: tuple[str, ...]
    steps: int
    admitted: int
    trained: int  # groups
    active: int  # at the end: neither trained on nor dropped
    uses: int  # groups times steps
    dropped: Mapping[str, int] = field(default_factory=dict)
    lags: Mapping[int, int] = field(default_factory=dict)  # version - oldest token -> groups
    resumed: int = 0


def audit(lines: Sequence[Mapping[str, Any]], rules: Rules) -> Audit:
    """Hold the lines of a ledger against the rules; see buffer/ledger.py for what they say."""
    problems: list[str] = []
    admitted: set[int] = set()
    uses: Counter[int] = Counter()
    ended: dict[int, str] = {}  # group -> fate after which nothing may come
    steps: Counter[int] = Counter()
    lags: Counter[int] = Counter()
    drops: dict[int, str] = {}  # group -> reason
    admitted_at: dict[int, int] = {}  # group -> version
    last, count = -1, 1  # count: of processes, as far as it is told
    for number, line in enumerate(lines, start=1):
        fate: str = line["fate"]
        if fate == "resumed":
            places = line.get("places") or [line["next_group"]]
            count = len(places)
            old = {g for g in admitted if g // len(places) < places[g % len(places)]}
            for told in (admitted_at, ended, drops):
                for anew in [g for g in told if g not in old]:
                    del told[anew]
            admitted &= old
            continue
        group: int = line["group"]
        where = f"line {number}: group {group}"
        if fate == "admitted":
            if group in admitted:
                problems.append(f"{where} was admitted before")
            admitted.add(group)
            admitted_at[group] = line["version"]
            continue
        if group not in admitted:
            problems.append(f"{where} is {fate} and was never admitted")
        if group in ended and fate != "returned":
            problems.append(f"{where} is {fate} after it was {ended[group]}")
        if fate == "trained":
            uses[group] += 1
            version, lag = line["version"], line["version"] - line["oldest"]
            steps[version] += 1
            lags[lag] += 1
            if line.get("use", 1) != uses[group]:
                problems.append(f"{where} is at use {line.get('use')}, the ledger at {uses[group]}")
            if not 0 <= lag <= rules.max_staleness:
                problems.append(
                    f"{where} had a token {lag} versions old; at most {rules.max_staleness}"
                )
            if version < last:
                problems.append(f"{where} was trained on at version {version} after {last}")
            last = max(last, version)
            if uses[group] == rules.reuse:
                ended[group] = "trained on as often as it may be"
        elif fate == "returned":
            ended.pop(group, None)
            for counts, key in (
                (uses, group),
                (steps, line["version"]),
                (lags, line["version"] - line["oldest"]),
            ):
                counts[key] -= 1
                if not counts[key]:
                    del counts[key]
        elif fate == "dropped":
            drops[group] = line["reason"]
            ended[group] = f"dropped ({line['reason']})"
        elif fate == "retired":
            ended[group] = "retired"
        else:
            problems.append(f"line {number}: unknown fate {fate!r}")
    problems += _steps(steps, rules)
    lost = sorted(
        g
        for g, version in admitted_at.items()
        if g not in uses.keys() | ended.keys()
        and version + rules.max_staleness < max(steps, default=0)
    )
    if lost and rules.waits and rules.reuse == 1:
        problems.append(f"groups {_told(lost)} are lost: too old to be trained on, and not dropped")
    missing = sorted(
        gap
        for process in range(count)
        for gap in set(
            range(process, max((g for g in admitted if g % count == process), default=-1), count)
        )
        - admitted
    )
    if missing:
        problems.append(f"groups {_told(missing)} were never admitted, and later ones were")
    return Audit(
        problems=tuple(problems),
        steps=len(steps),
        admitted=len(admitted),
        trained=len(uses),
        active=len(admitted - uses.keys() - ended.keys()),
        uses=sum(uses.values()),
        dropped=dict(Counter(drops.values())),
        lags=dict(sorted(lags.items())),
        resumed=sum(line.get("fate") == "resumed" for line in lines),
    )


def _steps(steps: Counter[int], rules: Rules) -> list[str]:
    problems = []
    for version in range(max(steps, default=-1) + 1):
        if steps[version] != rules.groups_per_step:
            problems.append(
                f"the step that improved version {version} had {steps[version]} groups, not "
                f"{rules.groups_per_step}"
            )
    return problems


def _told(numbers: Iterable[int]) -> str:
    first = list(numbers)
    return ", ".join(map(str, first[:5])) + (f" and {len(first) - 5} more" if first[5:] else "")


def audit_run(folder: Path) -> Audit:
    """Audit a run folder. FileNotFoundError where it holds no run of rl."""
    config = yaml.safe_load((folder / "config.yaml").read_text(encoding="utf-8"))
    if not (folder / "ledger.jsonl").exists():
        raise FileNotFoundError(f"{folder / 'ledger.jsonl'}: only runs of run.job=rl have one")
    rules = Rules(
        max_staleness=config["staleness"]["max_staleness"],
        groups_per_step=config["algorithm"]["groups_per_step"],
        reuse=config["buffer"]["reuse"],
        waits=config["staleness"].get("when_too_old", "wait") == "wait",
    )
    lines = [x for x in read_lines(folder / "ledger.jsonl") if "fate" in x]
    found = audit(lines, rules)
    told = {line["step"] for line in read_lines(folder / "metrics.jsonl")}
    made = set(range(found.steps + 1))
    problems = list(found.problems)
    # The step under way when a run was killed is in the ledger already, and not in the metrics.
    if not made - {found.steps} <= told or not told <= made:
        problems.append(
            f"metrics.jsonl tells of {len(told)} steps up to {max(told, default=0)}, the ledger of "
            f"{found.steps}"
        )
    return replace(found, problems=tuple(problems))


def report(found: Audit) -> str:
    """What an audit found, in words."""
    lines = [
        f"{found.steps} steps, {found.admitted} groups admitted, {found.trained} trained on "
        f"({found.uses} uses), {sum(found.dropped.values())} dropped, {found.active} under way; "
        f"resumed {found.resumed} times",
        *(f"dropped, {reason}: {count}" for reason, count in sorted(found.dropped.items())),
        "lag of the oldest token, versions: groups  "
        + "  ".join(f"{lag}: {count}" for lag, count in found.lags.items()),
        *found.problems[:SHOWN],
    ]
    if len(found.problems) > SHOWN:
        lines.append(f"... and {len(found.problems) - SHOWN} more problems")
    lines.append(
        f"{len(found.problems)} PROBLEMS" if found.problems else "clean: every group has one fate"
    )
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; the exit code."""
    args = list(sys.argv[1:] if argv is None else argv)
    if len(args) != 1 or args[0].startswith("-"):
        print(USAGE, file=sys.stderr)
        return 2
    try:
        found = audit_run(Path(args[0]))
    except (OSError, KeyError, TypeError, ValueError, yaml.YAMLError) as error:
        print(f"{args[0]} cannot be audited: {error}. Give the folder of a run.", file=sys.stderr)
        return 2
    print(report(found))
    return 1 if found.problems else 0


if __name__ == "__main__":
    sys.exit(main())
