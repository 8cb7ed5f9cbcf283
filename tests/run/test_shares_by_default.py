"""Where trainer.share_prefixes=null shares prefixes."""

from types import SimpleNamespace

import jax
import pytest

from jaxrl_async.config.schema import ArchitectureSection, AxesSection, Config
from jaxrl_async.mesh import make_mesh
from jaxrl_async.model.attention import has_cpu_kernels
from jaxrl_async.model.spec import ModelSpec
from jaxrl_async.run.builders.learning import with_shared_prefixes

SIZES = ArchitectureSection(layers=4, width=16, heads=2, kv_heads=1, head_dim=8, mlp=16)


def chosen(config=None, *, family="qwen3", devices=1, images=False):
    spec = ModelSpec.from_architecture(SIZES.model_copy(update={"family": family}), 24)
    sizes = AxesSection(data=devices)
    mesh = make_mesh(sizes, jax.devices()[:devices])
    policy = SimpleNamespace(spec=spec)
    made = with_shared_prefixes(Config(**(config or {})), policy, mesh, images=images)
    return made.trainer.share_prefixes


@pytest.mark.skipif(
    not has_cpu_kernels(jax.devices()[0], "float32"), reason="no compiler of CPU kernels"
)
def test_on_one_cpu_device_with_kernels_they_are_shared():
    assert chosen() is True


@pytest.mark.parametrize(
    ("config", "where"),
    [
        ({"trainer": {"share_prefixes": False}}, {}),
        ({"trainer": {"cpu_kernels": False}}, {}),
        ({"model": {"dtype": "bfloat16"}}, {}),
        ({"model": {"attention": "reference"}}, {}),
        ({"model": {"balance": {"loss": 0.01}}}, {}),
        ({"algorithm": {"group_size": 1}}, {}),
        ({}, {"devices": 2}),
        ({}, {"images": True}),
        ({}, {"family": "qwen3_next"}),
    ],
)
def test_elsewhere_they_are_not(config, where):
    assert chosen(config, **where) is False


def test_a_setting_that_is_written_down_stays():
    assert chosen({"trainer": {"share_prefixes": True}}, devices=2) is True


def test_a_teacher_whose_layers_keep_states_gets_separate_contexts(monkeypatch):
    from jaxrl_async.run.builders import learning

    delta = ModelSpec.from_architecture(SIZES.model_copy(update={"family": "qwen3_next"}), 24)
    monkeypatch.setattr(learning, "load_spec", lambda folder: delta)
    assert chosen({"teacher": {"source": "path", "path": "x"}}) is False
