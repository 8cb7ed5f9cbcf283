"""Losses and advantages against TRL's own code, on the same arrays."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from agree import (
    GROUP,
    LENGTH,
    PAIRS,
    SEEDS,
    SEQUENCES,
    VOCAB,
    agree,
    arrays,
    ask,
    log_softmax,
    our_advantages,
    per_sequence,
    policy_function,
    policy_loss,
    value_and_gradient,
    without_tokens,
)

from jaxrl_async.algorithms.losses import TokenInputs, cross_entropy
from jaxrl_async.algorithms.preference_losses import (
    PairInputs,
    bradley_terry,
    kl_baseline,
    orpo,
    preference_loss,
    simpo,
    summed_pairs,
)
from jaxrl_async.config.peers.counterpart import converted
from jaxrl_async.config.peers.trl_fields import TRL
from jaxrl_async.model.divergence import Kind
from jaxrl_async.trainer.distill import (
    distill_logits,
    distill_token,
    distill_top,
    teacher_advantages,
)

pytestmark = pytest.mark.full

WIDE = 1e6  # a cap that nothing reaches
POLICY = {
    # name: (TRL's settings, ours)
    "ppo_clip, sequence_mean": (
        {"loss_type": "grpo", "epsilon_high": 0.28},
        {"loss": {"ppo_clip": {"clip_high": 0.28}}, "aggregate": "sequence_mean"},
    ),
    "ppo_clip, token_mean": (
        {"loss_type": "dapo", "epsilon": 0.1, "epsilon_high": 0.28},
        {"loss": {"ppo_clip": {"clip_low": 0.1, "clip_high": 0.28}}},
    ),
    "ppo_clip, token_mean of one micro-batch": (
        {"loss_type": "bnpo", "epsilon": 0.15},
        {"loss": {"ppo_clip": {"clip_low": 0.15, "clip_high": 0.15}}},
    ),
    "ppo_clip, constant": (
        {"loss_type": "dr_grpo"},
        {"loss": "ppo_clip", "aggregate": {"constant": {"divisor": LENGTH}}},
    ),
    "ppo_clip with dual_clip": (
        {"loss_type": "dapo", "delta": 1.3},
        {"loss": {"ppo_clip": {"dual_clip": 1.3}}},
    ),
    "gspo": (
        {"loss_type": "grpo", "importance_sampling_level": "sequence", "epsilon": 0.05},
        {"loss": {"gspo": {"clip_low": 0.05, "clip_high": 0.05}}, "aggregate": "sequence_mean"},
    ),
    "gspo, sequence_sum": (
        {"loss_type": "luspo", "importance_sampling_level": "sequence", "epsilon": 0.05},
        {"loss": {"gspo": {"clip_low": 0.05, "clip_high": 0.05}}, "aggregate": "sequence_sum"},
    ),
    "cispo": (
        {"loss_type": "cispo", "epsilon_high": 1.2},  # TRL's bound is on r, ours on r - 1
        {"loss": {"cispo": {"clip_high": 0.2}}},
    ),
    "sapo": ({"loss_type": "sapo"}, {"loss": "sapo", "aggregate": "sequence_mean"}),
    "vespo": ({"loss_type": "vespo"}, {"loss": "vespo"}),
    "geo_mean": (
        {"trainer": "gmpo", "epsilon": 0.2, "epsilon_high": 0.3},
        {
            "loss": {"geo_mean": {"clip_low": 0.2, "clip_high": 0.3}},
            "aggregate": "sequence_mean",
        },
    ),
    "kl k3": (
        {"loss_type": "dapo", "beta": 0.7, "use_bias_correction_kl": False},
        {"kl": "k3", "kl_coefficient": 0.7},
    ),
    "kl unbiased": (
        {"loss_type": "dapo", "beta": 0.7, "use_bias_correction_kl": True},
        {"kl": "unbiased", "kl_coefficient": 0.7},
    ),
    "opsm": (
        {"loss_type": "grpo", "off_policy_mask_threshold": 0.05},
        {"correction": {"opsm": {"delta": 0.05}}, "aggregate": "sequence_mean"},
    ),
    "entropy bonus": ({"loss_type": "dapo", "entropy_coef": 0.3}, {"entropy_coefficient": 0.3}),
}
CORRECTED = {
    # TRL's mode and bounds, with the weights at the start of the step between sampler and learner
    "truncate token": ("token_truncate", 1.2, None, {"truncate": {"cap": 1.2}}),
    "truncate sequence": (
        "sequence_truncate",
        1.5,
        None,
        {"truncate": {"cap": 1.5, "level": "sequence"}},
    ),
    "band token": ("token_truncate", 1.2, 0.8, {"band": {"low": 0.8, "high": 1.2}}),
    "band sequence": (
        "sequence_truncate",
        1.5,
        0.7,
        {"band": {"low": 0.7, "high": 1.5, "level": "sequence"}},
    ),
    "mask token": ("token_mask", 1.2, None, {"mask": {"cap": 1.2}}),
    "icepop": ("token_mask", 1.2, 0.8, {"icepop": {"low": 0.8, "cap": 1.2}}),
    "mask sequence": (
        "sequence_mask",
        1.5,
        0.5,
        {"mask": {"low": 0.5, "cap": 1.5, "level": "sequence"}},
    ),
}
ADVANTAGES = {
    "group_mean": {"scale_rewards": "none"},
    "group_normalized": {"scale_rewards": "group"},
    "gdpo": {"multi_objective_aggregation": "normalize_then_sum", "rewards": "large_rewards"},
    "rloo": {"trainer": "rloo", "beta": 0.0},
}
DPO = {
    "dpo": {"loss_type": "sigmoid", "beta": 0.3},
    "ipo_average": {"loss_type": "ipo", "beta": 0.4},
}
KTO = {"beta": 0.3, "desirable_weight": 1.3, "undesirable_weight": 0.8}
JSD: dict[str, tuple[float, Kind]] = {
    "forward": (0.0, "forward"),
    "reverse": (1.0, "reverse"),
    "js": (0.3, "js"),
}


def vllm(mode: str, cap: float, low: float | None) -> dict:
    """TRL's settings of the correction between its sampler and its learner."""
    return {
        "loss_type": "dapo",
        "use_vllm": True,
        "vllm_importance_sampling_mode": mode,
        "vllm_importance_sampling_clip_max": cap,
        "vllm_importance_sampling_clip_min": low,
    }


