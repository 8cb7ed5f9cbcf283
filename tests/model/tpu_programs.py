"""Run by test_tpu_compile.py in a process of its own: programs through the real TPU compiler.

    python tpu_programs.py NAME...

Compiles each program for TPU v5e without running it, and prints what came out as JSON.
"""

import json
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxrl_async.algorithms.columns import COLUMNS, DeviceBatch
from jaxrl_async.algorithms.objective import Coefficients
from jaxrl_async.config import schema
from jaxrl_async.config.lora_section import LoraSection
from jaxrl_async.mesh import SAMPLER_RULES, TRAINER_RULES, arranged, make_mesh, shapes_on, shardings
from jaxrl_async.model import kernels
from jaxrl_async.model.attention import reference, sequence_attention, tree_splash
from jaxrl_async.model.frozen_base import BaseForm, base_shapes, base_table
from jaxrl_async.model.grouped import grouped_product
from jaxrl_async.model.kernels import Scoring
from jaxrl_async.model.latent_pages import attend_latent_pages
from jaxrl_async.model.lora import adapter_table, lora_of
from jaxrl_async.model.spec import ModelSpec, Weight, weight_table
from jaxrl_async.model.tpu_pages import attend_wide_pages
from jaxrl_async.sampler.batch.prefill import (
    Sizes,
    insert_args,
    inserted_sizes,
    make_chunk,
    prefill_sizes,
)
from jaxrl_async.sampler.device.engine import Engine, weight_shardings
from jaxrl_async.sampler.device.engine_spec import EngineSpec
from jaxrl_async.sampler.device.program_arguments import DecodeArgs, ScoreArgs
from jaxrl_async.sampler.device.sampling import Controls, Mix, sample
from jaxrl_async.sampler.device.sampling_kernel import sample_by_kernel
from jaxrl_async.trainer.learning_settings import LearningSettings
from jaxrl_async.trainer.objectives.policy_objective import (
    PolicyContext,
    PolicyObjective,
    policy_update,
)
from jaxrl_async.trainer.update import Update
from jaxrl_async.trainer.update_programs import (
    NOTHING_FROZEN,
    PROBE_LENGTH,
    Frozen,
    GradSum,
    TrainState,
)

ROW = 512
"""Tokens in a training row."""
TOPOLOGY = topologies.get_topology_desc(platform="tpu", topology_name="v5e:4x4")


def mesh_of(**axes: int) -> Mesh:
    section = schema.AxesSection(**axes)
    return make_mesh(section, TOPOLOGY.devices[: section.num_devices])


def array(mesh: Mesh, shape: tuple[int, ...], dtype: Any, *axes: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, PartitionSpec(*axes)))


def compiled(function: Any, *arguments: Any, **static: Any) -> dict[str, Any]:
    """Call sites of kernels; on a chip, bytes of temporary memory and of arguments that results
    lie in."""
    lower = function.lower if hasattr(function, "lower") else jax.jit(function).lower
    program = lower(*arguments, **static).compile()
    memory = program.memory_analysis()
    return {
        "kernels": program.as_text().count('custom_call_target="tpu_custom_call"'),
        "temp_bytes": memory.temp_size_in_bytes,
        "alias_bytes": memory.alias_size_in_bytes,
        "argument_bytes": memory.argument_size_in_bytes,
    }


# ---- programs


def attention_gradient(
    attention: Any,
    *,
    T: int = 1024,
    H: int = 8,
    N: int = 2,
    K: int = 128,
    dtype: Any = jnp.bfloat16,
) -> dict[str, Any]:
    """The output and the three gradients of two rows on one chip."""
    mesh = mesh_of()

    def program(q: Any, k: Any, v: Any, segments: Any) -> Any:
        def total(q: Any, k: Any, v: Any) -> Any:
            return attention(q, k, v, segments).astype(jnp.float32).sum()

        return jax.value_and_grad(total, (0, 1, 2))(q, k, v)

    q, k = array(mesh, (2, T, H, K), dtype), array(mesh, (2, T, N, K), dtype)
    return compiled(program, q, k, k, array(mesh, (2, T), jnp.int32))


