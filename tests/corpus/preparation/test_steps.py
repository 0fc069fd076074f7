"""Tests of the steps that look at one document: what they drop, change and count."""

from __future__ import annotations

import json
import sysconfig
import unicodedata
from collections import Counter
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainyard.config.corpus import DocumentStep, Keep, LengthLimits, Normalize, Quality
from trainyard.corpus.preparation.steps import (
    ALONE,
    KEPT,
    LETTER,
    SPACE,
    WORD,
    apply_steps,
    code_points,
    count_bytes,
    kinds_of,
    normalize,
    quality_fault,
)
from trainyard.data.sidecar import StepCount

PROSE = {
    "English": "The quick brown fox jumps over the lazy dog, and nobody knows why it does so.",
    "German": "Zwölf Boxkämpfer jagen Viktor quer über den großen Sylter Deich.",
    "Russian": "Съешь же ещё этих мягких французских булок, да выпей чаю.",
    "Hindi": "सभी मनुष्य जन्म से स्वतंत्र तथा मर्यादा और अधिकारों में समान होते हैं।",
    "Arabic": "يولد جميع الناس أحرارا متساوين في الكرامة والحقوق.",
    "Korean": "모든 인간은 태어날 때부터 자유로우며 그 존엄과 권리에 있어 동등하다.",
}


def apply(
    steps: list[DocumentStep], texts: list[str], fields: dict[str, list[str]] | None = None
) -> tuple[list[str], dict[str, list[str]], list[StepCount]]:
    counts = [StepCount(kind=step.kind) for step in steps]
    sizes = [count_bytes(text) for text in texts]
    texts, fields, _ = apply_steps(steps, texts, fields or {}, sizes, counts)
    return texts, fields, counts


def off(rule: str) -> object:
    """The value of a rule of quality that nothing breaks."""
    if rule == "stop_words" or rule.endswith("_n_gram_shares"):
        return ()
    if rule.startswith("max_"):
        return 1.0 if rule.endswith("_share") else 1e9
    return 0 if rule.startswith("min_") else True


def quality(**rules: Any) -> Quality:
    """Quality with every rule off but those given."""
    values = {rule: off(rule) for rule in Quality.model_fields if rule != "kind"}
    return Quality.model_validate({"kind": "quality", **values, **rules})


def test_documents_pass_the_steps_in_order_and_are_counted() -> None:
    steps: list[DocumentStep] = [
        Keep(kind="keep", field="set", values=("web", "books")),
        Normalize(kind="normalize"),
        LengthLimits(kind="length", min_characters=3, max_characters=5),
    ]
    texts = ["dropped", "e\u0301\r\n\0a\ufeff", "  ab  ", "too long", "é漢字"]
    fields = {"set": ["code", "web", "books", "web", "web"], "id": ["1", "2", "3", "4", "5"]}
    left, left_fields, counts = apply(steps, texts, fields)
    assert left == ["é\na", "é漢字"]
    assert left_fields == {"set": ["web", "web"], "id": ["2", "5"]}
    assert [count.samples for count in counts] == [
        {"not kept: set": ["dropped"]},
        msgspec.UNSET,
        {"too short": ["  ab  "], "too long": ["too long"]},
    ]
    assert [msgspec.structs.astuple(count)[:-1] for count in counts] == [
        ("keep", 5, 4, 7 + 10 + 6 + 8 + 8, 10 + 6 + 8 + 8, {"not kept: set": 1}, {}),
        ("normalize", 4, 4, 32, 4 + 6 + 8 + 8, {}, {}),
        ("length", 4, 2, 26, 12, {"too short": 1, "too long": 1}, {}),
    ]


def test_counts_add_up_over_batches() -> None:
    step = LengthLimits(kind="length", min_characters=2)
    count = StepCount(kind="length")
    for texts in (["a", "bc"], [], ["", "de"]):
        apply_steps([step], texts, {}, [len(text) for text in texts], [count])
    assert (count.documents_in, count.documents_out, count.dropped) == (4, 2, {"too short": 2})
    other = StepCount(kind="length")
    apply_steps([step], ["xx", "y", *"zuv"], {}, [2, 1, 1, 1, 1], [other])
    total = StepCount(kind="length")
    for each in (count, other):
        total.add(each)
    assert total.samples == {"too short": ["a", "", "y"]}
    assert total.dropped == {"too short": 6}
    assert other.samples == {"too short": ["y", "z", "u"]}


