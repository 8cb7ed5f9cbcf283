"""python -m jaxrl_async.train CONFIG [section.key=value ...]: the main job.

    --help           every field with its unit, range and default
    --print-config   the resolved configuration, as YAML
    --resume         continue from the newest checkpoint of the run (run.resume=true)

Exit codes: 0 finished, or stopped by one Ctrl-C with everything saved; 1 a failure, explained on
stderr; 2 a bad command line or configuration; 130 a second Ctrl-C.
"""

import importlib
import sys
import traceback
from collections.abc import Sequence

from jaxrl_async.config.load import dump, help_text, load
from jaxrl_async.errors import ConfigError, JaxrlError
from jaxrl_async.launch import distributed

USAGE = (
    "usage: python -m jaxrl_async.train CONFIG [section.key=value ...] [--resume] [--print-config]"
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line `argv` (without the program's name); the exit code."""
    args = list(sys.argv[1:] if argv is None else argv)
    if "--help" in args or "-h" in args:
        print(USAGE, "", help_text(), sep="\n")
        return 0
    flags = {a for a in args if a.startswith("-")}
    words = [a for a in args if not a.startswith("-")]
    unknown = flags - {"--resume", "--print-config"}
    if unknown or not words or "=" in words[0]:
        wrong = (
            f"unknown option {sorted(unknown)[0]}"
            if unknown
            else "the configuration file is missing"
        )
        print(f"{wrong}\n{USAGE}", file=sys.stderr)
        return 2
    try:
        overrides = [*words[1:], *(["run.resume=true"] if "--resume" in flags else [])]
        config = load(words[0], overrides)
        if "--print-config" in flags:
            print(dump(config), end="")
            return 0
        # Loaded late, so that --help and a typo in a config answer without importing JAX.
        config = distributed.start(config)
        importlib.import_module("jaxrl_async.run.loop").train(config)
    except ConfigError as error:
        print(f"config error: {error}", file=sys.stderr)
        return distributed.leave(2)
    except JaxrlError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return distributed.leave(1)
    except Exception:
        traceback.print_exc()
        return distributed.leave(1)
    return 0


if __name__ == "__main__":
    sys.exit(main())
