"""A training run that the paper's own code wrote, in our words: plan, initial weights, token pools.

The folder of a run holds run.json (settings, and what was measured at each step), result.json, init.safetensors and
final.pt; the token pool that run.json names lies beside it. That code was run in fp32 on one CPU thread
(qlabs-eng/scaling-exponents, of arXiv 2609.19107). Settings that this engine does not have are refused by name.
"""

import json
import math
import re
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file

from modeling_looped import LoopedConfig
from modeling_looped.upcycle import EMBEDDING, HEAD, PAPER_BLOCK_NAMES, convert_paper_tensors, paper_config
from training.budget import Plan, resolve
from training.config import load_recipe
from training.data.preparation import PreparedData
from training.data.shards import PoolWriter, TokenPool

VALIDATION_LINE = re.compile(r"Step (\d+) .*Val Loss: ([\d.]+)")

# (depth_scale_mode, grows) -> the recipe of the nearest variant; every setting that matters is laid over it
RECIPES = {
    ("none", False): "vanilla",
    ("loop", False): "loop-2",
    ("loop", True): "loop-grow",
    ("dep", False): "untied-2",
    ("dep", True): "untied-grow",
}
# Fields of LoopedConfig that a recipe takes as model.overrides
OVERRIDES = (
    "hidden_size",
    "intermediate_size",
    "num_attention_heads",
    "num_key_value_heads",
    "num_prelude_blocks",
    "num_core_blocks",
    "num_coda_blocks",
    "tie_core",
    "num_stored_cores",
    "boundary_operator",
    "boundary_alpha",
    "residual_multiplier",
    "logit_scale",
    "initializer_range",
    "uniform_init_scale",
)


class PaperRunError(Exception):
    """A run that this engine cannot repeat, or whose files are not whole; the message says why."""


