"""Tests of proxies, the access token, and what is said before a download.

The proxy is a real one, on this machine. It leads every host to a server here, so that a client
speaks to `huggingface.co` as it would, with a certificate of that name.
"""

from __future__ import annotations

import base64
import hashlib
import select
import socket
import ssl
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.request import Request, urlopen

import pytest
from tests.command import call
from tests.corpus.fetching.test_fetch import (
    API,
    COMMIT,
    RESOLVE,
    SHIPPED,
    TREE,
    A,
    B,
    Server,
    make_certificate,
    quick,
    running,
    serving,
    some_bytes,
)
from tests.waiting import WATCHDOG_SECONDS

from trainyard.cli.prepare import prepare
from trainyard.cli.show import show
from trainyard.corpus.fetching.catalogue import corpus_names, describe, find_corpus
from trainyard.corpus.fetching.fetch import fetch
from trainyard.corpus.fetching.web import Network, find_proxy
from trainyard.data.vocabulary import load_vocabulary
from trainyard.errors import ConfigError, DataError
from trainyard.launch.environment import read_network

TOKEN = "hf_a-token-of-mine"
HUB, ELSEWHERE = "huggingface.co", "cdn-lfs.hf.co"


class Proxy(ThreadingHTTPServer):
    """Leads all hosts to one port of this machine, and writes down what it is asked."""

    daemon_threads = True

    def __init__(self, port: int, login: str = "") -> None:
        super().__init__(("127.0.0.1", 0), ProxyHandler)
        self.address = f"http://127.0.0.1:{self.server_port}"
        self.port, self.login = port, login
        self.requests: list[tuple[str, str, dict[str, str]]] = []

    def handle_error(self, request: object, client_address: object) -> None:
        pass  # clients end connections when they are done


class ProxyHandler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Proxy

    def log_message(self, format: str, *arguments: object) -> None:
        pass

    def accepts(self) -> bool:
        self.server.requests.append((self.command, self.path, dict(self.headers)))
        login = base64.b64encode(self.server.login.encode()).decode()
        if self.server.login and self.headers.get("Proxy-Authorization") != f"Basic {login}":
            self.send_response(407)
            self.send_header("Content-Length", "0")
            self.end_headers()
            return False
        return True

    def do_CONNECT(self) -> None:
        if not self.accepts():
            return
        with socket.create_connection(("127.0.0.1", self.server.port)) as server:
            self.send_response(200)
            self.end_headers()
            pair = (self.connection, server)
            while True:
                for ready in select.select(pair, (), (), WATCHDOG_SECONDS)[0] or pair:
                    data = ready.recv(2**16)
                    if not data:
                        self.close_connection = True
                        return
                    pair[ready is self.connection].sendall(data)

    def do_GET(self) -> None:
        if self.accepts():
            path = "/" + self.path.split("/", 3)[3]
            with urlopen(Request(f"http://127.0.0.1:{self.server.port}{path}")) as answer:
                body = answer.read()
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)


@dataclass
class Hub:
    """Hugging Face's names on this machine, behind a proxy."""

    server: Server
    proxy: Proxy
    certificate: Path
    hosts: list[str] = field(default_factory=list)

    def network(self, **options: object) -> Network:
        values = {"https_proxy": self.proxy.address}
        given: dict[str, object] = {"proxies": values, "token": TOKEN, "backoff_seconds": 0.001}
        return Network(**{**given, "attempts": 2, **options})  # type: ignore[arg-type]

    def authorized(self) -> dict[str, set[str | None]]:
        """What each host was told for authorization."""
        told: dict[str, set[str | None]] = {}
        for _, _, headers in self.server.requests:
            told.setdefault(headers["Host"], set()).add(headers.get("Authorization"))
        return told


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    names = [f"DNS:{HUB}", f"DNS:{ELSEWHERE}"]
    return make_certificate(tmp_path_factory.mktemp("certificate"), names)


@pytest.fixture
def hub(certificate: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    monkeypatch.setenv("SSL_CERT_FILE", str(certificate))
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate)
    with serving() as server:
        server.socket = context.wrap_socket(server.socket, server_side=True)
        proxy = Proxy(server.server_port)
        with running(proxy):
            yield Hub(server, proxy, certificate)


