"""Settings of the sampler, of staleness, of the replay buffer and of priorities.

Needs no JAX.
"""

from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import Field

from jaxrl_async.config.section import (
    Count,
    NonNegative,
    Positive,
    ReadWith,
    Section,
    check,
)

OF_NATIVE = ReadWith("engine", ("native",), switches=())
"""Marks settings for which an external server has its own flags."""


class SamplerSection(Section):
    engine: Literal["native", "jetstream", "vllm"] = "native"
    """Engine that samples tokens: native (this package's), jetstream (engine_class) or vllm
    (servers at engine_urls, with mesh.samplers_in=external)."""
    engine_class: Annotated[str | None, ReadWith("engine", ("jetstream",), switches=())] = Field(
        None, pattern=r"^.+\.py:\w+$"
    )
    """FILE.py:CLASS, a subclass of jetstream.engine.engine_api.Engine; null: this package's sampler
    behind that interface."""
    engine_urls: tuple[str, ...] = ()
    """Addresses of vLLM servers, such as http://127.0.0.1:8000, which must serve only this run."""
    slots: Count | None = 64
    """Sequences that each sampler decodes concurrently (engine=vllm: concurrent requests to each
    server); null: as many as kv_memory_mib holds."""
    reserve: Annotated[float, OF_NATIVE] = Field(0.5, ge=0, le=1)
    """Sequences prefilled ahead to take over slots that become free within a block, as a share of
    the slots."""
    max_length: Positive = 128
    """Maximum length of a sequence, prompt plus answer, tokens."""
    max_new_tokens: Positive = 64
    """Maximum length of an answer, tokens."""
    block: Count = 8
    """Decode steps per dispatch; weights can be swapped between two dispatches."""
    prefill_chunk: Annotated[Positive, OF_NATIVE] = 2048
    """Prompt tokens to prefill between two blocks."""
    page_tokens: Annotated[Positive, OF_NATIVE] = 32
    """Tokens per page of the KV cache."""
    kv_memory_mib: Annotated[float | None, OF_NATIVE] = Field(None, gt=0)
    """Memory for one sampler's KV cache and adapters, MiB; null: enough for all slots at
    max_length."""
    prefix_cache: Annotated[bool, OF_NATIVE] = True
    """Keep the KV of finished requests for later requests with the same first tokens."""
    on_new_weights: Literal["continue", "recompute", "drain", "restart"] = "continue"
    """Running sequences at a weight swap: keep their KV (continue), rebuild it
    (recompute), finish them first (drain) or start them again (restart)."""
    matmul: Annotated[Literal["full", "bfloat16", "int8"], OF_NATIVE] = "full"
    """Precision of matrix products: full (model.dtype), bfloat16, or int8 (needs cpu_kernels).
    Log-probs then differ from the trainer's, most with int8."""
    attention: Annotated[Literal["auto", "gathered", "ragged"], OF_NATIVE] = "auto"
    """Decode attention: dense on copies of the pages (gathered), or by a kernel on the pages
    (ragged; TPU, GPU); auto: by platform and model."""
    cpu_kernels: bool = True
    """On a CPU (x86-64 with AVX2), use our C++ kernels, which a compiler builds once per machine;
    without a compiler, XLA."""
    compile_ahead: Annotated[bool, OF_NATIVE] = True
    """Compile programs during the warm start and the first blocks; false: when each is first
    needed."""
    temperature: float = Field(1.0, ge=0)
    """Sampling temperature; 0: greedy."""
    top_k: NonNegative = 0
    """Sample from the k likeliest tokens; 0: from all."""
    top_p: float = Field(1.0, gt=0, le=1)
    """Sample from the likeliest tokens that together have this probability."""
    min_p: float = Field(0.0, ge=0, lt=1)
    """Sample from tokens with at least this probability relative to the likeliest."""

    @property
    def truncates(self) -> bool:
        """Whether top_k, top_p or min_p leave some tokens out."""
        return self.top_k > 0 or self.top_p < 1 or self.min_p > 0

    @check
    def an_engine_has_addresses(self) -> Iterator[str]:
        """Require different addresses exactly for external servers."""
        engine, urls = self.engine, self.engine_urls
        if (engine == "vllm") != bool(urls):
            yield (
                f"sampler.engine={engine} and sampler.engine_urls ({len(urls)}) do not match: give "
                "the addresses of the servers exactly with sampler.engine=vllm."
            )
        bare = {url.rstrip("/") for url in urls}
        if len(bare) < len(urls) or not all(u.startswith(("http://", "https://")) for u in bare):
            yield (
                f"sampler.engine_urls ({', '.join(urls)}) must be different addresses that begin "
                "with http:// or https://, such as http://127.0.0.1:8000."
            )


class StalenessSection(Section):
    max_staleness: NonNegative = 1
    """Maximum staleness of a group: the trainer's version minus the version of its oldest token; 0:
    synchronous."""
    lookahead: NonNegative = 0
    """Maximum number of younger groups that may overtake a slow one."""
    when_too_old: Literal["wait", "drop"] = "wait"
    """Pacing: rollouts wait, so no group becomes too stale (wait), or run ahead, and groups that
    are too stale are dropped (drop)."""
    overcommit: Annotated[float, ReadWith("when_too_old", ("drop",))] = Field(1.5, ge=1)
    """With drop: maximum groups in memory, as a multiple of (max_staleness + 1) *
    groups_per_step."""
    adapt: Literal["none", "ess"] = "none"
    """Adaptation of the staleness target: none, or by effective sample size (ess)."""
    ess_target: Annotated[float, ReadWith("adapt", ("ess",))] = Field(0.9, ge=0, le=1)
    """Effective sample size to keep, as a share of the tokens: below it the target is halved, well
    above it raised by 1."""

    @check
    def dropping_leaves_rollouts_a_chance(self) -> Iterator[str]:
        """Refuse settings that drop every group in progress at an update."""
        if self.when_too_old == "drop" and self.max_staleness == 0:
            yield (
                "staleness.when_too_old=drop with staleness.max_staleness=0 would drop every group "
                "that is in progress at an update: answers that are sampled during an update would "
                "be wasted. Set staleness.when_too_old=wait (it trains on the same groups and "
                "drops none) or staleness.max_staleness=1."
            )


SELECTIONS = ("strict", "recent", "reward_variance", "advantage_size")
"""Names of buffer.select."""


class BufferSection(Section):
    select: str = Field("strict", pattern=rf"^({'|'.join(SELECTIONS)}|.+\.py:\w+)$")
    """Order in which the trainer takes groups: the oldest first (strict), the newest (recent), the
    largest variance of rewards (reward_variance) or size of advantages (advantage_size); or your
    own FILE.py:FUNCTION."""
    reuse: Positive = 1
    """Maximum steps that train on one group, within max_staleness."""


Level = Annotated[int, Field(ge=-1000, le=1000)]
"""A priority: lower levels first."""


class PrioritySection(Section):
    """Priority of waiting requests: lower levels first, then in order of arrival. First turns of
    training have level 0. The longest-waiting request is overtaken at most 64 times in a row."""

    evaluation: Level = 0
    """Level of an evaluation's requests; -1: before training."""
    later_turns: Level = 0
    """Level of training's turns after an episode's first; -1: running episodes before new ones."""
    guests: Level = 0
    """Level of the endpoint's guests; -1: before training, 1: after it."""
    older_first: bool = False
    """Within a level of training, serve older groups before younger ones."""
