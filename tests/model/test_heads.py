"""The scalar head: where values lie, how it starts, and its files."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from builders import tiny_params, tiny_spec
from whole_rows import row_states

from jaxrl_async.config import schema
from jaxrl_async.errors import CheckpointError
from jaxrl_async.mesh import TRAINER_RULES, make_slices, shardings
from jaxrl_async.model.decoder import TokenRows
from jaxrl_async.model.heads import (
    HEAD,
    head_table,
    last_tokens,
    load_head,
    save_head,
    sequence_scores,
    token_values,
    with_head,
)
from jaxrl_async.model.policy import Policy
from jaxrl_async.model.spec import Weight

pytestmark = pytest.mark.full

SPEC = tiny_spec(20, layers=2, tied=False)
POLICY = tiny_params(SPEC)
TOKENS = jnp.asarray(np.random.default_rng(0).integers(0, 20, (2, 9)), jnp.int32)
SEGMENTS = jnp.array([[1] * 4 + [2] * 5, [1] * 6 + [0] * 3])
POSITIONS = jnp.array([[*range(4), *range(5)], [*range(6), 0, 0, 0]])
BATCH = (TOKENS, POSITIONS, SEGMENTS)


def head_params(head):
    """A head with weights that are not at their start."""
    params = with_head(SPEC, POLICY, head, jax.random.key(1))
    return {**params, HEAD: jax.tree.map(lambda w: w + 0.3 + jnp.arange(w.size) / 50, params[HEAD])}


@pytest.mark.parametrize("head", ["value", "reward"])
def test_parameters_have_the_tables_tree_and_shapes(head):
    params, table = with_head(SPEC, POLICY, head, jax.random.key(1)), head_table(SPEC, head)
    shapes = jax.tree.map(lambda w: w.shape, table, is_leaf=lambda w: isinstance(w, Weight))
    assert jax.tree.map(jnp.shape, params) == shapes
    assert "lm_head" not in params and ("bias" in params[HEAD]) == (head == "value")


def test_a_critic_starts_at_zero_and_a_reward_model_does_not():
    value, reward = (with_head(SPEC, POLICY, h, jax.random.key(1)) for h in ("value", "reward"))
    assert not np.any(token_values(SPEC, value, TokenRows(*BATCH)))
    kernel = np.concatenate(
        [
            with_head(SPEC, POLICY, "reward", jax.random.key(i))[HEAD]["kernel"].ravel()
            for i in range(60)
        ]
    )
    assert kernel.std() == pytest.approx(33**-0.5, rel=0.1)
    assert sequence_scores(SPEC, reward, TokenRows(*BATCH)).any()


def test_a_value_is_of_the_state_before_its_token():
    params = head_params("value")
    hidden = np.asarray(row_states(SPEC, params, *BATCH))
    scores = hidden @ np.asarray(params[HEAD]["kernel"]) + np.asarray(params[HEAD]["bias"])
    got = np.asarray(token_values(SPEC, params, TokenRows(*BATCH))[0])
    for row, at in np.ndindex(SEGMENTS.shape):
        inside = POSITIONS[row, at] > 0 and SEGMENTS[row, at] > 0
        wanted = scores[row, at - 1] if inside else 0
        assert got[row, at] == pytest.approx(wanted, abs=1e-5)
    changed = TOKENS.at[0, 2].add(1)
    others = TokenRows(changed % 20, POSITIONS, SEGMENTS)
    moved = np.asarray(token_values(SPEC, params, others)[0])
    np.testing.assert_allclose(moved[0, :3], got[0, :3], atol=1e-6)  # has not seen token 2
    assert abs(moved[0, 3] - got[0, 3]) > 1e-5
    np.testing.assert_allclose(moved[0, 4:], got[0, 4:], atol=1e-6)  # another segment


def test_a_score_lies_at_each_segments_last_token_and_does_not_depend_on_packing():
    params = head_params("reward")
    got = np.asarray(sequence_scores(SPEC, params, TokenRows(*BATCH)))
    assert {tuple(x) for x in np.argwhere(got)} == {(0, 3), (0, 8), (1, 5)}
    np.testing.assert_array_equal(np.asarray(last_tokens(SEGMENTS)), got != 0)
    alone = TOKENS[:1, 4:]
    tokens = TokenRows(alone, jnp.arange(5)[None], jnp.ones_like(alone))
    score = sequence_scores(SPEC, params, tokens)
    assert score[0, -1] == pytest.approx(got[0, 8], abs=1e-5)


@pytest.mark.parametrize("head", ["value", "reward"])
def test_what_is_saved_is_loaded_on_a_mesh_too(tmp_path, head):
    params = head_params(head)
    save_head(tmp_path, SPEC, params)
    mesh = make_slices(schema.MeshSection(trainer=schema.AxesSection(fsdp=2, tensor=2))).trainer
    where = shardings(head_table(SPEC, head), mesh, TRAINER_RULES)
    spec, again = load_head(tmp_path, head, where)
    assert spec == SPEC
    jax.tree.map(np.testing.assert_array_equal, params, again)
    assert again[HEAD]["kernel"].sharding.spec == jax.sharding.PartitionSpec("fsdp")


def test_a_policys_directory_is_not_a_critics(tmp_path):
    Policy(SPEC, POLICY).save_pretrained(tmp_path)
    with pytest.raises(CheckpointError, match=r"score\.weight"):
        load_head(tmp_path, "reward")
