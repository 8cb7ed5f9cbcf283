"""Teachers of another size: padded vocabularies, the tokens they stand for, whose top k is seen."""

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from whole_rows import row_states

from jaxrl_async.config import schema
from jaxrl_async.config.lora_section import LoraSection
from jaxrl_async.data.tokenizer import Tokenizer, character_tokenizer
from jaxrl_async.errors import ConfigError
from jaxrl_async.mesh import make_slices
from jaxrl_async.model.decoder import DecoderSettings, TokenRows, init_params
from jaxrl_async.model.divergence import (
    FrozenPolicy,
    chunked_over_vocab,
    divergence_of,
    reverse_kl,
)
from jaxrl_async.model.lora import lora_of
from jaxrl_async.model.policy import Policy
from jaxrl_async.model.spec import ModelSpec
from jaxrl_async.run.builders.frozen_weights import check_advisers, cut_vocabulary
from jaxrl_async.run.builders.learning import make_learner
from jaxrl_async.trainer.distill import TeacherTop, distill_rows, distill_top
from jaxrl_async.trainer.pack import TrainSequence, pack
from jaxrl_async.types import PackedBatch

pytestmark = pytest.mark.full

LETTERS = "abcdefghijklmnopqrst"  # 24 tokens with <pad>, <bos>, <eos> and <unk>
TOKENIZER = character_tokenizer(LETTERS)
SLICES = make_slices(schema.MeshSection(), jax.devices())
SHAPE = schema.ArchitectureSection(layers=1, width=16, heads=2, kv_heads=1, head_dim=8, mlp=24)
ROW = 16


def policy_of(vocab: int, seed: int, *, tied: bool = True) -> Policy:
    spec = ModelSpec.from_architecture(SHAPE.model_copy(update={"tied": tied}), vocab)
    params = jax.tree.map(lambda p: 3 * p, init_params(spec, jax.random.key(seed)))
    return Policy(spec, params, TOKENIZER)


def saved(folder: Path, policy: Policy, tokenizer: Tokenizer | None) -> str:
    Policy(policy.spec, policy.params, tokenizer).save_pretrained(folder)
    return str(folder)


def config_of(**teacher: Any) -> schema.Config:
    return schema.Config(
        model=schema.ModelSection(architecture=SHAPE),
        teacher=schema.TeacherSection(source="path", **teacher),
        sampler=schema.SamplerSection(max_length=ROW, max_new_tokens=8),
        data=schema.DataSection(max_prompt_tokens=8),
        trainer=schema.TrainerSection(micro_batch_tokens=4 * ROW),
    )


def batch() -> PackedBatch:
    rng = np.random.default_rng(0)
    return pack(
        [
            TrainSequence(
                token_ids=rng.integers(0, 24, n).astype(np.int32),
                mask=np.arange(n) >= 2,
                behavior_logprobs=np.full(n, -3, np.float32),
                versions=np.zeros(n, np.int32),
                advantages=np.ones(n, np.float32),
            )
            for n in (9, 12, 16)
        ],
        ROW,
    )


def log_softmax(x: np.ndarray) -> np.ndarray:
    return np.asarray(x - np.log(np.exp(x).sum(-1, keepdims=True)), np.float64)


def logits(policy: Policy, packed: PackedBatch) -> np.ndarray:
    """float64 [rows, length, vocab]: at t, of the distribution that token t is sampled from."""
    arrays = (packed.token_ids, packed.positions, packed.segment_ids)
    hidden = np.asarray(row_states(policy.spec, policy.params, *arrays), np.float64)
    embed = policy.params["embed"].T if policy.spec.tied else policy.params["lm_head"]
    return np.roll(hidden @ np.asarray(embed, np.float64), 1, axis=1)


@pytest.mark.parametrize("tied", [True, False])
def test_a_larger_teacher_vocabulary_is_cut_to_the_policys_rows(tmp_path, tied):
    policy, teacher = policy_of(24, 0), policy_of(32, 1, tied=tied)
    config = config_of(path=saved(tmp_path / "teacher", teacher, TOKENIZER))
    check_advisers(config, policy.spec, policy.tokenizer)
    learner = make_learner(config, policy, SLICES, TOKENIZER)
    packed = batch()
    assert learner.credit.teacher_vocab == 24
    found = learner.run_passes(packed).teacher
    assert found is not None
    every = log_softmax(logits(teacher, packed)[..., :24])
    wanted = np.take_along_axis(every, packed.token_ids[..., None], -1)[..., 0]
    np.testing.assert_allclose(found[packed.mask], wanted[packed.mask], atol=1e-4)