class PaperRun:
    """The files of one run.

    Args:
        folder: as above.

    Attributes:
        name: the folder's.
        run, result, args: run.json, result.json, and the settings in the first.
        num_steps: optimizer steps of the run.
        grows: whether the model grows.
        config: the model with which training starts.
        num_held_blocks: blocks that the paper's code holds from the start, those of later cores dormant until growth.
        initial_weights: state dict of a LoopedForCausalLM of `config`.

    Raises:
        PaperRunError: a file is missing, or a setting is one that this engine does not have.
        ValueError: settings or tensors that no LoopedConfig expresses.
    """

    def __init__(self, folder: Path):
        self.folder = folder.resolve()
        self.name = self.folder.name
        self.file("final.pt")  # read at the end, missed at the start
        self.run = json.loads(self.file("run.json").read_text())
        self.result = json.loads(self.file("result.json").read_text())
        self.args = self.run["args"]
        self._refuse_what_we_lack()
        self.num_steps: int = self.result["completed_train_steps"]
        self.grows: bool = self.args["core_repetition_schedule"] == "late"

        tensors = load_file(self.file("init.safetensors"))
        shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
        settings = {"head_dim": None, "final_eval_active_core_repetitions": None} | self.args
        sizes = self.run["vocab_size"], self.run["context_length"]
        self.config = paper_config(settings, shapes, *sizes, source=str(folder / "init.safetensors"))
        self.num_held_blocks = self.config.num_stored_blocks
        if self.grows:
            self.config.num_loops = self.args["core_repetition_low"]
            if not self.config.tie_core:
                self.config.num_stored_cores = self.config.num_loops
        self.initial_weights = self.convert(tensors, self.config)

    def file(self, name: str) -> Path:
        """The path of a file of the run; raises PaperRunError if there is none."""
        path = self.folder / name
        if not path.is_file():
            raise PaperRunError(
                f"{path} is missing: a run is a folder with run.json, result.json, init.safetensors and final.pt"
            )
        return path

    def _refuse_what_we_lack(self) -> None:
        args, result = self.args, self.result
        schedule = args["core_repetition_schedule"]
        decays = sorted({args[f"{group}_weight_decay"] for group in ("matrix", "embedding", "unembedding")})
        steps, scheduled = result["completed_train_steps"], result["resolved_lr_schedule_steps"]
        lacking = {
            f"weight decays of {decays}, one for each group": len(decays) > 1,
            f"embedding_wd_skip_norm={args['embedding_wd_skip_norm']}": args["embedding_wd_skip_norm"] != 0,
            f"{steps} steps of a schedule of {scheduled}": steps != scheduled,
            f"core_repetition_schedule={schedule!r}": schedule not in ("none", "late"),
            f"lr_schedule={result['lr_schedule']!r}": result["lr_schedule"] != "wsd",
        }
        if found := [what for what, is_so in lacking.items() if is_so]:
            raise PaperRunError(f"{self.folder}: this engine has no {' and no '.join(found)}")

    def convert(self, tensors: dict[str, torch.Tensor], config: LoopedConfig) -> dict[str, torch.Tensor]:
        """Tensors of the paper's code (weights or gradients, all or some) by our names and in our form.

        Args:
            config: the model at their time; what is dormant in it is left out.
        """
        held, stored = (paper_names(config, number) for number in (self.num_held_blocks, config.num_stored_blocks))
        return convert_paper_tensors(
            {stored[ours]: tensors[theirs] for ours, theirs in held.items() if theirs in tensors}, config
        )

    def validation_losses(self) -> dict[int, float]:
        """Completed steps -> validation loss: printed to six decimals, those of result.json exact."""
        losses = {}
        for line in self.run["val_lines"]:
            match = VALIDATION_LINE.match(line)
            if match is None:
                raise PaperRunError(f"{self.folder / 'run.json'}: {line!r} in val_lines gives no validation loss")
            losses[int(match[1])] = float(match[2])
        losses |= {row["step"]: row["val_loss"] for row in self.result["train_val_per_epoch"]}
        return losses | {self.num_steps: self.result["final_val_loss"]}

    def plan(self) -> Plan:
        """The plan of the same run: a recipe in which the run's settings are laid over the nearest variant.

        Raises:
            RecipeError: settings of which no run can be made.
        """
        args, result, config = self.args, self.result, self.config
        evaluated = [step for step in self.validation_losses() if step > 0]
        train_tokens = args["train_token_limit"] or result["active_train_tokens"]
        overrides = {
            "name": self.name,
            "depth": args["n_layer"],
            "model": {
                "num_loops": config.num_loops,
                "head_dim": config.head_dim,
                "sequence_length": config.max_position_embeddings,
                "overrides": {name: getattr(config, name) for name in OVERRIDES},
            },
            "data": {"vocab_size": config.vocab_size, "train_tokens": train_tokens},
            "optimizer": {
                "matrix_lr": result["effective_matrix_lr"],
                "embedding_lr": result["effective_embedding_lr"],
                "head_lr": result["effective_unembedding_lr"],
                "lr_exponent": 0.0,
                "weight_decay": args["matrix_weight_decay"],
                "adam_betas": args["adam_betas"],
                "adam_eps": args["adam_eps"],
            },
            "schedule": {
                "warmup_steps": args["warmup_steps"],
                "warmdown_ratio": args["warmdown_ratio"],
                "ramp_steps": args["lsched_lr_warmup_steps"],
            },
            "growth": {
                "num_loops": args["core_repetitions"] if self.grows else None,
                "fraction": args["core_repetition_crossover_fraction"] if self.grows else None,
            },
            "budget": {
                "steps": self.num_steps,
                "tokens_per_step": args["total_batch_size"],
                "micro_batch_size": args["device_batch_size"],
            },
            "training": {
                "seed": args["seed"],
                "precision": "fp32",
                "compile": False,
                "eval_every_steps": math.gcd(*evaluated),
                "save_every_steps": None,
                "log_every_steps": 1,
            },
        }
        return resolve(load_recipe(RECIPES[args["depth_scale_mode"], self.grows], overrides))

    def write_data(self, folder: Path) -> PreparedData:
        """The run's token pools, written to the empty `folder` in our format; there is no tokenizer."""
        train, validation = (self._write_pool(name, folder / name) for name in ("train", "val"))
        return PreparedData(folder, folder, train, validation)

    def _write_pool(self, name: str, folder: Path) -> TokenPool:
        path = self.folder.parent / self.args["data_dir"] / f"{name}.pt"
        if not path.is_file():
            raise PaperRunError(f"{path} is missing: {self.folder / 'run.json'} names that token pool")
        pool = torch.load(path, weights_only=True)
        tokens, starts = pool["tokens"].numpy().astype(np.int64), pool["doc_starts"].numpy()
        writer = PoolWriter(folder, {"source": path.name}, self.config.vocab_size, int(tokens[0]), len(tokens))
        for document in np.split(tokens, starts[1:]):
            writer.add(document, None)
        return writer.finish(None)


def paper_names(config: LoopedConfig, num_held_blocks: int) -> dict[str, str]:
    """Our parameter names -> the paper's, whose code holds so many blocks: dormant ones stand before the coda."""
    first_coda = config.num_stored_blocks - config.num_coda_blocks
    names = {"model.embed_tokens.weight": EMBEDDING, "lm_head.weight": HEAD}
    for block in range(config.num_stored_blocks):
        held = block + (num_held_blocks - config.num_stored_blocks) * (block >= first_coda)
        for theirs, ours in PAPER_BLOCK_NAMES.items():
            names[f"model.layers.{block}.{ours}.weight"] = f"transformer.h.{held}.{theirs}.weight"
    return names
