"""Starts the command: Ctrl-C during its imports, too, ends it in one line."""

from __future__ import annotations

import sys

EXIT_INTERRUPTED = 130


def start() -> None:
    """Imports the command line and runs it."""
    try:
        from trainyard.cli.main import main

        main()
    except KeyboardInterrupt:
        sys.stderr.write("interrupted\n")
        sys.exit(EXIT_INTERRUPTED)


if __name__ == "__main__":
    start()
