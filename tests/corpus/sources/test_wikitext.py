"""Tests of the cleaning of wikitext: what a reader sees stays, the markup goes, nothing fails."""

from __future__ import annotations

import importlib.util
import time
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainyard.corpus.sources.wikitext import clean_wikitext

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
    ("a{{sfn|}} b{{sfn|{y}}} c", "a b c"),
    # tables
    ("a\n{| class=x\n! h\n|-\n| {{foo|}} || c\n{|\n| inner\n|}\n|}\nb", "a\n\nb"),
    ("{{foo|\n{|\n| c\n|}}}\nb", "b"),
    # elements
    ("a<ref name=x>[[b]]</ref> c<ref name=x /> d<!-- e\n -->", "a c d"),
    (
        "a <math>{{x}}^2</math> b <gallery>\nFile:a|b\n</gallery> <span style='x'>c</span>",
        "a ${ {x} }^2$ b c",
    ),
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
        "Ada ({{IPAc-en|x}}; {{lang-ru|\u0410\u0434\u0430}}) x ({{cn}}, {{cn}}) main() z ({{cn}})",
        "Ada (\u0410\u0434\u0430) x main() z",
    ),
    ("a <ref>x</ref>, b {{cn}}. .NET", "a, b. .NET"),
    ("the value\n<math>x</math>\n, where", "the value $x$, where"),
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
    ("* {{sfn|a=b}}, ISBN 1\n* {{wayback|b}} \u2013 c", "- ISBN 1\n- c"),
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


# Templates whose numbers, units and words belong to a sentence.
RENDERED = [
    (
        "5.98{{e|24}}&nbsp;kg, {{val|6.2|0.1|e=18|u=m}}",
        "5.98\u00d710^24 kg, 6.2 \u00b10.1\u00d710^18 m",
    ),
    ("(1{{sfrac|1|4}} days, {{frac|3}}, {{frac|2|1|2}})", "(1 1/4 days, 1/3, 2 1/2)"),
    ("A{{Music|flat}}, {{music|time|4|4}}", "A\u266d, 4/4"),
    ("{{Carbon}}<sub>''n''</sub>{{Hydrogen}}<sub>2''n''+2</sub>", "CnH2n+2"),
    ("{{chem|Si|4|4-}} {{chem|NH|4|+}} {{chem2|SO4(2-)}}", "Si4^4- NH4+ SO4^2-"),
    (
        "SO<sub>4</sub><sup>2-</sup>, 2<sup>n</sup>, x<sup>''a'' + 1</sup>",
        "SO4^2-, 2^n, x^(a + 1)",
    ),
    ("(''<sup>d</sup>x'') ''n''<sup>2</sup> '''v'''<sup>3</sup>", "(dx) n^2 v^3"),
    ("5d<sup>10</sup>6s, 20<sub>16</sub>, log<sub>2</sub>8", "5d^10 6s, 20_16, log2 8"),
    (
        "{{convert|22|e6acre|e6ha}}, {{cvt|2.1|Moilbbl/d|m3/d}}",
        "22 million acres, 2.1 million barrels per day",
    ),
    ("{{convert|60|and(-)|70|kg}}, {{convert|4|x|6|in|cm}}", "60 and 70 kg, 4 \u00d7 6 in"),
    ("{{convert|25|-|30|cm|abbr=on}}, {{convert|-5|to|5|C}}", "25\u201330 cm, -5 to 5 \u00b0C"),
    (
        "{{convert|8|m|fathom ft}}, {{convert|1|mi|km|1}}, {{convert|2+1/2|mi}}",
        "8 m, 1 mile, 2 1/2 miles",
    ),
    (
        "a {{convert|10|mi|km|adj=on}}, {{convert|5|mi|km|adj=mid|-long}} road",
        "a 10-mile, 5-mile-long road",
    ),
    (
        "{{convert|95|PD/sqmi}}, {{convert|5|g/cm3}}, {{convert|9|lb/cuft}}",
        "95 inhabitants per square mile, 5 g/cm^3, 9 pounds per cubic foot",
    ),
    (
        "{{convert|1.5e6|km}} {{convert|3|C-change|0}} {{convert|6|ft|2|in|m}}",
        "1.5\u00d710^6 km 3 \u00b0C 6 ft 2 in",
    ),
    ("the {{RailGauge|1435mm}}[[Gauge|-gauge]] line", "the 1435 mm-gauge line"),
    ("{{Harvtxt|Boolos|Jeffrey|1974, 1999}} say", "Boolos & Jeffrey (1974, 1999) say"),
    ("In May, {{US patent|1781541}} was awarded", "In May, U.S. Patent 1781541 was awarded"),
    ("{{US$|2 billion}} {{INRConvert|5|c}} {{GBP|7}}", "US$2 billion \u20b95 crore \u00a37"),
    ("6{{Spaces}}million, 15{{nbsp}}May, 1775{{ndash}}1783", "6 million, 15 May, 1775\u20131783"),
    (
        "{{as of|2013|6|8|lc=y}}, {{start date|1969|7|20}}, {{circa|5|9}}",
        "as of 8 June 2013, 20 July 1969, c. 5 \u2013 c. 9",
    ),
    (
        "{{Nihongo|strikes|\u6253\u3061|uchi}}, {{ill|de|Haus}}, {{transl|ar|ALA|wahid}}",
        "strikes (\u6253\u3061, uchi), Haus, wahid",
    ),
    (
        "at {{coord|30|12|N|74|7|W|name=x}}{{coord|1|2|display=title}}",
        "at 30\u00b012\u2032N 74\u00b07\u2032W",
    ),
    (
        "{{HMS|Ajax|22}} and {{USS|Hornet|CV-12|6}}; {{angbr|a}} {{IPA|/a/}}",
        "HMS Ajax (22) and USS Hornet; \u27e8a\u27e9 /a/",
    ),
    ("10{{sup|6}} {{ordinal|22}} {{nuclide2|calcium|48}} {{sic}}", "10^6 22nd calcium-48 [sic]"),
    ("{{OldStyleDate|2 May|1905|20 April}}", "2 May 1905 [O.S. 20 April]"),
]


