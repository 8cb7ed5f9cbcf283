"""Loss components against NumPy float64: values, gradients, weights, coefficients, refusals."""

from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from token_inputs import token_inputs

from jaxrl_async.algorithms.aggregate import aggregate
from jaxrl_async.algorithms.loss_components import (
    component,
    component_terms,
    component_weights,
    components_of,
    need_entropy,
)
from jaxrl_async.algorithms.losses import TokenInputs
from jaxrl_async.algorithms.objective import (
    coefficients_of,
    make_recipe,
    pass_columns,
    policy_loss,
    summarize,
)
from jaxrl_async.algorithms.preflight import check_algorithm
from jaxrl_async.config.load import load
from jaxrl_async.config.schema import AlgorithmSection
from jaxrl_async.errors import ConfigError
from jaxrl_async.metrics.metric import metric_of
from jaxrl_async.trainer.pack import pack_pairs

SHAPE = (4, 9)


@pytest.fixture
def x() -> TokenInputs:
    rng = np.random.default_rng(0)
    return token_inputs(rng, SHAPE)._replace(
        entropy=jnp.asarray(rng.exponential(1.0, SHAPE), jnp.float32),
        rewards=jnp.asarray(np.repeat(rng.integers(0, 2, (4, 1)), 9, axis=1), jnp.float32),
    )


def doubles(x: TokenInputs) -> TokenInputs:
    return jax.tree.map(
        lambda a: np.asarray(a, np.float64) if a.dtype == jnp.float32 else np.asarray(a), x
    )


def kl_of(estimator: str):
    def reference(n, policy, entropy):
        d = policy - n.reference_logprobs
        if estimator == "k2":
            return d**2 / 2
        k3 = np.exp(-d) - 1 + d
        return k3 if estimator == "k3" else np.exp(policy - n.behavior_logprobs) * k3

    return reference


REFERENCES = [
    ("nll", {}, lambda n, policy, entropy: -policy),
    ("entropy", {}, lambda n, policy, entropy: -entropy),
    ("entropy", {"below": 0.8}, lambda n, policy, entropy: -entropy * (n.entropy < 0.8)),
    *(("kl", {"estimator": name}, kl_of(name)) for name in ("k2", "k3", "unbiased")),
    ("squared_log_ratio", {}, lambda n, p, entropy: (p - n.behavior_logprobs) ** 2 / 2),
]


def test_every_component_has_a_reference():
    assert {name for name, _, _ in REFERENCES} == set(component)


@pytest.mark.full
@pytest.mark.parametrize(
    ("name", "settings", "reference"), REFERENCES, ids=[f"{n}-{s}" for n, s, _ in REFERENCES]
)
def test_a_term_and_its_gradient_are_the_formulas(x, name, settings, reference):
    n, rng = doubles(x), np.random.default_rng(1)
    weights = rng.random((*SHAPE, 1)) * n.mask[..., None]
    sections = {"one": {"loss": {name: settings}, "coefficient": 0.3}}
    parts = components_of(AlgorithmSection(losses=sections).components)

    def loss(policy, entropy):
        moved = x._replace(policy_logprobs=policy, entropy=entropy)
        return component_terms(parts, moved, jnp.asarray(weights, jnp.float32), (0.3,)).loss

    def wanted(policy, entropy):
        values = reference(n, policy, entropy)
        return 0.3 * np.where(n.mask, weights[..., 0] * values, 0).sum()

    found, slopes = jax.value_and_grad(loss, argnums=(0, 1))(x.policy_logprobs, x.entropy)
    assert float(found) == pytest.approx(wanted(n.policy_logprobs, n.entropy), rel=1e-5)
    given = [n.policy_logprobs, n.entropy]
    for which, slope in enumerate(slopes):
        numeric = np.zeros(SHAPE)
        for index in np.ndindex(*SHAPE):
            ends = []
            for step in (1e-6, -1e-6):
                moved = [a.copy() for a in given]
                moved[which][index] += step
                ends.append(wanted(*moved))
            numeric[index] = (ends[0] - ends[1]) / 2e-6
        np.testing.assert_allclose(slope, numeric, rtol=1e-4, atol=1e-6)


@pytest.mark.full
def test_what_a_component_does_not_cover_may_be_anything(x):
    covered = np.asarray(x.mask)
    spoilt = jax.tree.map(
        lambda a: jnp.where(x.mask, a, jnp.nan) if a.dtype == jnp.float32 else a, x
    )
    weights = jnp.asarray(np.where(covered, 0.5, 0.0)[..., None], jnp.float32)
    for name in component:
        parts = components_of(AlgorithmSection(losses={"one": {"loss": name}}).components)

        def loss(policy, of, parts=parts):
            moved = of._replace(policy_logprobs=policy)
            return component_terms(parts, moved, weights, (1.0,)).loss

        clean = jax.value_and_grad(loss)(x.policy_logprobs, x)
        dirty = jax.value_and_grad(loss)(spoilt.policy_logprobs, spoilt)
        np.testing.assert_array_equal(clean[0], dirty[0])
        np.testing.assert_array_equal(clean[1], dirty[1], err_msg=name)
        assert not np.asarray(clean[1])[~covered].any()


