"""Documents of text, streamed from files in bounded memory.

A corpus goes through three steps, each one call:

    files = find_files(["corpus/", "more/*.jsonl.zst"])     # sorted, checked, no duplicates
    units = split_into_units([(file, file.stat().st_size) for file in files])  # of about 128 MiB
    for segment in units[0]:                                # a file, or whole lines of one
        for batch in read_documents(segment, key="text"):
            batch.texts                                     # a few MiB of documents, in order
            batch.faults                                    # what could not be read, and where

Joined in order, the units give every document of every file once, however many processes share
them. A reader never decides what a bad document means: it hands over a `Fault`, and the caller
stops or sets it aside.
"""

from trainyard.data.sources.batch import Batch, Fault
from trainyard.data.sources.documents import read_documents
from trainyard.data.sources.files import Segment, find_files, scan_inputs, split_into_units

__all__ = [
    "Batch",
    "Fault",
    "Segment",
    "find_files",
    "read_documents",
    "scan_inputs",
    "split_into_units",
]
