"""YAML as recipes use it: numbers as people write them, no key twice, and the line of a key for error messages."""

import re
from pathlib import Path
from typing import Any, ClassVar

import yaml

from training.values import RecipeError


class RecipeLoader(yaml.SafeLoader):
    """YAML 1.2's scalars, where 1e-3 is a float and `on` a string; a key given twice is an error."""

    yaml_implicit_resolvers: ClassVar[dict] = {}

    def construct_mapping(self, node, deep=False):
        keys = [self.construct_object(key, deep=True) for key, _ in node.value]
        for key, (key_node, _) in zip(keys, node.value, strict=True):
            if keys.count(key) > 1:
                raise yaml.constructor.ConstructorError(None, None, f"{key} is given twice", key_node.start_mark)
        return super().construct_mapping(node, deep)


for _tag, _pattern, _first in (
    ("null", "null|Null|NULL|~|", ["n", "N", "~", ""]),
    ("bool", "true|True|TRUE|false|False|FALSE", list("tTfF")),
    ("int", "[-+]?[0-9][0-9_]*", list("-+0123456789")),
    ("float", r"[-+]?([0-9][0-9_]*(\.[0-9]*)?|\.[0-9]+)([eE][-+]?[0-9]+)?", list("-+.0123456789")),
):
    RecipeLoader.add_implicit_resolver(f"tag:yaml.org,2002:{_tag}", re.compile(f"^({_pattern})$"), _first)
# PyYAML's own takes 010 for 8
RecipeLoader.add_constructor("tag:yaml.org,2002:int", lambda loader, node: int(node.value.replace("_", "")))


def parse_value(text: str) -> Any:
    """The value of a `key=value` word; raises yaml.YAMLError if it is not YAML."""
    return yaml.load(text, RecipeLoader)


def read_mapping(path: Path) -> dict[str, Any]:
    """The keys and values of a recipe file; raises RecipeError if it is not YAML or holds something else."""
    try:
        values = yaml.load(path.read_text(encoding="utf-8"), RecipeLoader)
    except yaml.YAMLError as error:
        raise RecipeError(f"{path} is not a readable recipe: {error}") from error
    if not isinstance(values, dict):
        raise RecipeError(f"{path} is not a recipe: it holds {type(values).__name__} where keys with values belong")
    return values


def line_of(path: Path, key: str) -> int:
    """The line, from 1, on which a dotted key stands, or the innermost section that holds it."""
    node = yaml.compose(path.read_text(encoding="utf-8"), RecipeLoader)
    line = node.start_mark.line
    for part in key.split("."):
        entries = node.value if isinstance(node, yaml.MappingNode) else []
        found = next((entry for entry in entries if entry[0].value == part), None)
        if found is None:
            break
        line, node = found[0].start_mark.line, found[1]
    return line + 1
