"""Where tokens lie: two parts of a row on each device, and nothing lost on the way."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from builders import mesh_of
from jax.sharding import PartitionSpec

from jaxrl_async.config import schema
from jaxrl_async.mesh import TRAINER_RULES, shardings
from jaxrl_async.model.attention import PART_ATTENTION, reference
from jaxrl_async.model.decoder import TokenRows, init_params, settings_on, token_states
from jaxrl_async.model.kernels import per_shard, splash
from jaxrl_async.model.layout import ONE_DEVICE, Layout
from jaxrl_async.model.spec import ModelSpec, weight_table
from jaxrl_async.testing.interpreted import interpreted_kernels


def test_each_device_has_a_part_from_the_front_and_its_mirror_from_the_back():
    layout = Layout(mesh_of(context=4))
    assert layout.order(16).reshape(4, 4).tolist() == [
        [0, 1, 14, 15], [2, 3, 12, 13], [4, 5, 10, 11], [6, 7, 8, 9]
    ]  # fmt: skip
    keys_seen = (layout.order(16) + 1).reshape(4, 4).sum(axis=1)
    assert len(set(keys_seen.tolist())) == 1, "all devices attend to as many keys"
    assert ONE_DEVICE.order(5).tolist() == [0, 1, 2, 3, 4]


@pytest.mark.full
@pytest.mark.parametrize("axes", [{}, {"context": 2}, {"context": 4, "fsdp": 2}], ids=str)
@pytest.mark.parametrize("length", [16, 20, 7])
def test_tokens_come_back_to_their_places(axes, length):
    layout = Layout(mesh_of(**axes))
    x = jnp.arange(4 * length * 3).reshape(4, length, 3)
    tokens = jax.jit(layout.flat)(x)
    own = np.asarray(x)[:, layout.order(length)]
    np.testing.assert_array_equal(jax.jit(lambda t: layout.unfold(t, 4))(tokens), own)
    np.testing.assert_array_equal(jax.jit(layout.fold)(own), tokens)
    np.testing.assert_array_equal(jax.jit(lambda t: layout.rows(t, 4))(tokens), x)


def test_a_length_that_cannot_be_shared_stays_whole():
    layout = Layout(mesh_of(context=4))
    assert [layout.ways(n) for n in (8, 16, 12, 7)] == [4, 4, 1, 1]


def test_a_gathered_weight_is_whole_and_its_gradient_is_shared():
    mesh = mesh_of(fsdp=4, tensor=2)
    layout, seen = Layout(mesh), {}

    def total(w: jax.Array, x: jax.Array) -> jax.Array:
        whole = layout.gathered(w, ("embed", "mlp"))
        jax.debug.inspect_array_sharding(whole, callback=lambda s: seen.setdefault("whole", s))
        return jnp.sum(jnp.sin(x @ whole))

    spec = jax.sharding.NamedSharding(mesh, PartitionSpec("fsdp", "tensor"))
    rows = jax.sharding.NamedSharding(mesh, PartitionSpec("fsdp", None))
    w, x = jnp.arange(16.0 * 8).reshape(16, 8) / 99, jnp.ones((8, 16))
    grad = jax.jit(jax.grad(total))(jax.device_put(w, spec), jax.device_put(x, rows))
    assert seen["whole"].shard_shape((16, 8)) == (16, 4)
    assert grad.sharding.shard_shape((16, 8)) == (4, 4)
    np.testing.assert_allclose(grad, jax.grad(lambda w: jnp.sum(jnp.sin(x @ w)))(w), rtol=1e-6)


@pytest.mark.full
@pytest.mark.parametrize("axes", [{"fsdp": 4}, {"fsdp": 2, "tensor": 2}, {"fsdp": 2, "context": 2}])
def test_layers_gather_weights_and_no_hidden_states(axes):
    """In the compiled gradient: whole matrices, keys and values over context; never tokens x width,
    but for the one exchange of embeddings."""
    mesh, rows, length = mesh_of(**axes), 8, 128
    shape = {"layers": 2, "width": 40, "heads": 8, "kv_heads": 4, "head_dim": 8, "mlp": 144}
    spec = ModelSpec.from_architecture(schema.ArchitectureSection(**shape), 56)
    settings = settings_on(mesh, spec, dtype=jnp.float32, attention="auto")
    params = jax.device_put(
        init_params(spec, jax.random.key(0)), shardings(weight_table(spec), mesh, TRAINER_RULES)
    )
    ids = jnp.ones((rows, length), jnp.int32)

    def total(params: dict) -> jax.Array:
        return jnp.sum(token_states(spec, params, TokenRows(ids, ids, ids), settings).hidden ** 2)

    text = jax.jit(jax.grad(total)).lower(params).compile().as_text()
    tokens = rows * length // mesh.size * mesh.shape["tensor"]
    gathers = [
        line.split(" all-gather(")[0] for line in text.splitlines() if " all-gather(" in line
    ]
    assert len(gathers) > 10, "weights are gathered"
    wide = {f"[{n},{w}]" for n in (tokens * 2, tokens * 4, rows * length) for w in (40, 64, 144)}
    assert not [g for g in gathers if any(shape in g for shape in wide)]


@pytest.mark.full
@pytest.mark.parametrize("name", ["reference", "splash"])
def test_attention_over_context_equals_whole_rows(name):
    """The output and the gradients, of 2 query heads a kv head and odd segments."""
    mesh, (B, T, H, N, K) = mesh_of(context=2, tensor=2), (2, 260, 4, 2, 16)
    layout = Layout(mesh)
    keys = jax.random.split(jax.random.key(0), 4)
    q, k, v, pull = (
        jax.random.normal(key, (B, T, n, K)) for key, n in zip(keys, (H, N, N, H), strict=True)
    )
    segments = jnp.tile(jnp.repeat(jnp.array([1, 2, 3, 0]), jnp.array([100, 31, 120, 9])), (B, 1))
    pull = pull * (segments > 0)[..., None, None]
    whole = {"reference": reference, "splash": splash}[name]
    shared = per_shard(whole, mesh, PART_ATTENTION[name])

    def own(x: jax.Array) -> jax.Array:
        return layout.unfold(layout.flat(x), B)

    def over_context(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        return layout.rows(layout.fold(shared(own(q), own(k), own(v), own(segments))), B)

    def both(function: object) -> object:
        def total(*x: jax.Array) -> tuple[jax.Array, jax.Array]:
            out = function(*x) * (segments > 0)[..., None, None]
            return jnp.sum(out * pull), out

        return jax.jit(jax.grad(total, (0, 1, 2), has_aux=True))(q, k, v)

    with interpreted_kernels():
        found = both(over_context)
    wanted = both(lambda *x: reference(*x, segments))
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(a, b, atol=2e-5)
