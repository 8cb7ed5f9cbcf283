"""Servers of somebody else's engine are looked at before a run begins."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from builders import mesh_of, tiny_params, tiny_spec
from fake_vllm import FakeVllm
from runs import config_of, metrics_of

from jaxrl_async.audit import audit_run
from jaxrl_async.config.schema import Config
from jaxrl_async.errors import ConfigError
from jaxrl_async.interop.engines import SharedPush, check_engines
from jaxrl_async.mesh import TRAINER_RULES, shardings
from jaxrl_async.model.hf import save_params
from jaxrl_async.model.spec import weight_table
from jaxrl_async.run.loop import train
from jaxrl_async.weights.local import Push

SPEC = tiny_spec(24, tied=False)


@pytest.fixture
def server():
    fake = FakeVllm()
    yield fake
    fake.close()


def config(*urls: str, **sampler) -> Config:
    section = {"engine": "vllm", "engine_urls": urls, "max_length": 64, **sampler}
    return Config(sampler=section, mesh={"samplers_in": "external"})


def test_a_server_that_fits_is_taken(server):
    check_engines(config(server.url), SPEC)
    check_engines(Config(), SPEC)


@pytest.mark.full
@pytest.mark.parametrize(
    ("facts", "message"),
    [
        ({"max_model_len": 32}, "Start it with --max-model-len 64"),
        ({"dtype": "torch.bfloat16"}, "Start it with --dtype float32"),
        ({"logprobs_mode": "raw_logits"}, "--logprobs-mode processed_logprobs"),
        ({"max_model_len": None}, "max_model_len is None in the server's answer, not a int"),
    ],
)
def test_a_server_that_does_not_fit_is_refused_with_what_to_do(server, facts, message):
    server.facts |= facts
    with pytest.raises(ConfigError, match=message):
        check_engines(config(server.url), SPEC)


def test_raw_log_probs_will_do_where_nothing_is_truncated(server):
    server.facts["logprobs_mode"] = "raw_logprobs"
    check_engines(config(server.url), SPEC)
    with pytest.raises(ConfigError, match="not those of the sampling distribution"):
        check_engines(config(server.url, top_k=5), SPEC)


@pytest.mark.full
def test_another_model_is_refused(server, tmp_path):
    with pytest.raises(ConfigError, match="a vocabulary of 24, but the policy's has 32"):
        check_engines(config(server.url), tiny_spec(32, tied=False))
    other = tiny_spec(24, tied=False, mlp=64)
    save_params(tmp_path, other, tiny_params(other))
    server.facts["model"] = str(tmp_path)
    with pytest.raises(ConfigError, match=r"mlp 64, not 48.*model.path"):
        check_engines(config(server.url), SPEC)


def test_tied_embeddings_are_refused_where_they_are_not_loaded(server):
    tied = tiny_spec(24, tied=True)
    check_engines(config(server.url), tied)
    server.device = "cpu"
    with pytest.raises(ConfigError, match="tie_word_embeddings=false"):
        check_engines(config(server.url), tied)


def test_a_server_that_is_not_there_is_reported_with_its_address(server):
    url = server.url
    server.close()
    with pytest.raises(ConfigError, match=f"no answer from {url}.*curl {url}/health"):
        check_engines(config(url), SPEC)


@pytest.mark.full
def test_several_servers_share_one_copy_which_donation_leaves_whole():
    sharded = shardings(weight_table(SPEC), mesh_of(fsdp=2), TRAINER_RULES)
    params = jax.device_put(tiny_params(SPEC), sharded)
    link = SharedPush(Push(sharded, sharded, dtype=jnp.dtype("float32")))
    copy = link.cast(params)
    assert link.cast(params) is copy and link.finish(link.move(copy)) is copy
    before = np.asarray(params["embed"])
    step = jax.jit(lambda p: jax.tree.map(lambda x: x + 1, p), donate_argnums=0)
    newer = step(params)
    np.testing.assert_array_equal(np.asarray(copy["embed"]), before)
    np.testing.assert_array_equal(np.asarray(link.cast(newer)["embed"]), before + 1)


@pytest.mark.full
def test_a_run_samples_from_its_servers_and_waits_for_nobody_to_join(tmp_path):
    """The servers are elsewhere, as joined samplers would be, and yet no sampler joins."""
    servers = [FakeVllm(), FakeVllm()]
    config = config_of(
        "vllm",
        tmp_path,
        "model.path=null",
        "model.architecture={layers: 1, width: 16, heads: 2, kv_heads: 1, head_dim: 8, mlp: 16, "
        "tied: false}",
        f"sampler.engine_urls=[{', '.join(f'{server.url!r}' for server in servers)}]",
        *("sampler.slots=8", "sampler.max_new_tokens=8", "algorithm.group_size=2"),
        *("algorithm.groups_per_step=2", "run.steps=3", "data.addition.eval_size=4"),
        *("eval.every=0", "checkpoint.every=0", "weights.probe=false", "metrics.peak_flops=1e9"),
        *("metrics.tensorboard=false", "trainer.warmup_steps=1"),
    )
    try:
        train(config)
    finally:
        for server in servers:
            server.close()
    assert all(server.bodies and len(server.loaded) >= 2 for server in servers)
    steps = [line for line in metrics_of(config) if line["step"] > 0]
    assert [line["step"] for line in steps] == [1, 2, 3]
    assert all(line["sampler/living"] == 2 for line in steps)
    assert max(line["staleness/max"] for line in steps) <= 1
    assert not (tmp_path / "vllm" / "join.json").exists()
    assert audit_run(tmp_path / "vllm").problems == ()
