"""Scripts of Megatron-LM, read without running them: the arguments they are started with."""

from __future__ import annotations

from pathlib import Path

import pytest

from trainyard.errors import ConfigError
from trainyard.export.megatron_flags import import_command
from trainyard.export.shell_script import read_command


@pytest.mark.parametrize("spelling", ["$@", '"$@"', '"${@}"', "$*", '"${MORE[@]}"'])
@pytest.mark.parametrize("arguments", [[], ["--lr", "2"]])
def test_arguments_that_a_script_passes_on(spelling: str, arguments: list[str]) -> None:
    script = f"MORE=($@)\npython pretrain_gpt.py --seed 1 {spelling}\n"
    assert read_command(script, arguments, {})[0] == ["--seed", "1", *arguments]


def test_an_argument_that_is_missing_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("train.sh").write_text("DATA=$2\npython pretrain_gpt.py --data-path $DATA\n")
    with pytest.raises(ConfigError) as raised:
        import_command("train.sh out", [], "x")
    assert str(raised.value) == (
        "cannot resolve $2, an argument of the script, which --data-path needs\n"
        'hint: give the arguments after the script, in the same quotes: "train.sh ARGUMENT ..."'
    )
