"""Check this machine, and what a configuration needs: jaxrl-async doctor [CONFIG [section.key=value ...]].

Packages and their versions, devices with their memory, host memory, cores, /dev/shm, disk and the
compile cache. With a configuration, also its extras, files, functions, tokenizer and memory. Each
line is ok, a warning or an error, with what to do. Nothing is trained or changed.

Exit codes: 0 no error; 1 an error; 2 a bad command line.
"""  # noqa: E501

import argparse
import importlib
import math
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

from jaxrl_async.command.diagnostic import Diagnostic
from jaxrl_async.command.machine import check_host, check_packages, find_devices
from jaxrl_async.config.load import load
from jaxrl_async.config.schema import Config
from jaxrl_async.errors import ConfigError
from jaxrl_async.help_format import command_parser
from jaxrl_async.metrics.json_logs import lines_for_people


@lines_for_people()
def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line `argv` (without the program's name); return the exit code."""
    args = _parser().parse_intermixed_args(argv)
    diagnostics = _printed("packages", check_packages())
    devices, device_diagnostics = find_devices(args.timeout)
    diagnostics += _printed("devices", device_diagnostics)
    config, problem = _loaded(args)
    # Not earlier: the configuration's part imports JAX, which must not take the devices here.
    importlib.import_module("jax").config.update("jax_platforms", "cpu")
    checks = importlib.import_module("jaxrl_async.command.config_checks")
    runs = Path("runs" if config is None else config.run.dir)
    diagnostics += _printed("host", check_host(runs, checks.cache_of(config)))
    if problem is not None:
        diagnostics += _printed(args.config, [problem])
    if config is not None:
        diagnostics += _printed(args.config, checks.check_config(config, devices))
    levels = [diagnostic.level for diagnostic in diagnostics]
    errors, warnings = levels.count("error"), levels.count("warning")
    print(f"\n{errors} errors, {warnings} warnings")
    return 1 if errors else 0


def _loaded(args: argparse.Namespace) -> tuple[Config | None, Diagnostic | None]:
    if args.config is None:
        return None, None
    try:
        return load(args.config, args.overrides), None
    except ConfigError as error:
        return None, Diagnostic("error", str(error))


def _printed(title: str, diagnostics: Iterable[Diagnostic]) -> list[Diagnostic]:
    """Print diagnostics under a title, each as it is found; return them."""
    print(f"\n{title}", flush=True)
    printed = []
    for diagnostic in diagnostics:
        print(diagnostic, flush=True)
        printed.append(diagnostic)
    return printed


def _parser() -> argparse.ArgumentParser:
    parser = command_parser("doctor", __doc__)
    parser.add_argument("config", nargs="?", metavar="CONFIG", help="a YAML file, or recipe:NAME")
    parser.add_argument("overrides", nargs="*", metavar="section.key=value")
    parser.add_argument(
        "--timeout",
        type=_seconds,
        default=60.0,
        metavar="S",
        help="timeout of JAX's list of devices, seconds",
    )
    return parser


def _seconds(text: str) -> float:
    """Parse a time in seconds. Raises ArgumentTypeError."""
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0 < seconds < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is not a time in seconds, such as 60")
    return seconds


if __name__ == "__main__":
    sys.exit(main())
