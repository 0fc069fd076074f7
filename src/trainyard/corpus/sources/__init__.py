"""Documents of text, streamed from files in bounded memory.

A corpus goes through three steps, each one call:

    files = find_files(["corpus/", "more/*.jsonl.zst"])     # sorted, checked, no duplicates
    units = split_into_units([(file, file.stat().st_size) for file in files], 2**27)
    for segment in units[0]:                                # a file, or whole lines of one
        for batch in read_documents(segment, key="text"):
            batch.texts                                     # a few MiB of documents, in order
            batch.faults                                    # unreadable documents, with places

Joined in order, the units contain every document of every file once, for any number of processes. A
reader does not handle bad documents: it returns a `Fault`, and the caller stops or quarantines it.
"""
