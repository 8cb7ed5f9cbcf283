"""Serve a policy with JetStream's orchestrator and gRPC server; not for training.

    python -m jaxrl_async.interop.jetstream_serve --policy runs/addition/policy --port 9000

There is no authentication, so the server listens on the loopback address unless --host is set.

Run it in a separate process: on any error, JetStream's threads end the whole process with SIGKILL
and keep copies of the weights. JetStream truncates requests that are longer than the engine's
slots.
"""

import argparse
import importlib
import logging
import os
import signal
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax

from jaxrl_async.data.tokenizer import load_tokenizer
from jaxrl_async.help_format import DefaultsHelp
from jaxrl_async.interop.jetstream import engine_api, make_engine
from jaxrl_async.model.policy import Policy
from jaxrl_async.types import SamplingParams

LOOPBACK = "127.0.0.1"
"""An address that only this machine can reach."""


def start_server(policy: Policy, *, port: int, host: str = LOOPBACK, **engine: Any) -> Any:
    """Start a server and return it. Call its `stop()` to end it.

    Args:
        policy: The policy to serve.
        port: The port to listen on.
        host: The address to listen on. There is no authentication: use another address than the
            loopback address only in a network that you trust ("0.0.0.0": every IPv4 address).
        engine: The other arguments of interop.jetstream.make_engine, such as tokenizer.
    """
    engine_api()
    orchestrator: Any = importlib.import_module("jetstream.core.orchestrator")
    server_lib: Any = importlib.import_module("jetstream.core.server_lib")
    config_lib = importlib.import_module("jetstream.core.config_lib")
    logging.getLogger().setLevel(logging.WARNING)  # otherwise it writes each token to stdout
    server_lib._HOST = f"[{host}]" if ":" in host else host  # it has no host argument
    orchestrator.delete_pytree = _delete  # the original calls jax.tree_map, removed in jax 0.6

    def create(devices: object) -> Any:
        return make_engine(policy, **engine)

    config = config_lib.ServerConfig(
        interleaved_slices=(f"{jax.devices()[0].platform}={jax.device_count()}",),
        interleaved_engine_create_fns=(create,),
    )
    return server_lib.run(port=port, config=config, devices=jax.devices(), jax_padding=False)


def _delete(tree: object) -> None:
    """Free the arrays of a prefix."""
    for leaf in jax.tree.leaves(tree):
        if isinstance(leaf, jax.Array):
            leaf.delete()


def main(arguments: Sequence[str] | None = None) -> None:
    """Serve until SIGINT or SIGTERM."""
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0] if __doc__ else None, formatter_class=DefaultsHelp
    )
    parser.add_argument("--policy", type=Path, required=True, help="Hugging Face directory")
    parser.add_argument(
        "--decoder", metavar="FILE.py:CLASS", help="your own layers, see docs/own_decoder.md"
    )
    parser.add_argument("--port", type=int, default=9000, help="port to listen on")
    parser.add_argument(
        "--host", default=LOOPBACK, help="address to listen on; 0.0.0.0 is every IPv4 address"
    )
    parser.add_argument("--slots", type=int, default=8, help="sequences that decode concurrently")
    parser.add_argument("--max-length", type=int, default=1024, help="prompt and answer, tokens")
    parser.add_argument("--max-new-tokens", type=int, default=512, help="longest answer, tokens")
    parser.add_argument("--tokens-per-step", type=int, default=8, help="tokens in one generate")
    parser.add_argument("--temperature", type=float, default=1.0, help="0 is greedy")
    args = parser.parse_args(arguments)
    tokenizer = load_tokenizer(args.policy)
    server = start_server(
        Policy.from_pretrained(args.policy, decoder=args.decoder),
        port=args.port,
        host=args.host,
        slots=args.slots,
        max_length=args.max_length,
        max_new_tokens=args.max_new_tokens,
        tokens_per_step=args.tokens_per_step,
        sampling=SamplingParams(temperature=args.temperature),
        stop_token_ids=tuple(tokenizer.eos_ids),
        tokenizer=tokenizer,
    )
    print(f"serving {args.policy} on {args.host}, port {args.port}", flush=True)
    ended = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: ended.set())
    ended.wait()
    assert server is not None  # the server ends with its last reference
    os._exit(0)  # JetStream's own stop waits for threads that never end


if __name__ == "__main__":
    main()
