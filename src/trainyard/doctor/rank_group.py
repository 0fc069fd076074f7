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
            self._store.set("doctor/said", text)
        # No blocking `get`: while it waits, the watchdog thread could not use the store.
        while not self._store.check(["doctor/said"]):
            time.sleep(POLL_SECONDS)
        heard: bytes = self._store.get("doctor/said")
        return heard.decode()

    def gather(self, text: str) -> list[str]:
        """Returns the texts of all ranks on rank 0; each other rank's own text."""
        if self._store is None:
            return [text]
        self._store.set(f"doctor/found/{self._process.rank}", text)
        self.wait()
        if self._process.rank:
            return [text]
        ranks = range(self._process.n_ranks)
        return [self._store.get(f"doctor/found/{rank}").decode() for rank in ranks]

    def _watch(self, store: Store) -> None:
        rank = self._process.rank
        try:
            while not store.check(["doctor/roll"]):
                if time.monotonic() > self._deadline:
                    store.set("doctor/roll", self._part)
                if self._is_over.wait(POLL_SECONDS):
                    return
            here = {"host": socket.gethostname(), "part": self._part}
            store.set(f"doctor/here/{rank}", json.dumps(here))
            all_here = [f"doctor/here/{each}" for each in range(self._process.n_ranks)]
            end = time.monotonic() + ANSWER_SECONDS
            while not store.check(all_here) and time.monotonic() < end:
                if self._is_over.wait(POLL_SECONDS):
                    return
            problem = self._name_silent(store)
        except RuntimeError:  # rank 0 has ended, and the store with it
            return
        logger.error("error: %s", problem)
        os._exit(2)

    def _name_silent(self, store: Store) -> str:
        ranks = range(self._process.n_ranks)
        here = [rank for rank in ranks if store.check([f"doctor/here/{rank}"])]
        records = {rank: json.loads(store.get(f"doctor/here/{rank}")) for rank in here}
        silent = [rank for rank in ranks if rank not in records]
        part = store.get("doctor/roll").decode()
        if silent:
            those = "do" if len(silent) > 1 else "does"
            hosts = ", ".join(dict.fromkeys(record["host"] for record in records.values()))
            return (
                f"{name_ranks(silent)} of {len(ranks)} {those} not respond since {part}; "
                f"{name_ranks(here)} did, on {hosts}\n"
                "hint: exclude the machine of the ranks that do not respond"
            )
        parts: dict[str, list[int]] = {}
        for rank, record in records.items():
            parts.setdefault(f"{record['part']} on {record['host']}", []).append(rank)
        where = "; ".join(f"{name_ranks(each)} at {part}" for part, each in parts.items())
        return (
            f"no progress since {part}, though all {len(ranks)} ranks respond: {where}\n"
            "hint: in a network phase, check GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME, and set "
            "NCCL_DEBUG=INFO; in a disk phase, try ls and df there"
        )
