"""What another pass of the core buys: the same evaluation at several num_loops, with a plot.

    python -m eval.loops MODEL --num-loops 1 2 4 8 --task-set tiny --output loops.json --plot loops.png
    python -m eval.loops MODEL --num-loops 1 2 4 8 --text FILE     loss and bits per byte instead of tasks

An untied model has as many passes as it stores cores; a number above that is an error before anything runs.
"""

import argparse
import json
import os
import sys
from pathlib import Path

from torch import nn
from transformers import PreTrainedTokenizerBase

from eval.bpb import read_text, text_loss
from eval.core import add_model_arguments, add_task_arguments, evaluate_model, load_from_arguments, task_arguments
from eval.models import check_num_loops


def evaluate_loops(
    model: nn.Module, tokenizer: PreTrainedTokenizerBase, num_loops: list[int], **arguments
) -> dict[int, dict]:
    """Results of `evaluate_model` (its keywords in `arguments`) at every number of passes."""
    check_num_loops(model, num_loops)
    return {k: evaluate_model(model, tokenizer, num_loops=k, **arguments) for k in num_loops}


def text_losses(
    model: nn.Module, tokenizer: PreTrainedTokenizerBase, num_loops: list[int], file: str | Path, window: int
) -> dict[int, dict]:
    """nats_per_token and bits_per_byte of a text file at every number of passes."""
    check_num_loops(model, num_loops)
    found = {}
    for k in num_loops:
        loss = text_loss(model, tokenizer, *read_text(file), window=window, num_loops=k)
        found[k] = {"nats_per_token": loss.nats_per_token, "bits_per_byte": loss.bits_per_byte}
    return found


def _plot(values: dict[int, float], label: str, trained: int | None, path: Path) -> None:
    import matplotlib  # only needed with --plot

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(layout="constrained")
    axes.plot(list(values), list(values.values()), "o-")
    if trained is not None:
        axes.axvline(trained, color="gray", linestyle=":", label=f"the model's own num_loops, {trained}")
        axes.legend()
    axes.set(xlabel="num_loops: passes of the core in one forward", ylabel=label)
    axes.set_xticks(list(values))
    figure.savefig(path, dpi=150)
    plt.close(figure)


def default_num_loops(model: nn.Module) -> list[int]:
    """1, 2, 4 and 8 passes, of these the ones that the model can execute."""
    config = model.config
    most = 8 if getattr(config, "tie_core", True) else config.num_stored_cores
    return [number for number in (1, 2, 4, 8) if number <= most]


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m eval.loops", description=__doc__.split("\n")[0])
    add_model_arguments(parser)
    add_task_arguments(parser)
    parser.add_argument("--num-loops", nargs="+", type=int, help="default: 1 2 4 8, as far as the model stores cores")
    parser.add_argument("--text", type=Path, help="a text file: its loss, instead of tasks")
    parser.add_argument("--window", type=int, help="tokens of context with --text (default: as eval.bpb)")
    parser.add_argument("--output", type=Path, help="write the results as JSON")
    parser.add_argument("--plot", type=Path, help="draw loss or aggregate over num_loops")
    args = parser.parse_args(argv)
    try:
        model, tokenizer, description = load_from_arguments(args)
        if args.num_loops is None:
            args.num_loops = default_num_loops(model)
        if args.text is not None:
            found = text_losses(model, tokenizer, args.num_loops, args.text, args.window)
            label, values = "loss (nats per token)", {k: entry["nats_per_token"] for k, entry in found.items()}
            for k, entry in found.items():
                print(f"num_loops {k}: {entry['nats_per_token']:.6f} nats per token, {entry['bits_per_byte']:.6f} bpb")
        else:
            found = evaluate_loops(model, tokenizer, args.num_loops, description=description, **task_arguments(args))
            first = next(iter(found.values()))
            label = f"{first['aggregate']['metric']} ({first['aggregate']['version']})"
            values = {k: results["aggregate"]["value"] for k, results in found.items()}
            for name in first["tasks"]:
                row = [results["tasks"][name]["centered"] for results in found.values()]
                print(f"{name:<34}" + "".join("    failed" if c is None else f"{c:>10.4f}" for c in row))
            print(f"{label:<34}" + "".join("      none" if v is None else f"{v:>10.4f}" for v in values.values()))
            print(f"{'num_loops':<34}" + "".join(f"{k:>10}" for k in found))
    except (OSError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    if args.output is not None:
        args.output.parent.mkdir(parents=True, exist_ok=True)
        temporary = args.output.with_name(args.output.name + ".tmp")
        content = {"model": description, "by_num_loops": {str(k): entry for k, entry in found.items()}}
        temporary.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
        os.replace(temporary, args.output)
    if args.plot is not None and None not in values.values():
        _plot(values, label, description["num_loops"], args.plot)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
