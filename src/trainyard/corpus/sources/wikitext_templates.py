"""Templates that carry words of a sentence, by the table in `wikitext_templates.toml`.

    render_template("lang|fr|rue") == "rue"
    render_template("convert|5|km|mi") == "5 km"
    render_template("citation needed|date=May 2015") == ""
    render_template("inflation|US|5|1929")   # marked as lost: its sentence is left out

This is a table, not a template engine: no template is ever fetched or expanded.
"""

from __future__ import annotations

import calendar
import re
import tomllib
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path

# Characters that are not markup here, and the noncharacters of Unicode they travel as.
PROTECTED = {character: chr(0xFDD0 + n) for n, character in enumerate("[]{}|'<>=*#:;&-_")}
# Stands before and after the name of a template that could not be rendered.
LOST = "\ufdee"
# A line break inside a paragraph: `<br>`, or a line of a poem.
NEWLINE = "\ufdef"

_Arguments = dict[str, str]
_Render = Callable[[_Arguments], str | None]

TABLE = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))
_CHARACTERS = {"!": PROTECTED["|"], "br": NEWLINE, **{c: PROTECTED[c] for c in "[]='"}}
_ARGUMENT = re.compile(r"\s*([\w -]{1,30}?)\s*=(.*)", re.S)
_UNSAFE = re.compile(r"[^\w .:#/$-]+")
_OPTIONAL = re.compile(r"(?<!\{)\[([^\[\]]*)\]")
_FIELD = re.compile(r"\{(\?)?([!=\[\]']|\w*)(?:=(\w+))?(?::(\w+))?\}")

_NUMBER = re.compile(
    r"(?:(?:[-+\u2212\u2013]?\d[\d,]*(?:\.\d+)?|[-+\u2212]?\.\d+)(?:e([-+]?\d+))?"
    r"|([-+\u2212]?\d{1,9})?[-+ ]?(\d{1,9})//?(\d{1,9}))(?:[-\u2013]\d[\d,]*(?:\.\d+)?)?"
)
_SUBUNITS = {("ft", "in"), ("lb", "oz"), ("st", "lb"), ("mi", "chain"), ("yd", "ft"), ("mi", "yd")}
_OTHER_VALUES = ("output", "number", "unit", "table", "preunit", "tablecen")  # of `disp`
_SYMBOL = re.compile(
    r"[kMGTPmcd\u00b5\u03bc]?(?:m|g|Hz|W|V|A|J|Pa|N|L|l|Wh|eV|cal|bar|K|B|b|T|F|C|\u03a9)"
)
_THOUSANDS = {"3": "thousand", "6": "million", "9": "billion", "12": "trillion"}
_PREFIXES = dict(zip("kMGT", _THOUSANDS.values(), strict=True))
_SCALED = re.compile(r"e(\d+)(.+)|([kMGT])(oilbbl|bbl|cuft|cuyd|USgal|impgal|acre\W?ft)")
_POWER = re.compile(r"(.*[^\d^])([234])")
_GAUGE = re.compile(r"(?:(\d[\d.,/]*)\s*(mm|cm|m|ft|in)\s*)+")


def render_template(content: str) -> str:
    """Returns the words of a template; `content` is what stands between its braces, already clean.

    A template that cannot be rendered gives its name between two `LOST`.
    """
    name, *arguments = content.split("|")
    if ":" in name and not arguments and not name.lstrip().startswith("#"):
        name, _, argument = name.partition(":")
        arguments = [argument]
    name = " ".join(name[:200].replace("_", " ").split()).lower()
    render = _find_template(name)
    if render is not None:
        rendered = render(_read_arguments(arguments))
        if rendered is not None:
            return rendered
    elif "\n" in content:  # a box beside the text
        return ""
    return f"{LOST}{_UNSAFE.sub('', name)[:40]}{LOST}"


@lru_cache(4096)
def _find_template(name: str) -> _Render | None:
    name = name.removeprefix("template:").lstrip()
    if name in _EXACT:
        return _EXACT[name]
    return next((render for pattern, render in _ENDINGS if pattern.fullmatch(name)), None)


