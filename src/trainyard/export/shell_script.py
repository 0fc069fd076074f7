"""Reads the training command of a shell script without executing it.

It knows assignments (also of arrays and `+=`), line continuations, `$NAME`, `${NAME}`,
`${NAME:-default}`, `$((arithmetic))`, `$(pwd)`, here-documents and `if [ .. ]`.
What it cannot resolve stands as <NAME>, and is an error only where the training needs it.
It does not follow `source FILE`, which it reports, or functions and loops.
"""

from __future__ import annotations

import ast
import logging
import operator
import re
import shlex
from collections.abc import Callable
from dataclasses import dataclass, field

from trainyard.errors import ConfigError

logger = logging.getLogger("trainyard")

UNRESOLVED = re.compile("\ue000([^\ue001]*)\ue001")
_EXPANSION = re.compile(
    r"\$\(\((?P<sum>(?:[^()]|\([^()]*\))*)\)\)|\$\((?P<run>(?:[^()]|\([^()]*\))*)\)|`(?P<old>[^`]*)`"
    r"|\$\{(?P<braced>\w+|[@*])(?:\[[@*]\])?(?::?-(?P<default>(?:[^{}]|\{[^{}]*\})*))?\}"
    r"|\$(?P<plain>\w+|[\#@*])"
)
_LISTS = re.compile(r"\"(\$@|\$\{(?:@|\w+\[@\])\})\"")  # empty ones are no word
_ASSIGNMENT = re.compile(r"(?:export\s+|local\s+)?([A-Za-z_]\w*)(\+?)=(.*)", re.DOTALL)
_HEREDOC = re.compile(
    r"^[^\n#]*<<-?\s*(['\"]?)(\w+)\1(?:\s*>\s*(\S+))?[^\n]*\n(.*?)^\s*\2\s*$",
    re.DOTALL | re.MULTILINE,
)
_COMPARISON = re.compile(r"\[\[?\s+(.+?)\s+(==|=|!=|-eq|-ne|-gt|-ge|-lt|-le)\s+(.+?)\s+\]\]?")
_ENVIRONMENT = "(?:NCCL|CUDA|OMP|UCX|FI|MPICH|GLOO|NVTE|TORCH|PYTORCH|TRITON|HSA|ROCM|MIOPEN|RCCL)"
_OPERATORS: dict[type[ast.AST], Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.floordiv,
    ast.Mod: operator.mod,
}
_COMPARE: dict[str, Callable[[float, float], bool]] = {
    f"-{name}": getattr(operator, name) for name in ("eq", "ne", "gt", "ge", "lt", "le")
}


@dataclass
class Script:
    """The state of a reading: variables, files that it would write, commands that train."""

    variables: dict[str, str]
    files: dict[str, str] = field(default_factory=dict)
    commands: list[str] = field(default_factory=list)
    not_followed: list[str] = field(default_factory=list)

    def read(self, text: str) -> None:
        """Reads all statements; variables that are set already win over assignments."""
        given = frozenset(self.variables)
        text = text.replace("\r\n", "\n").replace("\\\n", " ")
        text = _LISTS.sub(r"\1", text)
        blocks: list[tuple[bool | None, bool | None]] = []  # this branch, any branch so far
        for statement in _statements(text):
            branches = [branch for branch, _ in blocks]
            state = False if False in branches else None if None in branches else True
            word, _, rest = statement.partition(" ")
            if word in ("if", "elif"):
                before = blocks.pop()[1] if word == "elif" else False
                holds = self._test(rest)
                branch = holds if before is False else None if before is None and holds else False
                blocks.append((branch, before or holds))
            elif word == "else" and blocks:
                before = blocks.pop()[1]
                blocks.append((None if before is None else not before, True))
            elif word in ("for", "while", "until", "case", "function") or word.endswith("()"):
                blocks.append((None, None))
            elif word in ("fi", "done", "esac", "}") and blocks:
                blocks.pop()
            elif state is not False:
                self._run(statement, state, given)

    def _run(self, statement: str, state: bool | None, given: frozenset[str]) -> None:
        assignment = _ASSIGNMENT.fullmatch(statement)
        if document := _HEREDOC.match(statement + "\n"):
            if document[3]:
                name = self.expand(document[3].strip("\"'"))
                self.files[name] = document[4] if document[1] else self.expand(document[4])
        elif assignment and assignment[1] not in given:
            name, plus, value = assignment.groups()
            value = value[1:-1] if value.startswith("(") else value
            value = self.expand(re.sub("['\"]", "", value))
            value = f"{self.variables.get(name, '')} {value}" if plus else value
            value = re.sub("\ue000[$][^\ue001]*", f"\ue000{name}", value)
            self.variables[name] = value if state else f"\ue000{name}\ue001"
        elif re.match(r"(?:source|\.)\s", statement):
            self.not_followed.append(self.expand(statement))
        elif re.search(r"pretrain\w*\.py\b", statement):
            self.commands.append(self.expand(re.split(r"\s(?:\||\d?>|&)", statement)[0]))

    def expand(self, text: str) -> str:
        """Replaces expansions by their values, or by <NAME> in private characters."""
        return _EXPANSION.sub(self._value, text)

    def _value(self, match: re.Match[str]) -> str:
        if match["sum"] is not None:
            inner = re.sub(r"(?<![\w$])[A-Za-z_]\w*", r"$\g<0>", self.expand(match["sum"]))
            return _calculate(self.expand(inner))
        if (command := match["run"] or match["old"]) is not None:
            echo = re.fullmatch(r"\s*echo\s+([^|;]*)", command)
            if command.strip() == "pwd":
                return "."
            return self.expand(echo[1].replace('"', "")) if echo else f"\ue000$({command})\ue001"
        name = match["braced"] or match["plain"]
        if not self.variables.get(name) and match["default"] is not None:
            return self.expand(match["default"].strip("\"'"))
        return self.variables.get(name, f"\ue000{name}\ue001")

    def _test(self, condition: str) -> bool | None:
        match = _COMPARISON.fullmatch(condition.strip().removesuffix("; then").strip())
        if not match:
            return None
        left, sign, right = (self.expand(part.strip("\"'")) for part in match.groups())
        if UNRESOLVED.search(left + right):
            return None
        if sign in _COMPARE:
            try:
                return _COMPARE[sign](int(left), int(right))
            except ValueError:
                return None
        return (left == right) is not (sign == "!=")


