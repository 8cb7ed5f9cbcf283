"""The update on a tiny decoder: what may change its numbers, and what must not."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_async.config import schema
from jaxrl_async.config.lora_section import LoraSection
from jaxrl_async.errors import ConfigError
from jaxrl_async.mesh import make_slices
from jaxrl_async.metrics.metric import metric_of
from jaxrl_async.model.decoder import hidden_states, init_params, output_head
from jaxrl_async.model.lora import lora_of
from jaxrl_async.model.spec import ModelSpec, Weight, weight_table
from jaxrl_async.trainer.flops import num_matmul_params, train_flops
from jaxrl_async.trainer.learning_settings import LearningSettings, rows_per_micro_batch
from jaxrl_async.trainer.logprob_pass import ProbePass
from jaxrl_async.trainer.objectives.policy_objective import (
    PolicyData,
    PolicyObjective,
    policy_update,
)
from jaxrl_async.trainer.pack import TrainSequence, pack, pack_pairs
from jaxrl_async.trainer.update import Update
from jaxrl_async.trainer.update_programs import Frozen, TrainState

pytestmark = pytest.mark.full

VOCAB, ROW = 24, 16
ARCHITECTURE = schema.ArchitectureSection(
    layers=2, width=32, heads=4, kv_heads=2, head_dim=8, mlp=48
)
SPEC = ModelSpec.from_architecture(ARCHITECTURE, VOCAB)
LINEAR = {"epsilon": 1.0, "max_grad_norm": 1e9, "beta1": 0.0, "beta2": 0.0}
"""AdamW whose step is nearly proportional to the gradient, so that gradients can be compared."""


def mesh_of(**axes: int) -> jax.sharding.Mesh:
    return make_slices(
        schema.MeshSection(trainer=schema.AxesSection(**axes)), jax.devices()
    ).trainer


Step = Update[PolicyObjective]
_STEPS: dict[str, Step] = {}


def step_of(
    *,
    axes: dict | None = None,
    algorithm: dict | None = None,
    trainer: dict | None = None,
    temperature: float = 1.0,
    **kw,
) -> Step:
    """A step of these settings; the same one each time, so that it compiles once."""
    key = repr((axes, algorithm, trainer, temperature, sorted(kw.items(), key=str)))
    if key not in _STEPS:
        settings = LearningSettings(
            mesh=mesh_of(**(axes or {})),
            trainer=schema.TrainerSection(
                **{"micro_batch_tokens": 4 * ROW, "logprob_chunk": 32, **(trainer or {})}
            ),
            row_length=ROW,
            **kw,
        )
        section = schema.AlgorithmSection(**{"learning_rate": 1e-2, **(algorithm or {})})
        _STEPS[key] = policy_update(
            SPEC, settings, section, total_steps=10, temperature=temperature
        )
    return _STEPS[key]


@pytest.fixture(scope="module")
def params() -> Any:
    return init_params(SPEC, jax.random.key(0), jnp.float32)


def sequences(num: int = 14, seed: int = 0, version: int = 3) -> list[TrainSequence]:
    """Two-turn sequences of several lengths, sampled at two versions."""
    rng = np.random.default_rng(seed)
    made = []
    for index in range(num):
        length = int(rng.integers(6, ROW + 1))
        mask = np.ones(length, bool)
        mask[:2] = mask[4] = False
        made.append(
            TrainSequence(
                token_ids=rng.integers(0, VOCAB, length).astype(np.int32),
                mask=mask,
                behavior_logprobs=-3 - rng.random(length).astype(np.float32) / 5,
                versions=np.full(length, version - index % 2, np.int32),
                advantages=np.full(length, rng.normal(), np.float32),
            )
        )
    return made


BATCH = pack(sequences(), ROW)
DATA = PolicyData(BATCH, version=3)


def copied(tree: Any) -> Any:
    return jax.tree.map(np.array, tree)


def assert_close(a: Any, b: Any, tolerance: float) -> None:
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        np.testing.assert_allclose(np.asarray(x), np.asarray(y), atol=tolerance, rtol=tolerance)


def test_an_update_moves_the_weights_and_reports_finite_numbers(params):
    step = step_of()
    state, stats = step.update(step.init(params), DATA)
    assert int(state.step) == 1 and stats["train/skipped"] == 0
    assert stats["train/tokens"] == BATCH.num_tokens
    assert all(isinstance(v, float) and np.isfinite(v) for v in stats.values()), stats
    assert all(metric_of(key) for key in stats)
    assert any(
        (np.asarray(a) != b).any()
        for a, b in zip(jax.tree.leaves(state.params), jax.tree.leaves(copied(params)), strict=True)
    )


def test_an_option_that_the_compiler_does_not_know_is_refused(params):
    step = step_of(trainer={"compiler_options": {"xla_no_such_option": "1"}})
    with pytest.raises(ConfigError, match=r"trainer\.compiler_options: .*xla_no_such_option"):
        step.update(step.init(params), PolicyData(pack(sequences(), ROW)))


@pytest.mark.parametrize(("aggregate", "rows"), [("token_mean", 1), ("sequence_mean", 3)])
def test_micro_batches_add_up_to_one_big_batch(params, aggregate, rows):
    results = []
    for tokens in (rows * ROW, 64 * ROW):
        step = step_of(
            algorithm={"aggregate": aggregate, "entropy_coefficient": 0.01},
            trainer={"micro_batch_tokens": tokens, **LINEAR},
        )
        state, stats = step.update(step.init(params), DATA)
        results.append((copied(state.params), stats))
    (split, split_stats), (whole, whole_stats) = results
    assert_close(split, whole, 1e-6)
    for key in (
        "train/loss",
        "policy/entropy",
        "policy/ratio_max",
        "train/grad_norm",
        "policy/clip_share",
    ):
        assert split_stats[key] == pytest.approx(whole_stats[key], abs=1e-6, rel=1e-6), key


def test_packing_does_not_change_the_update(params):
    loose = pack(sequences()[::-1], ROW)
    step = step_of(trainer=LINEAR)
    first, _ = step.update(step.init(params), PolicyData(BATCH))
    second, _ = step.update(step.init(params), PolicyData(loose))
    assert_close(first.params, second.params, 1e-6)


@pytest.mark.exhaustive
@pytest.mark.parametrize("axes", [{"fsdp": 2, "tensor": 2}, {"data": 2, "fsdp": 2}])
def test_a_sharded_step_equals_one_device(params, axes):
    """Three steps: the losses within 1e-5, and the weights too.

    The steps are proportional to the gradient: AdamW's first ones divide each gradient by itself,
    which makes whole steps of the rounding of those that are nearly 0.
    """
    keys = ("train/loss", "train/grad_norm", "policy/kl_reference", "policy/entropy")
    losses, ends = [], []
    for shape in ({}, axes):
        step = step_of(
            axes=shape, trainer={"micro_batch_tokens": ROW, "weight_decay": 0.1, **LINEAR}
        )
        state, of_mesh = step.init(params), []
        for _ in range(3):
            state, stats = step.update(state, PolicyData(BATCH), Frozen(params_on(step, params)))
            of_mesh.append([stats[key] for key in keys])
        losses.append(of_mesh)
        ends.append(copied(state.params))
    np.testing.assert_allclose(losses[1], losses[0], rtol=1e-5, atol=1e-5)
    assert_close(ends[1], ends[0], 1e-5)


@pytest.mark.exhaustive
def test_a_sharded_adamw_gives_the_same_losses(params):
    losses = []
    for shape in ({}, {"fsdp": 2, "tensor": 2}):
        step = step_of(axes=shape, algorithm={"learning_rate": 1e-3})
        state, of_mesh = step.init(params), []
        for _ in range(3):
            state, stats = step.update(state, PolicyData(BATCH))
            of_mesh.append(stats["train/loss"])
        losses.append(of_mesh)
    np.testing.assert_allclose(losses[1], losses[0], rtol=1e-5, atol=1e-5)


def params_on(step: Step, params: Any) -> Any:
    return jax.device_put(params, step.programs.state_shardings.params)


def test_moments_are_sharded_like_their_weights(params):
    step = step_of(axes={"fsdp": 2, "tensor": 2})
    state = step.init(params)
    wanted = {(p.shape, str(p.sharding.spec)) for p in jax.tree.leaves(state.params)}
    moments = [m for m in jax.tree.leaves(state.opt_state) if m.ndim]
    assert {(m.shape, str(m.sharding.spec)) for m in moments} == wanted
    assert any("fsdp" in spec for _, spec in wanted) and any("tensor" in spec for _, spec in wanted)
    moved, _ = step.update(state, PolicyData(BATCH))
    assert [m.sharding for m in jax.tree.leaves(moved)] == list(
        jax.tree.leaves(step.programs.state_shardings)
    )


def test_the_old_state_is_donated_and_the_callers_weights_are_not(params):
    step = step_of()
    mine = params_on(step, params)
    state = step.init(mine)
    moved, _ = step.update(state, PolicyData(BATCH))
    assert all(p.is_deleted() for p in jax.tree.leaves(state.params))
    assert not any(p.is_deleted() for p in jax.tree.leaves((mine, moved)))


def test_a_step_that_is_not_finite_changes_nothing_and_the_next_one_works(params):
    broken = sequences()
    broken[5].advantages[3] = np.nan
    step = step_of()
    state, _ = step.update(step.init(params), PolicyData(BATCH))
    before = copied(state)
    state, stats = step.update(state, PolicyData(pack(broken, ROW)))
    assert stats["train/skipped"] == 1
    for a, b in zip(jax.tree.leaves(before), jax.tree.leaves(copied(state)), strict=True):
        np.testing.assert_array_equal(a, b)
    state, stats = step.update(state, PolicyData(BATCH))
    assert stats["train/skipped"] == 0 and int(state.step) == 2


def test_not_a_number_outside_the_mask_changes_nothing(params):
    clean, dirty = sequences(), sequences()
    for s in dirty:
        s.advantages[~s.mask] = s.behavior_logprobs[~s.mask] = np.nan
    step = step_of()
    first, _ = step.update(step.init(params), PolicyData(pack(clean, ROW)))
    second, stats = step.update(step.init(params), PolicyData(pack(dirty, ROW)))
    assert stats["train/skipped"] == 0
    assert_close(first.params, second.params, 0)


def test_an_update_is_the_same_bit_for_bit_when_repeated(params):
    ends = []
    for _ in range(2):
        _STEPS.clear()  # compiled anew, too
        step = step_of()
        state, _ = step.update(step.init(params), PolicyData(BATCH))
        ends.append(copied(state))
    assert_close(ends[0], ends[1], 0)


def test_learning_rate_zero_moves_nothing(params):
    step = step_of(algorithm={"learning_rate": 0.0}, trainer={"weight_decay": 0.5})
    state, stats = step.update(step.init(params), PolicyData(BATCH))
    assert_close(state.params, params, 0)
    assert stats["train/learning_rate"] == 0 and stats["train/grad_norm"] > 0


def test_weights_that_sampled_the_tokens_give_ratio_one_at_the_samplers_temperature(params):
    fresh = sequences()
    for s in fresh:
        logits = naive_logits(params, s.token_ids) / 0.7
        logprobs = jax.nn.log_softmax(logits)[np.arange(len(s.token_ids) - 1), s.token_ids[1:]]
        s.behavior_logprobs[1:] = np.asarray(logprobs)
    step = step_of(temperature=0.7)
    _, stats = step.update(step.init(params), PolicyData(pack(fresh, ROW), version=3))
    assert stats["policy/ratio_max"] == pytest.approx(1, abs=1e-5)
    assert stats["policy/ratio_min"] == pytest.approx(1, abs=1e-5)
    assert stats["mismatch/max"] < 1e-5 and stats["mismatch/all_max"] < 1e-5
    assert stats["policy/clip_share"] == stats["policy/truncated_share"] == 0


def naive_logits(params: Any, token_ids: np.ndarray) -> jax.Array:
    """[n - 1, vocab] logits of each next token, through the whole vocabulary at once."""
    length = len(token_ids)
    padded = np.pad(token_ids, (0, ROW - length))  # one shape for all lengths; causal, so no matter
    return _all_logits(params, padded[None])[: length - 1]


@jax.jit
def _all_logits(params: Any, tokens: jax.Array) -> jax.Array:
    positions = jnp.arange(tokens.shape[1])[None]
    ones = jnp.ones_like(tokens)
    hidden = hidden_states(SPEC, params, tokens, positions, ones, dtype=jnp.float32)
    return (hidden[0] @ output_head(SPEC, params)).astype(jnp.float32)


@pytest.mark.parametrize("axes", [{}, {"fsdp": 2, "tensor": 2}])
def test_the_probe_is_the_untempered_log_softmax(params, axes):
    tokens = np.arange(9, dtype=np.int32) % VOCAB
    step = step_of(axes=axes)
    got = ProbePass(SPEC, step.settings)(params_on(step, params), tokens)
    expected = jax.nn.log_softmax(naive_logits(params, tokens))[np.arange(8), tokens[1:]]
    assert got.shape == (8,) and got.dtype == jnp.float32
    np.testing.assert_allclose(got, expected, atol=1e-5)


def test_the_reference_divergence_is_zero_at_first_and_pulls_back_later(params):
    step = step_of(algorithm={"kl_coefficient": 0.1})
    reference = params_on(step, params)
    state, first = step.update(step.init(params), PolicyData(BATCH), Frozen(reference))
    _, second = step.update(state, PolicyData(BATCH), Frozen(reference))
    assert first["policy/kl_reference"] == pytest.approx(0, abs=1e-6)
    assert first["train/loss"] == pytest.approx(first["train/policy_loss"], abs=1e-6)
    assert second["policy/kl_reference"] > 1e-4
    assert second["train/loss"] == pytest.approx(
        second["train/policy_loss"] + 0.1 * second["policy/kl_reference"], rel=1e-4
    )


def test_bfloat16_weights_keep_their_type_and_move(params):
    step = step_of(param_dtype=jnp.bfloat16, dtype=jnp.bfloat16)
    state = step.init(params)
    start = copied(state.params)
    for _ in range(2):
        state, stats = step.update(state, PolicyData(BATCH))
    assert {p.dtype for p in jax.tree.leaves(state.params)} == {jnp.dtype(jnp.bfloat16)}
    assert {m.dtype for m in jax.tree.leaves(state.opt_state) if m.ndim} == {jnp.dtype(jnp.float32)}
    assert stats["train/skipped"] == 0
    assert any(
        (a != np.asarray(b)).any()
        for a, b in zip(jax.tree.leaves(start), jax.tree.leaves(state.params), strict=True)
    )


def test_programs_are_compiled_once_for_each_size_whatever_the_batch(params):
    step = step_of(algorithm={"loss": "reinforce"})
    state = step.init(params)
    for num in (3, 14, 7):
        state, _ = step.update(state, PolicyData(pack(sequences(num), ROW), version=num))
    assert step.programs.accumulate._cache_size() <= len(step.sizes.sizes) == 2
    assert step.programs.apply._cache_size() == 1


class CountedTurns:
    """Counts turns and refuses to be nested."""

    def __init__(self) -> None:
        self.taken, self.held = 0, False

    def __enter__(self) -> None:
        assert not self.held
        self.held, self.taken = True, self.taken + 1

    def __exit__(self, *_: object) -> None:
        self.held = False


def test_each_micro_batch_takes_a_turn_of_its_own(params):
    step, turns = step_of(), CountedTurns()
    state, stats = step.update(step.init(params), PolicyData(BATCH), device_lock=turns)
    micros = stats["train/micro_batches"]
    assert (
        micros > 1 and turns.taken == 2 + micros
    )  # clearing the sums, the micro-batches, the optimizer
    plain, _ = step.update(step.init(params), PolicyData(BATCH))
    assert_close(state.params, plain.params, 0)


def test_rows_fill_the_token_budget_and_every_device():
    assert rows_per_micro_batch(4096, 64, 1) == 64
    assert rows_per_micro_batch(100, 64, 1) == 1
    assert rows_per_micro_batch(64 * 3, 64, 4) == 4
    assert rows_per_micro_batch(10, 64, 2) == 2


OWN_LOSSES = """
import jax, jax.numpy as jnp
from jaxrl_async.algorithms.losses import log_ratio

