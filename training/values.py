"""Values of a recipe, checked against the annotations of the dataclass that holds them.

A field says what it takes by its type: `Count | None`, `tuple[Share, Share]`, `Literal["zero", "copy"]`, or
`Annotated[int, Bounds(1)]` for a range. What does not match is refused with the field, the value and what is allowed.
"""

import dataclasses
import math
import types
import typing
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal


class RecipeError(ValueError):
    """A recipe or a `key=value` word that cannot be used; the message says where it stands and what is allowed."""


@dataclass(frozen=True)
class Bounds:
    """Allowed values of a number: at least `low` (more than it where `above`), at most `high`."""

    low: float
    high: float = math.inf
    above: bool = False

    def __contains__(self, value: float) -> bool:
        return (value > self.low if self.above else value >= self.low) and value <= self.high

    def __str__(self) -> str:
        lower = f"{'above' if self.above else 'of at least'} {self.low:g}"
        return lower if math.isinf(self.high) else f"{lower} and at most {self.high:g}"


Count = Annotated[int, Bounds(1)]
CountFrom0 = Annotated[int, Bounds(0)]
Positive = Annotated[float, Bounds(0, above=True)]
NotNegative = Annotated[float, Bounds(0)]
Share = Annotated[float, Bounds(0, 1)]


@dataclass(frozen=True)
class Section:
    """A part of a recipe. Values are checked against their annotations, and converted (list to tuple, 3 to 3.0)."""

    section: ClassVar[str]

    def __post_init__(self):
        for name, annotation in field_types(type(self)).items():
            where = f"{self.section}.{name}" if self.section else name
            object.__setattr__(self, name, convert(getattr(self, name), annotation, where))


def field_types(cls: type) -> dict[str, Any]:
    """Annotation of each field of a dataclass, in order, ranges included."""
    annotations = typing.get_type_hints(cls, include_extras=True)
    return {field.name: annotations[field.name] for field in dataclasses.fields(cls)}


def convert(value: Any, annotation: Any, where: str) -> Any:
    """`value` as its annotation wants it: a list as a tuple, 3 as 3.0, 1e9 as an integer.

    Raises:
        RecipeError: it does not match; names `where` (the field), the value and what is allowed.
    """
    converted = _match(value, annotation)
    if converted is _NO_MATCH:
        quote = " (quote it to make it text)" if annotation is str and isinstance(value, int | float) else ""
        raise RecipeError(f"{where}={value!r} must be {_describe(annotation)}{quote}")
    return converted


_NO_MATCH = object()


def _match(value: Any, annotation: Any) -> Any:
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is Annotated:
        converted = _match(value, arguments[0])
        return converted if converted is not _NO_MATCH and converted in arguments[1] else _NO_MATCH
    if origin in (types.UnionType, typing.Union):
        matches = (_match(value, argument) for argument in arguments)
        return next((match for match in matches if match is not _NO_MATCH), _NO_MATCH)
    if origin is Literal:
        return value if value in arguments else _NO_MATCH
    if origin is tuple:
        items = value if isinstance(value, list | tuple) else None
        kinds = arguments[:1] * len(items or ()) if arguments[-1] is ... else arguments
        if items is None or len(items) != len(kinds):
            return _NO_MATCH
        converted = tuple(_match(item, kind) for item, kind in zip(items, kinds, strict=True))
        return _NO_MATCH if _NO_MATCH in converted else converted
    if origin is dict:
        if not isinstance(value, Mapping):
            return _NO_MATCH
        converted = {_match(key, arguments[0]): _match(inner, arguments[1]) for key, inner in value.items()}
        return converted if all(_NO_MATCH not in pair for pair in converted.items()) else _NO_MATCH
    if annotation is Any:
        return value
    if annotation is int:
        whole = type(value) is int or (type(value) is float and value.is_integer())
        return int(value) if whole else _NO_MATCH
    if annotation is float:
        return float(value) if type(value) in (int, float) and math.isfinite(value) else _NO_MATCH
    return value if isinstance(value, annotation) else _NO_MATCH


def _describe(annotation: Any) -> str:
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is Annotated:
        return f"{_describe(arguments[0])} {arguments[1]}"
    if origin in (types.UnionType, typing.Union):
        return ", or ".join(_describe(argument) for argument in arguments)
    if origin is Literal:
        return "one of " + ", ".join(map(str, arguments))
    if origin is tuple:
        if arguments[-1] is ...:
            return f"a list, each item {_describe(arguments[0])}"
        return f"a list of {len(arguments)}, each {_describe(arguments[0])}"
    if origin is dict:
        return f"a table from {_describe(arguments[0])} to {_describe(arguments[1])}"
    names = {int: "an integer", float: "a number", str: "text", bool: "true or false", type(None): "null"}
    return names.get(annotation, "a value")


def plain(value: Any) -> Any:
    """Nested mappings, tuples and lists as dicts and lists, for YAML and JSON."""
    if isinstance(value, Mapping):
        return {key: plain(inner) for key, inner in value.items()}
    return [plain(item) for item in value] if isinstance(value, list | tuple) else value
