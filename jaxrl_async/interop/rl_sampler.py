"""Our sampler behind the protocol of RL samplers, which is defined by Tunix (`Sampler` in its
experimental/rollout/sampler.py) and implemented by tpu-inference's RLVllmSampler. A trainer that
uses those can use this one. Neither package is needed.

    sample(requests) ──> Sampler ──> responses: token ids, log-probs, the version of each token
    pre_weight_sync ── stops accepting requests
        weight_sync ── transfers the request's `weights`, next to those in use
            post_weight_sync ── swaps the weights ──> accepts requests again
            abort_weight_sync ── drops the new weights and keeps the old ones

Requests and their fields may be records or mappings: fields are read by name. A request that
cannot be served gets a response with an `error` that says why; the others are served.
"""

import asyncio
import threading
from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh

from jaxrl_async.config.sampler_section import SamplerSection
from jaxrl_async.errors import JaxrlError, WeightsError
from jaxrl_async.interop.rl_requests import CheckedRequest, checked_request_of, name_of, value_of
from jaxrl_async.mesh import SAMPLER_RULES, shardings
from jaxrl_async.model.policy import Policy
from jaxrl_async.model.spec import Params, weight_table
from jaxrl_async.sampler.sampler import Sampler
from jaxrl_async.sampler.setup import SamplerSettings
from jaxrl_async.types import Completion, StopReason, VersionedParams

IN_PROGRESS, SUCCESS, ABORTED, MISSING = "IN_PROGRESS", "SUCCESS", "ABORTED", "MISSING"
"""States of a transfer (get_transfer_status)."""
MOST_STATUSES = 1000
"""Number of newest transfers whose states are kept."""
LIVE_S = 600.0
"""Maximum wait until new weights are in use, seconds: a block, and with on_new_weights=drain the
running requests."""
FINISHED = {
    StopReason.EOS: "stop",
    StopReason.LENGTH: "length",
    StopReason.CANCELLED: "cancelled",
}
"""The protocol's names for stop reasons."""


class _Refused(NamedTuple):
    """A rejected request."""

    name: str
    error: Exception


