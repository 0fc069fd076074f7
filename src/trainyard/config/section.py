"""What sections of run, cluster and data files share: their base class and types of fields."""

from __future__ import annotations

from typing import Annotated

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainSerializer,
    StringConstraints,
)

from trainyard import units


def _check_split(value: object) -> object:
    """Converts a number to text: on the command line, a single share parses as a number."""
    text = str(value) if isinstance(value, int | float) else value
    if isinstance(text, str):
        units.parse_shares(text)
    return text


Length = Annotated[units.Length, BeforeValidator(units.parse_length), PlainSerializer(str)]
Shares = Annotated[str, BeforeValidator(_check_split)]
Prefixes = Annotated[tuple[str, ...], Field(strict=False)]
Numbers = Annotated[tuple[float, ...], Field(strict=False)]
Rate = Annotated[float, Field(ge=0, lt=1)]
NoneByName = BeforeValidator(lambda value: None if value == "none" else value)
Name = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$", max_length=100)]


class Section(BaseModel):
    """A table of the run file: typed, immutable, unknown fields rejected."""

    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        strict=True,
        validate_default=True,
        use_attribute_docstrings=True,
        arbitrary_types_allowed=True,
        allow_inf_nan=False,
    )
