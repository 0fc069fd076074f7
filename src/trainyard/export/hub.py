"""Uploads an exported folder to the Hugging Face Hub, in one commit.

Token, server and proxies are those of huggingface_hub: HF_TOKEN or `hf auth login`, HF_ENDPOINT,
HTTPS_PROXY. Content that Trainyard did not upload is never replaced. The Hub refuses the commit if
someone else commits between `find_repository` and `upload`.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi
from huggingface_hub.errors import (  # type: ignore[attr-defined,unused-ignore]
    HTTPError,
    LocalTokenNotFoundError,
    RepositoryNotFoundError,
)

from trainyard.errors import ConfigError, MachineError
from trainyard.units import format_bytes

logger = logging.getLogger("trainyard")

_TITLE = "Upload by trainyard export"
_GIT_ATTRIBUTES = ".gitattributes"  # the Hub's own, in every repository
_TOKEN = "set HF_TOKEN to a token with write access (huggingface.co/settings/tokens)"
_NETWORK = "check the network, HTTPS_PROXY and HF_ENDPOINT; then run the same command again"
_HINTS = {
    401: f"the token is not valid: {_TOKEN}",
    403: f"this token may not write there: name a repository of yours, or {_TOKEN}",
    409: "another repository has this name: choose another",
    412: "someone else has just changed the repository: look at it, then run the command again",
}


class Repository(NamedTuple):
    """A model repository that may be written."""

    name: str
    public: bool
    head: str = ""
    """The commit to build on; empty: it is to be created."""
    files: tuple[str, ...] = ()


def find_repository(name: str, *, public: bool) -> Repository:
    """Checks the token, the right to write to OWNER/NAME, and what is there.

    Raises:
        ConfigError: it is someone else's, holds other content, or its visibility differs.
        MachineError: the Hub refuses or cannot be reached.
    """
    api = HfApi()
    with _explain(name):
        user = api.whoami()
        owners = [user["name"], *(org["name"] for org in user.get("orgs", []))]
        only_reads = user.get("auth", {}).get("accessToken", {}).get("role") == "read"
        if only_reads or name.partition("/")[0].lower() not in map(str.lower, owners):
            problem = "can only read" if only_reads else f"writes to {', '.join(owners)}"
            raise ConfigError(f"cannot upload to {name}: the token {problem}", _HINTS[403])
        try:
            info = api.model_info(name)
        except RepositoryNotFoundError:
            return Repository(name, public)
        api.auth_check(name, write=True)
        files = tuple(file.rfilename for file in info.siblings or ())
        if {*files} - {_GIT_ATTRIBUTES} and api.list_repo_commits(name)[0].title != _TITLE:
            problem = f"{name} holds {len(files)} files, not last changed by trainyard export"
            raise ConfigError(problem, "choose another name, or empty the repository yourself")
    if public == bool(info.private):
        hint = "change that in its settings on the Hub" if public else "pass --public to agree"
        raise ConfigError(f"{name} is {'private' if public else 'public'}", hint)
    return Repository(name, public, info.sha or "", files)


def upload(repository: Repository, folder: Path) -> str:
    """Makes the repository hold the files of `folder`, by one commit; returns its address.

    Raises:
        MachineError: the Hub refuses or cannot be reached; nothing is published, or all of it.
    """
    api, (name, public, head, files) = HfApi(), repository
    paths = sorted(folder.iterdir())
    gone = {*files} - {_GIT_ATTRIBUTES, *(path.name for path in paths)}
    size = format_bytes(sum(path.stat().st_size for path in paths))
    logger.info("uploading %d files, %s, to %s/%s", len(paths), size, api.endpoint, name)
    with _explain(name, f"the same command uploads {folder} again"):
        if not head:
            api.create_repo(name, private=not public)
        # Not `upload_folder`, which may make several commits.
        changes: list[CommitOperationAdd | CommitOperationDelete] = []
        changes += (CommitOperationDelete(old) for old in sorted(gone))
        changes += (CommitOperationAdd(path.name, path) for path in paths)
        api.create_commit(name, changes, commit_message=_TITLE, parent_commit=head or None)
    return f"{api.endpoint}/{name}"


@contextmanager
def _explain(name: str, remains: str = "") -> Iterator[None]:
    """Turns the errors of huggingface_hub into one message that says what remains."""
    try:
        yield
    except KeyboardInterrupt:
        if remains:
            logger.warning("interrupted: all or nothing was published; %s", remains)
        raise
    except LocalTokenNotFoundError:
        raise MachineError(f"cannot upload to {name}: no token", _TOKEN) from None
    except (HTTPError, OSError, RuntimeError, ValueError) as error:
        cause = error.__cause__ if type(error) is RuntimeError and error.__cause__ else error
        status = getattr(getattr(cause, "response", None), "status_code", 0)
        text = " ".join(str(cause).split())[:300] or type(cause).__name__
        problem = f"cannot upload to {name}: {text}"
        if remains:  # without an answer the commit may have arrived
            problem += f"; {'' if status else 'all or '}nothing was published; {remains}"
        raise MachineError(problem, _HINTS.get(status, _NETWORK)) from error
