r"""Converts a page of wikitext to readable plain text.

    clean_wikitext("'''Ada''' ({{IPAc-en|x}}) is a [[town|small town]].<ref>y</ref>\n== Notes ==")
    == "Ada is a small town."

A page goes through four passes, each linear in its length whatever it holds:

1. whole elements: comments, `<ref>`, `<gallery>` ... are cut out; `<nowiki>` is kept, and `<math>`
   as its TeX between two `$`;
2. brackets: templates, tables and links nest in each other, so a stack follows them; what closes
   first is turned into text first, so that a `|` left in the outer one is its own;
3. what sits inside a line: tags, external links, quotes, and the traces of what was cut out;
   then sentences that lost a template go;
4. lines: headings, lists, paragraphs. A heading is written when something comes below it.

A character that must not be read as markup (from `<nowiki>` or `&#91;`) travels as one of Unicode's
noncharacters and turns back at the end. Damaged markup never fails: an opener without an end loses
its own line (a table or template) or its brackets (a link), and the text after it stays.
"""

from __future__ import annotations

import html
import re
from collections.abc import Callable

from trainyard.corpus.sources.wikitext_templates import (
    LOST,
    NEWLINE,
    PROTECTED,
    TABLE,
    render_template,
)
from trainyard.data.sidecar import add_counts

# Templates in templates: MediaWiki stops at 40; the bound keeps hostile pages linear.
_MAX_DEPTH = 64
_PROTECT = str.maketrans(PROTECTED)
_PLACED = re.compile("[\ufdd0-\ufdee]")
_RESTORED = {placed: character for character, placed in PROTECTED.items()} | {LOST: ""}

_CUT, _TAGS, _BLOCK_TAGS = (TABLE["markup"][name] for name in ("cut", "inline", "blocks"))


def _tag(names: str) -> str:
    return rf"(?:{'|'.join(names.split())})(?![\w-])[^<>]*"


_ELEMENT = re.compile(rf"<!--|<(nowiki|poem|{'|'.join(_CUT.split())})(?![\w-])([^<>]*)>", re.I)
_DOUBLE_BRACE = re.compile(r"([{}])(?=\1)")  # means the same in TeX with a space
_ENTITY = re.compile(r"&(?:[a-zA-Z]\w{1,31}|#\d{1,7}|#[xX][0-9a-fA-F]{1,6});")
_BRACKET = re.compile(
    # "]]]" ends a link after its first bracket, "]]]]" ends two links; braces likewise.
    r"\{\{|\}\}(?!\}(?!\}))|\[\[|\]\](?!\](?!\]))"
    # A table opens and closes at the start of a line; "|}}" there closes a template.
    r"|^[ \t:*]*\{\||^[ \t:]*\|\}(?!\}(?!\}))",
    re.M,
)
_KINDS = {"{{": "template", "}}": "template", "[[": "link", "]]": "link"}
_TABLE_LINE = re.compile(r"^[ \t]*[|!].*\n?", re.M)
_HIDDEN_NAMESPACES = frozenset(" ".join(TABLE["markup"]["hidden_namespaces"]).split())
_LANGUAGE = re.compile(r"[a-z]{2,3}(?:-[a-z-]+)?|simple")

_LIST_TAG = re.compile(r"<li\b[^<>]*>\s*", re.I)
_POWER = re.compile(
    # Not at the start of a word (isotopes); no ordinals, endings and notes; no lone sign (ions).
    r"<sup>(?:(?<=[\w)\]}]<sup>)|(?<=[\w)\]}]''<sup>)|(?<=[\w)\]}]'''<sup>)|(?<=</sub><sup>))\s*"
    r"(?!(?:th|st|nd|rd|e|er|re|me|lle|rs?|a?c|[ao]|TM|[-+\u2212]|\[[^<>]*)\s*</sup>)"
    r"([^<>\n]+?)\s*</sup>",
    re.I,
)
_RUN_TOGETHER = re.compile(r"(?<=\d)<(/?)sub>(?=\d)", re.I)
_LINE_BREAK = re.compile(r"<br(?![\w-])[^<>]*>|</br>", re.I)
_BLOCK_TAG = re.compile(rf"</?{_tag(_BLOCK_TAGS)}>", re.I)
_TAG = re.compile(rf"</?(?:{_tag(_TAGS + ' li ' + _CUT)})>", re.I)
_EXTERNAL_LINK = re.compile(
    r"\[(?:(?:https?|ftps?|sftp|irc|ircs|news|nntp|gopher|git|svn)://|//|mailto:)"
    r"[^\s\[\]<>]*[ \t]*([^\[\]\n]*)\]",
    re.I,
)
_MAGIC_WORD = re.compile(r"__[A-Z]{3,}__")
_QUOTES = re.compile(r"'{2,}")
_ELISION = re.compile(r"'''(?<=\w''')(?=[^\s'][^'\n]*''(?!'))")
_STRAY = re.compile(r"\{\{+|\}\}+|\[\[+|\]\]+|\{\||\|\}")

