"""One process lists the inputs of a corpus for all that start with it.

Listing 59,166 files with their sizes takes a shared file system up to a minute, and a thousand
processes need not all do it. The first one leads: it registers in a folder next to the work
folder, lists, and creates the work folder with the list in its plan. The others wait for that list
and use it, if they have the same inputs. They do not wait for a silent leader; without a leader
each process lists for itself.

    web_text_document.work.lead/n1-77-12     "41 ready": the leader is process 77 of machine n1, has
                                             said so 41 times, and its plan can be read
"""

from __future__ import annotations

import os
import random
import shutil
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress

import msgspec

from trainyard.corpus.preparation.work_folder import WorkFolder, is_running
from trainyard.data.sidecar import SourceRecord

BEAT_SECONDS = 2.0
SILENT_SECONDS = 10.0
_FIRST_PAUSE, _LONGEST_PAUSE = 0.1, 5.0


class _Plan(msgspec.Struct):
    """The part of `plan.json` that others need."""

    inputs: list[str]
    sources: list[SourceRecord]


class Lead:
    """Who lists the inputs, as one process sees it."""

    def __init__(self, folder: WorkFolder) -> None:
        self._folder = folder
        self._path = folder.path.with_name(f"{folder.path.name}.lead")
        self._own = self._path / folder.worker
        self._count, self._told = 0, ""
        self._seen: tuple[bytes, float] | None = None
        self._has_changed = False

    @contextmanager
    def share_list(self, inputs: Sequence[str]) -> Iterator[list[SourceRecord] | None]:
        """Yields the list of another process, or None where this one lists, and may lead."""
        while not (leads := self._take()) and (state := self._wait()) == "dead":
            pass
        if not leads:
            yield self._read_list(inputs) if state == "ready" else None
            return
        ended = threading.Event()
        heart = threading.Thread(target=self._beat, args=(ended,), daemon=True)
        heart.start()
        try:
            yield None
        finally:
            ended.set()
            heart.join()
            if self._own.exists():
                self._remove()

    def say_ready(self) -> None:
        """Reports to waiting processes, if this one leads, that the work folder has the list."""
        self._told = "ready"
        if self._own.exists():
            self._say()

    def _read_list(self, inputs: Sequence[str]) -> list[SourceRecord] | None:
        with suppress(FileNotFoundError, msgspec.MsgspecError):
            found = msgspec.json.decode(self._folder.read_plan(), type=_Plan)
            if found.inputs == name_inputs(inputs):
                return found.sources
        return None

    def _take(self) -> bool:
        draft = self._path.with_name(f"{self._path.name}.draft-{self._folder.worker}")
        try:
            draft.mkdir()
            (draft / self._own.name).write_bytes(b"0 ")
            draft.rename(self._path)
        except OSError:  # another leads; or the folder cannot be written, as is said later
            shutil.rmtree(draft, ignore_errors=True)
            return False
        return True

    def _beat(self, ended: threading.Event) -> None:
        while not ended.wait(BEAT_SECONDS):
            self._say()

    def _say(self) -> None:
        self._count += 1
        new = self._path / f".{self._own.name}"
        # Both threads may do so at once; one of them is enough.
        with suppress(OSError):
            new.write_text(f"{self._count} {self._told}")
            new.rename(self._own)

    def _wait(self) -> str:
        """Waits until a leader is "ready", "gone", or found "dead"."""
        pause = _FIRST_PAUSE
        while not (state := self._look()):
            time.sleep(pause * random.uniform(0.5, 1.5))
            pause = min(2 * pause, _LONGEST_PAUSE)
        return state

    def _look(self) -> str:
        """Returns the same, or "" while the leader lists or is not yet seen to live."""
        try:
            (leader,) = (name for name in os.listdir(self._path) if name[0] != ".")  # noqa: PTH208
            said = (self._path / leader).read_bytes()
        except (OSError, ValueError):
            return "gone"
        now, runs = time.monotonic(), is_running(leader)
        if self._seen is None or said != self._seen[0]:
            self._has_changed = self._seen is not None
            self._seen = (said, now)
        if runs is False or (runs is None and now - self._seen[1] > SILENT_SECONDS):
            self._remove()
            return "dead"
        return "ready" if said.endswith(b"ready") and (runs or self._has_changed) else ""

    def _remove(self) -> None:
        away = self._path.with_name(f"{self._path.name}.done-{self._folder.worker}")
        with suppress(OSError):
            self._path.rename(away)
        shutil.rmtree(away, ignore_errors=True)


def name_inputs(inputs: Sequence[str]) -> list[str]:
    """Names inputs so that the same names mean the same files, wherever a process started."""
    return [os.path.abspath(item) for item in inputs]  # noqa: PTH100 (links stay)
