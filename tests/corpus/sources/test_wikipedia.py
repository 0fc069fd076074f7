"""Tests of the reader of Wikipedia dumps: any cutting, every reason to leave a page out, damage."""

from __future__ import annotations

import bz2
import gzip
import random
from collections import Counter
from pathlib import Path
from xml.sax.saxutils import escape

import pytest
from tests.circles import everyday
from tests.command import peak_bytes

from trainyard.corpus.sources import wikipedia
from trainyard.corpus.sources.batch import Batch, Fault
from trainyard.corpus.sources.blocks import DamagedFileError
from trainyard.corpus.sources.files import Segment
from trainyard.corpus.sources.wikipedia import read_wikipedia

HEADER = '<?xml version="1.0"?>\n<mediawiki>\n  <siteinfo><sitename>x</sitename></siteinfo>\n'


def page(title: str, text: str, namespace: int = 0, extra: str = "") -> str:
    return (
        f"  <page>\n    <title>{escape(title)}</title>\n    <ns>{namespace}</ns>\n{extra}"
        f'    <revision>\n      <text xml:space="preserve">{escape(text)}</text>\n'
        "    </revision>\n  </page>\n"
    )


def read(path: Path, start: int = 0, end: int | None = None) -> list[Batch]:
    return list(read_wikipedia(Segment(path, start, path.stat().st_size if end is None else end)))


def texts_of(batches: list[Batch]) -> list[str]:
    return [text for batch in batches for text in batch.texts]


def faults_of(batches: list[Batch]) -> list[Fault]:
    return [fault for batch in batches for fault in batch.faults]


def dropped_of(batches: list[Batch]) -> Counter[str]:
    return sum((Counter(batch.dropped) for batch in batches), Counter())


def write(path: Path, pages: list[str]) -> Path:
    data = (HEADER + "".join(pages) + "</mediawiki>\n").encode()
    pack = {".bz2": lambda data: bz2.compress(data, 1), ".gz": gzip.compress, ".xml": bytes}
    path.write_bytes(pack[path.suffix](data))
    return path


@pytest.mark.parametrize("suffix", [".xml", ".xml.gz"])
def test_articles_are_kept_and_the_rest_is_counted(tmp_path: Path, suffix: str) -> None:
    pages = [
        page("A & B", "'''A''' &lt; [[b]]"),
        page("C", "#REDIRECT [[A]]", extra='    <redirect title="A" />\n'),
        page("D", " #redirect [[A]]"),
        page("Talk:A", "talk", namespace=1),
        page("E", "'''E''' may be:\n* [[F]]\n{{disambiguation|geo}}"),
        page("G", "{{Infobox}}"),
        page("H", "").replace("></text>", " />"),
        page("I", 'quote " and \u00e9 5. It is {{age|1969}} years old.'),
    ]
    batches = read(write(tmp_path / f"a{suffix}", pages))
    assert texts_of(batches) == ["A & B\n\nA < b", 'I\n\nquote " and \u00e9 5.']
    counts = {"redirect": 2, "other namespace": 1, "disambiguation": 1, "no text": 2}
    assert dropped_of(batches) == counts
    assert [batch.dropped_sentences for batch in batches] == [{"age": 1}]
    assert sum(batch.n_lines for batch in batches) == 8
    assert faults_of(batches) == []


@pytest.mark.parametrize("suffix", [".xml", ".xml.bz2"])
@pytest.mark.parametrize("n_pieces", everyday((1, 2, 3, 7, 50), (3,)))
def test_any_cutting_gives_the_same_pages(tmp_path: Path, suffix: str, n_pieces: int) -> None:
    pages = [page(f"T{n}", f"text {n} " + "word " * (n * 37 % 900)) for n in range(400)]
    path = write(tmp_path / f"a{suffix}", pages)
    size = path.stat().st_size
    for seed in range(3):
        cuts = [0, *sorted(random.Random(seed).choices(range(size), k=n_pieces - 1)), size]
        pieces = [read(path, *cuts[n : n + 2]) for n in range(n_pieces)]
        titles = [text.partition("\n")[0] for piece in pieces for text in texts_of(piece)]
        assert titles == [f"T{n}" for n in range(400)]
        n_bytes = sum(batch.n_bytes for piece in pieces for batch in piece)
        assert size - 100 * n_pieces <= n_bytes <= size