def policy_step(
    mesh: Mesh,
    *,
    remat: str = "layer",
    kv_heads: int = 4,
    experts: int = 0,
    shape: Any = None,
    **trainer: Any,
) -> tuple[Update[PolicyObjective], Any]:
    """A small policy's update on a mesh, and its weights."""
    sizes = schema.ArchitectureSection(
        width=256,
        heads=8,
        kv_heads=kv_heads,
        mlp=512,
        experts=experts,
        **{"head_dim": 128}
        | (shape or {"family": "qwen3_moe" if experts else "qwen3", "layers": 2}),
    )
    spec = ModelSpec.from_architecture(sizes, 512)
    settings = LearningSettings(
        mesh=mesh,
        trainer=schema.TrainerSection(micro_batch_tokens=4 * ROW, **trainer),
        row_length=ROW,
        dtype=jnp.bfloat16,
        remat=remat,
    )
    step = policy_update(spec, settings, schema.AlgorithmSection(), total_steps=10)
    table = weight_table(spec)
    params = jax.tree.map(
        lambda w, s: jax.ShapeDtypeStruct(w.shape, jnp.float32, sharding=s),
        table,
        shardings(table, mesh, TRAINER_RULES),
        is_leaf=lambda w: isinstance(w, Weight),
    )
    return step, params


def on_base(mesh: Mesh, table: Any, shapes: Any, rules: Any) -> Any:
    """Shapes of a table's weights, placed by the rules of a role."""
    return shapes_on(shapes, shardings(table, mesh, rules))


def step_on_base(**axes: int) -> dict[str, Any]:
    """The gradient of an adapter of experts in 4 bits."""
    mesh, form = mesh_of(**axes), BaseForm(kind="nf4", group=64)
    sizes = schema.ArchitectureSection(
        family="qwen3_moe", layers=2, width=256, heads=8, kv_heads=4, head_dim=128, mlp=512,
        experts=8,
    )  # fmt: skip
    spec = ModelSpec.from_architecture(sizes, 512)
    lora = lora_of(spec, LoraSection(rank=8))
    settings = LearningSettings(
        mesh=mesh,
        trainer=schema.TrainerSection(micro_batch_tokens=4 * ROW),
        row_length=ROW,
        dtype=jnp.bfloat16,
        remat="layer",
        lora=lora,
    )
    step = policy_update(spec, settings, schema.AlgorithmSection(), total_steps=10)
    adapter = adapter_table(spec, lora)
    shapes = jax.tree.map(
        lambda w: jax.ShapeDtypeStruct(w.shape, jnp.float32),
        adapter,
        is_leaf=lambda w: isinstance(w, Weight),
    )
    base = on_base(
        mesh,
        base_table(weight_table(spec), form),
        base_shapes(spec, form, jnp.bfloat16),
        TRAINER_RULES,
    )
    return gradient_of(step, on_base(mesh, adapter, shapes, TRAINER_RULES), Frozen(base=base))


def train_step(
    *,
    remat: str = "layer",
    kv_heads: int = 4,
    experts: int = 0,
    share_prefixes: bool = False,
    shape: Any = None,
    **axes: int,
) -> dict[str, Any]:
    """The gradient of one micro-batch of the policy loss, with the attention that auto takes."""
    mesh = mesh_of(**axes)
    step, params = policy_step(
        mesh,
        remat=remat,
        kv_heads=kv_heads,
        experts=experts,
        shape=shape,
        share_prefixes=share_prefixes,
    )
    return gradient_of(step, params, NOTHING_FROZEN)


