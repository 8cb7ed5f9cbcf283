import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_async.config import schema
from jaxrl_async.config.lora_section import LoraSection
from jaxrl_async.model.families.family_registry import FAMILIES
from jaxrl_async.model.heads import head_table
from jaxrl_async.model.lora import adapter_table, lora_of
from jaxrl_async.model.spec import ModelSpec, Weight, weight_table
from jaxrl_async.trainer.optimizer import make_optimizer, make_schedule
from jaxrl_async.trainer.update_programs import decayed


def rates(steps: int, **settings) -> list[float]:
    schedule = make_schedule(
        schema.TrainerSection(**settings), learning_rate=2.0, total_steps=steps
    )
    return [float(schedule(jnp.int32(s))) for s in range(steps)]


def test_warm_up_rises_in_equal_parts_to_the_peak_and_wastes_no_step():
    assert rates(6, warmup_steps=4) == pytest.approx([0.5, 1.0, 1.5, 2.0, 2.0, 2.0])


def test_no_warm_up_starts_at_the_peak():
    assert rates(3) == pytest.approx([2.0, 2.0, 2.0])


def test_linear_falls_to_zero_after_the_last_step():
    assert rates(4, schedule="linear") == pytest.approx([2.0, 1.5, 1.0, 0.5])


def test_cosine_is_half_way_in_the_middle():
    values = rates(8, schedule="cosine")
    assert values[4] == pytest.approx(1.0) and values == sorted(values, reverse=True)


@pytest.mark.parametrize(
    ("schedule", "after"),
    [
        ("linear", [2.0, 1.5, 1.0, 0.5]),
        ("cosine", [2.0, 1 + np.sqrt(0.5), 1.0, 1 - np.sqrt(0.5)]),
        ("constant", [2.0, 2.0, 2.0, 2.0]),
    ],
)
def test_a_decay_takes_the_updates_behind_the_warm_up_and_no_more(schedule, after):
    """Six updates, two of them to the peak: a seventh of linear and cosine would have rate 0."""
    assert rates(6, warmup_steps=2, schedule=schedule) == pytest.approx([1.0, 2.0, *after[:4]])
    last = make_schedule(
        schema.TrainerSection(warmup_steps=2, schedule=schedule), learning_rate=2.0, total_steps=6
    )
    assert float(last(6)) == pytest.approx(2.0 if schedule == "constant" else 0.0, abs=1e-6)


def test_a_warm_up_as_long_as_the_run_stays_finite():
    assert np.isfinite(rates(4, warmup_steps=4, schedule="cosine")).all()


def adamw_reference(params, grads, steps, *, lr, b1, b2, eps, decay, max_norm):
    """NumPy float64 of Loshchilov & Hutter 2019, algorithm 2, with global-norm clipping before."""
    m = {k: np.zeros_like(v) for k, v in params.items()}
    v = {k: np.zeros_like(p) for k, p in params.items()}
    for t in range(1, steps + 1):
        norm = np.sqrt(sum((g**2).sum() for g in grads.values()))
        scale = min(1.0, max_norm / norm)
        for k in params:
            g = grads[k] * scale
            m[k] = b1 * m[k] + (1 - b1) * g
            v[k] = b2 * v[k] + (1 - b2) * g**2
            update = m[k] / (1 - b1**t) / (np.sqrt(v[k] / (1 - b2**t)) + eps)
            params[k] = params[k] - lr * (update + decay[k] * params[k])
    return params


def test_the_optimizer_is_clipped_adamw_with_decay_on_the_chosen_weights_only():
    rng = np.random.default_rng(0)
    start = {"matrix": rng.normal(size=(3, 2)), "norm": rng.normal(size=3)}
    grads = {k: 5 * rng.normal(size=v.shape) for k, v in start.items()}
    section = schema.TrainerSection(
        weight_decay=0.1, max_grad_norm=0.7, beta1=0.8, beta2=0.9, epsilon=1e-3
    )
    optimizer = make_optimizer(section, decayed={"matrix": True, "norm": False})
    params = {k: jnp.asarray(v, jnp.float32) for k, v in start.items()}
    state = optimizer.init(params)
    for _ in range(3):
        updates, state = optimizer.update(
            {k: jnp.asarray(g, jnp.float32) for k, g in grads.items()}, state, params
        )
        params = {k: params[k] + 0.05 * updates[k] for k in params}
    expected = adamw_reference(
        start,
        grads,
        3,
        lr=0.05,
        b1=0.8,
        b2=0.9,
        eps=1e-3,
        decay={"matrix": 0.1, "norm": 0.0},
        max_norm=0.7,
    )
    for k in params:
        np.testing.assert_allclose(params[k], expected[k], rtol=1e-4)


VECTORS = ("norm", "bias", "sinks", "correction", "delta_rate", "delta_shift")
"""What names of weights that are no matrices have in them."""


def spec_of(family: str) -> ModelSpec:
    section = schema.ArchitectureSection(
        family=family, layers=4, width=32, heads=2, kv_heads=1, head_dim=16, mlp=48
    )
    return ModelSpec.from_architecture(section, 64)


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_every_weight_declares_whether_it_decays_and_matrices_alone_do(family):
    """Adapters and heads, too, whatever they begin as."""
    spec = spec_of(family)
    lora = lora_of(spec, LoraSection(rank=2, targets="all-linear"))
    assert lora is not None
    for table in (
        weight_table(spec),
        adapter_table(spec, lora),
        adapter_table(spec, lora, one_input=True),
        head_table(spec, "value"),
        head_table(spec, "reward"),
    ):
        is_weight = {"is_leaf": lambda w: isinstance(w, Weight)}
        declared, _ = jax.tree_util.tree_flatten_with_path(table, **is_weight)
        assert all(w.decays is not None for _, w in declared)
        found, _ = jax.tree_util.tree_flatten_with_path(decayed(table))
        for path, value in found:
            name = jax.tree_util.keystr(path)
            assert value == (not any(part in name for part in VECTORS)), name


def test_the_value_head_and_lora_b_shrink_although_they_begin_as_zeros():
    spec = spec_of("qwen3")
    lora = lora_of(spec, LoraSection(rank=2, targets=("q_proj",)))
    assert lora is not None
    of = decayed({"head": head_table(spec, "value"), "adapter": adapter_table(spec, lora)})
    assert of["head"]["value_head"] == {"kernel": True, "bias": False}
    assert of["adapter"]["layers"] == {"q_lora_a": True, "q_lora_b": True}


def test_what_a_users_own_layer_leaves_open_decays_where_it_begins_as_random_numbers():
    def weight(init, **more):
        return Weight(shape=(4, 4), axes=("", ""), init=init, **more)

    open_ = {name: weight(name) for name in ("normal", "ones", "zeros")}
    assert decayed(open_) == {"normal": True, "ones": False, "zeros": False}
    assert decayed({"w": weight("zeros", decays=True), "v": weight("normal", decays=False)}) == {
        "w": True, "v": False,
    }  # fmt: skip
