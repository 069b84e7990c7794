"""One run: model, optimizer, data and position, from any step to the last, the same numbers however often it stops.

The step, the learning rates and the data are pure functions of the step number; model and optimizer state are keyed by
parameter name. So a checkpoint needs nothing else, and a growth is: read the state by name, build the larger model,
write the state by name. `Trainer.train` is the loop: grow, step, log, evaluate, save, stop.
"""

import math
import shutil
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator

from modeling_looped import LoopedForCausalLM
from modeling_looped.flops import stored_parameters
from modeling_looped.growth import grow
from training.budget import Plan
from training.data.loader import Batch, ValidationLoader, WindowLoader
from training.data.preparation import PreparedData
from training.engine.checkpoint import (
    CheckpointError,
    check_run_dir,
    list_checkpoints,
    load_checkpoint,
    save_checkpoint,
    write_json,
)
from training.engine.initialization import initialize_as_paper
from training.engine.launch import StopSignal, can_compile
from training.engine.records import MetricsLog, Progress, provenance
from training.optim import (
    build_optimizer,
    carry_state,
    describe_groups,
    load_state_by_name,
    set_step,
    state_by_name,
)
from training.schedule import lr_factor, muon_momentum


class DivergedError(Exception):
    """The loss is no longer finite; the message says at which step and on which data."""


class Stopped(Exception):
    """The run was asked to stop; its checkpoint is written."""


