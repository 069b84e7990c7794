"""CORE of any causal language model that transformers loads, as nanochat and the paper compute it.

    python -m eval.core MODEL                                  all 22 tasks; needs the bundle (python -m eval.bundle)
    python -m eval.core MODEL --task-set tiny                  the project's own small tasks, no download
    torchrun --nproc_per_node 2 -m eval.core MODEL             data-parallel, the same numbers (or accelerate launch)

MODEL is an export folder, a run folder (its newest checkpoint) or a Hub name. Results go to
`<output>` (default results/core-<model>.json); a killed run is taken up again by the same command.
`evaluate_model` is the same for a model in memory.
"""

import argparse
import math
import platform
import subprocess
import sys
import time
from collections import defaultdict
from importlib import metadata
from pathlib import Path

import numpy as np
import torch
from accelerate.utils import gather_object
from torch import nn
from transformers import PreTrainedTokenizerBase

from eval.aggregate import IncompleteError, aggregate, center, filtered_aggregate, mean_and_std
from eval.batching import SequenceStore, plan_batches
from eval.bundle import file_hashes, open_data
from eval.forward import prefix_sharing_problem
from eval.models import DTYPES, check_num_loops, describe_model, keep_freed_memory, load_model, process_state
from eval.prompts import COMPAT, Encoder, Example, build_examples, order_rows
from eval.report import RunProgress, results_table
from eval.results import SCHEMA_VERSION, PartialResults, or_none, write_results
from eval.scoring import Outcome, score_batch, score_plain
from eval.tasks import Task, TaskError, TaskSet, load_task_set, read_rows
from eval.token_bytes import token_byte_lengths

EMPTY_SPAN_RULES = ("first", "finite")
TOKENS_PER_BATCH = {"cpu": 2048, "cuda": 65536}  # activations that stay in cache; work enough for every unit
LOGITS_SHARE = 4  # logits of at most a quarter of a batch's tokens exist at once, a row of the vocabulary each
PACKAGES = ("torch", "transformers", "tokenizers", "numpy", "modeling-looped")


