import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_async.config import schema
from jaxrl_async.config.lora_section import LoraSection
from jaxrl_async.errors import CheckpointError, ConfigError
from jaxrl_async.model.families.family_registry import FAMILIES
from jaxrl_async.model.heads import head_table
from jaxrl_async.model.lora import adapter_table, lora_of
from jaxrl_async.model.spec import ModelSpec, Weight, weight_table
from jaxrl_async.run.checkpoint.store import Checkpoints
from jaxrl_async.trainer.optimizer import (
    SMALL_WEIGHTS,
    check_optimizer,
    decayed,
    make_optimizer,
    make_schedule,
    state_shardings,
)
from jaxrl_async.trainer.update_programs import TrainState


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


@pytest.mark.full
def test_the_optimizer_is_clipped_adamw_with_decay_on_the_chosen_weights_only():
    rng = np.random.default_rng(0)
    start = {"matrix": rng.normal(size=(3, 2)), "norm": rng.normal(size=3)}
    grads = {k: 5 * rng.normal(size=v.shape) for k, v in start.items()}
    section = schema.TrainerSection(
        weight_decay=0.1, max_grad_norm=0.7, beta1=0.8, beta2=0.9, epsilon=1e-3
    )
    weights = {
        "matrix": Weight(shape=(3, 2), axes=("embed", "mlp"), init="normal", fan_in=3),
        "norm": Weight(shape=(3,), axes=("embed",), init="ones"),
    }
    optimizer = make_optimizer(section, weights=weights)
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


# ---- Muon, and optimizers of users


def orthogonal(matrix: np.ndarray, steps: int) -> np.ndarray:
    """Jordan et al. 2024: newton_schulz5 in float64."""
    a, b, c = 3.4445, -4.7750, 2.0315
    x = matrix / np.linalg.norm(matrix)
    x = x.T if (tall := x.shape[0] > x.shape[1]) else x
    for _ in range(steps):
        gram = x @ x.T
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.T if tall else x


def muon_reference(weight, gradients, *, beta, decay, lr, rms, inputs):
    """Muon of one matrix in float64: Nesterov momentum with bias correction, as in optax."""
    momentum, start = np.zeros_like(weight), weight.shape
    for t, g in enumerate(gradients, 1):
        momentum = beta * momentum + (1 - beta) * g
        ahead = beta * momentum / (1 - beta ** (t + 1)) + (1 - beta) * g / (1 - beta**t)
        flat = orthogonal(ahead.reshape(inputs, -1), 5)
        step = rms * np.sqrt(max(flat.shape)) * flat.reshape(start)
        weight = weight - lr * (step + decay * weight)
    return weight


def after(optimizer, params, gradients, rate):
    """The weights after steps with these gradients, which are tuples by name."""
    params = {name: jnp.asarray(value, jnp.float32) for name, value in params.items()}
    state = optimizer.init(params)
    for at in range(3):
        grads = {name: jnp.asarray(g[at], jnp.float32) for name, g in gradients.items()}
        updates, state = optimizer.update(grads, state, params)
        params = {name: params[name] + rate * updates[name] for name in params}
    return params


MATRICES = {
    "up": Weight(shape=(2, 6, 4), axes=("layers", "embed", "mlp"), init="normal", fan_in=6),
    "o": Weight(
        shape=(2, 2, 3, 5), axes=("layers", "heads", "head_dim", "embed"), init="normal", fan_in=6
    ),
    "gate": Weight(
        shape=(1, 2, 3, 4), axes=("layers", "expert", "embed", "mlp"), init="normal", fan_in=3
    ),
    "lora_a": Weight(
        shape=(2, 6, 2), axes=("layers", "embed", "rank"), init="narrow", decays=True, fan_in=4
    ),
    "lora_b": Weight(
        shape=(2, 2, 3, 5), axes=("layers", "rank", "heads", "head_dim"), init="off", decays=True
    ),
}
MATRICES["o_lora_a"] = Weight(
    shape=(2, 2, 3, 2), axes=("layers", "heads", "head_dim", "rank"), init="narrow", decays=True
)
OTHERS = {
    "embed": Weight(shape=(8, 4), axes=("vocab", "embed"), init="normal", fan_in=4),
    "lm_head": Weight(shape=(4, 8), axes=("embed", "vocab"), init="normal", fan_in=4),
    "norm": Weight(shape=(2, 4), axes=("layers", "embed"), init="ones"),
    "conv": Weight(shape=(2, 3, 4), axes=("heads", "head_dim", ""), init="uniform", fan_in=4),
    "value": Weight(shape=(4,), axes=("embed",), init="zeros", decays=True, fan_in=5),
}


@pytest.mark.full
def test_muon_makes_the_momentum_of_each_hidden_matrix_orthogonal_and_leaves_the_rest_to_adamw():
    """Layers, experts, heads, and an adapter's factors, against an independent float64."""
    rng, table = np.random.default_rng(0), {**MATRICES, **OTHERS}
    start = {name: rng.normal(size=w.shape) for name, w in table.items()}
    gradients = {name: rng.normal(size=(3, *w.shape)) for name, w in table.items()}
    section = {"weight_decay": 0.1, "max_grad_norm": 1e9}
    chosen = schema.TrainerSection(optimizer={"muon": {"beta": 0.9, "rms": 0.3}}, **section)
    found = after(make_optimizer(chosen, weights=table), start, gradients, 0.05)
    for name, inputs in {
        "up": 6,
        "o": 6,
        "gate": 3,
        "lora_a": 6,
        "lora_b": 2,
        "o_lora_a": 6,
    }.items():
        of_one = table[name].stacked
        shape = (-1, *table[name].shape[of_one:])
        weights = start[name].reshape(shape)
        steps = gradients[name].reshape(3, *weights.shape)
        for i, weight in enumerate(weights):
            wanted = muon_reference(
                weight, steps[:, i], beta=0.9, decay=0.1, lr=0.05, rms=0.3, inputs=inputs
            )
            got = np.asarray(found[name]).reshape(weights.shape)[i]
            np.testing.assert_allclose(got, wanted, rtol=2e-4, atol=2e-5, err_msg=name)
    adamw = after(
        make_optimizer(schema.TrainerSection(**section), weights=table), start, gradients, 0.05
    )
    for name in OTHERS:
        np.testing.assert_array_equal(found[name], adamw[name], err_msg=name)


