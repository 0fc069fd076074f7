"""What the record of a corpus counts: steps, groups and outputs, with nothing lost between."""

from __future__ import annotations

import json
from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pyarrow
import pyarrow.parquet
import pytest

from trainyard.config.corpus import Corpus
from trainyard.corpus.preparation.prepare import prepare
from trainyard.corpus.sources.files import find_files
from trainyard.data.indexed import IndexedDataset
from trainyard.data.sidecar import GroupCount, Sidecar, StepCount
from trainyard.data.tokenizer import load_tokenizer
from trainyard.errors import DataError, printable

PROSE = "the cat sat on the mat with another cat in the hat and that was all of it"
STEPS: list[dict[str, Any]] = [
    {"kind": "keep", "field": "meta.set", "values": ["books", "web"]},
    {"kind": "normalize"},
    {"kind": "length", "min_characters": 3, "max_characters": 200},
    {
        "kind": "quality",
        "min_words": 2,
        "stop_words": [],
        "min_punctuated_line_share": 0.0,
        "max_lines_per_word": 1.0,
        "max_short_line_share": 1.0,
    },
    {"kind": "deduplicate"},
    {"kind": "near_deduplicate", "words": 2},
]


def document(text: str, group: str | None = "web") -> dict[str, Any]:
    return {"text": text, "meta": {"set": group}}


def distinct(number: int) -> str:
    """Prose like no other number's."""
    return " ".join(f"word{number}x{place} and" for place in range(8))


# Every way through the steps, in two files that have documents in common.
FILES = [
    [document(distinct(n), ["books", "web"][n % 2]) for n in range(10)]
    + [document(PROSE), document(PROSE, "code"), document(PROSE, None), {"text": "none"}]
    + [document("x" * 300), document("  a "), document("1234 5678 9012"), document("one#two")]
    + [document(PROSE), document(PROSE + "!"), document("the\r\ncat\x00 sat")],
    [document(distinct(n), "books") for n in range(5, 15)]
    + [document("the\ncat sat"), document(PROSE.upper(), "books"), document(PROSE, "web")]
    # Each shares one band with another document: the last, and the fourth.
    + [document(distinct(4)[:-5]), document(distinct(3)[:-15])],
]


@pytest.fixture
def corpus(tmp_path: Path, tokenizer_folder: Path) -> Corpus:
    (tmp_path / "in").mkdir()
    for number, documents in enumerate(FILES):
        lines = [json.dumps(one).encode() for one in documents]
        (tmp_path / f"in/{number}.jsonl").write_bytes(b"\n".join([*lines, b"bad", b"[]"]))
    values = {
        "inputs": [str(tmp_path / "in")],
        "output": str(tmp_path / "out"),
        "tokenizer": str(tokenizer_folder),
        "count_by": "meta.set",
        "steps": STEPS,
    }
    return Corpus.model_validate(values)


def run(corpus: Corpus, **values: Any) -> list[Sidecar]:
    changed = Corpus.model_validate({**corpus.model_dump(), **values})
    return prepare(changed, on_error="quarantine", unit_bytes=400, overwrite=True)


def check_counts(sidecar: Sidecar, prefix: str) -> None:
    """Compares every count of a record with its neighbours and its token files."""
    steps = sidecar.steps
    for step in steps:
        assert step.documents_in - sum(step.dropped.values()) == step.documents_out
    for before, after in pairwise(steps):
        assert (before.documents_out, before.bytes_out) == (after.documents_in, after.bytes_in)
    assert (steps[-1].documents_out, steps[-1].bytes_out) == (sidecar.documents, sidecar.text_bytes)
    dataset = IndexedDataset(prefix)
    assert len(dataset.document_indices) - 1 == sidecar.documents
    assert (len(dataset), dataset.n_tokens) == (sidecar.sequences, sidecar.tokens)
    assert sidecar.documents == sidecar.sequences + sidecar.empty_documents
    if sidecar.groups:
        groups = list(sidecar.groups.values())
        assert sum(group.documents for group in groups) == sidecar.documents
        assert sum(group.text_bytes for group in groups) == sidecar.text_bytes
        assert sum(group.tokens for group in groups) == sidecar.tokens


def read_texts(corpus: Corpus, prefix: str) -> list[str]:
    dataset, tokenizer = IndexedDataset(prefix), load_tokenizer(Path(corpus.tokenizer))
    return [tokenizer.decode(dataset.tokens(index)[:-1]) for index in range(len(dataset))]


