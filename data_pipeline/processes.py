"""Worker processes that inherit what is open, and leave Ctrl-C to their parent.

Forked, so that work needs no imports and unnamed temporary files can be written by a child and read by its parent.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from multiprocessing import get_context


@contextmanager
def forked(processes: int) -> Iterator[ProcessPoolExecutor]:
    """A pool; what was not begun is given up when the block is left by an exception. Submit under `no_interrupts`."""
    pool = ProcessPoolExecutor(processes, mp_context=get_context("fork"))
    try:
        yield pool
    except BaseException:
        pool.shutdown(wait=False, cancel_futures=True)
        raise
    pool.shutdown()


@contextmanager
def no_interrupts() -> Iterator[None]:
    """Hold back Ctrl-C while processes start: Python swallows one that comes in the middle of a fork.

    Blocked for the processes, which inherit it and leave Ctrl-C, which reaches the whole group, to their parent.
    Noted and raised again for the parent: a thread that blocks nothing may take the signal for the whole process.
    """
    caught: list[int] = []
    in_charge = threading.current_thread() is threading.main_thread()
    handler = signal.signal(signal.SIGINT, lambda number, frame: caught.append(number)) if in_charge else None
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        if in_charge:
            signal.signal(signal.SIGINT, handler)
    if caught:
        signal.raise_signal(signal.SIGINT)
