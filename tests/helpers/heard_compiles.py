"""Which programs JAX compiles while a test runs."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import jax

PROGRAMS = ("prefill", "prefill_in_pages", "score", "score_in_pages", "insert", "generate")


@contextmanager
def compiles_of_samplers() -> Iterator[list[tuple[str, str]]]:
    """Listen to what is compiled of a sampler's engine, in any thread: the names of the program and
    of the thread."""
    heard_so_far: list[tuple[str, str]] = []

    def heard(event: str, duration_secs: float, **about: object) -> None:
        name = str(about.get("fun_name")).removeprefix("jit(").removesuffix(")")
        if "backend_compile" in event and name in PROGRAMS:
            heard_so_far.append((name, threading.current_thread().name))

    jax.monitoring.register_event_duration_secs_listener(heard)
    try:
        yield heard_so_far
    finally:
        jax.monitoring.unregister_event_duration_listener(heard)
