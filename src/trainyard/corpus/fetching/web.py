"""HTTP requests with retries and backoff, for servers that throttle and fail.

Only `Client.keep_trying` retries. An action raises `TransientError` for transient errors, and
`DataError` for permanent ones:

    429 5xx 408 425, no connection, a body that ends early     wait, then again
    401 403 404 410, a bad certificate, endless redirects       give up, say why

The wait doubles from one second to two minutes, unless the server specifies one (`Retry-After`, or
Hugging Face's `RateLimit`). Received bytes reset the count of failures.

Each redirect is a request of its own: it may need another proxy, must not leave https, and gets the
access token only on Hugging Face itself. The large files lie on other hosts, at signed addresses.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import dataclass, field
from typing import Any, TypeVar
from urllib.parse import unquote, urljoin, urlsplit

import urllib3
from urllib3.exceptions import (
    HTTPError,
    InvalidHeader,
    LocationValueError,
    ProxySchemeUnknown,
    URLSchemeUnknown,
)

from trainyard import __version__
from trainyard.errors import DataError
from trainyard.units import format_seconds

_MAX_REDIRECTS = 5
_LONGEST_BACKOFF_SECONDS = 120.0
_LONGEST_WAIT_SECONDS = 3600.0
_TAKES_THE_TOKEN = "https://huggingface.co/"
_PROXIES = {"http": "http_proxy", "https": "https_proxy"}
_PORTS = {"http": 80, "https": 443}
_FINAL = re.compile("CERTIFICATE_VERIFY_FAILED|Tunnel connection failed: 4")
_UNREACHABLE = "check the mirror, the proxy, or the certificates and the clock of this machine"

T = TypeVar("T")


@dataclass(frozen=True)
class Network:
    """How to talk to the servers."""

    mirror: str = ""
    """Stands in for the scheme and host of every address; it may have a path."""
    connections: int = 4
    contact: str = ""
    """An e-mail address or a web page, told to the server with every request."""
    proxies: Mapping[str, str] = field(default_factory=dict, repr=False)
    """http_proxy, https_proxy and no_proxy, as in the environment."""
    token: str = field(default="", repr=False)
    """Access token of Hugging Face; no other host gets it."""
    attempts: int = 10
    """Failures in a row, with nothing received in between, after which the call ends."""
    backoff_seconds: float = 1.0
    """The wait after the first failure; it doubles with each, to two minutes."""
    timeout_seconds: float = 60.0


class TransientError(Exception):
    """Something that may be over when it is tried again."""

    def __init__(self, problem: str, wait_seconds: float | None = None) -> None:
        super().__init__(problem)
        self.wait_seconds = wait_seconds


class StoppedError(Exception):
    """Another thread failed, or the user stopped the program."""


class Client:
    """Asks servers, and tells what passes by itself from what does not."""

    def __init__(
        self, network: Network, stop: threading.Event, report: Callable[[str], None]
    ) -> None:
        if network.mirror and not network.mirror.startswith(("http://", "https://")):
            hint = "give the full address, such as https://mirror.example.org/wikimedia"
            raise DataError(f"the mirror {network.mirror!r} is not an http(s) address", hint)
        if not (network.contact.isascii() and network.contact.isprintable()):
            hint = "give an e-mail address or a web page"
            raise DataError(f"the contact {network.contact!r} has invalid characters", hint)
        if not re.fullmatch("[!-~]*", network.token):
            raise DataError("HF_TOKEN has invalid characters", "set it to the token alone, hf_...")
        self._network, self._stop, self._report = network, stop, report
        about = f"trainyard/{__version__}" + (f" ({network.contact})" if network.contact else "")
        self._headers = {"User-Agent": about}
        self._pools = {name: _build_pool(network, name) for name in ("", *_PROXIES.values())}

    def close(self) -> None:
        """Closes the connections that are kept open for the next request."""
        for pool in self._pools.values():
            pool.clear()

    def read(self, url: str) -> tuple[bytes, Mapping[str, str]]:
        """Returns the body and the headers of a small document."""
        return self._ask("GET", url, lambda response: (response.read(), response.headers))

    def size_of(self, url: str) -> int:
        """Returns the size of a file in bytes without fetching it."""
        headers = self._ask("HEAD", url, lambda response: response.headers)
        length: str = headers.get("Content-Length", "")
        if not length.isdecimal():
            raise DataError(f"{url} reports no size", "try a mirror")
        return int(length)

    def _ask(self, method: str, url: str, take: Callable[[urllib3.BaseHTTPResponse], T]) -> T:
        def ask() -> T:
            with closing(self.open(method, url)) as response:
                try:
                    return take(response)
                except HTTPError as error:
                    raise TransientError(str(error)) from error

        return self.keep_trying(url, ask)

    def open(
        self, method: str, url: str, headers: Mapping[str, str] | None = None
    ) -> urllib3.BaseHTTPResponse:
        """Sends one request, also where it is redirected to.

        Returns responses 200, 206 and 416, whose body is still to be read.
        """
        try:
            return self._follow(method, url, headers or {})
        except (HTTPError, ValueError) as error:
            # A ValueError is a mirror or a redirect with a wrong host or port.
            if isinstance(error, ValueError) or _FINAL.search(str(error)):
                raise DataError(f"{url} cannot be reached: {error}", _UNREACHABLE) from error
            raise TransientError(str(error)) from error

    def _follow(
        self, method: str, url: str, headers: Mapping[str, str]
    ) -> urllib3.BaseHTTPResponse:
        parts = urlsplit(url)
        if self._network.mirror:
            query = f"?{parts.query}" if parts.query else ""
            url = f"{self._network.mirror.rstrip('/')}{parts.path}{query}"
        elif parts.scheme not in ("http", "https"):
            raise DataError(f"{url} is not an http(s) address", "correct the corpus file")
        address = url
        for _ in range(_MAX_REDIRECTS + 1):
            sent = {**self._headers, **headers}
            if self._network.token and address.startswith(_TAKES_THE_TOKEN):
                sent["Authorization"] = f"Bearer {self._network.token}"
            # Only `keep_trying` repeats: it can be stopped while it waits, and covers short bodies.
            pool = self._pools[find_proxy(self._network.proxies, address)]
            response = pool.request(
                method, address, headers=sent, retries=False, redirect=False, preload_content=False
            )
            target = response.get_redirect_location()
            if not target:
                if response.status not in (200, 206, 416):
                    response.close()
                    raise _refusal(url, response.status, response.headers)
                return response
            response.drain_conn()
            address, before = urljoin(address, target), address
            if before.startswith("https:") and not address.startswith("https:"):
                raise DataError(f"{url} redirects to an unencrypted address", "try a mirror")
        raise DataError(f"{url} cannot be reached: too many redirects", _UNREACHABLE)

    def keep_trying(
        self, what: str, action: Callable[[], T], received: Callable[[], int] = lambda: 0
    ) -> T:
        """Repeats what fails in passing, until nothing is `received` many times in a row."""
        n_failures = 0
        most_bytes = received()
        while True:
            try:
                return action()
            except TransientError as error:
                now_bytes = received()
                n_failures = 1 if now_bytes > most_bytes else n_failures + 1
                most_bytes = max(most_bytes, now_bytes)
                if n_failures >= self._network.attempts:
                    problem = f"{what}: {error} ({n_failures} times in a row)"
                    raise DataError(
                        problem, "wait a while, then run the same command again"
                    ) from error
                backoff = self._network.backoff_seconds * 2 ** (n_failures - 1)
                seconds = min(backoff, _LONGEST_BACKOFF_SECONDS)
                if error.wait_seconds is not None:
                    seconds = min(error.wait_seconds, _LONGEST_WAIT_SECONDS)
                self._report(f"waiting {format_seconds(seconds)}: {error}")
                if self._stop.wait(seconds):
                    raise StoppedError from None


def _build_pool(network: Network, name: str) -> urllib3.PoolManager:
    """Returns connections through the proxy of this name, or direct ones."""
    timeout = urllib3.Timeout(network.timeout_seconds)
    shared: dict[str, Any] = {"maxsize": network.connections, "timeout": timeout}
    shared["cert_reqs"] = "CERT_REQUIRED"
    address = network.proxies.get(name, "")
    if not address:
        return urllib3.PoolManager(**shared)
    scheme, _, rest = (address if "://" in address else f"http://{address}").partition("://")
    login, _, host = rest.rstrip("/").rpartition("@")
    try:
        if not host or re.search("[/?#@]", login + host):
            raise LocationValueError
        headers = urllib3.make_headers(proxy_basic_auth=unquote(login)) if login else None
        return urllib3.ProxyManager(f"{scheme}://{host}", proxy_headers=headers, **shared)
    except (ProxySchemeUnknown, URLSchemeUnknown, ValueError):  # which may hold the password
        hint = "http://USER:PASSWORD@HOST:PORT, with special characters as %XX"
        raise DataError(f"{name} is not the address of an http(s) proxy", hint) from None


def find_proxy(proxies: Mapping[str, str], url: str) -> str:
    """Names the proxy for a URL; empty for none."""
    parts = urlsplit(url)
    host, port = parts.hostname or "", parts.port or _PORTS.get(parts.scheme)
    for entry in proxies.get("no_proxy", "").lower().split(","):
        match = re.fullmatch(r"(\[.+\]|[^:]+):([0-9]+)", entry.strip())
        name, wanted = (match[1], int(match[2])) if match else (entry.strip(), port)
        name = name.strip("[]").removeprefix("*.").lstrip(".")
        if wanted == port and name and (name == "*" or f".{host}".endswith(f".{name}")):
            return ""
    return _PROXIES.get(parts.scheme, "")


def _refusal(url: str, status: int, headers: Mapping[str, str]) -> Exception:
    if status in (408, 425, 429) or status >= 500:
        return TransientError(f"HTTP {status}", _wait_seconds(headers))
    hint = "the file or revision no longer exists: name another revision, or try a mirror"
    if status in (401, 403):
        hint = (
            "Wikimedia wants a contact (give one); on Hugging Face the data set is gated or gone: "
            "accept its terms on its page, and set HF_TOKEN to a token that may read it"
        )
    if status == 407:
        hint = "the proxy wants a login: http_proxy=http://USER:PASSWORD@HOST:PORT"
    return DataError(f"{url} is refused: HTTP {status}", hint)


def _wait_seconds(headers: Mapping[str, str]) -> float | None:
    """Reads how long the server wants to be left alone."""
    try:
        return urllib3.Retry().parse_retry_after(headers.get("Retry-After", ""))
    except InvalidHeader:
        # Hugging Face: `RateLimit: "api";r=0;t=55` says when the window ends, rounded down.
        match = re.search(r"\bt\s*=\s*(\d+)", headers.get("RateLimit", ""))
        return float(match[1]) + 1 if match else None
