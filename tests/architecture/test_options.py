"""How many files know of an option of the model: one more is one more to change with it.

`architecture.py` is the one description of layers; what follows from it asks it, not the run.
"""

from __future__ import annotations

import ast
import re

import pytest

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
    "documents": (r"attention_within_documents|end_of_document_id", 13),
}


class _WithoutText(ast.NodeTransformer):
    """Drops docstrings, also those of attributes; comments are gone once a file is parsed."""

    def visit_Expr(self, node: ast.Expr) -> ast.Expr | ast.Pass:
        is_text = isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
        return ast.Pass() if is_text else node


CODE = {
    name_of(path): ast.unparse(_WithoutText().visit(ast.parse(path.read_text(encoding="utf-8"))))
    for path in FILES
}


@pytest.mark.parametrize("option", BUDGETS)
def test_files_that_know_of_an_option(option: str) -> None:
    pattern, budget = BUDGETS[option]
    files = [name for name, code in CODE.items() if re.search(pattern, code)]
    assert len(files) <= budget, files
