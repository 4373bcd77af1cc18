"""Runs a function of a test module in gloo groups of several sizes; what rank 0 of each finds comes back.

    python tests/ranks.py FOLDER SIZES MODULE ARGUMENT...

calls MODULE.in_group(*ARGUMENTS), which returns arrays by name, in every process of each group. One process imports
everything (and calls MODULE.before_ranks() if there is one), then forks the members: importing is most of the cost.
"""

from __future__ import annotations

import importlib
import os
import signal
import subprocess
import sys
import traceback
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from types import ModuleType

import numpy as np


def in_ranks(sizes: Sequence[int], folder: Path, module: str, *arguments: str) -> dict[int, dict[str, np.ndarray]]:
    """`module.in_group(*arguments)` by size of the group; AssertionError with the errors if any process fails."""
    environment = os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    command = [sys.executable, __file__, str(folder), ",".join(map(str, sizes)), module, *arguments]
    done = subprocess.run(command, env=environment, stderr=subprocess.PIPE, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    found = {}
    for size in sizes:
        with np.load(folder / f"found{size}.npz") as data:
            found[size] = dict(data)
    return found


def main(folder: str, sizes: str, module: str, *arguments: str) -> None:
    import torch.distributed  # noqa: F401  before the fork

    ours = ModuleType("tests")  # some installed package also calls itself `tests`
    ours.__path__ = [str(Path(__file__).parent)]
    sys.modules["tests"] = ours
    tested = importlib.import_module(module)
    getattr(tested, "before_ranks", lambda: None)()
    for size in map(int, sizes.split(",")):
        members = [fork(lambda r=rank, n=size: member(r, n, Path(folder), tested, arguments)) for rank in range(size)]
        wait(members)


def fork(run: Callable[[], None]) -> int:
    """The id of a child that runs `run` and exits, with 1 and the traceback on stderr if it raises."""
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        run()
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)


def wait(members: Sequence[int]) -> None:
    """Until all have ended well; the first that does not takes the others along, which would wait for it."""
    left = set(members)
    while left:
        pid, status = os.wait()
        left.discard(pid)
        if status:
            for other in left:
                os.kill(other, signal.SIGKILL)
            sys.exit(f"a member of a group of {len(members)} failed")


def member(rank: int, size: int, folder: Path, tested: ModuleType, arguments: Sequence[str]) -> None:
    import torch.distributed as dist

    store = dist.FileStore(str(folder / f"store{size}"), size)
    dist.init_process_group("cpu:gloo", store=store, rank=rank, world_size=size, timeout=timedelta(seconds=200))
    found = tested.in_group(*arguments)
    if rank == 0:
        np.savez(folder / f"found{size}.npz", **found)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
