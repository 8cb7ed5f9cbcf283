"""Use XLA's compiler for NVIDIA cards without a card: JAX's CUDA plugin compiles for a described
card, without a driver, cuBLAS or cuDNN.

Differences from a real run:

- Kernels are not timed to choose among them (xla_gpu_autotune_level=0): products are Triton's with
  the compiler's own blocks, never cuBLAS', whose workspace (32 MiB on Hopper) is not planned.
- cuDNN's graphs are not built: attention by cuDNN is one call, with a workspace of 0 bytes.
- Command buffers (CUDA graphs) are created later.

The plugin is used in a process whose JAX_PLATFORMS is cpu (ENVIRONMENT, set before JAX starts);
otherwise JAX would look for a driver.
"""

import importlib
import importlib.util
import json
import os
import re
from typing import Any

from jaxrl_async.errors import ConfigError, MissingExtraError
from jaxrl_async.host import version_of
from jaxrl_async.plan.chips import Chip, Slice

PLUGINS = ("jax-cuda13-plugin", "jax-cuda12-plugin")
FLAGS = "--xla_gpu_autotune_level=0"
ENVIRONMENT = {
    "JAX_PLATFORMS": "cpu",  # nothing runs on a device
    "JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1",  # cuBLAS, cuDNN and others may be missing
    "TF_CPP_MIN_LOG_LEVEL": "2",  # hides warnings about the missing driver
}
TRITON_DEVICE_QUERIES = "jax._src.pallas.triton.gpu_info"
"""The module in which Pallas' Triton kernels look up their card, by default the machine's."""
CUDNN = (9, 12, 0)
"""The version of cuDNN that programs are compiled for."""

HOPPER = {"shared_memory_per_core": 233472, "shared_memory_per_block_optin": 232448}
COMMON = {
    "threads_per_block_limit": 1024,
    "threads_per_warp": 32,
    "shared_memory_per_block": 49152,
    "threads_per_core_limit": 2048,
    "fpus_per_core": 128,
    "block_dim_limit_x": 2**31 - 1,
    "block_dim_limit_y": 65535,
    "block_dim_limit_z": 65535,
    "registers_per_core_limit": 65536,
    "registers_per_block_limit": 65536,
}
DEVICES: dict[str, tuple[str, str, dict[str, float]]] = {
    "h100": (
        "NVIDIA H100 80GB HBM3",
        "major: 9 feature_extension: ACCELERATED_FEATURES",
        {**HOPPER, "core_count": 132, "l2_cache_size": 52428800, "clock_rate_ghz": 1.98},
    ),
    "h200": (
        "NVIDIA H200",
        "major: 9 feature_extension: ACCELERATED_FEATURES",
        {**HOPPER, "core_count": 132, "l2_cache_size": 52428800, "clock_rate_ghz": 1.98},
    ),
    "b200": (
        "NVIDIA B200",
        "major: 10 feature_extension: ACCELERATED_FEATURES",
        {**HOPPER, "core_count": 148, "l2_cache_size": 132644864, "clock_rate_ghz": 1.965},
    ),
    "a100": (
        "NVIDIA A100-SXM4-80GB",
        "major: 8",
        {
            "shared_memory_per_core": 167936, "shared_memory_per_block_optin": 166912,
            "core_count": 108, "fpus_per_core": 64, "l2_cache_size": 41943040,
            "clock_rate_ghz": 1.41,
        },
    ),
    "l4": (
        "NVIDIA L4",
        "major: 8 minor: 9",
        {
            "shared_memory_per_core": 102400, "shared_memory_per_block_optin": 101376,
            "threads_per_core_limit": 1536, "core_count": 58, "l2_cache_size": 50331648,
            "clock_rate_ghz": 2.04,
        },
    ),
}  # fmt: skip
"""Name, compute capability and parts of each card, for the compiler; from openxla/xla's
descriptions (xla/backends/gpu/target_config/specs). L4 is from its data sheet and the CUDA
programming guide's table for compute capability 8.9."""


