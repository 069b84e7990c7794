"""Training runs of the paper's own code, run again by this engine from the same weights and tokens.

    python -m training.reproduce FOLDER [FOLDER ...]

training/paper_run.py says what a folder holds. Prints both runs step by step, the largest difference of each quantity
against what is allowed, and a verdict; exits with 1 where a tolerance is missed. Matrices of blocks are compared
loosely: Muon orthogonalises in bf16, where the order of two roundings moves an update of these small gradients by a
tenth. It moves the loss by 1e-5 only, and the loss says little about blocks: gradients do.
"""

import math
import re
import statistics
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from accelerate import Accelerator
from rich.console import Console
from rich.table import Table
from safetensors.torch import load_file
from torch.optim.optimizer import register_optimizer_step_pre_hook

from modeling_looped.upcycle import EMBEDDING, HEAD
from training.data.loader import ValidationLoader
from training.engine.launch import start
from training.engine.records import read_metrics
from training.engine.trainer import Trainer
from training.paper_run import PaperRun, PaperRunError, paper_names
from training.values import RecipeError

EARLY_WEIGHTS = re.compile(r"params_after_(\d+)_steps_partial\.safetensors")
EARLY_GRADIENTS = re.compile(r"grads_at_step(\d+)_partial\.safetensors")
BLOCKS = "model.layers."
ROLES = {EMBEDDING: "embedding", HEAD: "head"}

# Largest difference that still is a reproduction, and whether it is relative to the paper's number. "Early" is before
# roundings add up: gradient norms before Muon has moved a matrix, the rest after a few steps. For comparison, the
# paper's eager and compiled optimizer differ after three steps by 1.3e-5 in the change of the embedding, .21 in that
# of a matrix and .07 in a gradient; without Nesterov momentum, row normalisation or variance reduction, or with four
# orthogonalisation steps, these runs miss an early change of a matrix.
TOLERANCES = {
    "stored parameters": (0.0, False),
    "training FLOPs": (0.0, False),
    "passes": (0.0, False),
    "learning rate": (1e-9, True),
    "weight decay": (1e-9, True),
    "momentum": (1e-9, False),
    "loss": (1e-4, False),
    "validation loss": (1e-4, False),
    "gradient norm": (2e-4, True),
    "gradient norm of a matrix, early": (1e-5, True),
    "gradient norm of a matrix, median": (0.04, True),
    "gradient of a matrix, early": (0.1, True),
    "change of a matrix, early": (0.25, True),
    "change of embedding or head, early": (5e-5, True),
    "change of embedding or head": (5e-3, True),
}


class Entry(NamedTuple):
    """How far one number, or tensor, of the two runs is apart.

    Attributes:
        quantity: a name in TOLERANCES.
        of: of what, where a step has several.
        step: completed steps.
        difference: absolute or relative, as TOLERANCES says.
        published, ours: the number there and here; None for tensors.
    """

    quantity: str
    of: str
    step: int
    difference: float
    published: float | None = None
    ours: float | None = None

    @property
    def agrees(self) -> bool:
        return self.difference <= TOLERANCES[self.quantity][0]


def number(quantity: str, of: str, step: int, published: float, ours: float) -> Entry:
    """The Entry of a number."""
    difference = abs(ours - published)
    if TOLERANCES[quantity][1]:
        difference = relative(difference, published)
    return Entry(quantity, of, step, difference, published, ours)


def relative(difference: float, published: float) -> float:
    """`difference` / `published`; infinite where only the latter is 0."""
    if difference == 0.0:
        return 0.0
    return difference / abs(published) if published else math.inf


class Recorder:
    """Keeps, for each step of a Trainer, what its optimizer is called with.

    Attributes:
        groups: role -> (learning rate, weight decay, momentum or None).
        weights, gradients: by parameter name, before the step.
        gradient_norms: by the paper's name of the parameter.
    """

    def __init__(self, trainer: Trainer, num_held_blocks: int):
        self.trainer = trainer
        self.num_held_blocks = num_held_blocks
        self.groups: list[dict[str, tuple[float, float, float | None]]] = []
        self.weights: list[dict[str, torch.Tensor]] = []
        self.gradients: list[dict[str, torch.Tensor]] = []
        self.gradient_norms: list[dict[str, float]] = []

    def __call__(self, optimizer: torch.optim.Optimizer, args: tuple, kwargs: dict) -> None:
        groups = optimizer.param_groups
        self.groups.append({g["role"]: (g["lr"], g["weight_decay"], g.get("momentum")) for g in groups})
        parameters = dict(self.trainer.model.named_parameters())
        self.weights.append({name: p.detach().cpu().clone() for name, p in parameters.items()})
        self.gradients.append({name: p.grad.cpu().clone() for name, p in parameters.items()})
        names = paper_names(self.trainer.model.config, self.num_held_blocks)
        self.gradient_norms.append({names[name]: float(p.grad.norm()) for name, p in parameters.items()})