_OTHER_SPACES = "\t\r\f\v\u00a0\u2000-\u200a\u202f\u205f\u3000"
_SPACES = re.compile(rf"[{_OTHER_SPACES}][ {_OTHER_SPACES}]*| [ {_OTHER_SPACES}]+")
_INVISIBLE = re.compile("[\u00ad\u200b\u200e\u200f\u2028\u2029\u2060\ufeff]")
_EMPTY_BRACKETS = re.compile(r"\((?<!\S\()[ ,;:/\u2013]*(?:(?:or|and)[ ,;:]*)?\)")
_AFTER_BRACKET = re.compile(r"\([ ,;:]*[ ,;]")
_BEFORE_BRACKET = re.compile(r"(?<![ ,;])[ ,;]+\)")
_DOUBLED = re.compile(r"([,;])(?: [,;])+(?=\s)")
_BEFORE_STOP = re.compile(r" (?=[,.](?:\s|$))")

_HEADING = re.compile(r"(=+)\s*([^=\s].*?)\s*(=+)$|(=+)\s*(=.*?)\s*(=+)$")
_LEFT_IN_FRONT = re.compile(r"(?:[,;:.\u2013] )+|[,;:]+$")
_BREAK = re.compile(rf" ?{NEWLINE} ?")
_RULE = re.compile(r"-{4,}")

_MARK = re.compile(f"{LOST}([^{LOST}]*){LOST}")
# A box beside the text: alone on its line, or at its start without a space.
_BOX = re.compile(rf"^[:* \t]*(?:{LOST}[^{LOST}]*{LOST} ?)+(?:\n|(?<! )(?=[A-Z\"]))", re.M)
# Right behind the end of a sentence stand notes.
_NOTE = re.compile(rf"(?:(?<=[.!?])|(?<=[.!?][\"\u201d)]))(?:{LOST}[^{LOST}]*{LOST})+(?=\s|$)")
_IN_BRACKETS = re.compile(rf"(?:(?<=\n)|(?<=^)| )\([^(){LOST}]*{LOST}[^()]*\)")
# A list item, a heading, or the lines of a paragraph.
_PARAGRAPH = re.compile(r"[*#:;=| \t].*\n?|(?:[^*#:;=| \t\n].*\n?)+")
_ITEM = re.compile(r"[*#:; \t]+")
_END = re.compile(rf"[.!?][\"\u201d\u2019')\]]*(?:\s+|{NEWLINE})(?=[^a-z\s])|{NEWLINE}")
_ABBREVIATION = re.compile(
    r"(?:^|[\s(\"\u201c\u2013-])(?:[^\W\d]|(?:[^\W\d]\.)+\w?|Mrs?|Ms|Dr|St|Mt|Ft|Jr|Sr|Prof|Gen|Col"
    r"|Lt|Capt|Sgt|Rev|Gov|Sen|Rep|Hon|vs|etc|al|cf|ca|fl|approx|est|No|Nos|Vol|vol|pp?|Fig|Inc|Co"
    r"|Corp|Ltd|Bros)\.$"
)


def clean_wikitext(wikitext: str, lost: dict[str, int] | None = None) -> str:
    """Returns the readable text of a page: paragraphs, headings and "- item" lines, no markup.

    Adds to `lost` the sentences left out, by the template that could not be rendered.
    """
    text = _cut_elements(_restore(wikitext))
    if "&" in text:
        text = _ENTITY.sub(_decode_entity, text)
    text = _clean_inline(_resolve_brackets(text))
    if LOST in text:
        text = _drop_sentences(text, {} if lost is None else lost)
    return _restore(_lay_out(text))


def _restore(text: str) -> str:
    return _PLACED.sub(lambda match: _RESTORED.get(match[0], ""), text)


