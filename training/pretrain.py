"""Pretraining: one recipe, any number of processes, resumable at any step.

    accelerate launch -m training.pretrain demo                          one process
    torchrun --nproc_per_node 2 -m training.pretrain demo                two CPU processes, the same losses
    accelerate launch -m training.pretrain untied-grow depth=12 optimizer.matrix_lr=0.03

Words are a recipe (a name in training/recipes or a file) and `key=value` over it, see training/config.py. The run
goes to training.run_dir: resolved.yaml, metrics.jsonl, checkpoints/, tokenizer/ and at the end results.json. The same
command run again goes on from the last checkpoint, and does nothing where the run is complete.
"""

import os
import sys
from contextlib import ExitStack
from pathlib import Path

import yaml
from rich.console import Console
from rich.table import Table
from transformers.utils import logging as transformers_logging

from training.budget import Plan, print_plan, resolve
from training.config import load_command_line
from training.data.preparation import PreparedData, prepare
from training.data.tokenizer import load_tokenizer
from training.engine.checkpoint import CheckpointError, check_run_dir, list_checkpoints, lock_run_dir, write_text
from training.engine.launch import describe, finish, start
from training.engine.records import read_results
from training.engine.trainer import DivergedError, Stopped, Trainer, copy_tokenizer
from training.values import RecipeError

# What may change between the parts of a resumed run: it moves no number of the result
MAY_CHANGE = {
    f"training.{key}"
    for key in ("eval_every_steps", "save_every_steps", "keep_last", "log_every_steps", "trackers", "run_dir")
} | {"budget.micro_batch_size", "data.out"}


def prepare_data(plan: Plan, progress: bool) -> PreparedData:
    """The recipe's data, prepared on first use; the tokenizer's special tokens go into the plan's configs.

    Raises:
        ValueError: the data cannot be had, or its tokenizer has more tokens than the model.
    """
    section = plan.recipe.data
    data = prepare(
        section.source,
        progress=progress,
        out=section.out,
        tokenizer=section.tokenizer,
        vocab_size=section.vocab_size,
        tokenizer_chars=section.tokenizer_chars,
        train_tokens=plan.train_tokens,
        validation_tokens=section.validation_tokens,
        shard_tokens=section.shard_tokens,
        **section.options,
    )
    tokenizer = load_tokenizer(data.tokenizer_folder)
    if len(tokenizer) > plan.config.vocab_size:
        raise ValueError(
            f"data.vocab_size={plan.config.vocab_size} is less than the {len(tokenizer)} tokens of the tokenizer: "
            f"set data.vocab_size={len(tokenizer)}"
        )
    plan.config.bos_token_id = tokenizer.bos_token_id
    plan.config.eos_token_id = tokenizer.eos_token_id
    return data


def check_same_recipe(run_dir: Path, plan: Plan) -> None:
    """Raises RecipeError, naming what differs, if `run_dir` holds a run of another recipe."""
    path = run_dir / "resolved.yaml"
    begun = list_checkpoints(run_dir) or (run_dir / "results.json").is_file()
    if not begun:
        return
    if not path.is_file():
        raise RecipeError(f"{run_dir} holds a run without its resolved.yaml: restore that file, or remove the folder")
    try:
        found = yaml.safe_load(path.read_text())["recipe"]
        differences = [
            f"{key} was {old}, now {new}"
            for key, old, new in _differences(found, plan.as_dict()["recipe"])
            if key not in MAY_CHANGE
        ]
    except (yaml.YAMLError, KeyError, TypeError, AttributeError) as error:
        raise RecipeError(f"{path} is not the recipe of a run ({error}): restore it, or remove {run_dir}") from error
    if differences:
        raise RecipeError(
            f"{run_dir} holds a run of another recipe ({'; '.join(differences[:3])}). Choose another "
            f"training.run_dir, or remove that folder to start over"
        )


def _differences(old: dict, new: dict, prefix: str = ""):
    for key in old.keys() | new.keys():
        before, after = old.get(key), new.get(key)
        if isinstance(before, dict) and isinstance(after, dict):
            yield from _differences(before, after, f"{prefix}{key}.")
        elif before != after:
            yield f"{prefix}{key}", before, after


def print_results(results: dict) -> None:
    """The run's numbers as a table."""
    table = Table(title=f"{results['recipe']} d{results['depth']}", title_justify="left", show_header=False)
    validation_loss = results["validation_loss"]
    rows = {
        "validation loss": "none kept" if validation_loss is None else f"{validation_loss:.4f} nats per token",
        "stored parameters": f"{results['stored_parameters']:,}",
        "passes (K)": str(results["num_loops"]),
        "grown at step": ", ".join(str(growth["step"]) for growth in results["growths"]) or "never",
        "steps, tokens": f"{results['num_steps']:,}, {results['tokens']:,}",
        "training FLOPs": f"{results['training_flops']:.3e}",
        "training time": f"{results['training_seconds']:.0f} s, {results['tokens_per_second']:,.0f} tokens/s",
    }
    for name, value in rows.items():
        table.add_row(name, value)
    Console().print(table)


def main(arguments: list[str] | None = None) -> int:
    words = sys.argv[1:] if arguments is None else arguments
    if not words or words[0] in ("-h", "--help"):
        print(__doc__)
        return 0 if words else 2
    transformers_logging.set_verbosity_error()
    accelerator = None
    is_main = os.environ.get("RANK", "0") == "0"
    held = ExitStack()
    try:
        plan = resolve(load_command_line(words))
        run_dir = Path(plan.run_dir)
        if is_main:
            print_plan(plan)
            check_same_recipe(run_dir, plan)
        if (run_dir / "results.json").is_file():
            if is_main:
                print(f"{run_dir} is complete:")
                print_results(read_results(run_dir / "results.json"))
            return 0
        if is_main:
            check_run_dir(run_dir, bytes_needed=0)
            held.enter_context(lock_run_dir(run_dir))
            write_text(run_dir / "resolved.yaml", yaml.safe_dump(plan.as_dict(), sort_keys=False, allow_unicode=True))
        recipe = plan.recipe
        accelerator = start(recipe.training.precision, list(recipe.training.trackers), str(run_dir))
        data = prepare_data(plan, progress=is_main)
        if is_main:
            print(describe(accelerator, recipe.training.precision))
            copy_tokenizer(data, run_dir)
        if recipe.training.trackers:
            accelerator.init_trackers("modeling-looped", plan.as_dict()["derived"])
        results = Trainer(plan, data, accelerator, run_dir).train()
    except (RecipeError, CheckpointError, DivergedError, Stopped, ValueError, OSError) as error:
        if is_main:
            print(f"pretrain: {error}", file=sys.stderr, flush=True)
        if accelerator is not None and accelerator.num_processes > 1:
            os._exit(2)  # the other processes may wait in a collective that will not come
        return 2
    except KeyboardInterrupt:
        print("pretrain: interrupted; the same command goes on", file=sys.stderr, flush=True)
        return 130
    finally:
        held.close()
    if is_main:
        print_results(results)
        print(f"run_dir: {run_dir}")
    finish(accelerator)
    return 0


if __name__ == "__main__":
    sys.exit(main())
