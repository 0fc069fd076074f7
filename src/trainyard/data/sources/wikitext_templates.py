"""The few templates that carry words of a sentence; every other one leaves nothing.

    render_template("lang|fr|rue") == "rue"
    render_template("convert|5|km|mi") == "5 km"
    render_template("Infobox person|name=Ada") == ""

This is a table, not a template engine: no template is ever fetched or expanded.
"""

from __future__ import annotations

import calendar
import re
from collections.abc import Callable

# Characters that are not markup here, and the noncharacters of Unicode they travel as.
PROTECTED = {character: chr(0xFDD0 + n) for n, character in enumerate("[]{}|'<>=*#:;&-_")}
PIPE = PROTECTED["|"]
# A line break inside a paragraph: `<br>`, or a line of a poem.
NEWLINE = "\ufdef"

_NAMED = re.compile(r"\s*([\w -]{1,30}?)\s*=(.*)", re.S)
_Arguments = tuple[list[str], dict[str, str]]

_FIRST = (
    "nowrap nobr nobreak small smaller larger big big2 nobold noitalic normal quote cquote "
    "blockquote bquote quotation unicode iast sc sc1 sc2 smallcaps smallcaps2 math mvar var em "
    "strong abbr tooltip linktext sic angbr ipa ill illm vanchor visible_anchor flag flagcountry "
    "flagu nihongo nihongo2 polytonic hebrew he arabic gbq zh-char pinyin formatnum lc uc ucfirst "
    "lcfirst vr okina-text sup sub underline keypress kbd code tq tqq qi ordinal nowrap_begin"
)
_SECOND = "lang script rtl-lang transl translit wikt-lang color colour resize columns-list"
_FIXED = {
    "!": PIPE, "=": PROTECTED["="], "'": PROTECTED["'"], "'s": PROTECTED["'"] + "s",
    "' \"": PROTECTED["'"] + ' "', "\" '": '" ' + PROTECTED["'"], "nbsp": " ", "space": " ",
    "thinsp": " ", "hair space": " ", "snd": " \u2013 ", "spnd": " \u2013 ",
    "spaced ndash": " \u2013 ",
    "spaced en dash": " \u2013 ", "ndash": "\u2013", "en dash": "\u2013", "dash": "\u2013",
    "mdash": "\u2014", "mdashb": "\u2014", "em dash": "\u2014", "spaced mdash": " \u2014 ",
    "minus": "\u2212", "times": "\u00d7", "dot": " \u00b7 ", "middot": "\u00b7",
    "\u00b7": " \u00b7 ",
    "eqm": "\u21cc", "shy": "", "zwj": "", "okina": "\u02bb", "hamza": "\u02be", "ayin": "\u02bf",
    "bullet": " \u2022 ", "ellipsis": "...", "...": "...", "crlf": NEWLINE, "break": NEWLINE,
    "plusminus": "\u00b1", "euro": "\u20ac", "pound sign": "\u00a3", "deg": "\u00b0",
}  # fmt: skip
_SHIPS = "ss rms hms hmas hmcs hmnzs uss mv sms usns usrc uscgc ins"
_BETWEEN = {
    "to": "to", "and": "and", "or": "or", "by": "by", "x": "\u00d7", "\u00d7": "\u00d7",
    "-": "\u2013", "\u2013": "\u2013", "to(-)": "to", "+/-": "\u00b1", "\u00b1": "\u00b1",
}  # fmt: skip
_UNITS = {
    "sqmi": "square miles", "sqkm": "km^2", "sqft": "square feet", "sqm": "m^2",
    "cuft": "cubic feet",
    "cumi": "cubic miles", "km2": "km^2", "m2": "m^2", "cm2": "cm^2", "mm2": "mm^2", "km3": "km^3",
    "m3": "m^3", "cm3": "cm^3", "C": "\u00b0C", "F": "\u00b0F", "mi": "miles", "acre": "acres",
    "C-change": "\u00b0C", "F-change": "\u00b0F", "ha": "hectares", "lb": "pounds",
    "\u00b0C": "\u00b0C",
    "foot": "feet", "mile": "miles", "inch": "inches", "usgal": "US gallons", "impgal": "gallons",
    "PD/sqmi": "per square mile", "PD/km2": "per km^2", "/sqmi": "per square mile",
    "/km2": "per km^2", "/mi2": "per square mile",
}  # fmt: skip


