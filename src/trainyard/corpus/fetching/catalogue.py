"""Lists the corpora to fetch, and the current files of a corpus.

A small TOML file describes a corpus (`config/corpora/*.toml`, or one of your own). Its server's
list of files becomes a `Listing`, pinned to one immutable revision, even if the corpus names a
floating one:

    wikipedia    "latest"  ->  the date of the dump         20261101
    slimpajama   "main"    ->  the commit of the repository 2d0accdd58c5...

A listing has the size and the checksum of every file before the first byte is fetched. Three kinds
of corpora are supported:

- `wikimedia`: `<wiki>-<date>-sha1sums.txt` has the names and the SHA-1 sums; HEAD gives the sizes.
- `huggingface`: `/api/datasets/<repository>/tree/<commit>?recursive=true` has paths, sizes and
  SHA-256 sums, 1,000 files a page; the header `Link: <...>; rel="next"` leads to the next page.
  With `repository_kind = "models"`, the same below `/api/models`.
- `files`: the corpus file itself has addresses, sizes and SHA-256 sums.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple
from urllib.parse import quote

import msgspec
from pydantic import BaseModel, Field, ValidationError

from trainyard.config.load import parse_toml, read_settings
from trainyard.errors import ConfigError, DataError
from trainyard.units import format_figure

if TYPE_CHECKING:
    from trainyard.corpus.fetching.web import Client

LISTING_HINT = "try again later; or describe the corpus in a .toml file of your own"


class KnownFile(BaseModel, frozen=True, extra="forbid"):
    """A file of a corpus of kind `files`."""

    address: str = Field(pattern="^/")
    """Its address on the host."""
    path: str
    """Its path in the folder."""
    size_bytes: int = Field(ge=0)
    sha256: str = Field(pattern="^[0-9a-f]{64}$")


class CorpusSize(BaseModel, frozen=True, extra="forbid"):
    """What a whole corpus takes; the corpus file says where each figure is from."""

    download_gigabytes: float = Field(gt=0)
    text_gigabytes: float = Field(default=0, ge=0)
    """Unpacked text, UTF-8; 0: not a text to prepare."""
    tokens_billions: float = Field(default=0, ge=0)
    """GPT-2's tokens."""
    core_hours: float = Field(default=0, ge=0)
    """Hours of one core to prepare it."""
    source: str
    """Where the figures come from, and which are estimates."""


class KnownCorpus(BaseModel, frozen=True, extra="forbid"):
    """Where a corpus comes from, and what a person must know before fetching it."""

    title: str
    kind: Literal["wikimedia", "huggingface", "files"]
    host: str = Field(pattern=r"^https?://[^/]+$")
    repository: str
    """The wiki (`enwiki`), the owner and name of the data set, or the folder of the files."""
    repository_kind: Literal["datasets", "models"] = "datasets"
    """The kind of repository on Hugging Face."""
    revision: str
    """The date of a dump, or a commit, tag or branch."""
    files: re.Pattern[str]
    """Regular expression; the files whose whole path it matches belong to the corpus."""
    listed: tuple[KnownFile, ...] = ()
    """All files, for the kind `files`."""
    size: str
    figures: CorpusSize | None = None
    licence: str
    note: str = ""
    max_connections: int = Field(ge=1)
    """The most that the server puts up with from one client."""


class Checksum(NamedTuple):
    """An algorithm and a digest; both "" where none is known."""

    algorithm: Literal["", "md5", "sha1", "sha256"] = ""
    digest: str = ""


@dataclass(frozen=True)
class RemoteFile:
    """A file on a server."""

    url: str
    path: str
    size_bytes: int
    checksum: Checksum


@dataclass(frozen=True)
class Listing:
    """The files of a corpus at one revision."""

    title: str
    source: str
    asked_revision: str
    revision: str
    licence: str
    files: list[RemoteFile]


def corpus_names() -> list[str]:
    """Lists the corpora that are shipped."""
    folder = resources.files("trainyard.config") / "corpora"
    return sorted(entry.name.removesuffix(".toml") for entry in folder.iterdir())


