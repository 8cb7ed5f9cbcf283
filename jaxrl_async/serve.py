"""python -m jaxrl_async.serve DIR: serve a policy to OpenAI and Anthropic clients.

Clients send the key in the environment variable JAXRL_ASYNC_KEY (--key-variable), or a new key,
which is printed. The server listens on this machine's loopback address unless --host names another.
See docs/endpoint.md.

Exit codes: 0 ended by Ctrl-C, SIGTERM or SIGHUP; 1 a failure, explained on stderr; 2 a bad command
line.
"""

import argparse
import os
import secrets
import signal
import sys
import threading
from collections.abc import Sequence
from pathlib import Path

from jaxrl_async.config.schema import SamplerSection
from jaxrl_async.data.addresses import local_argument
from jaxrl_async.data.chat import chat_format, has_chat_format
from jaxrl_async.data.images import ImageStore
from jaxrl_async.data.tokenizer import load_tokenizer
from jaxrl_async.endpoint.adapter_admin import AdapterAdmin
from jaxrl_async.endpoint.http_server import LOOPBACK, Endpoint
from jaxrl_async.endpoint.image_chat import with_images
from jaxrl_async.endpoint.sampling_request import CallerLimits, stop_ids
from jaxrl_async.endpoint.service import EndpointLimits, EndpointService, Served
from jaxrl_async.errors import ConfigError, JaxrlError, exit_code_after
from jaxrl_async.help_format import command_parser, whole_number
from jaxrl_async.host import limit_arenas, only_new_garbage
from jaxrl_async.huge_pages import start_with_huge_pages
from jaxrl_async.metrics.guarded_stream import guarded_output
from jaxrl_async.metrics.json_logs import OWN, lines_for_people, logs_as
from jaxrl_async.model.adapter_stack import AdapterRoom
from jaxrl_async.model.lora import Lora
from jaxrl_async.model.peft import load_peft
from jaxrl_async.model.policy import Policy
from jaxrl_async.model.spec import Params
from jaxrl_async.model.vision.image_form import images_of
from jaxrl_async.ports.generate import Generate
from jaxrl_async.run.builders.program_cache import verify_compiled_programs
from jaxrl_async.run.signals import STOPPING, listens_to
from jaxrl_async.sampler.device.sampling import Mix
from jaxrl_async.sampler.sampler import Sampler
from jaxrl_async.sampler.setup import SamplerSettings, roomy_section
from jaxrl_async.shown_environment import hide_secrets
from jaxrl_async.stuck_threads import at_exit_end_with
from jaxrl_async.types import SamplingParams

KEY_VARIABLE = "JAXRL_ASYNC_KEY"
"""Environment variable with the clients' key."""
USUAL_SLOTS = 8
"""Number of slots if only other limits are given."""
USUAL_ADAPTERS = 8
"""Number of adapter slots if calls may load adapters."""
USUAL_RANK = 32
"""Rank of adapter slots if no adapter is given at the start."""
USUAL_KINDS = (Mix(), Mix(shaped=True), Mix(top=8), Mix(greedy=True))
"""Kinds of sampling that clients usually ask for: no setting, constraints, log-probs of other
tokens, temperature 0. Their programs are compiled in the background from the start on."""
KEY_BYTES = 24
"""Random bytes of a generated key."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line `argv` (without the program's name); return the exit code."""
    args = _parser().parse_args(argv)
    hide_secrets((args.key_variable,))
    limit_arenas()
    with guarded_output(), lines_for_people(OWN):
        return _serve(args)


def _serve(args: argparse.Namespace) -> int:
    stop = threading.Event()
    before = {
        number: signal.signal(number, lambda *_: stop.set())
        for number in STOPPING
        if listens_to(number)
    }
    try:
        key = os.environ.get(args.key_variable, "").strip()
        if not key:
            key = secrets.token_urlsafe(KEY_BYTES)
            print(f"key: {key}", flush=True)
        args.folder = local_argument(args.folder, "model")
        verify_compiled_programs()
        policy = Policy.from_pretrained(args.folder, decoder=args.decoder)
        adapters = loaded_adapters(args, policy)
        images = None
        if policy.tower is not None:
            images = images_of(policy.tower, policy.spec, policy.tokenizer)
        room = adapter_room(args, [lora for _, lora, _ in adapters])
        settings = SamplerSettings(
            adapters=room, images=images, mixes=USUAL_KINDS[:1], possible=USUAL_KINDS
        )
        section = sampler_section(args, policy, settings.adapters)
        with (
            logs_as("text"),
            Sampler(policy, section=section, seed=args.seed, settings=settings) as sampler,
        ):
            sampler.start()  # and compile
            for name, lora, adapter in adapters:
                sampler.adapters.load(name, (lora, adapter))
            served = served_policy(
                args.folder, sampler, sampler.section, args.chat_format, images=images
            )
            limits = EndpointLimits(max_open_calls=args.max_open_calls)
            admin = None
            if settings.adapters is not None:
                admin = AdapterAdmin(served.name, sampler.adapters, loads_from=args.adapters_from)
            service = EndpointService(
                served,
                limits,
                guest_keys=(key,),
                adapters=admin,
                cors_origins=tuple(args.cors),
            )
            with Endpoint(service, host=args.host, port=args.port) as endpoint, only_new_garbage():
                print(f"serving {served.name} at {endpoint.address}/v1", flush=True)
                stop.wait()
        return 0
    except JaxrlError as error:
        return exit_code_after(error)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler or signal.SIG_DFL)


