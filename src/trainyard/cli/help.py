"""The verbs and their help: options in groups, examples one a line, at any terminal width."""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cache
from importlib import import_module
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup
from typer.main import get_command

PROGRAM = "trainyard"
VERBS = (
    *("prepare", "new", "check", "plan", "train", "launch", "status", "evaluate", "generate"),
    *("report", "export", "import", "show", "doctor", "bench", "demo", "completion"),
)
"""In the order of the work; each is a function or a `Typer`, in a module here of its name."""

GROUPS: Mapping[str, Mapping[str, str]] = {
    "prepare": {
        "Tokens": "tokenizer train_tokenizer json_key append_eod special_tokens split_on",
        "Downloading": "fetch only mirror contact",
    },
    "new": {"Devices": "cluster nodes gpu gpus"},
    "plan": {
        "Devices": "cluster nodes gpu gpus price storage",
        "Searching": "search measure deadline",
        "Simulating": "simulate rank all_stages",
        "Output": "flop_formula picture as_json",
    },
    "launch": {
        "Nodes": "cluster nodes ranks_per_node hosts here",
        "Job": "account partition time image stages contact",
    },
    "show": {
        "Fields": "fields all_fields schema",
        "Token files and order": "tokenizer dropped split start count output",
    },
    "generate": {"Sampling": "temperature top_k top_p samples seed"},
}
"""Verb to groups of its options, in order; other options come under Options."""
_EXAMPLE = re.compile(r"^Examples?:\s*")


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
    """A verb whose help has groups of options, and examples as typed."""

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
        groups = GROUPS.get(self.name or "", {})
        group_of = {name: group for group, names in groups.items() for name in names.split()}
        rows: dict[str, list[tuple[str, str]]] = {"Arguments": [], **{name: [] for name in groups}}
        for parameter in self.get_params(ctx):
            record = parameter.get_help_record(ctx)
            if record is not None:
                is_argument = parameter.param_type_name == "argument"
                group = group_of.get(parameter.name or "", "Options")
                row = (re.sub(r" (<list\[(str|Path)\]>|<str>)$", "", record[0]), record[1])
                rows.setdefault("Arguments" if is_argument else group, []).append(row)
        for title, records in rows.items():
            if records:
                with formatter.section(title):
                    formatter.write_dl(records)

    def _paragraphs(self) -> list[str]:
        return (self.help or "").strip().split("\n\n")