@pytest.mark.full
@pytest.mark.parametrize(
    ("old", "component"),
    [
        (
            {"kl_coefficient": 0.5, "kl": "k2"},
            {"loss": {"kl": {"estimator": "k2"}}, "coefficient": 0.5},
        ),
        ({"entropy_coefficient": 0.25}, {"loss": "entropy", "coefficient": 0.25}),
        (
            {"entropy_coefficient": 0.25, "entropy_clip": 0.8},
            {"loss": {"entropy": {"below": 0.8}}, "coefficient": 0.25},
        ),
    ],
)  # fmt: skip
def test_a_setting_with_a_fixed_name_is_the_same_as_its_component(x, old, component):
    """The same loss, and the same gradient."""
    weights = jnp.where(x.mask, 1 / x.mask.sum(), 0.0)

    def loss(policy, entropy, **settings):
        moved = x._replace(policy_logprobs=policy, entropy=entropy)
        of = weights[..., None] if "losses" in settings else None
        return policy_loss(
            make_recipe(AlgorithmSection(**settings)),
            moved,
            weights,
            jnp.int32(1),
            component_weights=of,
        )[0]

    at = (x.policy_logprobs, x.entropy)
    both = [
        jax.value_and_grad(lambda p, e, s=settings: loss(p, e, **s), argnums=(0, 1))(*at)
        for settings in (old, {"losses": {"same": component}}, {})
    ]
    np.testing.assert_allclose(both[0][0], both[1][0], rtol=1e-6)
    assert float(both[0][0]) != pytest.approx(float(both[2][0]), rel=1e-3)
    for one, other in zip(both[0][1], both[1][1], strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-7)


@pytest.mark.full
def test_terms_and_metrics_are_reported_and_add_up_over_micro_batches(x, tmp_path):
    (file := tmp_path / "own.py").write_text(
        "def own(x):\n    return -x.policy_logprobs, {'low': x.policy_logprobs < -1.0}\n"
    )
    losses = {
        "near": {"loss": "squared_log_ratio", "coefficient": 0.5},
        "own": {"loss": f"{file}:own", "coefficient": -0.25},
    }
    recipe, n = make_recipe(AlgorithmSection(losses=losses)), doubles(x)
    weights = jnp.where(x.mask, 1 / x.mask.sum(), 0.0)
    right = n.mask & (n.rewards > 0.5)
    of = np.stack([n.mask / n.mask.sum(), right / right.sum()], axis=-1).astype(np.float32)

    def totals(rows):
        part = jax.tree.map(lambda a: a[rows], x)
        return policy_loss(
            recipe, part, weights[rows], jnp.int32(1), component_weights=jnp.asarray(of[rows])
        )[1]

    whole = summarize([totals(slice(0, 4))])
    d = (n.policy_logprobs - n.behavior_logprobs)[n.mask]
    wanted = {
        "loss/near": (d**2 / 2).mean(),
        "loss/own": -n.policy_logprobs[right].mean(),
        "loss_tokens/near": n.mask.sum(),
        "loss_tokens/own": right.sum(),
        "loss/own/low": (n.policy_logprobs[right] < -1).mean(),
    }
    for key, value in wanted.items():
        assert whole[key] == pytest.approx(value, rel=1e-5), key
        assert metric_of(key)
    terms = 0.5 * wanted["loss/near"] - 0.25 * wanted["loss/own"]
    assert whole["train/loss"] == pytest.approx(whole["train/policy_loss"] + terms, rel=1e-5)
    parts = summarize([totals(slice(0, 1)), totals(slice(1, 4))])
    for key in (*wanted, "train/loss"):
        assert parts[key] == pytest.approx(whole[key], rel=1e-5), key


# ---- weights


