"""Loss and bits per byte of any text, in all and by position in the context.

    python -m eval.bpb MODEL FILE... [--window 1024] [--stride 512] [--output bpb.json] [--plot curve.png]

The text is cut into windows of `window` tokens after a BOS; each window scores its last `stride` tokens, the first
window all of its tokens, so that every token of the text is scored exactly once, with at least window - stride tokens
of context after the first window. Bits per byte divides by the bytes of the file, whatever the tokenizer makes of
them: invalid UTF-8 is replaced by U+FFFD for the model and still counted as the bytes it was.

The curve is L(T), the mean loss of the token at position T of its window, with the fit a + b T^-p (Kaplan et al.,
arXiv:2001.08361, figure 20).
"""

import argparse
import json
import math
import os
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import nn
from transformers import PreTrainedTokenizerBase

from eval.core import add_model_arguments, load_from_arguments
from eval.prompts import Encoder

DEFAULT_WINDOW = 1024


@dataclass
class TextLoss:
    """Losses of a text: in nats per token, bits per byte, and by position (position 1 follows the BOS alone)."""

    num_tokens: int
    num_bytes: int
    num_invalid_bytes: int
    nats_per_token: float
    bits_per_byte: float
    position_loss: list[float | None]
    position_count: list[int]


def read_text(path: str | Path) -> tuple[str, int, int]:
    """(text, bytes of the file, bytes that are not UTF-8); the latter stand as U+FFFD in the text."""
    content = Path(path).read_bytes()
    marked = content.decode("utf-8", errors="surrogateescape")
    invalid = sum(0xDC80 <= ord(character) <= 0xDCFF for character in marked)
    text = "".join("\ufffd" if 0xDC80 <= ord(character) <= 0xDCFF else character for character in marked)
    return text, len(content), invalid


def windows(num_tokens: int, window: int, stride: int) -> list[tuple[int, int, int]]:
    """(start, end, first scored) of every window over `num_tokens` tokens; every token is scored exactly once.

    Raises ValueError unless 1 <= stride <= window.
    """
    if not 1 <= stride <= window:
        raise ValueError(f"stride must be between 1 and the window of {window} tokens, got {stride}.")
    found, scored = [], 0
    while scored < num_tokens:
        end = min(num_tokens, window if scored == 0 else scored + stride)
        found.append((max(0, end - window), end, scored))
        scored = end
    return found


