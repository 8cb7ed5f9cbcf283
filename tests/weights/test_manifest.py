"""The manifest: what differs is named, before anything moves."""

import jax.numpy as jnp
import pytest

from jaxrl_async.errors import WeightsError
from jaxrl_async.weights.manifest import Manifest, compare, manifest_of

PARAMS = {"embed": jnp.zeros((3, 2)), "layers": {"k": jnp.ones(4, jnp.bfloat16), "q": jnp.ones(5)}}


def test_entries_are_paths_shapes_and_dtypes_in_tree_order():
    assert manifest_of(PARAMS).entries == (
        ("embed", (3, 2), "float32"),
        ("layers/k", (4,), "bfloat16"),
        ("layers/q", (5,), "float32"),
    )


def test_bytes_are_those_of_one_copy_scalars_too():
    assert manifest_of(PARAMS | {"scale": jnp.float32(1)}).num_bytes == 24 + 8 + 20 + 4


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ({"embed": jnp.zeros((2, 3))}, r"'embed': published float32\[2, 3\].*float32\[3, 2\]"),
        ({"embed": jnp.zeros((3, 2), jnp.bfloat16)}, r"bfloat16\[3, 2\]"),
        ({"head": jnp.zeros(1)}, r"'head': .* expects nothing"),
        ({"layers": {"k": PARAMS["layers"]["k"]}}, r"'layers/q': published nothing"),
    ],
    ids=["shape", "dtype", "too many", "too few"],
)
def test_the_first_array_that_differs_is_named(change, error):
    with pytest.raises(WeightsError, match=error):
        compare(manifest_of(PARAMS | change), manifest_of(PARAMS))


def test_the_same_arrays_in_another_order_are_another_layout():
    ours = manifest_of(PARAMS)
    turned = Manifest(entries=ours.entries[::-1])
    assert turned.layout_hash != ours.layout_hash
    assert manifest_of(dict(PARAMS)).layout_hash == ours.layout_hash
    with pytest.raises(WeightsError, match="another order"):
        compare(turned, ours)