def render_template(content: str) -> str:
    """Gives the words of a template; `content` is what stands between its braces, already clean."""
    name, *arguments = content.split("|")
    name = name.strip().replace("_", " ")
    if ":" in name and not arguments:
        name, _, argument = name.partition(":")
        arguments = [argument]
    name = name.lower()
    if name in _FIXED:
        return _FIXED[name]
    if name.startswith("lang-"):
        name = "nowrap"
    render = _TEMPLATES.get(name)
    return render(*_read_arguments(arguments)) if render else ""


def _read_arguments(arguments: list[str]) -> _Arguments:
    positional: list[str] = []
    named: dict[str, str] = {}
    for argument in arguments:
        if "=" not in argument or not (match := _NAMED.fullmatch(argument)):
            positional.append(argument)
        elif match[1].isdecimal():
            positional.append(match[2].strip())
        else:
            named[match[1].lower()] = match[2].strip()
    return positional, named


def _first(positional: list[str], named: dict[str, str]) -> str:
    return positional[0] if positional else named.get("text", named.get("quote", ""))


def _second(positional: list[str], named: dict[str, str]) -> str:
    return positional[-1] if len(positional) > 1 else named.get("text", "")


def _lang(positional: list[str], named: dict[str, str]) -> str:
    return positional[1] if len(positional) > 1 else named.get("text", "")


def _joined(positional: list[str], named: dict[str, str]) -> str:
    return "".join(map(str.strip, positional))


def _named_ship(prefix: str) -> Callable[[list[str], dict[str, str]], str]:
    return lambda positional, named: f"{prefix} {_first(positional, named)}"


def _ship(positional: list[str], named: dict[str, str]) -> str:
    return " ".join(positional[:2])


def _circa(positional: list[str], named: dict[str, str]) -> str:
    return "c. " + " \u2013 c. ".join(map(str.strip, positional[:2]))


def _fraction(positional: list[str], named: dict[str, str]) -> str:
    *whole, top, bottom = ["1", *positional] if len(positional) == 1 else positional or ["", ""]
    return " ".join([*whole, f"{top}/{bottom}"]) if bottom else ""


def _value(positional: list[str], named: dict[str, str]) -> str:
    power = f"\u00d710^{named['e']}" if "e" in named else ""
    unit = named.get("u", named.get("ul", ""))
    return f"{_first(positional, named)}{power} {unit}".strip()


def _as_of(positional: list[str], named: dict[str, str]) -> str:
    year, *rest = [*map(str.strip, positional), ""]
    day = [rest[1]] if len(rest) > 2 else []
    month = rest[0]
    if month.isdecimal() and 1 <= int(month) <= 12:
        month = calendar.month_name[int(month)]
    words = "as of" if named.get("lc") else "As of"
    return " ".join(word for word in [words, *day, month, year] if word)


def _convert(positional: list[str], named: dict[str, str]) -> str:
    """Keeps the measure that was written, not the one it is converted to."""
    parts = [*map(str.strip, positional)]
    words: list[str] = []
    while len(parts) > 2 and parts[1] in _BETWEEN:
        words += [parts[0], _BETWEEN[parts[1]]]
        parts = parts[2:]
    if len(parts) < 2:
        return ""
    words += [parts[0], _UNITS.get(parts[1], parts[1])]
    if len(parts) > 3 and parts[3] in ("in", "oz", "lb"):
        words += parts[2:4]
    return " ".join(words)


_TEMPLATES: dict[str, Callable[[list[str], dict[str, str]], str]] = {
    **{name.replace("_", " "): _first for name in _FIRST.split()},
    **{name: _second for name in _SECOND.split()},
    **{name: _named_ship(name.upper()) for name in _SHIPS.split()},
    **dict.fromkeys(["lang", "script"], _lang),
    **dict.fromkeys(["chem", "chem2", "gaps", "joined"], _joined),
    **dict.fromkeys(["circa", "c.", "ca."], _circa),
    **dict.fromkeys(["frac", "fraction", "sfrac"], _fraction),
    **dict.fromkeys(["convert", "cvt"], _convert),
    "as of": _as_of,
    "ship": _ship,
    "val": _value,
}
