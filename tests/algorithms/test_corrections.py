"""Corrections against NumPy float64: values, bounds, lists in any order, what a loss asks for."""

import itertools
import math

import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_async.algorithms.corrections import (
    combined,
    correction,
    default_correction,
    level_of,
    weighs,
)
from jaxrl_async.algorithms.losses import MAX_LOG_RATIO, TokenInputs, token_loss
from jaxrl_async.algorithms.preflight import (
    check_algorithm,
    effective_weights,
    overcorrection_warning,
    overcorrects,
    with_correction,
)
from jaxrl_async.config.rules import check_rules
from jaxrl_async.config.schema import AlgorithmSection, Config
from jaxrl_async.errors import ConfigError

# --- values ---------------------------------------------------------------------------------------


def inputs(logs, segments=None, advantages=None, ages=None, mask=None) -> TokenInputs:
    """Tokens with these log w (proximal minus behavior), nats; rows of one sequence by default."""
    logs = np.asarray(logs, np.float32)
    ones = np.ones(logs.shape)
    return TokenInputs(
        policy_logprobs=jnp.asarray(logs * 0.5),
        proximal_logprobs=jnp.asarray(logs),
        behavior_logprobs=jnp.zeros(logs.shape, jnp.float32),
        advantages=jnp.asarray(-ones if advantages is None else advantages, jnp.float32),
        mask=jnp.asarray(ones if mask is None else mask, bool),
        versions=jnp.zeros(logs.shape, jnp.int32),
        entropy=jnp.zeros(logs.shape, jnp.float32),
        segment_ids=None if segments is None else jnp.asarray(segments, jnp.int32),
        ages=None if ages is None else jnp.asarray(ages, jnp.int32),
    )


@pytest.fixture
def packed() -> TokenInputs:
    rng = np.random.default_rng(0)
    shape = (3, 10)
    segments = np.array([[1] * 10, [1] * 4 + [2] * 6, [1] * 2 + [2] * 3 + [3] * 3 + [0] * 2])
    return inputs(
        rng.normal(0, np.where(segments == 3, 0.03, 0.4)) + np.take([0, 0.4, -0.4, 0], segments),
        segments,
        rng.normal(-0.7, 1, shape),
        rng.integers(-1, 9, shape),
        (rng.random(shape) < 0.8) & (segments > 0),
    )


def each_sequence(x: TokenInputs, values: np.ndarray, reduction) -> np.ndarray:
    """reduction over each sequence's trained tokens, at all its tokens."""
    found, mask = np.zeros(x.mask.shape), np.asarray(x.mask)
    for row, ids in enumerate(np.asarray(x.segment_ids)):
        for segment in set(ids.tolist()) - {0}:
            chosen = (ids == segment) & mask[row]
            found[row, ids == segment] = reduction(values[row, chosen]) if chosen.any() else 0
    return found


def log_w(x: TokenInputs, level: str) -> np.ndarray:
    logs = np.asarray(x.proximal_logprobs, np.float64)
    if level == "token":
        return logs
    return each_sequence(x, logs, np.sum if level == "sequence" else np.mean)


# Each: (x) -> (factor, log w or None where it is not about w), in float64.


def ref_truncate(cap, level="token"):
    return lambda x: (np.minimum(np.exp(log_w(x, level)), cap) / np.exp(log_w(x, level)), level)


def ref_band(low, high, level="token"):
    def reference(x):
        w = np.exp(log_w(x, level))
        return np.clip(w, low, high) / w, level

    return reference


def ref_mask(low, cap, level="token"):
    def reference(x):
        w = np.exp(log_w(x, level))
        return np.where((w >= low) & (w <= cap), 1.0, 0.0), level

    return reference


def ref_reject(low, high, level):
    def reference(x):
        kept = ref_mask(low, high, level)(x)[0]
        return each_sequence(x, kept, np.min) if level == "token" else kept, level

    return reference


def ref_opsm(delta):
    def reference(x):
        gap = each_sequence(x, -np.asarray(x.policy_logprobs, np.float64), np.mean)
        return np.where((gap > delta) & (np.asarray(x.advantages) < 0), 0.0, 1.0), None

    return reference


def ages_of(x):
    return np.maximum(np.asarray(x.ages, np.float64), 0)


