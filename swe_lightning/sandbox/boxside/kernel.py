"""Calls of the kernel that Python has no function for, and what the command server uses them for."""

import os
from struct import pack as _pack

CREATE_RULESET, ADD_RULE, RESTRICT_SELF = 444, 445, 446  # landlock; the same numbers on every architecture
ASK_VERSION, BENEATH = 1, 1
MOVE_BETWEEN_DIRECTORIES_SINCE = 2  # version 1 forbids it altogether
WRITE, MOVE = 1 << 1, 1 << 13


def prctl(option: int, *values: int | bytes) -> None:
    if _c_function("prctl")(option, *values, 0, 0):
        raise OSError("prctl failed")


def landlock_version() -> int:
    """-1 where this kernel has none."""
    return int(_c_function("syscall")(CREATE_RULESET, None, 0, ASK_VERSION))


def keep_proc_closed() -> bool:
    """From now on neither this process nor a command opens a file of /proc for writing; False: the kernel cannot.

    Commands are marked as the first to go when memory runs out. Without this they could take that mark off again and
    leave the server as the largest process, and a box that is lost is a rollout that is tried again.
    """
    if landlock_version() < MOVE_BETWEEN_DIRECTORIES_SINCE:
        return False
    call = _c_function("syscall")
    rules = call(CREATE_RULESET, _pack("=Q", WRITE | MOVE), 8, 0)
    if rules < 0:
        return False
    try:
        for name in os.listdir("/"):
            if name in ("proc", "sys"):
                continue
            try:
                place = os.open("/" + name, os.O_PATH | os.O_CLOEXEC)
            except OSError:
                continue
            rights = WRITE | MOVE if os.path.isdir("/" + name) else WRITE
            call(ADD_RULE, rules, BENEATH, _pack("=Qi", rights, place), 0)
            os.close(place)
        return call(RESTRICT_SELF, rules, 0) == 0
    finally:
        os.close(rules)


def _c_function(name: str):
    """ctypes costs more than the rest of the server's start; its C core alone does not."""
    try:
        import _ctypes

        address = _ctypes.dlsym(_ctypes.dlopen(None, 2), name)  # type: ignore[arg-type]
        return lambda *values: _ctypes.call_function(address, values)
    except (ImportError, AttributeError):
        import ctypes

        return getattr(ctypes.CDLL(None), name)
