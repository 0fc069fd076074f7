"""Starts the worker, as often as needed, and keeps what it reports.

The supervisor never touches the GPU, so nothing there can stop it. It kills the worker that takes
twice the allowance of an item, and starts another at the next item. Each report is one line of
`results.jsonl`, synced to the disk before the next is read.
"""

from __future__ import annotations

import json
import math
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.gpu.item import Item, Row, Session, read_items, slower

RESULTS, LOG = "results.jsonl", "worker.log"
START_SECONDS = 90.0
"""For the imports of a worker, before its first item begins."""
GRACE_SECONDS = 5.0
"""After the deadline, for an interrupted item to report."""
TIMES = ("seconds", "cpu_seconds")


class Results:
    """A file of rows that is never broken: a line that cannot be written whole is taken back.

    Args:
        path: of the file, which may have rows of earlier calls.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._unwritten: list[str] = []

    def append(self, row: Row) -> None:
        """Writes a row, and rows that could not be written before; says so if it cannot."""
        self._unwritten.append(json.dumps(row) + "\n")
        try:
            descriptor = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        except OSError as error:
            self._say(error)
            return
        try:
            while self._unwritten:
                _write_whole(descriptor, self._unwritten[0].encode())
                del self._unwritten[0]
        except OSError as error:
            self._say(error)
        finally:
            os.close(descriptor)

    def _say(self, error: OSError) -> None:
        n_rows = len(self._unwritten)
        say(f"error: {self._path.name}: {error.strerror}: {n_rows} rows only printed")


def say(text: str) -> None:
    """Prints, if there is anything to print to: a full disk ends no call."""
    with suppress(OSError):
        print(text, flush=True)


def _write_whole(descriptor: int, line: bytes) -> None:
    size = os.fstat(descriptor).st_size
    try:
        left = line
        while left:
            left = left[os.write(descriptor, left) :]
        os.fsync(descriptor)
    except OSError:
        with suppress(OSError):
            os.ftruncate(descriptor, size)
        raise


def read_results(path: Path) -> list[Row]:
    """Reads the rows of a file; none if there is no file."""
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


@dataclass
class Supervisor:
    """One call.

    Args:
        session: what items get.
        module: has the table of items.
        deadline: when the last item ends, by `time.monotonic`.
        variables: of the worker's environment.
        slowness: allowances are longer by this factor.
    """

    session: Session
    deadline: float
    module: str = "benchmarks.gpu.items"
    variables: Mapping[str, str] = field(default_factory=dict)
    slowness: float = 1.0

    def __post_init__(self) -> None:
        self.session.output.mkdir(parents=True, exist_ok=True)
        self.results = Results(self.session.output / RESULTS)
        self.ends: dict[str, Row] = {}
        self._limit = math.inf

    def do(self, items: Sequence[Item]) -> None:
        """Does items in their order, and prints each one's rows once it has ended."""
        left = list(items)
        while left and time.monotonic() < self.deadline:
            n_left = len(left)
            self._do_in_one_worker(left)
            if len(left) == n_left:  # no item began
                end = {"item": left.pop(0).name, "end": "failed", "seconds": 0.0}
                self._end(end | {"said": "the worker did not start: " + self._last_words()}, [])
        for item in left:
            self._end({"item": item.name, "end": "skipped", "said": "no time was left"}, [])

    def _do_in_one_worker(self, left: list[Item]) -> None:
        """Runs a worker until it ends; takes off `left` what has ended."""
        worker, reports = self._start(left)
        began, current, rows = time.monotonic(), "", list[Row]()
        killed = False
        self._limit = began + START_SECONDS * self.slowness
        with reports:
            for report in self._receive(reports):
                if report is None:
                    killed = True
                elif "begin" in report:
                    current, began, rows = report["item"], time.monotonic(), []
                    self._limit = began + 2 * left[0].allowance
                elif "end" in report:
                    self._end(report, rows)
                    del left[0]
                    current, rows = "", []
                    self._limit = time.monotonic() + START_SECONDS * self.slowness
                else:
                    rows.append(report)
                    self.results.append(report)
        with suppress(ProcessLookupError):
            os.killpg(worker.pid, signal.SIGKILL)  # with whatever it has started
        code = worker.wait()
        if current:
            end = "killed" if killed else "crashed"
            said = "" if killed else f"exit code {code}\n{self._last_words()}"
            seconds = round(time.monotonic() - began, 1)
            self._end({"item": current, "end": end, "seconds": seconds, "said": said}, rows)
            del left[0]

    def _start(self, items: Sequence[Item]) -> tuple[subprocess.Popen[bytes], Any]:
        receiver, sender = os.pipe()
        job = {
            "pipe": sender,
            "module": self.module,
            "session": self.session.as_json(),
            "slowness": self.slowness,
            "names": [item.name for item in items],
            "deadline": self.deadline,
        }
        log = self.session.output / LOG
        with (log if os.access(self.session.output, os.W_OK) else Path(os.devnull)).open(
            "ab"
        ) as to:
            worker = subprocess.Popen(
                [sys.executable, "-m", "benchmarks.gpu.worker", json.dumps(job)],
                stdin=subprocess.DEVNULL,
                stdout=to,
                stderr=to,
                env=os.environ | self.variables,
                pass_fds=(sender,),
                start_new_session=True,
            )
        os.close(sender)
        return worker, os.fdopen(receiver, "rb", buffering=0)

    def _receive(self, reports: Any) -> Iterator[Row | None]:
        """Yields reports until the worker ends, or None once it has taken too long."""
        text = b""
        while True:
            end = min(self._limit, self.deadline + GRACE_SECONDS)
            ready, _, _ = select.select([reports], [], [], max(0.0, end - time.monotonic()))
            if not ready:
                yield None
                return
            got = reports.read(65536)
            if not got:
                return
            *lines, text = (text + got).split(b"\n")
            for line in lines:
                yield json.loads(line)

    def _end(self, report: Row, rows: Sequence[Row]) -> None:
        self.results.append(report)
        self.ends[report["item"]] = report
        say("\n".join(show_item(report, rows)))

    def _last_words(self) -> str:
        try:
            text = (self.session.output / LOG).read_text(encoding="utf-8", errors="replace")
        except OSError:
            return ""
        return text[-600:]


