"""Trainyard: pretrains language models from raw text, from one run file.

`__init__.pyi` lists the names for type checkers; each is imported when it is first used.
"""

from importlib import import_module
from typing import Any

__version__ = "0.2.0"

_MODULES = {
    **{"load_run": "api.planning", "plan": "api.planning"},
    **{"prepare": "api.running", "train": "api.running"},
    **{"Checkpoint": "api.checkpoints", "generate": "api.checkpoints"},
    **{"evaluate": "api.checkpoints", "evaluate_tasks": "api.checkpoints"},
    "read_metrics": "report.metrics",
    "fit_law": "sweeps.law",
    "TrainyardError": "errors",
}
__all__ = ["__version__", *_MODULES]


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module 'trainyard' has no attribute {name!r}")
    return getattr(import_module(f"trainyard.{_MODULES[name]}"), name)


def __dir__() -> list[str]:
    return __all__