def gradient_of(step: Update[PolicyObjective], params: Any, frozen: Frozen) -> dict[str, Any]:
    """Compile the gradient of one micro-batch, in half of the time: its kernels are what counts."""
    mesh = step.settings.mesh
    scalar = partial(array, mesh, ())
    spec = step.programs.batch_sharding.spec
    batch = DeviceBatch(
        **{
            name: array(mesh, (step.micro_rows, ROW), jnp.dtype(COLUMNS[name].dtype), *spec)
            for name in DeviceBatch._fields
            if not COLUMNS[name].optional
        }
    )
    jax.config.update("jax_exec_time_optimization_effort", -1.0)
    found = compiled(
        step.programs.accumulate,
        params,
        GradSum(params, scalar(jnp.float32)),
        batch,
        PolicyContext(scalar(jnp.int32), Coefficients(scalar(jnp.float32), scalar(jnp.float32))),
        frozen,
    )
    jax.config.update("jax_exec_time_optimization_effort", 0.0)
    return found


def optimizer_step(*offload: str) -> dict[str, Any]:
    """AdamW's step on all chips, and what it holds in addition to its temporaries."""
    mesh = mesh_of(fsdp=16)
    step, params = policy_step(mesh, offload=offload)
    of_state = step.programs.state_shardings
    moments = jax.eval_shape(step.programs._optimizer.init, params)
    placed = jax.tree.map(
        lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), moments, of_state.opt_state
    )
    scalar = partial(array, mesh, ())
    state = TrainState(params, placed, scalar(jnp.int32))
    sums = GradSum(params, scalar(jnp.float32))
    tried = array(mesh, (PROBE_LENGTH,), jnp.int32)
    memory = (
        step.programs.apply.lower(state, sums, NOTHING_FROZEN, tried).compile().memory_analysis()
    )
    return {
        "moment_bytes": 2 * sum(x.size * 4 for x in jax.tree.leaves(params)) // mesh.size,
        "device_bytes": memory.argument_size_in_bytes,
        "host_bytes": memory.host_argument_size_in_bytes,
    }


def over_slices() -> dict[str, Any]:
    """Slice and coordinates of each device of a mesh over two slices."""
    two = topologies.get_topology_desc(platform="tpu", topology_name="v5e:4x4", num_slices=2)
    devices = arranged(schema.AxesSection(data=4, fsdp=2, tensor=4), two.devices)
    return {
        "slices": np.vectorize(lambda d: d.slice_index)(devices).tolist(),
        "places": [[list(d.coords) for d in row.flat] for row in devices],
    }