def loaded_adapters(args: argparse.Namespace, policy: Policy) -> list[tuple[str, Lora, Params]]:
    """Load the adapters of the command line, with their names. Raises ConfigError and
    CheckpointError."""
    loaded: dict[str, tuple[str, Lora, Params]] = {}
    for text in args.adapter:
        name, is_named, folder = text.partition("=")
        if not (is_named and name and folder):
            raise ConfigError(f"--adapter {text}: give NAME=DIR.")
        if name in loaded or name == args.folder.resolve().name:
            raise ConfigError(f"--adapter {text}: another model is called {name}; rename one.")
        loaded[name] = (name, *load_peft(folder, policy.spec))
    return list(loaded.values())


def adapter_room(args: argparse.Namespace, loras: Sequence[Lora]) -> AdapterRoom | None:
    """Return the sampler's adapter slots; None: no adapters are served. Raises ConfigError."""
    if not loras and args.adapters_from is None:
        if args.max_loras or args.max_lora_rank:
            raise ConfigError(
                "--max-loras and --max-lora-rank: no adapters are served; give --adapter "
                "NAME=DIR, or --adapters-from DIR."
            )
        return None
    if args.adapters_from is not None and not args.adapters_from.is_dir():
        raise ConfigError(f"--adapters-from {args.adapters_from}: there is no such folder.")
    usual = len(loras) if args.adapters_from is None else max(USUAL_ADAPTERS, len(loras))
    rank = max([lora.rank for lora in loras], default=USUAL_RANK)
    return AdapterRoom(places=args.max_loras or usual, rank=args.max_lora_rank or rank)


def sampler_section(
    args: argparse.Namespace, policy: Policy, room: AdapterRoom | None = None
) -> SamplerSection:
    """Return the sampler's settings, with slots for adapters if given. Raises ConfigError."""
    usual = roomy_section(policy.spec, "float32", room)
    length = args.max_length or usual.max_length
    if length < 2:
        raise ConfigError(f"--max-length {length}: give 2 tokens or more.")
    chosen = args.slots or args.max_length or args.kv_memory_mib
    return usual.model_copy(
        update={
            "slots": args.slots or (USUAL_SLOTS if chosen else usual.slots),
            "max_length": length,
            "max_new_tokens": min(args.max_new_tokens or length - 1, length - 1),
            "kv_memory_mib": args.kv_memory_mib if chosen else usual.kv_memory_mib,
        }
    )


def served_policy(
    folder: Path,
    generate: Generate,
    section: SamplerSection,
    chat: str = "auto",
    *,
    images: ImageStore | None = None,
) -> Served:
    """Return what the endpoint serves of a policy's folder. Raises DataError and ConfigError.

    Args:
        folder: with the tokenizer.
        generate: the sampler.
        section: its settings.
        chat: the chat format; see data.chat_format.
        images: of the sampler; None: the model reads texts alone.
    """
    tokenizer = load_tokenizer(folder)
    tokenizer.images = images
    tokenizer.max_tokens = section.max_length
    renderer = None
    if has_chat_format(tokenizer, chat):
        renderer = chat_format(tokenizer, folder, chat)
    return Served(
        name=folder.resolve().name,
        generate=generate,
        tokenizer=tokenizer,
        chat=with_images(renderer, images),
        terms=CallerLimits(
            sampling=SamplingParams(),
            stop_token_ids=stop_ids(tokenizer, renderer),
            max_new_tokens=section.max_new_tokens,
            max_length=section.max_length,
        ),
        streams_early=section.on_new_weights != "restart",
    )


def _parser() -> argparse.ArgumentParser:
    parser = command_parser("serve", __doc__)
    add, count = parser.add_argument, whole_number("a positive integer", 1)
    add("folder", metavar="DIR", help="Hugging Face directory of the policy, or its address")
    add("--host", default=LOOPBACK, help="address to listen on; 0.0.0.0 is every IPv4 address")
    add("--port", type=int, default=8000, help="port to listen on; 0: any free port")
    add(
        "--key-variable",
        default=KEY_VARIABLE,
        metavar="NAME",
        help="environment variable that holds the key",
    )
    add(
        "--slots",
        type=count,
        help="sequences generated at the same time (default: as many as fit)",
    )
    add(
        "--max-length",
        type=count,
        help="maximum tokens of prompt and answer (default: the model's, at most 2048)",
    )
    add(
        "--max-new-tokens",
        type=count,
        help="maximum tokens of an answer (default: what the prompt leaves)",
    )
    add(
        "--kv-memory-mib",
        type=count,
        help="memory of KV cache and adapters, MiB (default: what the slots need)",
    )
    add("--max-open-calls", type=count, default=1024, help="concurrent calls; more get 429")
    add("--cors", action="append", default=[], metavar="ORIGIN", help="web page that may call")
    add("--chat-format", default="auto", help="auto, template, FILE.jinja or a renderer's name")
    add("--adapter", action="append", default=[], metavar="NAME=DIR", help="PEFT adapter to serve")
    add("--adapters-from", type=Path, metavar="DIR", help="calls may load adapters from below here")
    add(
        "--max-loras",
        type=count,
        help="maximum number of loaded adapters (default: those given, or 8)",
    )
    add(
        "--max-lora-rank",
        type=count,
        help="maximum rank of an adapter (default: of those given, or 32)",
    )
    add("--decoder", metavar="FILE.py:CLASS", help="custom decoder, see docs/own_decoder.md")
    add("--seed", type=int, default=0, help="seed for calls that give none")
    return parser


if __name__ == "__main__":
    start_with_huge_pages()
    sys.exit(at_exit_end_with(main()))