def test_the_token_stays_with_hugging_face(hub: Hub, tmp_path: Path) -> None:
    hub.server.publish({A: some_bytes(1), B: some_bytes(2)})
    hub.server.files["/blob?Signature=1"] = some_bytes(1)
    hub.server.faults[RESOLVE + A] = [f"302 Location: https://{ELSEWHERE}/blob?Signature=1"]
    result = fetch("openwebtext", tmp_path, network=hub.network())
    assert (result.n_files, (tmp_path / A).read_bytes()) == (2, some_bytes(1))
    assert hub.authorized() == {HUB: {f"Bearer {TOKEN}"}, ELSEWHERE: {None}}
    # The proxy sees names of hosts, and no token.
    assert {(command, path) for command, path, _ in hub.proxy.requests} == {
        ("CONNECT", f"{HUB}:443"),
        ("CONNECT", f"{ELSEWHERE}:443"),
    }
    assert TOKEN not in repr((hub.proxy.requests, hub.network()))
    written = [path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()]
    assert not [data for data in written if TOKEN.encode() in data]


def test_no_mirror_gets_the_token(hub: Hub, tmp_path: Path) -> None:
    hub.server.publish({A: b"a"})
    hub.server.files.update({f"/hub{path}": data for path, data in hub.server.files.items()})
    network = hub.network(mirror=f"https://{ELSEWHERE}/hub")
    assert fetch("openwebtext", tmp_path, network=network).n_fetched == 1
    assert hub.authorized() == {ELSEWHERE: {None}}