def plain(x): return -jnp.exp(log_ratio(x)) * x.advantages
def endless(x): return plain(x) + jnp.where(x.versions == 77, jnp.inf, 0.0)
def steep(x):
    zero = x.policy_logprobs - jax.lax.stop_gradient(x.policy_logprobs)
    marked = x.versions == 77
    return plain(x) + jnp.where(marked, jnp.sqrt(jnp.where(marked, zero, 1.0)), 0.0)
"""


@pytest.mark.parametrize("broken", [0, 13], ids=["first", "last"])
@pytest.mark.parametrize("name", ["endless", "steep"])
def test_a_loss_or_a_gradient_alone_that_is_not_finite_changes_nothing(
    params, tmp_path, name, broken
):
    """endless: the loss of one sequence's tokens is infinite; steep: only their gradient is."""
    file = tmp_path / "own.py"
    file.write_text(OWN_LOSSES)
    marked = sorted(sequences(), key=lambda s: len(s.token_ids), reverse=True)
    marked[broken].versions[:] = 77
    step = step_of(algorithm={"loss": f"{file}:{name}"})
    before = step.init(params)
    weights = copied(before.params)
    state, stats = step.update(before, PolicyData(pack(marked, ROW), version=3))
    assert stats["train/micro_batches"] > 1
    assert np.isfinite(stats["train/grad_norm"]) == (name == "endless")
    assert np.isfinite(stats["train/loss"]) == (name == "steep")
    assert stats["train/skipped"] == 1
    assert stats["train/blown_up"] == 0  # which names finite steps to weights that say nothing
    assert_close(state.params, weights, 0)


