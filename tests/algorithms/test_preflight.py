"""A user's own functions: run as given where they are right, refused at the start where not."""

import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_async.algorithms.advantages import advantage
from jaxrl_async.algorithms.losses import ppo_clip
from jaxrl_async.algorithms.objective import make_recipe
from jaxrl_async.algorithms.preflight import own_advantage, tiny_inputs
from jaxrl_async.config import schema
from jaxrl_async.errors import ConfigError

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
        ours = ppo_clip(x, clip_low=bound, clip_high=bound)
        np.testing.assert_allclose(mine.loss, ours.loss, rtol=1e-6)
        np.testing.assert_array_equal(mine.clipped, ours.clipped)


def test_a_bare_array_is_enough_and_what_lies_outside_the_mask_is_thrown_away(own):
    x = tiny_inputs(schema.AlgorithmSection())
    poisoned = x._replace(advantages=jnp.where(x.mask, x.advantages, jnp.nan))
    found = recipe(own("bare")).loss(poisoned)
    assert np.isfinite(found.loss).all() and not found.clipped.any()
    assert not np.asarray(found.loss)[~np.asarray(x.mask)].any()


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
    ],
)
def test_a_wrong_one_is_refused_with_the_reason(own, name, why):
    with pytest.raises(ConfigError, match=why):
        recipe(own(name))


def test_an_unknown_argument_or_file_is_refused(own):
    with pytest.raises(ConfigError, match="no argument 'bond'; did you mean 'bound'"):
        recipe({own("clipped"): {"bond": 1.0}})
    with pytest.raises(ConfigError, match=r"there is no file nowhere\.py"):
        recipe("nowhere.py:loss")


def test_a_users_advantage_is_tried_too(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text(
        "from jaxrl_async.algorithms.advantages import StepAdvantages, group_mean\n"
        "def right(data): return group_mean(data)\n"
        "def short(data): return StepAdvantages(advantages=group_mean(data).advantages[:1])\n"
        "def number(data): return 1.0\n"
    )
    choice = f"{file}:right"
    function = advantage.resolve(choice)
    assert own_advantage(function, choice) is function
    for name, why in (("short", "one number per token"), ("number", "StepAdvantages, not float")):
        choice = f"{file}:{name}"
        with pytest.raises(ConfigError, match=why):
            own_advantage(advantage.resolve(choice), choice)