CASES = {
    **{name: ("policy", theirs) for name, (theirs, _) in POLICY.items()},
    **{name: ("policy", vllm(*bounds)) for name, (*bounds, _) in CORRECTED.items()},
    **{f"advantage {name}": ("policy", theirs) for name, theirs in ADVANTAGES.items()},
    "on-policy": ("policy", {"trainer": "rloo", "proximal": "policy"}),
    "an empty sequence": ("policy", {"loss_type": "grpo", "without": 2}),
    "micro-batch 0": ("policy", {"loss_type": "bnpo", "half": 0}),
    "micro-batch 1": ("policy", {"loss_type": "bnpo", "half": 1}),
    "vespo, sampler's": ("policy", {**vllm("token_truncate", WIDE, None), "loss_type": "vespo"}),
    "opsm, sampler's": (
        "policy",
        {**vllm("token_mask", WIDE, None), "off_policy_mask_threshold": 0.05},
    ),
    "all at once": (
        "policy",
        {
            **vllm("sequence_truncate", 1.5, None),
            "importance_sampling_level": "sequence",
            "epsilon": 0.05,
            "beta": 0.4,
            "use_bias_correction_kl": False,
            "entropy_coef": 0.1,
        },
    ),
    "asynchronous": ("asynchronous", {"epsilon_low": 0.1, "epsilon_high": 0.28}),
    **{name: ("dpo", theirs) for name, theirs in DPO.items()},
    "cross_entropy": ("dpo", {"loss_type": "sft"}),
    "kto": ("kto", KTO),
    "simpo": ("reference_free", {"name": "simpo", "beta": 2.0, "gamma": 0.7}),
    "orpo": ("reference_free", {"name": "orpo", "beta": 0.2}),
    "reward": ("reward", {"margin": False}),
    "reward with margin": ("reward", {"margin": True}),
    **{
        f"{kind} {name}": (kind, {"beta": beta, "temperature": 0.7})
        for kind in ("jsd", "chunked_jsd")
        for name, (beta, _) in JSD.items()
    },
    "top forward": ("top", {"beta": 0, "k": 4}),
    "top reverse": ("top", {"beta": 1, "k": 4}),
    "token": ("token", {}),
    "sampled": ("sampled", {}),
}


