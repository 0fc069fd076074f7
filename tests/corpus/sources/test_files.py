"""Tests of which files a corpus is made of: names, folders, links, and what is refused."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from trainyard.corpus.sources.documents import read_documents
from trainyard.corpus.sources.files import (
    LISTING_NAME,
    Segment,
    describe_skipped,
    find_files,
    scan_inputs,
)
from trainyard.errors import DataError


def touch(folder: Path, *names: str) -> None:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).touch()


def test_what_fetching_keeps_is_not_reported(tmp_path: Path) -> None:
    touch(tmp_path, LISTING_NAME, "a/x.jsonl", "a/y.md")
    files, skipped = scan_inputs([str(tmp_path)])
    assert files == [tmp_path / "a/x.jsonl"]
    assert describe_skipped(skipped) == "1 .md"


def test_files_are_sorted_and_folders_searched(tmp_path: Path) -> None:
    touch(tmp_path, "b.jsonl", "a/z.txt.gz", "a/y.parquet", "a/notes.md", ".hidden.jsonl")
    names = ["a/y.parquet", "a/z.txt.gz", "b.jsonl"]
    assert find_files([str(tmp_path)]) == [tmp_path / name for name in names]
    assert find_files([str(tmp_path / "**/*.*l"), str(tmp_path / "a/z.txt.gz")]) == [
        tmp_path / "b.jsonl",
        tmp_path / "a/z.txt.gz",
    ]


@pytest.mark.parametrize(
    ("item", "problem", "hint"),
    [
        ("missing.jsonl", "missing.jsonl does not exist", "check the path"),
        ("*.zst", "no file matches", "check the pattern"),
        (
            "l\n\x1boop",
            r"the link {}/l\n\x1boop is broken: it leads to l\n\x1boop",
            "fix the link",
        ),
        ("a.pdf", "a.pdf is not plain text", "pdftotext for .pdf"),
        ("*.docx", "a.docx is not plain text", "pandoc -t plain for .docx"),
        ("a.parquet.gz", "a.parquet.gz is Parquet inside .gz", "unpack the .gz"),
        ("a.html", "a.html is HTML, not plain text", "trafilatura"),
        ("*.HTM.gz", "a.HTM.gz is HTML, not plain text", "or name it .txt"),
        ("a.warc.gz", "a.warc.gz is a web archive, not plain text", "extract the text"),
        ("a.csv", "a.csv is a table, not plain text", "csv.DictReader(sys.stdin)]' < FILE.csv"),
        ("a.tsv", "a.tsv is a table, not plain text", "write a JSON object a line"),
        ("empty", "empty has no readable file: it is empty", ".jsonl .ndjson .json"),
        ("other", "no readable file: only 2 .md, 1 .tar.gz, 1 hidden", "such as 'notes/**/*.md'"),
    ],
)
def test_a_wrong_input_is_named(tmp_path: Path, item: str, problem: str, hint: str) -> None:
    (tmp_path / "empty").mkdir()
    others = ("other/a.md", "other/b/B.MD", "other/a.tar.gz", "other/.a.txt")
    touch(tmp_path, "a.parquet.gz", "a.html", "a.HTM.gz", "a.warc.gz", "a.csv", "a.tsv", *others)
    (tmp_path / "l\n\x1boop").symlink_to("l\n\x1boop")
    (tmp_path / "a.pdf").write_bytes(b"%PDF-1.7\n")
    (tmp_path / "a.docx").write_bytes(b"PK\x03\x04\x14\0\x06\0")
    with pytest.raises(DataError) as caught:
        find_files([str(tmp_path / item)])
    assert problem.format(tmp_path) in caught.value.problem
    assert hint in caught.value.hint


def test_an_input_given_twice_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").touch()
    with pytest.raises(DataError, match="is given twice"):
        find_files([str(tmp_path), str(tmp_path / "a.jsonl")])
    with pytest.raises(DataError, match="no input was given"):
        find_files([])


def test_what_a_folder_skips_is_counted(tmp_path: Path) -> None:
    read = ["a.txt", "b/C.TXT", "b/D.Jsonl.GZ", "e.ndjson"]
    touch(tmp_path, *read, ".git/config", ".x", "f.md", "b/g.MD", "h.pdf", "Makefile")
    touch(tmp_path, "i.parquet.gz", "j.md.zst", "k.m\x1b[2J")
    (tmp_path / "link.html").symlink_to(tmp_path / "f.md")
    (tmp_path / "gone.txt").symlink_to(tmp_path / "nowhere.txt")
    (tmp_path / "again.txt").symlink_to("a.txt")
    os.mkfifo(tmp_path / "pipe.txt")
    files, skipped = scan_inputs([str(tmp_path)])
    assert files == [tmp_path / name for name in read]
    assert describe_skipped(skipped) == (
        "2 .md, 2 hidden, 1 .html, 1 .m\\x1b[2j, 1 .md.zst, 1 .parquet.gz, 1 .pdf, "
        "1 behind broken links, 1 pipes and devices, 1 without a suffix"
    )
    assert scan_inputs([str(tmp_path / "*n*.txt")])[1] == {"behind broken links": 1}
    named = [str(tmp_path), str(tmp_path / "f.md"), str(tmp_path / "b/g*")]
    assert describe_skipped(scan_inputs(named)[1]).startswith("2 hidden, 1 .m\\x1b[2j, ")


@pytest.mark.parametrize("name", ["a.md", "a.py", "a", "a.TXT", "a.utf16"])
def test_a_named_file_of_any_suffix_is_plain_text(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text("one\ntwo", encoding="utf-16" if "16" in name else "utf-8")
    assert find_files([str(tmp_path / name)]) == find_files([str(tmp_path / "a*")])
    (batch,) = read_documents(Segment(tmp_path / name, 0, 7), "text")
    assert batch.texts == ([] if "16" in name else ["one\ntwo"])


@pytest.mark.parametrize("item", ["\udcff.jsonl", "\udcff", "."])
def test_a_name_that_is_not_utf8_is_refused(tmp_path: Path, item: str) -> None:
    touch(tmp_path, "\udcff/a.jsonl", "\udcff.jsonl")
    with pytest.raises(DataError, match=r"the name of .*\\xff\S* is not UTF-8") as caught:
        find_files([str(tmp_path / item)])
    assert caught.value.hint == "rename the file or its folder"
    with pytest.raises(DataError, match=r"\\xfe does not exist"):
        find_files([str(tmp_path / "\udcfe")])


def test_linked_folders_and_files_are_read_once(tmp_path: Path) -> None:
    touch(tmp_path, "in/b/1.jsonl", "in/b/.hidden/2.jsonl", "else/3.jsonl", "else/deep/4.jsonl")
    touch(tmp_path, "lone.jsonl")
    for link, target in {
        "in/a": "in/b",  # is there without the link
        "in/c": "else",
        "in/d": "else",
        "in/e": "else/deep",
        "in/0.jsonl": "else/3.jsonl",
        "in/f.jsonl": "in/b/1.jsonl",
        "in/g.jsonl": "lone.jsonl",
        "in/i.jsonl": "lone.jsonl",
        "in/h.jsonl": "nowhere.jsonl",
        "else/deep/up": "else",
        "else/around": "in",
        "in/self.jsonl": "in/self.jsonl",
        "link": "in/b",
    }.items():
        (tmp_path / link).symlink_to(tmp_path / target)
    names = ["in/b/1.jsonl", "in/c/3.jsonl", "in/c/deep/4.jsonl", "in/g.jsonl"]
    assert find_files([str(tmp_path / "in")]) == [tmp_path / name for name in names]
    assert find_files([str(tmp_path / "link")]) == [tmp_path / "link/1.jsonl"]
    for again in ("else/3.jsonl", "in/g.jsonl"):
        with pytest.raises(DataError, match=r"[3g].jsonl is given twice"):
            find_files([str(tmp_path / "in"), str(tmp_path / again)])


def test_a_folder_that_cannot_be_read_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a.jsonl").touch()
    monkeypatch.chdir(tmp_path)
    for _ in range(20):  # so deep that the system takes no such path
        Path("d" * 250).mkdir()
        monkeypatch.chdir("d" * 250)
    with pytest.raises(DataError, match=r"d{250} cannot be read: File name too long") as caught:
        find_files([str(tmp_path)])
    assert "check that it may be read" in caught.value.hint