@pytest.mark.parametrize("sizes", [(24, 32), (32, 24)], ids=str)
@pytest.mark.parametrize("kind", ["forward", "reverse", "js"])
def test_a_divergence_is_between_what_both_say_of_the_tokens_that_both_have(sizes, kind):
    policy, teacher = (policy_of(n, seed) for seed, n in enumerate(sizes))
    packed = batch()
    tokens = TokenRows(packed.token_ids, packed.positions, packed.segment_ids)
    other = FrozenPolicy(teacher.spec, teacher.params)
    found = chunked_over_vocab(
        policy.spec, policy.params, tokens, other, divergence_of(kind), DecoderSettings(chunk=7)
    )
    q, p = (np.exp(log_softmax(logits(m, packed)[..., :24])) for m in (policy, teacher))
    middle = (p + q) / 2
    wanted = {
        "forward": (p * np.log(p / q)).sum(-1),
        "reverse": (q * np.log(q / p)).sum(-1),
        "js": ((p * np.log(p / middle)) + q * np.log(q / middle)).sum(-1) / 2,
    }[kind]
    np.testing.assert_allclose(found.divergence[packed.mask], wanted[packed.mask], atol=2e-5)
    own = log_softmax(logits(policy, packed))  # the policy's own log-probs are of all its tokens
    expected = np.take_along_axis(own, packed.token_ids[..., None], -1)[..., 0]
    np.testing.assert_allclose(found.logprobs[packed.mask], expected[packed.mask], atol=1e-4)


def test_a_smaller_teacher_gives_no_advice_on_a_token_that_it_does_not_have(tmp_path):
    policy, teacher = policy_of(32, 0), policy_of(24, 1)
    config = config_of(path=saved(tmp_path / "teacher", teacher, TOKENIZER))
    check_advisers(config, policy.spec, policy.tokenizer)
    learner = make_learner(config, policy, SLICES, TOKENIZER)
    packed = batch()
    row, at = (int(i[0]) for i in np.nonzero(packed.mask))
    packed.token_ids[row, at] = 30
    teacher_logprobs = learner.run_passes(packed).teacher
    assert teacher_logprobs is not None
    advised, gap = learner.credit.advised(packed, packed.advantages, teacher_logprobs)
    assert advised[row, at] == packed.advantages[row, at]
    assert np.isfinite(advised).all() and np.isfinite(gap)
    others = packed.mask.copy()
    others[row, at] = False
    assert (advised != packed.advantages)[others].all()


def test_cutting_leaves_what_fits():
    policy = policy_of(24, 0)
    same = cut_vocabulary(policy.spec, policy.params, policy.spec, SLICES.trainer)
    assert same is policy.params


def test_equal_sizes_with_different_tokens_are_refused_and_so_are_unknown_tokens(
    tmp_path,
):
    policy = policy_of(24, 0)
    turned = character_tokenizer(LETTERS[::-1])
    path = saved(tmp_path / "turned", policy, turned)
    with pytest.raises(ConfigError, match=r"another tokenizer.*20 of 24 ids.*'a'.*'t'"):
        check_advisers(config_of(path=path), policy.spec, policy.tokenizer)
    shorter = saved(tmp_path / "shorter", policy, character_tokenizer(LETTERS[:-1]))
    with pytest.raises(ConfigError, match="1 of 24 ids"):
        check_advisers(config_of(path=shorter), policy.spec, policy.tokenizer)
    bare = saved(tmp_path / "bare", policy_of(32, 1), None)
    with pytest.raises(ConfigError, match=r"32 tokens.*24.*tokenizer\.json"):
        check_advisers(config_of(path=bare), policy.spec, policy.tokenizer)
    equal = saved(tmp_path / "alike", policy_of(24, 1), None)
    check_advisers(config_of(path=equal), policy.spec, policy.tokenizer)


def test_tokens_that_only_the_teacher_knows_are_logged_and_a_critic_is_checked_too(
    tmp_path, caplog
):
    policy = policy_of(32, 0)
    more = saved(tmp_path / "more", policy_of(40, 1), character_tokenizer(LETTERS + "u"))
    check_advisers(config_of(path=more), policy.spec, policy.tokenizer)
    assert "1 tokens that the policy's lacks, such as 'u'" in caplog.text
    turned = saved(tmp_path / "turned", policy, character_tokenizer(LETTERS[::-1]))
    config = schema.Config(
        algorithm=schema.AlgorithmSection(advantage="gae"), critic=schema.CriticSection(path=turned)
    )
    with pytest.raises(ConfigError, match=r"critic\.path=.*another tokenizer"):
        check_advisers(config, policy.spec, policy.tokenizer)


