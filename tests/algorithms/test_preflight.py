"""What the algorithm names is tried before the run: whatever is registered passes as it is, a
user's own functions where they are right."""

import inspect
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_async.algorithms.advantages import AdvantageFacts, advantage
from jaxrl_async.algorithms.corrections import correction
from jaxrl_async.algorithms.losses import ppo_clip, token_loss
from jaxrl_async.algorithms.objective import make_recipe
from jaxrl_async.algorithms.preflight import check_algorithm, tiny_inputs, try_advantage
from jaxrl_async.algorithms.shaping import shaping
from jaxrl_async.config import schema
from jaxrl_async.config.load import load
from jaxrl_async.config.schema import AlgorithmSection
from jaxrl_async.errors import ConfigError

CONFIGS = Path(__file__).parents[2] / "configs"
ARGUMENTS = {"max_tokens": 8, "cache_tokens": 2, "low": 0, "high": 1, "keep": 2}
LOSSES = """
import jax, jax.numpy as jnp
from jaxrl_async.algorithms.losses import log_ratio, TokenLoss

def clipped(x, *, bound: float = 0.2):
    r = jnp.exp(log_ratio(x))
    held = jnp.clip(r, 1 - bound, 1 + bound) * x.advantages
    return TokenLoss(-jnp.minimum(r * x.advantages, held), held < r * x.advantages)

def bare(x):
    return -jnp.exp(log_ratio(x)) * x.advantages

def averaged(x): return bare(x).mean()
def whole(x): return x.versions
def constant(x): return x.advantages
def broken(x): return bare(x) / (x.advantages - x.advantages)
def numpys(x):
    import numpy
    return numpy.asarray(x.policy_logprobs)
number = 3

from jaxrl_async.algorithms.registry import declare

@declare(needs=("rank",))
def needy(x): return bare(x)

@declare(needs=())
def frugal(x): return jnp.where(x.covariance_rank > 0.1, bare(x), 0.0)
"""


@pytest.fixture
def own(tmp_path):
    file = tmp_path / "my_losses.py"
    file.write_text(LOSSES)
    return lambda name: f"{file}:{name}"


def recipe(choice):
    return make_recipe(schema.AlgorithmSection(loss=choice))


def test_a_users_loss_gives_what_the_same_formula_gives_here(own):
    x = tiny_inputs(schema.AlgorithmSection())
    for bound in (0.2, 0.5):
        mine = recipe({own("clipped"): {"bound": bound}}).loss(x)
        builtin = ppo_clip(x, clip_low=bound, clip_high=bound)
        np.testing.assert_allclose(mine.loss, builtin.loss, rtol=1e-6)
        np.testing.assert_array_equal(mine.clipped, builtin.clipped)


def test_a_bare_array_is_enough_and_what_lies_outside_the_mask_is_thrown_away(own):
    x = tiny_inputs(schema.AlgorithmSection())
    poisoned = x._replace(advantages=jnp.where(x.mask, x.advantages, jnp.nan))
    found = recipe(own("bare")).loss(poisoned)
    assert np.isfinite(found.loss).all() and not found.clipped.any()
    assert not np.asarray(found.loss)[~np.asarray(x.mask)].any()


@pytest.mark.full
@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("averaged", r"one float per token.*not float32\[\]"),
        ("whole", r"one float per token.*int32\[2, 6\]"),
        ("constant", "no gradient"),
        ("broken", "not finite"),
        ("numpys", "fails on a batch.*use jax.numpy"),
        ("number", "has no function number"),
        ("missing", "has no function missing"),
        ("frugal", r"x\.covariance_rank exists only for a loss that declares it"),
        (
            "needy",
            r"declares needs=\('rank',\), which must be .*covariance_rank, proximal_logprobs",
        ),
    ],
)
def test_a_wrong_one_is_refused_with_the_reason(own, name, why):
    with pytest.raises(ConfigError, match=why):
        check_algorithm(AlgorithmSection(loss=own(name)), None)


