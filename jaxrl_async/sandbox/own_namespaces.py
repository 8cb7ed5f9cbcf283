"""Make the namespaces and files of a sandbox without bubblewrap, then run its first process in
them. Linux, standard library only, run as a script; sandbox_layout.py has the arguments.

    this process ──fork──> a process that unshares ──fork──> PID 1 of the new namespaces:
         │ maps the users              │ waits               mounts, pivot_root, no capabilities,
         └ waits                       └                     the sandbox's root user, exec

Each dies with its parent, and the kernel ends all processes of the sandbox with PID 1.
"""

import ctypes
import fcntl
import json
import os
import signal
import socket
import struct
import sys
from contextlib import suppress
from typing import Any

# From linux/sched.h, linux/mount.h, linux/prctl.h, linux/securebits.h and linux/if.h.
NEW_USER, NEW_MOUNTS, NEW_PIDS, NEW_IPC, NEW_NAMES, NEW_NETWORK = (
    0x10000000, 0x00020000, 0x20000000, 0x08000000, 0x04000000, 0x40000000,
)  # fmt: skip
READ_ONLY, NO_SETUID, NO_DEVICES, NO_EXEC = 1, 2, 4, 8
REMOUNT, BIND, RECURSIVE, PRIVATE = 32, 4096, 16384, 1 << 18
LOCKED = READ_ONLY | NO_SETUID | NO_DEVICES | NO_EXEC | 1024 | 2048 | (1 << 21)
"""Flags of a mount that a user namespace may not drop: also noatime, nodiratime, relatime."""
DETACH = 2
PARENT_DEATH, DROP_CAPABILITY, SET_SECUREBITS, SET_NO_NEW_PRIVILEGES = 1, 24, 28, 38
NO_ROOT = 0b101111  # noroot and no setuid fix-ups, both locked
HIGHEST_CAPABILITY = 63
PIVOT_ROOT = {"x86_64": 155, "aarch64": 41}
GET_FLAGS, SET_FLAGS, UP = 0x8913, 0x8914, 1
DEVICES = ("null", "zero", "full", "random", "urandom", "tty")
FIRST_USER, NOBODY = 1_000_000_000, 65534
"""User ids of the sandbox's root where this process is root: the first plus a process id, or the
second where only few ids can be mapped."""
NOT_ALLOWED = 77
"""Exit code where the system does not allow these namespaces."""
LIBRARY = ctypes.CDLL(None, use_errno=True)


def libc_call(name: str, *arguments: object) -> None:
    """Call a function of the C library. Raises OSError."""
    if getattr(LIBRARY, name)(*arguments):
        number = ctypes.get_errno()
        raise OSError(number, f"{name}: {os.strerror(number)}")


def mount(
    source: str | None, target: str, kind: str | None, flags: int, data: str | None = None
) -> None:
    """Call mount. Raises OSError."""
    encoded = [None if t is None else t.encode() for t in (source, target, kind)]
    libc_call("mount", *encoded, ctypes.c_ulong(flags), None if data is None else data.encode())


def enter_namespaces(network: bool) -> None:
    """Enter new namespaces. Raises OSError."""
    kinds = NEW_USER | NEW_MOUNTS | NEW_PIDS | NEW_IPC | NEW_NAMES
    libc_call("unshare", kinds if network else kinds | NEW_NETWORK)


def set_up_machine(network: bool) -> None:
    """Give the sandbox its name, and its own 127.0.0.1."""
    socket.sethostname("sandbox")
    if not network:
        with socket.socket() as own:
            interface = struct.pack("16sh14x", b"lo", 0)
            flags = struct.unpack("16sh14x", fcntl.ioctl(own, GET_FLAGS, interface))[1]
            fcntl.ioctl(own, SET_FLAGS, struct.pack("16sh14x", b"lo", flags | UP))


def map_users(pid: int) -> None:
    """Make the sandbox's root a user without rights on this machine. Raises OSError.

    Where this process is root, that is a user id that nothing else has. A process that were root
    here could change the kernel's settings, although it has no capability.
    """
    user, group = os.geteuid(), os.getegid()
    choices = [f"0 {user} 1"]
    if user == 0:
        choices = [f"0 {other} 1\n1 0 1" for other in (FIRST_USER + pid, NOBODY)]
    else:
        write(f"/proc/{pid}/setgroups", "deny")
    for number, ids in enumerate(choices, 1):
        try:
            write(f"/proc/{pid}/uid_map", ids)
            write(f"/proc/{pid}/gid_map", ids if user == 0 else f"0 {group} 1")
            return
        except OSError:
            if number == len(choices):
                raise


def write(path: str, text: str) -> None:
    """Write a file of the kernel."""
    with open(path, "w") as file:
        file.write(text)


def make(path: str) -> None:
    """Make a folder of the sandbox's root user, with the folders above it."""
    if not os.path.isdir(path):
        make(os.path.dirname(path))
        os.mkdir(path, 0o755)
        os.chown(path, 0, 0)


def show(source: str, target: str) -> None:
    """Show a file or folder of this machine in the sandbox, read-only."""
    if os.path.isdir(source):
        make(target)
    else:
        make(os.path.dirname(target))
        open(target, "a").close()
    mount(source, target, None, BIND | RECURSIVE)
    flags = os.statvfs(target).f_flag & LOCKED
    mount(None, target, None, BIND | REMOUNT | READ_ONLY | NO_SETUID | flags)


