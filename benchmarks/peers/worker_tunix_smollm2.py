"""Train the real model of benchmarks/real_model.py with Tunix's own GRPO, on a CPU in float32.

Arguments and output: as worker_trl_smollm2.py. Its best settings: sampler and train step share the
weights, no reference, nothing recomputed, all answers sampled in one batch into a cache that just
fits, micro-batches that fit the memory. On policy; its loss is averaged over the tokens of each
micro-batch.

Three things of google-tunix 0.1.7 are put right here. Its llama3 ignores the configuration's
rope_theta, which makes this model another one. Its sampler begins every call with the same key,
unless another is given. It cuts off the token that ends an answer, which would never be trained.
"""

import dataclasses
import functools
import itertools
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from update_lines import UpdateLines
from worker_tunix import Ids, llama3_of

PAD = 0
"""The id of <|endoftext|>, which no prompt has; the id that ends an answer would be masked."""
LINEAR = ".*(q_proj|k_proj|v_proj|o_proj|gate_proj|up_proj|down_proj)"


class Words(Ids):
    """Prompts are token ids as words; answers are decoded."""

    def __init__(self, folder: str) -> None:
        from transformers import AutoTokenizer

        self.of_model = AutoTokenizer.from_pretrained(folder)

    def decode(self, ids: list[int], **_: object) -> str:
        """Return the text of an answer."""
        return str(self.of_model.decode(ids, skip_special_tokens=True))

    def eos_id(self) -> int:
        """Return the id that ends an answer."""
        return int(self.of_model.eos_token_id)

    def pad_id(self) -> int:
        """Return an id that no answer needs."""
        return PAD

    def prompt(self, record: Any) -> str:
        """Render a record's messages with the model's template."""
        text = self.of_model.apply_chat_template(
            record["messages"], add_generation_prompt=True, tokenize=False
        )
        return " ".join(map(str, self.of_model.encode(text, add_special_tokens=False)))


def adapted_model(folder: str, job: dict[str, Any]) -> tuple[Any, Any]:
    """Return the model with adapters, and its mesh."""
    import jax
    import qwix
    from tunix.models.llama3 import model as llama3
    from tunix.rl import reshard

    hf = json.loads((Path(folder) / "config.json").read_text(encoding="utf-8"))
    llama3.apply_rope = functools.partial(llama3.apply_rope, rope_theta=hf["rope_theta"])
    model, _, mesh = llama3_of(folder)
    adapters = qwix.LoraProvider(module_path=LINEAR, rank=job["rank"], alpha=job["alpha"])
    with jax.set_mesh(mesh):
        model = qwix.apply_lora_to_model(model, adapters, **model.get_model_input())
        return reshard.reshard_model_to_mesh(model, mesh), mesh


def make_cluster(model: Any, mesh: Any, words: Words, longest: int, job: dict[str, Any]) -> Any:
    """Return Tunix's cluster on one device."""
    import jax.numpy as jnp
    import optax
    from tunix.rl.rl_cluster import ClusterConfig, Mode, RLCluster, RLTrainingConfig, Role
    from tunix.rl.rollout.base_rollout import RolloutConfig

    rates = job["learning_rate"] * jnp.asarray(job["shape"])
    sampling = RolloutConfig(
        max_tokens_to_generate=job["new_tokens"],
        max_prompt_length=longest,
        kv_cache_size=longest + job["new_tokens"],
        temperature=1.0,
        top_p=1.0,  # of all tokens, its fastest; None is greedy
    )
    config = ClusterConfig(
        role_to_mesh={Role.ACTOR: mesh, Role.ROLLOUT: mesh},
        training_config=RLTrainingConfig(
            actor_optimizer=optax.chain(
                optax.clip_by_global_norm(job["max_grad_norm"]),
                optax.adamw(
                    lambda step: rates[jnp.minimum(step, len(rates) - 1)],
                    *job["betas"],
                    weight_decay=job["weight_decay"],
                ),
            ),
            eval_every_n_steps=10**9,
            max_steps=10**9,  # the batches end
            mini_batch_size=job["prompts"],
            train_micro_batch_size=job["rows"] // job["samples"],
            rollout_micro_batch_size=job["prompts"],
            compute_logps_micro_batch_size=job["prompts"],
        ),
        rollout_config={
            Mode.TRAIN: sampling,
            Mode.EVAL: dataclasses.replace(sampling, temperature=0.0, top_p=None),
        },
    )
    cluster = RLCluster(actor=model, tokenizer=words, cluster_config=config)
    put_right(cluster.rollout, words.eos_id(), job)
    return cluster


def put_right(rollout: Any, eos: int, job: dict[str, Any]) -> None:
    """Sample in each call with a new key, and keep the ends of answers."""
    import jax
    import numpy as np

    generate = rollout.generate
    keys = (jax.random.fold_in(jax.random.key(job["seed"]), n) for n in itertools.count())

    def kept(prompts: Any, config: Any, **more: Any) -> Any:
        out = generate(prompts, dataclasses.replace(config, seed=next(keys)), **more)
        whole = job["new_tokens"]
        out.tokens = [np.append(t, eos) if len(t) < whole else t for t in out.tokens]
        return out

    rollout.generate = kept


def main() -> None:
    """Train and evaluate."""
    lines = UpdateLines()
    job = json.loads(Path(sys.argv[2]).read_text(encoding="utf-8"))
    import jax
    import numpy as np
    from flax import nnx
    from tunix.rl.grpo.grpo_learner import GRPOConfig, GRPOLearner
    from tunix.rl.rl_cluster import Mode

    words, means = Words(sys.argv[1]), [0.0]
    prompts = {split: [words.prompt(r) for r in job[split]] for split in ("records", "held_out")}
    longest = max(len(p.split()) for p in itertools.chain(*prompts.values()))
    model, mesh = adapted_model(sys.argv[1], job)
    cluster = make_cluster(model, mesh, words, longest, job)

    def scores(prompts: Any, completions: list[str], answer: Any, **_: Any) -> list[float]:
        right = [float(t.strip() == a) for t, a in zip(completions, answer, strict=True)]
        means[0] = sum(right) / len(right)
        return right

    def greedy_accuracy() -> float:
        out = cluster.generate(prompts["held_out"], mode=Mode.EVAL)
        answers = [r["answer"] for r in job["held_out"]]
        return sum(t.strip() == a for t, a in zip(out.text, answers, strict=True)) / len(answers)

    def batches() -> Iterator[dict[str, Any]]:
        order = np.random.default_rng(job["seed"])
        pairs = [(p, r["answer"]) for p, r in zip(prompts["records"], job["records"], strict=True)]
        shuffled = itertools.chain.from_iterable(
            order.permutation(len(pairs)) for _ in itertools.count()
        )
        for number in itertools.count():
            jax.block_until_ready(nnx.state(cluster.actor_trainer.model))
            lines.ended(**({"reward": means[0]} if number else {}))
            if number == job["steps"]:
                return
            taken = [pairs[i] for i in itertools.islice(shuffled, job["prompts"])]
            prompted, answers = zip(*taken, strict=True)
            yield {"prompts": np.array(prompted), "answer": np.array(answers)}

    algorithm = GRPOConfig(
        num_generations=job["samples"], num_iterations=1, beta=0.0, loss_agg_mode="token-mean"
    )
    learner = GRPOLearner(cluster, algorithm, scores)
    with mesh:
        before = greedy_accuracy()
        learner.train(batches())
        after = greedy_accuracy()
    lines.ended(accuracy_before=before, accuracy_after=after)


if __name__ == "__main__":
    main()
