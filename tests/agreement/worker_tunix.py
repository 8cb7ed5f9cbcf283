"""Tunix's own losses on given arrays. Run with Tunix's interpreter:

    worker_tunix.py ARRAYS.npz OUT.npz [ARRAYS.npz OUT.npz ...]

A model that answers with given logits (or values) stands where the policy (or the critic) would;
log-probs, entropies, losses and their sums are Tunix's code.
"""

import json
import sys
from importlib.metadata import version
from types import SimpleNamespace

import jax.numpy as jnp
import numpy as np
from flax import nnx
from tunix.distillation.strategies.logit import LogitStrategy
from tunix.rl import algo_core
from tunix.rl.grpo.dapo_learner import reward_shaping
from tunix.sft.dpo import dpo_trainer

PROMPT, PAD, EOS = 1, 0, -1


class Model(nnx.Module):
    """Answers [sequences, length, outputs] at the places that the tokens are drawn from."""

    def __init__(self, answers):
        self.answers = nnx.Param(jnp.asarray(answers))

    def __call__(self, tokens, positions=None, cache=None, attention_mask=None, segment_ids=None):
        return jnp.pad(self.answers[...], ((0, 0), (0, 1), (0, 0))), None


def loss_and_gradient(function, answers):
    """function(model)'s value, and its gradient with respect to what the model answers."""
    (loss, _), gradient = nnx.value_and_grad(function, has_aux=True)(Model(answers))
    return {"loss": loss, "gradient": gradient["answers"][...]}


def example(arrays, **fields):
    """What a loss function sees of a batch."""
    shape = arrays["mask"].shape
    shared = {
        "prompt_ids": jnp.ones((shape[0], PROMPT), jnp.int32),
        "completion_ids": jnp.asarray(arrays["tokens"], jnp.int32),
        "completion_mask": jnp.asarray(arrays["mask"], jnp.float32),
        "old_per_token_logps": jnp.asarray(arrays["proximal"]),
        "ref_per_token_logps": None,
    }
    return SimpleNamespace(**shared | {k: jnp.asarray(v) for k, v in fields.items()})


def grpo(arrays, *, kl=None, sampler_cap=None, **settings):
    """grpo_loss_fn. sampler_cap: min(proximal / behavior, cap) weighs each token, as there."""
    config = {
        "beta": 0.0, "epsilon": 0.2, "epsilon_high": 0.2, "epsilon_c": None, "loss_algo": "grpo",
        "loss_agg_mode": "token-mean", "temperature": 1.0, "kl_loss_mode": kl,
        "kl_clamp_value": None,
    }  # fmt: skip
    fields = {"advantages": arrays["advantages"]}
    if kl is not None:
        fields["ref_per_token_logps"] = arrays["reference"]
    if sampler_cap is not None:
        weights = np.exp(arrays["proximal"] - arrays["behavior"])
        fields["sampler_is_weights"] = np.minimum(weights, sampler_cap)
    batch, config = example(arrays, **fields), SimpleNamespace(**config | settings)
    return loss_and_gradient(
        lambda model: algo_core.grpo_loss_fn(model, batch, config, PAD, EOS), arrays["logits"]
    )


def ppo(arrays, **settings):
    """ppo_policy_loss_fn, with an advantage for each token."""
    config = {"epsilon_low": 0.2, "epsilon_high": 0.2, "entropy_coef": None, "epsilon_c": None}
    fields = {"advantages": arrays["token_advantages"], "ref_per_token_logps": arrays["reference"]}
    batch, config = example(arrays, **fields), SimpleNamespace(**config | settings)
    return loss_and_gradient(
        lambda model: algo_core.ppo_policy_loss_fn(model, batch, config, PAD, EOS),
        arrays["logits"],
    )


def value(arrays, *, clip):
    """ppo_value_loss_fn."""
    batch = example(arrays, old_values=arrays["old_values"], returns=arrays["returns"])
    return loss_and_gradient(
        lambda model: algo_core.ppo_value_loss_fn(model, batch, clip, PAD, EOS),
        arrays["values"][..., None],
    )


def gae(arrays, *, gamma, lam):
    """compute_gae_advantages."""
    advantages, returns = algo_core.compute_gae_advantages(
        jnp.asarray(arrays["token_rewards"]),
        jnp.asarray(arrays["values"]),
        jnp.asarray(arrays["mask"], jnp.float32),
        gamma,
        lam,
    )
    return {"advantages": advantages, "returns": returns}


def in_groups(arrays, *, name):
    """The advantage estimators that look at a group's rewards alone."""
    function = {
        "group_normalized": algo_core.compute_advantages,
        "group_mean": algo_core.compute_drgrpo_advantages,
        "rloo": algo_core.compute_rloo_advantages,
    }[name]
    rewards = arrays["rewards"].sum(1)
    if name != "group_normalized":
        rewards = jnp.asarray(rewards)
    return {"advantages": function(rewards, int(arrays["group_size"]))}


def preference(arrays, *, mask, **settings):
    """dpo_loss_fn of logits [2 pairs, length, vocab], the chosen answers first."""
    sequences, length = arrays[mask].shape
    reference = (arrays["pair_logits_reference"] * arrays[mask]).sum(1)
    chosen, rejected = jnp.split(jnp.asarray(reference), 2)
    batch = SimpleNamespace(
        input_ids=jnp.pad(jnp.asarray(arrays["pair_tokens"], jnp.int32), ((0, 0), (PROMPT, 0))),
        positions=jnp.zeros((sequences, length + PROMPT), jnp.int32),
        attention_mask=jnp.ones((sequences, length + PROMPT)),
        ref_chosen_logps=chosen,
        ref_rejected_logps=rejected,
        completion_mask=jnp.asarray(arrays[mask], jnp.float32),
        logits_to_keep=length,
        images=None,
    )
    return loss_and_gradient(
        lambda model: dpo_trainer.dpo_loss_fn(model, batch, **settings), arrays["pair_logits"]
    )


def logit(arrays, *, temperature, alpha):
    """LogitStrategy: distillation and likelihood of the tokens, alpha of the former."""
    strategy = object.__new__(LogitStrategy)
    strategy.temperature, strategy.alpha, strategy.distill_top_k = temperature, alpha, 0
    teacher = jnp.asarray(arrays["teacher_logits"])
    labels = jnp.asarray(np.eye(teacher.shape[-1], dtype=np.float32)[arrays["tokens"]])
    return loss_and_gradient(
        lambda model: strategy.compute_loss(model.answers[...], teacher, labels), arrays["logits"]
    )


def overlong(arrays, *, lengths, longest, buffer):
    """DAPO's reward_shaping: a penalty for each answer of so many characters."""
    words = ["." * n for n in lengths]
    limits = {
        "overlong_buffer_length": buffer,
        "overlong_buffer_penalty": 1.0,
        "max_response_length": longest,
    }
    found = reward_shaping(words, words, None, overlong_buffer=limits)
    return {"penalties": np.array(found)}


KINDS = {
    f.__name__: f for f in (grpo, ppo, value, gae, in_groups, preference, logit, overlong)
}  # fmt: skip

if __name__ == "__main__":
    files = sys.argv[1:]
    for arrays_file, out_file in zip(files[::2], files[1::2], strict=True):
        arrays = dict(np.load(arrays_file))
        out = {"version": np.array(version("google-tunix"))}
        for name, (kind, settings) in json.loads(str(arrays.pop("cases"))).items():
            for key, found in KINDS[kind](arrays, **settings).items():
                out[f"{name}/{key}"] = np.asarray(found)
        np.savez(out_file, **out)