def make_files(plan: dict[str, Any]) -> None:
    """Make the sandbox's files, and enter them."""
    mount(None, "/", None, RECURSIVE | PRIVATE)
    new = "/proc"  # a folder of every system, whose own contents are not shown
    mount("tmpfs", new, "tmpfs", NO_SETUID | NO_DEVICES, f"size={plan['disk_bytes']},mode=755")
    os.chown(new, 0, 0)
    for here, there in plan["shown"]:
        show(here, new + there)
    for target, path in plan["links"]:
        os.symlink(target, new + path)
    for path, mode in (("/proc", 0o755), ("/dev", 0o755), ("/tmp", 0o1777), ("/work", 0o755)):
        make(new + path)
        os.chmod(new + path, mode)
    make_devices(new + "/dev", plan["shm_bytes"])
    mount("proc", new + "/proc", "proc", NO_SETUID | NO_DEVICES | NO_EXEC)
    os.chdir(new)
    if LIBRARY.syscall(PIVOT_ROOT[os.uname().machine], b".", b"."):
        raise OSError(ctypes.get_errno(), "pivot_root")
    libc_call("umount2", b".", DETACH)
    os.chdir("/work")


def make_devices(folder: str, shm_bytes: int) -> None:
    """Make /dev: files that every program needs, terminals, and shared memory."""
    mount("tmpfs", folder, "tmpfs", NO_SETUID | NO_EXEC, "size=65536,mode=755")
    for name in DEVICES:
        open(f"{folder}/{name}", "w").close()
        mount(f"/dev/{name}", f"{folder}/{name}", None, BIND)
    for name, target in (("fd", ""), ("stdin", "/0"), ("stdout", "/1"), ("stderr", "/2")):
        os.symlink(f"/proc/self/fd{target}", f"{folder}/{name}")
    make(f"{folder}/pts")
    terminals = "newinstance,ptmxmode=0666,mode=620"
    mount("devpts", f"{folder}/pts", "devpts", NO_SETUID | NO_EXEC, terminals)
    os.symlink("pts/ptmx", f"{folder}/ptmx")
    make(f"{folder}/shm")
    mount("tmpfs", f"{folder}/shm", "tmpfs", NO_SETUID | NO_DEVICES, f"size={shm_bytes},mode=1777")
    mount(None, folder, None, REMOUNT | READ_ONLY | BIND | NO_SETUID | NO_EXEC)


def become_first(plan: dict[str, Any]) -> None:
    """Make the files and become the first process. Never returns."""
    make_files(plan)
    for capability in range(HIGHEST_CAPABILITY + 1):
        LIBRARY.prctl(DROP_CAPABILITY, capability, 0, 0, 0)
    libc_call("prctl", SET_SECUREBITS, NO_ROOT, 0, 0, 0)
    with suppress(PermissionError):  # where this process is not root, it keeps its groups
        os.setgroups([])
    os.setresgid(0, 0, 0)
    os.setresuid(0, 0, 0)
    libc_call("prctl", PARENT_DEATH, signal.SIGKILL, 0, 0, 0)
    libc_call("prctl", SET_NO_NEW_PRIVILEGES, 1, 0, 0, 0)
    os.setsid()
    os.execve(plan["words"][0], plan["words"], {})


def run_inside(plan: dict[str, Any], entered: int, mapped: int) -> None:
    """Enter the namespaces and run the first process to its end. Never returns.

    Args:
        plan: as in `main`.
        entered: descriptor that is closed once the users can be mapped.
        mapped: descriptor that has a byte once they are.
    """
    code = NOT_ALLOWED
    try:
        libc_call("prctl", PARENT_DEATH, signal.SIGKILL, 0, 0, 0)
        enter_namespaces(plan["network"])
        os.write(entered, b"+")
        if os.read(mapped, 1):
            set_up_machine(plan["network"])
            first = os.fork()
            if first == 0:
                become_first(plan)
            leave_pipes()
            code = os.waitstatus_to_exitcode(os.waitpid(first, 0)[1])
    except OSError as error:
        sys.stderr.write(f"no namespaces: {error}\n")
    finally:
        os._exit(code if code >= 0 else 128 - code)


def leave_pipes() -> None:
    """Close the pipes to the caller; they end with the first process then."""
    nothing = os.open(os.devnull, os.O_RDWR)
    for own in (0, 1):
        os.dup2(nothing, own)


def main(plan: dict[str, object]) -> None:
    """Run the first process to its end. plan: sandbox_layout.own_command makes it."""
    (entered, entered_write), (mapped, mapped_write) = os.pipe(), os.pipe()
    child = os.fork()
    if child == 0:
        os.close(entered)
        os.close(mapped_write)
        run_inside(plan, entered_write, mapped)
    os.close(entered_write)
    os.close(mapped)
    leave_pipes()
    if os.read(entered, 1):
        try:
            map_users(child)
            os.write(mapped_write, b"+")
        except OSError as error:
            sys.stderr.write(f"no namespaces: users cannot be mapped: {error}\n")
    os.close(mapped_write)
    sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