REFERENCES = [
    ("none", lambda x: (np.ones(x.mask.shape), None)),
    ({"truncate": {"cap": 1.3}}, ref_truncate(1.3)),
    ({"truncate": {"cap": 1.3, "level": "sequence"}}, ref_truncate(1.3, "sequence")),
    ({"truncate": {"cap": 1.1, "level": "geometric"}}, ref_truncate(1.1, "geometric")),
    ({"mask": {"low": 0.8, "cap": 1.3}}, ref_mask(0.8, 1.3)),
    ({"mask": {"cap": 1.3, "level": "sequence"}}, ref_mask(0.0, 1.3, "sequence")),
    ({"band": {"low": 0.8, "high": 1.3}}, ref_band(0.8, 1.3)),
    ({"band": {"low": 0.8, "high": 1.3, "level": "geometric"}}, ref_band(0.8, 1.3, "geometric")),
    ({"reject": {"low": 0.6, "high": 1.7, "level": "token"}}, ref_reject(0.6, 1.7, "token")),
    ({"reject": {"low": 0.8, "high": 1.2}}, ref_reject(0.8, 1.2, "geometric")),
    ({"truncate_token": {"cap": 1.3}}, ref_truncate(1.3)),
    ({"tis": {"cap": 1.3}}, ref_truncate(1.3)),
    ({"mis": {"cap": 1.3}}, ref_mask(0.0, 1.3)),
    ({"seq_tis": {"cap": 1.3}}, ref_truncate(1.3, "sequence")),
    ({"seq_mis": {"cap": 1.3}}, ref_mask(0.0, 1.3, "sequence")),
    ({"geo_mis": {"low": 0.9, "cap": 1.1}}, ref_mask(0.9, 1.1, "geometric")),
    ({"icepop": {"low": 0.8, "cap": 1.3}}, ref_mask(0.8, 1.3)),
    ({"opsm": {"delta": 0.05}}, ref_opsm(0.05)),
    ({"age_limit": {"max_age": 3}}, lambda x: (np.where(ages_of(x) > 3, 0.0, 1.0), None)),
    ({"age_decay": {"half_life": 2.5}}, lambda x: (0.5 ** (ages_of(x) / 2.5), None)),
]


def name(choice) -> str:
    return choice if isinstance(choice, str) else next(iter(choice))


def test_every_correction_has_a_reference():
    assert {name(choice) for choice, _ in REFERENCES} == set(correction)


@pytest.mark.full
@pytest.mark.parametrize(
    ("choice", "reference"),
    REFERENCES,
    ids=[f"{i}-{name(c)}" for i, (c, _) in enumerate(REFERENCES)],
)
def test_a_correction_is_its_formula(packed, choice, reference):
    factor, level = reference(packed)
    mask = np.asarray(packed.mask)
    found = correction.resolve(choice)(packed)
    np.testing.assert_allclose(found.weights, np.where(mask, factor, 1.0), rtol=3e-6)
    np.testing.assert_array_equal(found.truncated, mask & (np.abs(factor - 1) > 1e-9))
    logs = np.zeros(mask.shape) if level is None else np.where(mask, log_w(packed, level), 0.0)
    np.testing.assert_allclose(found.log_ratio, logs, rtol=1e-5, atol=1e-6)
    assert np.asarray(found.truncated).any() or choice == "none", "the data must reach the bound"
    if name(choice) != "none":
        assert (np.asarray(found.weights)[mask] == 1).any(), "and must lie within it, too"
    assert weighs(choice) == (level is not None) and level_of(choice) == (level or "token")


LOG = {bound: float(np.float32(math.log(bound))) for bound in (0.5, 2.0)}
"""Bounds as the nearest float32, so that a token can lie exactly on one."""


@pytest.mark.full
@pytest.mark.parametrize("level", ["token", "sequence", "geometric"])
@pytest.mark.parametrize("kind", ["mask", "band", "reject"])
def test_bounds_belong_to_what_is_kept(kind, level):
    """Sequences of one token: exactly on a bound, and one step of float32 beyond it."""
    near = [np.nextafter(np.float32(LOG[0.5]), -9), LOG[0.5], LOG[2.0]]
    x = inputs([[v] for v in [*near, np.nextafter(np.float32(LOG[2.0]), 9)]])
    top = "cap" if kind == "mask" else "high"
    found = correction.resolve({kind: {"low": 0.5, top: 2.0, "level": level}})(x)
    assert np.asarray(found.truncated)[:, 0].tolist() == [True, False, False, True]