def test_every_cut_near_a_page_is_clean(tmp_path: Path) -> None:
    path = write(tmp_path / "a.xml", [page(f"T{n}", f"text {n}") for n in range(3)])
    size = path.stat().st_size
    whole = texts_of(read(path))
    for cut in range(size + 1):
        assert texts_of(read(path, 0, cut)) + texts_of(read(path, cut, size)) == whole


GOOD = page("Good", "good")
BAD = page("Bad", "a @ b")
DOCTYPE = (
    '<!DOCTYPE x [<!ENTITY a "aa"><!ENTITY b "&a;&a;"><!ENTITY f SYSTEM "file:///etc/passwd">]>'
)
BROKEN = [
    (BAD.replace("</page>", ""), "the page 'Bad' has no </page>"),
    (BAD.replace("</text>", ""), "the page 'Bad' has no </text>"),
    (BAD.replace("<text", "<test"), "the page 'Bad' has no <text>"),
    (BAD.replace("@", "&lol;"), "'Bad' is not well-formed XML at '&lol; b'"),
    (BAD.replace("@", "&"), "'Bad' is not well-formed XML at '& b'"),
    (BAD.replace("@", "<b>"), "'Bad' is not well-formed XML at '<b> b'"),
    (DOCTYPE + BAD.replace("@", "&b;&f;"), "'Bad' is not well-formed XML at '&b;&f; b'"),
    (BAD.replace("@", "\udcff"), "'Bad' is not valid UTF-8 at byte 2 of its text"),
    ("<page>\n<ns>0</ns></page>", "the page 'without a title' has no <text>"),
    (page("Last", "x" * 1000)[:-100], "the page 'Last' has no </page> before the file ends"),
]


@pytest.mark.parametrize(("broken", "detail"), BROKEN)
def test_a_broken_page_is_named_and_the_others_stay(
    tmp_path: Path, broken: str, detail: str
) -> None:
    after = [] if "ends" in detail else [GOOD, GOOD]
    data = "".join([HEADER, GOOD, broken, *after]).encode(errors="surrogateescape")
    (tmp_path / "a.xml").write_bytes(data)
    batches = read(tmp_path / "a.xml")
    assert texts_of(batches) == ["Good\n\ngood"] * (1 + len(after))
    (fault,) = faults_of(batches)
    assert (fault.kind, fault.position) == ("damaged page", 2)
    assert detail in fault.detail
    assert "fetch the dump again" in fault.hint
    assert sum(batch.n_lines for batch in batches) == 2 + len(after)


def test_a_page_that_is_too_long_takes_no_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(wikipedia, "MAX_PAGE_BYTES", 2**21)
    path = write(tmp_path / "a.xml", [GOOD, page("Long", "x" * 30_000_000), GOOD])
    batches = read(path)
    assert texts_of(batches) == ["Good\n\ngood"] * 2
    (fault,) = faults_of(batches)
    assert (fault.kind, fault.position) == ("too long", 2)
    assert "the page 'Long' is longer than" in fault.detail
    assert peak_bytes(lambda: read(path)) < 20_000_000


def test_damage_comes_after_what_was_good(tmp_path: Path) -> None:
    pages = [page(f"T{n}", random.Random(n).randbytes(500).hex()) for n in range(900)]
    path = write(tmp_path / "a.xml.bz2", pages)
    whole = texts_of(read(path))
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    got: list[str] = []
    with pytest.raises(DamagedFileError, match=r"^byte \d+: this bzip2 block is corrupt$"):
        for batch in read_wikipedia(Segment(path, 0, len(data))):
            got += batch.texts
    assert 300 < len(got) < 450
    assert got == whole[: len(got)]
