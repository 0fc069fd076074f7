r"""Leaves out the sentences of which a template could not be rendered.

    drop_sentences(f"It cost {LOST}inflation{LOST} dollars. It burnt.", lost) == "It burnt."
    lost == {"inflation": 1}

A sentence with a hole in it, or with a number missing, says something else. So it goes as a whole,
or, where the template stands in round brackets, the brackets go. Where the end of a sentence is in
doubt (`St. Louis`), more goes rather than half a sentence stays.
"""

from __future__ import annotations

import re
from collections import Counter

from trainyard.corpus.sources.wikitext_templates import LOST, NEWLINE

_MARK = re.compile(f"{LOST}([^{LOST}]*){LOST}")
# A box beside the text: alone on its line, or at its start without a space.
_BOX = re.compile(rf"^[:* \t]*(?:{LOST}[^{LOST}]*{LOST} ?)+(?:\n|(?<! )(?=[A-Z\"]))", re.M)
# Right behind the end of a sentence stand notes.
_NOTE = re.compile(rf"(?:(?<=[.!?])|(?<=[.!?][\"\u201d)]))(?:{LOST}[^{LOST}]*{LOST})+(?=\s|$)")
_BRACKETS = re.compile(rf"(?:(?<=\n)|(?<=^)| )\([^(){LOST}]*{LOST}[^()]*\)")
# A list item, a heading, or the lines of a paragraph.
_BLOCK = re.compile(r"[*#:;=| \t].*\n?|(?:[^*#:;=| \t\n].*\n?)+")
_ITEM = re.compile(r"[*#:; \t]+")
_END = re.compile(rf"[.!?][\"\u201d\u2019')\]]*(?:\s+|{NEWLINE})(?=[^a-z\s])|{NEWLINE}")
_ABBREVIATION = re.compile(
    r"(?:^|[\s(\"\u201c\u2013-])(?:[^\W\d]|(?:[^\W\d]\.)+\w?|Mrs?|Ms|Dr|St|Mt|Ft|Jr|Sr|Prof|Gen|Col"
    r"|Lt|Capt|Sgt|Rev|Gov|Sen|Rep|Hon|vs|etc|al|cf|ca|fl|approx|est|No|Nos|Vol|vol|pp?|Fig|Inc|Co"
    r"|Corp|Ltd|Bros)\.$"
)


def drop_sentences(text: str, lost: Counter[str]) -> str:
    """Leaves them out; counts each by the first template in it that could not be rendered."""
    text = _NOTE.sub("", _BOX.sub("", text))
    if LOST not in text:
        return text
    return _BLOCK.sub(lambda block: _drop(block[0], lost) if LOST in block[0] else block[0], text)


def _drop(block: str, lost: Counter[str]) -> str:
    if block[0] == "=":
        return _MARK.sub("", block)

    def count(part: str) -> str:
        if any(character.isalnum() for character in _MARK.sub("", part)):
            lost.update(_MARK.findall(part)[:1])
        return ""

    body = _BRACKETS.sub(lambda match: count(match[0]), block)
    item = _ITEM.match(body)
    start = item.end() if item else 0
    kept = [body[:start]]
    for end in [*_ends_of_sentences(body), len(body)]:
        sentence = body[start:end]
        kept.append(count(sentence) if LOST in sentence else sentence)
        start = end
    return "".join(kept).rstrip() + "\n" if any(kept[1:]) else ""


def _ends_of_sentences(text: str) -> list[int]:
    return [
        match.end()
        for match in _END.finditer(text)
        if match[0][0] != "."
        or not _ABBREVIATION.search(text[max(match.start() - 8, 0) : match.start() + 1])
    ]