def find_corpus(name: str) -> KnownCorpus:
    """Reads `wikipedia`, `wikipedia@20261101` (at a revision), `hf:OWNER/NAME` or `my-corpus.toml`.

    Raises:
        ConfigError: there is no such corpus, or its file is wrong.
    """
    stem, _, revision = name.partition("@")
    if stem.startswith("hf:"):
        return _any_huggingface(stem.removeprefix("hf:"), revision or "main")
    if stem.endswith(".toml"):
        text = read_settings(Path(stem), "corpus file", "check its path")
    elif stem in corpus_names():
        entry = resources.files("trainyard.config") / "corpora" / f"{stem}.toml"
        text = entry.read_text(encoding="utf-8")
    else:
        hint = f"shipped: {', '.join(corpus_names())}; others: hf:OWNER/NAME, or a .toml file"
        raise ConfigError(f"no corpus named {stem!r}", hint)
    try:
        corpus = KnownCorpus.model_validate(parse_toml(text, stem))
    except ValidationError as error:
        first = error.errors()[0]
        problem = f"{stem}: {'.'.join(map(str, first['loc']))}: {first['msg']}"
        raise ConfigError(problem, "compare it with a shipped one") from None
    return corpus.model_copy(update={"revision": revision}) if revision else corpus


def _any_huggingface(repository: str, revision: str) -> KnownCorpus:
    if not re.fullmatch(r"[\w-][\w.-]*/[\w-][\w.-]*", repository):
        hint = "such as hf:HuggingFaceFW/fineweb; name a part of it by --only 'sample/10BT/*'"
        raise ConfigError(f"'hf:{repository}' is not hf:OWNER/NAME", hint)
    return KnownCorpus(
        title=f"{repository}, a data set of Hugging Face",
        kind="huggingface",
        host="https://huggingface.co",
        repository=repository,
        revision=revision,
        files=re.compile(r"(?!\.|.*/\.).*"),
        size="as listed",
        licence=f"see https://huggingface.co/datasets/{repository}",
        max_connections=16,
    )


def describe(name: str) -> str:
    """Describes a corpus in a few lines: contents, size, licence."""
    corpus = find_corpus(name)
    lines = [corpus.title, f"from {corpus.host}/{corpus.repository} at {corpus.revision}"]
    lines += [f"size: {corpus.size}", *_describe_figures(corpus.figures)]
    lines += [f"licence: {corpus.licence}", corpus.note]
    return "\n".join(line for line in lines if line)


def _describe_figures(figures: CorpusSize | None) -> list[str]:
    if figures is None:
        return []
    lines = [f"download: {format_figure(figures.download_gigabytes)} GB"]
    if figures.tokens_billions:
        # GPT-2's ids take two bytes. Their parts stay until the last of them is joined.
        token_gigabytes = 2 * figures.tokens_billions
        disk = figures.download_gigabytes + 2 * token_gigabytes
        lines[0] += (
            f"; text: {format_figure(figures.text_gigabytes)} GB; "
            f"token files: {format_figure(token_gigabytes)} GB with GPT-2's tokenizer; "
            f"disk: {format_figure(disk)} GB until both are done"
        )
        lines += [f"preparing: about {format_figure(figures.core_hours)} core-hours"]
    return [*lines, f"figures: {figures.source}"]


def list_files(corpus: KnownCorpus, client: Client) -> Listing:
    """Asks the server for the files of a corpus and pins its revision.

    Raises:
        DataError: the server has no such revision or no file of the corpus, or an answer makes
            no sense, or names a file outside the folder.
    """
    if corpus.kind == "files":
        revision = corpus.revision
        candidates = []
        for file in corpus.listed:
            url, checksum = f"{corpus.host}{file.address}", Checksum("sha256", file.sha256)
            candidates.append(RemoteFile(url, file.path, file.size_bytes, checksum))
    elif corpus.kind == "wikimedia":
        revision, candidates = _list_wikimedia(corpus, client)
    else:
        revision, candidates = _list_huggingface(corpus, client)
    files = [file for file in candidates if corpus.files.fullmatch(file.path)]
    if not files:
        seen = ", ".join(file.path for file in candidates[:5]) or "nothing"
        raise DataError(
            f"no file of {corpus.repository} at {revision} matches {corpus.files.pattern!r}; "
            f"there are: {seen}",
            "a dump that is still being made lacks files: name an older revision (NAME@REVISION); "
            "otherwise the corpus has moved: correct `files` in a .toml file of your own",
        )
    if corpus.kind == "wikimedia":
        files = [replace(file, size_bytes=client.size_of(file.url)) for file in files]
    source = f"{corpus.host}/{corpus.repository}"
    return Listing(corpus.title, source, corpus.revision, revision, corpus.licence, files)


