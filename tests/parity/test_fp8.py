"""Weights in FP8 with a scale for each block, as DeepSeek-V3 and Qwen's -FP8 are published."""

import json
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from builders import tiny_params

from jaxrl_async.config import schema
from jaxrl_async.errors import CheckpointError
from jaxrl_async.model.fp8 import block_of, fp8_numbers
from jaxrl_async.model.hf import load_params, save_params
from jaxrl_async.model.spec import ModelSpec

pytestmark = pytest.mark.full

torch = pytest.importorskip("torch", reason="parity needs torch (extra [dev])")
transformers = pytest.importorskip("transformers", reason="parity needs transformers")
BLOCK = 8


def test_every_number_is_multiplied_with_the_scale_of_its_block() -> None:
    """Also of blocks that the matrix ends in: 576 rows of DeepSeek-V3's kv_a_proj have 5 scales."""
    rng = np.random.default_rng(0)
    stored = np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn)
    stored = np.resize(stored[np.isfinite(stored.astype(np.float32))], (11, 7))
    scales = rng.uniform(0.01, 2, (3, 4)).astype(np.float32)
    numbers = fp8_numbers(stored, scales, (4, 2))
    for (row, column), number in np.ndenumerate(numbers):
        wanted = np.float64(stored[row, column]) * np.float64(scales[row // 4, column // 2])
        np.testing.assert_allclose(number, wanted, rtol=1e-6)


def spec_of(family: str) -> ModelSpec:
    section = schema.ArchitectureSection(
        family=family, layers=4, width=32, heads=4, kv_heads=2, head_dim=8, mlp=24, tied=False,
        experts=4,
    )  # fmt: skip
    return ModelSpec.from_architecture(section, 64)


def in_fp8(folder: Path) -> None:
    """Store the matrices of the layers in FP8, and what the scales are of in config.json."""
    from safetensors.torch import load_file, save_file

    tensors = load_file(folder / "model.safetensors")
    draw = torch.Generator().manual_seed(0)
    for name in [n for n in tensors if n.endswith("proj.weight") and not any(
        size % BLOCK for size in tensors[n].shape)]:  # fmt: skip
        rows, columns = tensors[name].shape
        tensors[name] = (100 * tensors[name]).to(torch.float8_e4m3fn)
        scales = torch.rand(rows // BLOCK, columns // BLOCK, generator=draw) / 50 + 0.005
        tensors[name + "_scale_inv"] = scales
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {
        "quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [BLOCK, BLOCK],
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))


@pytest.mark.exhaustive
@pytest.mark.parametrize("family", ["deepseek_v3", "qwen3_5_moe_text"])
def test_a_directory_in_fp8_is_read_as_its_numbers(tmp_path: Path, family: str) -> None:
    """Experts are by themselves there, and in_proj_qkv is three weights here."""
    from safetensors.torch import load_file, save_file
    from transformers.integrations.finegrained_fp8 import Fp8Dequantize

    spec = spec_of(family)
    save_params(tmp_path / "whole", spec, tiny_params(spec))
    save_params(tmp_path / "packed", spec, tiny_params(spec))
    in_fp8(tmp_path / "packed")
    packed = load_file(tmp_path / "packed/model.safetensors")
    scaled = [n for n in packed if n + "_scale_inv" in packed]
    assert any("experts.3.down" in name for name in scaled)
    wanted = dict(packed)
    for name in scaled:
        numbers = Fp8Dequantize(None)._dequantize_one(
            packed[name], wanted.pop(name + "_scale_inv"), torch.float32
        )
        wanted[name] = numbers.contiguous()
    save_file(wanted, tmp_path / "whole/model.safetensors", metadata={"format": "pt"})
    theirs, ours = (load_params(tmp_path / name, spec) for name in ("whole", "packed"))
    for stack in theirs:
        for name in theirs[stack] if isinstance(theirs[stack], dict) else ():
            np.testing.assert_array_equal(ours[stack][name], theirs[stack][name], err_msg=name)
    name = scaled[0]
    save_file(
        {**packed, name + "_scale_inv": torch.ones(1, 1)}, tmp_path / "packed/model.safetensors"
    )
    with pytest.raises(
        CheckpointError, match=r"its scales are F32 \[1, 1\]: they must be .* 8 x 8"
    ):
        load_params(tmp_path / "packed", spec)
    del packed[name + "_scale_inv"]
    save_file(packed, tmp_path / "packed/model.safetensors")
    with pytest.raises(CheckpointError, match=r"quantised or not weights .* is F8_E4M3"):
        load_params(tmp_path / "packed", spec)


def test_sizes_of_blocks_that_are_none_are_refused() -> None:
    assert block_of({}, "config.json") == (128, 128)
    said = {"quantization_config": {"weight_block_size": [128, "x"]}}
    with pytest.raises(CheckpointError, match="weight_block_size must be two whole numbers"):
        block_of(said, "config.json")
