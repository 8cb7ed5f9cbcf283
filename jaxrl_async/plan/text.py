"""A plan as text, and as JSON."""

from collections.abc import Iterable
from dataclasses import asdict
from typing import Any

from jaxrl_async.plan.chips import GIB, Slice
from jaxrl_async.plan.compiled import Compiled
from jaxrl_async.plan.cost import Collective
from jaxrl_async.plan.hbm import Memory
from jaxrl_async.plan.plan import BetweenSlices, Plan, Side, Together, at_split
from jaxrl_async.plan.timing import Timing


def plan_text(plan: Plan) -> str:
    """Format a plan for display: both sides' memory and programs, then the whole run."""
    return "\n".join(
        [
            *_side("trainer", plan.trainer, plan),
            "",
            *_side("sampler", plan.sampler, plan),
            "",
            *(_whole(plan, plan.together) if plan.together else _refused(plan)),
        ]
    )


def choice_text(plan: Plan) -> str:
    """Describe the split that is written out."""
    chips = f"{plan.trainer.where.num_chips} + {plan.num_samplers * plan.sampler.where.num_chips}"
    assert plan.together is not None, "it fits"
    outcome, word = plan.together.outcome, plan.trainer.where.chip.word
    if outcome is None:
        return f"as configured: {plan.trainer.where.num_chips} {word}s, for both sides"
    rate = outcome.trained_tokens_per_s
    return f"the best split that fits: {chips} {word}s, simulated {rate:,.0f} answer tokens/s"


def plan_json(plan: Plan) -> dict[str, Any]:
    """Format a plan for programs: all numbers, in SI units and bytes.

    The numbers of the whole run are missing if the compiler rejected a program.
    """
    return {
        "name": plan.name,
        "fits": plan.fits,
        "trainer": _side_json(plan.trainer),
        "sampler": {"count": plan.num_samplers, **_side_json(plan.sampler)},
        **(_together_json(plan.together) if plan.together else {}),
        "lengths": asdict(plan.lengths),
        "checkpoint_bytes": plan.checkpoint_bytes,
        "notes": list(plan.notes),
    }


def _together_json(whole: Together) -> dict[str, Any]:
    decode = asdict(whole.decode)
    return {
        "learning": {**asdict(whole.learning), "mfu": whole.learning.mfu},
        "decode": {**decode.pop("load"), **decode, "bandwidth_share": whole.decode.bandwidth_share},
        "transfer_s": whole.transfer_s,
        "transfer_bound_s": whole.bound_s,
        "transport": None if whole.transport is None else asdict(whole.transport),
        "between_slices": None if whole.between_slices is None else asdict(whole.between_slices),
        "splits": [asdict(s) for s in whole.splits],
        "simulated": None if whole.outcome is None else asdict(whole.outcome),
        "in_turns_tokens_per_s": whole.in_turns_tokens_per_s,
    }


def _side_json(side: Side) -> dict[str, Any]:
    return {
        "topology": side.where.topology,
        "memory": {**asdict(side.memory), "fits": side.memory.fits},
        "programs": [asdict(p) for p in side.programs],
        "timings": {
            name: {
                **asdict(t),
                "estimate_s": t.estimate_s,
                "largest": t.largest,
                "largest_share": t.largest_share,
            }
            for name, t in side.timings.items()
        },
    }


def _side(name: str, side: Side, plan: Plan) -> list[str]:
    count = f"{plan.num_samplers} x " if name == "sampler" else ""
    word = side.where.chip.word
    lines = [
        f"{name}: {count}{side.where.name} ({side.where.topology})",
        *_memory(side.memory, word),
        f"  program      {word} time   roofline  TFLOP   HBM GB  temp GiB  compiled in",
    ]
    for program in side.programs:
        lines += _program(program, side.timings.get(program.name))
    return lines


def _memory(memory: Memory, word: str) -> list[str]:
    share = memory.total_bytes / memory.usable_bytes
    verdict = "fits" if memory.fits else "DOES NOT FIT"
    what = "memory" if word == "card" else "HBM"
    kinds = sorted(memory.kinds.items(), key=lambda item: -item[1])
    return [
        f"  {what} of a {word}, GiB: {memory.total_bytes / GIB:.2f} of "
        f"{memory.usable_bytes / GIB:.2f} ({share:.0%}, most in {memory.moment}): {verdict}",
        *(f"    {value / GIB:7.2f}  {kind}" for kind, value in kinds),
    ]


def _program(program: Compiled, time: Timing | None) -> list[str]:
    if time is None:
        return [
            f"  {program.name:<11} rejected by the compiler: it needs "
            f"{program.needed_bytes / GIB:.2f} GiB"
        ]
    cost = program.cost
    flops = cost.flops + sum(k.flops for k in cost.kernels)
    when = f"{program.compile_s:.0f} s" + (" (kept)" if program.cached else "")
    lines = [
        f"  {program.name:<11} {_time(time.estimate_s):>10} {_time(time.roofline_s):>10} "
        f"{flops / 1e12:6.1f} {cost.num_bytes / 1e9:8.1f} {program.temp_bytes / GIB:9.2f}  {when}"
    ]
    lines += [
        f"      {c.kind} over {c.axes} ({c.group}{_hosts(c)}): {c.num_bytes / 1e9:.2f} GB sent, "
        f"{c.times:.0f} times"
        for c in cost.collectives
        if c.num_bytes >= 1e6
    ]
    lines += [f"      kernel {k.name}: {k.times:.0f} times" for k in cost.kernels]
    return lines


