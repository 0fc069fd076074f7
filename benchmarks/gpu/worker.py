"""The process that does the items: `python -m benchmarks.gpu.worker`, started by the supervisor.

It reports by lines of JSON to a pipe: the begin of each item, each row, and its end. An item that
takes longer than it may is interrupted by an alarm. After an item that failed, other than by its
numbers, the process ends: what is left of it, such as a CUDA context, may be broken.
"""

from __future__ import annotations

import faulthandler
import json
import os
import signal
import sys
import time
import traceback
from typing import Any

from benchmarks.gpu.item import Item, Session, read_items, slower

WORDS_OF_FAILURE = 1500


class OverAllowanceError(BaseException):
    """The alarm; no `except Exception` of a library catches it."""


def main() -> None:
    """Does items until one fails or none is left."""
    job: dict[str, Any] = json.loads(sys.argv[1])
    faulthandler.enable()
    pipe = os.fdopen(job["pipe"], "w", buffering=1, encoding="utf-8")
    session = Session.from_json(job["session"])
    items = {item.name: item for item in slower(read_items(job["module"]), job["slowness"])}
    signal.signal(signal.SIGALRM, _raise)
    for name in job["names"]:
        item = items[name]
        left = job["deadline"] - time.monotonic()
        if left < item.allowance / 2:
            _tell(pipe, item=name, end="skipped", said=f"{max(left, 0):.0f} s were left")
        elif not _do(item, session, pipe, min(item.allowance, left)):
            break
    pipe.flush()
    # A normal exit aborts if autograd's thread is still dropping the last graph.
    os._exit(0)


def _do(item: Item, session: Session, pipe: Any, seconds: float) -> bool:
    """Does an item; tells whether this process can do another."""
    _tell(pipe, item=item.name, begin=True)
    began, used = time.monotonic(), time.process_time()
    end, said, goes_on = "done", "", True
    wrong = []
    try:
        signal.setitimer(signal.ITIMER_REAL, seconds)
        for row in item.rows(session):
            _tell(pipe, item=item.name, **row)
            if row.get("wrong"):
                wrong.append(row["row"])
    except OverAllowanceError:
        end, said, goes_on = "interrupted", f"after {seconds:.0f} s", False
    except Exception:
        end, said, goes_on = "failed", traceback.format_exc()[-WORDS_OF_FAILURE:], False
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
    if wrong and end == "done":
        end, said = "wrong", ", ".join(wrong)
    times = {
        "seconds": round(time.monotonic() - began, 1),
        "cpu_seconds": round(time.process_time() - used, 1),
    }
    _tell(pipe, item=item.name, end=end, **times, said=said)
    return goes_on


def _tell(pipe: Any, **facts: Any) -> None:
    pipe.write(json.dumps(facts) + "\n")


def _raise(*_: object) -> None:
    raise OverAllowanceError


if __name__ == "__main__":
    main()