def reproduce(paper: PaperRun, accelerator: Accelerator, work_dir: Path) -> list[Entry]:
    """Trains the run anew in the empty folder `work_dir` and compares every number that both runs have.

    Raises:
        PaperRunError: a file is missing, or an epoch has not the paper's windows.
    """
    plan, data = paper.plan(), paper.write_data(work_dir / "data")
    trainer = Trainer(plan, data, accelerator, work_dir / paper.name)
    trainer.validation_loader = ValidationLoader(
        data.validation,
        trainer.loader.sequence_length,
        paper.args["val_token_limit"],
        window_multiple=paper.args["device_batch_size"] * paper.args["token_limit_cutoff_devices"],
    )
    for loader, what in (
        (trainer.loader, "packed_train_sequences_per_epoch"),
        (trainer.validation_loader, "active_val_packed_sequences"),
    ):
        if loader.num_windows != paper.result[what]:
            raise PaperRunError(f"{paper.folder}: {what} is {paper.result[what]}, our loader has {loader.num_windows}")
    trainer.model.load_state_dict(paper.initial_weights)

    recorder = Recorder(trainer, paper.num_held_blocks)
    validation_losses = {0: trainer.evaluate()}
    hook = register_optimizer_step_pre_hook(recorder)
    try:
        results = trainer.train()
    finally:
        hook.remove()
    validation_losses |= {point["step"]: point["loss"] for point in results["validation_curve"]}
    last, result = paper.num_steps, paper.result
    return [
        number("stored parameters", "", last, result["parameter_count"], plan.final_stored_parameters),
        number("training FLOPs", "", last, result["estimated_training_flops"], results["training_flops"]),
        *(
            number("validation loss", "", step, published, validation_losses[step])
            for step, published in paper.validation_losses().items()
        ),
        *compare_steps(paper, read_metrics(trainer.run_dir / "metrics.jsonl"), recorder),
        *compare_tensors(paper, trainer, recorder),
    ]


def compare_steps(paper: PaperRun, metrics: list[dict[str, Any]], recorder: Recorder) -> Iterator[Entry]:
    """Loss, passes, learning rates, weight decay, momentum and gradient norms of every step."""
    early = True
    for point, said, record, groups, norms in zip(
        paper.run["trajectory"]["eager"],
        paper.run["per_step"],
        metrics,
        recorder.groups,
        recorder.gradient_norms,
        strict=True,
    ):
        step = record["step"]
        if not step == point["step"] == said["step"] + 1:
            raise PaperRunError(f"{paper.folder / 'run.json'}: step {step} is not in its place")
        yield number("loss", "", step, point["global_batch_loss"], record["loss"])
        if said["active_k"] is not None:
            yield number("passes", "", step, said["active_k"], record["num_loops"])
        for (_, names), (_, lr, momentum, decay, *_) in zip(
            paper.run["optimizer_groups"], said["groups"], strict=True
        ):
            role = ROLES.get(names[0], "matrix")
            our_lr, our_decay, our_momentum = groups[role]
            yield number("learning rate", role, step, lr, our_lr)
            yield number("weight decay", role, step, decay, our_decay)
            if momentum is not None:
                yield number("momentum", role, step, momentum, our_momentum)
        if said["grad_norms"] is None:
            early = False
            continue
        yield from compare_gradient_norms(step, said["grad_norms"], norms, early)
        early = early and not any(norm for name, norm in said["grad_norms"].items() if name not in ROLES)


def compare_gradient_norms(
    step: int, published: dict[str, float | None], ours: dict[str, float], early: bool
) -> Iterator[Entry]:
    """Of all parameters together, of each where `early` or where one run has none, and the median of the matrices."""
    # A dormant block has no gradient there, and does not exist here
    pairs = {name: (published.get(name) or 0.0, ours.get(name, 0.0)) for name in published | ours}
    yield number("gradient norm", "", step, *(math.hypot(*norms) for norms in zip(*pairs.values(), strict=True)))
    for name, (theirs, norm) in pairs.items():
        if early or (theirs == 0.0) != (norm == 0.0):
            yield number("gradient norm of a matrix, early", name, step, theirs, norm)
    differences = [relative(abs(a - b), a) for name, (a, b) in pairs.items() if name not in ROLES and a > 0.0]
    if not early:
        yield Entry("gradient norm of a matrix, median", "", step, statistics.median(differences))


