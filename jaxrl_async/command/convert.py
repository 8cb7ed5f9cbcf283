"""Write a configuration of TRL or verl as ours, and list what has no counterpart.

    jaxrl-async convert trl_config.yaml --out mine.yaml       a file as TRL's own command takes it
    jaxrl-async convert ppo_trainer.yaml data.train_batch_size=256        a file of verl, changed
    jaxrl-async convert verl data.train_files=gsm8k.parquet actor_rollout_ref.rollout.n=8
    jaxrl-async convert trl num_generations=8 max_steps=100 learning_rate=1e-6

In a script of verl's, replace `python3 -m verl.trainer.main_ppo` by `jaxrl-async convert verl`; in a
command of TRL's, `trl grpo` by `jaxrl-async convert trl`: its options with two dashes are read, too.
Settings that have the same value here by default are left out. From Python, jaxrl_async.from_trl does
the same for a GRPOConfig.

    --out FILE      write to a new FILE; else the configuration is printed
    --devices N     number of devices that train there, for batch sizes that are for each (1)
    --records N     number of training records, for lengths in epochs

Exit codes: 0 converted; 1 converted, and the result needs corrections, which are printed; 2 a bad
command line, or a file that cannot be read.
"""  # noqa: E501

import sys
from collections.abc import Sequence
from pathlib import Path

from jaxrl_async.config.load import load
from jaxrl_async.config.peers.counterpart import DEVICES, RECORDS, converted
from jaxrl_async.config.peers.peer_files import (
    fields_of_args,
    fields_of_file,
    nested,
    peer_of,
    written,
)
from jaxrl_async.errors import ConfigError

USAGE = "usage: jaxrl-async convert FILE|trl|verl|tunix [NAME=VALUE ...] [--out FILE]"
OWN = {"--out": "out", "--devices": DEVICES, "--records": RECORDS}
"""Options of this command; all other words are the library's."""


def main(argv: Sequence[str]) -> int:
    """Run the command line and return the exit code."""
    if not argv or argv[0] in ("--help", "-h"):
        print((__doc__ or "").strip() if argv else USAGE, file=sys.stdout if argv else sys.stderr)
        return 0 if argv else 2
    try:
        return _converted(*_split_options(list(argv[1:])), source=argv[0])
    except ConfigError as error:
        print(f"config error: {error}", file=sys.stderr)
        return 2


def _split_options(args: list[str]) -> tuple[dict[str, str], list[str]]:
    """Return this command's own options, and the other words. Raises ConfigError."""
    own: dict[str, str] = {}
    rest: list[str] = []
    while args:
        arg = args.pop(0)
        name, equals, value = arg.partition("=")
        if name not in OWN:
            rest.append(arg)
        elif not equals and not args:
            raise ConfigError(f"{name} needs a value. {USAGE}")
        else:
            own[OWN[name]] = value if equals else args.pop(0)
    return own, rest


def _converted(own: dict[str, str], args: list[str], *, source: str) -> int:
    out = Path(own["out"]) if "out" in own else None
    if out is not None and out.exists():
        raise ConfigError(f"{out} already exists. Give a new file.")
    devices, records = (_number(own.get(name), name) for name in (DEVICES, RECORDS))
    values = fields_of_args(args)
    peer = peer_of(source)
    if peer is None:
        peer, of_file = fields_of_file(Path(source))
        values = of_file | values
    conversion = converted(peer, values, devices=devices or 1, records=records)
    text = written(peer, conversion, source)
    if out is None:
        print(text, end="")
    else:
        try:
            out.write_text(text, encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"{out}: {error.strerror}. Give a new file.") from None
        print(f"{out}: {len(conversion.settings)} settings of {peer.name}'s", file=sys.stderr)
    for name, reason in conversion.unconverted.items():
        print(f"no counterpart: {name}: {reason}", file=sys.stderr)
    try:
        load(nested(conversion.settings), where="the converted settings")
    except ConfigError as error:
        print(f"to be corrected: {error}", file=sys.stderr)
        return 1
    return 0


def _number(text: str | None, name: str) -> int | None:
    """Return an option's number; None: it is not given. Raises ConfigError."""
    if text is not None and not (text.isdecimal() and int(text)):
        raise ConfigError(f"--{name.strip('*')} {text}: give a whole number of at least 1.")
    return None if text is None else int(text)
