"""The verbs and their help: options in groups, examples one a line, at any terminal width."""

from __future__ import annotations

import re
from functools import cache
from importlib import import_module
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup
from typer.main import get_command

PROGRAM = "trainyard"
VERBS = (
    *("prepare", "new", "check", "plan", "train", "sweep", "ladder", "launch", "status"),
    *("evaluate", "generate", "report", "export", "import", "show", "doctor", "bench", "demo"),
    "completion",
)
"""In the order of the work; each is a function or a `Typer`, in a module here of its name."""

_EXAMPLE = re.compile(r"^Examples?:\s*")
_OPTION = re.compile(r"^ {4}(\w+):", re.MULTILINE)


class Verbs(TyperGroup):
    """The verbs; each is imported when it is needed."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.commands: dict[str, Any] = dict.fromkeys(VERBS)

    def get_command(self, _ctx: Any, name: str) -> Any:
        """Imports a verb."""
        return _import(name) if name in self.commands else None


@cache
def _import(name: str) -> Any:
    module = "import_" if name == "import" else name
    verb = getattr(import_module(f"trainyard.cli.{module}"), module)
    if not isinstance(verb, typer.Typer):
        function, verb = verb, typer.Typer(add_completion=False, rich_markup_mode=None)
        verb.command(name, cls=Verb)(function)
    command = get_command(verb)
    command.name = name
    command.short_help = (command.help or "").partition("\n")[0]  # wrapped instead of cut
    return command


class Verb(TyperCommand):
    """A verb whose help has groups of options, and examples as typed.

    The docstring of its function ends in the groups, with the help of each option that is not
    shared by verbs:

        Devices:
            gpu:
            gpus: Number of devices. Default: 1.

        Options:
            overwrite: Start over.
    """

    def __init__(self, name: str | None, *, help: str | None, **settings: Any) -> None:
        parameters = {one.name: one for one in settings["params"]}
        self._groups: dict[str, str] = {}
        paragraphs = []
        for paragraph in (help or "").split("\n\n"):
            group, _, entries = paragraph.partition(":\n")
            if not entries.startswith("    "):
                paragraphs.append(paragraph)
                continue
            words = _OPTION.split(entries)
            for option, text in zip(words[1::2], words[2::2], strict=True):
                self._groups[option] = group
                parameters[option].help = " ".join(text.split()) or parameters[option].help
        super().__init__(name, help="\n\n".join(paragraphs), **settings)

    def format_help_text(self, ctx: Any, formatter: Any) -> None:
        """Writes the description without its examples."""
        for paragraph in self._paragraphs():
            if not _EXAMPLE.match(paragraph):
                formatter.write_paragraph()
                with formatter.indentation():
                    formatter.write_text(paragraph)

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Writes the examples, the arguments, and each group of options."""
        examples = [
            line
            for paragraph in self._paragraphs()
            if _EXAMPLE.match(paragraph)
            for line in _EXAMPLE.sub("", paragraph).splitlines()
            if line
        ]
        if examples:
            with formatter.section("Examples"):
                for line in examples:  # never wrapped: they are there to be copied
                    formatter.write(f"{'':{formatter.current_indent}}{line}\n")
        groups = ("Arguments", *dict.fromkeys(self._groups.values()))
        rows: dict[str, list[tuple[str, str]]] = {group: [] for group in groups}
        for parameter in self.get_params(ctx):
            record = parameter.get_help_record(ctx)
            if record is not None:
                is_argument = parameter.param_type_name == "argument"
                group = self._groups.get(parameter.name or "", "Options")
                row = (re.sub(r" (<list\[(str|Path)\]>|<str>)$", "", record[0]), record[1])
                rows.setdefault("Arguments" if is_argument else group, []).append(row)
        for title, records in rows.items():
            if records:
                with formatter.section(title):
                    formatter.write_dl(records)

    def _paragraphs(self) -> list[str]:
        return (self.help or "").strip().split("\n\n")
