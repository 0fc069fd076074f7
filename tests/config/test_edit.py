from __future__ import annotations

import tomllib

import pytest

from trainyard.config.edit import set_fields
from trainyard.errors import ConfigError

TEXT = """\
# a run
extends = "gpt3-125m"   # the smallest
train.micro_batch_size = 4 # small

[parallel]
tensor = 2   # inside a node
# the rest is data parallel

[data.blend] # nothing here
prefixes = ["a"]
"""


def test_comments_and_order_stay() -> None:
    values = {
        "parallel.tensor": 4,
        "parallel.sequence": True,
        "parallel.schedule": "interleaved",
        "train.micro_batch_size": 1,
    }
    changed = set_fields(TEXT, values, "run.toml")
    expected = TEXT.replace("tensor = 2", "tensor = 4").replace("size = 4", "size = 1")
    comment = "# the rest is data parallel\n"
    more = f'{comment}sequence = true\nschedule = "interleaved"\n'
    assert changed == expected.replace(comment, more)


def test_a_section_that_is_not_there_comes_last() -> None:
    changed = set_fields('name = "a"\n', {"parallel.tensor": 2, "parallel.pipeline": 4}, "a.toml")
    assert changed == 'name = "a"\n\n[parallel]\ntensor = 2\npipeline = 4\n'


RAMP = """\
name = "a"

[train]
length = "1B tokens" # short

[train.batch_ramp] # slowly
start = 16
# in eight steps
increment = 16

# the rest
[data.blend]
prefixes = ["a"]
"""


def test_an_absent_value_is_written_by_name() -> None:
    values = {"train.batch_ramp": None, "parallel.tensor": 2}
    changed = set_fields(RAMP, values, "a.toml")
    short = 'length = "1B tokens" # short\n'
    before, after = RAMP.split(short)
    rest = after[after.index("# the rest") :]
    expected = f'{before}{short}batch_ramp = "none"\n\n{rest}\n[parallel]\ntensor = 2\n'
    assert changed == expected
    for ramp in ("{ start = 16, increment = 16 }", '"none"'):
        in_line = f"[train]\nbatch_ramp = {ramp} # so\n"
        expected = '[train]\nbatch_ramp = "none" # so\n'
        assert set_fields(in_line, {"train.batch_ramp": None}, "a.toml") == expected
    alone = "[train.batch_ramp]\nstart = 16"
    expected = '\n[train]\nbatch_ramp = "none"\n'
    assert set_fields(alone, {"train.batch_ramp": None}, "a.toml") == expected
    with pytest.raises(ConfigError) as error:
        set_fields("train.batch_ramp.start = 16\n", values, "a.toml")
    assert error.value.hint == 'set these by hand: train.batch_ramp="none", parallel.tensor=2'


@pytest.mark.parametrize(
    "text", ["parallel = { tensor = 2 }\n", "[parallel]\ntensor = [2]\n", '"parallel".tensor = 2\n']
)
def test_unusual_files_are_left_as_they_are(text: str) -> None:
    tomllib.loads(text)
    with pytest.raises(ConfigError, match="is left as it is") as error:
        set_fields(text, {"parallel.tensor": 4}, "run.toml")
    assert error.value.hint == "set these by hand: parallel.tensor=4"
