"""One rank of test_worker_ranks: gradients and an update through verl's worker in a gloo group.

python -m tests.policy.rank_main RANK RANKS STORE MODEL OUT
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from types import ModuleType


def main(rank: int, ranks: int, store: str, model: Path, out: Path) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    import torch.distributed as dist

    dist.init_process_group("cpu:gloo", store=dist.FileStore(store, ranks), rank=rank, world_size=ranks)
    ours = ModuleType("tests")  # some installed package also calls itself `tests`
    ours.__path__ = [str(Path(__file__).resolve().parents[1])]
    sys.modules["tests"] = ours
    from tests.policy.test_worker_ranks import trials

    found = trials(model, engine="verl")
    if rank == 0:
        import numpy as np

        np.savez(out, **found)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], Path(sys.argv[4]), Path(sys.argv[5]))