def compare_tensors(paper: PaperRun, trainer: Trainer, recorder: Recorder) -> Iterator[Entry]:
    """Changes of weights since the start, and gradients, for which there are files of tensors."""
    final = paper.convert(torch.load(paper.file("final.pt"), weights_only=True)["model"], trainer.model.config)
    for name, theirs in final.items():
        if not name.startswith(BLOCKS):
            change = trainer.model.get_parameter(name).detach().cpu() - paper.initial_weights[name]
            distance = distance_of(change, theirs - paper.initial_weights[name])
            yield Entry("change of embedding or head", name, paper.num_steps, distance)
    for path in sorted(paper.folder.iterdir()):
        if match := EARLY_WEIGHTS.fullmatch(path.name):
            step = int(match[1])
            for name, theirs in paper.convert(load_file(path), paper.config).items():
                start = paper.initial_weights[name]
                of = "a matrix" if name.startswith(BLOCKS) else "embedding or head"
                distance = distance_of(recorder.weights[step][name] - start, theirs - start)
                yield Entry(f"change of {of}, early", name, step, distance)
        elif match := EARLY_GRADIENTS.fullmatch(path.name):
            step = int(match[1])
            for name, theirs in paper.convert(load_file(path), paper.config).items():
                if name.startswith(BLOCKS):
                    distance = distance_of(recorder.gradients[step][name], theirs)
                    yield Entry("gradient of a matrix, early", name, step + 1, distance)


def distance_of(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    """||ours - theirs|| / ||theirs||."""
    return float((ours - theirs).norm() / theirs.norm())


def print_steps(entries: list[Entry], title: str, columns: dict[str, tuple[str, str]], console: Console) -> None:
    """A row for each step with the paper's number, ours and the difference of each (quantity, of) in `columns`."""
    table = Table(title=title, title_justify="left")
    table.add_column("step", justify="right")
    for heading in columns:
        for part in (heading, "ours", "difference"):
            table.add_column(part, justify="right", no_wrap=True)
    found = {(entry.quantity, entry.of, entry.step): entry for entry in entries}
    for step in sorted({entry.step for entry in entries}):
        row = [found.get((*column, step)) for column in columns.values()]
        if any(row):
            cells = [(f"{e.published:.6g}", f"{e.ours:.6g}", f"{e.difference:.1e}") if e else ("",) * 3 for e in row]
            table.add_row(str(step), *(cell for group in cells for cell in group))
    console.print(table)


def print_run(name: str, entries: list[Entry], console: Console) -> bool:
    """The tables of a run and its verdict; True if every entry is within its tolerance."""
    losses = {"loss": ("loss", ""), "validation": ("validation loss", ""), "gradient norm": ("gradient norm", "")}
    print_steps(entries, f"{name}: after so many steps", losses, console)
    rates = {"matrix LR": ("learning rate", "matrix"), "momentum": ("momentum", "matrix")}
    print_steps(entries, f"{name}: the step was taken with", rates, console)

    table = Table(title=f"{name}: largest differences", title_justify="left")
    for heading in ("quantity", "compared", "difference", "allowed", "", "where"):
        table.add_column(heading, justify="right" if heading in ("compared", "difference", "allowed") else "left")
    for quantity, (largest, is_relative) in TOLERANCES.items():
        if of_quantity := [entry for entry in entries if entry.quantity == quantity]:
            worst = max(of_quantity, key=lambda entry: entry.difference)
            where = f"step {worst.step} {worst.of.removesuffix('.weight')}" if worst.difference else ""
            allowed = f"{largest:g} {'relative' if is_relative else 'absolute'}" if largest else "0"
            verdict = "agrees" if worst.agrees else "MISSED"
            table.add_row(quantity, str(len(of_quantity)), f"{worst.difference:.1e}", allowed, verdict, where)
    console.print(table)
    missed = [entry for entry in entries if not entry.agrees]
    verdict = f"not reproduced: {len(missed)} of {len(entries)} comparisons missed" if missed else "reproduced"
    console.print(f"{name}: {verdict}\n")
    return not missed


def main(arguments: list[str] | None = None) -> int:
    words = sys.argv[1:] if arguments is None else arguments
    if not words or words[0] in ("-h", "--help"):
        print(__doc__)
        return 0 if words else 2
    torch.set_num_threads(1)  # as there: several threads add in another order
    console = Console(width=max(Console().width, 132))
    reproduced = True
    try:
        accelerator = start("fp32")
        for paper in [PaperRun(Path(word)) for word in words]:
            with tempfile.TemporaryDirectory(prefix="reproduce-") as work_dir:
                entries = reproduce(paper, accelerator, Path(work_dir))
            reproduced &= print_run(paper.name, entries, console)
    except (PaperRunError, RecipeError, ValueError, OSError) as error:
        print(f"reproduce: {error}", file=sys.stderr)
        return 2
    return 0 if reproduced else 1


if __name__ == "__main__":
    sys.exit(main())