@pytest.mark.parametrize("name", ["token_mean", "sequence_mean"])
def test_a_component_weighs_its_tokens_as_the_aggregate_does(name):
    """Four sequences: two of rewards 1 and 0, and two demonstrations."""
    answer = np.array([False, True, True, True])
    batch = pack_pairs([(np.arange(4, dtype=np.int32), answer)] * 3, 4)
    batch = replace(
        batch, supervised=np.array([[False] * 4, [False] * 4, [False, False, True, True]])
    )
    batch = replace(
        batch, mask=np.array([[False, True, True, True], [False, True, False, False], [False] * 4])
    )
    rewards = np.array([[1.0] * 4, [0.5] * 4, [0.0] * 4], np.float32)
    sections = AlgorithmSection(
        losses={
            "all": {"loss": "nll"},
            "right": {"loss": "nll", "tokens": "right"},
            "low": {"loss": "nll", "tokens": "right", "right_reward": 0.4},
            "taught": {"loss": "nll", "tokens": "demonstrations"},
        }
    ).components
    found = component_weights(components_of(sections), batch, rewards, aggregate[name])
    assert found.shape == (3, 4, 4) and found.dtype == np.float32
    means = {
        "token_mean": ([1 / 4] * 3, [1 / 4]), "sequence_mean": ([1 / 6] * 3, [1 / 2])
    }[name]  # fmt: skip
    both = [[0, *means[0]], [0, *means[1], 0, 0], [0] * 4]
    np.testing.assert_allclose(found[..., 0], both, rtol=1e-6)
    np.testing.assert_allclose(found[..., 1], [[0, 1 / 3, 1 / 3, 1 / 3], [0] * 4, [0] * 4])
    np.testing.assert_allclose(found[..., 2], both, rtol=1e-6)
    np.testing.assert_allclose(found[..., 3], [[0] * 4, [0] * 4, [0, 0, 0.5, 0.5]])


@pytest.mark.parametrize("name", ["token_mean", "sequence_mean"])
def test_a_component_of_some_tasks_is_averaged_over_their_tokens_alone(name):
    answer = np.array([False, True, True, True])
    batch = pack_pairs([(np.arange(4, dtype=np.int32), answer)] * 3, 4)
    mask = np.array([[False, True, True, True], [False, True, False, False], [False, True] * 2])
    ids = np.repeat(np.array([[2], [0], [1]], np.int32), 4, axis=1)
    batch = replace(batch, mask=mask, task_ids=ids)
    rewards = np.array([[1.0] * 4, [1.0] * 4, [0.0] * 4], np.float32)
    sections = AlgorithmSection(
        losses={
            "two": {"loss": "nll", "tasks": ("c", "a")},
            "right": {"loss": "nll", "tasks": ("b", "c"), "tokens": "right"},
            "all": {"loss": "nll"},
        }
    ).components
    parts = components_of(sections, ("a", "b", "c"))
    found = component_weights(parts, batch, rewards, aggregate[name])
    of_two = {"token_mean": (1 / 4, 1 / 4), "sequence_mean": (1 / 6, 1 / 2)}[name]
    two = np.where(mask, np.array([[of_two[0]], [of_two[1]], [0.0]]), 0.0)
    np.testing.assert_allclose(found[..., 0], two, rtol=1e-6)
    np.testing.assert_allclose(found[..., 1], np.where(mask, [[1 / 3], [0.0], [0.0]], 0.0))
    assert (found[..., 2] > 0).sum() == mask.sum()
    inputs = token_inputs(np.random.default_rng(0), mask.shape)
    terms = component_terms(parts, inputs, jnp.asarray(found), (1.0, 1.0, 1.0))
    assert [int(terms.sums[f"loss_tokens/{n}"]) for n in sections] == [4, 3, 6]


def test_where_no_answer_is_right_a_component_of_right_ones_is_nothing(x):
    answer = np.array([False, True, True, True])
    batch = pack_pairs([(np.arange(4, dtype=np.int32), answer)], 4)
    batch = replace(batch, mask=batch.supervised)
    section = AlgorithmSection(losses={"r": {"loss": "nll", "tokens": "right"}})
    zeros = np.zeros(batch.mask.shape, np.float32)
    parts = components_of(section.components)
    found = component_weights(parts, batch, zeros, aggregate["token_mean"])
    assert not found.any()


# ---- coefficients and what the run needs


def test_a_coefficient_goes_linearly_to_its_end_and_stays_there():
    section = AlgorithmSection(
        losses={
            "ramp": {"loss": "nll", "coefficient": 0.5, "coefficient_end": -0.5, "ramp_steps": 4},
            "still": {"loss": "nll", "coefficient": 0.1},
        }
    )
    ramp = [coefficients_of(section, step).losses[0] for step in (0, 1, 2, 4, 9)]
    assert ramp == [0.5, 0.25, 0.0, -0.5, -0.5]
    assert {coefficients_of(section, step).losses[1] for step in (0, 9)} == {0.1}


