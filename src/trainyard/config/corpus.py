"""Every option of a corpus: the fields of a data file such as `slimpajama.toml`.

    inputs = ["slimpajama/train"]
    output = "data/slimpajama"
    tokenizer = "gpt2"
    count_by = "meta.redpajama_set_name"
    files_per_output = 800

    [[steps]]
    kind = "keep"
    field = "meta.redpajama_set_name"
    values = ["RedPajamaC4", "RedPajamaWikipedia"]

    [[steps]]
    kind = "deduplicate"

Each document passes the steps in the order of the list. Deduplication comes last: it compares
documents, so the whole corpus must have passed the other steps.
"""

from __future__ import annotations

import re
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, Field, ValidationError, model_validator

from trainyard.config.load import explain_problems, parse_toml, read_settings
from trainyard.config.section import ListOf, Section
from trainyard.errors import ConfigError


def _check_key(key: str) -> str:
    """Rejects what is escaped in a line of JSON: the decoder compares keys as they are written."""
    if not key.isprintable() or '"' in key or "\\" in key:
        raise ValueError("a key must not have quotes, backslashes or control characters")
    return key


Key = Annotated[str, AfterValidator(_check_key)]


class Keep(Section):
    """Keeps documents whose metadata field has one of the given values."""

    kind: Literal["keep"]
    field: Key
    """Dotted path of the metadata, such as meta.redpajama_set_name."""
    values: ListOf[str] = Field(min_length=1)
    """Allowed values; documents with another value, or none, are dropped."""


class Normalize(Section):
    """Normalizes Unicode and line endings, and removes control characters."""

    kind: Literal["normalize"]
    form: Literal["NFC", "NFKC"] = "NFC"
    """NFC composes letters and accents; NFKC also replaces ligatures, full-width forms, ..."""


class LengthLimits(Section):
    """Drops documents that are too short or too long."""

    kind: Literal["length"]
    min_characters: int = Field(default=0, ge=0)
    """Shorter documents are dropped; leading and trailing spaces do not count."""
    max_characters: int = Field(default=0, ge=0)
    """Longer documents are dropped; 0: no limit."""


class Quality(Section):
    """Drops documents that are not English prose, by the published rules of Gopher, C4 and FineWeb.

    Gopher: Rae et al., arXiv:2112.11446, A1.1 and table A1. C4: Raffel et al., arXiv:1910.10683,
    2.2. FineWeb: Penedo et al., arXiv:2406.17557, 3.6. Words are divided by white space.

    A minimum of 0, a maximum share of 1 or an empty list turns a rule off. Other languages need
    stop_words of their own, or none. Scripts without spaces also need min_words = 0 and large
    limits for every count by words.
    """

    kind: Literal["quality"]
    min_words: int = Field(default=50, ge=0)
    """Minimum number of words (Gopher)."""
    min_mean_word_length: float = Field(default=3.0, ge=0)
    """Minimum average characters per word (Gopher)."""
    max_mean_word_length: float = Field(default=10.0, gt=0)
    """Maximum average characters per word (Gopher)."""
    min_letter_share: float = Field(default=0.6, ge=0, le=1)
    """Minimum share of letters of any script, with their marks, among non-space characters."""
    min_letter_word_share: float = Field(default=0.8, ge=0, le=1)
    """Minimum share of words that have a letter (Gopher)."""
    max_symbol_to_word_ratio: float = Field(default=0.1, ge=0)
    """Maximum number signs, or ellipses, per word (Gopher)."""
    stop_words: ListOf[str] = ("the", "be", "to", "of", "and", "that", "have", "with")
    """Words of which a document needs two (Gopher): English ones; empty: any language."""
    curly_brackets: bool = False
    """Keep documents with a curly bracket, as most source code has (C4 drops them)."""
    max_bullet_line_share: float = Field(default=0.9, ge=0, le=1)
    """Maximum share of lines that begin with a bullet (Gopher)."""
    max_ellipsis_line_share: float = Field(default=0.3, ge=0, le=1)
    """Maximum share of lines that end with an ellipsis (Gopher)."""
    min_punctuated_line_share: float = Field(default=0.12, ge=0, le=1)
    """Minimum share of lines, or of paragraphs, that end a sentence or a quotation (FineWeb)."""
    max_short_line_share: float = Field(default=0.67, ge=0, le=1)
    """Maximum share of lines of at most 30 characters (FineWeb)."""
    max_lines_per_word: float = Field(default=0.3, ge=0)
    """Maximum line feeds per word (FineWeb)."""
    max_repeated_line_share: float = Field(default=0.3, ge=0, le=1)
    """Maximum share of lines that repeat an earlier line of the document (Gopher)."""
    max_repeated_line_character_share: float = Field(default=0.1, ge=0, le=1)
    """Maximum share of characters in such lines (FineWeb; Gopher: 0.2)."""
    max_repeated_paragraph_share: float = Field(default=0.3, ge=0, le=1)
    """Maximum share of paragraphs, divided by empty lines, that repeat an earlier one (Gopher)."""
    max_repeated_paragraph_character_share: float = Field(default=0.2, ge=0, le=1)
    """Maximum share of characters in such paragraphs (Gopher)."""
    max_top_n_gram_shares: ListOf[float] = (0.20, 0.18, 0.16)
    """Maximum share of characters in the most frequent 2, 3 and 4 words in a row (Gopher)."""
    max_repeated_n_gram_shares: ListOf[float] = (0.15, 0.14, 0.13, 0.12, 0.11, 0.10)
    """Maximum share of characters in 5, 6, .. 10 words in a row that occurred before (Gopher)."""


