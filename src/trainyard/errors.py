"""The errors a user can fix, and the exit code each of them ends the program with.

    Exception
    └── UserError            exit code 2: the user can fix it
        ├── ConfigError      a run file, a preset or an override
        ├── DataError        text, token files, tokenizers
        ├── CheckpointError  a checkpoint that is missing, damaged or of another run
        ├── LaunchError      a job script, a scheduler, a cluster file
        ├── MachineError     disk, memory, devices, drivers
        │   └── LostRankError   another rank died or hung: exit code 75
        └── GuardError       training aborted: exit code 93

Anything else that reaches the top is a bug in Trainyard: exit code 1, with its traceback.
"""

from __future__ import annotations

import os
import re

EXIT_REQUEUE = 75
"""Stopped early, or stopped by a failing machine: start the same command again."""
EXIT_HOLD = 93
"""Held: needs attention before it is started again."""


_CONTROLS = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f]")  # all but the tab and the line feed


def printable(name: str | os.PathLike[str]) -> str:
    """Shows a name in one line: control characters and bytes that are no text as escapes."""
    text = os.fsencode(name).decode(errors="backslashreplace")
    return _escape(text).replace("\n", r"\n").replace("\t", r"\t")


def _escape(text: str) -> str:
    return _CONTROLS.sub(lambda found: found[0].encode("unicode_escape").decode(), text)


class UserError(Exception):
    """A mistake the user can fix; printed as one message with a hint, without a traceback.

    Control characters are escaped, because a terminal would act on them.

    Args:
        problem: what is wrong, with the value and the place (file, line, field).
        hint: what to do about it.
    """

    exit_code = 2

    def __init__(self, problem: str, hint: str = "") -> None:
        super().__init__(_escape(problem))
        self.problem = _escape(problem)
        self.hint = _escape(hint)

    def __str__(self) -> str:
        return f"{self.problem}\nhint: {self.hint}" if self.hint else self.problem


class ConfigError(UserError):
    """A run file, a preset or a `section.field=value` override is wrong."""


class DataError(UserError):
    """Input text, a token file or a tokenizer is missing, malformed or of the wrong kind."""


class CheckpointError(UserError):
    """A checkpoint is missing, damaged, or does not belong to this run."""


class LaunchError(UserError):
    """A job cannot be written or submitted."""


class MachineError(UserError):
    """The machine cannot do what was asked: disk full, no such device, too little memory."""


class LostRankError(MachineError):
    """Another rank died or hung, so this one cannot go on."""

    exit_code = EXIT_REQUEUE


class GuardError(UserError):
    """Training aborted: going on would waste time, or make things worse."""

    exit_code = EXIT_HOLD