@pytest.mark.parametrize(
    ("text", "nfc", "nfkc"),
    [
        ("plain\ttext\n", "plain\ttext\n", "plain\ttext\n"),
        ("a\r\nb\rc\n\rd", "a\nb\nc\n\nd", "a\nb\nc\n\nd"),
        ("a\x0bb\x0cc\x85d\u2028e\u2029f", "a\nb\nc\nd\ne\nf", "a\nb\nc\nd\ne\nf"),
        ("\ufeffbell\x07 nul\x00 del\x7f c1\x9f", "bell nul del c1", "bell nul del c1"),
        ("e\x00\u0301", "é", "é"),
        ("\ufb01ne \uff11 \u2460", "\ufb01ne \uff11 \u2460", "fine 1 1"),
        ("می\u200cروم 👩\u200d🚀 ភា\u200bសា", "می\u200cروم 👩\u200d🚀 ភា\u200bសា", None),
    ],
    ids=["plain", "CR", "line ends", "controls", "accent after NUL", "compatible", "zero width"],
)
def test_normalize(text: str, nfc: str, nfkc: str | None) -> None:
    assert normalize(text, Normalize(kind="normalize")) == nfc
    assert normalize(text, Normalize(kind="normalize", form="NFKC")) == (
        nfc if nfkc is None else nfkc
    )


@given(st.text(), st.sampled_from(["NFC", "NFKC"]))
def test_normalizing_twice_changes_nothing_more(text: str, form: str) -> None:
    step = Normalize.model_validate({"kind": "normalize", "form": form})
    once = normalize(text, step)
    assert normalize(once, step) == once
    assert not [c for c in once if unicodedata.category(c) == "Cc" and c not in "\n\t"]


@pytest.mark.parametrize("language", PROSE)
def test_prose_of_any_script_is_kept(language: str) -> None:
    step = Quality(kind="quality", min_words=5, stop_words=())
    assert quality_fault(PROSE[language], step) == KEPT
    english = Quality(kind="quality", min_words=5)
    reason = KEPT if language == "English" else "too few stop words"
    assert quality_fault(f"{PROSE[language]} {PROSE[language]}", english) != KEPT, "it repeats"
    assert quality_fault(PROSE[language], english) == reason


# A text, a limit that it breaks, and one that it keeps to.
REPEATS = "too much in repeated"
WORDS, TWICE = "a b c d e f g a b c d e", "a b c d e f a b c d e f "
LIMITS: list[tuple[str, str, Any, Any, str]] = [
    ("min_words", " one\u3000two\xa0three\n", 4, 3, "too few words"),
    ("min_words", "", 1, 0, "too few words"),
    ("min_mean_word_length", "ab cd", 2.5, 2.0, "words too short"),
    ("min_mean_word_length", "ab cde", 2.6, 2.5, "words too short"),
    ("max_mean_word_length", "abcd abc", 3.0, 3.5, "words too long"),
    ("min_letter_share", "ab1 2é 漢3", 0.6, 0.5, "too few letters"),
    ("max_symbol_to_word_ratio", "a # b # c", 0.2, 0.4, "too many symbols"),
    ("max_symbol_to_word_ratio", "a # b ... c", 0.1, 0.2, "too many symbols"),
    ("max_symbol_to_word_ratio", "a b… c...", 0.5, 0.7, "too many symbols"),
    ("max_bullet_line_share", "• a\n - b\n\n\nc", 0.6, 0.7, "too many bullets"),
    ("max_repeated_line_share", "a\nb\n a \n\n\na", 0.4, 0.5, "too many repeated lines"),
    ("min_letter_word_share", "a = 1 2 3", 0.3, 0.25, "too few words with letters"),
    ("stop_words", "the The the.", ("the", "of"), (), "too few stop words"),
    ("stop_words", "the other of", ("the", "a"), ("the", "of"), "too few stop words"),
    ("curly_brackets", "in {this}", False, True, "curly brackets"),
    ("max_ellipsis_line_share", "a ...\nb …\n\nc", 0.6, 0.7, "too many ellipses"),
    ("min_punctuated_line_share", "a.\nb\nc", 0.4, 0.3, "too few lines end a sentence"),
    ("min_punctuated_line_share", "a\nb\nc?\n\nd\n e", 0.6, 0.5, "too few lines end a sentence"),
    ("max_short_line_share", f"{'a' * 30}\n{'b' * 31}", 0.4, 0.5, "too many short lines"),
    ("max_lines_per_word", "a b\nc\nd", 0.4, 0.5, "too many lines for its words"),
    ("max_repeated_line_character_share", "ab\ncd ef\nab", 0.2, 0.3, f"{REPEATS} lines"),
    ("max_repeated_paragraph_share", "a\nb\n\nc\n\na\nb", 0.3, 0.4, "too many repeated paragraphs"),
    ("max_repeated_paragraph_character_share", "a\n\nc\n\na", 0.3, 0.4, f"{REPEATS} paragraphs"),
    (
        "max_top_n_gram_shares",
        "a b c d a b e f",
        (0.4,),
        (0.54, 0.1),
        "one group of 2 words too often",
    ),
    ("max_top_n_gram_shares", "ab ba ab ba", (0.9,), (1,), "one group of 2 words too often"),
    ("max_top_n_gram_shares", "a b c a b c d", (1, 0.8), (1, 1), "one group of 3 words too often"),
    ("max_repeated_n_gram_shares", WORDS, (0.39,), (0.42, 0.0), f"{REPEATS} groups of 5 words"),
    ("max_repeated_n_gram_shares", TWICE, (1, 0.4), (1, 0.6), f"{REPEATS} groups of 6 words"),
]


