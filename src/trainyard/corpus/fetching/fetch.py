"""Downloads the raw text of a corpus: pinned, resumable at any byte, and verified.

    result = fetch("openwebtext", Path("corpora/openwebtext"), network=Network(connections=8))

The folder holds the whole state, so the same call resumes after a power failure:

    fetch.listing                       the pinned list of files, made by the first call
    plain_text/a.parquet                complete and verified; never requested again
    plain_text/b.parquet.partial        its first bytes; the next call requests only the rest
    plain_text/b.parquet.partial.etag   the file version of these bytes

A file gets its final name only once its size and checksum are correct and its bytes are on disk.
Transient errors (429, 5xx, a lost connection, a truncated body) are retried after a wait; received
bytes count as success, so only a server that sends nothing ends the call. A wrong file is fetched
again from its start, at most three times.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from fnmatch import fnmatchcase
from multiprocessing.pool import ThreadPool
from pathlib import Path

import msgspec
import urllib3
from urllib3.exceptions import HTTPError

from trainyard.corpus.fetching.catalogue import (
    KnownCorpus,
    Listing,
    RemoteFile,
    check_paths,
    find_corpus,
    list_files,
)
from trainyard.corpus.fetching.web import Client, Network, StoppedError, TransientError
from trainyard.corpus.sources.files import LISTING_NAME
from trainyard.errors import SPACE, DataError, MachineError, explain_failure
from trainyard.files import publish_text
from trainyard.log import ProgressUpdate
from trainyard.units import format_bytes

_CHUNK_BYTES = 2**20
_MAX_WRONG_FILES = 3
_UNWRITABLE = (
    f"{SPACE}, or choose another folder; then run the same command again: it resumes where it "
    "stopped"
)


@dataclass(frozen=True)
class FetchResult:
    """The files asked for, all of them in the folder; `n_fetched` came over the network now."""

    revision: str
    licence: str
    n_files: int
    n_bytes: int
    n_fetched: int


class _WrongFileError(Exception):
    """The bytes are not those of the pinned file."""


def fetch(
    corpus: str,
    folder: Path,
    *,
    only: str = "*",
    network: Network | None = None,
    progress: ProgressUpdate | None = None,
    announce: Callable[[str], object] | None = None,
) -> FetchResult:
    """Downloads a corpus into a folder, or the rest of it.

    Args:
        corpus: a shipped name, `NAME@REVISION`, or a `.toml` file (see `find_corpus`).
        folder: belongs to one corpus at one revision, and to one call at a time.
        only: shell pattern over the whole path: `train/chunk1/*`.
        network: how to talk to the servers.
        progress: gets bytes done, bytes in all and a text, from any thread, one at a time.
        announce: gets a line with files, sizes, checksums and free space, before the download.

    Raises:
        ConfigError: there is no such corpus.
        DataError: a server refuses, keeps failing, or gives wrong bytes; or the folder belongs to
            something else.
        MachineError: the disk is too small or cannot be written.
    """
    network = network or Network()
    described = find_corpus(corpus)
    with explain_failure(f"{folder} cannot be written", _UNWRITABLE):
        folder.mkdir(parents=True, exist_ok=True)
    with closing(_Downloads(folder, network, progress)) as downloads:
        listing = _pin_listing(described, "@" in corpus, folder, downloads.client)
        files = [file for file in listing.files if fnmatchcase(file.path, only)]
        if not files:
            some = ", ".join(file.path for file in listing.files[:3])
            raise DataError(f"no file matches only={only!r}", f"the paths look like {some}")
        missing = downloads.plan(files)
        needed, free = downloads.left_bytes, shutil.disk_usage(folder).free
        if announce and missing:
            announce(_describe_download(files, missing, needed, free))
        if needed > free:
            raise MachineError(
                f"{folder} has {format_bytes(free)} free; "
                f"the files still to fetch take {format_bytes(needed)}",
                "choose a folder on a larger disk, or fetch a part of the corpus",
            )
        downloads.run(missing, max(1, min(network.connections, described.max_connections)))
    n_bytes = sum(file.size_bytes for file in files)
    return FetchResult(listing.revision, listing.licence, len(files), n_bytes, len(missing))


def _pin_listing(
    corpus: KnownCorpus, revision_given: bool, folder: Path, client: Client
) -> Listing:
    """Reads the listing of the folder; asks the server for it where there is none yet."""
    path = folder / LISTING_NAME
    if not path.exists():
        listing = list_files(corpus, client)
        check_paths(listing)
        publish_text(path, msgspec.json.format(msgspec.json.encode(listing), indent=1).decode())
        return listing
    try:
        listing = msgspec.json.decode(path.read_bytes(), type=Listing)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise DataError(f"{path} is damaged: {error}", "fetch into a new folder") from None
    check_paths(listing)
    asked = f"{corpus.host}/{corpus.repository}"
    revisions = (listing.revision, listing.asked_revision)
    if listing.source != asked or (revision_given and corpus.revision not in revisions):
        wanted = f"{asked} at {corpus.revision}"
        raise DataError(
            f"{folder} holds {listing.source} at {listing.revision}, not {wanted}",
            "choose another folder: each holds one corpus at one revision",
        )
    return listing


def _partial_of(path: Path) -> Path:
    return path.with_name(f"{path.name}.partial")


def _size_of(path: Path) -> int:
    return path.stat().st_size if path.is_file() else 0


def _describe_download(
    files: Sequence[RemoteFile], missing: Sequence[RemoteFile], needed: int, free: int
) -> str:
    """Describes the files asked for and those still to fetch, with bytes needed and free."""
    kinds = Counter(file.checksum.algorithm for file in missing)
    checks = [f"{kind} for {count:,}" for kind, count in kinds.items() if kind]
    checks += [f"size only for {kinds['']:,}"] if kinds[""] else []
    return (
        f"to fetch: {len(missing):,} of {len(files):,} files, {needed / 1e9:.3f} GB; "
        f"verified by {', '.join(checks)}; free here: {free / 1e9:,.1f} GB"
    )


class _Downloads:
    """Brings files into the folder, several at a time, and reports the progress of all threads."""

    def __init__(self, folder: Path, network: Network, progress: ProgressUpdate | None) -> None:
        self._folder, self._update = folder, progress
        self._stop, self._lock = threading.Event(), threading.Lock()
        self._done_bytes = self._total_bytes = self._n_whole = self._n_files = 0
        self.client = Client(network, self._stop, self._report)

    def close(self) -> None:
        """Closes the connections."""
        self.client.close()

    def plan(self, files: Sequence[RemoteFile]) -> list[RemoteFile]:
        """Returns the files that are not complete yet."""
        missing = []
        for file in files:
            path = self._folder / file.path
            if not path.is_file() or path.stat().st_size != file.size_bytes:
                missing.append(file)
                self._done_bytes += _size_of(_partial_of(path))
            else:
                self._done_bytes += file.size_bytes
        self._n_files, self._n_whole = len(files), len(files) - len(missing)
        self._total_bytes = sum(file.size_bytes for file in files)
        return missing

    @property
    def left_bytes(self) -> int:
        """The bytes still to fetch."""
        return self._total_bytes - self._done_bytes

    def _add(self, n_bytes: int, n_whole: int = 0) -> None:
        with self._lock:
            self._done_bytes += n_bytes
            self._n_whole += n_whole
        self._report(f"{self._n_whole:,} of {self._n_files:,} files")

    def _report(self, detail: str) -> None:
        with self._lock:  # one thread at a time calls the user's function
            if self._update:
                self._update(self._done_bytes, self._total_bytes, detail)

    def run(self, files: Sequence[RemoteFile], n_threads: int) -> None:
        """Returns when all files are there; raises the first error of any of them."""
        # Its threads are daemons: one that waits for a dead server does not hold up Ctrl-C.
        with ThreadPool(n_threads) as pool:
            try:
                for _ in pool.imap_unordered(self._bring, files):
                    pass
            finally:
                self._stop.set()

    def _bring(self, file: RemoteFile) -> None:
        """Fetches, verifies and names one file."""
        target = self._folder / file.path
        partial = _partial_of(target)
        with explain_failure(f"{target} cannot be written", _UNWRITABLE):
            target.parent.mkdir(parents=True, exist_ok=True)
            for _ in range(_MAX_WRONG_FILES):
                try:
                    self.client.keep_trying(
                        file.path, lambda: self._receive(file, partial), lambda: _size_of(partial)
                    )
                    _verify(file, partial)
                except _WrongFileError as error:
                    problem = str(error)
                    self._discard(partial)
                    continue
                partial.replace(target)
                _tag_of(partial).unlink(missing_ok=True)
                self._add(0, n_whole=1)
                return
        raise DataError(
            f"{file.path} was wrong {_MAX_WRONG_FILES} times: {problem}",
            "the file has changed on the server, or a mirror is damaged: try another mirror, or "
            f"fetch a newer revision into a new folder ({file.url})",
        )

    def _discard(self, partial: Path) -> None:
        self._add(-_size_of(partial))
        partial.unlink(missing_ok=True)
        _tag_of(partial).unlink(missing_ok=True)

    def _receive(self, file: RemoteFile, partial: Path) -> None:
        """Appends what is missing of a file; raises `TransientError` when the body ends early."""
        tag = _tag_of(partial).read_text("latin-1") if _tag_of(partial).is_file() else ""
        if not (tag or file.checksum.algorithm) or _size_of(partial) > file.size_bytes:
            # Nothing could tell whether old bytes and new ones are of the same version.
            self._discard(partial)
        offset = _size_of(partial)
        if offset == file.size_bytes and partial.exists():
            return
        asked = {"Range": f"bytes={offset}-"} if offset else {}
        if offset and tag:
            asked["If-Range"] = tag
        with closing(self.client.open("GET", file.url, asked)) as response:
            if response.status == 416:
                raise _WrongFileError("the server has fewer bytes than before")
            if response.status == 206 and offset:
                _check_range(response.headers, offset, file.size_bytes, tag)
            elif offset:
                # The server ignores ranges, or its file is another one by now.
                self._discard(partial)
                offset = 0
            length = response.headers.get("Content-Length", "")
            if length.isdecimal() and offset + int(length) != file.size_bytes:
                raise _WrongFileError(
                    f"expected {file.size_bytes} bytes, the server has {offset + int(length)}"
                )
            _write_tag(partial, response.headers.get("ETag", ""))
            self._append(response, partial, file.size_bytes - offset)

    def _append(self, response: urllib3.BaseHTTPResponse, partial: Path, n_bytes: int) -> None:
        """Writes the body of a response, which should have `n_bytes`, to the end of a file."""
        with partial.open("ab") as output:
            while True:
                try:
                    chunk = response.read1(_CHUNK_BYTES, decode_content=False)
                except HTTPError as error:
                    raise TransientError(f"the connection broke: {error}") from error
                if not chunk:
                    break
                n_bytes -= len(chunk)
                if n_bytes < 0:
                    raise _WrongFileError("the server sends more bytes than the file has")
                output.write(chunk)
                self._add(len(chunk))
                if self._stop.is_set():
                    raise StoppedError
            output.flush()
            os.fsync(output.fileno())
        if n_bytes:
            raise TransientError(f"the body ended {n_bytes} bytes early")


def _check_range(headers: Mapping[str, str], offset: int, size_bytes: int, tag: str) -> None:
    # Some servers give a range of the new version, whatever `If-Range` says.
    if tag and headers.get("ETag", tag) != tag:
        raise _WrongFileError(f"expected version {tag}, the server has {headers['ETag']}")
    given = headers.get("Content-Range", "")
    match = re.fullmatch(r"bytes (\d+)-\d+/(\d+|\*)", given)
    if not match or int(match[1]) != offset or match[2] not in ("*", str(size_bytes)):
        raise _WrongFileError(
            f"asked for bytes {offset} to {size_bytes}, the server sent {given!r}"
        )


def _tag_of(partial: Path) -> Path:
    return partial.with_name(f"{partial.name}.etag")


def _write_tag(partial: Path, tag: str) -> None:
    # A weak tag (W/"...") promises the same meaning, not the same bytes.
    is_strong = re.fullmatch(r'"[\x21\x23-\x7e]*"', tag)
    _tag_of(partial).write_text(tag if is_strong else "", encoding="latin-1")


def _verify(file: RemoteFile, partial: Path) -> None:
    # Read back from the disk: this also finds what went wrong between memory and disk.
    algorithm, expected = file.checksum
    if not algorithm:
        return
    with partial.open("rb") as stream:
        # Some systems forbid MD5 and SHA-1 for security; here they detect accidents.
        digest = hashlib.file_digest(
            stream, lambda: hashlib.new(algorithm, usedforsecurity=False)
        ).hexdigest()
    if digest != expected.lower():
        raise _WrongFileError(f"expected {algorithm} {expected}, found {digest}")
