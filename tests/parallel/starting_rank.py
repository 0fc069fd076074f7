"""A rank for test_start.py, which says what it found as JSON.

What it is wanted to do is

    {"process": fields of Process, "facts": {..}, "timeout": seconds, "number": in the list,
     "after": those of ranks which must have come before,
     "gives_up_after": [those after which the time is up for those who wait for more],
     "reason": of one that refuses, "others": numbers of all the others,
     "do": "sum", "no facts" once the others have come, or instead of the sum "raise", "refuse" or
     "die", and before the group is there "die early"}
"""

from __future__ import annotations

import json
import mmap
import os
import signal
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from tests.waiting import wait_until

from trainyard.errors import DataError, UserError
from trainyard.launch.environment import Process
from trainyard.parallel import start
from trainyard.parallel.start import start_ranks

LISTENING, CONNECTED = "0A", "01"


def addresses(state: str) -> list[str]:
    """Addresses, in hexadecimal, of this process's sockets in a state."""
    descriptors = Path("/proc/self/fd").iterdir()
    links = [str(path.readlink()) for path in descriptors if path.is_symlink()]
    rows = [
        line.split()
        for family in ("tcp", "tcp6")
        for line in Path(f"/proc/self/net/{family}").read_text().splitlines()[1:]
    ]
    return [row[1] for row in rows if row[3] == state and f"socket:[{row[9]}]" in links]


class DeadlyDevice:
    """Kills the process that asks for its type, which is after the roll call."""

    @property
    def type(self) -> str:
        os.kill(os.getpid(), signal.SIGKILL)
        return ""


def note_coming(number: int, came: mmap.mmap) -> None:
    """Lets all ranks of the scenario see when this one has come to the meeting."""
    say_present = start._Rendezvous._say_present

    def come(meeting: start._Rendezvous, record: str) -> None:
        say_present(meeting, record)
        came[number] = 1

    start._Rendezvous._say_present = come  # type: ignore[method-assign]


def give_up(share: float, wanted: dict[str, Any], came: mmap.mmap) -> None:
    """Puts this rank's clock forward by a share of the timeout once all have come that will."""

    def monotonic() -> float:
        is_up = all(came[number] for number in wanted["gives_up_after"])
        return time.monotonic() + (share * wanted["timeout"] if is_up else 0.0)

    start.time = SimpleNamespace(  # type: ignore[assignment]
        monotonic=monotonic, sleep=time.sleep, time_ns=time.time_ns
    )


def wait_for(others: list[int], came: mmap.mmap) -> None:
    """Returns once all of these have come."""
    wait_until(lambda: all(came[number] for number in others), f"{others} have come")


def run_rank(wanted: dict[str, Any], came: mmap.mmap) -> None:
    """Comes to the meeting; `came` has a byte for each rank that has."""
    fields = wanted["process"]
    if "store_file" in fields:
        fields["store_file"] = Path(fields["store_file"])

    def facts() -> dict[str, str]:
        if wanted["do"] == "no facts":
            wait_for(wanted["others"], came)
            raise DataError("corpus.bin is missing", "copy it here")
        return dict(wanted["facts"])

    wait_for(wanted["after"], came)
    process = Process(**fields)
    note_coming(wanted["number"], came)
    if wanted["gives_up_after"] and (process.rank == 0 or 0 not in wanted["gives_up_after"]):
        # The ranks that wait for what rank 0 says must still hear of it.
        give_up(1.0 if process.rank else 0.95, wanted, came)
    device: Any = DeadlyDevice() if wanted["do"] == "die early" else torch.device("cpu")
    answer: dict[str, Any] = {}
    try:
        with start_ranks(process, device, facts, wanted["timeout"]) as ranks:
            answer["listening"] = addresses(LISTENING)
            answer["connections"] = len(addresses(CONNECTED))
            if wanted["do"] == "raise":
                raise ValueError("a bug")
            if wanted["do"] == "refuse":
                raise DataError(wanted.get("reason", "token 7 is damaged"), "prepare it again")
            if wanted["do"] == "die":
                os.kill(os.getpid(), signal.SIGKILL)
            total = torch.tensor([float(process.rank)])
            dist.all_reduce(total)
            answer["sum"] = total.item()
            assert ranks.store is not None
    except Exception as error:
        code = error.exit_code if isinstance(error, UserError) else 1
        answer |= {"error": type(error).__name__, "message": str(error), "exit_code": code}
    answer["has_group"] = dist.is_initialized()
    came[wanted["number"]] = 1  # or gone
    sys.stdout.write(json.dumps(answer))