def test_any_data_set_of_hugging_face(hub: Hub, tmp_path: Path) -> None:
    files = {f"data/{n}.parquet": some_bytes(n) for n in range(3)}
    hub.server.publish({**files, ".gitattributes": b"x", "a/.b/c": b"x"}, "me/web.2-b")
    told: list[str] = []
    result = fetch(
        "hf:me/web.2-b", tmp_path, only="data/[01]*", network=hub.network(), announce=told.append
    )
    assert (result.revision, result.n_files, result.n_fetched) == (COMMIT, 2, 2)
    assert told[0].startswith("to fetch: 2 of 2 files, 0.001 GB; verified by sha256 for 2;")
    # The rest, into the same folder; hidden files do not belong to the text.
    assert fetch("hf:me/web.2-b", tmp_path, network=hub.network()).n_fetched == 1
    found = {str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*.parquet")}
    assert (found, hub.authorized()) == (set(files), {HUB: {f"Bearer {TOKEN}"}})
    assert not (tmp_path / "a").exists()
    main = "/api/datasets/me/web.2-b/revision/main"
    branch = main.replace("main", "refs%2Fconvert%2Fparquet")
    hub.server.files[branch] = hub.server.files.pop(main)
    there = fetch("hf:me/web.2-b@refs/convert/parquet", tmp_path / "new", network=hub.network())
    assert there.n_files == 3


def test_another_endpoint_of_the_hub_gets_no_token(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with serving() as server:
        server.publish({A: b"a"}, "me/web")
        monkeypatch.setenv("HF_ENDPOINT", server.address)
        monkeypatch.setenv("HF_TOKEN", TOKEN)
        call(prepare, "--fetch", "hf:me/web", "-o", tmp_path)
        assert {h.get("Authorization") for _, _, h in server.requests} == {None}
    assert (tmp_path / A).read_bytes() == b"a"


@pytest.mark.parametrize("name", ["hf:", "hf:web", "hf:me/web/data", "hf:../web", "hf:me/we b"])
def test_a_data_set_without_an_owner_or_with_a_path(name: str) -> None:
    with pytest.raises(ConfigError, match="is not hf:OWNER/NAME") as error:
        find_corpus(name)
    assert "--only" in error.value.hint


def test_a_refusal_names_the_variable_and_not_its_value(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    hub.server.faults[f"{API}/revision/main"] = ["401"]
    monkeypatch.setenv("HTTPS_PROXY", hub.proxy.address)
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    words = ("--fetch", "openwebtext", "-o", tmp_path / "corpus", "--contact", "me@example.org")
    with pytest.raises(DataError, match="is refused: HTTP 401") as error:
        call(prepare, *words)
    assert error.value.exit_code == 2
    assert "set HF_TOKEN to a token that may read it" in error.value.hint
    assert TOKEN not in "".join([str(error.value), *capsys.readouterr()])
    assert hub.authorized() == {HUB: {f"Bearer {TOKEN}"}}
    (agent,) = {headers["User-Agent"] for _, _, headers in hub.server.requests}
    assert agent == "trainyard/0.2.0 (me@example.org)"


@pytest.mark.parametrize("token", ["hf_two\nlines", "hf_ü", "hf a"])
def test_a_token_that_is_none(tmp_path: Path, token: str) -> None:
    with pytest.raises(DataError, match="HF_TOKEN has invalid characters") as error:
        fetch("openwebtext", tmp_path, network=Network(token=token))
    assert token not in str(error.value)


def test_plain_addresses_go_through_the_other_proxy(tmp_path: Path) -> None:
    corpus = tmp_path / "mine.toml"
    corpus.write_text(SHIPPED.read_text().replace("https://huggingface.co", "http://data.invalid"))
    with serving() as server:
        server.publish({A: b"a"})
        proxy = Proxy(server.server_port, login="me:p@ss")
        with running(proxy):
            address = proxy.address.replace("http://", "me:p%40ss@")  # also without a scheme
            proxies = {"http_proxy": address, "https_proxy": "http://none.invalid"}
            network = Network(proxies=proxies, attempts=2, backoff_seconds=0.001)
            assert fetch(str(corpus), tmp_path / "a", network=network).n_fetched == 1
            assert {path.split("/")[2] for _, path, _ in proxy.requests} == {"data.invalid"}
            other = Network(proxies={"http_proxy": proxy.address}, backoff_seconds=0.001)
            with pytest.raises(DataError, match="HTTP 407") as error:
                fetch(str(corpus), tmp_path / "b", network=other)
            assert "the proxy wants a login" in error.value.hint


@pytest.mark.parametrize("exempt", ["*", "127.0.0.1", "localhost, .0.0.1 ,", "x.org,0.0.1"])
def test_exempt_hosts_need_no_proxy(tmp_path: Path, exempt: str) -> None:
    proxies = {"http_proxy": "http://127.0.0.1:1", "no_proxy": exempt}
    with serving() as server:
        server.publish({A: b"a"})
        network = replace(quick(server), proxies=proxies)
        assert fetch("openwebtext", tmp_path, network=network).n_fetched == 1


def test_a_proxy_that_is_not_there_or_refuses(hub: Hub, tmp_path: Path) -> None:
    closed = {"https_proxy": "http://127.0.0.1:1"}
    with pytest.raises(DataError, match=r"proxy.*2 times in a row"):
        fetch("openwebtext", tmp_path, network=hub.network(proxies=closed))
    hub.proxy.login = "me:secret"
    with pytest.raises(DataError, match="Tunnel connection failed: 407") as error:
        fetch("openwebtext", tmp_path, network=hub.network())
    assert "check the mirror, the proxy" in error.value.hint


LOGINS = ["me:secret#12@p:1", "me:12?secret@p:1", "me:secret]12@[p:1", "me:secret\u4f60@p:1"]


@pytest.mark.parametrize("address", ["socks5://p:1", "http://p:x", "me:secret@", *LOGINS])
def test_a_proxy_that_is_none(tmp_path: Path, address: str) -> None:
    network = Network(proxies={"https_proxy": address}, attempts=1)
    with pytest.raises(DataError, match=r"^https_proxy is not the address of an http") as error:
        fetch("openwebtext", tmp_path, network=network)
    assert error.value.hint == "http://USER:PASSWORD@HOST:PORT, with special characters as %XX"


@pytest.mark.parametrize("address", ["http://[::1", "http://host:99999", "http://host:port"])
def test_an_address_that_is_none(tmp_path: Path, address: str) -> None:
    with pytest.raises(DataError, match=r"https://huggingface.co/\S+ cannot be reached: "):
        fetch("openwebtext", tmp_path, network=Network(mirror=address, attempts=1))
    with serving() as server:
        server.publish({A: b"a"})
        server.faults[RESOLVE + A] = [f"302 Location: {address}/x"]
        with pytest.raises(DataError, match=r"cannot be reached: .*(port|Port|IPv6)") as error:
            fetch("openwebtext", tmp_path, network=Network(mirror=server.address, attempts=1))
    assert error.value.hint.startswith("check the mirror")


@pytest.mark.parametrize(
    ("exempt", "url", "is_exempt"),
    [
        ("*.example.org", "https://a.example.org/x", True),
        ("*.example.org", "https://badexample.org", False),
        ("example.org:8080", "http://example.org:8080/x", True),
        ("example.org:8080", "http://example.org/x", False),
        ("example.org:443", "https://example.org", True),
        ("::1", "http://[::1]:80/", True),
        ("[::1]:81", "http://[::1]:80/", False),
        ("[::1]:80, x", "http://[::1]/", True),
        (" ,", "http://example.org", False),
    ],
)
def test_what_needs_no_proxy(exempt: str, url: str, is_exempt: bool) -> None:
    assert (find_proxy({"no_proxy": exempt}, url) == "") == is_exempt


def test_the_environment_of_a_download() -> None:
    found = read_network({"HTTPS_PROXY": "a", "https_proxy": "b", "NO_PROXY": "c", "HF_TOKEN": "d"})
    assert found == {"https_proxy": "b", "no_proxy": "c", "hf_token": "d"}
    assert read_network({"PATH": "x"}) == {}


def test_files_and_hashes_are_said_before_a_download(tmp_path: Path) -> None:
    said: list[str] = []
    with serving() as server:
        server.publish({A: bytes(2_000_000), B: bytes(1_000_000)})
        network = quick(server)
        fetch("openwebtext", tmp_path, only="*00000*", network=network)
        fetch("openwebtext", tmp_path, network=network, announce=said.append)
        (line,) = said
        assert line.startswith("to fetch: 1 of 2 files, 0.001 GB; verified by sha256 for 1; free h")
        fetch("openwebtext", tmp_path, network=network, announce=said.append)
        assert len(said) == 1
        server.publish({A: b"a"}, large=False)
        fetch("openwebtext", tmp_path / "b", network=network, announce=said.append)
        assert "verified by sha256 for 1, size only for 1; free here: " in said[1]


def test_a_model_repository(tmp_path: Path) -> None:
    """OSCAR's gigabyte lies in one, below other addresses than data sets."""
    corpus = find_corpus("oscar-1gb")
    name, data = "stas/oscar-1GB.jsonl.xz", some_bytes(5)
    with serving() as server:
        server.publish({name: data, "README.md": b"x"}, corpus.repository)
        for path in list(server.files):
            moved = path.replace("/datasets/", "/models/" if path.startswith("/api") else "/")
            server.files[moved] = server.files.pop(path)
        revision = f"/api/models/{corpus.repository}/revision"
        server.files[f"{revision}/{corpus.revision}"] = server.files[f"{revision}/main"]
        fetch("oscar-1gb", tmp_path, network=quick(server))
        assert f"/{corpus.repository}/resolve/{COMMIT}/{name}" in {p for _, p, _ in server.requests}
    assert (tmp_path / name).read_bytes() == data


def test_gpt2s_files_have_the_guides_names(tmp_path: Path, shared_data: Path) -> None:
    files = {"encoder.json": "gpt2-vocab.json", "vocab.bpe": "gpt2-merges.txt"}
    with serving() as server:
        for there, here in files.items():
            data = (shared_data / "gpt2" / here.removeprefix("gpt2-")).read_bytes()
            server.files[f"/gpt-2/encodings/main/{there}"] = data
        fetch("gpt2", tmp_path, network=quick(server))
        assert {p.name for p in tmp_path.iterdir()} == {*files.values(), "fetch.listing"}
        assert "50,257" in call(show, tmp_path)
        assert load_vocabulary(tmp_path).fingerprint == load_vocabulary("gpt2").fingerprint
        (tmp_path / "gpt2-vocab.json").unlink()
        server.files["/gpt-2/encodings/main/encoder.json"] = bytes(1042301)
        with pytest.raises(DataError, match="expected sha256 1961396"):
            fetch("gpt2", tmp_path, network=quick(server))


@pytest.mark.parametrize("name", corpus_names())
def test_figures_have_a_source(name: str) -> None:
    corpus, text = find_corpus(name), describe(name)
    for listed in corpus.listed:
        assert len(bytes.fromhex(listed.sha256)) == hashlib.sha256().digest_size
    if corpus.figures is None:
        assert name == "gpt2"
        return
    assert "until both are done\npreparing: about " in text
    assert "here" in corpus.figures.source, "says what was not downloaded here"
    # Token files have two bytes a token, and English text three to six.
    assert 3 < corpus.figures.text_gigabytes / corpus.figures.tokens_billions < 6


def test_the_tree_is_asked_below_the_address_of_the_kind() -> None:
    assert TREE.startswith("/api/datasets/")
    assert find_corpus("oscar-1gb").repository_kind == "models"
    assert find_corpus("wikipedia-20220301").repository == "legacy-datasets/wikipedia"