def test_a_token_on_the_cap_is_not_truncated_and_one_beyond_is():
    x = inputs([[LOG[2.0], np.nextafter(np.float32(LOG[2.0]), 9)]])
    found = correction.resolve({"truncate": {"cap": 2.0}})(x)
    assert (
        np.asarray(found.truncated).tolist() == [[False, True]] and float(found.weights[0, 0]) == 1
    )


@pytest.mark.full
def test_only_negative_advantages_beyond_delta_are_masked_by_opsm():
    """Mean log(behavior / policy) of a row: exactly delta, above, above; A < 0 but in the last."""
    gap = np.array([[0.25, 0.25], [0.25, 0.5], [0.25, 0.5]])
    x = inputs(-2 * gap, advantages=[[-1, -1], [-1, 1], [0, 0]])
    found = correction.resolve({"opsm": {"delta": 0.25}})(x)
    assert np.asarray(found.weights).tolist() == [[1, 1], [0, 1], [1, 1]]


@pytest.mark.full
def test_the_mean_that_opsm_compares_is_over_trained_tokens_alone():
    x = inputs([[-1.0, 9.0, -1.0]], mask=[[1, 0, 1]])
    assert np.asarray(correction.resolve({"opsm": {"delta": 0.4}})(x).weights).tolist() == [
        [0, 1, 0]
    ]


def test_a_token_of_the_oldest_age_allowed_is_trained_and_ages_below_0_count_as_0():
    x = inputs(np.zeros((1, 4)), ages=[[-2, 3, 4, 5]])
    limited = correction.resolve({"age_limit": {"max_age": 4}})(x).weights
    assert np.asarray(limited).tolist() == [[1, 1, 1, 0]]
    halved = correction.resolve({"age_decay": {"half_life": 2}})(x).weights
    np.testing.assert_allclose(halved, [[1, 0.5**1.5, 0.25, 0.5**2.5]], rtol=1e-6)


@pytest.mark.full
def test_a_sequences_weight_stays_finite_and_its_mean_is_not_cut():
    x = inputs([[30.0, 30.0, 30.0], [-30.0, -30.0, -30.0]])
    of = {level: correction.resolve({"truncate": {"level": level}})(x) for level in
          ("sequence", "geometric")}  # fmt: skip
    np.testing.assert_array_equal(
        np.asarray(of["sequence"].log_ratio)[:, 0], [MAX_LOG_RATIO, -MAX_LOG_RATIO]
    )
    np.testing.assert_allclose(np.asarray(of["geometric"].log_ratio)[:, 0], [30, -30], rtol=1e-6)


# --- lists ----------------------------------------------------------------------------------------

LISTED = [REFERENCES[i] for i in (1, 7, 4, 9, 14, 17, 19)]
"""Two that bound, three that reject at three levels, two filters."""


@pytest.mark.full
@pytest.mark.parametrize("size", [2, 3])
def test_the_order_of_a_list_does_not_matter(packed, size):
    """Factors multiply; the weight is that of the one that bounds, else of the one that rejects."""
    for some in itertools.combinations(LISTED, size):
        names = [name(choice) for choice, _ in some]
        bounds = [n for n in names if correction.facts(n).role == "bounds"]
        rejects = [n for n in names if correction.facts(n).role == "rejects"]
        done = [reference(packed) for _, reference in some]
        level = next(
            (v for (_, v), n in zip(done, names, strict=True) if n in (bounds or rejects)), None
        )
        refused = len(bounds) > 1 or (not bounds and len(rejects) > 1)
        for order in itertools.permutations([choice for choice, _ in some]):
            if refused:
                with pytest.raises(ConfigError, match=r"Keep one of them|Add the intended one"):
                    combined(list(order), "proximal")
                continue
            found = combined(list(order), "proximal")(packed)
            factor = np.prod([f for f, _ in done], axis=0)
            weight = factor * (np.exp(log_w(packed, level)) if level else 1.0)
            np.testing.assert_allclose(
                found.weights * jnp.exp(found.log_ratio),
                np.where(packed.mask, weight, 1.0),
                rtol=1e-5,
                err_msg=str(order),
            )  # fmt: skip


