r"""Reads articles of a Wikipedia dump (`pages-articles.xml`, plain or compressed), split anywhere.

    for batch in read_wikipedia(Segment(Path("enwiki-pages-articles.xml.bz2"), start, end)):
        batch.texts      # "Albedo\n\nAlbedo is the measure of ..."
        batch.dropped    # {"redirect": 100, "other namespace": 1}

A segment may start and end at any byte. A page belongs to the segment whose own data contains the
`<` of its `<page>`: a reader skips to its first own `<page>`, and reads past its end to finish the
last one. For `.bz2` "own data" is the content of blocks that start in the segment.

It finds pages by string search, without an XML parser: in a dump `<` and `&` only occur in markup,
and a DTD with hostile entities is never parsed. Memory holds one page and a few blocks.
"""

from __future__ import annotations

import html
import re
from collections.abc import Iterator
from typing import NamedTuple

from trainyard.corpus.sources.batch import Batch, Fault
from trainyard.corpus.sources.blocks import (
    DamagedFileError,
    UnpackedChunk,
    read_blocks,
    read_bzip2_blocks,
)
from trainyard.corpus.sources.files import Segment, format_of
from trainyard.corpus.sources.wikitext import clean_wikitext
from trainyard.data.sidecar import add_counts

MAX_PAGE_BYTES = 64 * 2**20
_BATCH_CHARACTERS = 2**19
_READ_BYTES = 2**20

_EDGE = re.compile(rb"</?page>")
_BEGUN_TAG = re.compile(rb"<(?:/?p?|/?pa|/?pag|/?page)$")
_TITLE = re.compile(rb"<title>([^<]*)</title>")
_NAMESPACE = re.compile(rb"<ns>\s*(-?\d+)\s*</ns>")
_TEXT = re.compile(rb"<text\b[^<>]*?(/?)>")
_MALFORMED = re.compile(rb"<|&(?!(?:lt|gt|amp|quot|apos|#\d{1,7}|#x[0-9a-fA-F]{1,6});)")
_REDIRECT = re.compile(r"\s*#redirect\b", re.I)
_DISAMBIGUATION = re.compile(
    r"\{\{\s*(?:disambig\w*|dab|(?:hn|geo|human name |place name |airport |school |letter-number )"
    r"dis(?:ambig(?:uation)?)?)\s*[|}]|__DISAMBIG__",
    re.I,
)
_HINT = "fetch the dump again; skipping faults leaves this page out and keeps the others"


class _Page(NamedTuple):
    """What stands from `<page>` to `</page>`, or, where `problem` says so, what there is of it."""

    data: bytes
    problem: str = ""


def read_wikipedia(segment: Segment) -> Iterator[Batch]:
    """Yields the articles that begin in a segment: the title, a blank line, the clean text.

    `n_lines` counts pages, whether kept, dropped (redirects, other namespaces, disambiguations,
    pages without text) or faulty.

    Raises:
        DamagedFileError: a compressed file is corrupt or cut short; what comes before was yielded.
    """
    batch, n_pages, n_characters = Batch([], 0, 0), 0, 0
    damage = None
    try:
        for page in _read_pages(segment):
            if isinstance(page, int):
                batch.n_bytes += page
            else:
                n_pages += 1
                n_characters += _add_page(page, n_pages, batch)
            if n_characters >= _BATCH_CHARACTERS or batch.n_bytes >= _READ_BYTES:
                yield batch
                batch, n_characters = Batch([], 0, 0), 0
    except DamagedFileError as error:
        damage = error
    if batch.n_lines or batch.n_bytes:
        yield batch
    if damage is not None:
        raise damage


