"""Make whole updates with Tunix's own GRPO: its GRPOLearner and RLCluster, without end.

Arguments: the model's folder, a file with prompts (token ids [n, T]), and a JSON object with
prompts and samples of an update, new tokens of an answer, rows of a micro-batch (null: all at once)
and the learning rate. Sampler, reward and train step are on one device, and share the weights.
Its best settings: no reference (beta 0), nothing recomputed, all rows drawn at once into a cache
that just fits, no checkpoint, metrics in memory only. No answer ends early: the id of EOS is beyond
the vocabulary, and so is that of padding, which would otherwise be masked where it is drawn.
"""

import itertools
import json
import sys
import time
from collections.abc import Iterator
from typing import Any

from update_lines import UpdateLines
from worker_tunix import Ids, adamw, llama3_of


class Tokens(Ids):
    """Token ids as words, and no id of the vocabulary that means something else."""

    def pad_id(self) -> int:
        """Return an id beyond the vocabulary, so that every drawn token is trained."""
        return 10**6 + 1


class Watched:
    """The reward, and the batches of prompts, which see when an update has drawn and ended."""

    def __init__(self, lines: UpdateLines) -> None:
        self._lines, self._drawn = lines, (0.0, 0.0)
        self._began = 0.0
        self.wait: Any = None  # returns when the weights are ready

    def reward(self, prompts: Any, completions: list[str], **_: Any) -> list[float]:
        """Return 0 or 1 by the last token drawn: each for about half of a group."""
        tokens = sum(len(text.split()) for text in completions)
        self._drawn = time.perf_counter(), tokens
        return [float(int(text.split()[-1]) % 2) for text in completions]

    def batches(self, prompts: Any, count: int) -> Iterator[dict[str, Any]]:
        """Yield the prompts of an update, `count` at a time, again and again. An update has ended
        when the learner asks for the next."""
        import numpy as np

        texts = itertools.cycle([" ".join(map(str, p)) for p in prompts])
        for number in itertools.count():
            batch = {"prompts": np.array(list(itertools.islice(texts, count)))}
            if number:
                self.wait()
                drawn_at, tokens = self._drawn
                self._lines.ended(
                    tokens=tokens,
                    draw_s=drawn_at - self._began,
                    update_s=time.perf_counter() - drawn_at,
                )
            else:
                self._lines.ended()
            self._began = time.perf_counter()
            yield batch


def make_cluster(folder: str, prompt: int, asked: dict[str, Any]) -> tuple[Any, Any]:
    """Return Tunix's cluster on one device, and its mesh."""
    from tunix.rl.rl_cluster import ClusterConfig, RLCluster, RLTrainingConfig, Role
    from tunix.rl.rollout.base_rollout import RolloutConfig

    model, _, mesh = llama3_of(folder)
    rows = asked["rows"] or asked["prompts"] * asked["samples"]
    config = ClusterConfig(
        role_to_mesh={Role.ACTOR: mesh, Role.ROLLOUT: mesh},
        training_config=RLTrainingConfig(
            actor_optimizer=adamw(asked["learning_rate"]),
            eval_every_n_steps=10**9,
            max_steps=10**9,
            mini_batch_size=asked["prompts"],
            train_micro_batch_size=rows // asked["samples"],
            rollout_micro_batch_size=asked["prompts"],
            compute_logps_micro_batch_size=asked["prompts"],
        ),
        rollout_config=RolloutConfig(
            max_tokens_to_generate=asked["answer"],
            max_prompt_length=prompt,
            kv_cache_size=prompt + asked["answer"],
            temperature=1.0,
            top_p=1.0,  # of all tokens, its fastest; None is greedy
        ),
    )
    return RLCluster(actor=model, tokenizer=Tokens(), cluster_config=config), mesh


def main() -> None:
    """Make updates until killed."""
    lines = UpdateLines()
    import jax
    import numpy as np
    from flax import nnx
    from tunix.rl.grpo.grpo_learner import GRPOConfig, GRPOLearner

    prompts, asked = np.load(sys.argv[2]), json.loads(sys.argv[3])
    cluster, mesh = make_cluster(sys.argv[1], prompts.shape[1], asked)
    watched = Watched(lines)
    watched.wait = lambda: jax.block_until_ready(nnx.state(cluster.actor_trainer.model))
    algorithm = GRPOConfig(num_generations=asked["samples"], num_iterations=1, beta=0.0)
    learner = GRPOLearner(cluster, algorithm, watched.reward)
    with mesh:
        learner.train(watched.batches(prompts, asked["prompts"]))


if __name__ == "__main__":
    main()
