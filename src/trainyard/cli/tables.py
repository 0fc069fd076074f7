"""Tables that several verbs print."""

from __future__ import annotations

from rich.table import Table
from rich.text import Text

from trainyard.errors import escape


def facts_table(title: str, facts: dict[str, str]) -> Table:
    """Renders names and values below a title."""
    table = Table(title=Text(escape(title)), title_justify="left", show_header=False, box=None)
    for name, value in facts.items():
        table.add_row(Text(escape(name)), Text(escape(value)))
    return table