def test_only_matrices_decay(params):
    from_table = decayed_paths()
    assert {path for path, is_decayed in from_table if is_decayed} == {
        path for path, _ in from_table if not ("norm" in path or "bias" in path)
    }


def decayed_paths() -> list[tuple[str, bool]]:
    spec = ModelSpec.from_architecture(ARCHITECTURE.model_copy(update={"family": "qwen2"}), VOCAB)
    table = weight_table(spec)
    flat = jax.tree_util.tree_leaves_with_path(table, is_leaf=lambda w: isinstance(w, Weight))
    return [(jax.tree_util.keystr(path), weight.is_decayed) for path, weight in flat]


def test_flops_count_weights_tokens_and_causal_attention():
    batch = pack_pairs([(np.zeros(n, np.int32), np.arange(n) > 2) for n in (5, 9)], ROW)
    head = 2 * VOCAB * ARCHITECTURE.width * 6  # of three tokens of each nothing is read
    attention = 2 * 2 * 4 * 8 * (25 + 81)
    forward = 2 * num_matmul_params(SPEC) * 14 + attention
    assert train_flops(SPEC, batch, reference=False) == 3 * (forward - head)
    assert train_flops(SPEC, batch, reference=True) == 4 * (forward - head)
    lora = lora_of(SPEC, LoraSection(rank=3, targets=("q_proj", "down_proj")))
    a = ARCHITECTURE
    inputs_and_outputs = a.width + a.heads * a.head_dim + a.mlp + a.width
    adapter = 2 * a.layers * 3 * inputs_and_outputs * 14
    frozen = 2 * num_matmul_params(SPEC) * 14
    learning = 2 * frozen + 3 * attention + 3 * adapter
    assert train_flops(SPEC, batch, reference=False, lora=lora) == learning - 2 * head
    assert train_flops(SPEC, batch, reference=True, lora=lora) == learning + forward - 3 * head