@pytest.fixture(scope="module")
def answers(tmp_path_factory):
    """TRL's results, from one process."""
    return ask("trl", CASES, tmp_path_factory.mktemp("trl"))


@pytest.fixture(params=SEEDS)
def both(request, answers):
    """The arrays of a seed, and TRL's results on them."""
    return arrays(request.param), answers[request.param]


def test_every_setting_makes_a_difference(both):
    """Nothing below can agree because a setting does nothing on these arrays."""
    _, trl = both
    gradients = np.array([trl[name]["gradient"].ravel() for name in (*POLICY, *CORRECTED)])
    apart = np.abs(gradients[:, None] - gradients[None]).max(-1) / np.abs(gradients).max()
    assert apart[~np.eye(len(apart), dtype=bool)].min() > 1e-3


@pytest.mark.parametrize("name", POLICY)
def test_policy_losses(both, name):
    a, trl = both
    agree(name, "GRPOTrainer", policy_loss(a, **POLICY[name][1]), trl[name])


@pytest.mark.parametrize("name", CORRECTED)
def test_corrections_between_sampler_and_learner(both, name):
    a, trl = both
    correction = CORRECTED[name][-1]
    ours = policy_loss(a, behavior="behavior", anchor="proximal", correction=correction)
    agree(f"correction: {name}", "GRPOTrainer", ours, trl[name])


CONVERTED = ("loss", "aggregate", "kl", "kl_coefficient", "correction", "anchor")
"""Settings of a converted configuration that decide a policy loss."""


def converted_algorithm(given):
    """The settings of the algorithm that jaxrl-async convert makes of TRL's."""
    found = converted(TRL, {**given, "max_completion_length": LENGTH})
    assert set(found.unconverted) <= {"max_steps"}, found.unconverted  # epochs of unknown records
    settings = {k.removeprefix("algorithm."): v for k, v in found.settings.items()}
    return {
        name: settings[name] for name in (*CONVERTED, "entropy_coefficient") if name in settings
    }


@pytest.mark.parametrize(
    "name", [n for n, (theirs, _) in POLICY.items() if "trainer" not in theirs]
)
def test_converted_settings_make_the_same_first_update(both, name):
    a, trl = both
    theirs, ours = POLICY[name]
    own = converted_algorithm(theirs)
    if "correction" in own and "correction" in ours:  # ours adds the default for a sampler's age
        assert own["correction"] == ["truncate_token", ours["correction"]]
        own["correction"] = ours["correction"]
    agree(f"converted: {name}", "GRPOTrainer", policy_loss(a, **own), trl[name])


@pytest.mark.parametrize("name", CORRECTED)
def test_converted_corrections_make_the_same_first_update(both, name):
    a, trl = both
    mode, cap, low, _ = CORRECTED[name]
    own = converted_algorithm(vllm(mode, cap, low))
    assert own["anchor"] == "proximal"
    ours = policy_loss(a, behavior="behavior", **own)
    agree(f"converted correction: {name}", "GRPOTrainer", ours, trl[name])


@pytest.mark.parametrize("name", ["group_mean", "group_normalized"])
def test_converted_advantages_are_trls(both, name):
    """Up to the standard deviation of a sample and of a population."""
    a, trl = both
    choice = converted(TRL, ADVANTAGES[name]).settings["algorithm.advantage"]
    found = per_sequence(our_advantages(a, choice, rewards=a["rewards"].sum(1)).advantages)
    factor = np.sqrt((GROUP - 1) / GROUP) if name == "group_normalized" else 1.0
    theirs = trl[f"advantage {name}"]["advantages"]
    assert np.allclose(factor * found, theirs, rtol=1e-4, atol=1e-6)