def evaluate_model(
    model: nn.Module,
    tokenizer: PreTrainedTokenizerBase,
    task_set: str | Path = "core",
    tasks: list[str] | None = None,
    max_per_task: int | None = None,
    compat: str = "nanochat",
    seeds: list[int] | None = None,
    version: str = "v1",
    empty_span: str = "first",
    num_loops: int | None = None,
    context_length: int | None = None,
    bos_token: str | None = None,
    bundle: str | Path | None = None,
    tokens_per_batch: int | None = None,
    path: str = "fast",
    data_parallel: bool = True,
    partial_folder: str | Path | None = None,
    keep_examples: bool = False,
    progress: bool = True,
    description: dict | None = None,
) -> dict:
    """Evaluates a model on a task set and returns the results (see eval.results.SCHEMA), on every process.

    Args:
        task_set: `core`, `tiny`, or a path (see load_task_set). tasks: only these, which makes the run partial.
        max_per_task: the first so many rows of each shuffled task; they also limit the demonstrations.
        compat: `nanochat` or `paper`, see eval.prompts.COMPAT. seeds: of the few-shot draw, default by `compat`.
        version: of the accuracies of guessing. empty_span: `first` (nanochat and the paper: option 0 wins if its span
            is empty, other empty spans never win) or `finite` (see prompts.fill_empty_spans).
        num_loops: passes of a looped model's core, default the model's own.
        context_length: longer sequences keep their last tokens; default the model's max_position_embeddings.
        tokens_per_batch: tokens of a forward, padding included. path: `fast`, or `plain` for one example at a time.
        data_parallel: deal the batches to all processes. False evaluates everything on every process, which a model
            whose weights are sharded over processes needs.
        partial_folder: keeps outcomes as they come, and takes up what it finds there.
        keep_examples: the outcome of every example in the results. description: the results' `model` entry.

    Raises ValueError for an argument that is not allowed, FileNotFoundError when the data is not there. A task whose
    data or rows cannot be evaluated fails by name in the results, and with it the aggregate.
    """
    started = time.monotonic()
    _check_choice("compat", compat, COMPAT)
    _check_choice("empty_span", empty_span, EMPTY_SPAN_RULES)
    _check_choice("path", path, ("fast", "plain"))
    rules = COMPAT[compat]
    seeds = list(rules.seeds if seeds is None else seeds)
    if not seeds or len(set(seeds)) != len(seeds):
        raise ValueError(f"seeds must be distinct, and at least one; got {seeds}.")
    loaded = load_task_set(task_set)
    chosen = loaded.tasks if tasks is None else loaded.select(tasks)
    _check_choice("version", version, next(iter(loaded.tasks.values())).chance_percent)
    if num_loops is not None:
        check_num_loops(model, [num_loops])
    read = open_data(loaded, bundle)
    encoder = Encoder(tokenizer, bos_token)
    if context_length is None:
        context_length = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    device = next(model.parameters()).device
    tokens_per_batch = tokens_per_batch or TOKENS_PER_BATCH.get(device.type, TOKENS_PER_BATCH["cpu"])
    forward_kwargs = {} if num_loops is None else {"num_loops": num_loops}
    state = process_state()
    world, rank = (state.num_processes, state.process_index) if data_parallel else (1, 0)

    def prepare(task: Task) -> list[Example]:
        rows = order_rows(read_rows(task, read), max_per_task)
        # without shots nothing depends on the seed: one evaluation stands for all
        of_task = seeds if task.num_fewshot else seeds[:1]
        arguments = (task, rows, encoder, rules)
        return [e for s in of_task for e in build_examples(*arguments, s, context_length, empty_span == "finite")]

    failures, examples = {}, []
    for name, task in chosen.items():
        try:
            examples += prepare(task)
        except TaskError as error:
            failures[name] = str(error)
        if progress and state.is_main_process:
            print(f"prepared {name}", file=sys.stderr, flush=True)
    store = SequenceStore(examples)
    training = model.training
    model.eval()
    problem = prefix_sharing_problem(model, forward_kwargs) if path == "fast" else None
    if problem is not None:
        print(f"warning: shared prompts are run in full, this model cannot share them: {problem}", file=sys.stderr)
    batches = plan_batches(store, tokens_per_batch, share_prefixes=path == "fast" and problem is None)
    token_bytes = token_byte_lengths(tokenizer) if rules.answer_loss else None

    description = (
        describe_model(model, model.config.name_or_path or "in memory") if description is None else description
    )
    if num_loops is not None:
        description = {**description, "num_loops": num_loops}
    settings = {
        "task_set": loaded.name,
        "tasks": list(chosen),
        "compat": compat,
        "seeds": seeds,
        "max_per_task": max_per_task,
        "context_length": context_length,
        "empty_span": empty_span,
        "bos_token": encoder.bos_token,
        "core_version": version,
        "tokens_per_batch": tokens_per_batch,
        "path": path,
    }
    hashed = {name: task for name, task in chosen.items() if name not in failures}
    data = {"task_set_fingerprint": loaded.fingerprint(), "files": file_hashes(hashed, read)}
    partial = None
    if partial_folder is not None:
        identity = {"model": description, "settings": settings, "data": data}
        partial = PartialResults(partial_folder, identity, state.process_index)
        state.wait_for_everyone()
    outcomes = dict(partial.outcomes) if partial is not None else {}
    num_resumed = len(outcomes)

    logits_per_forward = max(tokens_per_batch // LOGITS_SHARE, 256)
    todo = [batch for i, batch in enumerate(batches) if i % world == rank]
    todo = [batch for batch in todo if not all(e in outcomes for e in batch.examples)]
    counts = [_count_by_task(examples, batch.examples) for batch in todo]
    found = {}
    with RunProgress([batch.num_tokens for batch in todo], counts, progress and state.is_main_process) as shown:
        for batch in todo:
            if path == "plain":
                scored = [(e, score_plain(model, examples[e], token_bytes, forward_kwargs)) for e in batch.examples]
            else:
                scored = list(score_batch(model, store, batch, token_bytes, forward_kwargs, logits_per_forward))
            found.update(scored)
            if partial is not None:
                partial.add(scored)
            shown.advance()
    model.train(training)
    outcomes.update(gather_object(list(found.items())) if world > 1 else found)
    if partial is not None:
        partial.close()

    for name in {examples[e].task for e, outcome in outcomes.items() if _is_broken(examples[e], outcome)}:
        failures[name] = f"task {name}: the model's losses are not finite."
    results = {
        "schema_version": SCHEMA_VERSION,
        "model": description,
        "settings": settings,
        "data": data,
        "tasks": _task_entries(chosen, examples, outcomes, seeds, version, failures),
        "aggregate": {},
        "timing": {
            "wall_seconds": round(time.monotonic() - started, 3),
            "num_sequence_tokens": sum(len(sequence) for e in examples for sequence in e.sequences),
            "num_executed_tokens": sum(batch.num_tokens for batch in batches),
            "num_resumed_examples": num_resumed,
            "finished": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        },
        "environment": _environment(device, state.num_processes),
        "examples": _example_entries(examples, outcomes) if keep_examples else {},
    }
    results["aggregate"] = _aggregate_entry(loaded, results["tasks"], seeds, version, failures)
    return results


def _check_choice(name: str, value: str, allowed) -> None:
    if value not in allowed:
        raise ValueError(f"{name} must be one of {', '.join(allowed)}, got {value!r}.")


def _is_broken(example: Example, outcome: Outcome) -> bool:
    """A scored span without a finite loss; empty spans have none by nature."""
    spans = zip(outcome.option_losses, example.sequences, example.starts, strict=True)
    return any(not math.isfinite(loss) for loss, sequence, start in spans if start < len(sequence))


def _count_by_task(examples: list[Example], chosen: list[int]) -> dict[str, int]:
    counts = defaultdict(int)
    for e in chosen:
        counts[examples[e].task] += 1
    return dict(counts)


def _task_entries(chosen, examples, outcomes, seeds, version, failures) -> dict:
    members = defaultdict(lambda: defaultdict(list))
    for e, example in enumerate(examples):
        members[example.task][example.seed].append(e)
    entries = {}
    for name, task in chosen.items():
        by_seed = members[name]
        first = next(iter(by_seed.values()), [])
        everything = [examples[e] for numbers in by_seed.values() for e in numbers]
        entry = {
            "status": "failed" if name in failures else "complete",
            "error": failures.get(name),
            "type": task.type,
            "num_fewshot": task.num_fewshot,
            "num_examples": len(first),
            "num_tokens": sum(len(sequence) for example in everything for sequence in example.sequences),
            "num_empty_spans": sum(
                start >= len(sequence)
                for example in everything
                for sequence, start in zip(example.sequences, example.starts, strict=True)
            ),
            "chance_percent": task.chance_percent,
            "accuracy": None,
            "accuracy_std": None,
            "accuracy_per_seed": {},
            "centered": None,
            "answer_nll": None,
            "answer_bits_per_byte": None,
        }
        if name not in failures:
            # a task without shots was evaluated once, for all seeds
            per_seed = [[outcomes[e] for e in by_seed.get(seed, first)] for seed in seeds]
            accuracies = [sum(o.correct for o in found) / len(found) for found in per_seed]
            entry["accuracy"], entry["accuracy_std"] = mean_and_std(accuracies)
            entry["accuracy_per_seed"] = {str(seed): a for seed, a in zip(seeds, accuracies, strict=True)}
            entry["centered"] = center(task, entry["accuracy"], version)
            nll = [float(np.mean([o.answer_loss for o in found])) for found in per_seed]
            bits = [float(np.mean([o.answer_bits_per_byte for o in found])) for found in per_seed]
            entry["answer_nll"] = or_none(sum(nll) / len(nll))
            entry["answer_bits_per_byte"] = or_none(sum(bits) / len(bits))
        entries[name] = entry
    return entries


def _aggregate_entry(task_set: TaskSet, tasks: dict, seeds: list[int], version: str, failures: dict) -> dict:
    entry = {
        "metric": task_set.metric,
        "version": version,
        "status": "complete",
        "reason": None,
        "value": None,
        "std": None,
        "per_seed": {},
        "by_version": {},
        "filtered": None,
        "answer_nll": None,
        "answer_bits_per_byte": None,
    }
    accuracies = {name: task["accuracy"] for name, task in tasks.items() if task["accuracy"] is not None}
    try:
        entry["value"] = aggregate(task_set, accuracies, version)
    except IncompleteError as error:
        failed = f" Failed: {'; '.join(failures.values())}" if failures else ""
        entry["status"], entry["reason"] = "failed" if failures else "partial", f"{error}{failed}"
        return entry
    for seed in map(str, seeds):
        of_seed = {name: task["accuracy_per_seed"][seed] for name, task in tasks.items()}
        entry["per_seed"][seed] = aggregate(task_set, of_seed, version)
    entry["std"] = mean_and_std(list(entry["per_seed"].values()))[1]
    versions = next(iter(task_set.tasks.values())).chance_percent
    entry["by_version"] = {known: aggregate(task_set, accuracies, known) for known in versions}
    if task_set.filtered_out:
        entry["filtered"] = filtered_aggregate(task_set, accuracies, version)
    for key in ("answer_nll", "answer_bits_per_byte"):
        values = [task[key] for task in tasks.values()]
        entry[key] = None if None in values else sum(values) / len(values)
    return entry


def _example_entries(examples: list[Example], outcomes: dict[int, Outcome]) -> dict:
    entries = defaultdict(list)
    for e, example in enumerate(examples):
        outcome = outcomes[e]
        entries[example.task].append(
            {
                "seed": example.seed,
                "index": example.index,
                "correct": outcome.correct,
                "prediction": outcome.prediction,
                "gold": example.gold,
                "option_losses": [or_none(loss) for loss in outcome.option_losses],
                "span_loss": outcome.span_loss,
                "answer_nll": or_none(outcome.answer_loss),
            }
        )
    return dict(entries)


def _environment(device: torch.device, num_processes: int) -> dict:
    versions = {}
    for package in PACKAGES:
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            versions[package] = None
    device_name = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor() or device.type
    git = ["git", "-C", str(Path(__file__).parent), "rev-parse", "HEAD"]
    try:
        commit = subprocess.run(git, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):  # no git, or not a checkout
        commit = None
    return {
        "python": platform.python_version(),
        **versions,
        "device": device_name,
        "num_processes": num_processes,
        "commit": commit,
    }


def add_model_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of every entry point here that loads a model."""
    parser.add_argument("model", help="export folder, run folder or Hub name")
    parser.add_argument("--tokenizer", help="where the tokenizer is, if not with the model")
    parser.add_argument("--revision", help="branch, tag or commit on the Hub")
    parser.add_argument("--trust-remote-code", action="store_true", help="run the code that comes with the model")
    parser.add_argument("--dtype", default="float32", choices=DTYPES)
    parser.add_argument("--device", help="default: a GPU where there is one")
    parser.add_argument("--bos-token", help="token in front of every prompt (default: <|bos|>, <|endoftext|>, ...)")


def load_from_arguments(args: argparse.Namespace) -> tuple[nn.Module, PreTrainedTokenizerBase, dict]:
    """load_model with the arguments of `add_model_arguments`."""
    device = torch.device(args.device or process_state().device)
    if device.type == "cpu":
        keep_freed_memory()
    return load_model(args.model, args.dtype, device, args.revision, args.tokenizer, args.trust_remote_code)


def add_task_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments that say what is evaluated, and by which rules."""
    parser.add_argument("--task-set", default="core", help="core, tiny, a YAML file or a bundle folder")
    parser.add_argument("--bundle", help="the CORE bundle: its zip or folder (default: see python -m eval.bundle)")
    parser.add_argument("--tasks", nargs="+", help="only these tasks: a partial run, without aggregate")
    parser.add_argument("--max-per-task", type=int, help="the first so many examples of each task")
    parser.add_argument("--compat", default="nanochat", choices=COMPAT)
    parser.add_argument("--seeds", nargs="+", type=int, help="of the few-shot draw (default: 1234, paper: 0 1 2)")
    parser.add_argument("--core-version", default="v1", help="of the accuracies of guessing: v1 or v2")
    parser.add_argument("--empty-span", default="first", choices=EMPTY_SPAN_RULES)
    parser.add_argument("--context-length", type=int, help="default: the model's max_position_embeddings")
    parser.add_argument("--tokens-per-batch", type=int)


def task_arguments(args: argparse.Namespace) -> dict:
    """evaluate_model's keywords for the arguments of `add_task_arguments` and --bos-token."""
    names = ("task_set", "bundle", "tasks", "max_per_task", "compat", "seeds", "empty_span", "context_length")
    named = {name: getattr(args, name) for name in (*names, "tokens_per_batch", "bos_token")}
    return {**named, "version": args.core_version}


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m eval.core", description=__doc__.split("\n")[0])
    add_model_arguments(parser)
    add_task_arguments(parser)
    parser.add_argument("--num-loops", type=int, help="passes of a looped model's core (default: its own)")
    parser.add_argument("--path", default="fast", choices=("fast", "plain"), help="plain: one example at a time")
    parser.add_argument("--output", type=Path, help="results file (default: results/core-<model>.json)")
    parser.add_argument("--examples", action="store_true", help="keep the outcome of every example in the results")
    parser.add_argument("--chart", type=Path, help="also draw the centered accuracies to this image")
    parser.add_argument("--against", nargs="+", default=[], help="gpt2, gpt2-xl, gpt3-13b ... or results files")
    args = parser.parse_args(argv)
    output = args.output or Path("results") / f"core-{Path(args.model).name}.json"
    state = process_state()
    try:
        model, tokenizer, description = load_from_arguments(args)
        results = evaluate_model(
            model,
            tokenizer,
            num_loops=args.num_loops,
            path=args.path,
            partial_folder=output.with_name(output.name + ".partial"),
            keep_examples=args.examples,
            description=description,
            **task_arguments(args),
        )
    except (OSError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    if not state.is_main_process:
        return 0
    write_results(results, output)
    PartialResults.delete_folder(output.with_name(output.name + ".partial"))
    print(results_table(results))
    print(f"wrote {output}")
    if args.chart is not None:
        from eval.chart import draw_chart  # matplotlib is only needed here

        draw_chart(results, args.against, args.chart)
        print(f"wrote {args.chart}")
    return 2 if results["aggregate"]["status"] == "failed" else 0


if __name__ == "__main__":
    raise SystemExit(main())