def test_an_unknown_argument_or_file_is_refused(own):
    with pytest.raises(ConfigError, match="no argument 'bond'; did you mean 'bound'"):
        recipe({own("clipped"): {"bond": 1.0}})
    with pytest.raises(ConfigError, match=r"there is no file nowhere\.py"):
        recipe("nowhere.py:loss")


def test_a_users_advantage_is_tried_too(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text(
        "from jaxrl_async.algorithms.advantages import StepAdvantages, gae, group_mean\n"
        "from jaxrl_async.algorithms.registry import declare\n"
        "def right(data): return group_mean(data)\n"
        "@declare(level='token', needs=('values',))\n"
        "def critical(data): return gae(data) if data.values else None\n"
        "@declare(needs=('values',))\n"
        "def blind(data): return group_mean(data)\n"
        "@declare(level='tokn')\n"
        "def misspelt(data): return group_mean(data)\n"
        "def short(data): return StepAdvantages(advantages=group_mean(data).advantages[:1])\n"
        "def number(data): return 1.0\n"
    )
    for name in ("right", "critical"):
        try_advantage(f"{file}:{name}", group_size=8)
    assert advantage.facts(f"{file}:right") == AdvantageFacts(level=None)
    assert advantage.facts(f"{file}:critical") == AdvantageFacts(level="token", needs=("values",))
    assert advantage.facts(f"{file}:blind").level is None, "what is not declared is assumed"
    for name, why in (
        ("short", "one number per token"),
        ("number", "StepAdvantages, not float"),
        ("blind", "must return the critic's targets"),
        ("misspelt", "declares level='tokn', which must be one of token, sequence or null"),
    ):
        with pytest.raises(ConfigError, match=why):
            try_advantage(f"{file}:{name}", group_size=8)


# ---- whatever is registered


def with_arguments(function, name):
    """The choice of a function with something for each argument that has no default."""
    needed = [
        p.name
        for p in inspect.signature(function).parameters.values()
        if p.kind is p.KEYWORD_ONLY and p.default is p.empty
    ]
    return {name: {key: ARGUMENTS[key] for key in needed}} if needed else name


@pytest.mark.full
@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*.yaml")), ids=lambda p: p.stem)
def test_the_shipped_configurations_pass(path):
    config = load(path, ["data.jsonl.path=x"] if path.stem == "gsm8k" else [])
    check_algorithm(config.algorithm, config.teacher)


@pytest.mark.full
@pytest.mark.parametrize(
    ("field", "registry"),
    [("loss", token_loss), ("correction", correction), ("shaping", shaping)],
    ids=["loss", "correction", "shaping"],
)
def test_whatever_is_registered_passes(field, registry):
    for name in sorted(registry):
        choice = with_arguments(registry[name], name)
        algorithm = AlgorithmSection(**{field: (choice,) if field == "shaping" else choice})
        check_algorithm(algorithm, None)


def test_pass_at_k_needs_k_answers_that_a_downsample_keeps():
    """Before, k was quietly what was kept."""
    shapings = ({"downsample": {"keep": 4}},)
    with pytest.raises(ConfigError, match=r"what a downsample keeps; k is 6, group_size is 4"):
        check_algorithm(AlgorithmSection(shaping=shapings, advantage={"pass_at_k": {"k": 6}}), None)
    check_algorithm(AlgorithmSection(shaping=shapings, advantage="pass_at_k"), None)


def test_a_critic_cannot_learn_from_some_answers_alone():
    with pytest.raises(ConfigError, match=r"trained on all answers\. Set baseline=all"):
        check_algorithm(
            AlgorithmSection(advantage="gae", baseline="unmasked", shaping=("mask_truncated",)),
            None,
        )


def test_a_shaping_of_the_users_that_fails_is_refused_with_its_error(tmp_path):
    file = tmp_path / "own.py"
    file.write_text("def wild(shaped):\n    return shaped.nothing\n")
    with pytest.raises(ConfigError, match=r"algorithm\.shaping = .*wild.* AttributeError: "):
        check_algorithm(AlgorithmSection(shaping=(f"{file}:wild",)), None)
