"""The start of a worker, before slow imports: from here on its parent can watch it.

    python -m trainyard.launch.watched trainyard.train.worker runs/my-run --resume auto

runs that module with those arguments like `python -m trainyard.train.worker ..`. Importing torch
takes seconds, and minutes if a thousand processes read it from one busy disk: a worker that hangs
or crashes there must be named as well.
"""

from __future__ import annotations

import faulthandler
import os
import runpy
import sys

from trainyard.launch.environment import Process, read_process
from trainyard.launch.heartbeat import N_BYTES, STACK_SIGNAL, START_SECONDS, Heartbeat


def be_watched(process: Process) -> None:
    """Lets the parent process watch this one."""
    faulthandler.enable()  # a crash prints its stack
    if process.heartbeat is None:
        return
    os.lseek(process.heartbeat, N_BYTES, os.SEEK_SET)
    faulthandler.register(STACK_SIGNAL, file=process.heartbeat, all_threads=True)
    Heartbeat(process.heartbeat, START_SECONDS, START_SECONDS).enter("start", 0)


if __name__ == "__main__":
    be_watched(read_process())
    del sys.argv[0]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