def test_a_state_is_a_pytree_of_three():
    assert TrainState._fields == ("params", "opt_state", "step")


@pytest.mark.exhaustive
def test_moments_in_the_hosts_memory_give_the_same_update(params):
    ends = []
    for offload in ((), ("optimizer",)):
        step = step_of(axes={"fsdp": 2}, trainer={"offload": offload})
        state = step.init(params)
        for _ in range(2):
            state, stats = step.update(state, DATA)
        moments = [m for m in jax.tree.leaves(state.opt_state) if m.ndim]
        kind = "pinned_host" if offload else "device"
        assert {m.sharding.memory_kind for m in moments} == {kind}
        assert {p.sharding.memory_kind for p in jax.tree.leaves(state.params)} == {"device"}
        ends.append((copied(state), stats["train/loss"]))
    assert_close(*ends, 1e-6)


def test_bfloat16_computes_and_float32_keeps(params):
    """Steps far below bfloat16's resolution of the weights add up."""
    step = step_of(dtype=jnp.bfloat16, algorithm={"learning_rate": 1e-5})
    state = step.init(params)
    for _ in range(3):
        state, _ = step.update(state, DATA)
    for new, old in zip(jax.tree.leaves(state.params), jax.tree.leaves(params), strict=True):
        assert new.dtype == jnp.float32
        change = np.abs(np.asarray(new) - np.asarray(old))
        assert 0 < change.max() < 1e-4
    assert {m.dtype for m in jax.tree.leaves(state.opt_state) if m.ndim} == {np.dtype("float32")}


def test_bfloat16_is_close_to_float32(params):
    losses = []
    for dtype in (jnp.float32, jnp.bfloat16):
        step = step_of(dtype=dtype)
        _, stats = step.update(step.init(params), DATA)
        losses.append(stats["train/loss"])
    assert losses[1] == pytest.approx(losses[0], rel=0.02, abs=0.01) and losses[1] != losses[0]
