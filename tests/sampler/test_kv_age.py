"""KV never outlives its weights unnoticed: random traffic, round by round, in every mode of
sampler.on_new_weights. On a device of NumPy each cell says which weights made it; on the real one
each drawn token's log-prob is that of a full forward pass of the weights it names."""

from collections import Counter
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import Any

import jax
import numpy as np
import pytest
from tiny import PARAMS, SPEC, Script
from version_device import VOCAB, VersionDevice, logits_of, token_of
from whole_rows import row_logprobs

from jaxrl_async.config import schema
from jaxrl_async.model.decoder import TokenRows, init_params
from jaxrl_async.model.kv_layout import layout_of
from jaxrl_async.model.spec import ModelSpec
from jaxrl_async.sampler.device.engine import request_keys
from jaxrl_async.sampler.partial import branches, load_partial, save_partial
from jaxrl_async.sampler.sampler import Sampler
from jaxrl_async.sampler.setup import SamplerSettings, set_up
from jaxrl_async.types import Completion, Partial, Request, StopReason, VersionedParams

pytestmark = pytest.mark.full

MODES = ("continue", "recompute", "drain", "restart")
EVENTS = (
    ["ask"] * 4 + ["publish"] * 3 + ["round"] * 10 + ["save", "save bare", "stop", "cancel"]
    + ["resume", "fork", "turn", "turn"]
)  # fmt: skip
PAGE, LONGEST = 4, 32
WEIGHTS = [PARAMS, *(init_params(SPEC, jax.random.key(i)) for i in (5, 6))]
MET: Counter[str] = Counter()
"""What the traffic met, over all examples."""


@dataclass(kw_only=True)
class Asked:
    """A request, and what became of it."""

    request: Request
    future: Future[Completion]
    begun: Partial | None = None

    @property
    def done(self) -> Completion | None:
        whole = self.future.done() and not self.future.cancelled()
        return self.future.result() if whole else None