@pytest.mark.parametrize(("wikitext", "text"), RENDERED)
def test_a_template_keeps_its_numbers_and_words(wikitext: str, text: str) -> None:
    lost: Counter[str] = Counter()
    assert clean_wikitext(wikitext, lost) == text
    assert not lost


@pytest.mark.parametrize(
    ("wikitext", "text", "lost"),
    [
        ("One. It cost ${{inflation|US|5}} then. Two.", "One. Two.", "inflation"),
        (
            "It cost $5 (${{Inflation|US|5}} in {{CURRENTYEAR}}), he said.",
            "It cost $5, he said.",
            "inflation",
        ),
        ("He met Dr. {{foo}} of St. Louis. Two.{{foo}} Three.", "Two. Three.", "foo"),
        ("{{foo}}\n{{box\n|a=b}}'''A''' is\na {{x|y}} town.\n\nIt is.", "It is.", "x"),
        ("{{sidebar of x}}'''A''' is. {{foo}}\n* {{foo}} a\n* b {{cn}}", "A is.\n- b", "foo"),
        (
            "== A {{foo}} ==\n{{convert|5|xyz}} a\n== B ==\n{{convert|5|m|disp=output only}} b",
            "",
            "convert convert",
        ),
        (f"{{{{convert|5|{'e3' * 5000}}}}} {{{{as of|1|{'1' * 5000}}}}}", "", "convert"),
        ("{{flag|{{foo}}}} is. {{sfn|{{foo}}}}B [[c|{{e|}} d]].", "", "foo e"),
    ],
)
def test_a_template_that_cannot_be_rendered_drops_its_sentence(
    wikitext: str, text: str, lost: str
) -> None:
    counted: Counter[str] = Counter()
    assert clean_wikitext(wikitext, counted) == text
    assert counted == Counter(lost.split())


MARKUP = [*"[]{}|'<>=*#:;&\n -/ab(),.!", "[[", "]]", "{{", "}}", "{|", "|}", "'''", "==", "<ref>"]
MARKUP += ["</ref>", "<!--", "-->", "<nowiki>", "</nowiki>", "File:", "&lt;", "\n{|", "\n|}"]
MARKUP += [
    "{{lang|",
    "{{convert|",
    "{{frac|",
    "{{as of|",
    "\ufdd0",
    "\ufde5",
    "{{x}}",
    "<br>",
    "http://x",
]


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