def test_loss_correction_kl_and_entropy_together(both):
    a, trl = both
    ours = policy_loss(
        a,
        behavior="behavior",
        anchor="proximal",
        loss={"gspo": {"clip_low": 0.05, "clip_high": 0.05}},
        correction=[{"truncate": {"cap": 1.5, "level": "sequence"}}],
        kl="k3",
        kl_coefficient=0.4,
        entropy_coefficient=0.1,
    )
    agree("gspo, correction, kl and entropy", "GRPOTrainer", ours, trl["all at once"])


def test_the_asynchronous_trainers_loss(both):
    a, trl = both
    loss = {"ppo_clip": {"clip_low": 0.1, "clip_high": 0.28}}
    ours = policy_loss(a, behavior="behavior", loss=loss)
    agree("ppo_clip, token_mean", "AsyncGRPOTrainer", ours, trl["asynchronous"])


def test_vespo_takes_the_whole_ratio_from_the_sampler_on(both):
    a, trl = both
    ours = policy_loss(a, behavior="behavior", loss="vespo")
    agree("vespo", "GRPOTrainer", ours, trl["vespo, sampler's"])


def test_opsm_measures_from_the_sampler_on(both):
    a, trl = both
    corrections = [{"opsm": {"delta": 0.05}}, {"truncate": {"cap": WIDE}}]
    ours = policy_loss(a, behavior="behavior", anchor="proximal", correction=corrections)
    agree("opsm", "GRPOTrainer", ours, trl["opsm, sampler's"])


def test_losses_without_a_ratio_on_policy(both):
    """TRL's RLOO clips the whole sequence's ratio, 1 on-policy: its gradient is REINFORCE's there.

    The loss itself differs: one is -r A, the other -A log policy.
    """
    a, trl = both
    a["proximal"] = a["policy"]
    gradient = policy_loss(a, loss="reinforce", aggregate="sequence_sum")["gradient"]
    agree("reinforce, sequence_sum", "RLOOTrainer", {"gradient": gradient}, trl["on-policy"])


@pytest.mark.parametrize("name", ["group_mean", "rloo"])
def test_advantages_without_a_standard_deviation(both, name):
    a, trl = both
    theirs = trl[f"advantage {name}"]
    found = our_advantages(a, name, rewards=a["rewards"].sum(1)).advantages
    advantages(name, per_sequence(found), theirs)


def test_group_normalized_up_to_the_standard_deviation(both):
    """TRL divides by (G - 1) in the variance (DeepSeekMath does not say; ours, like NumPy: by G),
    and adds 1e-4: with that epsilon scaled the factor is exact."""
    a, trl = both
    theirs = trl["advantage group_normalized"]
    factor = np.sqrt((GROUP - 1) / GROUP)
    choice = {"group_normalized": {"epsilon": float(1e-4 * factor)}}
    found = per_sequence(our_advantages(a, choice, rewards=a["rewards"].sum(1)).advantages)
    advantages("group_normalized", factor * found, theirs)


def test_gdpo_up_to_the_standard_deviations(both):
    """The same in groups, and over the batch: there the factor of each group has gone."""
    a, trl = both
    theirs = trl["advantage gdpo"]
    in_groups, in_batch = np.sqrt((GROUP - 1) / GROUP), np.sqrt((SEQUENCES - 1) / SEQUENCES)
    choice = {"gdpo": {"epsilon": float(1e-4 * in_batch / in_groups)}}
    rewards = a["large_rewards"]  # so large that the first epsilon does not count
    found = our_advantages(a, choice, rewards=rewards.sum(1), named=rewards).advantages
    advantages("gdpo", in_batch * per_sequence(found), theirs)


def advantages(name, ours, theirs):
    """`agree` for what has no gradient."""
    agree(f"advantage: {name}", "TRL", {"loss": ours}, {**theirs, "loss": theirs["advantages"]})


# ---- preferences


