"""The files that a sandbox sees, and the command that makes its namespaces. Standard library only.

    /            a tmpfs of limited size, writable; everything below is gone with the sandbox
    /usr, ...    of this machine, read-only, as is the Python that runs the first process
    /proc, /dev  of the sandbox's own PID namespace; null, zero, full, random, urandom, tty, ptys

Nothing else of this machine exists there: no home directory, no run folder, no socket.
"""

import os
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

SYSTEM = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32")
"""Folders with programs and libraries; links stay links."""
SETTINGS = (
    "/etc/alternatives", "/etc/ld.so.cache", "/etc/ld.so.conf", "/etc/ld.so.conf.d", "/etc/ssl",
    "/etc/ca-certificates", "/etc/localtime", "/etc/os-release", "/etc/debian_version",
    "/etc/mime.types", "/etc/terminfo", "/etc/nsswitch.conf",
)  # fmt: skip
ONLINE = ("/etc/resolv.conf",)
"""Added where the sandbox has the machine's network."""
FIRST = "/.first_process.py"
OPTIONS = ("-I", "-S")
"""Options of Python for the first process: no environment variables, no site-packages."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SandboxLayout:
    """What a sandbox sees."""

    shown: Sequence[tuple[str, str]]  # files and folders of this machine: (here, in the sandbox)
    links: Sequence[tuple[str, str]]  # (target, path)
    disk_bytes: int  # size of the writable tmpfs
    shm_bytes: int  # size of /dev/shm
    network: bool


def layout_of(*, disk_mb: int, network: bool, readable: Sequence[str]) -> SandboxLayout:
    """Return what a sandbox sees.

    Args:
        disk_mb: size of everything that it writes, and once more of /dev/shm, MiB.
        network: whether it has this machine's network.
        readable: further files and folders of this machine, at the same paths.
    """
    shown, links = [], []
    for path in SYSTEM:
        if os.path.islink(path):
            links.append((os.readlink(path), path))
        elif os.path.isdir(path):
            shown.append((path, path))
    settings = (*SETTINGS, *(ONLINE if network else ()))
    shown += [(os.path.realpath(path), path) for path in settings if os.path.exists(path)]
    for prefix in dict.fromkeys((*python_folders(), *readable)):
        if not prefix.startswith(("/usr/", "/bin/")):
            shown.append((os.path.realpath(prefix), prefix))
    shown.append((str(Path(__file__).with_name("first_process.py")), FIRST))
    size = disk_mb << 20
    return SandboxLayout(
        shown=shown, links=links, disk_bytes=size, shm_bytes=size // 4 or 1, network=network
    )


def python_folders() -> tuple[str, ...]:
    """Return the folders that this process's Python needs, also behind links."""
    return tuple(
        dict.fromkeys(
            (
                sys.prefix,
                sys.base_prefix,
                str(Path(os.path.realpath(sys.executable)).parent.parent),
            )
        )
    )


def search_path() -> str:
    """Return PATH for commands in a sandbox: this Python's folder before the system's."""
    system = "/usr/local/bin:/usr/bin:/bin:/usr/local/sbin:/usr/sbin:/sbin"
    return f"{Path(sys.executable).parent}:{system}"


def first_command(limits: str) -> list[str]:
    """Return the first process's command. limits: JSON."""
    return [sys.executable, *OPTIONS, FIRST, limits]


def bubblewrap_command(layout: SandboxLayout, program: str, limits: str) -> list[str]:
    """Return the command by which bubblewrap starts a sandbox. program: path of bwrap."""
    words = [program, "--unshare-user", "--unshare-pid", "--unshare-ipc", "--unshare-uts"]
    words += ["--unshare-cgroup-try", *([] if layout.network else ["--unshare-net"])]
    words += ["--uid", "0", "--gid", "0", "--hostname", "sandbox", "--die-with-parent"]
    words += ["--new-session", "--as-pid-1", "--clearenv", "--cap-drop", "ALL"]
    words += ["--size", str(layout.disk_bytes), "--tmpfs", "/"]
    for here, there in layout.shown:
        words += ["--ro-bind", here, there]
    for target, path in layout.links:
        words += ["--symlink", target, path]
    words += ["--proc", "/proc", "--dev", "/dev"]
    words += ["--size", str(layout.shm_bytes), "--tmpfs", "/dev/shm", "--remount-ro", "/dev"]
    words += ["--perms", "1777", "--dir", "/tmp", "--dir", "/work", "--chdir", "/work", "--"]
    return words + first_command(limits)


def own_command(layout: SandboxLayout, limits: str) -> list[str]:
    """Return the command that starts a sandbox without bubblewrap (own_namespaces.py)."""
    import json

    plan: Mapping[str, object] = {
        "shown": list(layout.shown),
        "links": list(layout.links),
        "disk_bytes": layout.disk_bytes,
        "shm_bytes": layout.shm_bytes,
        "network": layout.network,
        "words": first_command(limits),
    }
    script = str(Path(__file__).with_name("own_namespaces.py"))
    return [sys.executable, *OPTIONS, script, json.dumps(plan)]


def start_command(layout: SandboxLayout, limits: str) -> list[str]:
    """Return the command that starts a sandbox: with bubblewrap if it is installed.

    Not as root, who would stay the machine's root with bubblewrap, and could change the kernel's
    settings in /proc/sys without any capability.
    """
    program = shutil.which("bwrap") if os.geteuid() else None
    return bubblewrap_command(layout, program, limits) if program else own_command(layout, limits)
