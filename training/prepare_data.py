"""Turn a source of text into a tokenizer and token pools for training and validation.

    python -m training.prepare_data source=stdlib vocab_size=4096 out=runs/data
    python -m training.prepare_data source=text paths=corpus/ tokenizer=gpt2 out=runs/data
    python -m training.prepare_data source=fineweb tokenizer=gpt2 train_tokens=5e9 out=/data/fineweb

Writes OUT/tokenizer, OUT/val and OUT/train. A stopped preparation, also one that was killed, goes on where it was when
the same command is given again. `python -m training.prepare_data --help` lists the sources and all options.
"""

import json
import sys
from typing import Any

from training.data.preparation import PrepareConfig, prepare
from training.data.sources import SOURCES

__all__ = ["main", "prepare"]


def parse_overrides(arguments: list[str]) -> dict[str, Any]:
    """key=value words to a dict; values are JSON where they parse as JSON, else text."""
    options: dict[str, Any] = {}
    for argument in arguments:
        name, equals, value = argument.partition("=")
        if not equals or not name:
            raise ValueError(f"argument {argument!r} is not of the form key=value, as in source=stdlib")
        try:
            options[name] = json.loads(value)
        except json.JSONDecodeError:
            options[name] = value
    return options


def main(arguments: list[str]) -> None:
    if arguments in (["--help"], ["-h"], ["help"]):
        print(f"{__doc__}\n{PrepareConfig.__doc__}")
        for name, source_class in SOURCES.items():
            print(f"source={name}\n    {source_class.__doc__}")
        return
    try:
        data = prepare(**parse_overrides(arguments))
    except (ValueError, OSError) as error:
        sys.exit(f"prepare_data: {error}")
    print(f"tokenizer  {data.tokenizer_folder}")
    for name, pool in (("validation", data.validation), ("train", data.train)):
        if pool is not None:
            print(f"{name:10s} {pool.folder}: {pool.num_tokens:,} tokens, {pool.num_documents:,} documents")


if __name__ == "__main__":
    main(sys.argv[1:])