class Deduplicate(Section):
    """Drops exact duplicates: documents whose text already occurred in the corpus."""

    kind: Literal["deduplicate"]


class NearDeduplicate(Section):
    """Drops near duplicates of earlier documents of the corpus, by MinHash signatures.

    Two documents of Jaccard similarity s match with probability 1 - (1 - s^rows)^bands.
    """

    kind: Literal["near_deduplicate"]
    words: int = Field(default=5, ge=1, le=100)
    """Words per shingle; case and punctuation are ignored."""
    bands: int = Field(default=14, ge=1)
    """More bands find more pairs, including wrong ones; each costs 8 bytes per document."""
    rows: int = Field(default=8, ge=1)
    """More rows require more similarity; 14 bands of 8 rows have their threshold at 0.72."""
    seed: int = Field(default=1, ge=0, lt=2**63)
    """Seed of the hash functions."""


DocumentStep = Keep | Normalize | LengthLimits | Quality
ComparingStep = Deduplicate | NearDeduplicate
Step = Annotated[DocumentStep | ComparingStep, Field(discriminator="kind")]


class Corpus(Section):
    """What to tokenize, and how: every setting that affects the bytes of the token files."""

    inputs: ListOf[str] = ()
    """Files, folders and globs, in document order."""
    output: str = ""
    """Path prefix of the token files."""
    tokenizer: str = ""
    """`gpt2` (included), or a folder with vocab.json and merges.txt, also named gpt2-vocab.json
    and gpt2-merges.txt, or with a tokenizer.json; empty: train one."""
    json_key: Key = "text"
    """JSON key, or Parquet or Arrow column, of the text."""
    append_eod: bool = True
    """End every document that is not empty with the end of document, such as <|endoftext|>."""
    special_tokens: Literal["text", "parse"] = "text"
    """Special tokens such as <|endoftext|> inside a document: text, or parsed as by Megatron-LM."""
    split_on: str = ""
    """Split each document wherever it has this text, such as <|endoftext|>; empty: do not split."""
    files_per_output: int = Field(default=0, ge=0)
    """Input files per pair of token files, output_00, output_01, ..; 0: one pair for all."""
    count_by: Key = ""
    """Dotted path of the metadata to count documents by; empty: no counts."""
    steps: ListOf[Step] = ()
    """Steps applied to documents before tokenization."""

    @model_validator(mode="after")
    def _names_are_of_files(self) -> Self:
        if "/" in self.json_key:
            raise ValueError("json_key: it names the token files, so it must not have a slash")
        if "\0" in self.output:
            raise ValueError("output: a path must not have a NUL character")
        return self

    @model_validator(mode="after")
    def _comparing_steps_come_last(self) -> Self:
        for first, second in pairwise(self.steps):
            if isinstance(first, ComparingStep) and not isinstance(second, ComparingStep):
                order = f"{second.kind} comes after {first.kind}"
                raise ValueError(f"steps: {order}; deduplication must come last")
        kinds = [step.kind for step in self.comparing_steps]
        if repeated := [kind for kind in kinds if kinds.count(kind) > 1]:
            raise ValueError(f"steps: {repeated[0]} is listed more than once")
        return self

    @property
    def document_steps(self) -> tuple[DocumentStep, ...]:
        """The steps that process one document at a time."""
        return tuple(step for step in self.steps if not isinstance(step, ComparingStep))

    @property
    def comparing_steps(self) -> tuple[ComparingStep, ...]:
        """The steps that compare each document with earlier ones."""
        return tuple(step for step in self.steps if isinstance(step, ComparingStep))

    @property
    def metadata_fields(self) -> tuple[str, ...]:
        """Every metadata path that a step or the counts need, once each."""
        wanted = [step.field for step in self.steps if isinstance(step, Keep)]
        return tuple(dict.fromkeys([*wanted, *filter(None, [self.count_by])]))


def load_corpus(path: Path | None, given: dict[str, Any]) -> Corpus:
    """Reads a data file, if there is one; `given` values override it.

    Raises:
        ConfigError: names every unknown field and wrong value.
    """
    origins = dict.fromkeys(given, "command line")
    values: dict[str, Any] = {}
    if path is not None:
        values = parse_toml(read_settings(path, "data file"), str(path))
        origins = {**dict.fromkeys(values, str(path)), **origins}
    try:
        return Corpus.model_validate({**values, **given})
    except ValidationError as error:
        raise explain_problems(error, Corpus, origins, str(path or "command line")) from None


def check_complete(corpus: Corpus) -> None:
    """Rejects a corpus without its required fields.

    Raises:
        ConfigError: names what is missing.
    """
    if not corpus.inputs:
        raise ConfigError("no inputs given", "name at least one file, folder or glob")
    if not corpus.output:
        raise ConfigError("no output given", "pass -o, such as -o data/web")
    if not re.fullmatch(r"(?!~)(.*/)?[^/]*[^/.][^/]*", corpus.output, re.DOTALL):
        raise ConfigError(
            f"output={corpus.output!r} is not the prefix of a file",
            "end it in a name, such as data/web for data/web_text_document.bin; "
            "~ stands for a home folder only in a shell, unquoted",
        )


def output_prefixes(corpus: Corpus, n_outputs: int) -> list[str]:
    """Names the token files as Megatron-LM does, without `.bin` or `.idx`."""
    names = [corpus.output]
    if corpus.files_per_output:
        digits = max(2, len(str(n_outputs - 1)))
        names = [f"{corpus.output}_{number:0{digits}d}" for number in range(n_outputs)]
    return [f"{name}_{corpus.json_key}_document" for name in names]
