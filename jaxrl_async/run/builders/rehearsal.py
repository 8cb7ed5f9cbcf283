"""Compile the samplers' programs while the warm start trains: a rehearsal.

    warm start   ██ compiles ████ update ████ update ████ update ████│ run
    rehearsal                ██ compiles, samples with weights of 0 █│

A sampler of the same shape samples answers to the held-out prompts, as an evaluation and the first
step will. Only the compiled programs are kept, which samplers of one shape share.
"""

import logging
import threading
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from jaxrl_async.config.schema import Config, ModelSection, SamplerSection, WeightsSection
from jaxrl_async.errors import Closed
from jaxrl_async.model.lora import combined
from jaxrl_async.model.spec import ModelSpec, Params
from jaxrl_async.ports.weights import FIXED_WEIGHTS
from jaxrl_async.run.builders.inputs import Inputs
from jaxrl_async.run.builders.learning import sampling_params
from jaxrl_async.run.builders.samplers import arrived, settings_here
from jaxrl_async.sampler.compile_ahead import compile_for
from jaxrl_async.sampler.sampler import Sampler
from jaxrl_async.sampler.setup import set_up
from jaxrl_async.types import Prompt, Request, SamplingParams

log = logging.getLogger(__name__)


class Rehearsal:
    """Samplers that run during the warm start, one after another; a context manager that ends them.
    Errors are logged; they would occur again in the run."""

    def __init__(self, config: Config, inputs: Inputs) -> None:
        """Make the rehearsal; start() begins it."""
        self._config, self._inputs = config, inputs
        self._lock = threading.Lock()  # guards the two below
        self._sampler: Sampler | None = None
        self._over = False
        self._thread = threading.Thread(target=self._run, name="rehearsal", daemon=True)

    def __enter__(self) -> "Rehearsal":
        return self

    def __exit__(self, *error: object) -> None:
        """End it after the program that is being compiled, and free its memory."""
        with self._lock:
            self._over, sampler = True, self._sampler
        if sampler is not None:
            sampler.close()
        if self._thread.ident is not None:
            self._thread.join()

    def start(self) -> None:
        """Begin, unless it has begun, compile_ahead is off, the engine is external, or the samplers
        share the trainer's devices."""
        config, slices = self._config, self._inputs.slices
        is_native = config.sampler.engine == "native" and config.sampler.compile_ahead
        own_devices = is_native and not slices.colocated
        if own_devices and jax.process_count() == 1 and self._thread.ident is None:
            self._thread.start()

    def _run(self) -> None:
        try:
            for mesh in self._inputs.slices.samplers:
                self._rehearse(mesh)
        except Closed:
            log.debug("the warm start is over, and the rehearsal with it")
        except Exception as error:
            log.warning("the samplers could not be compiled ahead: %s", error, exc_info=True)
        finally:
            with self._lock:
                self._sampler = None  # its weights and KV cache

    def _rehearse(self, mesh: Mesh) -> None:
        """Sample as the sampler of this mesh will, then take new weights. Raises Closed if the
        rehearsal is over."""
        config, spec = self._config, self._inputs.spec
        settings = replace(settings_here(config, self._inputs, mesh), name="rehearsal")
        sent, base = zero_weights(config.weights, config.model, spec, mesh)
        setup, params = set_up((spec, base), config.sampler, mesh, config.run.seed, settings)
        prepared = setup.engine.prepare(params)
        sampler = Sampler.from_setup(setup, prepared, 0, FIXED_WEIGHTS)
        with self._lock:
            if self._over:
                raise Closed
            self._sampler = sampler
        for requests in self._acts():
            sampler.generate(requests)
        sampler.close()  # with what it compiled during its blocks, as the run's sampler does
        compile_for(setup, prepared, setup.engine.state_shapes(), lambda: self._over)
        swapped = setup.engine.prepare(sent, prepared)
        if settings.probe_tokens is not None:
            setup.engine.probe(swapped, settings.probe_tokens)
        log.info("the programs of a sampler were compiled during the warm start")

    def _acts(self) -> Iterator[list[Request]]:
        """Yield the requests of an evaluation, if evaluations are on, and of a step."""
        config, inputs = self._config, self._inputs
        if config.eval.every:
            greedy = SamplingParams(temperature=config.eval.temperature)
            yield rehearsal_requests(inputs.held_out, 1, greedy, config.sampler)
        prompts = inputs.held_out[: config.algorithm.groups_per_step]
        members = config.algorithm.group_size
        for sampling in dict.fromkeys(sampling_params(c.sampler) for c in config.by_task.values()):
            extras = inputs.keep_mask and sampling.truncates
            yield rehearsal_requests(prompts, members, sampling, config.sampler, extras=extras)


def zero_weights(
    section: WeightsSection, model: ModelSection, spec: ModelSpec, mesh: Mesh
) -> tuple[Params, Params]:
    """Return weights of 0, first as a version brings them to a sampler, then as a sampler begins
    with them: with the same shapes and shardings. Raises ConfigError."""
    sent, once = arrived(section, model, spec, mesh)
    shapes = (sent, {} if once is None else once)
    where = jax.tree.map(lambda x: x.sharding, shapes)

    def zeros() -> Any:
        return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)

    zero, base = jax.jit(zeros, out_shardings=where)()
    return zero, zero if once is None else combined(base, zero)


def rehearsal_requests(
    prompts: Sequence[Prompt],
    members: int,
    sampling: SamplingParams,
    section: SamplerSection,
    *,
    extras: bool = False,
) -> list[Request]:
    """Return requests for `members` answers to each prompt, with lengths from one token to the
    maximum: as in a run, they end one after another. If an environment would open the episode,
    random tokens stand for its messages: half of the room."""
    opening = max((section.max_length - section.max_new_tokens) // 2, 1)
    count = len(prompts) * members
    shares = np.linspace(0, 1, count)[np.random.default_rng(0).permutation(count)]
    requests = []
    for number, share in enumerate(shares):
        index, member = divmod(number, members)
        tokens = prompts[index].token_ids
        if not len(tokens):
            tokens = np.random.default_rng(index).integers(0, 2, opening, np.int32)
        most = min(section.max_new_tokens, section.max_length - len(tokens))
        if most < 1:
            continue  # a prompt without room for an answer
        requests.append(
            Request(
                request_id=f"rehearsal{index}/m{member}/t0",
                token_ids=tokens,
                max_new_tokens=most,
                sampling=sampling,
                key=(index, member),
                forced_length=1 + int(share * (most - 1)),
                extras=extras,
            )
        )
    return requests
