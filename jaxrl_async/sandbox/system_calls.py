"""The system calls that a sandbox refuses, as a seccomp filter. Standard library only.

The list has calls that reach kernel memory which no limit of the sandbox counts (memfd_create,
System V shared memory), that inspect other processes, that make namespaces or mounts, and rarely
used parts of the kernel in which faults are found often. Sockets may be of the families UNIX,
IPv4, IPv6 and netlink: others, such as vsock, are not separated by a network namespace.
"""

import errno
import platform
import struct

ARCHITECTURES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
"""Values of AUDIT_ARCH in linux/audit.h by machine."""
NUMBERS: dict[str, tuple[int, int]] = {
    "ptrace": (101, 117), "process_vm_readv": (310, 270), "process_vm_writev": (311, 271),
    "kcmp": (312, 272), "pidfd_getfd": (438, 438), "memfd_create": (319, 279),
    "memfd_secret": (447, 447), "shmget": (29, 194), "msgget": (68, 186), "semget": (64, 190),
    "mq_open": (240, 180), "unshare": (272, 97), "setns": (308, 268), "mount": (165, 40),
    "umount2": (166, 39), "pivot_root": (155, 41), "chroot": (161, 51), "open_tree": (428, 428),
    "move_mount": (429, 429), "fsopen": (430, 430), "fsconfig": (431, 431), "fsmount": (432, 432),
    "fspick": (433, 433), "mount_setattr": (442, 442), "bpf": (321, 280),
    "perf_event_open": (298, 241), "userfaultfd": (323, 282), "io_uring_setup": (425, 425),
    "io_uring_enter": (426, 426), "io_uring_register": (427, 427), "add_key": (248, 217),
    "request_key": (249, 218), "keyctl": (250, 219), "init_module": (175, 105),
    "finit_module": (313, 273), "delete_module": (176, 106), "kexec_load": (246, 104),
    "kexec_file_load": (320, 294), "reboot": (169, 142), "swapon": (167, 224),
    "swapoff": (168, 225), "acct": (163, 89), "quotactl": (179, 60), "syslog": (103, 116),
    "open_by_handle_at": (304, 265), "name_to_handle_at": (303, 264), "vhangup": (153, 58),
    "personality": (135, 92), "fanotify_init": (300, 262),
}  # fmt: skip
"""Refused calls: their numbers on x86_64 and aarch64."""
SOCKET, CLONE, CLONE3 = (41, 198), (56, 220), (435, 435)
FAMILIES = (1, 2, 10, 16)
"""Address families of sockets that are allowed: UNIX, IPv4, IPv6, netlink."""
NEW_NAMESPACES = 0x7E020080
"""The flags CLONE_NEW* of clone that make namespaces."""
X32 = 0x40000000
"""Bit in the numbers of x86_64's second set of calls."""

LOAD, EQUAL, AT_LEAST, ANY_BIT, RETURN = 0x20, 0x15, 0x35, 0x45, 0x06  # linux/bpf_common.h
ALLOW, ERRNO, KILL = 0x7FFF0000, 0x00050000, 0x80000000  # linux/seccomp.h
CALL_AT, ARCHITECTURE_AT, ARGUMENT_AT = 0, 4, 16  # in struct seccomp_data, little-endian


def seccomp_filter(machine: str = "") -> bytes:
    """Return the filter, an array of struct sock_filter; b"" on a machine that is not known.

    machine: as platform.machine() returns it; "": this one.
    """
    machine = machine or platform.machine()
    if machine not in ARCHITECTURES:
        return b""
    index = list(ARCHITECTURES).index(machine)
    refuse, no_such_call = ERRNO | errno.EPERM, ERRNO | errno.ENOSYS
    code = [
        (LOAD, 0, 0, ARCHITECTURE_AT),
        (EQUAL, 1, 0, ARCHITECTURES[machine]),
        (RETURN, 0, 0, KILL),
        (LOAD, 0, 0, CALL_AT),
        (AT_LEAST, 0, 1, X32),
        (RETURN, 0, 0, no_such_call),
    ]
    for numbers in NUMBERS.values():
        code += [(EQUAL, 0, 1, numbers[index]), (RETURN, 0, 0, refuse)]
    # glibc uses clone, whose flags can be read, where clone3 does not exist
    code += [(EQUAL, 0, 1, CLONE3[index]), (RETURN, 0, 0, no_such_call)]
    code += [
        (EQUAL, 0, 4, CLONE[index]),
        (LOAD, 0, 0, ARGUMENT_AT),
        (ANY_BIT, 0, 1, NEW_NAMESPACES),
        (RETURN, 0, 0, refuse),
        (RETURN, 0, 0, ALLOW),
        (EQUAL, 0, len(FAMILIES) + 2, SOCKET[index]),
        (LOAD, 0, 0, ARGUMENT_AT),
    ]
    for skip, family in zip(range(len(FAMILIES), 0, -1), FAMILIES, strict=True):
        code.append((EQUAL, skip, 0, family))
    code += [(RETURN, 0, 0, refuse), (RETURN, 0, 0, ALLOW)]
    return b"".join(struct.pack("<HBBI", *line) for line in code)
