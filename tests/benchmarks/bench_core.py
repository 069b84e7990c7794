"""Speed of CORE: our fast path against an evaluator that runs one example at a time, same model, same examples.

    python -m tests.benchmarks.bench_core MODEL --bundle eval_bundle.zip [--tokens-per-task 4000] [--output table.json]

The plain evaluator here is written for this benchmark and stands in for nanochat's path: one forward per example over
all its options, padded, with the logits, losses and argmax of every position. Each task is measured on examples of a
full run; the time of a full run is what the measured seconds per example come to over all rows. Outcomes must be
identical. Take the figures on an otherwise idle machine.
"""

import argparse
import json
import random
import sys
import time
from pathlib import Path

import torch
from torch import nn

from eval.batching import SequenceStore, plan_batches
from eval.bundle import open_data
from eval.core import TOKENS_PER_BATCH, add_model_arguments
from eval.models import keep_freed_memory, load_model
from eval.prompts import COMPAT, Encoder, Example, build_examples, draw_shots, order_rows, render, spans
from eval.scoring import score_batch
from eval.tasks import Task, load_task_set, read_rows


@torch.no_grad()
def plain_evaluator(model: nn.Module, example: Example) -> tuple[bool, int]:
    """(correct, prediction) of one example: every option padded into one forward, everything computed everywhere."""
    longest = max(len(sequence) for sequence in example.sequences)
    input_ids = torch.zeros(len(example.sequences), longest, dtype=torch.long)
    for row, sequence in enumerate(example.sequences):
        input_ids[row, : len(sequence)] = torch.from_numpy(sequence)
    logits = model(input_ids=input_ids, use_cache=False).logits
    targets = torch.roll(input_ids, -1, dims=1)
    losses = nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none").view_as(targets)
    predictions = logits.argmax(dim=-1)
    if not example.is_choice:
        start, end = example.starts[0], len(example.sequences[0])
        return bool((predictions[0, start - 1 : end - 1] == input_ids[0, start:end]).all()), 0
    means = [
        losses[row, start - 1 : len(sequence) - 1].mean().item()
        for row, (sequence, start) in enumerate(zip(example.sequences, example.starts, strict=True))
    ]
    prediction = means.index(min(means))
    return prediction == example.gold, prediction


def sample_examples(task: Task, rows: list[dict], encoder: Encoder, num_tokens: int) -> list[Example]:
    """Examples of the task as a full run prompts and groups them, of about `num_tokens` tokens in all (at least 2).

    With shots, drawn at random, nothing is shared between examples: the first ones stand for all. Without shots,
    questions on one passage are run together, so whole groups of the full run are drawn.
    """
    rules, sampled, total = COMPAT["nanochat"], [], 0
    if task.num_fewshot == 0:
        store = SequenceStore(list(build_examples(task, rows, encoder, rules, rules.seeds[0])))
        groups = [group for batch in plan_batches(store, num_tokens) for group in batch.groups]
        random.Random(0).shuffle(groups)
        chosen = iter([store.examples[e] for e in group.examples] for group in groups)
    else:
        shots = (
            [rows[i] for i in draw_shots(len(rows), e, task.num_fewshot, rules.seeds[0])] for e in range(len(rows))
        )
        chosen = ([_example(task, e, rows[e], drawn, encoder)] for e, drawn in enumerate(shots))
    for group in chosen:
        sampled += group
        total += sum(len(sequence) for example in group for sequence in example.sequences)
        if total >= num_tokens and len(sampled) >= 2:
            break
    return sampled


def _example(task: Task, index: int, row: dict, shots: list[dict], encoder: Encoder) -> Example:
    sequences, starts = spans(task.type, encoder(render(task, row, shots)))
    return Example(task.name, 0, index, sequences, starts, row.get("gold", 0), task.type != "language_modeling")


def matmul_peak(size: int = 2048, seconds: float = 2.0) -> float:
    """FLOPs per second of a large square float32 matrix multiplication on this machine."""
    a, b = torch.randn(size, size), torch.randn(size, size)
    a @ b
    count, started = 0, time.perf_counter()
    while (elapsed := time.perf_counter() - started) < seconds:
        a @ b
        count += 1
    return count * 2 * size**3 / elapsed


def measure_plain(model: nn.Module, examples: list[Example]) -> tuple[list[tuple[bool, int]], float]:
    """(outcomes, seconds) of the plain evaluator, after one example that is not timed."""
    plain_evaluator(model, examples[0])
    started = time.perf_counter()
    outcomes = [plain_evaluator(model, example) for example in examples]
    return outcomes, time.perf_counter() - started


def measure_fast(model: nn.Module, examples: list[Example], tokens_per_batch: int):
    """(outcomes, seconds, executed tokens) of the fast path; grouping and planning are in the time."""
    list(score_batch(model, *_planned(examples[:1], tokens_per_batch)))
    started = time.perf_counter()
    store = SequenceStore(examples)
    batches = plan_batches(store, tokens_per_batch)
    found = {}
    for batch in batches:
        found.update(score_batch(model, store, batch))
    seconds = time.perf_counter() - started
    outcomes = [(found[e].correct, found[e].prediction) for e in range(len(examples))]
    return outcomes, seconds, sum(batch.num_tokens for batch in batches)


