"""Huge pages for what a process allocates, on Linux: begun before anything is imported.

An update takes its temporary arrays from the system and gives them back. In pages of 4 KiB each
costs a fault for every 4 KiB that is written; in huge ones (2 MiB) one for 512 times as much.
glibc reads its wish for them when a process starts, so the process starts itself again, once.
"""

import contextlib
import os
import sys
from pathlib import Path

SWITCH = "JAXRL_ASYNC_HUGE_PAGES"
"""Environment variable; 0: leave the process as it was started."""
TUNABLES, HUGE_PAGES = "GLIBC_TUNABLES", "glibc.malloc.hugetlb"
ALLOWED = Path("/sys/kernel/mm/transparent_hugepage/enabled")


def tunables_with_huge_pages(environment: dict[str, str], allowed: str) -> str | None:
    """Return the value of GLIBC_TUNABLES with which a process asks for huge pages; None if it does
    already, was told not to, or the kernel gives none.

    Args:
        environment: of the process.
        allowed: what the kernel says of huge pages, such as "always [madvise] never"; "" if
            nothing.
    """
    given = environment.get(TUNABLES, "")
    if environment.get(SWITCH) == "0" or HUGE_PAGES in given or "[madvise]" not in allowed:
        return None
    return ":".join([*filter(None, [given]), f"{HUGE_PAGES}=1"])


def start_with_huge_pages() -> None:
    """Start this process again with huge pages (glibc's manual, "Memory Allocation Tunables"), if
    it has none and may have them; else return.

    For the first line of a program, before JAX is imported: the process keeps its number, its
    words and its files, and nothing else. So it returns, too, where there is something to lose: in
    a notebook, at a prompt, in a program that is read from stdin, and once JAX is there.
    """
    try:
        allowed = ALLOWED.read_text(encoding="ascii")
    except (OSError, ValueError):
        return  # not Linux, or hidden
    tunables = tunables_with_huge_pages(dict(os.environ), allowed)
    program = getattr(sys.modules["__main__"], "__file__", None) or ""  # of stdin "<stdin>"
    begins = os.path.isfile(program) and "jax" not in sys.modules
    if tunables is None or not begins or not sys.executable:
        return
    with contextlib.suppress(OSError):  # the interpreter's file is gone, or may not be started
        words = [sys.executable, *sys.orig_argv[1:]]
        os.execve(sys.executable, words, {**os.environ, TUNABLES: tunables})
