"""Make Tunix's own GRPO train steps: its PeftTrainer's jitted step with its loss, no reference.

Arguments: the model's folder, a file with token_ids [n, T], the prompt's length, behavior log-probs
and advantages (train_step.py makes it), and how many sequences a micro-batch has (their gradients
are accumulated). Each line on stdin asks for an update; the answer has its seconds. AdamW and the
clipping are those of our trainer's defaults. Its best settings here: nothing is recomputed.
"""

import json
import sys
import time
from typing import Any

from update_lines import cpu_s
from worker_tunix import adamw, llama3_of


def make_update(folder: str, data: str, rows: int) -> Any:
    """Return a function that makes one update and waits for it."""
    import jax
    import jax.numpy as jnp
    import numpy as np
    from flax import nnx
    from tunix.rl import common
    from tunix.rl.algo_core import grpo_loss_fn
    from tunix.rl.grpo.grpo_learner import GRPOConfig
    from tunix.sft import peft_trainer

    model, _, mesh = llama3_of(folder)
    arrays = np.load(data)
    ids, prompt = arrays["token_ids"], int(arrays["prompt"])
    micros = len(ids) // rows
    training = peft_trainer.TrainingConfig(
        eval_every_n_steps=10**9, gradient_accumulation_steps=micros if micros > 1 else None
    )
    trainer = peft_trainer.PeftTrainer(model, adamw(1e-6), training)
    algorithm = GRPOConfig(beta=0.0)
    algorithm.temperature = 1.0

    def loss(model: Any, train_example: Any) -> Any:
        return grpo_loss_fn(model, train_example, algo_config=algorithm, pad_id=-1, eos_id=-1)

    trainer.with_loss_fn(loss, has_aux=True)
    trainer.with_gen_model_input_fn(lambda example: {"train_example": example})

    def example(i: int) -> Any:
        part = slice(i * rows, (i + 1) * rows)
        answers = ids[part, prompt:]
        return common.TrainExample(
            prompt_ids=jnp.asarray(ids[part, :prompt]),
            prompt_mask=jnp.ones((rows, prompt), jnp.int32),
            completion_ids=jnp.asarray(answers),
            completion_mask=jnp.ones(answers.shape, jnp.int32),
            advantages=jnp.asarray(arrays["advantages"][part]),
            ref_per_token_logps=None,
            old_per_token_logps=jnp.asarray(arrays["behavior_logprobs"][part, prompt:]),
        )

    with jax.set_mesh(mesh):
        step, _ = trainer.jit_train_and_eval_step(cache_nnx_graph=True)

    def update() -> float:
        """Return the last micro-batch's loss."""
        with jax.set_mesh(mesh):
            for i in range(micros):
                value, _, norm = step(example(i))
            jax.block_until_ready((value, norm, nnx.state(trainer.model)))
        return float(value)

    return update


def main() -> None:
    """Answer each line of stdin with an update's seconds."""
    update = make_update(sys.argv[1], sys.argv[2], int(sys.argv[3]))
    for _ in sys.stdin:
        start, used = time.perf_counter(), cpu_s()
        loss = update()
        taken = {"s": time.perf_counter() - start, "cpu_s": cpu_s() - used, "loss": loss}
        print(json.dumps(taken), flush=True)


if __name__ == "__main__":
    main()
