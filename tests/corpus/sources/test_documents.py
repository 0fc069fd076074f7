"""Tests of the readers: what they accept, every fault with its place, and how files are cut."""

from __future__ import annotations

import bz2
import gzip
import hashlib
import json
import lzma
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
import zstandard
from tests.command import peak_bytes

from trainyard.corpus.sources import batch as batch_module
from trainyard.corpus.sources import blocks, documents
from trainyard.corpus.sources.batch import MAX_DOCUMENT_BYTES, Fault
from trainyard.corpus.sources.documents import read_documents
from trainyard.corpus.sources.files import Segment, split_into_units
from trainyard.errors import DataError

COMPRESS: dict[str, Callable[[bytes], bytes]] = {
    "": bytes,
    ".gz": gzip.compress,
    ".bz2": bz2.compress,
    ".xz": lzma.compress,
    ".zst": zstandard.ZstdCompressor(write_checksum=True).compress,
}
packed = pytest.mark.parametrize("suffix", [".gz", ".bz2", ".xz", ".zst"])
TEXTS = ["first", "", "naïve 漢字 😀", 'quote " and \\ and \n', "last"]


def jsonl(texts: list[str], key: str = "text") -> bytes:
    return b"".join(json.dumps({"id": 1, key: text}).encode() + b"\n" for text in texts)


def spoil_checksum(data: bytes, suffix: str) -> bytes:
    n_bytes = 4 if suffix == ".zst" else 8
    return data[:-n_bytes] + bytes(byte ^ 255 for byte in data[-n_bytes:])


def read(path: Path, key: str = "text") -> tuple[list[str], list[Fault]]:
    batches = list(read_documents(Segment(path, 0, path.stat().st_size), key))
    texts = [text for batch in batches for text in batch.texts]
    return texts, [fault for batch in batches for fault in batch.faults]


def read_bytes(folder: Path, data: bytes, name: str = "a.jsonl") -> tuple[list[str], list[Fault]]:
    path = folder / name
    path.write_bytes(data)
    return read(path)


