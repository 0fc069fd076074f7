"""Tests of the cleaning of wikitext: what a reader sees stays, the markup goes, nothing fails."""

from __future__ import annotations

import importlib.util
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainyard.data.sources.wikitext import clean_wikitext

CASES = [
    # links
    ("a [[town]] and [[town|towns]], [[bus]]es", "a town and towns, buses"),
    ("x[[File:a.jpg|thumb|200px|A [[cat|big cat]] and [[dog]]]]y [[Image:b.png]]", "xy"),
    ("a\n[[Category:Towns|A]]\n[[fr:Ville]]\n[[:Category:Towns]]", "a\n\nCategory:Towns"),
    ("[http://a.org the label] [https://b.org] http://c.org", "the label http://c.org"),
    ("[[#History|below]] [[wikt:word|word]] [[a [b] c]]", "below word a [b] c"),
    # templates
    (
        "{{Infobox\n| a = {{nowrap|b}}\n| c = [[d|e]]\n}}text{{citation needed|date=May 2015}}.",
        "text.",
    ),
    (
        "{{lang|fr|rue}} {{lang-la|albus}} {{nowrap|a b}} {{abbr|UK|United Kingdom}}",
        "rue albus a b UK",
    ),
    (
        "{{convert|5|km|mi}}, {{convert|5|to|10|ft|m}}, {{cvt|6|ft|1|in|m}}",
        "5 km, 5 to 10 ft, 6 ft 1 in",
    ),
    (
        "{{As of|2010|7}}, {{val|6.2|e=18|u=m}}, {{frac|1|2}}",
        "As of July 2010, 6.2\u00d710^18 m, 1/2",
    ),
    ("{{chem|H|2|O}} {{USS|Arizona|BB-39|2}} {{circa|1500}}", "H2O USS Arizona c. 1500"),
    ("{{quote|text=To be}}", "To be"),
    ("a{{foo|}} b{{x|{y}}} c", "a b c"),
    # tables
    ("a\n{| class=x\n! h\n|-\n| {{foo|}} || c\n{|\n| inner\n|}\n|}\nb", "a\n\nb"),
    ("{{foo|\n{|\n| c\n|}}}\nb", "b"),
    # elements
    ("a<ref name=x>[[b]]</ref> c<ref name=x /> d<!-- e\n -->", "a c d"),
    ("a <math>x^2</math> b <gallery>\nFile:a|b\n</gallery> <span style='x'>c</span>", "a b c"),
    ("<nowiki>[[a]] ''b'' {{c}} &amp;</nowiki> d", "[[a]] ''b'' {{c}} &amp; d"),
    ("10<sup>6</sup> m<sup>2</sup>, H<sub>2</sub>O, 19<sup>th</sup>", "10^6 m^2, H2O, 19th"),
    ("a < b and c > d, 1 <2", "a < b and c > d, 1 <2"),
    ("a<br/>b <poem>c\nd</poem>", "a\nb c\nd"),
    # entities, quotes, magic words
    (
        "a&nbsp;&ndash; b &amp;amp; &#91;&#91;c&#93;&#93; &lt;ref&gt;",
        "a \u2013 b &amp; [[c]] <ref>",
    ),
    (
        "'''bold''', ''italic'', '''''both''''' and '''Vitamin A''' is ''x''",
        "bold, italic, both and Vitamin A is x",
    ),
    ("l'''Iliade'' d'Hom\u00e8re", "l'Iliade d'Hom\u00e8re"),
    ("__NOTOC__a", "a"),
    # traces
    (
        "Ada ({{IPA-en|x}}; {{lang-ru|\u0410\u0434\u0430}}) x ({{y}}, {{y}}) main() z ({{y}})",
        "Ada (\u0410\u0434\u0430) x main() z",
    ),
    ("a <ref>x</ref>, b {{y}}. .NET", "a, b. .NET"),
    ("the value\n<math>x</math>\n, where", "the value\n\n, where"),
    # lines
    (
        "== A ==\n=== B ===\n== C ==\ntext\n=== D ===\nx\n== References ==\n{{reflist}}",
        "C\n\ntext\n\nD\n\nx",
    ),
    ("a:\n* b\n# c\n\n** d\n* {{y}}\ne", "a:\n- b\n- c\n- d\n\ne"),
    (
        "one\nparagraph\n\n: indented\n; term : meaning\n----",
        "one paragraph\n\nindented\nterm : meaning",
    ),
    ("* {{cite book|a=b}}, ISBN 1", "- ISBN 1"),
    # damaged markup keeps the text
    ("{{Infobox\n| a = b\ntext\n== A ==\nmore", "text\n\nA\n\nmore"),
    ("{| class=x\n| a\n! b\ntext", "text"),
    ("a [[b c\n\nd [[e]] f", "a b c\n\nd e f"),
    ("a }} b ]] c\n|}d", "a b c d"),
    ("a <ref>b c", "a b c"),
    ("a <!-- b", "a"),
    ("a ''b\nc", "a b c"),
    ("[[a|b [[c]]", "a b c"),
]


@pytest.mark.parametrize(("wikitext", "text"), CASES)
def test_a_reader_sees(wikitext: str, text: str) -> None:
    assert clean_wikitext(wikitext) == text


MARKUP = [*"[]{}|'<>=*#:;&\n -/ab(),.!", "[[", "]]", "{{", "}}", "{|", "|}", "'''", "==", "<ref>"]
MARKUP += ["</ref>", "<!--", "-->", "<nowiki>", "</nowiki>", "File:", "&lt;", "\n{|", "\n|}"]
MARKUP += ["{{lang|", "{{convert|", "{{frac|", "{{as of|", "\ufdd0", "<br>", "http://x"]


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