def test_every_step_counts_what_it_did(corpus: Corpus, tmp_path: Path) -> None:
    prefix = str(tmp_path / "out_text_document")
    sidecar = run(corpus)[0]
    check_counts(sidecar, prefix)
    assert [step.kind for step in sidecar.steps] == ["read", *[s["kind"] for s in STEPS]]
    dropped = {step.kind: step.dropped for step in sidecar.steps}
    assert dropped == {
        "read": {"malformed JSON": 4},
        "keep": {"not kept: meta.set": 3},
        "normalize": {},
        "length": {"too long": 1, "too short": 1},
        "quality": {"too few letters": 1, "too few words": 1},
        "deduplicate": {"repeats an earlier document": 5 + 1 + 1 + 1},
        "near_deduplicate": {"repeats an earlier document": 2 + 1 + 1},
    }
    assert sidecar.steps[0].documents_in == sum(map(len, FILES)) + 4
    kept = [*[distinct(n) for n in range(10)], PROSE, "the\ncat sat"]
    assert read_texts(corpus, prefix) == [*kept, *[distinct(n) for n in range(10, 15)]]
    assert {name: group.documents for name, group in sidecar.groups.items()} == {
        "books": 5 + 5,
        "web": 5 + 2,
    }


@pytest.mark.parametrize("steps", [[], STEPS[:4], STEPS[4:], STEPS[:1], STEPS])
@pytest.mark.parametrize("files_per_output", [0, 1])
def test_counts_add_up(
    corpus: Corpus, tmp_path: Path, steps: list[dict[str, Any]], files_per_output: int
) -> None:
    sidecars = run(corpus, steps=steps, files_per_output=files_per_output)
    names = ["out_00", "out_01"] if files_per_output else ["out"]
    assert len(sidecars) == len(names)
    for name, sidecar in zip(names, sidecars, strict=True):
        check_counts(sidecar, str(tmp_path / f"{name}_text_document"))


def test_several_outputs_are_one_corpus(corpus: Corpus, tmp_path: Path) -> None:
    whole = run(corpus)[0]
    parts = run(corpus, files_per_output=1)
    prefixes = [tmp_path / f"out_0{number}_text_document" for number in range(2)]
    tokens = b"".join(Path(f"{prefix}.bin").read_bytes() for prefix in prefixes)
    assert tokens == (tmp_path / "out_text_document.bin").read_bytes()
    total = [StepCount(kind=step.kind) for step in whole.steps]
    for number, (part, prefix) in enumerate(zip(parts, prefixes, strict=True)):
        name = f"{number}.jsonl"
        assert [Path(source.path).name for source in part.sources] == [name]
        for count, more in zip(total, part.steps, strict=True):
            count.add(more)
        places = [place.split(":")[0].rpartition("/")[2] for place in part.quarantined_places]
        assert places == [name] * 2
        aside = Path(f"{prefix}.quarantine.jsonl").read_bytes().splitlines()
        found = [msgspec.json.decode(line) for line in aside]
        first = len(FILES[number]) + 1
        assert [(one["position"], one["raw"]) for one in found] == [
            (first, "bad"),
            (first + 1, "[]"),
        ]
    assert total == whole.steps
    assert sum(part.documents for part in parts) == whole.documents
    assert sum((Counter(part.quarantined) for part in parts), Counter()) == whole.quarantined


def test_units_of_any_size_make_the_same_counts(corpus: Corpus) -> None:
    records = [
        prepare(corpus, on_error="quarantine", unit_bytes=unit_bytes, overwrite=True)[0]
        for unit_bytes in (1, 300, 10**6)
    ]
    for name in ("steps", "groups", "quarantined_places", "tokens"):
        one, two, three = (getattr(record, name) for record in records)
        assert one == two == three
    assert len({record.idx.size_bytes for record in records}) == 1


