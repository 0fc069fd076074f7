"""Tests of a published `tokenizer.json`: what decides ids, the end of a document, refusals."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.data.families import TEXTS, build_content, load_reference, put, write_folder

from trainyard.data import tokenizer as subject
from trainyard.data.tokenizer import Tokenizer, load_tokenizer
from trainyard.data.vocabulary import (
    GPT2_SPLIT,
    O200K_PATTERN,
    byte_symbols,
    load_vocabulary,
    save_vocabulary,
)
from trainyard.errors import DataError

CONFIG, MAP = "tokenizer_config.json", "special_tokens_map.json"
GENERATION = "generation_config.json"
END = "<|end_of_text|>"


@pytest.mark.parametrize(
    ("family", "files", "end"),
    [
        ("llama3", {CONFIG: {"eos_token": END}}, END),
        ("llama3", {MAP: {"eos_token": {"content": END}}}, END),
        ("llama3", {GENERATION: {"eos_token_id": 1}}, END),
        ("llama3", {CONFIG: {"eos_token": None}, GENERATION: {"eos_token_id": [1]}}, END),
        ("qwen3", {}, "<|endoftext|>"),
        ("qwen3", {CONFIG: {}, GENERATION: {"eos_token_id": None}}, "<|endoftext|>"),
    ],
)
def test_the_end_of_a_document_is_found(
    tmp_path: Path, family: str, files: dict[str, Any], end: str
) -> None:
    _write_with(tmp_path, family, files)
    for source in (tmp_path, tmp_path / "tokenizer.json"):
        vocabulary = load_vocabulary(source)
        assert vocabulary.end_of_document == end
        assert vocabulary.tokens[vocabulary.eod_id] == end
    assert load_tokenizer(tmp_path).eod_id == vocabulary.eod_id


def _without_bytes(content: Any) -> None:
    ids = content["model"]["vocab"]
    ids |= {entry["content"]: entry["id"] for entry in content["added_tokens"]}
    for symbol in (byte_symbols()[4], byte_symbols()[0xC3], "f"):
        del ids[symbol]
    merges = content["model"]["merges"]
    content["model"]["merges"] = [m for m in merges if {*m}.isdisjoint({"f", byte_symbols()[0xC3]})]


def _with_gaps(content: Any) -> None:
    ids = content["model"]["vocab"]
    for token in list(ids)[-3:]:
        ids[token] += 40
    for entry in content["added_tokens"]:
        entry["id"] += 40
    ids |= {entry["content"]: entry["id"] for entry in content["added_tokens"]}


def _with_repeated_merges(content: Any) -> None:
    content["model"]["merges"] += content["model"]["merges"][:9]


def _as_converted(content: Any) -> None:
    split = {"behavior": "Removed", "invert": True, "pattern": {"Regex": O200K_PATTERN}}
    content["pre_tokenizer"]["pretokenizers"][0] |= {"type": "Split", **split}


def _with_an_empty_normalizer(content: Any) -> None:
    content["normalizer"] = {"type": "Sequence", "normalizers": []}
    content["added_tokens"][-1]["normalized"] = True


ODD = [_without_bytes, _with_gaps, _with_repeated_merges, _as_converted, _with_an_empty_normalizer]


@pytest.mark.parametrize("family", ["smollm2", "olmo2"])
@pytest.mark.parametrize("change", ODD)
def test_an_odd_vocabulary_has_the_ids_of_the_reference(
    tmp_path: Path, family: str, change: Callable[[Any], None]
) -> None:
    content = build_content(family)
    change(content)
    tokenizer = load_tokenizer(write_folder(tmp_path, family, content))
    texts = [*TEXTS, "of\x04f Ã é 漢 for", "the\x04the", "HelloWorld isn'T", "\x04" * 3, ""]
    expected = load_reference(content).encode_batch(texts, add_special_tokens=False)
    for copy in (tokenizer, _copy(tokenizer, tmp_path / "copy")):
        for text, each in zip(texts, expected, strict=True):  # engines choose by batch
            assert copy.encode(text) == each.ids
        assert copy.encode_batch(texts)[1].tolist() == [len(each.ids) for each in expected]
    lost = [len(t.encode()) - len(tokenizer.decode(tokenizer.encode(t)).encode()) for t in texts]
    if change is _without_bytes:
        lost = [sum(t.encode().count(byte) for byte in (4, 0xC3, ord("f"))) for t in texts]
    assert [tokenizer.count_lost_bytes(text) for text in texts] == lost


def _copy(tokenizer: Tokenizer, path: Path) -> Tokenizer:
    save_vocabulary(tokenizer.vocabulary, path.with_suffix(".json"))
    return load_tokenizer(path.with_suffix(".json"))


def test_a_long_text_without_some_bytes_is_encoded_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    content = build_content("smollm2")
    _without_bytes(content)
    tokenizer = load_tokenizer(write_folder(tmp_path, "smollm2", content))
    for name, size in (("_CALL", 500), ("_LONG", 200), ("_WINDOW", 60), ("_OVERLAP", 20)):
        monkeypatch.setattr(subject, f"{name}_CHARACTERS", size)
    for text in ("the words \x04of a text " * 30, "the words a text " * 30):
        expected = load_reference(content).encode(text, add_special_tokens=False).ids
        assert tokenizer.encode(text) == expected


def test_a_tokenizer_cut_short_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    content = build_content("qwen3")
    content["model"]["merges"] = content["model"]["merges"][:50]
    load_vocabulary(write_folder(tmp_path, "qwen3", content))
    assert "no merge makes 75 of 386 tokens, so no text has them" in caplog.text


def _write_with(folder: Path, family: str, files: dict[str, Any]) -> None:
    content = build_content(family)
    first = content["added_tokens"][0]["id"]
    for name, each in {**files, "tokenizer.json": content}.items():
        found = each.get("eos_token_id")
        if found is not None:  # counted from the first added token
            shifted = [first + i for i in found] if isinstance(found, list) else first + found
            each = {**each, "eos_token_id": shifted}
        (folder / name).write_text(json.dumps(each), "utf-8")


@pytest.mark.parametrize(
    ("family", "files", "problem"),
    [
        ("llama3", {}, "one token must end a document; named are: none"),
        (
            "qwen3",
            {CONFIG: {"eos_token": "<|im_end|>"}, GENERATION: {"eos_token_id": [2, 0]}},
            "one token must end a document; named are: <|im_end|> in tokenizer_config.json, "
            "generation_config.json; <|endoftext|> in generation_config.json, tokenizer.json",
        ),
        (
            "llama3",
            {MAP: {"eos_token": "</s>"}},
            "has no token </s>, the end of a document",
        ),
        ("llama3", {GENERATION: {"eos_token_id": 9999}}, "has no token id "),
        ("llama3", {CONFIG: {"eos_token": {"id": 1}}}, "has no token None"),
    ],
)
def test_an_end_that_is_missing_or_ambiguous_is_refused(
    tmp_path: Path, family: str, files: dict[str, Any], problem: str
) -> None:
    _write_with(tmp_path, family, files)
    with pytest.raises(DataError) as caught:
        load_vocabulary(tmp_path)
    assert problem in caught.value.problem
    assert str(tmp_path) in caught.value.problem
    assert caught.value.hint


def _steps(*kinds: str) -> Callable[[Any], None]:
    steps = [{"type": kind} for kind in kinds]
    return put("pre_tokenizer", value={"type": "Sequence", "pretokenizers": steps})


def _split(**changes: object) -> Callable[[Any], None]:
    def change(content: Any) -> None:
        content["pre_tokenizer"]["pretokenizers"][0].update(changes)

    return change


def _template(*items: str) -> Callable[[Any], None]:
    single = [{item: {"id": "A", "type_id": 0}} for item in items]
    return put("post_processor", value={"type": "TemplateProcessing", "single": single})


def _with_unknown(content: Any) -> None:
    _without_bytes(content)
    content["model"]["unk_token"] = "!"


def _flag(**flags: bool) -> Callable[[Any], None]:
    return lambda content: content["added_tokens"][-1].update(flags)


def _normalize_by(*kinds: str) -> Callable[[Any], None]:
    steps = [{"type": kind} for kind in kinds]
    return put("normalizer", value={"type": "Sequence", "normalizers": steps})


def _change_two(content: Any) -> None:
    _normalize_by("NFKC")(content)
    _split(behavior="Removed")(content)


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (_change_two, ": normalizer 'NFKC'; pre_tokenizer 'Split' removes text"),
        (put("model", value={"type": "Unigram", "vocab": []}), "model.type is 'Unigram', not"),
        (put("model", value=None), "model.type is None, not 'BPE'"),
        (put("model", "byte_fallback", value=True), "model.byte_fallback is True"),
        (put("model", "end_of_word_suffix", value="</w>"), "model.end_of_word_suffix is '</w>'"),
        (_with_unknown, "model.unk_token is '!', for bytes without a token"),
        (_normalize_by("NFC", "Lowercase"), "normalizer 'Lowercase'"),
        (put("pre_tokenizer", value=None), "pre_tokenizer ends in None"),
        (_steps("Whitespace", "ByteLevel"), "pre_tokenizer 'Whitespace'"),
        (_steps("Metaspace"), "pre_tokenizer ends in 'Metaspace', not 'ByteLevel'"),
        (
            put("pre_tokenizer", value={**GPT2_SPLIT, "add_prefix_space": True}),
            "puts a space before",
        ),
        (_split(behavior="Removed", invert=True, pattern={"Regex": "a"}), "'Split' removes text"),
        (_template("Sequence", "SpecialToken"), "'TemplateProcessing' adds tokens after"),
        (put("post_processor", value={"type": "RobertaProcessing"}), "post_processor 'RobertaPro"),
        (put("decoder", value={"type": "Metaspace"}), "decoder is {'type': 'Metaspace'}, not"),
        (_flag(lstrip=True, single_word=True), "lstrip, single_word of the added token '<think>'"),
        (_flag(normalized=True), "normalized of the added token '<think>'"),
    ],
)
def test_what_is_not_supported_is_named(
    tmp_path: Path, change: Callable[[Any], None], problem: str
) -> None:
    content = build_content("qwen3")
    change(content)
    (tmp_path / "tokenizer.json").write_text(json.dumps(content), "utf-8")
    with pytest.raises(DataError) as caught:
        load_vocabulary(tmp_path)
    assert "tokenizer.json is not a supported tokenizer: " in caught.value.problem
    assert problem in caught.value.problem
    assert "Llama 3, Qwen 3 and SmolLM2 (docs/corpora.md)" in caught.value.hint
