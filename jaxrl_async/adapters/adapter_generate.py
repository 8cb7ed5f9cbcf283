"""The samplers as seen by one of several runs: only its own adapter is visible."""

import asyncio
from collections.abc import Sequence
from dataclasses import replace

from jaxrl_async.ports.generate import Generate, PreparesConstraints
from jaxrl_async.types import Completion, Constraint, Partial, Request


class AdapterGenerate:
    """A ports.Generate that adds an adapter name to every request. Request ids get a prefix on the
    way in and lose it on the way out, so ids of several runs do not clash. Sampling depends only on
    a request's key and the seed, which do not change, so a run samples what it would alone."""

    def __init__(self, name: str, generate: Generate) -> None:
        self._name, self._prefix, self._generate = name, f"{name}/", generate

    @property
    def seed(self) -> int | None:
        """See ports.Generate."""
        return self._generate.seed

    def submit_many(
        self, requests: Sequence[Request | Partial]
    ) -> "Sequence[asyncio.Future[Completion]]":
        """Queue all requests together for this adapter (ports.Generate)."""
        futures = self._generate.submit_many([self._named(given) for given in requests])
        return [self._answer(future) for future in futures]

    def prepare(self, constraint: Constraint) -> None:
        """Compile a constraint; see ports.PreparesConstraints."""
        if isinstance(self._generate, PreparesConstraints):
            self._generate.prepare(constraint)

    def progress(self) -> tuple[Partial, ...]:
        """Return this adapter's running requests that have sampled tokens (ports.Generate)."""
        return tuple(
            replace(p, request=self._unnamed(p.request))
            for p in self._generate.progress()
            if p.request.adapter == self._name
        )

    def _named(self, given: Request | Partial) -> Request | Partial:
        if isinstance(given, Partial):
            return replace(given, request=self._of(given.request))
        return self._of(given)

    def _of(self, request: Request) -> Request:
        request_id = f"{self._prefix}{request.request_id}"
        return replace(request, request_id=request_id, adapter=self._name)

    def _unnamed(self, request: Request) -> Request:
        request_id = request.request_id.removeprefix(self._prefix)
        return replace(request, request_id=request_id, adapter="")

    def _answer(self, inner: "asyncio.Future[Completion]") -> "asyncio.Future[Completion]":
        """Return a future of the completion without the prefix. Cancelling it cancels `inner`."""
        answer: asyncio.Future[Completion] = inner.get_loop().create_future()

        def pass_on(done: "asyncio.Future[Completion]") -> None:
            if answer.done():
                if not done.cancelled():
                    done.exception()  # cancelled meanwhile: mark the error as retrieved
            elif done.cancelled():
                answer.cancel()
            elif (error := done.exception()) is not None:
                answer.set_exception(error)
            else:
                completion = done.result()
                request_id = completion.request_id.removeprefix(self._prefix)
                answer.set_result(replace(completion, request_id=request_id))

        def give_up(done: "asyncio.Future[Completion]") -> None:
            if done.cancelled():
                inner.cancel()

        inner.add_done_callback(pass_on)
        answer.add_done_callback(give_up)
        return answer
