"""python -m jaxrl_async.plan CONFIG [section.key=value ...] --topology v5e-64 | h100-8: does it
fit?

Compiles a run's programs with the real compiler for TPUs or NVIDIA GPUs, on any machine; the slices
and cards need not exist. Reports what their memory holds, what takes time, and how fast trainer and
samplers are together. Nothing runs on a device, and no weights are loaded. Compiled programs are
cached (--cache).

Exit codes: 0 it fits; 1 it does not, or something failed; 2 a bad command line or configuration.
"""

import argparse
import importlib
import importlib.util
import json
import logging
import os
import sys
from collections.abc import Sequence
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path

from jaxrl_async.config.load import load
from jaxrl_async.config.schema import Config
from jaxrl_async.errors import ConfigError, JaxrlError, MeshError, MissingExtraError
from jaxrl_async.help_format import command_parser
from jaxrl_async.plan import cuda
from jaxrl_async.plan.chips import Chip, Slice, parse_chips, parse_slice
from jaxrl_async.plan.lengths import assumed, read_lengths

COMPILER_ENV = {
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",  # otherwise a second compiling process is refused
    "JAX_PLATFORMS": "cpu",  # nothing runs on a device
    "TPU_ACCELERATOR_TYPE": "v5litepod-16",  # has no effect, but must be set
    "TPU_SKIP_MDS_QUERY": "1",  # no metadata server
    "TPU_WORKER_HOSTNAMES": "localhost",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line `argv` (without the program's name) and return the exit code."""
    args = _parser().parse_intermixed_args(argv)
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    logging.getLogger("jaxrl_async.plan").setLevel(logging.INFO)
    try:
        config = load(args.config, args.overrides)
        if config.runs:
            raise ConfigError(
                "runs: a plan of several adapters in one run is not supported. Give the "
                "configuration of one adapter (RUN/NAME/config.yaml, or without `runs`). Each "
                "further one adds an adapter with its moments to the trainer, and an adapter slot "
                "to each sampler."
            )
        trainer = _trainer_slices(args)
        if trainer.count > 1 and config.mesh.samplers_in != "external":
            raise ConfigError(
                f"--num-slices {trainer.count} is for a trainer on separate slices, and with "
                f"mesh.samplers_in={config.mesh.samplers_in} the samplers are on them. Set "
                "mesh.samplers_in=external."
            )
        config = config.on_devices(*_kind_of(trainer.chip))
        name = args.sampler_topology or _samplers_of(config, trainer)
        samplers = parse_chips(name) if name else None
        longest = config.sampler.max_new_tokens
        lengths = read_lengths(Path(args.lengths), longest) if args.lengths else assumed(longest)
        os.environ |= _compiler_env(trainer.chip, samplers[0] if samplers else trainer.chip)
        if args.cache:
            os.environ["JAXRL_ASYNC_CACHE"] = args.cache
        # Loaded late: the environment must be set before JAX starts.
        planning, text, tips, files = (
            importlib.import_module(f"jaxrl_async.plan.{name}")
            for name in ("plan", "text", "advice", "launch_files")
        )
        plan = planning.plan_run(config, trainer, samplers, lengths)
        print(text.plan_text(plan))
        for line in tips.advice(plan, config):
            print(line)
        if args.json:
            Path(args.json).write_text(json.dumps(text.plan_json(plan), indent=1) + "\n", "utf-8")
        if args.write and plan.fits:
            chosen, best = files.best_that_fits(config, plan, trainer, lengths)
            print("\n" + text.choice_text(best))
            print("\n".join(files.write_launch_files(Path(args.write), chosen, best)))
        return 0 if plan.fits else 1
    except (ConfigError, MeshError) as error:
        print(f"config error: {error}", file=sys.stderr)
        return 2
    except (JaxrlError, OSError) as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 1


def _parser() -> argparse.ArgumentParser:
    parser = command_parser("plan", (__doc__ or "").split("\n\n")[1])
    parser.add_argument("config", metavar="CONFIG")
    parser.add_argument("overrides", nargs="*", metavar="section.key=value")
    parser.add_argument(
        "--topology",
        required=True,
        help="the trainer's slice: v5e-64 (64 chips), or v5e:8x8; or NVIDIA cards: h100-8, or "
        "h100:2x8 (hosts and the cards of each); shared by trainer and samplers unless "
        "mesh.samplers_in=external",
    )
    parser.add_argument(
        "--num-slices",
        type=int,
        default=1,
        metavar="N",
        help="the trainer has N slices of --topology, joined by the data center network; requires "
        "mesh.trainer.data to be a multiple of N, and mesh.samplers_in=external",
    )
    parser.add_argument(
        "--sampler-topology",
        help="total chips of all samplers, each on its own slice (mesh.samplers_in=external); "
        "default: as in mesh, of the trainer's generation",
    )
    parser.add_argument(
        "--lengths",
        metavar="FILE",
        help='a run\'s folder, or JSON: {"LENGTH": WEIGHT, ...} or a list of lengths (default: '
        "assumed from sampler.max_new_tokens)",
    )
    parser.add_argument(
        "--write",
        metavar="FOLDER",
        help="write the best split that fits as a configuration and a values file, and print the "
        "commands to launch them",
    )
    parser.add_argument("--json", metavar="FILE", help="also write all numbers to this file")
    parser.add_argument(
        "--cache", metavar="FOLDER", help="folder of compiled results (default: the user's cache)"
    )
    return parser


def _trainer_slices(args: argparse.Namespace) -> Slice:
    """Return the trainer's slice or slices. Raises ConfigError."""
    one = parse_slice(args.topology)
    if args.num_slices < 1:
        raise ConfigError(f"--num-slices {args.num_slices}: give 1 or more.")
    if args.num_slices > 1 and args.write:
        raise ConfigError(
            "--write divides the chips of one slice and does not support --num-slices: "
            "leave out --write, and set trainer.tpu.slices in the values file by hand."
        )
    return replace(one, count=args.num_slices)


def _samplers_of(config: Config, trainer: Slice) -> str | None:
    """Return the samplers' chips as a topology; None if they have no separate slices."""
    mesh = config.mesh
    if mesh.samplers_in != "external":
        return None
    devices = mesh.samplers * mesh.sampler.num_devices
    return f"{trainer.chip.generation}-{max(1, devices // trainer.chip.devices)}"


def _kind_of(chip: Chip) -> tuple[str, str | None]:
    """Return JAX's platform and, for a card, its compute capability."""
    return ("gpu", cuda.capability_of(chip)) if chip.is_card else ("tpu", None)


def _compiler_env(trainer: Chip, sampler: Chip) -> dict[str, str]:
    """Return the environment that the compiler needs. Raises ConfigError; MissingExtraError if the
    compiler is not installed."""
    if trainer.is_card != sampler.is_card:
        raise ConfigError(
            f"--topology has {trainer.generation} and --sampler-topology {sampler.generation}: a "
            "plan is for TPUs or for NVIDIA cards. Plan each side with samplers of the same kind."
        )
    if trainer.is_card:
        cuda.check_compiler()
        return cuda.environment()
    if importlib.util.find_spec("libtpu") is None:
        raise MissingExtraError(
            "libtpu, the TPU compiler, is not installed (it needs no TPU): pip install "
            f"'jax[tpu]=={version('jax')}'"
        )
    return COMPILER_ENV


if __name__ == "__main__":
    sys.exit(main())
