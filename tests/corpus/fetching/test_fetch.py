"""Tests of the downloads, against a real HTTP server that misbehaves in every way we know."""

from __future__ import annotations

import hashlib
import json
import random
import re
import shutil
import signal
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from email.utils import formatdate
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from tests.waiting import WATCHDOG_SECONDS, wait_until

from trainyard.corpus.fetching.catalogue import (
    Checksum,
    Listing,
    RemoteFile,
    check_paths,
    describe,
    find_corpus,
)
from trainyard.corpus.fetching.fetch import LISTING_NAME, FetchResult, fetch
from trainyard.corpus.fetching.web import Network
from trainyard.corpus.sources.files import find_files
from trainyard.errors import ConfigError, DataError, MachineError

COMMIT = "5" * 40
RESOLVE = f"/datasets/Skylion007/openwebtext/resolve/{COMMIT}/"
API = "/api/datasets/Skylion007/openwebtext"
TREE = f"{API}/tree/{COMMIT}?recursive=true"
SIZE = 300_000
HALF = SIZE // 2


def some_bytes(seed: int, n_bytes: int = SIZE) -> bytes:
    return random.Random(seed).randbytes(n_bytes)


class Server(ThreadingHTTPServer):
    """Serves `files` by path; each request for a path first uses up one of its `faults`."""

    daemon_threads = True

    def __init__(self, host: str = "127.0.0.1", port: int = 0) -> None:
        super().__init__((host, port), Handler)
        self.address = f"http://{host}:{self.server_port}"
        self.files: dict[str, bytes] = {}
        self.faults: dict[str, list[str]] = {}
        self.requests: list[tuple[str, str, dict[str, str]]] = []
        self.tags = {"version": '"one"'}
        self.sent_half = threading.Event()
        self.n_sent = 0
        self.lock = threading.Lock()
        self.changed = threading.Condition(self.lock)
        self.n_open = self.most_open = self.n_awaited = 0

    def handle_error(self, request: object, client_address: object) -> None:
        pass  # clients that are killed break connections; that is what is tested

    def count_those_at_once(self) -> None:
        with self.changed:
            self.n_open += 1
            self.most_open = max(self.most_open, self.n_open)
            self.changed.notify_all()
            self.changed.wait_for(lambda: self.most_open >= self.n_awaited, WATCHDOG_SECONDS)
        time.sleep(0.1)  # for more to come
        with self.lock:
            self.n_open -= 1

    def asked(self, path: str) -> list[dict[str, str]]:
        return [headers for _, asked_path, headers in list(self.requests) if asked_path == path]

    def publish(
        self,
        files: dict[str, bytes],
        repository: str = "Skylion007/openwebtext",
        *,
        large: bool = True,
        page_size: int = 2,
    ) -> None:
        """Publishes files as a data set of Hugging Face, its listing cut into pages."""
        api, resolve, tree = (
            text.replace("Skylion007/openwebtext", repository) for text in (API, RESOLVE, TREE)
        )
        entries: list[dict[str, object]] = [{"type": "directory", "path": "plain_text", "size": 0}]
        for path, data in files.items():
            entry: dict[str, object] = {"type": "file", "path": path, "size": len(data)}
            if large:
                entry["size"] = 130
                digest = hashlib.sha256(data).hexdigest()
                entry["lfs"] = {"oid": digest, "size": len(data), "pointerSize": 130}
            entries.append(entry)
            self.files[resolve + path] = data
        self.files[f"{api}/revision/main"] = json.dumps({"sha": COMMIT, "id": "x"}).encode()
        for start in range(0, len(entries), page_size):
            page = tree + (f"&cursor={start}" if start else "")
            self.files[page] = json.dumps(entries[start : start + page_size]).encode()
            if start + page_size < len(entries):
                # An absolute address of the true host, as the real server gives.
                following = f"https://huggingface.co{tree}&cursor={start + page_size}"
                self.tags[page] = f'<{following}>; rel="next"'


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Server

    def log_message(self, format: str, *arguments: object) -> None:
        pass

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        server, path = self.server, self.path
        server.requests.append((self.command, path, dict(self.headers)))
        fault = server.faults[path].pop(0) if server.faults.get(path) else ""
        if fault == "drop":
            self.close_connection = True
            return
        if match := re.fullmatch(r"(\d{3})(?: ([\w-]+): (.*))?", fault):
            self.send_response(int(match[1]))
            if match[2]:
                self.send_header(match[2], match[3])
            self.send_header("Content-Length", "0")
            self.end_headers()
            return
        if path not in server.files:
            self.send_error(404)
            return
        data = server.files[path]
        if fault == "wrong bytes":
            data = bytes(len(data))
        self.answer(data, fault)

    def answer(self, data: bytes, fault: str) -> None:
        start, tag = 0, self.server.tags["version"]
        given = self.headers.get("Range", "")
        same = self.headers.get("If-Range", tag) == tag or fault == "ignore If-Range"
        if given and same and fault != "ignore Range":
            start = int(given.removeprefix("bytes=").removesuffix("-"))
            if start >= len(data):
                self.send_error(416)
                return
            self.send_response(206)
            end = f"{len(data) - 1}/{len(data)}"
            self.send_header("Content-Range", f"bytes {start + (fault == 'shifted')}-{end}")
        else:
            self.send_response(200)
        body = data[start:]
        if fault == "shifted":
            body = body[1:] + b"x"
        if fault.startswith("no length"):
            self.close_connection = True
        else:
            self.send_header("Content-Length", str(len(body)))
        if fault != "no tag":
            self.send_header("ETag", "W/" + tag if fault == "weak tag" else tag)
        if link := self.server.tags.get(self.path):
            self.send_header("Link", link)
        self.end_headers()
        if self.command == "GET":
            self.send_body(body, fault)

    def send_body(self, body: bytes, fault: str) -> None:
        if fault in ("cut", "stall", "no tag", "weak tag", "no length, cut"):
            body = body[: len(body) // 2]
            self.close_connection = True
        self.server.n_sent += len(body)
        if fault == "slow":
            self.server.count_those_at_once()
        self.wfile.write(body)
        if fault == "stall":
            self.wfile.flush()
            self.server.sent_half.set()
            self.connection.settimeout(WATCHDOG_SECONDS)
            self.rfile.read(1)  # until the client is gone


@contextmanager
def running(server: ThreadingHTTPServer) -> Iterator[None]:
    with server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield
        finally:
            server.shutdown()
            thread.join()


@contextmanager
def serving(
    host: str = "127.0.0.1", port: int = 0, publish: Callable[[Server], None] = lambda _: None
) -> Iterator[Server]:
    server = Server(host, port)
    publish(server)  # before the first answer, not before the first connection
    with running(server):
        yield server


def make_certificate(folder: Path, names: list[str]) -> Path:
    """Makes a key and a certificate of hosts, in one file."""
    if not shutil.which("openssl"):
        pytest.skip("the openssl program is not on this machine")
    path = folder / "both.pem"
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2"]
    command += ["-subj", "/CN=host", "-addext", f"subjectAltName={','.join(names)}"]
    command += ["-keyout", str(path), "-out", "-"]
    made = subprocess.run(command, check=True, capture_output=True)
    path.write_bytes(path.read_bytes() + made.stdout)
    return path


@pytest.fixture
def server() -> Iterator[Server]:
    with serving() as server:
        yield server


def quick(server: Server) -> Network:
    return Network(
        server.address, backoff_seconds=0.001, timeout_seconds=WATCHDOG_SECONDS, attempts=4
    )


def get(server: Server, folder: Path, corpus: str = "openwebtext", **options: Any) -> FetchResult:
    return fetch(corpus, folder, **{"network": quick(server), **options})


A, B, C = (f"plain_text/train-{n:05d}.parquet" for n in range(3))


SHIPPED = Path(__file__).parents[3] / "src/trainyard/config/corpora/openwebtext.toml"


def test_a_paged_listing_is_pinned_and_fetched_once(server: Server, tmp_path: Path) -> None:
    files = {A: some_bytes(1), B: some_bytes(2), C: b"", "README.md": b"not of the corpus"}
    server.publish(files)
    seen: list[tuple[float, float, str]] = []
    folder = tmp_path / "new" / "folder"
    result = get(
        server,
        folder,
        network=replace(quick(server), contact="me@example.org"),
        progress=lambda done, total, detail="": seen.append((done, total, detail)),
    )
    assert result == FetchResult(COMMIT, result.licence, 3, 2 * SIZE, 3)
    assert "CC0" in result.licence
    assert {p.relative_to(folder).as_posix() for p in folder.rglob("*") if p.is_file()} == {
        A, B, C, LISTING_NAME,
    }  # fmt: skip
    assert all((folder / path).read_bytes() == files[path] for path in (A, B, C))
    assert seen[-1] == (2 * SIZE, 2 * SIZE, "3 of 3 files")
    assert all(done <= total for done, total, _ in seen)
    agents = {headers["User-Agent"] for _, _, headers in server.requests}
    assert agents == {"trainyard/0.2.0 (me@example.org)"}
    # `prepare` takes the folder as it is: only the corpus has an extension it knows.
    assert find_files([str(folder)]) == [folder / A, folder / B, folder / C]
    # A second call asks nobody for anything.
    server.requests.clear()
    assert get(server, folder) == replace(result, n_fetched=0)
    assert server.requests == []


@pytest.mark.parametrize(("allowed", "expected"), [(1, 1), (2, 2), (16, 4)])
def test_no_more_connections_than_the_server_allows(
    server: Server, tmp_path: Path, allowed: int, expected: int
) -> None:
    corpus = tmp_path / "mine.toml"
    text = SHIPPED.read_text().replace("max_connections = 16", f"max_connections = {allowed}")
    corpus.write_text(text.replace("https://huggingface.co", server.address))
    paths = [f"plain_text/{n}.parquet" for n in range(6)]
    server.publish({path: path.encode() for path in paths})
    server.faults = {RESOLVE + path: ["slow"] for path in paths}
    server.n_awaited = expected
    # The next page is asked for on the same server, whatever host the link names.
    network = replace(quick(server), mirror="")
    assert fetch(str(corpus), tmp_path / "folder", network=network).n_files == 6
    assert server.most_open == expected


def test_a_wikimedia_dump_is_pinned_to_its_date(server: Server, tmp_path: Path) -> None:
    name = "enwiki-20261101-pages-articles-multistream.xml.bz2"
    data = some_bytes(3)
    digest = hashlib.sha1(data).hexdigest()
    sums = f"{digest}  {name}\n{'0' * 40}  enwiki-20261101-pages-articles.xml.bz2\n"
    server.files["/mirror/enwiki/latest/enwiki-latest-sha1sums.txt"] = sums.encode()
    server.files[f"/mirror/enwiki/20261101/{name}"] = data
    network = replace(quick(server), mirror=f"{server.address}/mirror/")
    assert fetch("wikipedia", tmp_path, network=network).revision == "20261101"
    assert (tmp_path / name).read_bytes() == data
    assert fetch("wikipedia@20261101", tmp_path, network=network).n_fetched == 0
    assert fetch("wikipedia@latest", tmp_path, network=network).n_fetched == 0
    with pytest.raises(DataError, match=r"enwiki at 20261101, not .*enwiki at 20261001"):
        fetch("wikipedia@20261001", tmp_path, network=network)
    # An unfinished dump has a list already, but not this file in it.
    unfinished = sums.splitlines()[1].encode()
    server.files["/mirror/enwiki/20261120/enwiki-20261120-sha1sums.txt"] = unfinished
    with pytest.raises(DataError, match="there are: enwiki-20261101-pages-articles") as error:
        fetch("wikipedia@20261120", tmp_path / "b", network=network)
    assert "still being made" in error.value.hint


PASSING = {
    "500 and 503": ["500", "503"],
    "lost connections": ["drop", "drop", "drop"],
    "cut bodies": ["cut", "cut", "cut", "cut", "cut", "cut"],
    "cut, and the server ignores ranges": ["cut", "ignore Range"],
    "cut, and bytes from elsewhere": ["cut", "shifted"],
    "cut, with a weak tag": ["weak tag", ""],
    "no length": ["no length"],
    "no length, cut": ["no length, cut"],
    "wrong bytes": ["wrong bytes", "wrong bytes"],
    "wrong bytes after a cut": ["cut", "drop", "wrong bytes"],
    "throttled": ["429", "429 Retry-After: 0", "503 Retry-After: nonsense"],
}


@pytest.mark.parametrize(
    ("name", "large"),
    # Without a checksum wrong bytes of the right size cannot be told.
    [(n, large) for n in PASSING for large in (True, False) if large or "wrong" not in n],
)
def test_what_passes_is_outlasted(server: Server, tmp_path: Path, name: str, large: bool) -> None:
    server.publish({A: some_bytes(1)}, large=large)
    server.faults[RESOLVE + A] = list(PASSING[name])
    totals = []
    get(server, tmp_path, progress=lambda done, total, detail="": totals.append(done))
    assert (tmp_path / A).read_bytes() == some_bytes(1)
    assert server.faults[RESOLVE + A] == []
    assert totals[-1] == SIZE
    left = sorted(p.name for p in tmp_path.rglob("*") if p.is_file())
    assert left == sorted([LISTING_NAME, Path(A).name])


@pytest.mark.parametrize("large", [True, False], ids=["checksum", "no checksum"])
@pytest.mark.parametrize("fault", ["", "ignore If-Range"])
def test_a_file_that_changes_between_two_attempts_is_not_mixed(
    server: Server, tmp_path: Path, large: bool, fault: str
) -> None:
    server.publish({A: some_bytes(1)}, large=large)
    server.faults[RESOLVE + A] = ["cut", "404"]
    with pytest.raises(DataError, match="HTTP 404"):
        get(server, tmp_path)
    assert (tmp_path / f"{A}.partial").stat().st_size == HALF
    # The same size and another content, under another tag.
    server.files[RESOLVE + A] = some_bytes(9)
    server.tags["version"] = '"two"'
    server.faults[RESOLVE + A] = [fault]
    if large:
        with pytest.raises(DataError, match="expected sha256"):
            get(server, tmp_path)
        assert not (tmp_path / A).exists()
    else:
        get(server, tmp_path)
        assert (tmp_path / A).read_bytes() == some_bytes(9)


@pytest.mark.parametrize("cut", [True, False], ids=["after a cut", "from the start"])
@pytest.mark.parametrize("n_bytes", [SIZE + 5, HALF + 5, 10])
def test_another_size_is_an_error(server: Server, tmp_path: Path, cut: bool, n_bytes: int) -> None:
    server.publish({A: some_bytes(1)})
    if cut:
        server.faults[RESOLVE + A] = ["cut", "404"]
        with pytest.raises(DataError, match="HTTP 404"):
            get(server, tmp_path)
    server.files[RESOLVE + A] = some_bytes(1, n_bytes)
    with pytest.raises(DataError) as error:
        get(server, tmp_path)
    expected = f"{A} was wrong 3 times: expected {SIZE} bytes, the server has {n_bytes}"
    assert error.value.problem == expected
    assert "new folder" in error.value.hint


def test_a_wrong_checksum_names_both(server: Server, tmp_path: Path) -> None:
    server.publish({A: some_bytes(1)})
    server.faults[RESOLVE + A] = ["wrong bytes"] * 3
    with pytest.raises(DataError) as error:
        get(server, tmp_path)
    expected = hashlib.sha256(some_bytes(1)).hexdigest()
    found = hashlib.sha256(bytes(SIZE)).hexdigest()
    assert f"{A} was wrong 3 times" in error.value.problem
    assert f"expected sha256 {expected}, found {found}" in error.value.problem
    assert sorted(p.name for p in tmp_path.rglob("*") if p.is_file()) == [LISTING_NAME]


@pytest.mark.parametrize(
    "fault",
    ["429 Retry-After: 1", '429 RateLimit: "resolvers";r=0;t=0', "503 Retry-After: DATE"],
)
def test_the_server_says_how_long_to_wait(server: Server, tmp_path: Path, fault: str) -> None:
    server.publish({A: some_bytes(1)})
    date = formatdate(time.time() + 3, usegmt=True)
    server.faults[RESOLVE + A] = [fault.replace("DATE", date)]
    details: list[str] = []
    start = time.monotonic()
    get(server, tmp_path, progress=lambda done, total, detail="": details.append(detail))
    assert "DATE" in fault or time.monotonic() - start > 0.9
    assert any(re.fullmatch(r"waiting [0-3]\.\ds: HTTP (429|503)", text) for text in details)


def test_a_silent_server_is_given_up_on(server: Server, tmp_path: Path) -> None:
    server.publish({A: some_bytes(1)})
    server.faults[RESOLVE + A] = ["stall"]
    fetch("openwebtext", tmp_path, network=replace(quick(server), timeout_seconds=2.0))
    assert server.asked(RESOLVE + A)[1]["Range"] == f"bytes={HALF}-"


def test_an_error_ends_the_waits_of_the_others(server: Server, tmp_path: Path) -> None:
    server.publish({A: some_bytes(1), B: some_bytes(2)})
    server.faults[RESOLVE + A] = ["429 Retry-After: 3000"]
    server.faults[RESOLVE + B] = ["503", "503", "404"]
    before = set(threading.enumerate())
    with pytest.raises(DataError, match=f"{B} is refused"):
        get(server, tmp_path)
    assert len(server.asked(RESOLVE + A)) == 1
    wait_until(lambda: {*threading.enumerate()} <= before)


@pytest.mark.parametrize(
    ("faults", "problem", "hint"),
    [
        (["401"], " is refused: HTTP 401", "gated"),
        (["403"], " is refused: HTTP 403", "contact"),
        (["404"], " is refused: HTTP 404", "another revision"),
        (["502"] * 4, ": HTTP 502 (4 times in a row)", "same command again"),
    ],
)
def test_a_server_that_refuses_or_only_fails_ends_the_call(
    server: Server, tmp_path: Path, faults: list[str], problem: str, hint: str
) -> None:
    server.publish({A: some_bytes(1), B: some_bytes(2)})
    server.faults[RESOLVE + A] = list(faults)
    with pytest.raises(DataError) as error:
        get(server, tmp_path)
    assert error.value.problem.endswith(A + problem)
    assert hint in error.value.hint
    assert len(server.asked(RESOLVE + A)) == len(faults)
    assert get(server, tmp_path).n_files == 2


def test_redirects_are_followed_and_limited(server: Server, tmp_path: Path) -> None:
    server.publish({A: some_bytes(1)})
    server.files["/elsewhere?key=1"] = server.files[RESOLVE + A]
    server.faults[RESOLVE + A] = ["302 Location: /elsewhere?key=1"] * 2
    server.faults["/elsewhere?key=1"] = ["cut"]
    get(server, tmp_path)
    assert [h.get("Range") for h in server.asked("/elsewhere?key=1")] == [None, f"bytes={HALF}-"]
    server.faults[RESOLVE + A] = [f"302 Location: {RESOLVE + A}"] * 9
    with pytest.raises(DataError, match="too many redirects"):
        get(server, tmp_path / "b")
    assert len(server.faults[RESOLVE + A]) == 3
    server.faults[RESOLVE + A] = ["302 Location: file:///etc/passwd"]
    with pytest.raises(DataError, match="cannot be reached"):
        get(server, tmp_path / "b")


@pytest.mark.parametrize(
    "path",
    ["../plain_text/a.parquet", "plain_text/../../a.parquet", "plain_text//a.parquet",
     "plain_text/./a.parquet", "plain_text/C:a.parquet", "plain_text/..\\a.parquet",
     "plain_text/a\n.parquet", "/plain_text/a.parquet"],
)  # fmt: skip
def test_a_path_outside_the_folder_is_refused(server: Server, tmp_path: Path, path: str) -> None:
    # Such paths have to pass the corpus's own pattern first to be of any danger.
    corpus = tmp_path / "any.toml"
    corpus.write_text(re.sub(r"files = .*", "files = '(?s).*'", SHIPPED.read_text()))
    server.publish({path: b"x"})
    with pytest.raises(DataError, match="unsafe path") as error:
        get(server, tmp_path / "folder", corpus=str(corpus))
    assert repr(path) in error.value.problem
    assert [p for p in tmp_path.rglob("*") if p.is_file()] == [corpus]


def test_a_listing_changed_on_disk_is_checked_again(server: Server, tmp_path: Path) -> None:
    server.publish({A: b"x"})
    get(server, tmp_path)
    listing = tmp_path / LISTING_NAME
    text = listing.read_text()
    listing.write_text(text.replace(A, "../outside.parquet"))
    with pytest.raises(DataError, match="unsafe path"):
        get(server, tmp_path)
    listing.write_text(text[:-20])
    with pytest.raises(DataError, match=r"fetch\.listing is damaged"):
        get(server, tmp_path)
    file = RemoteFile("http://x", A, 1, Checksum())
    with pytest.raises(DataError, match=r"lists .* twice"):
        check_paths(Listing("t", "s", "r", "r", "l", [file, file]))


def test_answers_that_make_no_sense(server: Server, tmp_path: Path) -> None:
    server.publish({A: b"x", B: b"x", C: b"x"})
    page = server.files[TREE]
    server.files[TREE] = b"<html>log in to the wireless network</html>"
    with pytest.raises(DataError, match="is not a list of files: JSON is malformed"):
        get(server, tmp_path)
    server.files[TREE] = b'[{"type": "file", "path": 7}]'
    with pytest.raises(DataError, match=r"Expected `str`, got `int`"):
        get(server, tmp_path)
    server.files[TREE] = page
    server.tags[f"{TREE}&cursor=2"] = f'<{TREE}>; rel="next"'
    with pytest.raises(DataError, match="its next page is an earlier one"):
        get(server, tmp_path)
    server.tags[f"{TREE}&cursor=2"] = '<http://[::1>; rel="next"'
    with pytest.raises(DataError, match="is refused: HTTP 404"):
        get(server, tmp_path)
    server.files["/enwiki/latest/enwiki-latest-sha1sums.txt"] = b"<html>"
    with pytest.raises(DataError, match="is not a list of files: it begins with '<html>'"):
        get(server, tmp_path, corpus="wikipedia")
    assert not (tmp_path / LISTING_NAME).exists()
    # A listing outlasts the same troubles as a file.
    del server.tags[f"{TREE}&cursor=2"]
    server.faults[TREE] = ["503", "drop", "cut"]
    assert get(server, tmp_path).n_files == 3


def test_a_disk_too_small_is_found_before_the_start(server: Server, tmp_path: Path) -> None:
    server.publish({A: b"x"})
    server.files[TREE] = server.files[TREE].replace(b'"size": 1,', b'"size": 4000000000000000,')
    with pytest.raises(MachineError, match=r"free; the files still to fetch take 3638\.0 TiB"):
        get(server, tmp_path)
    assert server.asked(RESOLVE + A) == []


def test_a_folder_that_cannot_be_written(server: Server, tmp_path: Path) -> None:
    server.publish({A: b"x"})
    (tmp_path / "file").touch()
    with pytest.raises(MachineError, match="file/folder cannot be written: Not a directory"):
        get(server, tmp_path / "file" / "folder")
    (tmp_path / "plain_text").touch()
    with pytest.raises(MachineError, match=f"{A} cannot be written"):
        get(server, tmp_path)


def test_a_folder_belongs_to_one_corpus(server: Server, tmp_path: Path) -> None:
    server.publish({A: b"x"})
    with pytest.raises(DataError, match=r"no file matches only='x\*'") as error:
        get(server, tmp_path, only="x*")
    assert A in error.value.hint
    get(server, tmp_path)
    with pytest.raises(DataError, match=r"holds .*openwebtext at 5*, not .*SlimPajama"):
        get(server, tmp_path, corpus="slimpajama")


def test_corpora_are_described() -> None:
    assert "CC BY-SA 4.0" in describe("wikipedia")
    assert "895 GB" in describe("slimpajama")
    assert "Skylion007/openwebtext at abc" in describe("openwebtext@abc")
    with pytest.raises(ConfigError, match="no corpus named 'wiki'") as error:
        find_corpus("wiki")
    assert "openwebtext, oscar-1gb, slimpajama, slimpajama-6b" in error.value.hint


@pytest.mark.parametrize(
    ("old", "new", "problem"),
    [
        ('kind = "huggingface"', 'kind = "ftp"', "kind: Input should be 'wikimedia'"),
        ("https://", "ftp://", "host: String should match pattern"),
        ("max_connections", "connections", "max_connections: Field required"),
        (r"\.parquet", "(", "files: Input should be a valid regular expression"),
        ("title = ", "title ", "is not valid TOML"),
    ],
)
def test_a_corpus_file_with_a_mistake(tmp_path: Path, old: str, new: str, problem: str) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(SHIPPED.read_text().replace(old, new))
    with pytest.raises(ConfigError) as error:
        find_corpus(str(path))
    assert problem in error.value.problem
    with pytest.raises(ConfigError, match=r"other.toml: No such file"):
        find_corpus(str(tmp_path / "other.toml"))


def test_certificates_are_checked_and_encryption_is_kept(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    certificate = make_certificate(tmp_path, ["IP:127.0.0.1"])
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate)
    server.socket = context.wrap_socket(server.socket, server_side=True)
    server.address = server.address.replace("http:", "https:")
    server.publish({A: some_bytes(1)})
    with pytest.raises(DataError, match="CERTIFICATE_VERIFY_FAILED"):
        get(server, tmp_path / "a")
    monkeypatch.setenv("SSL_CERT_FILE", str(certificate))
    get(server, tmp_path / "a")
    assert (tmp_path / "a" / A).read_bytes() == some_bytes(1)
    with serving() as plain:
        plain.files["/x"] = some_bytes(1)
        server.faults[RESOLVE + A] = [f"302 Location: {plain.address}/x"]
        with pytest.raises(DataError, match="redirects to an unencrypted address"):
            get(server, tmp_path / "b")


@pytest.mark.parametrize("death", [signal.SIGKILL, signal.SIGINT])
def test_a_killed_download_goes_on(server: Server, tmp_path: Path, death: signal.Signals) -> None:
    server.publish({A: some_bytes(1), B: some_bytes(2), C: some_bytes(3)})
    server.faults[RESOLVE + B] = ["stall"]
    code = (
        "from pathlib import Path\n"
        "from trainyard.corpus.fetching.fetch import fetch\n"
        "from trainyard.corpus.fetching.web import Network\n"
        f"fetch('openwebtext', Path({str(tmp_path)!r}), "
        f"      network=Network({server.address!r}, timeout_seconds=3000))\n"
    )
    child = subprocess.Popen([sys.executable, "-c", code], stderr=subprocess.DEVNULL)
    assert server.sent_half.wait(WATCHDOG_SECONDS)
    partial = tmp_path / f"{B}.partial"
    wait_until(lambda: partial.is_file() and partial.stat().st_size > HALF // 2)
    wait_until(lambda: (tmp_path / A).is_file() and (tmp_path / C).is_file())
    child.send_signal(death)
    # Ctrl-C does not wait for the server, which is silent for as long as it likes.
    assert child.wait(WATCHDOG_SECONDS) != 0
    assert not (tmp_path / B).exists()
    n_kept = partial.stat().st_size
    assert n_kept > HALF // 2
    server.requests.clear()
    server.n_sent = 0
    assert get(server, tmp_path).n_fetched == 1
    assert [(path, headers["Range"]) for _, path, headers in server.requests] == [
        (RESOLVE + B, f"bytes={n_kept}-")
    ]
    assert server.n_sent == SIZE - n_kept
    assert (tmp_path / B).read_bytes() == some_bytes(2)
    # Killed between the last byte and the name: everything is there, nothing is asked.
    (tmp_path / A).rename(tmp_path / f"{A}.partial")
    server.requests.clear()
    get(server, tmp_path)
    assert server.requests == []
    assert (tmp_path / A).read_bytes() == some_bytes(1)