@pytest.mark.full
def test_truncated_tokens_with_rejected_sequences_weigh_as_truncated_in_either_order():
    """verl's preset: weights of tokens truncated at 2, sequences kept by their geometric mean."""
    w = [0.5, 1.0, 1.5, 3.0, 0.8, 1.2]
    x = inputs([np.log(w)])
    for choices in itertools.permutations(["tis", {"reject": {"level": "geometric"}}]):
        found = combined(list(choices), "proximal")(x)
        weight = found.weights * jnp.exp(found.log_ratio)
        np.testing.assert_allclose(weight[0], np.minimum(w, 2.0), rtol=1e-6)


def test_rejections_of_several_levels_need_no_weight_where_the_loss_has_one(packed):
    choices = ["mis", {"reject": {}}]
    kept = combined(choices, "behavior")(packed).weights
    turned = combined(choices[::-1], "behavior")(packed).weights
    np.testing.assert_array_equal(kept, turned)
    with pytest.raises(ConfigError, match=r"mis, reject use several levels \(geometric, token\)"):
        combined(choices, "proximal")


@pytest.mark.parametrize("anchor", ["behavior", "proximal"])
def test_two_bounds_are_refused_and_so_is_an_empty_list(anchor):
    with pytest.raises(ConfigError, match="tis and seq_tis each bound"):
        combined(["tis", "opsm", "seq_tis"], anchor)
    with pytest.raises(ConfigError, match="write none"):
        combined([], anchor)


def test_a_users_own_correction_gives_way_to_one_that_bounds(tmp_path, packed):
    file = tmp_path / "own.py"
    file.write_text(
        "from jaxrl_async.algorithms.corrections import mask\ndef mine(x): return mask(x)\n"
    )
    for order in itertools.permutations([f"{file}:mine", "seq_tis"]):
        found = combined(list(order), "proximal")(packed)
        np.testing.assert_array_equal(
            found.log_ratio, correction.resolve("seq_tis")(packed).log_ratio
        )


# --- what a loss asks for -------------------------------------------------------------------------

SEQUENCES = np.array(
    [[r, 1 / r, 1.0] for r in (1.0, 1.5, 2.0, 3.0, 6.0, 20.0, 50.0)]
    + [[r] * 3 for r in (0.3, 0.9, 1.0002, 1.1, 1.5, 4.0, 50.0)]
    + [[r, 1.0, 2.5] for r in (0.2, 0.75, 1.3, 10.0)]
)
"""Ratios policy / behavior of a sequence's tokens: with a product of 1, all alike, and mixed."""
BEHAVIOR = np.exp(-5.0)
"""Probability of each token under the policy that sampled it."""


def kept_to(r, low=np.inf, high=np.inf, *, a):
    """Weight r A of a clipped surrogate: 0 where A drives r beyond its bound."""
    return np.where((a > 0) & (r > high), 0.0, np.where((a < 0) & (r < low), 0.0, r))


def mean_of(r):
    return np.exp(np.log(r).mean(1, keepdims=True)) * np.ones_like(r)


def product_of(r):
    return r.prod(1, keepdims=True) * np.ones_like(r)


def sapo_weight(r, a):
    tau = 1.0 if a > 0 else 1.05
    s = 1 / (1 + np.exp(-tau * (r - 1)))
    return 4 * r * s * (1 - s)


def gmpo_weight(r, a):
    """GMPO, eq. 4: the geometric mean of ratios cut on one side; what is cut is constant."""
    bound = np.exp(0.4) if a > 0 else np.exp(-0.4)
    cut = r > bound if a > 0 else r < bound
    return np.where(cut, 0.0, mean_of(np.where(cut, bound, r)))


def dppo_weight(divergence, bound):
    """DPPO, eq. 11 and 12: 0 where A drives the ratio away from 1 beyond the trust region."""

    def weight(r, a):
        q, p = BEHAVIOR, BEHAVIOR * r
        outward = (r > 1) if a > 0 else (r < 1)
        return np.where(outward & (divergence(q, p) > bound), 0.0, r)

    return weight


def binary_tv(q, p):
    return np.abs(p - q)


def binary_kl(q, p):
    return q * np.log(q / p) + (1 - q) * np.log((1 - q) / (1 - p))


