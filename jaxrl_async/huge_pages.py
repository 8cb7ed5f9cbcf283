"""Huge pages for the memory that a process allocates, on Linux; requested before any import.

An update allocates its temporary arrays from the system and frees them again. With 4 KiB pages
every 4 KiB written costs a page fault; huge pages (2 MiB) need 512 times fewer. glibc reads this
setting when a process starts, so the process restarts itself once.
"""

import contextlib
import os
import sys
from pathlib import Path

SWITCH = "JAXRL_ASYNC_HUGE_PAGES"
"""Environment variable; 0: do not restart the process."""
TUNABLES, HUGE_PAGES = "GLIBC_TUNABLES", "glibc.malloc.hugetlb"
ALLOWED = Path("/sys/kernel/mm/transparent_hugepage/enabled")


def tunables_with_huge_pages(environment: dict[str, str], allowed: str) -> str | None:
    """Return a value of GLIBC_TUNABLES that requests huge pages. None if the process already
    requests them, must not, or the kernel offers none.

    Args:
        environment: of the process.
        allowed: the kernel's setting of huge pages, such as "always [madvise] never"; "" if
            unknown.
    """
    tunables = environment.get(TUNABLES, "")
    if environment.get(SWITCH) == "0" or HUGE_PAGES in tunables or "[madvise]" not in allowed:
        return None
    return ":".join([*filter(None, [tunables]), f"{HUGE_PAGES}=1"])


def start_with_huge_pages() -> None:
    """Restart this process with huge pages (glibc's manual, "Memory Allocation Tunables") if it
    does not have them and may; otherwise return.

    To be called at the very start of a program, before JAX is imported: the process keeps only its
    number, its arguments and its files. It therefore also returns where state would be lost: in a
    notebook, at a prompt, in a program read from stdin, and once JAX is imported.
    """
    try:
        allowed = ALLOWED.read_text(encoding="ascii")
    except (OSError, ValueError):
        return  # not Linux, or hidden
    tunables = tunables_with_huge_pages(dict(os.environ), allowed)
    program = getattr(sys.modules["__main__"], "__file__", None) or ""  # stdin: "<stdin>"
    begins = os.path.isfile(program) and "jax" not in sys.modules
    if tunables is None or not begins or not sys.executable:
        return
    with contextlib.suppress(OSError):  # the interpreter is gone or may not be run
        words = [sys.executable, *sys.orig_argv[1:]]
        os.execve(sys.executable, words, {**os.environ, TUNABLES: tunables})
