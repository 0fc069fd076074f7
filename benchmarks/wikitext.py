"""What the text of a Wikipedia dump keeps of the wikitext, what markup is left, and the speed.

    python benchmarks/wikitext.py DUMP --wikiextractor-output FOLDER --output record.json

`kept` compares each article with its wikitext as a reader of regular expressions sees it (no
references, tables, templates alone on their line, or notes such as `{{citation needed}}`;
of `{{convert}}` the values alone): numbers and capitalized words kept per 1,000, numbers that the
wikitext has not or has less often ("changed"), and places that look like holes in a sentence. A
dropped sentence takes its numbers along.

FOLDER is what `wikiextractor --json -o FOLDER DUMP` writes, counted the same way for comparison.
Prints JSON: articles, words (runs of anything but white space), traces of markup by kind, their sum
per 10,000 words, and for our own reader MB (10^6 bytes) of the file per second of one core. Titles
are not counted. A trace may be what an article wants to show (`{{`, `()` in an article on a
programming language), so 0 is not the aim; equal articles make the two columns comparable.
"""

from __future__ import annotations

import argparse
import bz2
import html
import itertools
import json
import re
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from trainyard.corpus.sources.files import Segment
from trainyard.corpus.sources.wikipedia import read_wikipedia

TRACES = {
    "[[ or ]]": r"\[\[|\]\]",
    "{{ or }}": r"\{\{|\}\}",
    "{| or |}": r"\{\||\|\}",
    "two or more '": r"''+",
    "<tag>": r"</?(?:[a-z]|abbr|big|blockquote|br|center|cite|code|dd|del|div|dl|dt|em|font|gallery"
    r"|h[1-6]|hr|includeonly|ins|kbd|li|math|noinclude|nowiki|ol|onlyinclude|poem|pre|ref|references"
    r"|section|small|source|span|strike|strong|sub|sup|syntaxhighlight|table|td|th|timeline|tr|tt|ul"
    r"|var|templatestyles)(?=[\s/>])",
    "<!-- or -->": r"<!--|-->",
    "&entity;": r"&(?:[a-z][a-z0-9]{1,30}|#\d+|#x[0-9a-f]+);",
    "File: Image: Category:": r"\b(?:file|image|category):(?=\S)",
    "== at an edge of a line": r"^\s*==|==\s*$",
    "* # : ; | ! at the start of a line": r"^[*#:;|!]",
    "empty ( )": r"(?<!\S)\([\s,;:]*\)",
    "( or ) beside a stray , ;": r"\(\s*[,;]|[,;]\s*\)",
    "attribute=": r"\b(?:style|align|valign|class|colspan|rowspan|bgcolor|width|cellpadding)"
    r"\s*=\s*[\"'\w]",
    "[http": r"\[(?:https?:)?//",
    "__WORD__": r"__[A-Z]{3,}__",
    "space before , or .": r"(?<=\w) [,.](?=\s|$)",
}

