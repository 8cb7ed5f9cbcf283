"""Advice if a plan does not fit: which settings to change and how much that saves. Pure
functions."""

from jaxrl_async.config import schema
from jaxrl_async.plan.chips import GIB
from jaxrl_async.plan.plan import Plan


def advice(plan: Plan, config: schema.Config) -> list[str]:
    """Return lines of advice, largest savings first; none if everything fits."""
    lines = []
    for side, memory, savings in (
        ("trainer", plan.trainer.memory, _of_trainer(plan, config)),
        ("sampler", plan.sampler.memory, _of_sampler(plan, config)),
    ):
        if memory.fits:
            continue
        short = memory.total_bytes - memory.usable_bytes
        word = plan.trainer.where.chip.word
        lines.append(
            f"a {side} {word} lacks {short / GIB:.2f} GiB. Changes that save memory on it:"
        )
        lines += [
            f"  {saved / GIB:6.2f} GiB  {what}"
            for saved, what in sorted(savings, key=lambda line: -line[0])
            if saved > 0
        ]
    return lines


def _of_trainer(plan: Plan, config: schema.Config) -> list[tuple[float, str]]:
    kinds, word = plan.trainer.memory.kinds, plan.trainer.where.chip.word
    shards = config.mesh.trainer.fsdp
    references = kinds.get("reference", 0.0) + kinds.get("resting reference", 0.0)
    state = sum(kinds.get(k, 0.0) for k in ("parameters", "optimiser", "gradients")) + references
    temporaries = kinds.get("activations and temporaries", 0.0)
    rows = config.trainer.micro_batch_tokens // config.row_length
    savings = [
        (state / 2, f"mesh.trainer.fsdp={2 * shards}, on twice as many {word}s"),
        (
            kinds.get("weights in transfer", 0.0) / 2,
            f"mesh.sampler.tensor={2 * config.mesh.sampler.tensor}: the weights are sent in "
            "smaller parts",
        ),
        (
            config.trainer.logprob_chunk / 2 * plan.spec.vocab * 4 * 2,
            f"trainer.logprob_chunk={max(1, config.trainer.logprob_chunk // 2)} (its logits and "
            "their gradient)",
        ),
    ]
    if config.model.remat in ("none", "dots"):
        savings.append((temporaries * 0.6, "model.remat=layer (about; compile to know)"))
    if config.model.remat == "attention":
        tokens = config.trainer.micro_batch_tokens / plan.trainer.where.num_devices
        kept_bytes = 2.0 * plan.spec.layers * plan.spec.heads * plan.spec.head_dim * tokens
        savings.append((kept_bytes, "model.remat=layer"))
    if rows >= 2 * plan.trainer.where.num_devices:
        half = config.trainer.micro_batch_tokens // 2
        savings.append((temporaries / 2, f"trainer.micro_batch_tokens={half} (about)"))
    if "optimizer" not in config.trainer.offload:
        savings.append((kinds.get("optimiser", 0.0), "trainer.offload=[optimizer], to host memory"))
    if config.model.param_dtype == "float32":
        saved = (kinds.get("parameters", 0.0) + references) / 2
        what = "model.param_dtype=bfloat16 with trainer.rounding=stochastic (no float32 masters)"
        savings.append((saved, what))
    elif config.trainer.rounding == "masters":
        saved = kinds.get("optimiser", 0.0) / 3
        savings.append((saved, "trainer.rounding=stochastic, in place of float32 masters"))
    return savings


def _of_sampler(plan: Plan, config: schema.Config) -> list[tuple[float, str]]:
    kinds, memory = plan.sampler.memory.kinds, plan.sampler.memory
    weights = kinds.get("weights", 0.0) + kinds.get("next weights", 0.0)
    short, word = memory.total_bytes - memory.usable_bytes, plan.sampler.where.chip.word
    pages, devices = kinds.get("KV cache", 0.0), plan.sampler.where.num_devices
    savings = [
        (
            weights / 2,
            f"mesh.sampler.tensor={2 * config.mesh.sampler.tensor}, on twice the {word}s",
        )
    ]
    if pages > 1.02 * max(short, 0.0):
        now_mib = config.sampler.kv_memory_mib or pages * devices / 2**20
        mib = (1 - short * 1.02 / pages) * now_mib
        savings.append((short * 1.02, f"sampler.kv_memory_mib={int(mib)} (fewer rows at once)"))
    if config.weights.eight_bits is None:
        savings.append((weights / 2, "weights.dtype=int8 (the matrices; a mismatch to correct)"))
    return savings