def test_groups_of_parquet_and_of_files_without_metadata(corpus: Corpus, tmp_path: Path) -> None:
    table = pyarrow.table({"text": ["cat", "the hat", "", "mat"], "n": [1, 2, 2, None]})
    pyarrow.parquet.write_table(table, tmp_path / "in/2.parquet")
    (tmp_path / "in/3.txt").write_bytes(b"hat")
    inputs = [str(tmp_path / "in" / name) for name in ("2.parquet", "3.txt")]
    sidecar = run(corpus, inputs=inputs, count_by="n", steps=[])[0]
    tokens = load_tokenizer(Path(corpus.tokenizer)).encode_batch(["cat", "the hat", "mat", "hat"])
    one, two, mat, hat = (int(length) + 1 for length in tokens[1])
    assert sidecar.groups == {
        "": GroupCount(2, 6, mat + hat),
        "1": GroupCount(1, 3, one),
        "2": GroupCount(2, 7, two),
    }
    assert list(sidecar.groups) == ["", "1", "2"]
    sidecar = run(corpus, inputs=inputs, json_key="n", steps=[], count_by="")[0]
    assert sidecar.quarantined == {"not a string": 4}
    sidecar = run(corpus, inputs=inputs, json_key="no", steps=[], count_by="")[0]
    assert sidecar.quarantined == {"missing key": 4}
    assert (sidecar.steps[0].documents_in, sidecar.steps[0].documents_out) == (5, 1)


def test_a_text_with_everything_in_it(corpus: Corpus, tmp_path: Path) -> None:
    text = "\ufeffthe\r\ncat <|endoftext|> ﬁ e\u0301 \x07\u2028 漢字 😀 \u200d naïve\t\x00" + PROSE
    (tmp_path / "in/0.jsonl").write_text(json.dumps(document(text)) + "\n")
    inputs = [str(tmp_path / "in/0.jsonl")]
    steps = [{"kind": "normalize", "form": "NFKC"}, *STEPS[2:]]
    sidecar = run(corpus, inputs=inputs, steps=steps)[0]
    clean = "the\ncat <|endoftext|> fi é \n 漢字 😀 \u200d naïve\t" + PROSE
    prefix = str(tmp_path / "out_text_document")
    assert read_texts(corpus, prefix) == [clean]
    assert sidecar.text_bytes == len(clean.encode())
    assert sidecar.steps[1].bytes_in == len(text.encode())
    check_counts(sidecar, prefix)


ODD = ["a b.jsonl", "quote'\".jsonl", "new\nli\x1bne.jsonl", "[1]*?.jsonl", "漢.jsonl"]


@pytest.mark.parametrize("name", ODD)
def test_files_may_have_any_name(corpus: Corpus, tmp_path: Path, name: str) -> None:
    file = tmp_path / "odd" / name
    file.parent.mkdir()
    file.write_bytes(b'bad\n{"text": "cat"}\n')
    (file.parent / "1x.jsonl").touch()  # what one of the names would be the pattern of
    assert file in find_files([str(file.parent)])
    output = str(tmp_path / f"odd-{file.stem}")
    sidecar = run(corpus, inputs=[str(file)], output=output, steps=[])[0]
    assert sidecar.documents == 1
    assert [source.path for source in sidecar.sources] == [str(file)]
    assert sidecar.quarantined_places[0].startswith(f"{printable(str(file))}:1: ")
    assert not Path(f"{output}.work").exists()


def test_the_output_may_not_lie_among_the_inputs(corpus: Corpus, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"the output folder .*/in is inside the input folder"):
        run(corpus, output=str(tmp_path / "in/out"), steps=[])


def test_fewer_outputs_replace_all_of_the_old(corpus: Corpus, tmp_path: Path) -> None:
    run(corpus, files_per_output=1)
    run(corpus, files_per_output=2)
    assert not list(tmp_path.glob("out_01*"))


def test_an_empty_corpus_of_several_outputs_is_refused(corpus: Corpus, tmp_path: Path) -> None:
    run(corpus, files_per_output=1)
    before = {path: path.read_bytes() for path in tmp_path.glob("out*")}
    steps = [{"kind": "length", "min_characters": 10**6}]
    with pytest.raises(DataError, match=r"the corpus is empty: .*length dropped 36: too short"):
        run(corpus, files_per_output=1, steps=steps)
    assert {path: path.read_bytes() for path in tmp_path.glob("out*")} == before


def test_one_of_several_outputs_may_be_empty(corpus: Corpus, tmp_path: Path) -> None:
    (tmp_path / "in/0.jsonl").write_bytes(b"\n")
    sidecars = run(corpus, files_per_output=1)
    assert [sidecar.documents > 0 for sidecar in sidecars] == [False, True]
    dataset = IndexedDataset(tmp_path / "out_00_text_document")
    assert np.array_equal(dataset.document_indices, [0])
