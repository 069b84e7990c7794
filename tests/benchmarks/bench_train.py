"""Training throughput of the vanilla variant against transformers' LlamaForCausalLM and the matrix-multiply peak.

    python -m tests.benchmarks.bench_train

Both models have the same blocks, width, heads, MLP, vocabulary and optimizer (torch.optim.AdamW, fused), read the same
tokens and run the same way (eager, or every block compiled); steps of the two alternate, so that a busy machine slows
both. FLOPs count the matrix products of blocks and head, forward and backward, and causal attention. The peak is the
best of several square products in the same run. Prints one table; a ratio is ours / Llama's tokens/s, medians.
"""

import argparse
import statistics
import sys
import time

import torch
from rich.console import Console
from rich.table import Table
from transformers import LlamaConfig, LlamaForCausalLM

from eval.models import keep_freed_memory
from modeling_looped import LoopedForCausalLM
from modeling_looped.variants import build_config

VOCAB_SIZE = 4096
SEQUENCE_LENGTH = 256
BATCH_SIZE = 8
DEPTH = 6


def matmul_peak(dtype: torch.dtype, size: int = 2048, repeats: int = 5) -> float:
    """FLOP/s of the fastest of `repeats` products of two (size, size) matrices."""
    a, b = torch.randn(size, size, dtype=dtype), torch.randn(size, size, dtype=dtype)
    a @ b
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        a @ b
        times.append(time.perf_counter() - start)
    return 2 * size**3 / min(times)


def train_flops_per_step(model: torch.nn.Module, hidden_size: int, num_blocks: int) -> float:
    """6 FLOPs per matrix weight and token, embedding free, plus causal attention 6 * width * (T + 1) per block."""
    matrices = sum(p.numel() for name, p in model.named_parameters() if p.ndim == 2 and "embed_tokens" not in name)
    return BATCH_SIZE * SEQUENCE_LENGTH * (6 * matrices + num_blocks * 6 * hidden_size * (SEQUENCE_LENGTH + 1))


class Contestant:
    """A model with its optimizer and the way its loss is called."""

    def __init__(self, model: torch.nn.Module, compiled: bool, precision: str, **forward_options):
        self.model, self.precision, self.forward_options = model.train(), precision, forward_options
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
        if compiled:
            for layer in model.model.layers:
                layer.compile()

    def step(self, input_ids: torch.Tensor) -> float:
        start = time.perf_counter()
        with torch.autocast("cpu", torch.bfloat16, enabled=self.precision == "bf16"):
            loss = self.model(input_ids, labels=input_ids, use_cache=False, **self.forward_options).loss
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hidden", type=int, nargs="+", default=[256, 512])
    parser.add_argument("--precision", nargs="+", default=["fp32", "bf16"], choices=["fp32", "bf16"])
    parser.add_argument("--rounds", type=int, default=5, help="timed steps of each model")
    arguments = parser.parse_args()

    torch.manual_seed(0)
    keep_freed_memory()  # as in training; it serves both models
    peaks = {"fp32": matmul_peak(torch.float32), "bf16": matmul_peak(torch.bfloat16)}
    shape = f"{DEPTH} blocks, {BATCH_SIZE} x {SEQUENCE_LENGTH} tokens, vocabulary {VOCAB_SIZE}"
    table = Table(title=f"training step: {shape}")
    for name in ("hidden", "precision", "mode", "ours tok/s", "Llama tok/s", "ratio", "ours GFLOP/s", "% of peak"):
        table.add_column(name, justify="right")
    for hidden in arguments.hidden:
        for precision in arguments.precision:
            for mode in ("eager", "compiled"):
                print(f"hidden {hidden}, {precision}, {mode} ...", file=sys.stderr, flush=True)
                ours, llama, flops = race(hidden, precision, mode == "compiled", arguments.rounds)
                tokens = BATCH_SIZE * SEQUENCE_LENGTH
                table.add_row(
                    str(hidden), precision, mode, f"{tokens / ours:,.0f}", f"{tokens / llama:,.0f}",
                    f"{llama / ours:.2f}", f"{flops / ours / 1e9:.0f}", f"{100 * flops / ours / peaks[precision]:.0f}",
                )  # fmt: skip
    console = Console()
    console.print(table)
    console.print(
        f"matrix-multiply peak (2048^3, {torch.get_num_threads()} threads): "
        + ", ".join(f"{name} {value / 1e9:.0f} GFLOP/s" for name, value in peaks.items())
    )


def race(hidden: int, precision: str, compiled: bool, rounds: int) -> tuple[float, float, float]:
    """(seconds per step of ours, of Llama, FLOPs per step), medians over alternating steps."""
    torch._dynamo.reset()
    heads = hidden // 64
    config = build_config(
        "vanilla", DEPTH, head_dim=64, vocab_size=VOCAB_SIZE, max_position_embeddings=SEQUENCE_LENGTH,
        hidden_size=hidden, num_attention_heads=heads,
    )  # fmt: skip
    ours = LoopedForCausalLM(config)
    llama = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCAB_SIZE, hidden_size=hidden, intermediate_size=config.intermediate_size,
            num_hidden_layers=DEPTH, num_attention_heads=heads, max_position_embeddings=SEQUENCE_LENGTH,
            bos_token_id=0, eos_token_id=0,
        )
    )  # fmt: skip
    contestants = [Contestant(ours, compiled, precision, skip_logits=True), Contestant(llama, compiled, precision)]
    input_ids = torch.randint(0, VOCAB_SIZE, (BATCH_SIZE, SEQUENCE_LENGTH))
    times: list[list[float]] = [[], []]
    for round_index in range(rounds + 2):
        for index, contestant in enumerate(contestants):
            seconds = contestant.step(input_ids)
            if round_index >= 2:  # the first two steps compile and fill the allocator
                times[index].append(seconds)
    flops = train_flops_per_step(ours, hidden, DEPTH)
    return statistics.median(times[0]), statistics.median(times[1]), flops


if __name__ == "__main__":
    main()