def check_compiler() -> None:
    """Raise MissingExtraError if the plugin is missing, or its version is not JAX's."""
    jax = version_of("jax")
    versions = {name: version_of(name) for name in PLUGINS}
    plugin, its = next(((n, v) for n, v in versions.items() if v), (PLUGINS[0], ""))
    install = f"pip install 'jaxrl_async[plan-cuda]' 'jax-cuda13-plugin=={jax}' (no GPU is needed)"
    if not its or importlib.util.find_spec("jax_plugins") is None:
        raise MissingExtraError(
            "a plan for NVIDIA cards compiles with JAX's CUDA plugin, which is not installed: "
            f"{install}"
        )
    if its != jax:
        raise MissingExtraError(
            f"{plugin} is {its} and jax is {jax}: the plugin must be of the same version as jax. "
            f"{install}"
        )


def environment() -> dict[str, str]:
    """Return the environment for compiling with the plugin, for a process that has not started
    JAX."""
    flags = os.environ.get("XLA_FLAGS", "")
    return {**ENVIRONMENT, "XLA_FLAGS": f"{flags} {FLAGS}".strip()}


def capability_of(card: Chip) -> str:
    """Return a card's compute capability: 9.0."""
    major, minor = (
        re.search(rf"{part}: (\d+)", DEVICES[card.generation][1]) for part in ("major", "minor")
    )
    return f"{major[1] if major else 0}.{minor[1] if minor else 0}"


def compiler_versions() -> list[str]:
    """Return the versions that affect a compiled program, in addition to jaxlib's and its card."""
    return [
        *(f"{name} {version_of(name)}" for name in PLUGINS if version_of(name)),
        FLAGS,
        str(CUDNN),
    ]


def target_config(where: Slice) -> str:
    """Return the card's description for the compiler, as text of XLA's GpuTargetConfigProto."""
    name, capability, parts = DEVICES[where.chip.generation]
    numbers = {
        **COMMON,
        **parts,
        "memory_bandwidth": int(where.chip.hbm_bytes_per_s),
        "device_memory_size": int(where.chip.memory_bytes),
    }
    lines = [f"  {key}: {value}" for key, value in numbers.items()]
    major, minor, patch = CUDNN
    return "\n".join(
        [
            "gpu_device_info {",
            *lines,
            f"  cuda_compute_capability {{ {capability} }}",
            "}",
            'platform_name: "CUDA"',
            f"dnn_version_info {{ major: {major} minor: {minor} patch: {patch} }}",
            f"runtime_version {{ major: {13 if version_of(PLUGINS[0]) else 12} }}",
            f"device_description_str: {json.dumps(name)}",
        ]
    )


def card_devices(where: Slice) -> list[Any]:
    """Return the cards of a slice as the plugin describes them. Raises ConfigError."""
    from jax.experimental import topologies

    _prepare(DEVICES[where.chip.generation][0])
    hosts, cards = where.shape
    try:
        topology = topologies.get_topology_desc(
            "", platform="cuda", target_config=target_config(where), topology=f"1x{hosts}x{cards}"
        )
    except Exception as error:  # the plugin has no exception types for this
        raise ConfigError(
            f"JAX's CUDA plugin cannot describe {where.topology}: {str(error).splitlines()[0]}. Is "
            "its environment the same as in `jaxrl-async plan`?"
        ) from error
    return list(topology.devices)


def _prepare(kind: str) -> None:
    """Make JAX lower programs for cards of this kind without such a card."""
    from jax._src import xla_bridge
    from jax._src.cudnn import fused_attention_stablehlo

    if importlib.util.find_spec(TRITON_DEVICE_QUERIES):  # since jax 0.12
        queries: Any = importlib.import_module(TRITON_DEVICE_QUERIES)
        queries.get_device_kind, queries.get_device_platform = lambda: kind, lambda: "gpu"
    original = xla_bridge.canonicalize_platform
    if getattr(original, "knows_cards", False):
        return

    def canonical(platform: str) -> str:
        # JAX knows "gpu" only if a backend runs (github.com/jax-ml/jax/issues/23971).
        return "cuda" if platform in ("gpu", "cuda") else original(platform)

    # It would ask the CPU backend; attention.obstacle has checked the card's capability.
    fused_attention_stablehlo.check_compute_capability = lambda least: True
    canonical.knows_cards = True  # type: ignore[attr-defined]
    xla_bridge.canonicalize_platform = canonical
    try:
        fused_attention_stablehlo.check_cudnn_version()
    except RuntimeError:  # cuDNN is not installed, which compiling does not need
        whole = CUDNN[0] * 10000 + CUDNN[1] * 100 + CUDNN[2]
        fused_attention_stablehlo.check_cudnn_version = lambda: whole