def _calculate(text: str) -> str:
    """Evaluates + - * / % of whole numbers as a shell does."""

    def value(node: ast.AST) -> int:
        if isinstance(node, ast.Constant) and type(node.value) is int:
            return node.value
        if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
            return _OPERATORS[type(node.op)](value(node.left), value(node.right))
        raise ValueError(text)

    try:
        return str(value(ast.parse(text.strip(), mode="eval").body))
    except (ValueError, SyntaxError, ZeroDivisionError, RecursionError):
        names = UNRESOLVED.findall(text)
        return f"\ue000{names[0] if names else text}\ue001"


def _statements(text: str) -> list[str]:
    """Splits a script at line ends and semicolons outside quotes, parentheses and documents."""
    statements, start, depth, quote, i = [], 0, 0, "", 0
    while i <= len(text):
        c = text[i] if i < len(text) else "\n"
        if not quote and c == "\n" and depth == 0 and "<<" in text[start:i]:
            document = _HEREDOC.match(text, start)
            i = document.end() if document else i
        if quote:
            quote = "" if c == quote else quote
        elif c in "'\"":
            quote = c
        elif c == "#" and (i == 0 or text[i - 1] in " \t\n;("):
            end = text.find("\n", i)
            text = text[:i] + (text[end:] if end >= 0 else "")
            continue
        elif c in "()" and (depth or c == "("):
            depth += 1 if c == "(" else -1
        elif c in "\n;" and depth == 0:
            statement = re.sub(r"^(?:then|do|else(?=\s+\S)|\{)\s+", "", text[start:i].strip())
            statements += [statement] if statement not in ("", "then", "do", "{") else []
            start = i + 1
        i += 1
    return statements


def read_command(
    source: str, arguments: list[str], settings: dict[str, str]
) -> tuple[list[str], dict[str, str]]:
    """Returns the words of the one training command in a script, and the files it would write.

    Args:
        source: text of the script.
        arguments: its positional arguments.
        settings: variables of the user; they win over assignments in the script.

    Raises:
        ConfigError: the script has no training command, or several that differ.
    """
    own = {"PWD": ".", "#": str(len(arguments)), **dict.fromkeys("@*", " ".join(arguments))}
    own |= {str(i): value for i, value in enumerate(arguments, 1)}
    script = Script(own | settings)
    script.read(source)
    commands = sorted(set(script.commands))
    if len(commands) != 1:
        raise ConfigError(
            f"the script has {len(commands) or 'no'} commands with pretrain_gpt.py",
            "choose with its arguments or --set NAME=value, or give the command line itself "
            "(`source FILE`, functions and loops are not followed)",
        )
    if script.not_followed:
        texts = UNRESOLVED.sub(r"$\1", ", ".join(dict.fromkeys(script.not_followed)))
        logger.warning(
            "not followed: %s; if it sets values of the command: --set NAME=value", texts
        )
    words = split_command(commands[0])  # the quotes of "${ARGUMENTS[@]}" are gone: split again
    return [part for word in words for part in (word.split() or [word])], script.files


def dropped_lines(source: str) -> list[str]:
    """Returns a note on the scheduler's options and the environment that a script sets, if any."""
    options = sorted(set(re.findall(r"^#(?:SBATCH|PBS|BSUB)\b", source, re.MULTILINE)))
    variables = re.findall(rf"^\s*export\s+({_ENVIRONMENT}_\w+)=", source, re.MULTILINE)
    dropped = [*(f"{option} lines" for option in options), *sorted(set(variables))]
    return [f"not imported: {', '.join(dropped)}: they belong in a cluster file"] if dropped else []


def split_command(line: str) -> list[str]:
    """Splits a command line into words.

    Raises:
        ConfigError: a quote is not closed.
    """
    try:
        words = shlex.split(line.replace("\\\n", " "))
    except ValueError as error:
        raise ConfigError(f"cannot read the command line: {error}") from None
    start = next((i + 1 for i, word in enumerate(words) if word.endswith(".py")), 0)
    return words[start:]