@torch.no_grad()
def text_loss(
    model: nn.Module,
    tokenizer: PreTrainedTokenizerBase,
    text: str,
    num_bytes: int | None = None,
    num_invalid_bytes: int = 0,
    window: int | None = None,
    stride: int | None = None,
    bos_token: str | None = None,
    num_loops: int | None = None,
    tokens_per_batch: int = 4096,
) -> TextLoss:
    """Loss of a text; `num_bytes` defaults to its UTF-8 length, `stride` to half the window.

    The window counts the text's tokens, without the BOS. Raises ValueError for an empty text, or a window that does
    not fit the model's context.
    """
    encoder = Encoder(tokenizer, bos_token)
    tokens = encoder([text])[0][1:].astype(np.int64)
    if not len(tokens):
        raise ValueError("The text is empty: there is nothing to score.")
    limit = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    if window is None:
        window = DEFAULT_WINDOW if limit is None else min(DEFAULT_WINDOW, limit - 1)
    if limit is not None and window + 1 > limit:
        raise ValueError(f"window must be at most {limit - 1}, the model's context without the BOS; got {window}.")
    cut = windows(len(tokens), window, max(1, window // 2) if stride is None else stride)
    device = next(model.parameters()).device
    kwargs = {} if num_loops is None else {"num_loops": num_loops}
    training = model.training
    model.eval()
    sums, counts = np.zeros(window + 1), np.zeros(window + 1, dtype=np.int64)
    per_batch = max(1, tokens_per_batch // (window + 1))
    for first in range(0, len(cut), per_batch):
        batch = cut[first : first + per_batch]
        longest = max(end - start for start, end, _ in batch)
        inputs = np.zeros((len(batch), longest), dtype=np.int64)
        labels = np.full((len(batch), longest), -100, dtype=np.int64)
        for row, (start, end, scored) in enumerate(batch):
            inputs[row, 0] = encoder.bos_id
            inputs[row, 1 : end - start] = tokens[start : end - 1]
            labels[row, scored - start : end - start] = tokens[scored:end]
        logits = model(input_ids=torch.from_numpy(inputs).to(device), use_cache=False, **kwargs).logits
        flat = torch.from_numpy(labels).to(logits.device).reshape(-1)
        losses = nn.functional.cross_entropy(logits.reshape(len(flat), -1).float(), flat, reduction="none")
        losses = losses.double().cpu().numpy().reshape(labels.shape)
        mask = labels != -100
        sums[1 : longest + 1] += np.where(mask, losses, 0.0).sum(axis=0)
        counts[1 : longest + 1] += mask.sum(axis=0)
    model.train(training)
    num_bytes = len(text.encode()) if num_bytes is None else num_bytes
    return TextLoss(
        num_tokens=len(tokens),
        num_bytes=num_bytes,
        num_invalid_bytes=num_invalid_bytes,
        nats_per_token=float(sums.sum() / len(tokens)),
        bits_per_byte=float(sums.sum() / (math.log(2) * num_bytes)),
        position_loss=[float(s / n) if n else None for s, n in zip(sums[1:], counts[1:], strict=True)],
        position_count=counts[1:].tolist(),
    )


def fit_position_curve(positions: np.ndarray, losses: np.ndarray, counts: np.ndarray) -> tuple[float, float, float]:
    """(a, b, p) of the least-squares fit losses = a + b positions^-p, weighted by counts; p between 0.01 and 4.

    a and b follow in closed form for each p; p is found on a grid that is refined around its best value. Raises
    ValueError for fewer than four positions.
    """
    if len(positions) < 4:
        raise ValueError(f"A curve of three parameters needs at least 4 positions, got {len(positions)}.")
    root = np.sqrt(counts)

    def solve(p: float) -> tuple[float, np.ndarray]:
        design = np.stack([np.ones(len(positions)), np.asarray(positions, dtype=float) ** -p], axis=1) * root[:, None]
        solution = np.linalg.lstsq(design, losses * root, rcond=None)[0]
        return float(((design @ solution - losses * root) ** 2).sum()), solution

    low, high = math.log(0.01), math.log(4.0)
    for _ in range(12):
        grid = np.linspace(low, high, 25)
        best = int(np.argmin([solve(math.exp(x))[0] for x in grid]))
        low, high = grid[max(best - 1, 0)], grid[min(best + 1, len(grid) - 1)]
    p = math.exp((low + high) / 2)
    a, b = solve(p)[1]
    return float(a), float(b), p


def curve(loss: TextLoss) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(positions, losses, counts) where tokens were scored; positions count from 1."""
    kept = [i for i, n in enumerate(loss.position_count) if n]
    return (
        np.array(kept) + 1,
        np.array([loss.position_loss[i] for i in kept]),
        np.array([loss.position_count[i] for i in kept]),
    )


def _plot(loss: TextLoss, fit: tuple[float, float, float] | None, path: Path) -> None:
    import matplotlib  # only needed with --plot

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    positions, losses, _ = curve(loss)
    figure, axes = plt.subplots(layout="constrained")
    axes.plot(positions, losses, ".", markersize=3, label="loss of the token at this position")
    if fit is not None:
        a, b, p = fit
        axes.plot(positions, a + b * positions**-p, label=f"{a:.2f} + {b:.2f} T^-{p:.2f}")
    axes.set(xscale="log", xlabel="position in the context T (tokens)", ylabel="loss (nats per token)")
    axes.legend()
    figure.savefig(path, dpi=150)
    plt.close(figure)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m eval.bpb", description=__doc__.split("\n")[0])
    add_model_arguments(parser)
    parser.add_argument("files", nargs="+", type=Path, help="text files, each a document of its own")
    parser.add_argument(
        "--window", type=int, help=f"tokens of context, without the BOS (default: {DEFAULT_WINDOW}, or the model's)"
    )
    parser.add_argument("--stride", type=int, help="tokens that a window scores (default: half the window)")
    parser.add_argument("--num-loops", type=int, help="passes of a looped model's core")
    parser.add_argument("--output", type=Path, help="write the figures as JSON")
    parser.add_argument("--plot", type=Path, help="draw loss by position of the first file")
    args = parser.parse_args(argv)
    report = {}
    try:
        model, tokenizer, description = load_from_arguments(args)
        for file in args.files:
            loss = text_loss(
                model, tokenizer, *read_text(file), args.window, args.stride, args.bos_token, args.num_loops
            )
            positions = curve(loss)
            fit = fit_position_curve(*positions) if len(positions[0]) >= 4 else None
            fitted = None if fit is None else dict(zip(("a", "b", "p"), fit, strict=True))
            report[str(file)] = {**vars(loss), "position_fit": fitted}
            print(
                f"{file}: {loss.bits_per_byte:.6f} bits per byte, {loss.nats_per_token:.6f} nats per token, "
                f"{loss.num_tokens} tokens, {loss.num_bytes} bytes"
                + (f" ({loss.num_invalid_bytes} not UTF-8)" if loss.num_invalid_bytes else "")
            )
            if fit is not None:
                print(f"  by position: L(T) = {fit[0]:.3f} + {fit[1]:.3f} T^-{fit[2]:.3f}")
            if args.plot is not None and file == args.files[0]:
                _plot(loss, fit, args.plot)
    except (OSError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    if args.output is not None:
        args.output.parent.mkdir(parents=True, exist_ok=True)
        temporary = args.output.with_name(args.output.name + ".tmp")
        temporary.write_text(json.dumps({"model": description, "texts": report}, indent=1) + "\n", encoding="utf-8")
        os.replace(temporary, args.output)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
