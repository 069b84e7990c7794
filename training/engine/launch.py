"""Start and end of a distributed program: the only file that knows how Accelerate, gloo and signals behave.

The launch command decides processes and devices (`accelerate launch`, `torchrun`, or plain python for one process);
this file checks that what was asked for is what runs, since Accelerate falls back to one process silently.
"""

import logging
import os
import shutil
import signal
import sys
from datetime import timedelta

import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.utils import InitProcessGroupKwargs

from eval.models import keep_freed_memory

# A rank that waits this long for another gives up: long enough for rank 0 to tokenise a corpus on first use
COLLECTIVE_TIMEOUT = timedelta(hours=2)


def start(precision: str, trackers: list[str] | None = None, logging_dir: str | None = None) -> Accelerator:
    """The Accelerator of this process, checked against the launch command.

    Args:
        precision: `"fp32"` or `"bf16"` (autocast; parameters, gradients and optimizer state stay fp32).
        trackers: names that Accelerate knows, e.g. `["tensorboard"]`.
        logging_dir: where trackers write.

    Raises:
        RuntimeError: the number of processes is not the one that the launcher announced.
    """
    accelerator = Accelerator(
        cpu=not torch.cuda.is_available(),
        mixed_precision="bf16" if precision == "bf16" else "no",
        log_with=trackers or None,
        project_dir=logging_dir,
        kwargs_handlers=[InitProcessGroupKwargs(timeout=COLLECTIVE_TIMEOUT)],
    )
    announced = int(os.environ.get("WORLD_SIZE", "1"))
    if accelerator.num_processes != announced:
        raise RuntimeError(
            f"The launcher started {announced} processes, but Accelerate runs {accelerator.num_processes} "
            f"({accelerator.distributed_type}). On CPUs launch with `torchrun --nproc_per_node N -m ...`."
        )
    if accelerator.device.type == "cpu":
        keep_freed_memory()  # a training step otherwise spends a fifth of its time on page faults
    return accelerator


def can_compile(device: torch.device) -> bool:
    """Whether torch.compile has what it needs on this machine: on a CPU that is a C++ compiler."""
    if device.type != "cpu":
        return True
    return any(shutil.which(name) for name in (os.environ.get("CXX", "g++"), "g++", "clang++"))


def describe(accelerator: Accelerator, precision: str) -> str:
    """One line for the log: engine, processes, device, precision, threads."""
    kind = "single process" if accelerator.num_processes == 1 else f"DDP over {accelerator.num_processes} processes"
    device = accelerator.device
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else f"{torch.get_num_threads()} threads each"
    return f"{kind}, {device.type} ({name}), {precision}"


def finish(accelerator: Accelerator) -> None:
    """Ends a program that has succeeded; on gloo the process exits here.

    gloo's threads sometimes abort the interpreter's own teardown after all work is done (exit code -6), so the
    process group is destroyed, output flushed, and the process left without that teardown.
    """
    on_gloo = accelerator.num_processes > 1 and accelerator.device.type == "cpu"
    accelerator.wait_for_everyone()
    accelerator.end_training()  # closes the trackers, and the process group of most launches
    if on_gloo:
        if dist.is_initialized():
            dist.destroy_process_group()
        logging.shutdown()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)


class StopSignal:
    """Turns the first SIGTERM or SIGINT into a flag read between steps; a second one ends the process at once."""

    def __init__(self):
        self.received: str | None = None

    def install(self) -> None:
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._handle)

    def _handle(self, number, frame) -> None:
        if self.received is not None:
            os._exit(128 + number)
        self.received = signal.Signals(number).name