def test_components_ask_for_what_they_need():
    plain = AlgorithmSection(losses={"a": {"loss": "nll"}})
    assert not plain.refers and not plain.mixes and not need_entropy(plain.components)
    assert not make_recipe(plain).sees_entropy
    assert AlgorithmSection(losses={"a": {"loss": "kl"}}).refers
    assert AlgorithmSection(losses={"a": {"loss": "nll", "tokens": "demonstrations"}}).mixes
    bonus = make_recipe(AlgorithmSection(losses={"a": {"loss": "entropy"}}))
    assert bonus.sees_entropy and not bonus.has_entropy
    assert "rewards" in pass_columns(plain, refers=False, offloads=False)
    assert "rewards" not in pass_columns(AlgorithmSection(), refers=False, offloads=False)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (["algorithm.losses={a: {loss: nll, coefficient: 0}}"], "losses.a.coefficient=0 leaves"),
        (
            ["algorithm.losses={a: {loss: nll, ramp_steps: 5}}"],
            r"losses.a.ramp_steps \(5\) has no effect without .*\.coefficient_end",
        ),
        (
            ["algorithm.losses={a: {loss: nll, right_reward: 1}}"],
            r"losses.a.right_reward \(1.0\) has no effect without .*\.tokens=right",
        ),
        (
            ["algorithm.losses={a: {loss: nll, tokens: demonstrations, tasks: [b]}}"],
            "losses.a.tasks is about answers",
        ),
        (["algorithm.losses={a: {loss: nll, tasks: []}}"], "losses.a.tasks"),
        (["algorithm.losses={a: {loss: nll, tasks: [b]}}"], "the run has one task, without a name"),
        (
            ["algorithm.losses={a: {loss: kl, tokens: demonstrations}}"],
            "log-probs of demonstrations are not computed",
        ),
        (
            [
                "algorithm.losses={a: {loss: kl}}",
                "algorithm.kl_coefficient=0.1",
                "algorithm.kl=full",
            ],
            "algorithm.losses has a component kl",
        ),
        (
            ["algorithm.losses={a: {loss: nll}}", "pairs={loss: dpo}"],
            "algorithm.losses .* has no effect without pairs=null",
        ),
        (
            [
                "algorithm.losses={a: {loss: nll, tokens: demonstrations}}",
                "sampler.temperature=0.5",
            ],
            "algorithm.losses trains at sampler.temperature",
        ),
        (["algorithm.losses={a b: {loss: nll}}"], "a b"),
        (["algorithm.losses={a: {coefficient: 1}}"], "loss"),
        (["algorithm.losses.a.coeficient=1"], "did you mean algorithm.losses.a.coefficient"),
    ],
)
def test_settings_without_an_effect_are_refused(settings, message):
    with pytest.raises(ConfigError, match=message):
        load({}, settings)


def test_an_override_changes_one_component():
    config = load(
        {"algorithm": {"losses": {"a": {"loss": "nll"}}}}, ["algorithm.losses.a.coefficient=0.5"]
    )
    assert config.algorithm.components["a"].coefficient == 0.5


# ---- a user's own


OWN = """
import jax, jax.numpy as jnp

def good(x, *, scale: float = 1.0):
    return -scale * x.policy_logprobs * x.rewards, {"p": jnp.exp(x.policy_logprobs)}

def bonus(x): return -x.entropy
def averaged(x): return x.policy_logprobs.mean()
def constant(x): return x.advantages
def broken(x): return x.policy_logprobs / (x.advantages - x.advantages)
def named(x): return x.policy_logprobs, {"a b": x.policy_logprobs}
def scalar(x): return x.policy_logprobs, {"a": x.policy_logprobs.mean()}
def raising(x): return x.nothing
"""


@pytest.fixture
def own(tmp_path: Path) -> Path:
    (file := tmp_path / "own.py").write_text(OWN)
    return file


@pytest.mark.full
@pytest.mark.parametrize("choice", ["good", "bonus"])
def test_a_component_of_ones_own_that_is_right_passes(own, choice):
    section = AlgorithmSection(losses={"mine": {"loss": f"{own}:{choice}"}})
    check_algorithm(section, None)
    assert make_recipe(section).sees_entropy  # assumed, unless it declares what it needs


@pytest.mark.full
@pytest.mark.parametrize(
    ("choice", "message"),
    [
        ("averaged", "must return one float per token"),
        ("constant", "has no gradient with respect to"),
        ("broken", "is not finite"),
        ("named", "returns the metric 'a b'"),
        ("scalar", "must return one number per token for the metric 'a'"),
        ("raising", "fails on a batch of"),
        ("missing", "has no function missing"),
    ],
)
def test_a_component_of_ones_own_that_is_wrong_is_refused(own, choice, message):
    section = AlgorithmSection(losses={"mine": {"loss": f"{own}:{choice}"}})
    with pytest.raises(ConfigError, match=message):
        check_algorithm(section, None)


def test_an_unknown_component_is_refused_with_the_nearest_name():
    with pytest.raises(ConfigError, match="unknown loss component 'entropi'; did you mean"):
        make_recipe(AlgorithmSection(losses={"a": {"loss": "entropi"}}))
