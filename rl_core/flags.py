"""Fields that are flags: default, range and help. Imports nothing heavy."""

from __future__ import annotations

from dataclasses import field
from typing import TYPE_CHECKING, Annotated, Literal, TypeVar, overload

from annotated_types import Ge, Gt, Le

# Ranges.
Count = Annotated[int, Ge(0)]
AtLeast1 = Annotated[int, Ge(1)]
Positive = Annotated[float, Gt(0)]
NotNegative = Annotated[float, Ge(0)]
Fraction = Annotated[float, Ge(0), Le(1)]
MemoryFraction = Annotated[float, Gt(0), Le(0.99)]

T = TypeVar("T")

if TYPE_CHECKING:
    OneOf = Annotated
else:

    class OneOf:
        """OneOf[str, TABLE] is the Literal of the names in a table."""

        def __class_getitem__(cls, parameters):
            _, names = parameters
            return Literal[tuple(names)]


@overload
def flag(default: type[T], help: str, only: tuple[str, ...] = ()) -> T: ...
@overload
def flag(default: T, help: str, only: tuple[str, ...] = ()) -> T: ...
def flag(default, help, only=()):
    """A field with its help line. A type as default makes a section, a list or a dict. Setting the
    flag for an algorithm that is neither in `only` nor in that of the section is refused; the flag
    is for all algorithms if both are empty."""
    metadata = {"help": help, "only": only}
    if isinstance(default, type):
        return field(default_factory=default, metadata=metadata)
    return field(default=default, metadata=metadata)
