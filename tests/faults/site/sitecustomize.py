"""Python imports this at its start where this folder is on PYTHONPATH: workers become faulty."""

from tests.faults import faulty_worker

faulty_worker.install()
