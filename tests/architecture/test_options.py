"""How many files know of an option: one more is one more to change with it.

`architecture.py` is the one description of layers; what follows from it asks it, not the run.
"""

from __future__ import annotations

import ast
import re

from .test_budgets import FILES, name_of

# What the code of a file says of an option, and the most files that may; lower it when one less
# does. One file of each is `planning/program.py`, which has the kernels of each part.
BUDGETS = {
    "rotary positions": (r"'rotary'|rotary_base|rotary_scaling", 8),
    "RMSNorm": (r"'rms'|model\.norm\b", 6),
    "SwiGLU": (r"'swiglu'|'gelu'", 7),
    "grouped queries": (r"n_key_value_heads", 8),
    "query-key norm": (r"query_key_norm", 4),
    "place of norms": (r"norm_place", 6),
    "documents": (r"attention_within_documents|end_of_document_id", 12),
    "ZeRO": (r"zero_stage", 12),  # others ask `Parallel.shards_weights` and the like
}


class _WithoutText(ast.NodeTransformer):
    """Drops docstrings, also those of attributes; comments are gone once a file is parsed."""

    def visit_Expr(self, node: ast.Expr) -> ast.Expr | ast.Pass:
        is_text = isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
        return ast.Pass() if is_text else node


def test_files_that_know_of_an_option() -> None:
    files: dict[str, list[str]] = {option: [] for option in BUDGETS}
    for path in FILES:
        code = ast.unparse(_WithoutText().visit(ast.parse(path.read_text(encoding="utf-8"))))
        for option, (pattern, _) in BUDGETS.items():
            if re.search(pattern, code):
                files[option].append(name_of(path))
    assert not {name: found for name, found in files.items() if len(found) > BUDGETS[name][1]}


def test_docstrings_say_what_a_thing_is() -> None:
    """A docstring that begins with "Of" needs the name of the field to be read."""
    begins = re.compile(r'^ *"""Of ', re.MULTILINE)
    assert not [name_of(path) for path in FILES if begins.search(path.read_text(encoding="utf-8"))]