PAPERS = {
    "ppo_clip": lambda r, a: kept_to(r, 0.8, 1.2, a=a),
    "gspo": lambda r, a: kept_to(mean_of(r), 1 - 3e-4, 1 + 4e-4, a=a),
    "gspo_token": lambda r, a: kept_to(mean_of(r), 1 - 3e-4, 1 + 4e-4, a=a),
    "geo_mean": gmpo_weight,
    "dppo_tv": dppo_weight(binary_tv, 0.2),
    "dppo_kl": dppo_weight(binary_kl, 0.05),
    "ipo": lambda r, a: dppo_weight(binary_tv, 0.2)(r, a) - a * 2e-3 * np.log(r),
    "clip_cov": lambda r, a: kept_to(r, 0.8, 1.2, a=a),  # no token is selected here
    "kl_cov": lambda r, a: r,
    "reinforce": lambda r, a: r,
    "sapo": sapo_weight,
    "flash_reinforce": lambda r, a: (
        r * (binary_kl(BEHAVIOR, BEHAVIOR * r).mean(-1, keepdims=True) <= 3e-3)
    ),
    "gpg": lambda r, a: np.ones_like(r),
    "cispo": lambda r, a: np.minimum(r, 5.0),
    "aipo": lambda r, a: np.minimum(r, 4.0),
    "topr": lambda r, a: np.ones_like(r) if a > 0 else np.minimum(product_of(r), 1.0),
    "vespo": lambda r, a: (
        product_of(r) ** 2 * np.exp(3 * (1 - product_of(r)))
        if a > 0
        else product_of(r) ** 3 * np.exp(2 * (1 - product_of(r)))
    ),
}
"""-d loss / d log policy / A of a sequence's tokens, by the papers alone; losses are summed."""
OPEN = {"ppo_clip", "clip_cov", "kl_cov", "reinforce"}
"""Losses whose paper leaves a token's own ratio without bound for one sign of A. The default adds
one, which is documented: the ratio counts up to 2."""


@pytest.mark.full
@pytest.mark.parametrize("advantage", [1.0, -1.0])
@pytest.mark.parametrize("loss", sorted(token_loss))
def test_by_default_a_token_has_the_weight_of_the_paper(loss, advantage):
    bare = effective_weights(AlgorithmSection(loss=loss, correction="none"), SEQUENCES, advantage)
    paper = PAPERS[loss](SEQUENCES, advantage)
    np.testing.assert_allclose(bare, paper, rtol=1e-4, atol=1e-6)
    default = effective_weights(AlgorithmSection(loss=loss), SEQUENCES, advantage)
    bounded = np.minimum(1.0, 2.0 / SEQUENCES) if loss in OPEN else 1.0
    np.testing.assert_allclose(default, paper * bounded, rtol=1e-4, atol=1e-6)


def test_every_loss_has_a_formula_here():
    assert set(PAPERS) == set(token_loss)


@pytest.mark.full
@pytest.mark.parametrize(("loss", "counts"), [
    ("dppo_tv", [5.0, 10.0, 50.0]), ("ipo", [5.0, 10.0, 50.0]), ("dppo_kl", [5.0, 10.0, 50.0]),
])  # fmt: skip
def test_a_rare_token_within_the_trust_region_counts_with_its_whole_ratio(loss, counts):
    """A probability of exp(-5) = 0.0067 that rises 5, 10 and 50 times, and A that holds it back."""
    found = effective_weights(AlgorithmSection(loss=loss), [[r] for r in counts], -1.0)
    np.testing.assert_allclose(found[:, 0], counts, rtol=2e-3)


@pytest.mark.full
@pytest.mark.parametrize("loss", ["gspo", "gspo_token"])
@pytest.mark.parametrize("x", [1.0, 1.5, 2.0])
def test_a_loss_of_sequences_has_no_ratio_of_a_token(loss, x):
    """Log ratios +x and -x: the sequence's ratio is 1, and both tokens weigh 1 (eq. 5 to 7)."""
    found = effective_weights(AlgorithmSection(loss=loss), np.exp([[x, -x]]))
    np.testing.assert_allclose(found, [[1.0, 1.0]], rtol=1e-5)


OF_SEQUENCES = {"gspo": mean_of, "gspo_token": mean_of, "geo_mean": mean_of}
WHOLE_RATIOS = {"topr", "vespo", "flash_reinforce"}


@pytest.mark.parametrize("correction", [None, "none", "seq_tis"])
@pytest.mark.parametrize("loss", sorted(WHOLE_RATIOS))
def test_a_loss_of_whole_ratios_refuses_a_proximal_anchor_by_name(loss, correction):
    """With 1 for R against the proximal policy, a good answer weighed its ratio before, not 1."""
    algorithm = {"loss": loss, "anchor": "proximal", "correction": correction}
    with pytest.raises(ConfigError, match=rf"loss={loss} weighs.*Set algorithm\.anchor=behavior"):
        check_rules(Config(algorithm=algorithm))
    with pytest.raises(ConfigError, match=f"loss={loss} supports only"):
        default_correction(loss, "proximal")