def _add_page(page: _Page, number: int, batch: Batch) -> int:
    """Adds the article of a page, its fault, or why it is dropped; returns its characters."""
    batch.n_lines += 1
    match = _TITLE.search(page.data)
    title = html.unescape(match[1].decode(errors="replace")) if match else "without a title"
    head, text, problem = (page.data, b"", page.problem) if page.problem else _split(page.data)
    if problem:
        kind = "too long" if problem == _TOO_LONG else "damaged page"
        detail = f"the page {title!r} {problem}"
        batch.faults.append(Fault(kind, number, detail, _HINT, page.data[: 2**16]))
        return 0
    namespace = _NAMESPACE.search(head)
    wikitext = html.unescape(text.decode())
    article = ""
    if namespace and namespace[1] != b"0":
        reason = "other namespace"
    elif b"<redirect" in head or _REDIRECT.match(wikitext):
        reason = "redirect"
    elif _DISAMBIGUATION.search(wikitext):
        reason = "disambiguation"
    else:
        reason, article = "no text", clean_wikitext(wikitext, batch.dropped_sentences)
    if not article:
        add_counts(batch.dropped, {reason: 1})
        return 0
    batch.texts.append(f"{title}\n\n{article}")
    return len(batch.texts[-1])


_TOO_LONG = f"is longer than {MAX_PAGE_BYTES // 2**20} MiB"


def _split(page: bytes) -> tuple[bytes, bytes, str]:
    """Returns what is before a page's wikitext, the wikitext, and what is wrong with it, or ""."""
    tag = None
    for tag in _TEXT.finditer(page):  # noqa: B007 (the last revision of the page)
        pass
    if tag is None:
        return page, b"", "has no <text>"
    head = page[: tag.start()]
    if tag[1]:
        return head, b"", ""
    end = page.rfind(b"</text>")
    if end < tag.end():
        return head, b"", "has no </text>"
    text = page[tag.end() : end]
    if wrong := _MALFORMED.search(text):
        sample = text[wrong.start() : wrong.start() + 12].decode(errors="replace")
        return head, text, f"is not well-formed XML at {sample!r}"
    try:
        text.decode()
    except UnicodeDecodeError as error:
        return head, text, f"is not valid UTF-8 at byte {error.start} of its text"
    return head, text, ""


def _read_chunks(segment: Segment) -> Iterator[UnpackedChunk]:
    """Yields the segment's own data, then, as long as asked, what follows it."""
    _, compression = format_of(segment.path)
    if compression == ".bz2":
        yield from read_bzip2_blocks(segment.path, segment.start, segment.end)
    elif compression:
        yield from (UnpackedChunk(data, n_bytes, True) for data, n_bytes in read_blocks(segment))
    else:
        with segment.path.open("rb") as file:
            file.seek(segment.start)
            left = segment.end - segment.start
            while data := file.read(min(_READ_BYTES, left) if left > 0 else _READ_BYTES // 8):
                yield UnpackedChunk(data, len(data) if left > 0 else 0, left > 0)
                left -= len(data)


def _read_pages(segment: Segment) -> Iterator[_Page | int]:
    """Yields the pages of a segment, and, as numbers between them, the bytes of the file read."""
    buffer = bytearray()
    own_end = 0  # where in `buffer` the segment's own data ends
    searched = 0  # no edge of a page before it is unknown
    in_page = False  # then `buffer` begins with `<page>`
    cut_page = b""  # the beginning of a page that grew too long
    for chunk in _read_chunks(segment):
        buffer += chunk.data
        own_end = len(buffer) if chunk.is_own else own_end
        kept = 0
        while edge := _EDGE.search(buffer, searched):
            if in_page:
                problem = _TOO_LONG if cut_page else ""
                is_end = edge[0] == b"</page>"
                data = cut_page or bytes(buffer[kept : edge.end() if is_end else edge.start()])
                yield _Page(data, problem if problem or is_end else "has no </page>")
            in_page, cut_page = edge[0] == b"<page>", b""
            if in_page and edge.start() >= own_end:
                return
            kept = edge.start() if in_page else edge.end()
            searched = edge.end()
        yield chunk.n_bytes
        begun = _BEGUN_TAG.search(buffer, max(len(buffer) - 6, searched))
        searched = begun.start() if begun else len(buffer)
        if in_page and not cut_page and len(buffer) - kept > MAX_PAGE_BYTES:
            cut_page = bytes(buffer[kept : kept + 2**16])
        if not in_page or cut_page:
            kept = searched
        if not in_page and kept >= own_end and not chunk.is_own:
            return
        del buffer[:kept]
        searched, own_end = searched - kept, max(own_end - kept, 0)
    if in_page:
        yield _Page(cut_page or bytes(buffer), "has no </page> before the file ends")