@pytest.mark.parametrize(("rule", "text", "broken", "kept", "fault"), LIMITS)
def test_quality_names_the_rule_broken(
    rule: str, text: str, broken: Any, kept: Any, fault: str
) -> None:
    assert quality_fault(text, quality(**{rule: broken})) == fault
    assert quality_fault(text, quality(**{rule: kept})) == KEPT


def test_quality_names_the_first_rule_broken() -> None:
    rules = quality(min_mean_word_length=2.0, min_letter_share=1.0)
    assert quality_fault("1 2", rules) == "words too short"
    assert quality_fault("", quality()) == KEPT


def test_quality_drops_rubbish_and_keeps_novels(shared_data: Path) -> None:
    rubbish = {
        "too few words": "Click here to continue",
        "words too short": "a b c d e " * 20,
        "words too long": "https://example.com/a-very-long-address " * 60,
        "too few letters": "12.50 (3,4) 199-99 [0] " * 30,
        "too many symbols": "read more... about #this ... topic #now " * 20,
        "too many bullets": "\n".join(f"- that item of number {'x' * n}" for n in range(20)),
        "too many repeated lines": "all of the work and no play makes nobody happy.\n" * 20,
        "too few stop words": "the king walked through his castle while rain fell. " * 9,
        "curly brackets": "the longer loop of this program is { that } near the end. " * 9,
        "one group of 2 words too often": "of those ends " * 30 + "and that is all.",
    }
    step = Quality(kind="quality")
    assert {quality_fault(text, step): text for text in rubbish.values()} == rubbish
    with (shared_data / "corpora" / "novels.jsonl").open("rb") as file:
        novels = [json.loads(line)["text"] for line, _ in zip(file, range(1000), strict=False)]
    left, _, counts = apply([step], novels)
    assert len(left) >= 998, counts


def test_quality_keeps_little_source_code() -> None:
    folder = Path(sysconfig.get_paths()["stdlib"])
    code = [path.read_text("utf-8") for path in sorted(folder.glob("*.py"))]
    left, _, counts = apply([Quality(kind="quality")], code)
    assert len(code) > 100
    assert len(left) < len(code) / 10, counts


def n_gram_shares(words: list[str], n: int) -> tuple[float, float]:
    """By hand: the share of the most frequent n words, and of repeated ones."""
    grams = [tuple(words[i : i + n]) for i in range(len(words) - n + 1)]
    inside = {
        place
        for start, gram in enumerate(grams)
        if gram in grams[:start]
        for place in range(start, start + n)
    }
    (_, most), *_ = Counter(grams).most_common(1) or [((), 0)]
    return min((most > 1) * most * n / len(words), 1), len(inside) / len(words)


@given(st.lists(st.sampled_from("abc"), min_size=1, max_size=40), st.integers(2, 10))
def test_groups_of_words_are_counted(words: list[str], n: int) -> None:
    top, repeated = n_gram_shares(words, n)
    text = " ".join(words) + " "
    shares = (1,) * (n - 2) if n < 5 else (1,) * (n - 5)
    field, share = (
        ("max_top_n_gram_shares", top) if n < 5 else ("max_repeated_n_gram_shares", repeated)
    )
    assert quality_fault(text, quality(**{field: (*shares, min(share + 1e-9, 1))})) == KEPT
    if share > 0:
        assert quality_fault(text, quality(**{field: (*shares, share - 1e-9)})) != KEPT


@given(st.text(alphabet=st.one_of(st.characters(codec="utf-8"), st.sampled_from("ab \n\t9.é漢"))))
def test_kinds_of_characters_are_those_python_names(text: str) -> None:
    for character, kinds in zip(text, kinds_of(code_points(text)).tolist(), strict=True):
        category = unicodedata.category(character)
        assert bool(kinds & LETTER) == (category[0] in "LM" and ord(character) < 0x32400)
        assert bool(kinds & WORD) == (category[0] in "LMN" and ord(character) < 0x32400)
        assert bool(kinds & SPACE) == character.isspace()
        assert not kinds & ALONE or kinds & WORD


@given(st.text(alphabet="ab \n\u3000"))
def test_words_are_those_of_split(text: str) -> None:
    n_words = len(text.split())
    assert quality_fault(text, quality(min_words=n_words)) == KEPT
    assert quality_fault(text, quality(min_words=n_words + 1)) == "too few words"
