"""Tests of the cleaning of wikitext: what a reader sees stays, the markup goes, nothing fails."""

from __future__ import annotations

import importlib.util
import time
import tomllib
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainyard.corpus.sources.wikitext import clean_wikitext

TABLE = tomllib.loads(Path(__file__).with_name("wikitext.toml").read_text(encoding="utf-8"))


@pytest.mark.parametrize(("wikitext", "text"), TABLE["reads"])
def test_a_reader_sees(wikitext: str, text: str) -> None:
    assert clean_wikitext(wikitext) == text


LONG = (f"{{{{convert|5|{'e3' * 5000}}}}} {{{{as of|1|{'1' * 5000}}}}}", "", "convert")


@pytest.mark.parametrize(
    ("wikitext", "text", "lost"),
    [*([*row, ""] for row in TABLE["rendered"]), *TABLE["dropped"], LONG],
)
def test_a_template_is_rendered_or_drops_its_sentence(wikitext: str, text: str, lost: str) -> None:
    counted: Counter[str] = Counter()
    assert clean_wikitext(wikitext, counted) == text
    assert counted == Counter(lost.split())


MARKUP = [*"[]{}|'<>=*#:;&\n -/ab(),.!", "[[", "]]", "{{", "}}", "{|", "|}", "'''", "==", "<ref>"]
MARKUP += ["</ref>", "<!--", "-->", "<nowiki>", "</nowiki>", "File:", "&lt;", "\n{|", "\n|}"]
MARKUP += ["{{lang|", "{{convert|", "{{frac|", "{{as of|", "{{x}}", "<br>", "http://x"]
MARKUP += ["\ufdd0", "\ufde5"]


@given(st.lists(st.sampled_from(MARKUP), max_size=60).map("".join))
def test_no_markup_makes_it_fail(wikitext: str) -> None:
    text = clean_wikitext(wikitext)
    assert text == text.strip()
    assert not any("\ufdd0" <= character <= "\ufdef" for character in text)


@pytest.mark.parametrize(
    "piece", [*MARKUP, "<ref", "( ", " ,", "[http://a ", "[[a|", "{{nowrap|", "'a"]
)
def test_a_hostile_page_takes_linear_time(piece: str) -> None:
    def seconds(n_bytes: int) -> float:
        start = time.process_time()
        clean_wikitext(piece * (n_bytes // len(piece)))
        return time.process_time() - start

    # Of computing, whatever else the machine does. Quadratic work on 400 kB takes minutes.
    assert seconds(400_000) < 30


@pytest.mark.exhaustive
def test_the_excerpt_has_hardly_any_markup_left(shared_data: Path) -> None:
    file = Path(__file__).parents[3] / "benchmarks" / "wikitext.py"
    spec = importlib.util.spec_from_file_location("wikitext_benchmark", file)
    assert spec is not None and spec.loader is not None
    benchmark = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(benchmark)
    (dump,) = (shared_data / "corpora").glob("enwiki-*.bz2")
    articles = benchmark.read_ours(dump)
    assert articles["Anarchism"].startswith(
        "Anarchism is a political philosophy that advocates self-"
    )
    figures = benchmark.count_traces(articles.values())
    assert figures["articles"] == 98
    assert figures["words"] > 460_000
    assert sum(figures["traces"].values()) == 0
    kept = benchmark.count_kept(articles, benchmark.read_wikitexts(dump))
    assert kept["numbers_kept_per_1000"] > 991
    assert kept["numbers_changed"] <= 16  # those that the benchmark misreads
    assert kept["holes"] <= 10  # those of the wikitext
