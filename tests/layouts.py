"""Layouts and variants of a small run by name, such as "dp2 tp2 sequence zero3, olmo bf16".

Each word is a size (`tp2`) or a choice (`ring`). A table of cases is a list of such names, which
pytest shows as they are.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from trainyard.topology import Topology

Sections = dict[str, dict[str, Any]]

SIZES = {
    **{"tp": "tensor", "pp": "pipeline", "cp": "context"},
    **{"hsdp": "data_replicate", "zero": "zero_stage", "ep": "expert"},
}
MODEL: dict[str, dict[str, Any]] = {
    "dropout": {"dropout": 0.2},
    "untied": {"tied_embeddings": False},
    "rotary": {"positions": "rotary"},
    "scaled-rotary": {
        "positions": "rotary",
        "rotary_scaling": {"original_sequence_length": 8, "factor": 4.0},
    },
    "rms": {"norm": "rms"},
    "swiglu": {"mlp": "swiglu"},
    "grouped": {"n_heads": 8, "n_key_value_heads": 4},
    "multi-query": {"n_key_value_heads": 1},
    "few-keys": {"n_heads": 8, "n_key_value_heads": 2},
    "head-norm": {"query_key_norm": "head"},
    "all-norm": {"query_key_norm": "all"},
    "norm-after": {"norm_place": "after"},
    "no-bias": {"bias": False},
    "wide-heads": {"d_head": 12},
}
LLAMA = {
    key: value
    for word in ("rotary", "rms", "swiglu", "grouped", "no-bias", "wide-heads")
    for key, value in MODEL[word].items()
}
MODEL["modern"] = LLAMA | MODEL["head-norm"]
MODEL["experts"] = {
    **MODEL["swiglu"] | MODEL["no-bias"],
    **{"n_experts": 8, "n_active_experts": 2, "d_expert": 96},
}
MODEL["deepseek"] = MODEL["experts"] | {
    **{"n_shared_experts": 2, "n_dense_blocks": 1, "router": "sigmoid", "balance": "bias"},
    **{"n_expert_groups": 4, "n_active_groups": 2},
}
# Every token uses all experts: their load is equal, whatever the router chooses.
MODEL["equal-load"] = MODEL["experts"] | {"n_active_experts": 8}
MODEL["olmo"] = LLAMA | MODEL["all-norm"] | MODEL["norm-after"]
WORDS: dict[str, Sections] = {
    "sequence": {"parallel": {"sequence": True}},
    "ulysses": {"parallel": {"context_method": "ulysses"}},
    "ring": {"parallel": {"context_method": "ring"}},
    "1f1b": {"parallel": {"schedule": "1f1b"}},
    "gpipe": {"parallel": {"schedule": "gpipe"}},
    "interleaved": {"parallel": {"schedule": "interleaved", "chunks": 2}},
    "zero-bubble": {"parallel": {"schedule": "zero_bubble"}},
    "zero-bubble-chunks": {"parallel": {"schedule": "zero_bubble", "chunks": 2}},
    "recompute-block": {"parallel": {"recompute": "block"}},
    "half": {"parallel": {"recompute_share": 0.5}},
    "recompute-attention": {"parallel": {"recompute": "attention"}},
    **{word: {"model": fields} for word, fields in MODEL.items()},
    "muon": {"optimizer": {"kind": "muon"}},
    "gather": {"precision": {"fp8": {"all_gather": True}}},
    "reduce-bf16": {"parallel": {"reduce_format": "bf16"}},
    "rowwise": {"precision": {"fp8": {"scaling": "rowwise"}}},
    "emulated": {"precision": {"fp8": {"emulate": True}}},
    **{kind: {"precision": {"kind": kind}} for kind in ("fp32", "bf16", "fp16", "fp8")},
    "fp8_lowbit": {"precision": {"kind": "fp8_lowbit"}},
}


@dataclass(frozen=True)
class Layout:
    """What a name changes in a run, and the size of data parallelism."""

    sections: Sections
    data: int

    @property
    def parallel(self) -> dict[str, Any]:
        """The fields of `parallel` that it sets."""
        return self.sections.get("parallel", {})

    @property
    def topology(self) -> Topology:
        """Its ranks along each axis."""
        sizes = {axis: self.parallel.get(axis, 1) for axis in ("pipeline", "context", "tensor")}
        replicate = self.parallel.get("data_replicate", 1)
        expert = self.parallel.get("expert", 1)
        return Topology(replicate=replicate, shard=self.data // replicate, expert=expert, **sizes)

    @property
    def n_ranks(self) -> int:
        """The processes it takes."""
        return self.topology.n_ranks

    @property
    def overrides(self) -> list[str]:
        """What it changes, as words of a command."""
        return list(_flatten("", self.sections))


def read_layout(name: str, more: dict[str, Sections] | None = None) -> Layout:
    """Reads a name; `more` has what a test's own words change."""
    words = WORDS | (more or {})
    sections: Sections = {}
    data = 1
    for word in name.replace(",", " ").split():
        size = re.fullmatch(r"([a-z]+)(\d+)", word)
        if word in words:
            sections = merge(sections, words[word])
        elif size and size[1] == "dp":
            data = int(size[2])
        else:
            assert size, f"{word!r} of {name!r} is no word of a layout"
            sections = merge(sections, {"parallel": {SIZES[size[1]]: int(size[2])}})
    return Layout(sections, data)


def merge(one: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
    """Returns nested dictionaries as one, in which the values of the other win."""
    return one | {
        key: merge(one.get(key, {}), value) if isinstance(value, dict) else value
        for key, value in other.items()
    }


def _flatten(prefix: str, fields: dict[str, Any]) -> Iterator[str]:
    for name, value in fields.items():
        if isinstance(value, dict):
            yield from _flatten(f"{prefix}{name}.", value)
        else:
            yield f"{prefix}{name}={str(value).lower() if isinstance(value, bool) else value}"
