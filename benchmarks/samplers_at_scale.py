"""Simulate 1,024 samplers of 4 chips for an hour, while some are preempted and replaced.

    python benchmarks/samplers_at_scale.py [--quick] [--settings NAME ...] [--hours 1]
                                           [--json [FILE]]

Qwen3-8B on TPU v6e: a sampler's times are set by hand, near the rates of the plan of
configs/plans/qwen3_8b_v6e_32.yaml (they are no output of it), the trainer is as fast as all
samplers together, a step is 131,072 answers. Weights travel at the rate that was measured of this
package's TCP transport, between processes of one machine (plan/transport_rates.py): a sampler is
one process, the trainer one for each 4 chips.

present    samplers at work, mean
busy       of the samplers that are present
again      tokens that were sampled again, of all sampled
first      requests of a sampler that has gone overtake those that wait; else they wait behind them
egress     what the trainer sends of each version, GB
live       seconds from publish until every sampler samples from a version, mean
"""

import argparse
import sys
import time
from dataclasses import dataclass, replace

from common import Row, report

from jaxrl_async.plan.chips import CHIPS
from jaxrl_async.plan.lengths import assumed
from jaxrl_async.plan.pipeline import Histogram, Pipeline, Samplers, TransferTree, Turnover
from jaxrl_async.plan.simulate import simulate
from jaxrl_async.plan.transport_rates import TRANSPORTS, carried_bytes_per_s

SAMPLERS = 1024
WARM_UP = 8
CHIPS_PER_SAMPLER = 4
COPY = 16.4e9
"""Bytes of the weights."""
TCP, CARD = TRANSPORTS["tcp"], CHIPS["v6e"].dcn_bytes_per_s
NEAR = TransferTree(
    num_bytes=COPY,
    trainer_bytes_per_s=carried_bytes_per_s(
        TCP, hosts=SAMPLERS // CHIPS_PER_SAMPLER, network_bytes_per_s=SAMPLERS * CARD
    ),
    sampler_bytes_per_s=carried_bytes_per_s(
        TCP, hosts=1, network_bytes_per_s=CHIPS_PER_SAMPLER * CARD
    ),
    offer_s=0.04,  # CPU of the trainer's process, benchmarks/offers.py
    fanout=2,
    hop_s=0.01,
    stage_s=COPY / (CHIPS_PER_SAMPLER * 8e9),  # over PCIe
)
FAR = replace(NEAR, trainer_bytes_per_s=12.5e9, sampler_bytes_per_s=1.25e9)
"""Samplers in another region: 100 Gbit/s out of the trainer's, 10 to each sampler, which is less
than the transport carries."""
BACK = Turnover(
    preempted_per_minute=1.0,
    handover_s=2.0,
    noticed_s=20.0,  # remote.silence_s
    replaced_s=Histogram.of([60.0, 180.0, 180.0, 600.0]),
    start_s=90.0,
)
KILLED = replace(BACK, handed_back_share=0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Scene:
    """One row of the table."""

    name: str
    turnover: Turnover | None = None
    tree: TransferTree = NEAR
    share: float = 1.0  # of the hour that is simulated


SCENES = (
    Scene(name="all stay"),
    Scene(name="1 a minute, handed back", turnover=BACK),
    Scene(name="1 a minute, handed back, first", turnover=replace(BACK, again_first=True)),
    Scene(name="1 a minute, killed", turnover=KILLED, share=0.4),
    Scene(name="1 a minute, killed, first", turnover=replace(KILLED, again_first=True), share=0.4),
    Scene(
        name="10 a minute, handed back, first",
        turnover=replace(BACK, preempted_per_minute=10.0, again_first=True),
        share=0.3,
    ),
    Scene(name="1 a minute, handed back; another region", turnover=BACK, tree=FAR, share=0.3),
    Scene(
        name="1 a minute, handed back; another region, the trainer sends to all",
        turnover=BACK,
        tree=replace(FAR, fanout=SAMPLERS),
        share=0.1,  # of updates: they take much longer
    ),
)


def pipeline(scene: Scene, samplers: int) -> Pipeline:
    """Return a run with so many samplers; of fewer than SAMPLERS, fewer are preempted."""
    share = samplers / SAMPLERS
    turnover = scene.turnover and replace(
        scene.turnover, preempted_per_minute=scene.turnover.preempted_per_minute * share
    )
    side = Samplers(
        count=samplers,
        slots=128,
        reserve=32,
        rows=(128,),
        step_s=(0.0183,),
        block=64,
        block_s=0.5e-3,
        prefill_token_s=1.5e-5,
        prefill_chunk=4096,
        swap_s=0.05,
    )
    return Pipeline(
        samplers=side,
        answer_tokens=assumed(7168),
        prompt_tokens=512,
        group_size=16,
        groups_per_step=8 * samplers,
        max_staleness=3,
        update_s=55.0,
        publish_s=0.1,
        tree=scene.tree,
        turnover=turnover,
    )


def row(scene: Scene, samplers: int, hours: float) -> Row:
    """Simulate a scene."""
    updates = WARM_UP + max(2, round(3600 * hours * scene.share / 57))
    began_s = time.process_time()
    result = simulate(pipeline(scene, samplers), updates=updates, warm_up=WARM_UP)
    sent = result.trainer_sent_bytes / updates
    return {
        "setting": scene.name,
        "trainer_busy": f"{result.trainer_busy_share:.1%}",
        "present": f"{result.samplers_mean:,.0f}",
        "busy": f"{result.sampler_busy_share:.1%}",
        "slots_in_use": f"{result.slot_occupancy:.1%}",
        "tokens_per_s": f"{result.trained_tokens_per_s:,.0f}",
        "staleness": f"{result.staleness_mean:.2f}, {result.staleness_max} at most",
        "gone": result.leaves + result.kills,
        "moved": result.moved_answers,
        "again": f"{result.lost_tokens / result.drawn_tokens:.3%}",
        "egress": f"{sent / 1e9:,.0f}",
        "live": f"{result.live_s:.1f}",
        "simulated_min": f"{result.wall_s / 60:.0f}",
        "cpu_s": round(time.process_time() - began_s),
    }


def main() -> None:
    """Run the command line."""
    words = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    names = [scene.name for scene in SCENES]
    words.add_argument("--quick", action="store_true", help="16 samplers, ten minutes")
    words.add_argument("--settings", nargs="+", choices=names, default=names)
    words.add_argument("--hours", type=float, default=1.0, help="that are simulated")
    words.add_argument("--json", nargs="?", const="-", metavar="FILE", help="as the others")
    args = words.parse_args()
    samplers, hours = (16, 1 / 6) if args.quick else (SAMPLERS, args.hours)
    rows = []
    for scene in SCENES:
        if scene.name in args.settings:
            rows.append(row(scene, samplers, hours))
            print(*rows[-1].values(), sep=" | ", file=sys.stderr, flush=True)
    report("samplers_at_scale", rows, args)


if __name__ == "__main__":
    main()