class HandedWeights:
    """A ports.WeightSource of weights that are passed in, one version after another."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._next: VersionedParams | None = None
        self._live, self._wake = -1, threading.Event()

    def hand_over(self, update: VersionedParams) -> None:
        """Let the sampler take these weights at its next block."""
        with self._changed:
            self._next = update
        self._wake.set()

    def wait_live(self, version: int, timeout_s: float) -> bool:
        """Wait until every new token is of this version; return whether it is."""
        with self._changed:
            return self._changed.wait_for(lambda: self._live == version, timeout_s)

    def poll(self, *, wait: bool = False) -> VersionedParams | None:
        """See ports.WeightSource."""
        with self._changed:
            update, self._next = self._next, None
            return update

    def live(self, version: int) -> None:
        """See ports.WeightSource."""
        with self._changed:
            self._live = version
            self._changed.notify_all()

    def attach(self, wake: threading.Event) -> None:
        """See ports.WeightSource."""
        self._wake = wake

    def leave(self) -> None:
        """Do nothing: the caller of wait_live has a timeout."""

    def rejoin(self) -> "HandedWeights":
        """Return this source."""
        return self


class RLSampler:
    """A Sampler of this package with the RL sampler protocol. Its coroutines belong to one event
    loop."""

    def __init__(
        self,
        policy: Policy,
        *,
        section: SamplerSection | None = None,
        mesh: Mesh | None = None,
        seed: int = 0,
        version: int = 0,
        settings: SamplerSettings = SamplerSettings(),  # noqa: B008 (frozen)
    ) -> None:
        """Store the arguments for `start`, which makes the sampler; arguments as for Sampler."""
        self._policy, self._version = policy, version
        self._weights = HandedWeights()
        self._given: dict[str, Any] = {
            "section": section,
            "mesh": mesh,
            "seed": seed,
            "settings": settings,
        }
        self._mesh = mesh
        self._usual_length = 64 if section is None else section.max_new_tokens
        self._keeps_experts = settings.keep_routing or not policy.spec.experts
        self._sampler: Sampler | None = None
        self._staged: VersionedParams | None = None
        self._accepting, self._statuses, self._count = asyncio.Event(), dict[str, str](), 0
        self._accepting.set()

    # ---- lifecycle

    def initialize(self) -> None:
        """Make the sampler. Idempotent. Raises ConfigError."""
        if self._sampler is None:
            self._sampler = Sampler(
                self._policy, weights=self._weights, version=self._version, **self._given
            )
            self._sampler.start()

    async def start(self, **_: object) -> None:
        """Make the sampler, on a thread because it compiles. Idempotent."""
        await asyncio.to_thread(self.initialize)

    async def stop(self, **_: object) -> None:
        """Close the sampler; running requests fail with Closed. Idempotent."""
        sampler, self._sampler = self._sampler, None
        if sampler is not None:
            await asyncio.to_thread(sampler.close)

    async def pause(self, **_: object) -> None:
        """Accept no more requests; running ones continue. Idempotent."""
        self._accepting.clear()

    async def resume(self, **_: object) -> None:
        """Accept requests again. Idempotent."""
        self._accepting.set()

    async def get_mesh(self, **_: object) -> Mesh | None:
        """Return the sampler's mesh; None: the default device."""
        return self._mesh

    async def get_load_info(self, **_: object) -> SimpleNamespace:
        """Return the numbers of waiting and running requests, and the used KV pages, percent."""
        stats = None if self._sampler is None else self._sampler.stats()
        return SimpleNamespace(
            num_requests_waiting=stats.waiting if stats else 0,
            num_requests_running=stats.in_flight if stats else 0,
            kv_cache_usage_perc=100.0 * stats.used_page_share if stats else 0.0,
        )

    # ---- requests

    async def sample(self, sampling_requests: object, **usual: object) -> list[Any]:
        """Complete requests or prompts; waits while the sampler is paused.

        Args:
            sampling_requests: one or several, each a text, token ids, or a request with `prompt`
                and, optionally, `request_id` and `sampling_params`: max_tokens (default:
                sampler.max_new_tokens), temperature, top_k, top_p, min_p, stop_token_ids (added
                to the tokenizer's, or with ignore_eos instead of them), seed (the same prompt, seed
                and weights give the same tokens), return_logprobs, return_routed_experts,
                routed_experts_prompt_start. Others are rejected (rl_requests.NOT_SERVED).
            usual: defaults for sampling parameters that requests do not set.

        Returns one response for each, in order: request_id, text, prompt_token_ids, token_ids
        [tokens] and versions [tokens] int32, logprobs [tokens] float32 of the sampling distribution
        (None if not requested), cumulative_logprob, routed_experts [prompt + tokens - 1 - start,
        layers, experts per token] or None, finish_reason (stop, length, cancelled or error), error.
        """
        await self._accepting.wait()
        await self.start()
        assert self._sampler is not None
        requests = [self._checked(one, usual) for one in _as_list(sampling_requests)]
        responses = [self._response(one) for one in requests]
        return list(await asyncio.gather(*responses))

    def _checked(self, given: object, usual: Mapping[str, object]) -> CheckedRequest | _Refused:
        """Convert a request; return _Refused if that fails."""
        self._count += 1
        try:
            return checked_request_of(
                given,
                usual,
                self._count,
                self._policy.tokenizer,
                usual_length=self._usual_length,
                keeps_experts=self._keeps_experts,
            )
        except (TypeError, ValueError, JaxrlError) as error:
            return _Refused(name_of(given, self._count), error)

    async def _response(self, request: CheckedRequest | _Refused) -> SimpleNamespace:
        if isinstance(request, _Refused):
            return _failed(request.name, request.error)
        try:
            assert self._sampler is not None
            done = await self._sampler.submit(request.request)
        except (TypeError, ValueError, JaxrlError) as error:
            return _failed(request.name, error)
        return self._answer(request, done)

    def _answer(self, request: CheckedRequest, done: Completion) -> SimpleNamespace:
        experts = done.expert_ids if request.wants_experts else None
        return SimpleNamespace(
            request_id=request.name,
            text=self._policy.tokenizer.decode(done.token_ids),
            prompt_token_ids=request.request.token_ids,
            token_ids=done.token_ids,
            versions=done.versions,
            logprobs=done.logprobs if request.wants_logprobs else None,
            cumulative_logprob=float(done.logprobs.sum()),
            routed_experts=None if experts is None else experts[request.experts_from :],
            finish_reason=FINISHED[done.stop],
            error=None,
        )

    # ---- weights

    def get_target_state(self) -> Params:
        """Return the tree that `weights` must match, as ShapeDtypeStructs with shardings."""
        return jax.tree.map(
            lambda x, sharding: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding),
            self._policy.params,
            self._shardings(),
        )

    async def get_weight_sync_metadata(self, **_: object) -> dict[str, Any]:
        """Return metadata of the weights: axes of the mesh, dtype, version, whether they are in
        use."""
        return {
            "sharding": {} if self._mesh is None else dict(self._mesh.shape),
            "dtype": str(jax.tree.leaves(self._policy.params)[0].dtype),
            "policy_version": self._version,
            "cache_valid": self._accepting.is_set(),
        }

    async def bind_weight_sync(self, sync_request: object = None, **_: object) -> dict[str, Any]:
        """Return the metadata; no binding is needed, because weights are passed as arrays."""
        return await self.get_weight_sync_metadata()

    async def pre_weight_sync(
        self, sync_request: object = None, free_kv_cache: bool = True, **_: object
    ) -> bool:
        """Accept no more requests. The KV cache is kept: the version of its weights is known, and
        sampler.on_new_weights decides what happens to running requests."""
        self._note(sync_request, IN_PROGRESS)
        await self.pause()
        return True

    async def weight_sync(self, sync_request: object = None, **_: object) -> int:
        """Place new weights next to those in use; return their version.

        sync_request: has `weights`, a tree like get_target_state, and `policy_version`, which must
            increase (default: the current version plus 1).

        Raises WeightsError if the tree does not match or the version is not newer.
        """
        version = int(value_of(sync_request, "policy_version") or self._version + 1)
        if version <= self._version:
            raise WeightsError(
                f"weights of version {version} do not follow version {self._version}. Pass a "
                "larger policy_version."
            )
        weights = value_of(sync_request, "weights")
        target = self.get_target_state()
        if problem := _differs(weights, target):
            raise WeightsError(f"weights of version {version}: {problem}")
        placed = await asyncio.to_thread(jax.device_put, weights, self._shardings())
        self._staged = VersionedParams(version=version, params=placed)
        return version

    async def post_weight_sync(self, sync_request: object = None, **_: object) -> bool:
        """Swap to the new weights, and accept requests again. Raises WeightsError if there are
        none, or if this takes longer than LIVE_S."""
        staged, self._staged = self._staged, None
        if staged is None:
            raise WeightsError("there are no new weights: call weight_sync first.")
        await self.start()
        self._weights.hand_over(staged)
        if not await asyncio.to_thread(self._weights.wait_live, staged.version, LIVE_S):
            raise WeightsError(f"version {staged.version} is not in use after {LIVE_S:.0f} s")
        self._version = staged.version
        self._note(sync_request, SUCCESS)
        await self.resume()
        return True

    async def abort_weight_sync(self, sync_request: object = None, **_: object) -> bool:
        """Drop new weights that are not in use yet, and accept requests again."""
        self._staged = None
        self._note(sync_request, ABORTED)
        await self.resume()
        return True

    async def get_transfer_status(self, req_id: object, **_: object) -> str:
        """Return IN_PROGRESS, SUCCESS, ABORTED or MISSING."""
        return self._statuses.get(str(req_id), MISSING)

    async def migrate_kv_cache(self, *_: object, **__: object) -> bool:
        """Return False: KV cannot be moved between samplers; a router keeps a group at one."""
        return False

    def _shardings(self) -> Any:
        if self._mesh is None:
            one = jax.sharding.SingleDeviceSharding(jax.devices()[0])
            return jax.tree.map(lambda _: one, self._policy.params)
        return shardings(weight_table(self._policy.spec), self._mesh, SAMPLER_RULES)

    def _note(self, sync_request: object, status: str) -> None:
        name = value_of(sync_request, "req_id") or value_of(sync_request, "request_id")
        if name:
            self._statuses.pop(str(name), None)
            self._statuses[str(name)] = status
            while len(self._statuses) > MOST_STATUSES:
                del self._statuses[next(iter(self._statuses))]