def _planned(examples, tokens_per_batch):
    store = SequenceStore(examples)
    return store, plan_batches(store, tokens_per_batch)[0]


def _group_name(task: Task) -> str:
    if task.type == "language_modeling":
        return "language modelling"
    return "few-shot choice" if task.num_fewshot else "zero-shot choice"


def full_run(table: dict[str, dict], key: str) -> float:
    """What `key` per example comes to over all rows of the given tasks."""
    return sum(entry[key] / entry["num_examples"] * entry["num_rows"] for entry in table.values())


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.bench_core", description=__doc__.split("\n")[0])
    add_model_arguments(parser)
    parser.add_argument("--bundle", help="the CORE bundle")
    parser.add_argument("--tasks", nargs="+", help="only these tasks")
    parser.add_argument("--tokens-per-task", type=int, default=4000, help="examples of each task up to so many tokens")
    parser.add_argument("--tokens-per-batch", type=int, default=TOKENS_PER_BATCH["cpu"])
    parser.add_argument("--output", type=Path, help="write the table as JSON")
    args = parser.parse_args(argv)
    args.device = args.device or "cpu"
    model, tokenizer, _ = load_model(args.model, args.dtype, args.device, args.revision, args.tokenizer)
    encoder = Encoder(tokenizer, args.bos_token)
    core = load_task_set("core")
    read = open_data(core, args.bundle)
    tasks = core.tasks if args.tasks is None else core.select(args.tasks)
    samples, plain = {}, {}
    for name, task in tasks.items():
        rows = order_rows(read_rows(task, read))
        samples[name] = sample_examples(task, rows, encoder, args.tokens_per_task)
        plain[name] = measure_plain(model, samples[name])
        print(f"plain: {name}, {plain[name][1]:.1f} s", file=sys.stderr, flush=True)
    keep_freed_memory()  # part of the fast path: what eval.core does on a CPU
    peak = matmul_peak()
    table = {}
    print(f"{'task':<34}{'examples':>9}{'tokens':>8}{'executed':>9}{'plain s':>9}{'fast s':>8}{'speedup':>9}")
    for name, task in tasks.items():
        outcomes, seconds, executed = measure_fast(model, samples[name], args.tokens_per_batch)
        if outcomes != plain[name][0]:
            raise AssertionError(f"task {name}: the fast path's outcomes differ from the plain evaluator's.")
        lengths = [len(sequence) for example in samples[name] for sequence in example.sequences]
        table[name] = entry = {
            "group": _group_name(task),
            "num_rows": task.num_rows,
            "num_examples": len(samples[name]),
            "num_tokens": sum(lengths),
            "num_executed_tokens": executed,
            "plain_seconds": plain[name][1],
            "fast_seconds": seconds,
            "speedup": plain[name][1] / seconds,
        }
        print(
            f"{name:<34}{entry['num_examples']:>9}{entry['num_tokens']:>8}{executed:>9}"
            f"{entry['plain_seconds']:>9.2f}{seconds:>8.2f}{entry['speedup']:>8.2f}x",
            flush=True,
        )
    groups = {}
    for group in sorted({entry["group"] for entry in table.values()}):
        members = {name: entry for name, entry in table.items() if entry["group"] == group}
        groups[group] = full_run(members, "plain_seconds") / full_run(members, "fast_seconds")
        print(f"{group:<67}{'':>10}{groups[group]:>8.2f}x")
    plain, fast = full_run(table, "plain_seconds"), full_run(table, "fast_seconds")
    print(f"full run: {plain / 3600:.1f} h plain, {fast / 3600:.1f} h fast: {plain / fast:.2f}x")
    head = model.get_output_embeddings().weight.numel()
    embedding = model.get_input_embeddings().weight.numel()
    tied = model.get_output_embeddings().weight is model.get_input_embeddings().weight
    block_parameters = sum(p.numel() for p in model.parameters()) - embedding - (0 if tied else head)
    # one multiplication with every block matrix per executed token; attention scores and the head come on top
    rate = 2 * block_parameters * full_run(table, "num_executed_tokens") / fast
    print(
        f"block matrices at {rate / 1e9:.0f} GFLOP/s in the fast path, {rate / peak:.0%} of the {peak / 1e9:.0f} "
        f"GFLOP/s of a 2048 x 2048 float32 product ({torch.get_num_threads()} threads)"
    )
    if args.output is not None:
        content = {
            "tasks": table,
            "groups": groups,
            "full_run_speedup": plain / fast,
            "block_flops_per_second": rate,
            "matmul_peak_flops_per_second": peak,
            "threads": torch.get_num_threads(),
            "tokens_per_batch": args.tokens_per_batch,
        }
        args.output.write_text(json.dumps(content, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