def show_item(report: Row, rows: Sequence[Row]) -> Iterator[str]:
    """Yields the lines of an item's table."""
    said = f": {report['said']}" if report.get("said") else ""
    yield f"== {report['item']}: {report['end']}, {report.get('seconds', 0):g} s{said}"
    for row in rows:
        found, estimate = _number(row["found"]), _number(row.get("estimate", ""))
        others = {
            name: value
            for name, value in row.items()
            if name not in ("item", "row", "found", "unit", "estimate", "decides", "wrong")
        }
        told = ", ".join(f"{name} {_number(value)}" for name, value in others.items())
        mark = "WRONG " if row.get("wrong") else ""
        yield (
            f"   {mark}{row['row']:<44} {found:>9} {row.get('unit', ''):<9}"
            f" est. {estimate:<8} {row.get('decides', '')} {told}".rstrip()
        )


def _number(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def unfinished(items: Sequence[Item], results: Sequence[Row]) -> list[Item]:
    """Returns the items that no earlier call has done."""
    done = {row["item"] for row in results if row.get("end") == "done"}
    return [item for item in items if item.name not in done]


def show_ends(items: Sequence[Item], ends: Mapping[str, Row]) -> Iterator[str]:
    """Yields the lines of the last table: items, allowances, and how each ended."""
    yield f"{'item':<40}{'allowance':>10}{'seconds':>9}{'CPU':>9}  end"
    for item in items:
        end = ends.get(item.name, {"end": "not begun"})
        times = "".join(f"{end.get(name, 0):>9g}" for name in TIMES)
        yield f"{item.name:<40}{item.allowance:>10g}{times}  {end['end']}"
    sums = (sum(ends.get(item.name, {}).get(name, 0) for item in items) for name in TIMES)
    times = "".join(f"{each:>9.1f}" for each in sums)
    yield f"{'sum':<40}{sum(item.allowance for item in items):>10g}{times}"


def choose(module: str, only: str, slowness: float) -> list[Item]:
    """Returns the items of a table, or those whose names contain one of the words `a,b`."""
    found = slower(read_items(module), slowness)
    words = only.split(",")
    return [item for item in found if any(word in item.name for word in words)]
