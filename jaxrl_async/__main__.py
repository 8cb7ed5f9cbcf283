"""python -m jaxrl_async: the same as the command jaxrl-async."""

import sys

from jaxrl_async.command.entry_point import main

if __name__ == "__main__":
    sys.exit(main())
