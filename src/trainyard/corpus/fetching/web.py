"""HTTP requests with retries and backoff, for servers that throttle and fail.

Only `Client.keep_trying` retries. An action raises `PassingError` for transient errors, and
`DataError` for permanent ones:

    429 5xx 408 425, no connection, a body that ends early     wait, then again
    401 403 404 410, a bad certificate, endless redirects       give up, say why

The wait doubles from one second to two minutes, unless the server specifies one (`Retry-After`, or
Hugging Face's `RateLimit`). Received bytes reset the count of failures.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import dataclass
from typing import TypeVar
from urllib.parse import urlsplit

import urllib3
from urllib3.exceptions import HTTPError, InvalidHeader, LocationValueError, MaxRetryError

from trainyard import __version__
from trainyard.errors import DataError
from trainyard.units import format_seconds

_MAX_REDIRECTS = 5
_LONGEST_BACKOFF_SECONDS = 120.0
_LONGEST_WAIT_SECONDS = 3600.0

T = TypeVar("T")


@dataclass(frozen=True)
class Network:
    """How to talk to the servers."""

    mirror: str = ""
    """Stands in for the scheme and host of every address; it may have a path."""
    connections: int = 4
    contact: str = ""
    """An e-mail address or a web page, told to the server with every request."""
    attempts: int = 10
    """Failures in a row, with nothing received in between, after which the call ends."""
    backoff_seconds: float = 1.0
    """The wait after the first failure; it doubles with each, to two minutes."""
    timeout_seconds: float = 60.0


class PassingError(Exception):
    """Something that may be over when it is tried again."""

    def __init__(self, problem: str, wait_seconds: float | None = None) -> None:
        super().__init__(problem)
        self.wait_seconds = wait_seconds


class StoppedError(Exception):
    """Another thread failed, or the user stopped the program."""


class Client:
    """Asks servers, and tells what passes by itself from what does not."""

    def __init__(self, network: Network, stop: threading.Event, say: Callable[[str], None]) -> None:
        if network.mirror and not network.mirror.startswith(("http://", "https://")):
            hint = "give the full address, such as https://mirror.example.org/wikimedia"
            raise DataError(f"the mirror {network.mirror!r} is not an http(s) address", hint)
        if not (network.contact.isascii() and network.contact.isprintable()):
            hint = "give an e-mail address or a web page"
            raise DataError(f"the contact {network.contact!r} has invalid characters", hint)
        self._network, self._stop, self._say = network, stop, say
        about = f"trainyard/{__version__}" + (f" ({network.contact})" if network.contact else "")
        self._pool = urllib3.PoolManager(
            maxsize=network.connections,
            headers={"User-Agent": about},
            timeout=urllib3.Timeout(network.timeout_seconds),
            cert_reqs="CERT_REQUIRED",
        )

    def close(self) -> None:
        """Closes the connections that are kept open for the next request."""
        self._pool.clear()

    def read(self, url: str) -> tuple[bytes, Mapping[str, str]]:
        """Returns the body and the headers of a small document."""

        def ask() -> tuple[bytes, Mapping[str, str]]:
            with closing(self.open("GET", url)) as response:
                try:
                    return response.read(), response.headers
                except HTTPError as error:
                    raise PassingError(str(error)) from error

        return self.keep_trying(url, ask)

    def size_of(self, url: str) -> int:
        """Returns the size of a file in bytes without fetching it."""

        def ask() -> int:
            with closing(self.open("HEAD", url)) as response:
                length = response.headers.get("Content-Length", "")
            if not length.isdecimal():
                raise DataError(f"{url} reports no size", "try a mirror")
            return int(length)

        return self.keep_trying(url, ask)

    def open(
        self, method: str, url: str, headers: Mapping[str, str] | None = None
    ) -> urllib3.BaseHTTPResponse:
        """Sends one request; gives answers 200, 206 and 416, whose body is still to be read."""
        parts = urlsplit(url)
        if self._network.mirror:
            query = f"?{parts.query}" if parts.query else ""
            url = f"{self._network.mirror.rstrip('/')}{parts.path}{query}"
        elif parts.scheme not in ("http", "https"):
            raise DataError(f"{url} is not an http(s) address", "correct the corpus file")
        sent = {**self._pool.headers, **(headers or {})}
        # Only redirects are urllib3's; every other repetition is `keep_trying`, which can be
        # stopped while it waits and also covers bodies that end early.
        once = urllib3.Retry(
            total=None, connect=0, read=0, status=0, other=0, redirect=_MAX_REDIRECTS
        )
        try:
            response = self._pool.request(
                method, url, headers=sent, retries=once, preload_content=False
            )
        except HTTPError as error:
            cause = error.reason if isinstance(error, MaxRetryError) else error
            for_ever = "CERTIFICATE_VERIFY_FAILED" in str(cause) or "redirects" in str(cause)
            if for_ever or isinstance(cause, LocationValueError):
                hint = "check the mirror, or the certificates and the clock of this machine"
                raise DataError(f"{url} cannot be reached: {cause}", hint) from error
            raise PassingError(str(cause)) from error
        hops = response.retries.history if response.retries else ()
        lands_on = [(hop.redirect_location or "").lower() for hop in hops]
        if url.startswith("https:") and any(place.startswith("http:") for place in lands_on):
            response.close()
            raise DataError(f"{url} redirects to an unencrypted address", "try a mirror")
        if response.status not in (200, 206, 416):
            response.close()
            raise _refusal(url, response.status, response.headers)
        return response

    def keep_trying(
        self, what: str, action: Callable[[], T], received: Callable[[], int] = lambda: 0
    ) -> T:
        """Repeats what fails in passing, until nothing is `received` many times in a row."""
        n_failures = 0
        most_bytes = received()
        while True:
            try:
                return action()
            except PassingError as error:
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
                self._say(f"waiting {format_seconds(seconds)}: {error}")
                if self._stop.wait(seconds):
                    raise StoppedError from None


def _refusal(url: str, status: int, headers: Mapping[str, str]) -> Exception:
    if status in (408, 425, 429) or status >= 500:
        return PassingError(f"HTTP {status}", _wait_seconds(headers))
    hint = "the file or revision no longer exists: name another revision, or try a mirror"
    if status in (401, 403):
        hint = (
            "the server wants a contact (give one), or the data set is gated: accept "
            "its terms on its page, fetch it with the tool named there, and prepare that folder"
        )
    return DataError(f"{url} is refused: HTTP {status}", hint)


def _wait_seconds(headers: Mapping[str, str]) -> float | None:
    """Reads how long the server wants to be left alone."""
    try:
        return urllib3.Retry().parse_retry_after(headers.get("Retry-After", ""))
    except InvalidHeader:
        # Hugging Face: `RateLimit: "api";r=0;t=55` says when the window ends, rounded down.
        match = re.search(r"\bt\s*=\s*(\d+)", headers.get("RateLimit", ""))
        return float(match[1]) + 1 if match else None