def _read_arguments(texts: list[str]) -> _Arguments:
    arguments: _Arguments = {}
    position = 0
    for text in texts:
        if "=" in text and (match := _ARGUMENT.fullmatch(text)):
            arguments[match[1].lower()] = match[2].strip()
        else:
            position += 1
            arguments[str(position)] = text
    return arguments


def _positional(arguments: _Arguments) -> list[str]:
    return [text.strip() for key, text in arguments.items() if key.isdecimal()]


def _compile(forms: list[str]) -> _Render:
    if forms == ["{1}"]:  # most of all templates, and they keep their spaces
        return lambda arguments: arguments.get("1") or None
    compiled = [
        # Every second part is optional.
        [_compile_part(part, n % 2 == 1) for n, part in enumerate(_OPTIONAL.split(form))]
        for form in forms
    ]

    def render(arguments: _Arguments) -> str | None:
        for parts in compiled:
            words = [part(arguments) for part in parts]
            if None not in words:
                return "".join(word or "" for word in words)
        return None

    return render


def _compile_part(part: str, optional: bool) -> _Render:
    """Makes the function of one part of a form, without a `[...]` in it."""
    fields = [*_FIELD.finditer(part)]
    edges = [0, *(edge for field in fields for edge in field.span()), len(part)]
    texts = [part[start:end] for start, end in zip(edges[::2], edges[1::2], strict=True)]
    missing = "" if optional else None

    def render(arguments: _Arguments) -> str | None:
        words = [texts[0]]
        for field, text in zip(fields, texts[1:], strict=True):
            hidden, key, equal, function = field.groups()
            if key in _CHARACTERS:
                value = _CHARACTERS[key]
            elif key:
                value = arguments.get(key, "").strip()
                value = _FUNCTIONS[function](value) if function and value else value
            else:
                value = _OF_ALL[function](arguments)
            if not value or (equal and value.lower() != equal):
                return missing
            words += ["" if hidden else value, text]
        return "".join(words)

    return render


def _month(value: str) -> str:
    is_number = value.isdecimal() and len(value) <= 2 and 1 <= int(value) <= 12
    return calendar.month_name[int(value)] if is_number else value


def _ordinal(value: str) -> str:
    if not value.isdecimal():
        return ""
    ending = "th" if value[-2:-1] == "1" else {"1": "st", "2": "nd", "3": "rd"}.get(value[-1], "th")
    return value + ending


def _gauge(value: str) -> str:
    if value.isdecimal() and len(value) in (3, 4):
        return f"{value} mm"
    if not _GAUGE.fullmatch(value):
        return ""
    return " ".join(part for pair in re.findall(r"(\d[\d.,/]*)\s*([a-z]+)", value) for part in pair)


def _chemical(arguments: _Arguments) -> str:
    """Joins the parts of a formula; a charge stands apart from the number of atoms."""
    parts = _positional(arguments)
    if len(parts) == 1:
        return re.sub(r"\((\d*[-+\u2212])\)", r"^\1", parts[0])
    return "".join(re.sub(r"^(\d+[-+\u2212])$", r"^\1", part) for part in parts)


def _measure(arguments: _Arguments) -> str:
    """Keeps the measure that was written, not the one it is converted to; "" if it is unclear."""
    parts = _positional(arguments)
    words: list[str] = []
    if arguments.get("disp", "").startswith(_OTHER_VALUES):
        return ""
    while len(parts) > 1 and (value := _value(parts[0])):
        word = TABLE["ranges"].get(parts[1])
        if word is None:
            break
        words += [value, word]
        parts = parts[2:]
    if len(parts) < 2 or not (value := _value(parts[0])):
        return ""
    is_one = value.lstrip("-+\u2212") in ("1", "1/2") and not words
    adjective = arguments.get("adj", "")
    singular, plural = _unit(parts[1])
    if not plural:
        return ""
    words.append(value)
    text = "".join(f" {w} " if w.isalpha() or w in "\u00d7\u00b1" else w for w in words)
    text = " ".join(text.split())
    if adjective == "mid" and len(parts) > 2:
        return f"{text}-{singular}{parts[-1] if parts[-1][:1] == '-' else ' ' + parts[-1]}"
    if adjective and singular != plural:
        return f"{text}-{singular.replace(' ', '-')}"
    text = f"{text} {singular if is_one else plural}"
    if len(parts) > 3 and (parts[1], parts[3]) in _SUBUNITS and _value(parts[2]):
        text = f"{text} {_value(parts[2])} {_unit(parts[3])[parts[2] != '1']}"
    return text


