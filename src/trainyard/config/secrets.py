"""Hides passwords and keys in texts, so that they are never written to disk.

    secrets = secret_values({"HF_TOKEN": "hf_abc", "HOME": "/h"}) ["hf_abc"]
    hide("login with hf_abc", secrets)                   "login with ***"
    hide("get https://me:letmein@host/x?sig=1f", [])   "get https://***@host/x?sig=***"

A run file is copied to the run folder, to every checkpoint and to Weights & Biases: one with a
password is rejected, not changed.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any
from urllib.parse import quote

HIDDEN = "***"
# Shorter ones would hide parts of ordinary words.
_FEWEST_LETTERS = 6
_SECRET_WORDS = {
    *("KEY", "APIKEY", "TOKEN", "SECRET", "CREDENTIAL", "CREDENTIALS", "AUTH", "COOKIE"),
    *("PASSWORD", "PASSWD", "PASSPHRASE", "PASS", "PASSCODE", "BEARER", "WEBHOOK"),
}
# https://user:password@host (a path would have one slash), https://token@host, and ?sig=key
_LOGIN = re.compile(r"(\b[a-zA-Z][a-zA-Z0-9+.-]*:/{1,2})[^\s/?#'\"]+(@)")
_PARAMETER = re.compile(
    r"([?&](?:[\w.-]*(?:key|token|secret|password|signature|credential)|sig|auth)=)[^\s&#'\"]+",
    re.IGNORECASE,
)


def secret_values(environment: Mapping[str, str]) -> list[str]:
    """Lists the values of variables with secret-like names, longest first."""
    found = {
        value.strip()
        for name, value in environment.items()
        if _SECRET_WORDS & set(re.split("[^A-Z]+", name.upper()))
    }
    return sorted((v for v in found if len(v) >= _FEWEST_LETTERS), key=lambda v: (-len(v), v))


def hide(text: str, secrets: Iterable[str]) -> str:
    """Replaces secrets, and logins and keys in URLs, with asterisks."""
    for secret in secrets:
        for form in {secret, quote(secret, safe="")}:
            text = text.replace(form, HIDDEN)
    return _PARAMETER.sub(rf"\1{HIDDEN}", _LOGIN.sub(rf"\1{HIDDEN}\2", text))


def secret_problems(settings: Mapping[str, Any], secrets: Iterable[str] = ()) -> dict[str, str]:
    """Maps each dotted field with a secret, or a login or key in a URL, to a message without it."""
    copied = "which would be copied to the run folder and to every checkpoint"
    problems = {}
    for field, text in texts_of(settings):
        if hide(text, ()) != text:
            problems[field] = (
                f"{field} holds a URL with a login or a key, {copied}; give the address without it"
            )
        elif hide(text, secrets) != text:
            problems[field] = f"{field} holds a password or key of the environment, {copied}"
    return problems


def texts_of(value: Any, field: str = "") -> Iterator[tuple[str, str]]:
    """Yields every text in tables and lists, with its dotted field."""
    if isinstance(value, str):
        yield field, value
    elif isinstance(value, Mapping):
        for name, inner in value.items():
            yield from texts_of(inner, f"{field}.{name}" if field else name)
    elif isinstance(value, list | tuple):
        for inner in value:
            yield from texts_of(inner, field)