def _cut_elements(text: str) -> str:
    pieces: list[str] = []
    without_end: set[str] = set()
    position = 0
    while match := _ELEMENT.search(text, position):
        pieces.append(text[position : match.start()])
        position = match.end()
        name = (match[1] or "").lower()
        if not name:
            end = text.find("-->", position)
            position = end + 3 if end >= 0 else len(text)
        elif not match[2].endswith("/") and name not in without_end:
            # Looked for only once where it is missing: a page of openers stays linear.
            closing = re.compile(rf"</{name}\s*>", re.I).search(text, position)
            if closing is None:
                without_end.add(name)
                continue
            pieces.append(_content_of(name, match[2], text[position : closing.start()]))
            position = closing.end()
    return "".join([*pieces, text[position:]])


def _content_of(name: str, attributes: str, content: str) -> str:
    if name == "nowiki" or (name in ("source", "syntaxhighlight") and "inline" in attributes):
        return content.translate(_PROTECT)
    if name in ("math", "ce", "chem"):
        formula = _DOUBLE_BRACE.sub(r"\1 ", " ".join(content.split())).translate(_PROTECT)
        return f"${formula}$" if name == "math" and formula else formula
    return content.replace("\n", NEWLINE) if name == "poem" else ""


def _decode_entity(match: re.Match[str]) -> str:
    decoded = html.unescape(match[0])
    return " " if decoded == "\n" else decoded.translate(_PROTECT)


def _resolve_brackets(text: str) -> str:
    """Replaces templates, tables and links by what a reader sees of them, innermost first."""
    pieces: list[str] = []
    stack: list[tuple[str, int]] = []  # what is open, and where its content begins in `pieces`
    n_open = {"template": 0, "link": 0, "table": 0}
    position = 0

    def close() -> tuple[str, str]:
        kind, start = stack.pop()
        n_open[kind] -= 1
        content = "".join(pieces[start:])
        del pieces[start:]
        return kind, content

    for match in _BRACKET.finditer(text):
        pieces.append(text[position : match.start()])
        position = match.end()
        token = match[0]
        kind = _KINDS.get(token, "table")
        if token.endswith(("{{", "[[", "{|")):
            if len(stack) < _MAX_DEPTH:
                stack.append((kind, len(pieces)))
                n_open[kind] += 1
            continue
        # A link does not reach out of the template or the table that it stands in.
        if not n_open[kind] or (kind == "link" and stack[-1][0] != kind):
            continue
        while stack[-1][0] != kind:
            pieces.append(_unclosed(*close()))
        rendered = _RENDER[kind](close()[1])
        if rendered[:1].isdigit() and "".join(pieces[-2:])[-1:].isdigit():
            pieces.append(" ")  # 1{{frac|1|4}} is not 11/4
        pieces.append(rendered)
    pieces.append(text[position:])
    while stack:
        pieces.append(_unclosed(*close()))
    return "".join(pieces)


def _unclosed(kind: str, content: str) -> str:
    if kind == "link":
        return content.replace("|", " ")
    return "\n" + _TABLE_LINE.sub("", content.partition("\n")[2])


def _render_link(content: str) -> str:
    parts = content.split("|")
    target = parts[0].strip()
    prefix, colon, _ = target.partition(":")
    label = parts[-1] if len(parts) > 1 else ""
    if colon and prefix.strip().lower() in _HIDDEN_NAMESPACES:
        return ""
    if colon and _LANGUAGE.fullmatch(prefix):
        return ""
    if "\n\n" in content:  # two brackets that belong to different links
        return content.replace("|", " ")
    if target.startswith(("http://", "https://")):
        return label or target.partition(" ")[2]
    return label if label.strip() else target.lstrip(":#")


_RENDER: dict[str, Callable[[str], str]] = {
    "template": render_template,
    "link": _render_link,
    "table": lambda content: "\n",
}


def _clean_inline(text: str) -> str:
    if "<" in text:
        text = _RUN_TOGETHER.sub(lambda tag: " " if tag[1] else "_", _POWER.sub(_power, text))
        text = _LINE_BREAK.sub(NEWLINE, text)
        text = _TAG.sub("", _BLOCK_TAG.sub("\n\n", _LIST_TAG.sub("\n* ", text)))
    text = _MAGIC_WORD.sub("", _EXTERNAL_LINK.sub(r"\1", text))
    text = _STRAY.sub("", _drop_quotes(text))
    text = _SPACES.sub(" ", _INVISIBLE.sub("", text))
    text = _BEFORE_BRACKET.sub(")", _AFTER_BRACKET.sub("(", text))
    text = _SPACES.sub(" ", _EMPTY_BRACKETS.sub("", text))
    return _BEFORE_STOP.sub("", _DOUBLED.sub(r"\1", text))