def test_muon_has_one_moment_for_a_hidden_matrix_sharded_as_its_weight():
    table = {**MATRICES, **OTHERS}
    optimizer = make_optimizer(schema.TrainerSection(optimizer="muon"), weights=table)
    params = {name: jax.ShapeDtypeStruct(w.shape, jnp.float32) for name, w in table.items()}
    placed = state_shardings(optimizer, params, {name: name for name in table}, "whole")
    state = jax.eval_shape(optimizer.init, params)
    assert jax.tree.structure(placed) == jax.tree.structure(state)
    counted = [where for where in jax.tree.leaves(placed) if where != "whole"]
    assert sorted(counted) == sorted([*MATRICES, *OTHERS, *OTHERS])
    for where, array in zip(jax.tree.leaves(placed), jax.tree.leaves(state), strict=True):
        if where != "whole":
            assert array.shape == table[where].shape


def test_weights_of_one_name_in_two_stacks_keep_their_own_shardings():
    weight = Weight(shape=(2, 6, 4), axes=("layers", "embed", "mlp"), init="normal", fan_in=6)
    optimizer = make_optimizer(
        schema.TrainerSection(), weights={"dense": {"up": weight}, "routed": {"up": weight}}
    )
    like = jax.ShapeDtypeStruct(weight.shape, jnp.float32)
    params = {"dense": {"up": like}, "routed": {"up": like}}
    placed = state_shardings(
        optimizer, params, {"dense": {"up": "first"}, "routed": {"up": "second"}}, "whole"
    )
    found = [where for where in jax.tree.leaves(placed) if where != "whole"]
    assert found == ["first", "second", "first", "second"]


OWN = """
import optax

def lion(x, *, b1: float = 0.9):
    return optax.lion(x.learning_rate, b1=b1, weight_decay=x.weight_decay, mask=x.decayed)

def uphill(x):
    return optax.scale_by_lion()

def broken(x):
    return optax.sgd(x.rate)

def flat(x):
    return optax.stateless(lambda updates, _: [0.0])
"""


@pytest.mark.parametrize(
    ("choice", "message"),
    [
        ("lion", None),
        ({"lion": {"b1": 0.5}}, None),
        ({"lion": {"b2": 0.5}}, r"has no argument 'b2' \(it takes: b1\)"),
        ("uphill", "its first update is not downhill .* end your chain with optax.scale"),
        ("broken", "AttributeError: 'OptimizerInputs' object has no attribute 'rate'"),
        ("flat", "must return an update in the shape of each weight"),
        ("none", r"has no function none \(it has: lion, uphill"),
    ],
)
def test_an_optimizer_of_a_user_is_tried_before_a_run(choice, message, tmp_path):
    (file := tmp_path / "own.py").write_text(OWN)
    name = choice if isinstance(choice, str) else next(iter(choice))
    own = f"{file}:{name}"
    section = schema.TrainerSection(optimizer=own if name == choice else {own: choice[name]})
    if message is None:
        check_optimizer(section)
        return
    with pytest.raises(ConfigError, match=message):
        check_optimizer(section)


def test_an_unknown_optimizer_is_named_with_the_known_ones():
    with pytest.raises(ConfigError, match=r"unknown optimizer 'muno'; did you mean 'muon'.*adamw"):
        check_optimizer(schema.TrainerSection(optimizer="muno"))
    with pytest.raises(ConfigError, match=r"beta must be float >= 0 and < 1, not 1\.0"):
        check_optimizer(schema.TrainerSection(optimizer={"muon": {"beta": 1.0}}))
    with pytest.raises(ConfigError, match="steps must be int >= 1, not 0"):
        check_optimizer(schema.TrainerSection(optimizer={"muon": {"steps": 0}}))


@pytest.mark.full
def test_a_run_that_resumes_with_another_optimizer_names_the_setting(tmp_path):
    params = {name: jnp.ones(one.shape) for name, one in SMALL_WEIGHTS.items()}

    def state(name, params=params):
        made = make_optimizer(schema.TrainerSection(optimizer=name), weights=SMALL_WEIGHTS)
        return {"train": TrainState(params, made.init(params), jnp.zeros((), jnp.int32))}

    kept = Checkpoints(tmp_path / "c", 2)
    kept.save(1, state=state("muon"), loop={})
    kept.wait()
    restored = kept.restore(None, state("muon")).state
    assert jax.tree.structure(restored) == jax.tree.structure(state("muon"))
    with pytest.raises(CheckpointError, match=r"differs: trainer\.optimizer or trainer\.rounding"):
        kept.restore(None, state("adamw"))
    wider = {**params, "norm": jnp.ones(5)}
    with pytest.raises(CheckpointError, match="does not fit") as raised:
        kept.restore(None, state("muon", wider))
    assert "trainer.optimizer" not in str(raised.value)
