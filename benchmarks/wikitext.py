"""What is left of the markup in the text of a Wikipedia dump, and how fast the text is made.

    python benchmarks/wikitext.py DUMP --wikiextractor-output FOLDER

FOLDER is what `wikiextractor --json -o FOLDER DUMP` writes, counted the same way for comparison.
Prints JSON: articles, words (runs of anything but white space), traces of markup by kind, their sum
per 10,000 words, and for our own reader MB (10^6 bytes) of the file per second of one core. Titles
are not counted. A trace may be what an article wants to show (`{{`, `()` in an article on a
programming language), so 0 is not the aim; equal articles make the two columns comparable.
"""

from __future__ import annotations

import argparse
import json
import re
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path

from trainyard.data.sources.files import Segment
from trainyard.data.sources.wikipedia import read_wikipedia

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


def read_ours(dump: Path) -> dict[str, str]:
    """Gives the text of every article by its title."""
    batches = read_wikipedia(Segment(dump, 0, dump.stat().st_size))
    pages = (text.partition("\n\n") for batch in batches for text in batch.texts)
    return {title: text for title, _, text in pages}


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
    options = parser.parse_args()
    start = time.process_time()
    ours = read_ours(options.dump)
    seconds = time.process_time() - start
    figures = {"ours": count_traces(ours.values())}
    figures["ours"]["megabytes_of_file_per_second"] = round(
        options.dump.stat().st_size / 1e6 / seconds, 2
    )
    if options.wikiextractor_output:
        theirs = dict(read_wikiextractor(options.wikiextractor_output))
        common = [title for title in ours if title in theirs]
        figures["wikiextractor"] = count_traces(theirs.values())
        figures["ours, common articles"] = count_traces(ours[title] for title in common)
        figures["wikiextractor, common articles"] = count_traces(theirs[title] for title in common)
    print(json.dumps(figures, indent=1))


if __name__ == "__main__":
    main()