def _power(match: re.Match[str]) -> str:
    exponent = _QUOTES.sub("", match[1])
    is_sum = len(re.findall(r"\w+", exponent)) > 1 and "." not in exponent
    space = " " if match.string[match.end() : match.end() + 1].isdigit() else ""
    return f"^({exponent}){space}" if is_sum and exponent[0] != "(" else f"^{exponent}{space}"


def _drop_quotes(text: str) -> str:
    """Removes the quotes of bold and italics, but not the apostrophe of `l'''Iliade''`."""
    if _ELISION.search(text):
        text = "\n".join(map(_keep_elision, text.split("\n")))
    return _QUOTES.sub(lambda match: "'" if len(match[0]) == 4 else "", text)


def _keep_elision(line: str) -> str:
    if not _ELISION.search(line):
        return line
    # Three quotes are bold, unless that leaves both a bold and an italic without their other end.
    lengths = [len(quotes) for quotes in _QUOTES.findall(line)]
    odd = sum(n in (3, 4, 5) for n in lengths) % 2 and sum(n in (2, 5) for n in lengths) % 2
    return _ELISION.sub("''''", line, count=1) if odd else line


def _drop_sentences(text: str, lost: dict[str, int]) -> str:
    """Leaves out sentences with a template that could not be rendered; counts each by the first.

    A sentence with a hole in it, or with a number missing, says something else. So it goes as a
    whole, or, where the template stands in round brackets, the brackets go. Where the end of a
    sentence is in doubt (`St. Louis`), more goes rather than half a sentence stays.
    """
    text = _NOTE.sub("", _BOX.sub("", text))
    if LOST not in text:
        return text
    return _PARAGRAPH.sub(
        lambda block: _drop(block[0], lost) if LOST in block[0] else block[0], text
    )


def _drop(block: str, lost: dict[str, int]) -> str:
    if block[0] == "=":
        return _MARK.sub("", block)

    def count(part: str) -> str:
        if any(character.isalnum() for character in _MARK.sub("", part)):
            add_counts(lost, dict.fromkeys(_MARK.findall(part)[:1], 1))
        return ""

    body = _IN_BRACKETS.sub(lambda match: count(match[0]), block)
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


def _lay_out(text: str) -> str:
    """Turns lines into paragraphs, list items and headings that have something below them."""
    out: list[str] = []
    headings: list[tuple[int, str]] = []  # not written yet: nothing has come below them
    before = "blank"
    for raw in text.split("\n"):
        kind, level, line = _read_line(raw)
        if kind == "heading":
            headings = [(above, title) for above, title in headings if above < level]
            headings.append((level, line))
        elif kind != "blank":
            for _, title in headings:
                out.append(f"\n\n{title}")
            if headings or before == "blank" or (before == "item" and kind == "text"):
                out.append("\n\n" if headings or not _goes_on(out, kind) else "\n")
            else:
                # A stop at the start of a line stood behind a formula or a reference.
                together = "" if line[:2] in (", ", ". ") else " "
                out.append(together if before == kind == "text" else "\n")
            out.append(line)
            headings = []
        before = kind
    return _BREAK.sub("\n", "".join(out)).strip()


def _goes_on(out: list[str], kind: str) -> bool:
    """Whether an item after a blank line belongs to the list above it."""
    return kind == "item" and bool(out) and out[-1].startswith("- ")


def _read_line(raw: str) -> tuple[str, int, str]:
    """Returns the kind of a line (blank, heading, item, line or text), its level and its text."""
    line = raw.strip()
    if not line or line[0] == "|" or line == NEWLINE * len(line):
        return "blank", 0, ""
    if line[0] == "=" and line[-1] == "=" and (match := _HEADING.fullmatch(line)):
        level = min(len(match[1] or match[4]), len(match[3] or match[6]))
        return "heading", level, (match[2] or match[5]).replace(NEWLINE, " ")
    if line[0] in "*#:;":
        content = _without_leading_stops(line.lstrip("*#:; "))
        marks = line[: len(line) - len(line.lstrip("*#:;"))]
        if not any(character.isalnum() for character in content):
            return "blank", 0, ""
        return ("item", 0, f"- {content}") if marks[-1] in "*#" else ("line", 0, content)
    if line[0] == "-" and (match := _RULE.match(line)):
        line = line[match.end() :].strip()
    if not any(character.isalnum() for character in line):
        return "blank", 0, ""
    if raw[0] == " ":
        return "line", 0, line
    return "text", 0, line


def _without_leading_stops(text: str) -> str:
    match = _LEFT_IN_FRONT.match(text)
    return text[match.end() :] if match else text
