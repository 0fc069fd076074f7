"""The errors that a user can fix, with their exit codes.

    Exception
    └── UserError            exit code 2: the user can fix it
        ├── ConfigError      a run file, a preset or an override
        ├── DataError        text, token files, tokenizers
        ├── CheckpointError  a checkpoint that is missing, damaged or of another run
        ├── LaunchError      a job script, a scheduler, a cluster file
        ├── MachineError     disk, memory, devices, drivers
        │   └── LostRankError   another rank died or hung: exit code 75
        └── GuardError       training aborted: exit code 93

An OSError that nobody caught becomes a MachineError with its file (`explain_os_error`). Any other
uncaught exception is a bug in Trainyard: exit code 1, with a traceback.
"""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

EXIT_REQUEUE = 75
"""Stopped early, or stopped by a failing machine: start the same command again."""
EXIT_HOLD = 93
"""Held: needs attention before a restart."""
EXIT_INTERRUPTED = 130
"""Ended by Ctrl-C."""
SHOWN_PROBLEMS = 20

# Control characters but tab and line feed; separators of lines; what reorders or embeds text.
_CONTROLS = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069]")


def printable(name: str | os.PathLike[str]) -> str:
    """Formats a name on one line; escapes control characters and undecodable bytes."""
    text = os.fsencode(name).decode(errors="backslashreplace")
    return escape(text).replace("\n", r"\n").replace("\t", r"\t")


def escape(text: str) -> str:
    r"""Shows characters that a terminal or a reader would obey, as in \x1b and \u202e."""
    return _CONTROLS.sub(lambda found: found[0].encode("unicode_escape").decode(), text)


SPACE = "free space, inodes (df -i) or quota, raise ulimit -f"
"""What to do when a file cannot be written; followed by an alternative."""
_HINTS = {
    errno.ENOSPC: f"{SPACE}, or choose another place",
    errno.EDQUOT: f"{SPACE}, or choose another place",
    errno.EFBIG: f"{SPACE}, or choose another place",
    errno.EMFILE: "raise the limit of open files: ulimit -n 65536",
    errno.ENFILE: "close files of other programs, or raise fs.file-max",
    errno.EACCES: "change its permissions, or choose another place",
    errno.EPERM: "change its permissions, or choose another place",
    errno.EROFS: "make it writable, or choose another place",
    errno.EIO: "the disk or its server fails: see dmesg",
    errno.ESTALE: "its server lost it: mount it again",
    errno.ENAMETOOLONG: "choose a shorter name: most file systems allow 255 bytes",
}


def refuse_problems(place: str, problems: Sequence[str], error: type[UserError], hint: str) -> None:
    """Raises `error` with the number of problems, if any, and the first of them, a line each."""
    if not problems:
        return
    lines = [f"{place}: {'1 problem' if len(problems) == 1 else f'{len(problems)} problems'}"]
    lines += problems[:SHOWN_PROBLEMS]
    if len(problems) > SHOWN_PROBLEMS:
        lines.append(f"and {len(problems) - SHOWN_PROBLEMS} more")
    raise error("\n  ".join(lines), hint)


class UserError(Exception):
    """A mistake the user can fix; printed as one message with a hint, without a traceback.

    Escapes control characters, because a terminal would interpret them.

    Args:
        problem: what is wrong, with the value and the place (file, line, field).
        hint: what to do about it.
    """

    exit_code = 2

    def __init__(self, problem: str, hint: str = "") -> None:
        super().__init__(escape(problem))
        self.problem = escape(problem)
        self.hint = escape(hint)

    def __str__(self) -> str:
        return f"{self.problem}\nhint: {self.hint}" if self.hint else self.problem


TrainyardError = UserError  # its name in `import trainyard`


class ConfigError(UserError):
    """A run file, a preset or a `section.field=value` override is wrong."""


class DataError(UserError):
    """Input text, a token file or a tokenizer is missing, malformed or of the wrong kind."""


class CheckpointError(UserError):
    """A checkpoint is missing, damaged, or does not belong to this run."""


class NewerFormatError(CheckpointError):
    """A checkpoint is intact, but only a newer version reads it: nobody may pass over it."""


class LaunchError(UserError):
    """A job cannot be written or submitted."""


class MachineError(UserError):
    """The machine cannot do what was requested: disk full, no such device, too little memory."""


def explain_os_error(error: OSError) -> MachineError | None:
    """Describes a file that failed where nobody expected it; None if it names no file or reason.

    The last resort: where the reason is known, so is a better hint.
    """
    if not error.strerror or not (error.filename or error.errno in _HINTS):
        return None
    name = printable(error.filename or "")
    if error.errno == errno.ENAMETOOLONG:
        name = f"{name[:40]}...{name[-40:]}"
    place = f"{name}: " if name else ""
    hint = _HINTS.get(error.errno or 0, "check this path; --debug shows where it was needed")
    return MachineError(f"{place}{error.strerror}", hint)


@contextmanager
def explain_failure(
    problem: str, hint: str = "", kind: type[UserError] = MachineError
) -> Iterator[None]:
    """Converts an OSError to an error of this kind: the problem, its reason, and a hint."""
    try:
        yield
    except OSError as error:
        raise kind(f"{problem}: {error.strerror or error}", hint) from error


class LostRankError(MachineError):
    """Another rank died or hung, so this one cannot continue."""

    exit_code = EXIT_REQUEUE


class GuardError(UserError):
    """Training aborted, because continuing would waste time or do harm."""

    exit_code = EXIT_HOLD
