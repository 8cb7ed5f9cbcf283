"""Show runs on a page that updates as they run: python -m jaxrl_async.view RUN...

RUN is a run's folder, a folder that contains runs, or the address of a copy, which is read once.
Runs that begin later in these folders appear on the page. It is served to this machine only, unless
--host is set, and needs no network.
"""

import sys
from collections.abc import Sequence
from pathlib import Path

from jaxrl_async.data.addresses import local_argument
from jaxrl_async.errors import ConfigError, JaxrlError, exit_code_after
from jaxrl_async.help_format import command_parser
from jaxrl_async.view.page_server import ViewServer
from jaxrl_async.view.run_list import RunList


def main(argv: Sequence[str] | None = None) -> int:
    """Serve the page until Ctrl-C; return the exit code."""
    parser = command_parser("view", __doc__)
    parser.add_argument(
        "runs", nargs="+", metavar="RUN", help="folder of a run, or of runs, or its address"
    )
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on")
    parser.add_argument("--port", type=int, default=0, help="port to listen on; 0: any free one")
    args = parser.parse_args(argv)
    try:
        server = made_server(
            [local_argument(run, "records of a run") for run in args.runs], args.host, args.port
        )
    except JaxrlError as error:
        return exit_code_after(error)
    with server:
        print(f"{server.address}   (Ctrl-C ends it)", flush=True)
        try:
            server.serve_forever(poll_interval=0.2)
        except KeyboardInterrupt:
            print()
    return 0


def made_server(folders: Sequence[Path], host: str, port: int) -> ViewServer:
    """Listen for the page of the runs in some folders. Raises ConfigError."""
    runs = RunList(folders)
    try:
        return ViewServer(runs, host, port)
    except (OSError, OverflowError) as error:
        raise ConfigError(
            f"{host}:{port}: nothing can listen there ({error}). Give an address of this machine "
            "and a free port."
        ) from error


if __name__ == "__main__":
    sys.exit(main())