def test_a_users_advantage_that_declares_that_it_needs_values_gets_a_critic(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text(
        "from jaxrl_async.algorithms.advantages import gae\n"
        "from jaxrl_async.algorithms.registry import declare\n"
        "@declare(level='token', needs=('values',))\n"
        "def critical(data): return gae(data)\n"
        "def plain(data): return gae(data)\n"
    )
    for name in ("critical", "plain"):
        section = schema.AlgorithmSection(advantage=f"{file}:{name}")
        config = config_of(path="x").model_copy(update={"algorithm": section})
        config = config.model_copy(update={"teacher": None})
        learner = make_learner(config, policy_of(24, 0), SLICES, TOKENIZER)
        assert ("critic" in learner.tree()) == (name == "critical")


# ---- the student's own top k


def top_divergence(student: np.ndarray, teacher: np.ndarray, ids: np.ndarray, kind: str) -> Any:
    logprobs = np.take_along_axis(teacher, ids, -1).astype(np.float32)
    return np.asarray(distill_top(jnp.asarray(student), ids, logprobs, kind=kind), np.float64)


def test_the_students_own_top_k_see_more_of_the_reverse_divergence():
    """30 tokens of random logits: the whole divergence in float64, and what four of each side's
    likeliest tokens see of it."""
    rng = np.random.default_rng(0)
    student, teacher = log_softmax(2 * rng.normal(size=(2, 400, 30)))
    whole = (np.exp(student) * (student - teacher)).sum(-1)
    seen = {
        name: top_divergence(student, teacher, np.argsort(-of, -1)[:, :4], "reverse")
        for name, of in (("student", student), ("teacher", teacher))
    }
    for found in seen.values():
        assert (found <= whole + 1e-5).all()  # a lower bound
    assert seen["student"].mean() > 0.75 * whole.mean() > 1.2 * seen["teacher"].mean()
    everything = top_divergence(student, teacher, np.argsort(-student, -1)[:, :29], "reverse")
    np.testing.assert_allclose(everything, whole, atol=1e-4)


@pytest.mark.parametrize("sizes", [(24, 24), (24, 32), (32, 24)], ids=str)
def test_the_learner_distils_at_the_students_likeliest_tokens(tmp_path, sizes):
    """Against the lumped divergence in float64 of the policy's own likeliest tokens."""
    policy, teacher = (policy_of(n, seed) for seed, n in enumerate(sizes))
    path = saved(tmp_path / "teacher", teacher, TOKENIZER)
    config = config_of(path=path, form="loss", kind="reverse", top_k=5, top_k_of="student")
    learner = make_learner(config, policy, SLICES, TOKENIZER)
    packed = batch()
    columns = learner.run_passes(packed).top_k
    assert columns is not None
    own = log_softmax(logits(policy, packed))
    others = log_softmax(logits(teacher, packed)[..., :24])
    wanted_ids = np.argsort(-own[..., :24], -1)[..., :5]
    np.testing.assert_array_equal(columns["teacher_ids"][packed.mask], wanted_ids[packed.mask])
    tokens = TokenRows(packed.token_ids, packed.positions, packed.segment_ids)
    top = TeacherTop(columns["teacher_ids"], columns["teacher_logprobs"])
    found = distill_rows(policy.spec, policy.params, tokens, top, reverse_kl)

    def lump(of: np.ndarray) -> np.ndarray:
        chosen = np.exp(np.take_along_axis(of, wanted_ids, -1))
        return np.concatenate([chosen, 1 - chosen.sum(-1, keepdims=True)], -1)

    q, p = lump(own), lump(others)
    wanted = (q * np.log(q / p)).sum(-1)
    np.testing.assert_allclose(found.divergence[packed.mask], wanted[packed.mask], atol=2e-4)


def test_named_teachers_in_folders_are_loaded_with_their_adapter_and_cut(tmp_path):
    policy, base = policy_of(24, 0), policy_of(32, 1)
    lora = lora_of(base.spec, LoraSection(rank=2))
    adapted = base.adapted(lora, jax.random.key(2))
    moved = jax.tree.map(lambda x: x + 0.3, adapted.adapter)
    adapted = adapted.with_trained(moved)
    adapted.save_adapter(tmp_path / "adapter")
    path = saved(tmp_path / "teacher", base, TOKENIZER)
    section = schema.TeacherSection(source="teachers")
    config = config_of(path=path).model_copy(
        update={
            "teacher": section,
            "teachers": {
                "plain": schema.NamedTeacher(path=path),
                "tuned": schema.NamedTeacher(path=path, adapter=str(tmp_path / "adapter")),
            },
        }
    )
    teachers = make_learner(config, policy, SLICES, TOKENIZER)._companions.teachers
    packed = batch()
    for name, teacher in {"plain": base, "tuned": adapted.merged()}.items():
        local = teachers.local[name]
        found = local.logprob_pass.logprobs(local.params, packed)
        every = log_softmax(logits(teacher, packed)[..., :24])
        wanted = np.take_along_axis(every, packed.token_ids[..., None], -1)[..., 0]
        np.testing.assert_allclose(found[packed.mask], wanted[packed.mask], atol=1e-4)
