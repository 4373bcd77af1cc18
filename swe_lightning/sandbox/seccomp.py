"""The system calls no box may make.

Namespaces and dropped capabilities already stop most of these; the filter takes away the kernel code behind them, so
that one bug there is not a way out. Everything not listed is allowed: tests of real packages call a lot.
"""

from __future__ import annotations

import errno
import functools
import tempfile
from typing import Any

from swe_lightning.errors import MissingPart

FORBIDDEN = (
    # new views of the machine
    "mount umount2 pivot_root chroot unshare setns move_mount open_tree fsopen fsconfig fsmount fspick mount_setattr "
    # other processes
    "ptrace process_vm_readv process_vm_writev process_madvise kcmp pidfd_getfd "
    # the kernel itself
    "bpf perf_event_open init_module finit_module delete_module kexec_load kexec_file_load reboot swapon swapoff "
    "acct quotactl syslog iopl ioperm settimeofday clock_settime adjtimex clock_adjtime sethostname setdomainname "
    # rich sources of kernel bugs that tests do not need
    "keyctl add_key request_key io_uring_setup io_uring_enter io_uring_register userfaultfd fanotify_init "
    "open_by_handle_at name_to_handle_at lookup_dcookie "
    # memory that belongs to no process and outlives it
    "shmget msgget semget"
)
NAMESPACE_FLAGS = (0x80, 0x20000, 0x02000000, 0x04000000, 0x08000000, 0x10000000, 0x20000000, 0x40000000)
SOCKET_FAMILIES = (1, 2, 10)  # unix, inet, inet6: the box's own loopback
TERMINAL_INJECTION = (0x5412, 0x541C, 0x5423)  # TIOCSTI, TIOCLINUX, TIOCSETD
SERVER = 1
"""The command server's process id in every box. It is of the agent's own user, so the kernel would let commands lower
its limits and priority until it dies or starves, and a box that is lost is a rollout that is tried again."""
BY_PROCESS_ID = "prlimit64 sched_setaffinity sched_setscheduler sched_setparam sched_setattr"
PRIORITIES = {"setpriority": 0, "ioprio_set": 1}
"""Call -> its word for "one process"; groups and users would include the server."""
RLIMIT_CORE = 4


@functools.cache
def filter_bytes() -> bytes:
    """The BPF program bubblewrap loads. Other architectures' calling conventions are killed by libseccomp's default."""
    try:
        import pyseccomp
    except (ImportError, OSError, RuntimeError) as error:
        raise MissingPart(
            f"the sandbox's system call filter needs pyseccomp and the library libseccomp.so.2 ({error}); "
            "install the package libseccomp2 of your distribution"
        ) from error
    rules = pyseccomp.SyscallFilter(pyseccomp.ALLOW)
    for name in FORBIDDEN.split():
        try:
            rules.add_rule(pyseccomp.ERRNO(errno.EPERM), name)
        except OSError:  # this architecture or this libseccomp does not know the call
            continue
    for flag in NAMESPACE_FLAGS:
        rules.add_rule(pyseccomp.ERRNO(errno.EPERM), "clone", pyseccomp.Arg(0, pyseccomp.MASKED_EQ, flag, flag))
    rules.add_rule(pyseccomp.ERRNO(errno.ENOSYS), "clone3")  # its flags lie in memory; C libraries fall back to clone
    for family in range(46):
        if family not in SOCKET_FAMILIES:
            rules.add_rule(pyseccomp.ERRNO(errno.EAFNOSUPPORT), "socket", _is(0, family))
    for request in TERMINAL_INJECTION:
        rules.add_rule(pyseccomp.ERRNO(errno.EPERM), "ioctl", _is(1, request))
    _protect_the_server(rules)
    with tempfile.TemporaryFile() as f:
        rules.export_bpf(f)
        f.seek(0)
        return f.read()


def _protect_the_server(rules: Any) -> None:
    import pyseccomp

    denied = pyseccomp.ERRNO(errno.EPERM)
    for name in BY_PROCESS_ID.split():
        rules.add_rule(denied, name, _is(0, SERVER))
    for name, one_process in PRIORITIES.items():
        rules.add_rule(denied, name, _is(0, one_process), _is(1, SERVER))
        for which in {0, 1, 2, 3} - {one_process}:
            rules.add_rule(denied, name, _is(0, which))
    # Boxes start with a limit of one byte, which also keeps core dumps from a program that the host pipes them to; a
    # limit of 0 would not. So it stays as it is, and whoever changes it is told that all went well.
    nothing = pyseccomp.ERRNO(0)
    rules.add_rule(nothing, "setrlimit", _is(0, RLIMIT_CORE))
    rules.add_rule(nothing, "prlimit64", _is(1, RLIMIT_CORE), pyseccomp.Arg(2, pyseccomp.NE, 0))


def _is(argument: int, value: int) -> Any:
    """The kernel reads these arguments as 32 bits: what stands in the upper half must not get past the filter."""
    import pyseccomp

    return pyseccomp.Arg(argument, pyseccomp.MASKED_EQ, 0xFFFFFFFF, value)