class Trainer:
    """Trains one model.

    Args:
        plan: what to train, with the numbers derived from it.
        data: prepared pools and tokenizer.
        accelerator: from training.engine.launch.start.
        run_dir: created if need be; a run found there is resumed.

    Raises:
        CheckpointError: `run_dir` cannot be used, or its newest checkpoint is damaged or belongs to other data.
        ValueError: batch, processes and data do not fit.
    """

    def __init__(self, plan: Plan, data: PreparedData, accelerator: Accelerator, run_dir: Path):
        recipe = plan.recipe
        self.plan, self.recipe, self.data, self.accelerator, self.run_dir = plan, recipe, data, accelerator, run_dir
        self.step = 0
        self.tokens_per_step = plan.tokens_per_step
        self.elapsed_seconds = 0.0
        self.validation: list[dict[str, float]] = []
        self.growths: list[dict[str, Any]] = []
        self.loader = WindowLoader(
            data.train,
            recipe.model.sequence_length,
            plan.windows_per_step,
            recipe.training.seed,
            token_limit=plan.train_tokens,
        )
        # at once no more windows than a process has in a step
        self.micro_batch_size = min(recipe.budget.micro_batch_size, plan.windows_per_step // accelerator.num_processes)
        if self.micro_batch_size == 0 or plan.windows_per_step % (self.micro_batch_size * accelerator.num_processes):
            raise ValueError(
                f"A step has {plan.windows_per_step} windows, which {accelerator.num_processes} processes with "
                f"budget.micro_batch_size={recipe.budget.micro_batch_size} cannot share evenly: change "
                f"budget.micro_batch_size, budget.tokens_per_step or the number of processes."
            )
        self.num_micro_steps = self.loader.num_micro_steps(accelerator.num_processes, self.micro_batch_size)
        self.validation_loader = None
        if data.validation is not None:
            self.validation_loader = ValidationLoader(
                data.validation, recipe.model.sequence_length, recipe.training.eval_tokens
            )
        checkpoints = list_checkpoints(run_dir)
        if checkpoints:
            self._restore(checkpoints[-1])
        else:
            torch.manual_seed(recipe.training.seed)
            model = LoopedForCausalLM(plan.config)
            last = plan.config if plan.grown_config is None else plan.grown_config
            initialize_as_paper(model, recipe.training.seed, last.num_stored_cores)
            self._install(model)
        if accelerator.is_main_process:
            # fp32 weights and up to three optimizer tensors of their size, for each checkpoint kept and one in writing
            bytes_needed = 4 * 4 * plan.final_stored_parameters * ((recipe.training.keep_last or 1) + 1)
            check_run_dir(run_dir, bytes_needed)

    def train(self) -> dict[str, Any]:
        """Runs to the last step and returns the results, also written to `run_dir/results.json`.

        Raises:
            Stopped: after SIGTERM or SIGINT; a checkpoint of the current step is written.
            DivergedError: the loss is not finite.
            CheckpointError: a checkpoint cannot be written; the ones before it are intact.
        """
        training = self.recipe.training
        stop = StopSignal()
        stop.install()
        metrics = MetricsLog(self.run_dir / "metrics.jsonl", self.step) if self.accelerator.is_main_process else None
        progress = Progress(self.plan.num_steps, self.step, self.run_dir.name, self.accelerator.is_main_process)
        for line in describe_groups(self.optimizer):
            progress.say(line)
        if training.compile and not can_compile(self.accelerator.device):
            progress.say("no C++ compiler found: the blocks run uncompiled, slower and to the same losses")
        if self.step > 0:
            progress.say(f"resumed at step {self.step} of {self.plan.num_steps}, K={self.model.config.num_loops}")
        try:
            while self.step < self.plan.num_steps:
                if self.step == self.plan.growth_step and self.model.config.num_loops < self.recipe.growth.num_loops:
                    if self.step > 0:
                        self.save()  # what was grown from, so that another growth can be tried from here
                    self.grow(progress)
                logged = self.step % training.log_every_steps == 0 or self.step + 1 == self.plan.num_steps
                start = time.perf_counter()
                record, stopping = self.train_step(stop.received is not None, logged)
                seconds = time.perf_counter() - start
                self.elapsed_seconds += seconds
                tokens_per_second = self.tokens_per_step / seconds
                progress.step(self.step, record["loss"], tokens_per_second, record["num_loops"], logged)
                if self.validation_loader is not None and self._due(training.eval_every_steps):
                    record["validation_loss"] = self.evaluate()
                    self.validation.append(
                        {"step": self.step, "flops": record["flops"], "loss": record["validation_loss"]}
                    )
                    progress.say(f"step {self.step}  validation loss {record['validation_loss']:.4f}")
                if logged or "validation_loss" in record:
                    record |= {"tokens_per_second": tokens_per_second, "elapsed_seconds": self.elapsed_seconds}
                    if metrics is not None:
                        metrics.write(record)
                        self.accelerator.log({k: v for k, v in record.items() if k != "step"}, step=self.step)
                if stopping or self._due(training.save_every_steps):
                    self.save()
                if stopping and self.step < self.plan.num_steps:
                    raise Stopped(
                        f"stopped at step {self.step} of {self.plan.num_steps}; run the same command to go on"
                    )
        finally:
            progress.close()
            if metrics is not None:
                metrics.close()
        results = self._results()
        if self.accelerator.is_main_process:
            write_json(self.run_dir / "results.json", results)
        return results

    def train_step(self, stop_requested: bool, with_grad_norm: bool) -> tuple[dict[str, Any], bool]:
        """One optimizer step. Returns its record and whether any process was asked to stop."""
        self.network.train()
        factor = lr_factor(
            self.step,
            num_steps=self.plan.num_steps,
            warmup_steps=self.recipe.schedule.warmup_steps,
            warmdown_ratio=self.recipe.schedule.warmdown_ratio,
            growth_step=self.plan.growth_step,
            ramp_steps=self.recipe.schedule.ramp_steps,
        )
        momentum = muon_momentum(self.step)
        set_step(self.optimizer, factor, momentum)
        # dropout, too, is a function of the step, so that a resumed run draws what the unbroken one does
        process = self.step * self.accelerator.num_processes + self.accelerator.process_index
        torch.manual_seed(self.recipe.training.seed + 1_000_003 * (process + 1))

        loss_sum = torch.zeros((), device=self.accelerator.device)
        batch = None
        for micro_step in range(self.num_micro_steps):
            batch = self.loader.batch(
                self.step,
                self.accelerator.process_index,
                self.accelerator.num_processes,
                self.micro_batch_size,
                micro_step,
            )
            last = micro_step == self.num_micro_steps - 1
            with nullcontext() if last else self.accelerator.no_sync(self.network):
                loss = self._loss(self.network, batch) / self.num_micro_steps
                loss.backward()
            loss_sum += loss.detach()
        # the mean over processes, and whether one of them was told to stop: all must leave at the same step
        shared = torch.stack((loss_sum, loss_sum.new_tensor(float(stop_requested))))
        shared = self.accelerator.reduce(shared, "mean")
        mean_loss, stopping = float(shared[0]), float(shared[1]) > 0
        if not math.isfinite(mean_loss):
            last_good = [path.name for path in list_checkpoints(self.run_dir)[-1:]]
            raise DivergedError(
                f"The loss is {mean_loss} at step {self.step} (epoch {batch.epoch}, windows {batch.windows.tolist()} "
                f"of process {self.accelerator.process_index}). Last checkpoint: {''.join(last_good) or 'none'}. "
                f"Lower the learning rates, or look at that data."
            )
        record = {
            "step": self.step + 1,
            "tokens": (self.step + 1) * self.tokens_per_step,
            "flops": self._flops_at(self.step + 1),
            "loss": mean_loss,
            "lr_factor": factor,
            "momentum": momentum,
            "num_loops": self.model.config.num_loops,
            "epoch": batch.epoch,
        }
        record |= {f"lr_{group['role']}": group["lr"] for group in self.optimizer.param_groups}
        if with_grad_norm:
            gradients = [p.grad for p in self.model.parameters() if p.grad is not None]
            record["grad_norm"] = float(torch.nn.utils.get_total_norm(gradients))
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.step += 1
        return record, stopping

    @torch.no_grad()
    def evaluate(self) -> float:
        """Validation loss in nats per token, over all processes, each token once."""
        self.model.eval()
        return self.validation_loader.mean_loss(
            lambda batch: self._loss(self.model, batch, num_items_in_batch=1),
            self.accelerator.process_index,
            self.accelerator.num_processes,
            self.micro_batch_size,
        )

    def grow(self, progress: Progress) -> None:
        """Grows the live model to the recipe's passes; optimizer state follows every parameter to its new name."""
        growth = self.recipe.growth
        old_loops = self.model.config.num_loops
        states = state_by_name(self.model, self.optimizer)
        grown = grow(self.model, growth.num_loops, growth.operator)
        self._install(grown.model)
        carried = carry_state(states, grown.origins, grown.created, growth.optimizer_state)
        load_state_by_name(self.model, self.optimizer, carried)
        stored = stored_parameters(self.model.config).total
        self.growths.append({"step": self.step, "from_num_loops": old_loops, "to_num_loops": growth.num_loops})
        progress.say(f"grew K {old_loops} -> {growth.num_loops} at step {self.step}: {stored:,} parameters stored")

    def save(self) -> None:
        """Writes a checkpoint that continues at the current step."""
        if self.accelerator.is_main_process:
            save_checkpoint(
                self.run_dir,
                self.step,
                self.model.config,
                dict(self.model.named_parameters()),
                state_by_name(self.model, self.optimizer),
                {
                    "elapsed_seconds": self.elapsed_seconds,
                    "validation": self.validation,
                    "growths": self.growths,
                    "data": self.loader.identity(),
                },
                self.recipe.training.keep_last,
            )
        self.accelerator.wait_for_everyone()

    def _restore(self, checkpoint: Path) -> None:
        config, weights, optimizer_state, state = load_checkpoint(checkpoint)
        for name, value in self.loader.identity().items():
            if state["data"].get(name) != value:
                raise CheckpointError(
                    f"{checkpoint} was trained on other data: {name} was {state['data'].get(name)}, now it is "
                    f"{value}. Restore the data, or choose another training.run_dir."
                )
        model = LoopedForCausalLM(config)
        model.load_state_dict(weights, strict=not config.tie_word_embeddings)
        self._install(model)
        load_state_by_name(self.model, self.optimizer, optimizer_state)
        self.step = state["step"]
        self.elapsed_seconds = state["elapsed_seconds"]
        self.validation = state["validation"]
        self.growths = state["growths"]

    def _install(self, model: LoopedForCausalLM) -> None:
        """Makes `model` the one that is trained: device, compilation, optimizer, the engine's wrapper around it."""
        training = self.recipe.training
        self.model = model.to(self.accelerator.device)
        if training.activation_checkpointing:
            self.model.activation_checkpointing_enable()
        if training.compile and can_compile(self.accelerator.device):
            for layer in self.model.model.layers:  # block by block: one graph serves all blocks and every K
                layer.compile()
        self.optimizer = build_optimizer(self.model, self.plan.optimizer_settings, self.recipe.optimizer.name)
        self.network = self.accelerator.prepare_model(self.model)

    def _loss(self, network: torch.nn.Module, batch: Batch, num_items_in_batch: int | None = None) -> torch.Tensor:
        device = self.accelerator.device
        targets = batch.targets.to(device, non_blocking=True)
        with torch.autocast(device.type, torch.bfloat16, enabled=self.recipe.training.precision == "bf16"):
            return network(
                input_ids=batch.input_ids.to(device, non_blocking=True),
                labels=targets,
                shift_labels=targets,  # the loader's targets are shifted already
                skip_logits=True,
                use_cache=False,
                num_items_in_batch=num_items_in_batch,
            ).loss

    def _flops_at(self, step: int) -> int:
        """Training FLOPs of the first `step` steps: each phase at its own cost per token."""
        before = step if self.plan.growth_step is None else min(step, self.plan.growth_step)
        flops = before * self.plan.flops_per_token
        if step > before:
            flops += (step - before) * self.plan.grown_flops_per_token
        return flops * self.tokens_per_step

    def _due(self, every: int | None) -> bool:
        return self.step == self.plan.num_steps or (every is not None and self.step % every == 0)

    def _results(self) -> dict[str, Any]:
        config = self.model.config
        return {
            "schema_version": 1,
            "recipe": self.recipe.name,
            "variant": self.recipe.variant,
            "depth": self.recipe.depth,
            "seed": self.recipe.training.seed,
            "num_steps": self.step,
            "tokens": self.step * self.tokens_per_step,
            "training_flops": self._flops_at(self.step),
            "stored_parameters": stored_parameters(config).total,
            "stored_blocks": config.num_stored_blocks,
            "executed_blocks": config.num_hidden_layers,
            "num_loops": config.num_loops,
            "growths": self.growths,
            "validation_loss": self.validation[-1]["loss"] if self.validation else None,
            "validation_tokens": self.validation_loader.num_targets if self.validation_loader else None,
            "validation_curve": self.validation,
            "training_seconds": self.elapsed_seconds,
            "tokens_per_second": self.step * self.tokens_per_step / self.elapsed_seconds,
            "num_processes": self.accelerator.num_processes,
            "precision": self.recipe.training.precision,
            "data": {"folder": str(self.data.folder), **self.loader.identity()},
            "provenance": provenance(),
        }


def copy_tokenizer(data: PreparedData, run_dir: Path) -> None:
    """Keeps the tokenizer beside the run, so that an export needs nothing else."""
    target = run_dir / "tokenizer"
    if not target.exists():
        temporary = run_dir / ".tmp-tokenizer"
        shutil.rmtree(temporary, ignore_errors=True)
        shutil.copytree(data.tokenizer_folder, temporary)
        temporary.rename(target)