def ragged(
    *, tokens: int, H: int, N: int, K: int = 128, page: int = 32, tensor: int = 1, dtype: Any
) -> dict[str, Any]:
    """Ragged paged attention of 64 sequences of up to 2,048 tokens."""
    mesh = mesh_of(tensor=tensor)
    ints = partial(array, mesh, dtype=jnp.int32)
    return compiled(
        partial(kernels.ragged_paged, mesh=mesh),
        array(mesh, (tokens, H, K), dtype, None, "tensor"),
        array(mesh, (4096, page, 2 * N, K), dtype, None, None, "tensor"),
        ints((64,)),
        ints((64, 2048 // page)),
        ints((65,)),
        ints((1,)),
    )


def grouped_gradient() -> dict[str, Any]:
    """The gradient of 2,048 rows that 64 MiB of frozen experts multiply."""
    mesh = mesh_of()

    def total(rows: Any, matrices: Any, sizes: Any) -> Any:
        return grouped_product(rows, matrices, sizes, jnp.bfloat16).astype(jnp.float32).sum()

    return compiled(
        jax.grad(total),
        array(mesh, (2048, 1024), jnp.bfloat16),
        array(mesh, (64, 1024, 512), jnp.bfloat16),
        array(mesh, (64,), jnp.int32),
    )


def wide(
    *,
    H: int,
    N: int,
    K: int = 256,
    tensor: int = 1,
    window: int = 0,
    sinks: bool = False,
    dtype: Any = jnp.bfloat16,
) -> dict[str, Any]:
    """Our own kernel's decode step of 64 sequences of up to 2,048 tokens, 256 MiB of pages."""
    mesh = mesh_of(tensor=tensor)
    attend = partial(attend_wide_pages, mesh=mesh)
    return compiled(
        lambda q, pages, lengths, tables, sinks_H: attend(
            q, pages, lengths, tables, Scoring(window=window), sinks_H if sinks else None
        ),
        array(mesh, (64, H, K), dtype, None, "tensor"),
        array(mesh, (4096, 32, 2 * N, -(-K // 128) * 128), dtype, None, None, "tensor"),
        array(mesh, (64,), jnp.int32),
        array(mesh, (64, 64), jnp.int32),
        array(mesh, (H,), jnp.float32, "tensor"),
    )


def latent(
    *,
    tokens: int = 64,
    H: int = 128,
    K: int = 576,
    rank: int = 512,
    page: int = 32,
    dtype: Any = jnp.bfloat16,
    kind: str = "v5e:4x4",
    tensor: int = 1,
) -> dict[str, Any]:
    """Latent attention of 64 sequences of up to 2,048 tokens."""
    topology = topologies.get_topology_desc(platform="tpu", topology_name=kind)
    mesh = make_mesh(schema.AxesSection(tensor=tensor), topology.devices[:tensor])
    ints = partial(array, mesh, dtype=jnp.int32)
    pages = (4096, page, -(-K // 128) * 128)
    return compiled(
        partial(attend_latent_pages, rank=rank, mesh=mesh),
        array(mesh, (tokens, H, K), dtype, None, "tensor"),
        array(mesh, pages, dtype),
        ints((64,)),
        ints((64, 2048 // page)),
        ints((65,)),
        ints((1,)),
    ) | {"pages_bytes": int(np.prod(pages)) * jnp.dtype(dtype).itemsize}


def draw(rows: int, vocab: int, mix: Mix, *, by_kernel: bool = True) -> dict[str, Any]:
    """Drawing a token for each row, in one pass of the kernel or by XLA's programs."""
    mesh = mesh_of()
    numbers = partial(array, mesh, (rows,))
    controls = Controls(
        numbers(jnp.float32), numbers(jnp.int32), numbers(jnp.float32), numbers(jnp.float32)
    )
    kernel = partial(sample_by_kernel, mesh=mesh) if by_kernel else None
    return compiled(
        lambda *given: sample(*given, mix, kernel),
        array(mesh, (rows, vocab), jnp.float32),
        controls,
        array(mesh, (rows, 2), jnp.uint32),
        numbers(jnp.int32),
    )


def sampler_program(
    name: str,
    *,
    kv_heads: int = 2,
    shape: Any = None,
    base: str = "",
    slots: int = 16,
    context_pages: int = 2,
    max_length: int = 512,
    budget: int = 256,
    vocab: int = 1024,
    **axes: int,
) -> dict[str, Any]:
    """A prefill or a whole decode block of the sampler's engine, on one chip or on these axes."""
    mesh = mesh_of(**axes)
    sizes = schema.ArchitectureSection(
        width=256,
        heads=4 * kv_heads,
        kv_heads=kv_heads,
        mlp=512,
        **{"head_dim": 128} | (shape or {"layers": 2}),
    )
    spec = ModelSpec.from_architecture(sizes, vocab)
    engine_spec = EngineSpec(
        model=spec, slots=slots, reserve=8, max_length=max_length, pages=256, page_tokens=32,
        block=16, mesh=mesh, dtype=jnp.bfloat16, ragged=True,
    )  # fmt: skip
    engine = Engine(engine_spec)

    params = jax.tree.map(
        lambda w, s: jax.ShapeDtypeStruct(w.shape, jnp.bfloat16, sharding=s),
        weight_table(spec),
        shardings(weight_table(spec), mesh, SAMPLER_RULES),
        is_leaf=lambda w: isinstance(w, Weight),
    )
    if base:
        form = BaseForm(kind=base, group=64)
        shapes = base_shapes(spec, form, jnp.bfloat16)
        params = on_base(mesh, base_table(weight_table(spec), form), shapes, SAMPLER_RULES)
    prepared = jax.eval_shape(engine.programs.prepare, params)
    weights = shapes_on(prepared, weight_shardings(spec, mesh, params, prepared))
    state = engine.state_shapes()
    pages_bytes = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(state.kv))
    if name == "insert":
        chunk = make_chunk([], prefill_sizes(engine_spec, budget)[-1], engine_spec)
        prefix, _ = jax.eval_shape(engine.programs.prefill_in_pages, weights, state.kv, chunk.args)
        size = inserted_sizes(engine_spec)[-1]
        put = insert_args(chunk.unwritten, [], engine_spec, 0, size=size)
        return {**compiled(engine.programs.insert, prefix, state, put), "pages_bytes": pages_bytes}
    if name == "prefill":
        sizes = prefill_sizes(engine_spec, budget) or [Sizes(4, 64, 256, 2)]
        chunk = make_chunk([], sizes[-1], engine_spec).args
        if chunk.cells is None:
            return compiled(engine.programs.prefill, weights, state.kv, chunk, state.states)
        found = compiled(engine.programs.prefill_in_pages, weights, state.kv, chunk)
        return {**found, "pages_bytes": pages_bytes}
    if name == "score":
        chunk = make_chunk([], prefill_sizes(engine_spec, budget)[-1], engine_spec).args
        n, given = len(chunk.token_ids), np.zeros(len(chunk.token_ids), np.int32)
        ids = np.zeros((len(chunk.lengths), 8), np.int32)
        scored = ScoreArgs(given, np.int32(n), given, given, ids)
        program = engine.programs.score_in_pages
        found = compiled(program, weights, state.kv, chunk, scored, top=8)
        here = {"pages_bytes": pages_bytes // mesh.size, "logits_bytes": 4 * n * vocab // mesh.size}
        return {**found, **here, "tokens": n}
    run = DecodeArgs(
        rows=np.arange(slots, dtype=np.int32),
        reserve=np.zeros(8, np.int32),
        num_reserve=np.int32(0),
        lengths=np.full(slots + 8, 40, np.int32),
        num_sampled=np.zeros(slots + 8, np.int32),
        tables=np.zeros(
            (slots + 8, len(engine_spec.kv_layout.groups), context_pages + 2), np.int32
        ),
        steps=np.int32(16),
    )
    program = engine.programs.generate.lower(
        weights, state, run, context_pages=context_pages, mix=Mix()
    ).compile()
    kernels = [line for line in program.as_text().splitlines() if "tpu_custom_call" in line]
    draws = sum(line.lstrip().startswith("%draw_token") for line in kernels)
    return {
        "kernels": len(kernels) - draws,
        "draws": draws,
        "temp_bytes": program.memory_analysis().temp_size_in_bytes,
        "pages_bytes": pages_bytes,
        "processes": len({d.process_index for d in mesh.devices.flat}),
        "read_whole": all(
            s.is_fully_replicated for s in jax.tree.leaves(program.output_shardings[1])
        ),
    }


def chosen() -> dict[str, Any]:
    """What auto takes on TPU devices."""
    return {"is_splash": sequence_attention("auto", mesh=mesh_of()) is kernels.splash}


GEMMA2 = {"family": "gemma2", "layers": 4, "window": 100}
DEEPSEEK = {"family": "deepseek_v3", "layers": 3, "head_dim": 192}
"""A dense layer and two with experts; heads as wide as DeepSeek-V3's, half of which turns."""
GPT_OSS = {"family": "gpt_oss", "layers": 4, "window": 100}
NEXT = {"family": "qwen3_next", "layers": 4}
"""Three gated delta nets and attention, whose heads are as wide as those of the published one."""
QWEN3_5 = {"family": "qwen3_5_text", "layers": 8, "head_dim": 256}
GEMMA3 = {"family": "gemma3_text", "layers": 12, "window": 100}

PROGRAMS: dict[str, Callable[[], dict[str, Any]]] = {
    "sampler prefill": partial(sampler_program, "prefill"),
    "sampler score": partial(sampler_program, "score", max_length=4096, budget=4096, vocab=151_936),
    "sampler score on tensor": partial(
        sampler_program,
        "score",
        kv_heads=16,
        tensor=16,
        max_length=4096,
        budget=4096,
        vocab=151_936,
    ),
    "sampler block": partial(sampler_program, "block"),
    "sampler block of long contexts": partial(
        sampler_program, "block", slots=256, context_pages=1024
    ),
    "sampler prefill of long contexts": partial(
        sampler_program, "prefill", slots=256, max_length=32768, budget=2048
    ),
    "sampler prefill of very long contexts": partial(
        sampler_program, "prefill", slots=256, max_length=131072, budget=128
    ),
    "sampler insert": partial(sampler_program, "insert", slots=64),
    "sampler prefill over hosts": partial(sampler_program, "prefill", kv_heads=16, tensor=16),
    "sampler block over hosts": partial(sampler_program, "block", kv_heads=16, tensor=16),
    "sampler prefill of gemma3": partial(sampler_program, "prefill", shape=GEMMA3),
    "sampler block of gemma3": partial(sampler_program, "block", shape=GEMMA3),
    "sampler block of gemma2": partial(sampler_program, "block", shape=GEMMA2),
    "sampler block of gpt_oss": partial(
        sampler_program,
        "block",
        shape={**GPT_OSS, "experts": 8, "head_dim": 64},
        expert=8,
        tensor=2,
    ),
    "sampler block of deepseek_v3": partial(
        sampler_program, "block", kv_heads=4, shape={**DEEPSEEK, "experts": 8}, expert=8, tensor=2
    ),
    "sampler prefill of deepseek_v3": partial(
        sampler_program, "prefill", kv_heads=4, shape={**DEEPSEEK, "experts": 8}, expert=8, tensor=2
    ),
    "sampler block of qwen3_next": partial(
        sampler_program, "block", shape={**NEXT, "experts": 8}, expert=8, tensor=2
    ),
    "sampler prefill of qwen3_next": partial(
        sampler_program, "prefill", shape={**NEXT, "experts": 8}, expert=8, tensor=2
    ),
    "sampler block of qwen3_5 in nf4": partial(
        sampler_program, "block", shape=QWEN3_5, base="nf4", tensor=2
    ),
    "step of qwen3_next": partial(train_step, fsdp=2, expert=4, tensor=2, experts=8, shape=NEXT),
    "step of qwen3_5 on context": partial(train_step, fsdp=4, context=4, shape=QWEN3_5),
    "sampler block of nf4": partial(sampler_program, "block", base="nf4"),
    "step of nf4": partial(step_on_base, fsdp=4, tensor=2, expert=2),
    "chosen": chosen,
    "splash": partial(attention_gradient, kernels.splash),
    "splash float32": partial(attention_gradient, kernels.splash, dtype=jnp.float32),
    "splash narrow heads": partial(attention_gradient, kernels.splash, H=4, K=32),
    "splash wide heads": partial(attention_gradient, kernels.splash, N=8, K=256),
    "splash odd length": partial(attention_gradient, kernels.splash, T=1100, N=1),
    "splash long": partial(attention_gradient, kernels.splash, T=4096),
    "splash long blocks": partial(
        attention_gradient, kernels.splash_on(TOPOLOGY.devices[0], jnp.bfloat16), T=2048
    ),
    "splash long blocks of wide heads": partial(
        attention_gradient, kernels.splash_on(TOPOLOGY.devices[0], jnp.bfloat16), T=2048, K=256
    ),
    "trees": partial(attention_gradient, tree_splash),
    "trees float32": partial(attention_gradient, tree_splash, dtype=jnp.float32),
    "trees odd length": partial(attention_gradient, tree_splash, T=1100, N=1),
    "trees long": partial(attention_gradient, tree_splash, T=4096),
    "reference long": partial(attention_gradient, reference, T=4096),
    "step on fsdp x tensor": partial(train_step, fsdp=4, tensor=4),
    "step with more tensor than kv heads": partial(
        train_step, fsdp=2, tensor=4, kv_heads=2, remat="dots"
    ),
    "step that keeps attention": partial(train_step, fsdp=4, tensor=4, remat="attention"),
    "step that shares prefixes": partial(
        train_step, fsdp=4, tensor=4, remat="attention", share_prefixes=True
    ),
    "step that shares prefixes on context": partial(
        train_step, fsdp=4, context=4, share_prefixes=True
    ),
    "step that keeps attention on context": partial(
        train_step, fsdp=4, context=4, remat="attention"
    ),
    "step on context": partial(train_step, fsdp=4, context=4),
    "step of gemma2": partial(train_step, fsdp=4, tensor=4, shape=GEMMA2),
    "step of gemma3 on context": partial(train_step, fsdp=4, context=4, shape=GEMMA3),
    "step of gemma3 that shares prefixes": partial(
        train_step, fsdp=4, tensor=4, share_prefixes=True, shape=GEMMA3
    ),
    "step on expert": partial(train_step, fsdp=4, expert=4, experts=8),
    "step of gpt_oss": partial(train_step, fsdp=2, expert=4, tensor=2, experts=8, shape=GPT_OSS),
    "step of gpt_oss that shares prefixes": partial(
        train_step, fsdp=4, expert=4, experts=8, share_prefixes=True, shape=GPT_OSS
    ),
    "step of deepseek_v3": partial(
        train_step, fsdp=2, expert=4, tensor=2, experts=8, shape=DEEPSEEK
    ),
    "step of deepseek_v3 on context": partial(
        train_step, expert=4, context=4, experts=8, shape=DEEPSEEK
    ),
    "optimizer": optimizer_step,
    "optimizer offloaded": partial(optimizer_step, "optimizer"),
    "slices": over_slices,
    "grouped gradient": grouped_gradient,
    "draw": partial(draw, 128, 151_936, Mix(greedy=True)),
    "draw truncated": partial(draw, 128, 151_936, Mix(truncated=True, greedy=True)),
    "draw with masks": partial(draw, 128, 151_936, Mix(truncated=True, extras=True)),
    "draw odd": partial(draw, 5, 262_147, Mix(truncated=True)),
    "draw by xla": partial(draw, 128, 151_936, Mix(greedy=True), by_kernel=False),
    "draw truncated by xla": partial(draw, 128, 151_936, Mix(truncated=True), by_kernel=False),
    "ragged decode": partial(ragged, tokens=64, H=32, N=8, dtype=jnp.bfloat16),
    "ragged chunks": partial(ragged, tokens=2048, H=32, N=8, dtype=jnp.bfloat16),
    "ragged narrow heads": partial(ragged, tokens=64, H=14, N=2, K=64, dtype=jnp.bfloat16),
    "ragged float32": partial(ragged, tokens=64, H=12, N=2, dtype=jnp.float32),
    "ragged on tensor": partial(ragged, tokens=64, H=32, N=8, tensor=4, dtype=jnp.bfloat16),
    "ragged small pages": partial(ragged, tokens=64, H=16, N=8, page=8, dtype=jnp.bfloat16),
    "wide decode": partial(wide, H=8, N=4),
    "wide one head": partial(wide, H=4, N=1),
    "wide on tensor": partial(wide, H=32, N=8, tensor=4),
    "wide float32": partial(wide, H=16, N=8, dtype=jnp.float32),
    "wide sinks in a window": partial(wide, H=64, N=8, K=64, window=128, sinks=True),
    "latent decode": latent,
    "latent decode on v6e": partial(latent, kind="v6e:2x2"),
    "latent decode on tensor": partial(latent, tensor=4),
    "latent decode in float32": partial(latent, H=16, dtype=jnp.float32),
    "latent decode of small heads": partial(latent, H=4, K=24, rank=16),
    "latent decode of small pages": partial(latent, H=16, page=8),
    "latent chunks": partial(latent, tokens=2048),
    "latent chunks on v6e": partial(latent, tokens=2048, kind="v6e:2x2"),
    "latent chunks in float32": partial(latent, tokens=512, page=128, dtype=jnp.float32),
    "latent chunks of large pages": partial(latent, tokens=2048, page=1024, dtype=jnp.float32),
    "latent chunks of small heads": partial(latent, tokens=512, H=4, K=24, rank=16),
    "ragged large pages": partial(ragged, tokens=64, H=16, N=16, page=256, dtype=jnp.bfloat16),
}


if __name__ == "__main__":
    names = sys.argv[1:] or list(PROGRAMS)
    print(json.dumps({name: PROGRAMS[name]() for name in names}))
