"""Export a policy for other programs: a Hugging Face directory, or an adapter in PEFT's format.

    jaxrl-async export runs/addition OUT                     the policy at the end of a run
    jaxrl-async export runs/addition OUT --step 50           the policy of a checkpoint, also during the run
    jaxrl-async export runs/math OUT --adapter-only          only the adapter
    jaxrl-async export Qwen3-0.6B OUT --adapter DIR          a model with a PEFT adapter added to its weights
    jaxrl-async export Qwen3-0.6B OUT --dtype bfloat16       in another data type
    jaxrl-async export runs/addition OUT --upload ME/NAME    also upload it to the Hugging Face hub, with a card

Exit codes: 0 written; 1 the source does not exist or cannot be read; 2 a bad command line.
"""  # noqa: E501

import argparse
import importlib
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jaxrl_async import __version__
from jaxrl_async.data.addresses import local_argument
from jaxrl_async.data.gguf_file import POINTER
from jaxrl_async.data.hub import Upload
from jaxrl_async.errors import ConfigError, JaxrlError, exit_code_after
from jaxrl_async.help_format import command_parser
from jaxrl_async.metrics.json_logs import lines_for_people

GGUF_BASE = (
    ", which points to a GGUF file and has no weights for PEFT: export that, too "
    "(jaxrl-async export FILE.gguf OUT), and give PEFT the folder"
)


@lines_for_people()
def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line `argv` (without the program's name); return the exit code."""
    args = _parser().parse_args(argv)
    try:
        args.source = local_argument(args.source)
        _check(args)
        if "JAX_PLATFORMS" not in os.environ:  # a run may hold the accelerator
            importlib.import_module("jax").config.update("jax_platforms", "cpu")
        hub = Upload(args.upload, private=args.private) if args.upload is not None else None
        print(_written(args))
        if hub is not None:
            print(hub.send(args.out, f"jaxrl_async {__version__}: {args.source.resolve().name}"))
    except (JaxrlError, OSError) as error:
        return exit_code_after(error)
    return 0


def _written(args: argparse.Namespace) -> str:
    """Write the requested files; return a description of them."""
    saved: Any = importlib.import_module("jaxrl_async.run.saved_policy")
    paths = importlib.import_module("jaxrl_async.run.folder").Paths(args.source)
    base = None
    if not _is_run(args.source):
        policy = importlib.import_module("jaxrl_async.model.policy").Policy.from_pretrained(
            args.source,
            dtype=args.dtype or saved.dtype_of(args.source),
            adapter=args.adapter,
            decoder=args.decoder,
        )
    elif args.step is not None:
        policy, base = saved.write_step(
            paths, args.step, args.out, args.dtype, adapter_only=args.adapter_only
        )
    elif args.adapter_only:
        policy, base = saved.adapter_at_end(paths, args.dtype)
    else:
        policy = saved.policy_at_end(paths, args.dtype, args.decoder)
    if args.adapter_only:
        if args.step is None:
            policy.save_adapter(args.out, base)
            _write_card(args, paths)
        hint = GGUF_BASE if base and (Path(base) / POINTER).is_file() else ""
        return f"{args.out}: the adapter only, in PEFT's format; its base is {base}{hint}"
    if args.step is None:
        policy.save_pretrained(args.out)
        _write_card(args, paths)
    return f"{args.out}: a Hugging Face directory of {policy!r}, in {saved.dtype_of(args.out)}"


def _write_card(args: argparse.Namespace, paths: object) -> None:
    """Write README.md, the card of a run's policy, unless another one exists."""
    if _is_run(args.source):
        cards = importlib.import_module("jaxrl_async.run.model_card")
        card = cards.model_card(paths, adapter=args.adapter_only)
        (args.out / "README.md").write_text(card, encoding="utf-8")


def _check(args: argparse.Namespace) -> None:
    """Raise ConfigError if the arguments are inconsistent."""
    if not args.source.is_dir():
        raise ConfigError(f"{args.source}: there is no such folder. Give a run's or a policy's.")
    if args.out.exists() and (not args.out.is_dir() or any(args.out.iterdir())):
        raise ConfigError(f"{args.out} already exists. Give a new folder, or empty it.")
    is_run = _is_run(args.source)
    if not is_run and not (args.source / "config.json").is_file():
        raise ConfigError(
            f"{args.source} is neither the folder of a run (config.yaml) nor a Hugging Face "
            "directory (config.json)."
        )
    if args.private and args.upload is None:
        raise ConfigError("--private is for an upload. Give --upload OWNER/NAME, or leave it out.")
    if is_run and args.adapter:
        raise ConfigError("--adapter: a run's own adapter is always added. Give a policy.")
    if not is_run and (args.step is not None or args.adapter_only):
        raise ConfigError("--step and --adapter-only are for runs; this is a policy's directory.")


def _is_run(folder: Path) -> bool:
    return (folder / "config.yaml").is_file()


def _parser() -> argparse.ArgumentParser:
    parser = command_parser("export", __doc__)
    add = parser.add_argument
    add("source", metavar="RUN|POLICY", help="folder of a run or a policy, or its address")
    add("out", type=Path, metavar="OUT", help="new folder")
    add(
        "--dtype",
        choices=("float32", "bfloat16"),
        help="data type of weights (default: unchanged)",
    )
    add(
        "--step",
        type=int,
        metavar="N",
        help="a run's checkpoint after N updates (default: its end)",
    )
    add("--adapter", metavar="DIR", help="PEFT adapter to add to a policy's weights")
    add("--adapter-only", action="store_true", help="write only a run's adapter, in PEFT's format")
    add("--upload", metavar="OWNER/NAME", help="also upload it to the Hugging Face hub")
    add("--private", action="store_true", help="make the uploaded repository private")
    add("--decoder", metavar="FILE.py:CLASS", help="custom decoder, see docs/own_decoder.md")
    return parser


if __name__ == "__main__":
    sys.exit(main())