@pytest.mark.parametrize("suffix", COMPRESS)
def test_every_compression_gives_the_same_documents(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"a.jsonl{suffix}"
    # Two frames, as `cat a.gz b.gz` writes, and documents far larger than a chunk.
    texts = [*TEXTS, "x" * 9_000_000, "end"]
    path.write_bytes(COMPRESS[suffix](jsonl(texts[:3])) + COMPRESS[suffix](jsonl(texts[3:])))
    assert read(path) == (texts, [])
    consumed = sum(b.n_bytes for b in read_documents(Segment(path, 0, path.stat().st_size), "text"))
    assert consumed == path.stat().st_size


@pytest.mark.parametrize("suffix", COMPRESS)
def test_a_text_file_is_one_document(tmp_path: Path, suffix: str) -> None:
    data = COMPRESS[suffix](b"\xef\xbb\xbfone\r\ntwo\n")
    assert read_bytes(tmp_path, data, f"a.txt{suffix}") == (["one\r\ntwo\n"], [])


@pytest.mark.parametrize(
    "data",
    [
        b'\xef\xbb\xbf{"text": "a"}\n{"text": "b"}\n',
        b'{"text": "a"}\r\n{"text": "b"}\r\n',
        b'\n \t\r\n{"text": "a"}\n\n{"text": "b"}',
        b'{"text": "a", "score": NaN}\n{"other": "\\ud800", "text": "b"}\n',
        b'{"text": "first", "text": "a"}\n{"text": "b"}\n',
    ],
    ids=["byte order mark", "CRLF", "blank lines", "loose JSON", "last of two keys"],
)
def test_what_python_accepts_is_accepted(tmp_path: Path, data: bytes) -> None:
    assert read_bytes(tmp_path, data) == (["a", "b"], [])


NO_KEY = 'no key "text"; the keys are: '
FAULTS = [
    (b'{"txt": "a", "n": 1}', "missing key", f"{NO_KEY}txt, n", '"txt"'),
    (b'{"text.a": {"text": 1}}', "missing key", f"{NO_KEY}text.a", 'did you mean "text.a"?'),
    (b"{}", "missing key", f"{NO_KEY}none", "--json-key"),
    (b'{"text": null}', "not a string", '"text" is null', "fix"),
    (b'{"text": 12}', "not a string", '"text" is 12', "fix"),
    (b'{"text": "a"', "malformed JSON", "Expecting ',' delimiter", "one JSON"),
    (b'{"text": "a"} {"text": "b"}', "malformed JSON", "Extra data", "one JSON object per line"),
    (b'["a"]', "malformed JSON", 'a JSON object, found ["a"]', '{"text": "..."}'),
    (b'{"text": "a\xff"}', "invalid UTF-8", "byte 45 (0xff)", "UTF-8"),
    (b'{"text": "a\\ud800"}', "lone surrogate", r"\ud800 at character 1", "half"),
]


@pytest.mark.parametrize(("line", "kind", "detail", "hint"), FAULTS)
@pytest.mark.parametrize("suffix", ["", ".zst"])
def test_a_bad_line_is_named(
    tmp_path: Path, suffix: str, line: bytes, kind: str, detail: str, hint: str
) -> None:
    good = b'{"text": "good"}\n'
    data = COMPRESS[suffix](good + good + line + b"\n" + good)
    texts, faults = read_bytes(tmp_path, data, f"a.jsonl{suffix}")
    assert texts == ["good"] * 3
    assert [(fault.kind, fault.position) for fault in faults] == [(kind, 3)]
    assert detail in faults[0].detail
    assert hint in faults[0].hint


def test_the_byte_of_invalid_utf8_counts_the_byte_order_mark(tmp_path: Path) -> None:
    _, (line,) = read_bytes(tmp_path, b'\xef\xbb\xbf{"text": "\xff"}\n')
    assert "byte 13 (0xff)" in line.detail
    _, (text,) = read_bytes(tmp_path, b"abc\xe9", "a.txt")
    assert "byte 3 (0xe9)" in text.detail


@pytest.mark.parametrize("name", ["a.txt", "a b.jsonl"])
@pytest.mark.parametrize("encoding", ["latin-1", "cp1252", "utf-16"])
def test_the_hint_converts_other_encodings(tmp_path: Path, name: str, encoding: str) -> None:
    text = "na\u00efve" + (" \u201cquoted\u201d" if encoding == "cp1252" else "")
    path = tmp_path / name
    content = text if name == "a.txt" else json.dumps({"text": text}, ensure_ascii=False)
    path.write_text(content, encoding=encoding)
    command = read(path)[1][0].hint.partition(": ")[2]
    assert command.startswith("iconv -f ")
    if shutil.which("iconv"):
        subprocess.run(["sh", "-c", command], check=True)
        assert read(path) == ([text], [])


def test_a_document_too_long_for_memory_is_passed_over(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    with path.open("wb") as file:
        file.write(b'{"text": "a"}\n<')
        file.truncate(2 * MAX_DOCUMENT_BYTES)  # a hole in the file costs no disk
        file.seek(0, 2)
        file.write(b'\n{"text": "b\xff"}\n{"text": "b"}\n')
    assert peak_bytes(lambda: read(path)) < 1.2 * MAX_DOCUMENT_BYTES
    texts, (long, bad) = read(path)
    assert texts == ["a", "b"]
    assert (long.kind, long.position, bad.kind, bad.position) == ("too long", 2, "invalid UTF-8", 3)
    assert (
        f"has {2 * MAX_DOCUMENT_BYTES - 14:,} bytes; a document may have 33,554,432" in long.detail
    )
    assert long.raw == b"<" + bytes(2**16 - 1)
    assert f"byte {2 * MAX_DOCUMENT_BYTES + 1 + 11} " in bad.detail
    path = tmp_path / "a.txt"
    with path.open("wb") as file:
        file.truncate(2 * MAX_DOCUMENT_BYTES)
    (fault,) = read(path)[1]
    assert "the file has 67,108,864 bytes; a document may have 33,554,432" in fault.detail
    assert fault.raw == bytes(2**16)


@packed
@pytest.mark.parametrize(
    "damage", ["cut short", "last bytes cut", "checksum wrong", "rubbish after the end"]
)
def test_a_damaged_file_gives_what_comes_before(tmp_path: Path, suffix: str, damage: str) -> None:
    good, more = COMPRESS[suffix](jsonl(TEXTS)), COMPRESS[suffix](jsonl(["never complete"]))
    data = {
        "cut short": good + more[: len(more) // 2],
        "rubbish after the end": good + b"rubbish!" * 9,
        "last bytes cut": good[:-3],
        "checksum wrong": spoil_checksum(good, suffix),
    }[damage]
    texts, faults = read_bytes(tmp_path, data, f"a.jsonl{suffix}")
    assert texts == TEXTS
    assert faults[-1].kind == "damaged file"
    assert f"the file is damaged after document {len(texts)}" in faults[-1].detail
    assert "fetch or make the file again" in faults[-1].hint


@packed
def test_a_file_named_after_another_format_is_explained(tmp_path: Path, suffix: str) -> None:
    plain, packed = tmp_path / "a.jsonl", tmp_path / f"b.jsonl{suffix}"
    plain.write_bytes(COMPRESS[suffix](jsonl(TEXTS)))
    assert read(plain)[1][0].detail == f"the file is {suffix} data, which its name does not say"
    assert read(plain)[1][0].hint == f"add {suffix} to its name"
    packed.write_bytes(jsonl(TEXTS))
    (fault,) = read(packed)[1]
    assert f"the file is not {suffix} data, despite its name: it begins with b'{{" in fault.detail


@packed
@pytest.mark.parametrize("n_sound", [0, 1])
def test_no_line_behind_a_garbled_one_is_good_in_a_damaged_file(
    tmp_path: Path, suffix: str, n_sound: int
) -> None:
    # What a flipped byte does to the text is up to the compression: here it spoils one line.
    texts = [hashlib.sha256(bytes([n])).hexdigest() for n in range(200)]
    sound = COMPRESS[suffix](b"bad\n" + jsonl(texts)) * n_sound
    frame = COMPRESS[suffix](jsonl(texts[:120]) + b"garbled\n" + jsonl(texts[121:]))
    path = tmp_path / f"a.jsonl{suffix}"
    path.write_bytes(sound + spoil_checksum(frame, suffix))
    found, faults = read(path)
    assert found == texts * n_sound + texts[:120]
    assert [fault.kind for fault in faults] == ["malformed JSON"] * n_sound + ["damaged file"]
    assert "earlier ones may have wrong characters" in faults[-1].detail
    # Cut short, all that is there is right.
    path.write_bytes(sound + frame[:-3])
    assert read(path)[0] == texts * n_sound + texts[:120] + texts[121:]


@pytest.mark.parametrize("unit_bytes", [1, 7, 64, 100, 1000, 10**6])
def test_units_hold_every_line_once(tmp_path: Path, unit_bytes: int) -> None:
    path = tmp_path / "a.jsonl"
    texts = [str(n) * (n % 50) for n in range(100)]
    path.write_bytes(jsonl(texts).removesuffix(b"\n"))
    small = [tmp_path / f"{n}.txt" for n in range(3)]
    for file, data in zip(small, (b"", b"text", b"text"), strict=True):
        file.write_bytes(data)
    units = split_into_units([(file, file.stat().st_size) for file in (path, *small)], unit_bytes)
    segments = [segment for unit in units for segment in unit]
    read_texts = [t for s in segments for batch in read_documents(s, "text") for t in batch.texts]
    assert read_texts == [*texts, "", "text", "text"]
    lines = [batch.n_lines for s in segments for batch in read_documents(s, "text")]
    assert sum(lines) == 103
    assert (len(units) == 1, len(units) > 20) == (unit_bytes == 10**6, unit_bytes < 1000)


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    segment = Segment(tmp_path / "gone.jsonl", 0, 10)
    with pytest.raises(DataError, match=r"gone.jsonl cannot be read: No such file") as caught:
        list(read_documents(segment, "text"))
    assert "check that the file is there" in caught.value.hint


@pytest.mark.parametrize("depth", [100, 975, 1500, 100_000])
def test_deep_nesting_is_a_fault_and_no_crash(tmp_path: Path, depth: int) -> None:
    deep = b'{"text": ' + b"[" * depth + b"]" * depth + b"}\n"
    texts, faults = read_bytes(tmp_path, deep + b'{"text": "good"}\n')
    assert texts == ["good"]
    assert [fault.position for fault in faults] == [1]


@pytest.mark.parametrize("suffix", COMPRESS)
@pytest.mark.parametrize("data", [b"", b"\n\n\n", b" \t\r\n\n  "])
def test_empty_files_and_blank_lines_hold_nothing(tmp_path: Path, suffix: str, data: bytes) -> None:
    assert read_bytes(tmp_path, COMPRESS[suffix](data), f"a.jsonl{suffix}") == ([], [])
    assert read_bytes(tmp_path, b"", "a.jsonl.gz") == ([], [])


@packed
@pytest.mark.parametrize("n_zeros", [1, 2, 3, 5, 200_000])
def test_zero_bytes_may_stand_behind_a_frame(tmp_path: Path, suffix: str, n_zeros: int) -> None:
    name = f"a.jsonl{suffix}"
    frame, zeros = COMPRESS[suffix](jsonl(["a"])), bytes(n_zeros)
    assert read_bytes(tmp_path, frame + zeros + frame + zeros, name) == (["a", "a"], [])
    assert [fault.kind for fault in read_bytes(tmp_path, zeros, name)[1]] == ["damaged file"]


@pytest.mark.parametrize("with_checksum", [False, True])
@pytest.mark.parametrize("with_size", [False, True])
def test_every_part_of_a_zst_file_is_read(
    tmp_path: Path, with_size: bool, with_checksum: bool
) -> None:
    path = tmp_path / "a.txt.zst"
    compressor = zstandard.ZstdCompressor(
        write_checksum=with_checksum, write_content_size=with_size
    )
    # Blocks of text, of noise, of one byte repeated, and none; a frame that says it holds no data.
    texts = ["naïve", hashlib.shake_128(b"").hexdigest(300_000), "x" * 10**6, "", "y" * 2**16]
    skipped = b"\x5a\x2a\x4d\x18" + (100_000).to_bytes(4, "little") + b"?" * 100_000
    frames = [compressor.compress(text.encode()) for text in texts]
    path.write_bytes(skipped + b"".join(frames) + skipped)
    assert read(path) == (["".join(texts)], [])
    # Cut anywhere, in the magic numbers, headers and checksums too, it is damaged.
    for n_bytes in range(1, len(frames[0])):
        path.write_bytes(frames[0][:n_bytes])
        assert [fault.kind for fault in read(path)[1]] == ["damaged file"]


@packed
def test_a_bomb_is_a_damaged_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, suffix: str
) -> None:
    path = tmp_path / f"a.jsonl{suffix}"
    path.write_bytes(COMPRESS[suffix](b'{"text": "good"}\n' + b"x" * 2**24))
    assert read(path)[0] == ["good"]
    monkeypatch.setattr(blocks, "_BOMB_BYTES", 2**23)
    _, faults = read(path)
    assert [fault.kind for fault in faults] == ["damaged file"]
    assert "it unpacks to more than 500 times its size" in faults[0].detail


@packed
def test_memory_does_not_grow_with_what_a_chunk_unpacks_to(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"a.jsonl{suffix}"
    data = b"\n" * 2**25
    # An .xz file says how much memory its dictionary takes; the least is 64 KiB.
    path.write_bytes(lzma.compress(data, preset=0) if suffix == ".xz" else COMPRESS[suffix](data))

    def sizes() -> list[int]:
        return [len(block) for block, _ in blocks.read_blocks(Segment(path, 0, 1))]

    assert sum(sizes()) == 2**25
    assert peak_bytes(sizes) < 4 * blocks.BLOCK_BYTES


@pytest.mark.parametrize("suffix", ["", ".gz", ".bz2", ".xz", ".zst"])
@pytest.mark.parametrize("format", [".jsonl", ".txt"])
def test_a_failing_disk_is_no_damaged_file(tmp_path: Path, format: str, suffix: str) -> None:
    path = tmp_path / f"a{format}{suffix}"
    path.symlink_to("/proc/self/mem")  # its first byte gives an input/output error
    with pytest.raises(DataError, match="cannot be read: Input/output error"):
        list(read_documents(Segment(path, 0, 10), "text"))


@pytest.mark.parametrize(
    ("data", "filter_of_jq"),
    [
        (b'[{"text": "a"}, {"text": "b"}]', "'.[]'"),
        (b'[\n  {"text": "a"}\n]\n', "'.[]'"),
        (b'{\n  "text": "a"\n}\n', "."),
    ],
)
def test_other_json_can_be_converted(tmp_path: Path, data: bytes, filter_of_jq: str) -> None:
    _, (fault, *_) = read_bytes(tmp_path, data, "a b.json")
    command = f"jq -c {filter_of_jq} '{tmp_path}/a b.json' > '{tmp_path}/a b.lines.jsonl'"
    assert fault.hint == f"write one JSON object per line: {command}"


@pytest.mark.parametrize("block_bytes", [1, 3, 7, 2**20])
@pytest.mark.parametrize("name", ["a.txt", "a.txt.gz", "a.jsonl"])
def test_documents_are_split_on_a_mark(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, block_bytes: int
) -> None:
    monkeypatch.setattr(blocks, "BLOCK_BYTES", block_bytes)
    text = "<>one<>naïve 漢\n<><> \n<>two<<>>three<"
    path = tmp_path / name
    data = json.dumps({"text": text, "set": "web"}) if name == "a.jsonl" else f"\ufeff{text}"
    path.write_bytes(COMPRESS[".gz" if name.endswith(".gz") else ""](data.encode()))
    batches = list(read_documents(Segment(path, 0, path.stat().st_size), "text", ["set"], "<>"))
    texts = [each for batch in batches for each in batch.texts]
    sets = [each for batch in batches for each in batch.fields["set"]]
    assert texts == ["one", "naïve 漢\n", "two<", ">three<"]
    assert sets == ["web" if name == "a.jsonl" else ""] * len(texts)
    assert sum(batch.n_bytes for batch in batches) == path.stat().st_size


@pytest.mark.parametrize("name", ["a.txt", "a.tar.gz"])
def test_text_with_nul_bytes_is_a_fault(tmp_path: Path, name: str) -> None:
    path, data = tmp_path / name, b"ends in zeros, as after a loss of power" + bytes(600)
    path.write_bytes(COMPRESS[".gz" if name.endswith(".gz") else ""](data))
    (batch,) = read_documents(Segment(path, 0, path.stat().st_size), "text")
    assert batch.texts == []
    assert [fault.detail for fault in batch.faults] == ["byte 39 is NUL, which no plain text has"]


def test_faults_between_marks_are_placed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (documents, batch_module):
        monkeypatch.setattr(module, "MAX_DOCUMENT_BYTES", 100_000)
    monkeypatch.setattr(blocks, "BLOCK_BYTES", 30_000)
    path = tmp_path / "a.txt"
    path.write_bytes(b"good<>" + b"x" * 400_000 + b"<>bad \xff<>" + b"y" * 90_000 + b"<>end")
    batches = list(read_documents(Segment(path, 0, path.stat().st_size), "text", (), "<>"))
    assert [each for batch in batches for each in batch.texts] == ["good", "y" * 90_000, "end"]
    long, bad = (fault for batch in batches for fault in batch.faults)
    assert long.detail == "the file has 400,000 bytes; a document may have 100,000"
    assert bad.detail == "byte 400012 (0xff) is not valid UTF-8"
