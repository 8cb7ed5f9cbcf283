"""HBM of one device by kind, on either side: the resident part, and what each program adds."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from jaxrl_async.plan.compiled import Compiled


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """Memory of one side, in bytes per device."""

    kinds: Mapping[str, float]  # at the moment of the peak
    moment: str  # the program that is running then
    usable_bytes: float

    @property
    def total_bytes(self) -> float:
        """The sum of all kinds."""
        return sum(self.kinds.values())

    @property
    def fits(self) -> bool:
        """Whether everything fits the chip's memory."""
        return self.total_bytes <= self.usable_bytes

    @property
    def largest(self) -> str:
        """The kind that takes the most memory."""
        return max(self.kinds, key=lambda name: self.kinds[name])


ARGUMENTS = {
    "gradient": ("parameters", "gradients", "reference", "frozen base"),
    "update": ("parameters", "gradients", "optimiser"),
    "logprobs": ("parameters", "frozen base"),
    "cast": ("parameters", "weights in transfer"),
    "prepare": ("next weights", "weights"),
    "prefill": ("weights", "KV cache", "prefilled"),
    "decode": ("weights", "KV cache", "logits"),
    "reshard": ("next weights",),
}
"""Kinds that are arguments or results of a program, so the compiler's number includes them.
All others are added to it."""
MOMENTARY = (
    "activations and temporaries", "gradients", "weights in transfer", "next weights", "prefilled",
)  # fmt: skip
"""Kinds that exist only while their side computes."""


def trainer_memory(
    programs: Sequence[Compiled],
    *,
    params: float,
    gradients: float,
    optimizer: float,
    reference: float,
    resting: float = 0.0,
    base: float = 0.0,
    transfer: float,
    usable: float,
) -> Memory:
    """Return the trainer's memory at its peak.

    The weights in transfer stay until every sampler has taken them, possibly in the next step, so
    they are also added to the gradient and the update.

    Args:
        programs: the trainer's compiled programs.
        params, gradients, optimizer: bytes of the training state.
        reference: bytes of a reference that is part of the gradient program.
        resting: bytes of a reference that only a pass before the gradient uses.
        base: bytes of the frozen weights below an adapter.
        transfer: bytes of the weights in transfer.
        usable: bytes that programs may use.
    """
    by_name = {p.name: p for p in programs}
    code = sum(p.code_bytes for p in programs)
    resident = {
        "parameters": params, "optimiser": optimizer, "reference": reference,
        "resting reference": resting, "frozen base": base,
        "weights in transfer": transfer, "code": code,
    }  # fmt: skip
    moments: dict[str, dict[str, float]] = {
        "gradient": {"gradients": gradients},
        "update": {"gradients": gradients},
        "cast": {},
    }
    if "logprobs" in by_name:
        moments["logprobs"] = {}
    return _worst(resident, moments, by_name, usable)


def sampler_memory(
    programs: Sequence[Compiled],
    *,
    weights: float,
    sent: float,
    pages: float,
    state: float,
    opponents: float = 0.0,
    usable: float,
) -> Memory:
    """Return a sampler's memory at its peak.

    The next weights arrive while the present ones are in use; at the swap they are unpacked in
    their place. An adapter is unpacked next to the one in use. Its base weights are unpacked
    once, before the KV cache exists.

    Args:
        programs: the sampler's compiled programs.
        weights: bytes of the weights that it generates with.
        sent: bytes of each version that is sent: all weights, or an adapter.
        pages, state: bytes of the KV cache, and of the rest of the decode state.
        opponents: bytes of the weights and KV caches of opponents in games.
        usable: bytes that programs may use.
    """
    adapts = sent < weights
    by_name = {p.name: p for p in programs}
    code = sum(p.code_bytes for p in programs)
    resident = {
        "weights": weights, "next weights": 2 * sent if adapts else sent, "KV cache": pages,
        "logits": state, "opponents": opponents, "code": code,
    }  # fmt: skip
    moments: dict[str, dict[str, float]] = {"prepare": {}, "decode": {}, "prefill": {}}
    if adapts:
        moments["prepare"] = {"next weights": weights, "KV cache": 0.0, "logits": 0.0}
    made = by_name["prefill"]
    moments["prefill"]["prefilled"] = made.output_bytes - made.alias_bytes  # added to the pages
    if "reshard" in by_name:
        moments["reshard"] = {}
    return _worst(resident, moments, by_name, usable)


def together_on_a_chip(own: Memory, other: Memory, owner: str) -> Memory:
    """Return a side's peak memory on chips that it shares with the other side (named `whose`). The
    sides alternate, and each keeps what it needs for its next turn."""
    lasting = {f"{owner}: {kind}": v for kind, v in other.kinds.items() if kind not in MOMENTARY}
    return replace(own, kinds={**own.kinds, **lasting})


def _worst(
    resident: Mapping[str, float],
    moments: Mapping[str, Mapping[str, float]],
    programs: Mapping[str, Compiled],
    usable: float,
) -> Memory:
    """Return the memory at the peak. A program that the compiler rejected counts as requested."""
    candidates = []
    for name, more in moments.items():
        kinds = {**resident, **more}
        program = programs[name]
        used = sum(v for k, v in kinds.items() if k in ARGUMENTS[name])
        requested = max(0.0, program.needed_bytes - used)
        kinds["activations and temporaries"] = max(program.temp_bytes, requested)
        candidates.append(
            Memory(
                kinds={k: v for k, v in kinds.items() if v},
                moment=name,
                usable_bytes=usable,
            )
        )
    return max(candidates, key=lambda m: m.total_bytes)