def check_paths(listing: Listing) -> None:
    """Refuses a listing that would write outside the folder, or one file over another.

    Raises:
        DataError: a path is absolute, has `..`, a drive or control characters, or comes twice.
    """
    seen: set[str] = set()
    for file in listing.files:
        parts = file.path.split("/")
        odd = {"", ".", ".."} & set(parts) or re.search(r"[\\:\x00-\x1f\x7f]", file.path)
        if odd or file.path.endswith((".partial", ".partial.etag", ".listing")):
            raise DataError(
                f"{listing.source} lists a file with the unsafe path {file.path!r}",
                "nothing was fetched; do not trust this server or this corpus file",
            )
        if file.path in seen:
            raise DataError(f"{listing.source} lists {file.path} twice", LISTING_HINT)
        seen.add(file.path)


def _list_wikimedia(corpus: KnownCorpus, client: Client) -> tuple[str, list[RemoteFile]]:
    wiki = corpus.repository
    url = f"{corpus.host}/{wiki}/{corpus.revision}/{wiki}-{corpus.revision}-sha1sums.txt"
    text = client.read(url)[0].decode(errors="replace")
    files = []
    for line in text.splitlines():
        # Names have the date of the dump also in the list of `latest`.
        match = re.fullmatch(r"([0-9a-f]{40}) [ *]([^ ]*-(\d{8})-[^ ]*)", line.strip())
        if match:
            digest, name, date = match.groups()
            dated = f"{corpus.host}/{wiki}/{date}/{name}"
            files.append(RemoteFile(dated, name, 0, Checksum("sha1", digest)))
    dates = {file.url.split("/")[-2] for file in files}
    if not files:
        raise _senseless(url, f"it begins with {text[:60]!r}")
    if len(dates) > 1:
        raise _senseless(url, f"it has files of {len(dates)} dumps: {', '.join(sorted(dates))}")
    return dates.pop(), files


class _Commit(msgspec.Struct):
    sha: str


class _LargeFile(msgspec.Struct):
    oid: str
    size: int


class _Entry(msgspec.Struct):
    type: str
    path: str
    size: int = 0
    lfs: _LargeFile | None = None


def _list_huggingface(corpus: KnownCorpus, client: Client) -> tuple[str, list[RemoteFile]]:
    api = f"{corpus.host}/api/{corpus.repository_kind}/{corpus.repository}"
    url = f"{api}/revision/{quote(corpus.revision, safe='')}"
    revision = quote(_decode(url, client.read(url)[0], _Commit).sha, safe="")
    folder = "" if corpus.repository_kind == "models" else f"{corpus.repository_kind}/"
    resolve = f"{corpus.host}/{folder}{corpus.repository}/resolve/{revision}"
    files: list[RemoteFile] = []
    page = f"{api}/tree/{revision}?recursive=true"
    pages: set[str] = set()
    while page:
        if page in pages:
            raise _senseless(page, "its next page is an earlier one")
        pages.add(page)
        body, headers = client.read(page)
        for entry in _decode(page, body, list[_Entry]):
            if entry.type == "file":
                url, size, checksum = f"{resolve}/{quote(entry.path)}", entry.size, Checksum()
                if entry.lfs is not None:
                    size = entry.lfs.size
                    checksum = Checksum("sha256", entry.lfs.oid.removeprefix("sha256:"))
                files.append(RemoteFile(url, entry.path, size, checksum))
        page = _next_page(corpus.host, headers.get("Link", ""))
    return revision, files


def _next_page(host: str, link: str) -> str:
    # The host of the link is ignored: a listing never leads to another server.
    match = re.search(r'<(?:\w+://[^/>]*)?([^>]*)>\s*;[^,]*\brel="?next\b', link)
    return f"{host}{match[1]}" if match else ""


def _decode(url: str, body: bytes, kind: Any) -> Any:
    try:
        return msgspec.json.decode(body, type=kind)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise _senseless(url, str(error)) from None


def _senseless(url: str, why: str) -> DataError:
    return DataError(f"the answer of {url} is not a list of files: {why}", LISTING_HINT)