HOLES = {
    "space inside ( )": r"\(\s|[^\s,(]\s\)",
    ", , or space before a stop": r"[,;:] ?[,;](?!\w)| [,;](?=\s)",
    "two spaces": r"\S  +\S",
    "preposition without its noun": r"\bof in (?=\d)|\bbetween (?:and\b|and\(|,)|\bthe (?:of|in)\b"
    r"|\b(?:about|at|was|were|by|from|the) (?=[,.;)])",
    "currency without a value": r"\([$\u00a3\u20ac](?: |\))|[$\u00a3\u20ac] in\b",
    "unit without a value": r"\b(?:of|the|at) (?:-gauge|per square mile|per km\^2)",
    "words run together": r"\d(?:million|billion|thousand)\b",
    "code of a unit": r"\be\d+(?:acre|m|km|ha|carat)|\b[kMGT]?oilbbl|\b[TGM]cuft|-change\b",
}
_NOT_PROSE = re.compile(
    r"<!--.*?-->|<(ref|gallery|timeline|source|syntaxhighlight|score|imagemap|pre|table)\b"
    r"(?:[^<>]*/>|[^<>]*>.*?</\1\s*>)",
    re.S | re.I,
)
_FORMULA = re.compile(r"<math.*?</math>", re.S)
_INNERMOST = re.compile(r"\{\{((?:(?!\{\{|\}\}).)*)\}\}", re.S)
_INNER_LINK = re.compile(r"\[\[((?:(?!\[\[|\]\]).)*)\]\]", re.S)
_TABLE = re.compile(r"^[ :*]*\{\|(?:(?!^[ :*]*\{\|).)*?^[ :]*\|\}", re.S | re.M)
_ALONE = re.compile(
    r"^[*:\s]*\{\{(?!\s*(?:col|[hf]list|c?quote|quotation))(?:(?!\{\{|\}\}).)*\}\}[*:. ]*$",
    re.M | re.S | re.I,
)
_NOTE = re.compile(
    r"\s*(?:sfn|rp\b|citation|cite|ipa|respell|efn|refn|#tag:ref|clarify|better|vague|dubious|page"
    r"|update|where|when|which|who\b|by whom|full|inflation-fn|failed|according|unreliable|verify"
    r"|weasel|relevance|anchor|main|see also|further|use |\w\w icon|flagicon|official|youtube"
    r"|wayback|qualify|portal|reflist|infobox|automatic|legend|qualify)",
    re.I,
)
# Not the power of a unit, which hides in the codes of {{convert}}.
_NUMBER = re.compile(r"(?<!m\^)\d+(?:[.,]\d+)*")
_NAME = re.compile(r"\b[A-Z][\w\u2019-]*\w")


def _arguments(match: re.Match[str]) -> str:
    if _NOTE.match(match[1]):
        return ""
    name, *arguments = match[1].split("|")
    name = name.strip().lower()
    if name in ("convert", "cvt"):
        measured = itertools.takewhile(
            lambda argument: re.fullmatch(
                r"[\s\d.,+\u2212\u2013x-]*|to|and|by|or|and\(-\)", argument
            ),
            arguments,
        )
        return f" {' '.join(measured)} "
    shown = [
        argument
        for argument in arguments
        if re.match(r"\s*(?:e|text|\d+)\s*=|(?!\s*[\w -]{1,30}=)", argument)
    ]
    if name in ("lang", "transl", "ill"):
        shown = shown[1:]
    return f" {' '.join(argument.partition('=')[2] or argument for argument in shown)} "


def _link(match: re.Match[str]) -> str:
    target, *labels = match[1].split("|")
    if re.match(r"\s*(?:file|image|category|[a-z]{2,3}):", target, re.I):
        return ""
    return labels[-1] if labels else target


def read_prose(wikitext: str) -> str:
    """Gives what a reader should see of the sentences, roughly, by regular expressions alone."""
    text = _FORMULA.sub(lambda match: re.sub(r"[{}|]", " ", match[0]), _NOT_PROSE.sub("", wikitext))
    text = re.sub(r"m<sup>[23]</sup>", "m", html.unescape(text)).replace("\u00a0", " ")
    while (cut := _TABLE.sub("", text)) != text:
        text = cut
    while (cut := _INNERMOST.sub(_arguments, _INNER_LINK.sub(_link, _ALONE.sub("", text)))) != text:
        text = cut
    return re.sub(
        r"\[(?:https?:)?//\S*|</?\w[^<>]*>|'{2,}", lambda m: "" if "'" in m[0] else " ", text
    )


