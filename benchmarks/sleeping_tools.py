"""Run 256 sessions at once whose tools sleep: episodes/s and busy slots at staleness 0, 1 and 4.

    python benchmarks/sleeping_tools.py [--staleness 0 1 4] [--programs 1 4] [--sigma 1]

Each row is a whole run of the main job with a tiny decoder on benchmarks/sleepy_task.py: sessions
of three turns, with a tool that sleeps log-normally (median 1 s) after the first two. At staleness
s a step has 256 / (s + 1) sessions, so that at most 256 are open in every row; sampler, trainer,
records and sleeps are the same. The first row takes its turns together: the run at staleness 0,
where no session draws its next turn before the tools of all 256 have answered. Each tool starts as
soon as its own session has drawn, and turns are drawn in the same continuous batch. In the rows
`overtaking` (staleness.lookahead) younger groups may be trained before a slow one, and a step has
256 / (s / 2 + 1) sessions, so that again at most 256 are open.

The policy is warm-started once and knows the task. The first 512 sessions sleep a tenth: programs
compile in them. Then s + 1 steps more are left out where s > 0. What follows is measured in windows
of about 256 sessions: their median, least and most. `sampler_busy` is the share of wall time in
which the sampler had work, `slots_drawing` that of wall time x slots that drew a token,
`of_sleeps_alone` the episodes/s in the long run if nothing but the sleeps took time, by simulation.
"""

import argparse
import contextlib
import itertools
import json
import math
import random
import statistics
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from common import Row, columns, options, parser, report, spread
from sleepy_task import CALLS

from jaxrl_async.config.load import load
from jaxrl_async.metrics.recorder import read_lines
from jaxrl_async.run.loop import train

