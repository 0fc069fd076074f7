"""The ranks of an examination: barriers, broadcasts, and a watchdog that names silent ranks.

If one rank hangs, the rest would wait forever. So each announces its next phase and a time limit.
After the limit, a thread beside the measurements asks all ranks to respond; a rank that is stopped,
or whose machine is gone, does not:

    rank 0    enter("the collectives", 10)     70 s later: "roll"       "rank 3 does not respond"
    rank 2                                                  "here"
    rank 3    (its machine hangs)

Then all exit with code 2. A single rank waits for no other and needs no torch. The parent processes
of training share files in the run folder (`launch/hang_reports.py`); doctor tests that folder, so
its ranks use the store of their rendezvous instead.
"""

from __future__ import annotations

import json
import logging
import os
import socket
import threading
import time
from typing import TYPE_CHECKING

from trainyard.launch.environment import Process
from trainyard.topology import name_ranks

if TYPE_CHECKING:
    from torch.distributed.distributed_c10d import Store

logger = logging.getLogger("trainyard")

POLL_SECONDS = 0.5
ANSWER_SECONDS = 4.0


class RankGroup:
    """All ranks of an examination, as seen from this one.

    Args:
        process: this rank.
        store: shared by all ranks; None: there is no other rank.
        patience_seconds: added to the announced time of each phase.
    """

    def __init__(self, process: Process, store: Store | None, patience_seconds: float) -> None:
        self._process, self._store, self._patience = process, store, patience_seconds
        self._part, self._deadline = "the start", time.monotonic() + patience_seconds
        self._is_over = threading.Event()

    def __enter__(self) -> RankGroup:
        if self._store is not None:
            threading.Thread(target=self._watch, args=(self._store,), daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()

    def enter(self, part: str, seconds: float = 0.0) -> None:
        """Announces the next phase of this rank and its time limit."""
        self._part, self._deadline = part, time.monotonic() + seconds + self._patience

    def wait(self) -> None:
        """Returns when all ranks have called it."""
        if self._store is not None:
            import torch
            import torch.distributed as dist

            dist.all_reduce(torch.zeros(1))

    def broadcast(self, text: str) -> str:
        """Broadcasts a text of rank 0 to all ranks."""
        if self._store is None:
            return text
        if self._process.rank == 0:
            self._store.set("doctor/broadcast", text)
        self.wait()
        return str(self._store.get("doctor/broadcast").decode())

    def gather(self, text: str) -> list[str]:
        """Returns the texts of all ranks on rank 0; each other rank's own text."""
        if self._store is None:
            return [text]
        self._store.set(f"doctor/results/{self._process.rank}", text)
        self.wait()
        if self._process.rank:
            return [text]
        ranks = range(self._process.n_ranks)
        return [self._store.get(f"doctor/results/{rank}").decode() for rank in ranks]

    def _watch(self, store: Store) -> None:
        ranks = range(self._process.n_ranks)
        keys = [f"doctor/here/{rank}" for rank in ranks]
        try:
            while not store.check(["doctor/roll"]):
                if time.monotonic() > self._deadline:
                    store.set("doctor/roll", self._part)
                if self._is_over.wait(POLL_SECONDS):
                    return
            own = json.dumps({"host": socket.gethostname(), "part": self._part})
            store.set(keys[self._process.rank], own)
            end = time.monotonic() + ANSWER_SECONDS
            while not store.check(keys) and time.monotonic() < end:
                if self._is_over.wait(POLL_SECONDS):
                    return
            answers = {
                rank: json.loads(store.get(keys[rank]))
                for rank in ranks
                if store.check([keys[rank]])
            }
            part = store.get("doctor/roll").decode()
        except RuntimeError:  # rank 0 has ended, and the store with it
            return
        logger.error("error: %s", _describe_hang(part, len(ranks), answers))
        os._exit(2)


def _describe_hang(part: str, n_ranks: int, answers: dict[int, dict[str, str]]) -> str:
    silent = [rank for rank in range(n_ranks) if rank not in answers]
    if silent:
        hosts = ", ".join(dict.fromkeys(answer["host"] for answer in answers.values()))
        return (
            f"{name_ranks(silent)} of {n_ranks} {'do' if len(silent) > 1 else 'does'} not respond "
            f"since {part}; {name_ranks([*answers])} did, on {hosts}\n"
            "hint: exclude the machine of the ranks that do not respond"
        )
    parts: dict[str, list[int]] = {}
    for rank, answer in answers.items():
        parts.setdefault(f"{answer['part']} on {answer['host']}", []).append(rank)
    where = "; ".join(f"{name_ranks(ranks)} at {part}" for part, ranks in parts.items())
    return (
        f"no progress since {part}, though all {n_ranks} ranks respond: {where}\n"
        "hint: in a network phase, check GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME, and set "
        "NCCL_DEBUG=INFO; in a disk phase, try ls and df there"
    )