def count_kept(articles: dict[str, str], wikitexts: dict[str, str]) -> dict[str, object]:
    figures: dict[str, object] = {"articles": len(articles)}
    for kind, pattern in (("numbers", _NUMBER), ("names", _NAME)):
        lost: Counter[str] = Counter()
        changed: Counter[str] = Counter()
        n_in_wikitext = 0
        for title, text in articles.items():
            expected = Counter(pattern.findall(read_prose(wikitexts[title])))
            found = Counter(pattern.findall(text))
            n_in_wikitext += expected.total()
            lost += expected - found
            changed += found - expected
        figures[f"{kind}_in_prose"] = n_in_wikitext
        figures[f"{kind}_kept_per_1000"] = round(
            1000 * (1 - lost.total() / max(n_in_wikitext, 1)), 1
        )
        figures[f"{kind}_changed"] = changed.total()
    holes = Counter(dict.fromkeys(HOLES, 0))
    for text in articles.values():
        holes.update({name: len(re.findall(pattern, text)) for name, pattern in HOLES.items()})
    return {**figures, "holes": holes.total(), "holes_by_kind": holes}


def read_wikitexts(dump: Path) -> dict[str, str]:
    """Gives the wikitext of every page by its title."""
    with bz2.open(dump, "rt", encoding="utf-8") as file:
        pages = re.findall(r"<title>([^<]*)</title>(.*?)</page>", file.read(), re.S)
    texts = {title: re.search(r"<text[^>]*>(.*?)</text>", page, re.S) for title, page in pages}
    return {html.unescape(title): html.unescape(text[1]) for title, text in texts.items() if text}


def count_traces(texts: Iterable[str]) -> dict[str, object]:
    patterns = {name: re.compile(pattern, re.I | re.M) for name, pattern in TRACES.items()}
    traces: Counter[str] = Counter(dict.fromkeys(TRACES, 0))
    articles = words = 0
    for text in texts:
        articles += 1
        words += len(text.split())
        traces.update({name: len(pattern.findall(text)) for name, pattern in patterns.items()})
    rate = round(traces.total() * 10_000 / max(words, 1), 2)
    return {"articles": articles, "words": words, "traces_per_10000_words": rate, "traces": traces}


def read_ours(dump: Path, dropped: Counter[str] | None = None) -> dict[str, str]:
    """Gives the text of every article by its title; counts dropped sentences by template."""
    articles: dict[str, str] = {}
    for batch in read_wikipedia(Segment(dump, 0, dump.stat().st_size)):
        articles.update({text.split("\n")[0]: text.partition("\n\n")[2] for text in batch.texts})
        if dropped is not None:
            dropped.update(batch.dropped_sentences)
    return articles


def read_wikiextractor(folder: Path) -> Iterator[tuple[str, str]]:
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        with path.open(encoding="utf-8") as lines:
            for line in lines:
                article = json.loads(line)
                yield article["title"], article["text"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("dump", type=Path)
    parser.add_argument("--wikiextractor-output", type=Path)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    dropped: Counter[str] = Counter()
    start = time.process_time()
    ours = read_ours(options.dump, dropped)
    seconds = time.process_time() - start
    figures: dict[str, Any] = {"ours": count_traces(ours.values())}
    figures["ours"]["megabytes_of_file_per_second"] = round(
        options.dump.stat().st_size / 1e6 / seconds, 2
    )
    figures["kept"] = count_kept(ours, read_wikitexts(options.dump))
    figures["sentences_dropped"] = dropped.total()
    figures["sentences_dropped_by_template"] = dict(dropped.most_common(12))
    if options.wikiextractor_output:
        theirs = dict(read_wikiextractor(options.wikiextractor_output))
        common = [title for title in ours if title in theirs]
        figures["wikiextractor"] = count_traces(theirs.values())
        figures["ours, common articles"] = count_traces(ours[title] for title in common)
        figures["wikiextractor, common articles"] = count_traces(theirs[title] for title in common)
    text = json.dumps(figures, indent=1)
    if options.output:
        options.output.write_text(f"{text}\n", encoding="utf-8")
    print(text)


if __name__ == "__main__":
    main()
