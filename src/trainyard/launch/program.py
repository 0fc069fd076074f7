"""The frame of a program: plain output, and errors that a user can fix as one message."""

from __future__ import annotations

import codecs
import io
import sys
import traceback
from collections.abc import Callable
from typing import NoReturn

from trainyard.errors import UserError, explain_os_error
from trainyard.extras import missing_package
from trainyard.launch.environment import hide_secrets, let_idle_threads_sleep, raise_file_limit
from trainyard.log import build_logger, escape_output


def run_program(work: Callable[[], int], *, is_debug: bool = False) -> NoReturn:
    """Sets up output, logging and limits; exits with the exit code that `work` returns.

    Args:
        work: what the program does.
        is_debug: print the tracebacks of user errors, too.
    """
    codecs.register_error("plain", _replace_characters)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # in any encoding
            stream.reconfigure(errors="plain")
    escape_output()
    build_logger(hide_secrets)
    let_idle_threads_sleep()
    raise_file_limit()
    try:
        sys.exit(work())
    except (UserError, ModuleNotFoundError, OSError) as error:
        user_error: UserError | None
        if isinstance(error, UserError):
            user_error = error
        elif isinstance(error, OSError):
            user_error = explain_os_error(error)
        else:
            user_error = missing_package(error)
        if user_error is None:
            raise
        if is_debug:
            sys.stderr.write(hide_secrets(traceback.format_exc()))
        sys.stderr.write(hide_secrets(f"error: {user_error}\n"))
        sys.exit(user_error.exit_code)


def _replace_characters(error: UnicodeError) -> tuple[str, int]:
    """Writes what an encoding lacks as a question mark, and bars as #."""
    assert isinstance(error, UnicodeEncodeError)
    text = error.object[error.start : error.end].replace("█", "#")
    return text.encode("ascii", "replace").decode(), error.end
