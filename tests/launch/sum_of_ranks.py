"""A program of one rank, for real launchers: adds up the ranks' numbers with all others.

python sum_of_ranks.py MARKS [FAILING RANK]

A rank that fails leaves a mark in the folder MARKS, and fails only where there is none.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
import torch.distributed as dist

from trainyard.launch.environment import read_process
from trainyard.parallel.start import start_ranks


def main() -> None:
    process = read_process()
    with start_ranks(process, torch.device("cpu"), lambda: {"torch": torch.__version__}):
        mark = Path(sys.argv[1]) / "failed"
        if str(process.rank) in sys.argv[2:] and not mark.exists():
            mark.touch()
            raise ValueError("this rank fails once")
        total = torch.tensor([process.rank + 1.0])
        dist.all_reduce(total)
        sys.stdout.write(
            f"rank {process.rank} of {process.n_ranks}, "
            f"{process.local_rank} of {process.n_local_ranks}: {total.item():g}\n"
        )


if __name__ == "__main__":
    main()