def _value(text: str) -> str:
    match = _NUMBER.fullmatch(text)
    if not match:
        return ""
    if match[3]:
        return " ".join(part for part in (match[2], f"{match[3]}/{match[4]}") if part)
    return re.sub(r"e\+?(?=.)", "\u00d710^", text)


def _unit(code: str) -> tuple[str, str]:
    """Returns a unit after one and after several; "" where the code is not known."""
    if code in TABLE["units"]:
        singular, _, plural = TABLE["units"][code].partition(" / ")
        return singular, plural or singular
    if len(code) > 24:
        return "", ""
    if match := _SCALED.fullmatch(code):
        scale = _THOUSANDS.get(match[1]) or _PREFIXES.get(match[3], "")
        singular, plural = _unit(match[2] or match[4])
        return (f"{scale} {plural}",) * 2 if scale and plural else ("", "")
    top, slash, bottom = code.partition("/")
    if slash:
        (one, several), (per, pers) = _unit(top) if top else ("", ""), _unit(bottom)
        if not per or (top and not several):
            return "", ""
        if one != several or " " in several + per or not top:
            return f"{one} per {per}".strip(), f"{several} per {per}".strip()
        return (f"{one}/{per if per == pers else bottom}",) * 2
    if match := _POWER.fullmatch(code):
        base = match[1] if _SYMBOL.fullmatch(match[1]) else _unit(match[1])[0]
        return (f"{base}^{match[2]}",) * 2 if base and " " not in base else ("", "")
    return (code, code) if _SYMBOL.fullmatch(code) else ("", "")


_FUNCTIONS: dict[str, Callable[[str], str]] = {
    "month": _month,
    "ordinal": _ordinal,
    "gauge": _gauge,
    "language": lambda value: value if re.fullmatch(r"[a-z]{2,3}(-[\w-]+)?", value) else "",
    "pole": lambda value: value if value in ("N", "S", "E", "W") else "",
    "accidental": lambda value: TABLE["accidentals"].get(value, ""),
    "uncertainty": lambda value: value if value[0] in "+-\u2212" else f"\u00b1{value}",
}
_OF_ALL: dict[str, Callable[[_Arguments], str]] = {
    "joined": lambda arguments: "".join(_positional(arguments)),
    "listed": lambda arguments: ", ".join(filter(None, _positional(arguments))),
    "chemical": _chemical,
    "measure": _measure,
}


def _read_table() -> tuple[dict[str, _Render], list[tuple[re.Pattern[str], _Render]]]:
    """Returns the templates by name, and those whose name stands for several."""
    elements = TABLE["elements"].split()
    rows = [(names, forms) for names, *forms in TABLE["words"]]
    rows += [(name, [symbol]) for name, symbol in zip(elements[::2], elements[1::2], strict=True)]
    rows.append((TABLE["silent"].strip().rstrip(","), [""]))
    exact: dict[str, _Render] = {}
    endings = []
    for names, forms in rows:
        render = _compile(forms)
        for name in (" ".join(name.split()) for name in names.split(",")):
            if set(name) & set("*?") and name not in ("what?", "whom?", "page?"):
                pattern = re.escape(name).replace(r"\*", ".*").replace(r"\?", "[a-z]")
                endings.append((re.compile(pattern, re.S), render))
            else:
                exact[name] = render
    return exact, endings


_EXACT, _ENDINGS = _read_table()