TASK = Path(__file__).parent / "sleepy_task.py"
BASE = """
run: {overwrite: true}
sampler: {max_length: 128, max_new_tokens: 48, block: 4, page_tokens: 32}
trainer: {micro_batch_tokens: 4096}
env: {tool_timeout_s: 600}
metrics: {peak_flops: 1.0e9, tensorboard: false, samples_every: 0}
eval: {every: 0}
checkpoint: {every: 0}
"""
TINY = "{family: qwen3, layers: 2, width: 64, heads: 4, kv_heads: 2, head_dim: 16, mlp: 192}"
LEARNING_RATE = 1e-6
"""All rewards are equal: updates are computed, and change nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One row."""

    name: str
    staleness: int
    played_by: str = "environment"
    together: bool = False
    overtaking: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """How much is played."""

    open: int  # sessions at once
    group: int  # members of a group
    windows: int  # of about `open` sessions, measured
    median_s: float
    sigma: float

    def groups(self, case: Case) -> int:
        """Return the groups of a step: as many as leave `open` sessions at once, rounded down."""
        steps = 1 + case.staleness / (2 if case.overtaking else 1)
        return max(int(self.open / (steps * self.group)), 1)

    def lookahead(self, case: Case) -> int:
        """Return how many younger groups may overtake a slow one: half as many as could."""
        return case.staleness * self.groups(case) // 2 if case.overtaking else 0

    def window(self, case: Case) -> int:
        """Return the steps of a window."""
        return max(round(self.open / (self.groups(case) * self.group)), 1)

    def unmeasured(self, case: Case) -> int:
        """Return the steps before the first window: until no hurried session is left."""
        hurried = -(-self.hurried // (self.groups(case) * self.group))
        return hurried + (case.staleness + 1 if case.staleness else 0)

    @property
    def hurried(self) -> int:
        """Sessions at the start whose tools sleep a tenth."""
        return 2 * self.open


def main() -> None:
    """Measure every row and print them."""
    args = _options()
    sizes = Sizes(
        open=args.sessions,
        group=args.group,
        windows=args.repeats,
        median_s=args.median_s,
        sigma=args.sigma,
    )
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as temporary:
        folder = args.folder or Path(temporary)
        policy = args.policy or warm_started(folder, args)
        for case in cases(args):
            rows.append(one_row(case, sizes, args.slots, policy, folder))
            print(rows[-1], file=sys.stderr)
    first = rows[0]["median_episodes_per_s"]
    for row in rows:
        row["of_first"] = row["median_episodes_per_s"] / first
    report("sleeping_tools", rows, args)


def cases(args: argparse.Namespace) -> list[Case]:
    """Return the rows in order."""
    return [
        Case(name="turns together", staleness=0, together=True),
        *(Case(name="environments", staleness=s) for s in args.staleness),
        *(Case(name="overtaking", staleness=s, overtaking=True) for s in args.staleness if s),
        *(Case(name="programs", staleness=s, played_by="program") for s in args.programs),
    ]


def warm_started(folder: Path, args: argparse.Namespace) -> Path:
    """Teach a policy the task; return its directory."""
    run(
        folder,
        "warm",
        1,
        f"task={{{TASK}:sleepy: {{}}}}",
        f"model.architecture={TINY}",
        f"warm_start={{steps: {args.warm_steps}, batch_size: 64, learning_rate: 3.0e-3}}",
        "algorithm={group_size: 2, groups_per_step: 2}",
        "sampler.slots=8",
    )
    return folder / "warm" / "policy"


def one_row(case: Case, sizes: Sizes, slots: int, policy: Path, folder: Path) -> Row:
    """Play all sessions of a row and measure its windows."""
    groups, window, first = sizes.groups(case), sizes.window(case), sizes.unmeasured(case)
    sessions = groups * sizes.group
    task = {
        "played_by": case.played_by,
        "hurried": sizes.hurried,
        "together": sessions if case.together else 0,
        "median_s": sizes.median_s,
        "sigma": sizes.sigma,
    }
    lines = run(
        folder,
        "row",
        first + window * sizes.windows,
        f"task={json.dumps({f'{TASK}:sleepy': task})}",
        f"model.path={policy}",
        f"data.tokenizer={policy}",
        f"sampler.slots={slots}",
        f"staleness={{max_staleness: {case.staleness}, lookahead: {sizes.lookahead(case)}}}",
        f"algorithm={{learning_rate: {LEARNING_RATE}, group_size: {sizes.group}, "
        f"groups_per_step: {groups}}}",
    )
    at_s = {
        int(line["step"]): line["time/elapsed_s"] - line.get("time/eval_s", 0.0)
        for line in lines  # behind the last step there is an evaluation
    }
    ends = range(first, first + window * sizes.windows + 1, window)
    rates = [window * sessions / (at_s[b] - at_s[a]) for a, b in itertools.pairwise(ends)]
    measured = [line for line in lines if first < line["step"] <= ends[-1]]
    wall_s = sum(line["time/step_s"] for line in measured)

    def share(*keys: str) -> float:
        """Average the product of shares over wall time."""
        return (
            sum(math.prod([line["time/step_s"], *(line[k] for k in keys)]) for line in measured)
            / wall_s
        )

    return {
        "sessions": case.name,
        "staleness": case.staleness,
        "lookahead": sizes.lookahead(case),
        "step": sessions,
        "turns": statistics.mean(line["rollout/turns_mean"] for line in measured),
        "sampler_busy": share("sampler/busy_share"),
        "slots_drawing": share("sampler/busy_share", "sampler/slot_occupancy"),
        "late_calls": sum(
            line["faults/late_calls"] for line in lines if "faults/late_calls" in line
        ),
        "of_sleeps_alone": of_sleeps_alone(case, sizes),
        **columns(spread(rates), "episodes_per_s"),
    }


def of_sleeps_alone(case: Case, sizes: Sizes, sessions: int = 100_000) -> float:
    """Return the episodes/s in the long run if nothing took time but the sleeps, by simulation."""
    draw, step, most = random.Random(0), sizes.groups(case), sizes.lookahead(case)
    open_at_once = (case.staleness + 1) * step - most
    now_s, made, ends_s = 0.0, 0, list[float]()  # of the groups that are open, oldest first

    def call_s() -> float:
        return sizes.median_s * draw.lognormvariate(0.0, sizes.sigma)

    def group_s() -> float:
        return max(sum(call_s() for _ in range(CALLS)) for _ in range(sizes.group))

    def turns_s() -> float:
        return sum(max(call_s() for _ in range(sizes.open)) for _ in range(CALLS))

    while made * sizes.group < sessions:
        if case.together:
            ends_s = [now_s + turns_s()] * open_at_once
        while len(ends_s) < open_at_once:
            ends_s.append(now_s + group_s())
        now_s = max(now_s, sorted(ends_s[: step + most])[step - 1])
        trained = [n for n, end_s in enumerate(ends_s[: step + most]) if end_s <= now_s][:step]
        ends_s = [end_s for n, end_s in enumerate(ends_s) if n not in trained]
        made += step
    return made * sizes.group / now_s


def run(folder: Path, name: str, steps: int, *overrides: str) -> list[Row]:
    """Run the main job; return its metrics."""
    base = folder / "base.yaml"
    base.write_text(BASE, encoding="utf-8")
    where = (f"run.dir={folder}", f"run.name={name}", f"run.steps={steps}")
    with contextlib.redirect_stdout(sys.stderr):  # the table alone goes to stdout
        train(load(base, (*where, *overrides)))
    return read_lines(folder / name / "metrics.jsonl")


def _options() -> argparse.Namespace:
    words = parser(__doc__ or "")
    words.add_argument("--sessions", type=int, default=256, help="open at once")
    words.add_argument("--group", type=int, default=4, help="members of a group")
    words.add_argument("--slots", type=int, default=64, help="of the sampler")
    words.add_argument("--staleness", nargs="*", type=int, default=[0, 1, 4])
    words.add_argument("--programs", nargs="*", type=int, default=[0, 1, 4], help="their staleness")
    words.add_argument("--median-s", type=float, default=1.0, help="of a tool's sleep")
    words.add_argument("--sigma", type=float, default=1.0, help="of its logarithm")
    words.add_argument("--warm-steps", type=int, default=200, help="of the warm start")
    words.add_argument("--folder", type=Path, help="of the runs and of compiled programs")
    words.add_argument("--policy", type=Path, help="folder of one that knows the task")
    args = options(words)
    if args.quick:
        args.sessions, args.slots, args.median_s, args.warm_steps = 8, 4, 0.02, 20
        args.staleness, args.programs = [], [1]
    return args


if __name__ == "__main__":
    main()
