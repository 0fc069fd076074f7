"""Starts the command as `python -m trainyard`."""

from trainyard.cli.__main__ import start

if __name__ == "__main__":
    start()
