import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_async.config import schema
from jaxrl_async.trainer.optimizer import make_optimizer, make_schedule


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