def _as_list(given: object) -> Sequence[Any]:
    """Return a list of requests, given one or several requests or prompts."""
    if isinstance(given, list | tuple) and not all(isinstance(x, int | np.integer) for x in given):
        return given
    return [given] if not isinstance(given, list | tuple) or given else []


def _failed(name: str, error: Exception) -> SimpleNamespace:
    kind = SimpleNamespace(error_type=type(error).__name__, message=str(error), retryable=False)
    return SimpleNamespace(
        request_id=name,
        text="",
        prompt_token_ids=np.zeros(0, np.int32),
        token_ids=np.zeros(0, np.int32),
        versions=np.zeros(0, np.int32),
        logprobs=None,
        cumulative_logprob=0.0,
        routed_experts=None,
        finish_reason="error",
        error=kind,
    )


def _differs(tree: object, target: object) -> str | None:
    """Return how a tree of arrays differs from the expected one; None: it matches."""
    if jax.tree.structure(tree) != jax.tree.structure(target):  # type: ignore[operator]
        return "they are not a tree like get_target_state()"
    for (path, w), x in zip(
        jax.tree_util.tree_leaves_with_path(target), jax.tree.leaves(tree), strict=True
    ):
        shape, dtype = getattr(x, "shape", None), getattr(x, "dtype", None)
        if shape != w.shape or dtype != w.dtype:
            name = jax.tree_util.keystr(path)
            return f"{name} is {dtype} {shape}, but must be {w.dtype} {w.shape}"
    return None