def pairs(a, at):
    """PairInputs of log-probs [2 pairs, length], the chosen first."""
    mask = a["pair_mask"][:, 1:]
    chosen, rejected = jnp.split(jnp.sum(at * mask, 1), 2)
    reference = np.split((a["pair_reference"] * mask).sum(1), 2)
    return PairInputs(
        chosen_logprobs=chosen,
        rejected_logprobs=rejected,
        chosen_lengths=mask.sum(1)[:PAIRS],
        rejected_lengths=mask.sum(1)[PAIRS:],
        reference_chosen=reference[0],
        reference_rejected=reference[1],
    )


@pytest.mark.parametrize("name", DPO)
def test_preference_losses_with_a_reference(both, name):
    a, trl = both
    settings = {k: v for k, v in DPO[name].items() if k != "loss_type"}
    ours = value_and_gradient(
        lambda at: preference_loss[name](pairs(a, at), **settings).loss.mean(), a["pair_policy"]
    )
    agree(name, "DPOTrainer", ours, trl[name])


def test_kto_of_answers_without_partners(both):
    a, trl = both
    good, mask = a["good"], a["pair_mask"][:, 1:]
    reference, zeros = (a["pair_reference"] * mask).sum(1), np.zeros(2 * PAIRS, np.float32)
    strangers = np.sum(a["stranger_policy"] - a["stranger_reference"])

    def loss(at):
        logprobs = jnp.sum(at * mask, 1)
        x = PairInputs(
            chosen_logprobs=jnp.where(good, logprobs, 0.0),
            rejected_logprobs=jnp.where(good, 0.0, logprobs),
            chosen_lengths=np.where(good, mask.sum(1), 0),
            rejected_lengths=np.where(good, 0, mask.sum(1)),
            reference_chosen=np.where(good, reference, zeros),
            reference_rejected=np.where(good, zeros, reference),
            baseline=kl_baseline(jnp.asarray(strangers), 2 * PAIRS),
        )
        weight = jnp.float32(2 / (2 * PAIRS))
        found = preference_loss["kto"](x, **KTO)
        return summed_pairs(found, x.chosen_lengths, x.rejected_lengths, weight)[0]

    assert strangers > 0  # a baseline that counts
    assert 0 < good.sum() < 2 * PAIRS
    agree("kto", "KTOTrainer", value_and_gradient(loss, a["pair_policy"]), trl["kto"])


@pytest.mark.parametrize("name", ["simpo", "orpo"])
def test_preference_losses_without_a_reference(both, name):
    """By mean log-probs. TRL's likelihood beside orpo's odds ratio is one of prompt and answer; the
    paper's (eq. 6) and ours of the answer: it is taken out here."""
    a, trl = both
    ones = np.ones(PAIRS, np.float32)

    def loss(means):
        x = PairInputs(*jnp.split(means, 2), ones, ones)
        if name == "simpo":
            return simpo(x, beta=2.0, gamma=0.7).loss.mean()
        return (orpo(x, beta=0.2).loss + x.chosen_logprobs).mean()

    ours = value_and_gradient(loss, a["means"])
    peer = {"simpo": "CPOTrainer", "orpo": "ORPOTrainer"}[name]
    agree(name, peer, ours, trl[name])


def test_likelihood_of_the_chosen_answers(both):
    a, trl = both
    mask = a["pair_mask"][:PAIRS, 1:]

    def loss(at):
        x = policy_inputs(at[:PAIRS], mask)
        return cross_entropy(x).loss.sum() / mask.sum()

    ours = value_and_gradient(loss, a["pair_policy"])
    agree("cross_entropy, token_mean", "DPOTrainer", ours, trl["cross_entropy"])


def policy_inputs(logprobs, mask):
    """TokenInputs with nothing but the policy's log-probs."""
    zeros = jnp.zeros(mask.shape, jnp.float32)
    versions = jnp.zeros(mask.shape, jnp.int32)
    return TokenInputs(logprobs, zeros, zeros, jnp.asarray(mask), versions, zeros)


@pytest.mark.parametrize("name", ["reward", "reward with margin"])
def test_bradley_terry(both, name):
    a, trl = both
    margin = a["margin"] if name == "reward with margin" else None
    ours = value_and_gradient(
        lambda at: bradley_terry(*jnp.split(at, 2), margin).loss.mean(), a["pair_rewards"]
    )
    agree("bradley_terry", "RewardTrainer", ours, trl[name])