@pytest.mark.full
@pytest.mark.parametrize("loss", sorted(set(token_loss) - WHOLE_RATIOS))
def test_against_the_proximal_policy_what_lies_before_is_truncated_at_the_losss_own_level(loss):
    """The loss's own ratio is 1 there; gpg does without any."""
    found = effective_weights(AlgorithmSection(loss=loss, anchor="proximal"), SEQUENCES)
    weight = np.minimum(OF_SEQUENCES.get(loss, lambda r: r)(SEQUENCES), 2.0)
    expected = np.ones(SEQUENCES.shape) if loss == "gpg" else weight
    np.testing.assert_allclose(found, expected, rtol=1e-4)


def test_the_losses_of_sequences_are_these():
    of = {loss for loss in token_loss if token_loss.facts(loss).ratio_of == "sequence"}
    tokens = {"flash_reinforce"}  # its ratio is a token's, its gate a sequence's
    assert of == {*OF_SEQUENCES, *WHOLE_RATIOS} - tokens


def test_a_default_correction_is_at_the_level_of_the_losss_ratio():
    for loss in token_loss:
        for anchor in ("behavior", *(["proximal"] if loss not in WHOLE_RATIOS else [])):
            choice = default_correction(loss, anchor)
            of_token = token_loss.facts(loss).ratio_of == "token"
            assert not weighs(choice) or (level_of(choice) == "token") == of_token, loss


@pytest.mark.full
def test_a_correction_that_bends_a_bounded_loss_is_logged_once_with_its_weights(caplog):
    corrected = AlgorithmSection(loss="cispo", correction="truncate_token")
    assert overcorrects(corrected)
    check_algorithm(corrected, None)
    assert len(caplog.records) == 1
    assert "weighs 1, 1.5, 2, 2, 2, 1.67, 1 instead of 1, 1.5, 2, 3, 4, 5, 5." in (caplog.text)
    assert overcorrection_warning(corrected) in caplog.text
    for fine in (
        AlgorithmSection(loss="cispo"),
        AlgorithmSection(loss="cispo", correction="none"),
        AlgorithmSection(loss="cispo", correction=["opsm", "mis"]),
        AlgorithmSection(loss="cispo", correction="tis", anchor="proximal"),
        AlgorithmSection(loss="ppo_clip", correction="tis"),
        AlgorithmSection(loss="gspo", correction={"truncate": {"level": "geometric"}}),
        AlgorithmSection(loss="dppo_tv", correction={"tis": {"cap": 20.0}}),
    ):
        assert not overcorrects(fine)


@pytest.mark.full
@pytest.mark.parametrize(
    ("loss", "warning"),
    [
        ("gspo", "weighs 1, 1, 1, 0.833, 0.75, 0.667, 0.6 instead of 1, 1, 1, 1,"),
        ("geo_mean", "a token of advantage -1 with"),
        ("dppo_tv", "weighs 1, 1.5, 2, 2, 2, 2, 2 instead of 1, 1.5, 2, 3, 4, 6, 10."),
        ("dppo_kl", "weighs 1, 1.5, 2, 2,"),
        ("ipo", "weighs 1, 1.5, 2, 2,"),
    ],
)
def test_a_correction_of_tokens_that_bends_another_ratio_gets_a_warning(loss, warning):
    corrected = AlgorithmSection(loss=loss, correction="tis")
    assert overcorrects(corrected) and warning in overcorrection_warning(corrected)


@pytest.mark.full
def test_the_recorded_configuration_names_the_correction_that_is_used():
    def used(job="rl", **algorithm):
        return with_correction(Config(run={"job": job}, algorithm=algorithm)).algorithm.correction

    assert used() == "truncate_token" and used(loss="cispo") == "none"
    assert used(loss="gspo") == "none"
    assert used(loss="gspo", anchor="proximal") == {"truncate": {"level": "geometric"}}
    assert used(loss="topr") == "none"
    assert used(loss="topr", correction=["tis", "opsm"]) == ["tis", "opsm"]
    assert used(loss="somewhere.py:mine") == "truncate_token"
    assert used(job="sft") is None