def _hosts(collective: Collective) -> str:
    return ", of several hosts" if 0 < collective.near < collective.group else ""


def _refused(plan: Plan) -> list[str]:
    names = [p.name for side in (plan.trainer, plan.sampler) for p in side.programs if not p.fits]
    return [f"no times of the run: the compiler rejected {', '.join(names)}.", *plan.notes]


def _whole(plan: Plan, whole: Together) -> list[str]:
    learning, decode = whole.learning, whole.decode
    gradient = plan.trainer.timings["gradient"]
    of_gradient, of_decode = (
        ", ".join(f"{name} {share:.0%}" for name, share in account.items())
        for account in (learning.account, decode.account)
    )
    lines = [
        "run:",
        f"  trainer   {learning.tokens:,.0f} tokens a step in {learning.step_s:.1f} s "
        f"({learning.micro_batches:.0f} micro-batches), {learning.tokens_per_s:,.0f} answer "
        f"tokens/s; MFU {learning.mfu:.1%} (most of its time: {gradient.largest})",
        f"            gradient's time: {of_gradient}",
        f"  samplers  {decode.load.rows} rows of {decode.load.context:,.0f} tokens, a step in "
        f"{_time(decode.step_s)}, {decode.bandwidth_share:.0%} of HBM's bandwidth; "
        f"{decode.tokens_per_s * plan.num_samplers:,.0f} answer tokens/s",
        f"            a step's time: {of_decode}",
        f"  weights   {_time(whole.transfer_s)} to the samplers{_way(whole, plan.num_samplers)}",
        *_between(whole.between_slices),
        _rate(plan, whole),
        f"  checkpoint {plan.checkpoint_bytes / 1e9:,.1f} GB",
    ]
    if whole.splits:
        lines += _splits(whole, plan.trainer.where)
    return [*lines, *(f"  {note}" for note in plan.notes)]


def _rate(plan: Plan, whole: Together) -> str:
    """Describe the speed of both sides together."""
    outcome = whole.outcome
    if outcome is None:
        return (
            f"  alternate {whole.in_turns_tokens_per_s:,.0f} answer tokens/s: both sides compute "
            f"on the same {plan.trainer.where.chip.word}s"
        )
    return (
        f"  simulated {outcome.trained_tokens_per_s:,.0f} answer tokens/s trained on; idle: "
        f"trainer {1 - outcome.trainer_busy_share:.0%}, samplers "
        f"{outcome.sampler_idle_share:.0%}; staleness {outcome.staleness_mean:.2f} mean, "
        f"{outcome.staleness_max} at most"
    )


def _way(whole: Together, samplers: int) -> str:
    """Describe the transfer of the weights."""
    tree, transport = whole.pipeline.tree, whole.transport
    if tree is None or transport is None:
        return ""
    copies = min(tree.fanout, samplers)
    sent_gb, cost = copies * tree.num_bytes / 1e9, ""
    if transport.send_cpu_s_per_gb is not None:
        cost = f" and {sent_gb * transport.send_cpu_s_per_gb:,.0f} CPU seconds of its hosts"
    return (
        f": {tree.num_bytes / 1e9:.1f} GB each, {transport.name}; of each version the trainer "
        f"sends {copies} copies, {sent_gb:,.1f} GB{cost} (at the network cards' line rate, an "
        f"upper bound: {_time(whole.bound_s)})"
    )


def _between(slices: BetweenSlices | None) -> list[str]:
    """Describe the traffic between the trainer's slices."""
    if slices is None:
        return []
    return [
        f"  {slices.slices} slices  each device of the trainer sends "
        f"{slices.bytes_of_device / 1e9:.2f} GB to other slices in a step: "
        f"{_time(slices.seconds)} of it, at its share of its host's network cards"
    ]


def _splits(whole: Together, where: Slice) -> Iterable[str]:
    """Describe the splits; where: the trainer's slice as configured."""
    now = where.num_chips
    yield (
        f"  splits of the same {where.chip.word}s, trainer + samplers (answer tokens/s of the "
        "slower side):"
    )
    shown = [s for n, s in enumerate(whole.splits) if n < 3 or s.trainer_chips == now]
    for number, split in enumerate(shown):
        mark = "  <- as configured" if split.trainer_chips == now else ""
        simulated = ""
        if not number:
            best = at_split(whole.pipeline, now, split)
            simulated = f", simulated {best.trained_tokens_per_s:,.0f}"
        yield (
            f"    {split.trainer_chips:5d} + {split.sampler_chips:<5d} "
            f"{split.answer_tokens_per_s:10,.0f}{simulated}{mark}"
        )


def _time(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 1 else f"{seconds * 1e3:.2f} ms"
