"""Every option of a corpus: what a data file such as `slimpajama.toml` may say.

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

Each document passes the steps in the order of the list. What compares documents with each other
comes last: it needs the whole corpus to have passed the others.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import Field, ValidationError, model_validator

from trainyard.config.load import explain_problems, parse_toml
from trainyard.config.reading import SETTINGS_LIMIT_BYTES, read_file
from trainyard.config.run import Section
from trainyard.errors import ConfigError

Texts = Annotated[tuple[str, ...], Field(strict=False)]


class Keep(Section):
    """Keeps documents whose metadata has one of some values."""

    kind: Literal["keep"]
    field: str
    """Dotted path of the metadata, such as meta.redpajama_set_name."""
    values: Texts = Field(min_length=1)
    """What it may be; documents with another value, or none, are dropped."""


class Normalize(Section):
    """Brings a text into one Unicode form, with plain line ends, without control characters."""

    kind: Literal["normalize"]
    form: Literal["NFC", "NFKC"] = "NFC"
    """NFC joins accents to their letters; NFKC also replaces ligatures, full-width forms, ..."""


class LengthLimits(Section):
    """Drops documents that are too short or too long."""

    kind: Literal["length"]
    min_characters: int = Field(default=0, ge=0)
    """Shorter documents are dropped; spaces at either end do not count."""
    max_characters: int = Field(default=0, ge=0)
    """Longer documents are dropped; 0 sets no limit."""


class Quality(Section):
    """Drops documents that are no prose in any language, after Gopher (arXiv:2112.11446, A1.1).

    A limit of 0 (for a least value), or of 1 (for a greatest share), turns a rule off. Scripts
    without spaces want min_words = 0 and large limits for whatever is counted by words.
    """

    kind: Literal["quality"]
    min_words: int = Field(default=50, ge=0)
    """Fewer words, divided by white space, are too few."""
    min_mean_word_length: float = Field(default=3.0, ge=0)
    """Characters a word has on average at least."""
    max_mean_word_length: float = Field(default=10.0, gt=0)
    """Characters a word has on average at most."""
    min_letter_share: float = Field(default=0.6, ge=0, le=1)
    """Share of characters, white space aside, that are letters of any script, or their marks."""
    max_symbol_to_word_ratio: float = Field(default=0.1, ge=0)
    """Number signs, or ellipses, for each word."""
    max_bullet_line_share: float = Field(default=0.9, ge=0, le=1)
    """Share of lines that begin with a bullet."""
    max_repeated_line_share: float = Field(default=0.3, ge=0, le=1)
    """Share of lines that stood in the document before."""


class Deduplicate(Section):
    """Drops documents whose text stood in the corpus before, character for character."""

    kind: Literal["deduplicate"]


class NearDeduplicate(Section):
    """Drops documents much like one that stood in the corpus before, by MinHash signatures.

    Two documents of Jaccard similarity s are found alike with probability 1 - (1 - s^rows)^bands.
    """

    kind: Literal["near_deduplicate"]
    words: int = Field(default=5, ge=1, le=100)
    """Length of the runs of words (case and punctuation aside) that are compared."""
    bands: int = Field(default=14, ge=1)
    """More bands find more pairs, wrong ones too; costs 8 bytes each per document."""
    rows: int = Field(default=8, ge=1)
    """More rows ask for more similarity; 14 bands of 8 rows turn at a similarity of 0.72."""
    seed: int = Field(default=1, ge=0, lt=2**63)
    """Chooses the hash functions."""


DocumentStep = Keep | Normalize | LengthLimits | Quality
Step = Annotated[DocumentStep | Deduplicate | NearDeduplicate, Field(discriminator="kind")]


class Corpus(Section):
    """What to tokenise, and how: everything that decides the bytes of the token files."""

    inputs: Texts = ()
    """Files, folders and globs, in the order the documents shall have."""
    output: str = ""
    """Path that the names of the token files begin with."""
    tokenizer: str = ""
    """`gpt2` (included), or a folder with vocab.json and merges.txt or with a tokenizer.json;
    empty: train one."""
    json_key: str = "text"
    """The JSON key, or the Parquet column, that holds the text."""
    append_eod: bool = True
    """End every document that is not empty with <|endoftext|>."""
    special_tokens: Literal["text", "parse"] = "text"
    """Whether <|endoftext|> written in a document is text, or is parsed as Megatron-LM does."""
    files_per_output: int = Field(default=0, ge=0)
    """Input files that make one pair of token files, output_00 and so on; 0 makes one of all."""
    count_by: str = ""
    """Dotted path of metadata by whose value documents are counted; empty: not counted."""
    steps: Annotated[tuple[Step, ...], Field(strict=False)] = ()
    """What is done to documents before they are tokenised."""

    @model_validator(mode="after")
    def _comparing_steps_come_last(self) -> Self:
        kinds = [step.kind for step in self.steps]
        compares = [isinstance(step, Deduplicate | NearDeduplicate) for step in self.steps]
        if compares != sorted(compares):
            late = kinds[compares.index(True) + compares[compares.index(True) :].index(False)]
            raise ValueError(
                f"steps: {late} comes after {kinds[compares.index(True)]}; what compares "
                "documents with each other comes last"
            )
        for kind in ("deduplicate", "near_deduplicate"):
            if kinds.count(kind) > 1:
                raise ValueError(f"steps: {kind} is listed more than once")
        return self

    @property
    def document_steps(self) -> tuple[DocumentStep, ...]:
        """The steps that look at one document at a time."""
        return tuple(s for s in self.steps if not isinstance(s, Deduplicate | NearDeduplicate))

    @property
    def comparing_steps(self) -> tuple[Deduplicate | NearDeduplicate, ...]:
        """The steps that compare each document with those before it."""
        return tuple(s for s in self.steps if isinstance(s, Deduplicate | NearDeduplicate))

    @property
    def metadata_fields(self) -> tuple[str, ...]:
        """Every metadata path that a step or the counts need, once each."""
        wanted = [step.field for step in self.steps if isinstance(step, Keep)]
        return tuple(dict.fromkeys([*wanted, *filter(None, [self.count_by])]))


def load_corpus(path: Path | None, given: dict[str, Any]) -> Corpus:
    """Reads a data file, if there is one, and lets values given elsewhere come before it.

    Raises:
        ConfigError: names every unknown field and wrong value.
    """
    origins = dict.fromkeys(given, "command line")
    values: dict[str, Any] = {}
    if path is not None:
        values = _read(path)
        origins = {**dict.fromkeys(values, str(path)), **origins}
    try:
        corpus = Corpus.model_validate({**values, **given})
    except ValidationError as error:
        raise explain_problems(error, Corpus, origins, str(path or "command line")) from None
    return corpus


def check_complete(corpus: Corpus) -> None:
    """Refuses a corpus that lacks what only its user can say.

    Raises:
        ConfigError: names what is missing.
    """
    missing = [name for name in ("inputs", "output") if not getattr(corpus, name)]
    if missing:
        hints = {
            "inputs": "name at least one file, folder or glob",
            "output": "pass -o, such as -o data/web",
        }
        raise ConfigError(f"no {missing[0]} given", hints[missing[0]])


def _read(path: Path) -> dict[str, Any]:
    try:
        text = read_file(path, SETTINGS_LIMIT_BYTES).decode()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read the data file {path}: {error}") from None
    return parse_toml(text, str(path))
