from __future__ import annotations

import re

from trainyard.cli.show_run import render_fields, render_run_summary
from trainyard.config.load import all_fields, load_run
from trainyard.config.schema import field_manuals


def summary(name: str, *overrides: str, all_fields: bool = False) -> list[str]:
    text = render_run_summary(load_run(name, list(overrides)), with_defaults=all_fields)
    return text.plain.splitlines()


def value_line(lines: list[str], field: str) -> str:
    return next(" ".join(line.split()) for line in lines if line.startswith(f"  {field} "))


def test_summary_of_a_preset() -> None:
    lines = summary("gpt3-13b")
    assert lines[0] == "gpt3-13b"
    assert "5140" in " ".join(lines[1:8])
    facts = {line[:11].strip(): line[11:] for line in lines}
    for name, value in {
        "model": "40 blocks of width 5,120, 40 heads of 128, sequences of 2,048 tokens",
        "parameters": "12,853,626,880 (12.9B)",
        "vocabulary": "50,257 tokens, padded to 50,304 rows",
        "compute": "7.956e+10 model FLOP a token (megatron_causal), ",
        "batch": "1,024 sequences = 2,097,152 tokens, growing from 64 over 8B tokens",
    }.items():
        assert facts[name].startswith(value)
    assert facts["length"].endswith("tokens (300B)")
    parts = "embedding 257,556,480, positions 10,485,760, blocks 12,585,574,400, final norm 10,240"
    assert parts in map(str.strip, lines)
    assert any("head 32,768" in line for line in summary("tiny", "model.tied_embeddings=false"))


EXPERTS = ("model.n_experts=8", "model.mlp=swiglu", "model.bias=false", "model.n_dense_blocks=1")


def test_summary_of_experts() -> None:
    lines = summary("tiny", *EXPERTS, "model.n_shared_experts=1")
    parts = "SwiGLU, 8 experts of 256, 2 active, 1 shared, dense blocks first: 1, no biases"
    assert f"parts      {parts}" in lines
    # Of the second block's experts six are inactive: three matrices of 64 x 256 each.
    (size,) = (line for line in lines if line.startswith("parameters"))
    n_all, n_active = (int(n.replace(",", "")) for n in re.findall(r"([\d,]+) \(", size))
    assert n_all - n_active == 6 * 3 * 64 * 256 > 0


def test_values_come_with_their_origin() -> None:
    lines = summary("tiny", "train.seed=3")
    assert value_line(lines, "train.seed") == "train.seed = 3 command line"
    assert value_line(lines, "train.length") == 'train.length = "50 steps" tiny'
    assert not any("guard." in line for line in lines)
    lines = summary("tiny", "data.blend.prefixes=['a','b','c','d','e']")
    assert '["a", ... 4 more]' in value_line(lines, "data.blend.prefixes")


def test_all_fields_are_shown_when_asked() -> None:
    lines = summary("tiny", all_fields=True)
    expected = "guard.skipped_steps_limit = 10 default"
    assert value_line(lines, "guard.skipped_steps_limit") == expected
    assert value_line(lines, "train.stop_after_minutes").endswith("= inf default")
    shown = {line.split()[0] for line in lines if " = " in line and line.startswith("  ")}
    optional = ("train.batch_ramp.", "model.rotary_scaling.", "model.end_of_document_id")
    optional += ("model.base_d_expert",)
    absent = {field for field in all_fields() if field.startswith(optional)}
    assert shown == set(all_fields()) - absent - {"description"}


def test_a_layout_names_its_smallest_number_of_ranks_and_its_stages() -> None:
    cut = ["parallel.tensor=2", "parallel.pipeline=2", "parallel.chunks=2"]
    lines = summary("tiny", "model.n_layers=6", *cut, "parallel.schedule=interleaved")
    assert "layout     pipeline 2 (interleaved, 2 chunks) x tensor 2, ZeRO stage 1, fp32" in lines
    assert "ranks      4 at least; micro batches of each in a step: 2 of 4 sequences" in lines
    assert "stages     blocks by pipeline rank: 0, 3-4 | 1-2, 5" in lines
    lines = summary("tiny", "parallel.data_replicate=2")
    assert "layout     replicas 2, ZeRO stage 1, fp32" in lines
    lines = summary("tiny")
    assert "layout     one process, ZeRO stage 1, fp32" in lines
    assert not any(line.startswith(("ranks ", "stages ")) for line in lines)


def test_manual_has_every_field_with_its_default() -> None:
    lines = render_fields().plain.splitlines()
    for field, manual in field_manuals().items():
        assert any(line.split(" = ")[0] == field for line in lines), field
        assert manual.split()[0] in " ".join(lines)
    assert "optimizer.betas = [0.9, 0.95]" in lines
    assert 'train.length = "300B tokens"' in lines
