"""Time whole updates of the asynchronous run, 8 prompts x 8 samples, without disk or evaluation.

    --tunix                  beside Tunix's own GRPO on the same work, in turns
                             (peers/environments.py installs it); it starts with huge pages as we do
    --answers 64 128         all answers of that many tokens
    --share-prefixes         the same work with trainer.share_prefixes, too, in rows of a group

Each row is a process (whole_updates.py, peers/worker_tunix_grpo.py) that is stopped while another
has its turn. Sampler, rollouts, staleness gate, packing, GRPO update, weight transfer and probe are
those of the main job, one device for the trainer and one for each sampler, which share the cores.
Only the reward is made up, and the lengths of the answers are forced. At max_staleness 0 trainer
and sampler take turns; from 1 on they overlap.

tokens_per_s  drawn and trained tokens of an update, by its median seconds
peak_mib      most memory of the process
draw_s        of an update, median: ours, while samplers were at work; Tunix, until the rewards
update_s      the same of training and handing over the weights
occupancy     share of the sampler's places that drew a token (Tunix: all, as no answer ends early)
s, cpu_s      wall and CPU seconds of the process for an update; the spread is over updates
"""

from jaxrl_async.huge_pages import start_with_huge_pages

if __name__ == "__main__":
    start_with_huge_pages()  # as the commands do; the processes inherit them

import argparse
import json
import statistics
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from common import (
    MODELS,
    PROMPT_TOKENS,
    Row,
    columns,
    long_tail,
    make_params,
    options,
    parser,
    random_prompts,
    report,
    spread,
)
from peers.environments import ENVIRONMENTS, python_of
from updates_in_turns import Line, in_turns
from whole_updates import Work

from jaxrl_async.config.algorithm_section import AlgorithmSection
from jaxrl_async.model.policy import Policy

HERE = Path(__file__).parent
LONGEST = 128
"""Longest answer of the long tail, tokens."""


def main() -> None:
    """Measure every row and print them."""
    args = _options()
    rows = [
        row
        for model in args.models
        for name, lengths in workloads(args).items()
        for row in rows_of(model, name, lengths, args)
    ]
    report("end_to_end", rows, args)


def workloads(args: argparse.Namespace) -> dict[str, list[int]]:
    """Return answer lengths, tokens, to be dealt out in order, cyclically."""
    if args.answers:
        return {f"{n} each": [n] for n in args.answers}
    if args.quick:
        return {"long tail": long_tail(64, median=4, most=16)}
    return {"64 each": [64], "long tail": long_tail(1024, most=LONGEST)}


def rows_of(model: str, name: str, lengths: list[int], args: argparse.Namespace) -> list[Row]:
    """Make updates of one model in every way, in turns."""
    works = {
        f"{'ours, shared prompts' if shares else 'ours'}-{staleness}": Work(
            model=model,
            lengths=lengths,
            prompts=args.prompts,
            samples=args.samples,
            max_staleness=staleness,
            samplers=args.samplers,
            block=args.block,
            micro_batch_tokens=args.micro_batch_tokens,
            shares=shares,
        )
        for shares in ([False, True] if args.share_prefixes else [False])
        for staleness in args.max_staleness
    }
    commands: dict[str, Sequence[Any]] = {
        engine: (sys.executable, HERE / "whole_updates.py", work.text())
        for engine, work in works.items()
    }
    with tempfile.TemporaryDirectory() as folder:
        if args.tunix:
            commands["tunix-0"] = tunix_command(model, lengths[0], args, Path(folder))
        taken = in_turns(commands, args.steps, args.turn, Path(folder))
    return [_row(model, name, engine, updates) for engine, updates in taken.items()]


def _row(model: str, answers: str, engine: str, updates: Sequence[Line]) -> Row:
    engine, staleness = engine.split("-")
    wall = spread([u["ended"] - u["began"] for u in updates])

    def median(key: str) -> float:
        return statistics.median(u[key] for u in updates)

    return {
        "model": model,
        "answers": answers,
        "engine": engine,
        "max_staleness": int(staleness),
        "updates": len(updates),
        "tokens_per_s": statistics.fmean(u["tokens"] for u in updates) / wall.median,
        "peak_mib": max(u["peak_mib"] for u in updates),
        "draw_s": median("draw_s"),
        "update_s": median("update_s"),
        "occupancy": statistics.fmean(u.get("occupancy", 1.0) for u in updates),
        **columns(wall),
        **columns(spread([u["cpu_s"] for u in updates]), "cpu_s"),
    }


def tunix_command(
    model: str, answer: int, args: argparse.Namespace, folder: Path
) -> tuple[Any, ...]:
    """Return what starts Tunix on the same work; writes weights and prompts into the folder."""
    spec = MODELS[model]
    Policy(spec, make_params(spec)).save_pretrained(folder / "policy")
    prompts = folder / "prompts.npy"
    np.save(prompts, np.stack(random_prompts(spec.vocab, 1024)))
    asked: Mapping[str, float | None] = {
        "prompts": args.prompts,
        "samples": args.samples,
        "answer": answer,
        "rows": args.tunix_rows,
        "learning_rate": AlgorithmSection().learning_rate,
    }
    script = HERE / "peers" / "worker_tunix_grpo.py"
    python = python_of(ENVIRONMENTS["tunix"])
    return python, script, folder / "policy", prompts, json.dumps(asked)


def _options() -> argparse.Namespace:
    words = parser(__doc__ or "")
    words.add_argument("--prompts", type=int, default=8, help="groups in an update")
    words.add_argument("--samples", type=int, default=8, help="answers to a prompt")
    words.add_argument("--answers", nargs="+", type=int, help="tokens of every answer")
    words.add_argument("--steps", type=int, default=10, help="measured updates of each row")
    words.add_argument("--turn", type=int, default=5, help="updates before another row's turn")
    words.add_argument("--max-staleness", nargs="+", type=int, default=[0, 1, 2])
    words.add_argument("--samplers", type=int, default=1, help="each on one core")
    words.add_argument("--block", type=int, default=8, help="decode steps in one dispatch")
    words.add_argument("--micro-batch-tokens", type=int, default=4096)
    words.add_argument("--share-prefixes", action="store_true", help="the same with it, too")
    words.add_argument("--tunix", action="store_true", help="beside Tunix's GRPO")
    words.add_argument("--tunix-rows", type=int, help="sequences in its micro-batch; default: all")
    args = options(words)
    if args.quick:
        args.prompts, args.samples, args.steps, args.max_staleness = 2, 4, 2, [0, 1]
        args.micro_batch_tokens = 2 * (PROMPT_TOKENS + LONGEST)
    if args.tunix:
        args.answers = args.answers or [16 if args.quick else 64]
        rows = args.tunix_rows or args.samples
        if rows % args.samples or args.prompts % (rows // args.samples):
            words.error(f"--tunix-rows {rows} must be whole groups that divide --prompts")
    return args


if __name__ == "__main__":
    main()
