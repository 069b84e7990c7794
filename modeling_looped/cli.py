"""The console command `looped`: each subcommand reads its arguments and calls one function of the package.

looped info untied-grow --depth 26 --num-loops 4
looped info exports/my-model --length 1024
looped convert CharlieChen/loop-untied-grow-d6 --output exports/untied-grow-d6
looped laws --help
"""

import argparse
import importlib
import sys
from pathlib import Path

import torch
from huggingface_hub.errors import StrictDataclassError

from .configuration_looped import LoopedConfig
from .convert import DEFAULT_TOKENIZER, convert
from .flops import pad_vocab_size, stored_parameters, summary_table
from .upcycle import read_json_object
from .variants import VARIANTS, build_config, get_variant

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


class Parser(argparse.ArgumentParser):
    """Reports a wrong argument in one line; the usage is for --help."""

    def error(self, message: str):
        self.exit(2, f"{self.prog}: error: {message} (see {self.prog} --help)\n")


def main(argv: list[str] | None = None) -> int:
    """Runs one subcommand; returns its exit status, 2 where its input cannot be used."""
    argv = sys.argv[1:] if argv is None else argv
    arguments = make_parser().parse_args(argv[:1] if argv[:1] == ["laws"] else argv)
    try:
        if arguments.command == "laws":
            return run_laws(argv[1:])
        arguments.run(arguments)
    except (ValueError, OSError, StrictDataclassError) as error:
        # A config wraps its own errors in several lines; the cause is the sentence that was meant for the user
        cause = error.__cause__ if isinstance(error, StrictDataclassError) and error.__cause__ else error
        print(f"looped {arguments.command}: error: {' '.join(str(cause).split())}", file=sys.stderr)
        return 2
    return 0


def make_parser() -> argparse.ArgumentParser:
    parser = Parser(prog="looped", description="Looped and growing language models.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    info = commands.add_parser("info", help="parameters, FLOPs and memory of a variant or of a model folder")
    info.add_argument("target", metavar="VARIANT|FOLDER", help=f"one of {', '.join(VARIANTS)}; or a model folder")
    info.add_argument("--depth", type=int, metavar="D", help="depth of a variant: width 128 D, D blocks in thirds")
    info.add_argument("--num-loops", type=int, metavar="K", help="passes of the core (default: the model's own)")
    info.add_argument("--length", type=int, metavar="T", help="tokens of a sequence (default: the model's context)")
    info.add_argument(
        "--dtype", choices=DTYPES, default="bfloat16", help="of weights and cache (default: %(default)s)"
    )
    info.set_defaults(run=run_info)

    export = commands.add_parser("convert", help="a checkpoint of the paper's code -> a folder ready for the Hub")
    export.add_argument("source", metavar="SOURCE", help="folder with final.pt and result.json, or Hub repository")
    export.add_argument("--output", required=True, metavar="DIR", help="folder to make")
    export.add_argument("--revision", metavar="REV", help="branch, tag or commit of the Hub repository")
    export.add_argument(
        "--tokenizer", default=DEFAULT_TOKENIZER, metavar="PATH_OR_NAME", help="folder or Hub name (default: GPT-2's)"
    )
    export.add_argument("--overwrite", action="store_true", help="replace the output where it is a model folder")
    export.set_defaults(run=run_convert)

    commands.add_parser("laws", help="fit and compare scaling laws", add_help=False)
    return parser


def run_info(arguments: argparse.Namespace) -> None:
    """Prints the counts of a variant or of a folder's model."""
    folder = Path(arguments.target)
    if "/" in arguments.target and not folder.is_dir():
        raise ValueError(f"There is no folder {arguments.target}.")
    if arguments.target in VARIANTS or not folder.is_dir():
        variant = get_variant(arguments.target)
        if arguments.depth is None:
            raise ValueError(f"{arguments.target} is a variant, give its size: --depth 12.")
        config = build_config(arguments.target, arguments.depth, num_loops=arguments.num_loops)
        title = f"{arguments.target} at depth {arguments.depth}: {variant.description}"
        if variant.grown_num_loops is not None:
            title += f" (grows from {variant.num_loops} to {variant.grown_num_loops} passes)"
    else:
        if arguments.depth is not None:
            raise ValueError(f"{arguments.target} is a folder, its config gives the size: leave --depth out.")
        config = read_config(folder)
        title = str(folder)
    table = summary_table(
        config, num_loops=arguments.num_loops, sequence_length=arguments.length, dtype=DTYPES[arguments.dtype]
    )
    rows = pad_vocab_size(config.vocab_size)
    padded = stored_parameters(config, padded_vocab_size=rows).total
    print(f"{title}\n\n{table}")
    print(f"{'padded':<10}{padded:,} stored parameters with the vocabulary padded to {rows:,} rows, the paper's count")


def read_config(folder: Path) -> LoopedConfig:
    """The config of a model folder; raises ValueError where it holds no looped model."""
    path = folder / "config.json"
    if not path.is_file():
        raise ValueError(f"{folder} is no model folder: it has no config.json.")
    content = read_json_object(path)
    model_type = content.get("model_type")
    if model_type != LoopedConfig.model_type:
        raise ValueError(f"{path} has model_type {model_type!r}, expected {LoopedConfig.model_type!r}.")
    return LoopedConfig.from_dict(content)


def run_convert(arguments: argparse.Namespace) -> None:
    """Converts a checkpoint and says what was written."""
    config = convert(
        arguments.source,
        arguments.output,
        revision=arguments.revision,
        tokenizer=arguments.tokenizer,
        overwrite=arguments.overwrite,
    )
    print(
        f"{arguments.output}: {stored_parameters(config).total:,} stored parameters, "
        f"{config.num_stored_blocks} stored blocks, {config.num_hidden_layers} executed blocks"
    )


def run_laws(argv: list[str]) -> int:
    """Hands the rest of the command line to the scaling laws, whose packages are an extra."""
    try:
        laws = importlib.import_module("modeling_looped.laws.cli")
    except ModuleNotFoundError as error:
        if error.name not in ("numpy", "scipy", "matplotlib"):
            raise
        raise ValueError(f"{error.name} is not installed: pip install 'modeling-looped[laws]'.") from error
    return laws.main(argv) or 0


if __name__ == "__main__":
    sys.exit(main())
