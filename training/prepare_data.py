"""Turn a source of text into a tokenizer and token pools for training and validation.

    python -m training.prepare_data source=stdlib vocab_size=4096 out=runs/data
    python -m training.prepare_data source=text paths=corpus/ tokenizer=gpt2 out=runs/data
    python -m training.prepare_data source=fineweb tokenizer=gpt2 train_tokens=5e9 out=/data/fineweb

Writes OUT/tokenizer, OUT/val and OUT/train. A stopped preparation, also one that was killed, goes on where it was when
the same command is given again. `python -m training.prepare_data --help` lists the sources and all options.
"""

import inspect
import sys

from training.config import parse_overrides
from training.data.preparation import PrepareConfig, prepare
from training.data.sources import SOURCES, Source

__all__ = ["main", "prepare"]


def main(arguments: list[str]) -> None:
    if arguments in (["--help"], ["-h"], ["help"]):
        print(__doc__)
        for name, described in {"options": PrepareConfig, "options of every source": Source, **SOURCES}.items():
            print(f"{name}: {inspect.getdoc(described)}\n")
        return
    try:
        data = prepare(**parse_overrides(arguments))
    except (ValueError, OSError) as error:
        sys.exit(f"prepare_data: {error}")
    except KeyboardInterrupt:
        sys.exit("prepare_data: stopped; the same command goes on from here")
    print(f"tokenizer  {data.tokenizer_folder}")
    for name, pool in (("validation", data.validation), ("train", data.train)):
        if pool is not None:
            print(f"{name:10s} {pool.folder}: {pool.num_tokens:,} tokens, {pool.num_documents:,} documents")


if __name__ == "__main__":
    main(sys.argv[1:])