# ---- distillation


@pytest.mark.parametrize("peer", ["jsd", "chunked_jsd"])
@pytest.mark.parametrize("name", JSD)
def test_divergences_of_logits(both, peer, name):
    a, trl = both
    beta, kind = JSD[name]

    def loss(logits):
        teacher = jnp.asarray(a["teacher_logits"]) / 0.7
        found = distill_logits(logits / 0.7, teacher, kind=kind, beta=beta)
        return masked_mean(a, found)

    trainer = {"jsd": "GKDTrainer", "chunked_jsd": "DistillationTrainer"}[peer]
    ours = value_and_gradient(loss, a["logits"])
    agree(f"distill_logits {name}", trainer, ours, trl[f"{peer} {name}"])


@pytest.mark.parametrize("kind", ["forward", "reverse"])
def test_divergences_of_the_likeliest_tokens(both, kind):
    """The k likeliest are the teacher's for forward, the student's for reverse."""
    a, trl = both
    of = a["teacher_logits"] if kind == "forward" else a["logits"]
    ids = np.argsort(-of, axis=-1)[..., :4]
    known = np.take_along_axis(log_softmax(a["teacher_logits"]), ids, -1)

    def loss(logits):
        tokens = (logits.reshape(-1, VOCAB), ids.reshape(-1, 4), known.reshape(-1, 4))
        return masked_mean(a, distill_top(*tokens, kind=kind))

    ours = value_and_gradient(loss, a["logits"])
    agree(f"distill_top {kind}", "IWOPDTrainer", ours, trl[f"top {kind}"])


def test_divergence_of_the_drawn_token(both):
    a, trl = both

    def loss(logits):
        known = (a["tokens"].reshape(-1), a["teacher"].reshape(-1))
        return masked_mean(a, distill_token(logits.reshape(-1, VOCAB), *known, kind="reverse"))

    agree(
        "distill_token reverse", "IWOPDTrainer", value_and_gradient(loss, a["logits"]), trl["token"]
    )


def test_on_policy_distillation_is_a_policy_gradient(both):
    a, trl = both
    gap = np.asarray(teacher_advantages(a["behavior"], a["teacher"], a["mask"]))
    loss = policy_function({**a, "advantages": gap}, "behavior", {"loss": "gpg"})

    def of_logits(logits):
        logprobs = jax.nn.log_softmax(logits)
        return loss(jnp.take_along_axis(logprobs, a["tokens"][..., None], -1)[..., 0])

    ours = value_and_gradient(of_logits, a["logits"])
    agree("teacher_advantages, gpg", "IWOPDTrainer", ours, trl["sampled"])


def masked_mean(a, values):
    """Over the trained tokens."""
    return jnp.sum(jnp.where(a["mask"].reshape(-1), values.reshape(-1), 0.0)) / a["mask"].sum()


# ---- where definitions differ on purpose


def test_a_sequence_with_nothing_to_learn_counts_in_trl_and_not_here(both):
    """TRL divides by all sequences of the batch, we by those that have a token to learn."""
    a, trl = both
    a = without_tokens(a, 2)
    ours = policy_loss(a, aggregate="sequence_mean")
    factor = SEQUENCES / (SEQUENCES - 1)
    agree("an empty sequence", "GRPOTrainer", ours, trl["an empty sequence"], factor=factor)


def test_micro_batches_of_trl_weigh_by_their_own_tokens_and_ours_by_the_steps(both):
    """TRL's bnpo: mean over micro-batches of their token means. Ours: the step's token mean, of
    which a micro-batch's share is its own tokens / all tokens."""
    a, trl = both
    half, tokens = SEQUENCES // 2, a["mask"].sum()
    ours = policy_loss(a)
    for part, rows in enumerate((slice(None, half), slice(half, None))):
        factor = 2 * a["mask"][rows].sum() / tokens
        theirs = trl[f"micro-batch {part}"]
        gradient = {"gradient": ours["gradient"][rows]}
        agree("a micro-batch of two", "GRPOTrainer", gradient, theirs, factor=factor)
