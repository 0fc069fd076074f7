"""What sections of run, cluster and data files share: their base class and types of fields."""

from __future__ import annotations

import ast
import inspect
import json
import textwrap
from functools import cache
from itertools import pairwise
from typing import Annotated, Any, Literal, Self, TypeVar

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    GetJsonSchemaHandler,
    PlainSerializer,
    StringConstraints,
    model_validator,
)

from trainyard import units

_Item = TypeVar("_Item")


def _check_split(value: object) -> object:
    """Converts a number to text: on the command line, a single share parses as a number."""
    text = str(value) if isinstance(value, int | float) else value
    if isinstance(text, str):
        units.parse_shares(text)
    return text


Length = Annotated[units.Length, BeforeValidator(units.parse_length), PlainSerializer(str)]
Points = Annotated[units.RatePoints, BeforeValidator(units.parse_points), PlainSerializer(str)]
Interval = Annotated[
    Annotated[int, Field(ge=0)] | units.Duration,
    BeforeValidator(units.parse_interval),
    PlainSerializer(lambda interval: interval if isinstance(interval, int) else str(interval)),
]
Shares = Annotated[str, BeforeValidator(_check_split)]
ListOf = Annotated[tuple[_Item, ...], Field(strict=False)]
"""A list in a file, a tuple here."""
Rate = Annotated[float, Field(ge=0, lt=1)]
NoneByName = BeforeValidator(lambda value: None if value == "none" else value)
_BY_TRUTH = BeforeValidator(
    lambda value: ("none", "head")[value] if isinstance(value, bool) else value
)
QueryKeyNorm = Annotated[Literal["none", "head", "all"], _BY_TRUTH]
Name = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$", max_length=100)]


def as_toml(value: Any) -> str:
    """Formats a value as in a run file; shortens long lists to their first entry."""
    if isinstance(value, tuple):
        shown = [as_toml(entry) for entry in value]
        if len(shown) > 3:
            shown = [shown[0], f"... {len(shown) - 1} more"]
        return f"[{', '.join(shown)}]"
    if isinstance(value, units.Length | units.Duration | units.RatePoints):
        return f'"{value}"'
    if value is None:
        return "none"
    return "inf" if value == float("inf") else json.dumps(value)


class Section(BaseModel):
    """A table of the run file: typed, immutable, unknown fields rejected."""

    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        strict=True,
        validate_default=True,
        arbitrary_types_allowed=True,
        allow_inf_nan=False,
    )

    @classmethod
    def __get_pydantic_json_schema__(
        cls, core_schema: Any, handler: GetJsonSchemaHandler
    ) -> dict[str, Any]:
        """Adds the documentation of the fields."""
        schema = handler(core_schema)
        properties = handler.resolve_ref_schema(schema)["properties"]
        for name, text in describe_fields(cls).items():
            properties[name]["description"] = text
        return schema


@cache
def describe_fields(section: type[BaseModel]) -> dict[str, str]:
    """Returns the docstring below each field, from the source.

    Pydantic would read all of them at every start of a command, which takes 45 ms.
    """
    texts: dict[str, str] = {}
    for kind in section.__mro__:
        if issubclass(kind, Section) and kind is not Section:
            (tree,) = ast.parse(textwrap.dedent(inspect.getsource(kind))).body
            assert isinstance(tree, ast.ClassDef)
            for field, below in pairwise(tree.body):
                match field, below:
                    case (
                        ast.AnnAssign(target=ast.Name(id=name)),
                        ast.Expr(value=ast.Constant(value=str(text))),
                    ):
                        texts.setdefault(name, inspect.cleandoc(text))
    return texts


class RotaryScaling(Section):
    """Llama 3's change of rotary frequencies for longer sequences (arXiv:2407.21783)."""

    factor: float = Field(default=8.0, ge=1)
    """Divides the low frequencies."""
    low_frequency_factor: float = Field(default=1.0, gt=0)
    """Frequencies that turn fewer times in the original sequence are low."""
    high_frequency_factor: float = Field(default=4.0, gt=0)
    """Frequencies that turn more often stay; those between change gradually."""
    original_sequence_length: int = Field(default=8192, ge=1)
    """Tokens per sequence before."""

    @model_validator(mode="after")
    def _low_is_below_high(self) -> Self:
        low, high = self.low_frequency_factor, self.high_frequency_factor
        if low >= high:
            raise ValueError(
                f"low_frequency_factor={low} is not below high_frequency_factor={high}"
            )
        return self
