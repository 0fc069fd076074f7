"""The start of a worker, before slow imports: from here on its parent can watch it.

    python -m trainyard.launch.watched trainyard.training.worker runs/my-run --resume auto

runs that module with those arguments like `python -m trainyard.training.worker ..`. Importing torch
takes seconds, and minutes if a thousand processes read it from one busy disk: a worker that hangs
or crashes there must be named as well.
"""

from __future__ import annotations

import faulthandler
import os
import runpy
import signal
import sys
import traceback
from collections.abc import Callable
from contextlib import suppress
from typing import NoReturn

from trainyard.launch.environment import Process, raise_file_limit, read_process
from trainyard.launch.heartbeat import N_BYTES, STACK_SIGNAL, START_SECONDS, Heartbeat


def be_watched(process: Process) -> None:
    """Lets the parent process watch this one, and raises the limit of open files."""
    # The store of rank 0 has a connection to every rank: 1,024 ranks pass the usual 1,024.
    raise_file_limit()
    faulthandler.enable()  # a crash prints its stack
    if process.heartbeat is None:
        return
    os.lseek(process.heartbeat, N_BYTES, os.SEEK_SET)
    faulthandler.register(STACK_SIGNAL, file=process.heartbeat, all_threads=True)
    Heartbeat(process.heartbeat, START_SECONDS, START_SECONDS).enter("start", 0)


def leave_after(work: Callable[[], object]) -> NoReturn:
    """Ends this process with the exit code of `work`, but not as Python ends a process.

    Python would abort it while a thread waits for a dead rank in a save, and while autograd's
    thread of a GPU still frees the last graph.
    """
    code = 1
    try:
        work()
        code = 0
    except SystemExit as ended:
        code = int(ended.code or 0)
    except KeyboardInterrupt:  # ends as Python does, without the traceback
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        signal.raise_signal(signal.SIGINT)
    except BaseException:
        with suppress(OSError):  # the log's disk may be full
            traceback.print_exc()
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError):
            stream.flush()
    os._exit(code)


if __name__ == "__main__":
    be_watched(read_process())
    del sys.argv[0]
    leave_after(lambda: runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True))