class Driven:
    """A sampler without a thread: the test makes each round."""

    def __init__(
        self,
        mode: str,
        *,
        pages: int,
        device: VersionDevice | None = None,
        spec: ModelSpec = SPEC,
        weights: list[Any] = WEIGHTS,
    ) -> None:
        self.mode, self.device, self.source = mode, device, Script([], after=0)
        self.spec, self.weights = spec, weights
        token_bytes = 2 * layout_of(spec.kinds).arrays * spec.kv_heads * spec.head_dim * 4
        section = schema.SamplerSection(
            slots=3, reserve=0.7, max_length=LONGEST, max_new_tokens=16, block=3, page_tokens=PAGE,
            prefill_chunk=16, on_new_weights=mode, kv_memory_mib=pages * PAGE * token_bytes / 2**20,
        )  # fmt: skip
        setup, params = set_up((spec, weights[0]), section, None, 0, SamplerSettings())
        if device is not None:
            layers = len(device.spec.model.kinds)
            limits = replace(setup.limits, vocab=VOCAB, kv_shape=(layers, 2, 1, 2))
            setup, params = replace(setup, engine=device, limits=limits), 0
            device.watch = self.watch
        prepared = setup.engine.prepare(params)
        self.sampler = Sampler.from_setup(setup, prepared, 0, self.source)
        self.sampler.lifetime.start = lambda: None
        self.batch = self.sampler.loop.open_batch()
        self.admitted: dict[int, int] = {}  # version of each admission, by its number
        self.last: dict[str, int] = {}  # of each request's last admission
        admit = self.batch.admit

        def recorded(held: frozenset[str]) -> None:
            admit(held)
            for s in self.batch.admitted.values():
                self.admitted.setdefault(s.order, self.sampler.version)
                self.last[s.request.request_id] = self.admitted[s.order]

        self.batch.admit = recorded
        self.asked: list[Asked] = []
        self.saved: list[Partial] = []

    def watch(self, slot: int, made_by: np.ndarray, version: int) -> None:
        """What a slot is about to see keeps the mode's promise."""
        sequence = self.batch.admitted[slot]
        if self.mode == "continue":
            assert made_by.min() >= self.admitted[sequence.order], "older than its admission"
            MET["old cells"] += int(made_by.min() < version)
        else:
            assert (made_by == version).all()
        if sequence.kv_version is not None:
            assert (made_by == sequence.kv_version).all(), "KV of other weights under this name"

    def submit(self, requests: list[Request | Partial]) -> None:
        futures = self.sampler.start_many(requests)
        for req, future in zip(requests, futures, strict=True):
            begun = req if isinstance(req, Partial) else None
            request = req.request if isinstance(req, Partial) else req
            self.asked.append(Asked(request=request, future=future, begun=begun))

    def group(self, pick: int, prompt: np.ndarray) -> list[Request]:
        number, members = len(self.asked), 1 + pick % 8
        return [
            Request(
                request_id=f"r{number}/{m}",
                token_ids=prompt,
                max_new_tokens=1 + (pick // 8 + 5 * m) % min(16, LONGEST - len(prompt)),
                stop_token_ids=(1,) if pick % 3 == 0 else (),
                key=(number, m),
            )
            for m in range(members)
        ]

    def do(self, event: str, pick: int) -> None:
        sampler = self.sampler
        if event == "ask":
            vocab = sampler.setup.limits.vocab
            prompt = np.random.default_rng(pick % 3).integers(0, vocab, 5 + 6 * (pick % 3))
            self.submit(self.group(pick // 3, prompt))
        elif event == "publish":
            version = sampler.version + 1 + len(self.source.updates)
            params = version if self.device else self.weights[version % len(self.weights)]
            self.source.updates.append(VersionedParams(version=version, params=params))
        elif event == "round":
            self.round()
        elif event in ("save", "save bare", "stop") and self.batch.admitted:
            admitted = list(self.batch.admitted.values())
            sequence = admitted[pick % len(admitted)]
            with_kv = event != "save bare"
            stop = event == "stop" and self.batch.num_sampled(sequence)
            self.keep(sampler.loop.save(sequence.request.request_id, bool(stop), with_kv))
        elif event == "cancel" and self.asked:
            self.asked[pick % len(self.asked)].future.cancel()
        elif event in ("resume", "fork") and self.saved:
            chosen = self.saved[pick % len(self.saved)]
            count = 1 if event == "resume" else 1 + pick % 4
            new = [chosen] if event == "resume" else branches(chosen, count)
            name = f"r{len(self.asked)}"
            self.submit(
                [
                    replace(p, request=replace(p.request, request_id=f"{name}/{i}"))
                    for i, p in enumerate(new)
                ]
            )
        elif event == "turn":
            done = [a for a in self.asked if a.done is not None]
            if done:
                before = done[pick % len(done)]
                sampled = before.done.token_ids
                prompt = np.concatenate([before.request.token_ids, sampled, [2, 3]])
                if len(prompt) < LONGEST - 1:
                    self.submit(self.group(pick // 7, prompt))

    def keep(self, partial: Partial) -> None:
        """A save: what it says of its KV is true. Then through a file's bytes."""
        if partial.kv is not None and self.device is not None:
            whole = np.concatenate([partial.request.token_ids, partial.token_ids])
            assert (partial.kv[0, 0, :, 0, 0] == partial.kv_version).all()
            assert partial.kv[0, 1, :, 0, 0].astype(int).tolist() == whole.tolist()
            MET["saved KV"] += 1
            for layer, window in enumerate(self.batch.spec.windows):
                there = partial.kv[layer, 0, :, 0, 0] == partial.kv_version
                assert there[-window:].all()
                MET["saved in part"] += int(not there.all() and partial.kv_page_tokens == PAGE)
        if len(partial.token_ids) < partial.request.max_new_tokens:
            self.saved.append(partial)

    def round(self) -> None:
        """One round, after which the store holds KV of the version at hand alone."""
        self.sampler.loop.round(self.batch)
        self.batch.check_integrity()
        if self.device is not None and self.batch.cache.prefixes.held:
            held = self.batch.state.kv.k[0][list(self.batch.cache.prefixes.held), 0, 0]
            assert (held == self.batch.version).all(), "the store has KV of other weights"

    def finish(self) -> None:
        """Until nothing is left to do; then each request was answered as its mode promises."""
        for _ in range(2000):
            if not self.sampler.loop.busy:
                break
            self.round()
        assert all(a.future.done() for a in self.asked)
        stats = self.sampler.stats()
        MET.update(
            preempted=stats.preempted, swaps=stats.swaps, hits=stats.prefix_hit_tokens,
            restarted=stats.restarted, drawn=stats.generated_tokens,
            hidden=stats.prefix_hidden_tokens,
        )  # fmt: skip
        cache = self.batch.cache
        assert cache.pages.num_free + len(cache.prefixes.held) == cache.pages.count
        for asked in self.asked:
            done = asked.done
            if done is None:
                continue
            assert (np.diff(done.versions) >= 0).all()
            inherited = asked.begun is not None and len(asked.begun.token_ids)
            whole = done.stop is not StopReason.CANCELLED
            if whole and (self.mode == "restart" or (self.mode == "drain" and not inherited)):
                assert len(set(done.versions.tolist())) == 1, "drawn by several versions"


def own_tokens(asked: list[Asked]) -> None:
    """Each token is the hash of what came before it, the version it names, and its key."""
    ids = [(*a.request.key, a.request.branch) for a in asked]
    padded = np.zeros((-(-max(1, len(ids)) // 256) * 256, 3), np.int32)
    padded[: len(ids)] = np.array(ids).reshape(-1, 3)
    keys = np.asarray(request_keys(0, padded))
    for a, key in zip(asked, keys, strict=False):
        done = a.done
        if done is None:
            continue
        start, inherited = len(a.request.token_ids), 0
        if a.begun is not None and done.token_ids[: len(a.begun.token_ids)].tolist() == (
            a.begun.token_ids.tolist()
        ):
            inherited = len(a.begun.token_ids)
        tokens = np.concatenate([a.request.token_ids, done.token_ids])
        for i in range(inherited, len(done.token_ids)):
            logits = logits_of(tokens[: start + i], int(done.versions[i]))
            assert done.token_ids[i] == token_of(logits, key, start + i)


def play(driven: Driven, seed: int, events: int) -> None:
    """Random traffic, the same for a seed."""
    random = np.random.default_rng([seed, 16])
    for _ in range(events):
        driven.do(EVENTS[random.integers(len(EVENTS))], int(random.integers(10_000)))
    driven.finish()


def driven_by_numpy(mode: str, pages: int, window: int = 0) -> Driven:
    device = VersionDevice(
        slots=3, reserve=2, max_length=LONGEST, pages=pages, page_tokens=PAGE, block=3,
        window=window,
    )  # fmt: skip
    return Driven(mode, pages=pages, device=device)


@pytest.mark.parametrize("mode", MODES)
def test_no_cell_is_older_than_its_mode_allows_and_every_token_is_its_own(mode) -> None:
    for seed in range(12):
        driven = driven_by_numpy(mode, pages=8 + 2 * seed)
        play(driven, seed, events=150)
        own_tokens(driven.asked)


@pytest.mark.parametrize("mode", MODES)
def test_the_same_where_a_layer_has_a_window_and_keeps_its_pages_alone(mode) -> None:
    """Windows that end within pages, at their ends, and beyond every sequence."""
    for seed in range(8):
        driven = driven_by_numpy(mode, pages=16 + 2 * seed, window=(6, 5, 1, 9, 4, 2, 14, 40)[seed])
        play(driven, seed, events=150)
        own_tokens(driven.asked)


@pytest.mark.exhaustive
@pytest.mark.parametrize("window", [0, 5])
@pytest.mark.parametrize("mode", MODES)
def test_the_same_of_much_more_traffic(mode, window) -> None:
    for seed in range(100, 110 if window else 130):
        driven = driven_by_numpy(mode, pages=(16 if window else 8) + seed % 24, window=window)
        play(driven, seed, events=300)
        own_tokens(driven.asked)


def forward(spec: ModelSpec, params: Any, rows: np.ndarray) -> np.ndarray:
    """[n, LONGEST] log-probs of each token but the first, by one pass."""
    positions = np.broadcast_to(np.arange(LONGEST), rows.shape)
    tokens = TokenRows(rows, positions, np.ones_like(rows))
    return np.asarray(row_logprobs(spec, params, tokens))


def check_logprobs(driven: Driven) -> int:
    """Compare with a full forward pass of each token's weights; how many tokens were compared."""
    done = [(a, a.done) for a in driven.asked if a.done is not None and len(a.done.token_ids)]
    if driven.mode == "continue":  # a mixture is promised, but where one version did it all
        done = [
            (a, c)
            for a, c in done
            if a.begun is None and set(c.versions.tolist()) == {driven.last[c.request_id]}
        ]
    rows = np.zeros((-(-max(1, len(done)) // 64) * 64, LONGEST), np.int32)
    for row, (a, c) in zip(rows, done, strict=False):
        whole = np.concatenate([a.request.token_ids, c.token_ids])
        row[: len(whole)] = whole
    by_weights = [forward(driven.spec, params, rows) for params in driven.weights]
    compared = 0
    for i, (a, c) in enumerate(done):
        start = len(a.request.token_ids)
        end = start + len(c.token_ids)
        wanted = [
            by_weights[v % len(driven.weights)][i, t]
            for v, t in zip(c.versions, range(start, end), strict=True)
        ]
        np.testing.assert_allclose(c.logprobs, wanted, atol=3e-5)
        compared += len(c.token_ids)
    return compared


GEMMA = ModelSpec.from_architecture(
    schema.ArchitectureSection(
        family="gemma3_text", layers=6, width=16, heads=2, kv_heads=1, head_dim=8, mlp=16, window=6
    ),
    SPEC.vocab,
)
"""Five of six layers have a window."""
MODELS = {
    "all see everything": (SPEC, WEIGHTS, 12),
    "most have a window": (GEMMA, [init_params(GEMMA, jax.random.key(i)) for i in range(3)], 56),
}


@pytest.mark.exhaustive
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("mode", MODES)
def test_log_probs_are_those_of_a_pass_by_the_weights_that_each_token_names(
    mode, model, tmp_path
) -> None:
    compared, (spec, weights, pages) = 0, MODELS[model]
    for seed in range(2):
        driven = Driven(mode, pages=pages + 8 * seed, spec=spec, weights=weights)
        play(driven, seed, events=60)
        if driven.saved:
            save_partial(driven.saved[0], tmp_path / "saved")
            driven.saved = [load_partial(tmp_path / "saved")]
            driven.do("fork", 3)
            driven.finish()
        compared += check_logprobs(driven)
    assert compared > (100 if mode == "continue" else 300)


def test_the_traffic_met_what_it_is_there_for() -> None:
    for what in ("preempted", "swaps", "hits", "restarted", "old cells", "saved KV", "drawn"):
        assert MET[what] > 10, what
    assert MET["saved in part"] > 10 and MET["hidden"] > 0, "where a layer has a window"


def test_the_kv_of_a_groups_prompt_ages_no_further_under_steady_traffic() -> None:
    """A shared prefix, a publish in mid-answer at each of many versions."""
    driven = driven_by_numpy("continue", pages=40)
    prompt = np.arange(9) % VOCAB
    for version in range(1, 20):
        requests = [
            Request(request_id=f"v{version}/{m}", token_ids=prompt, max_new_tokens=9,
                    key=(version, m))
            for m in range(3)
        ]  # fmt: skip
        driven.submit(requests)
        driven.round()
        driven.do("publish", version)
    driven.finish()
    assert MET["old cells"] > 0
