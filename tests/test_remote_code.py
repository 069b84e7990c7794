"""Exported folders in fresh processes that cannot import modeling_looped: offline, no sockets, an empty cache.

The processes are few because each imports torch and transformers anew: one does everything that needs the first
export, a second loads what the first one saved after the originals are gone.
"""

import json
import os
import shutil
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file, save_file

from modeling_looped import LoopedConfig, LoopedForCausalLM

# What every child runs first
ISOLATION = """
import json, os, socket, sys
from pathlib import Path

class RefuseInstalled:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == "modeling_looped":
            raise ModuleNotFoundError(f"{name} is hidden from this process", name=name)

sys.meta_path.insert(0, RefuseInstalled())
try:
    import modeling_looped
except ModuleNotFoundError:
    pass
else:
    raise SystemExit("modeling_looped is importable")

def refuse(*args, **kwargs):
    raise OSError(f"a socket was opened: {args}")

socket.socket.connect = socket.socket.connect_ex = socket.getaddrinfo = socket.create_connection = refuse

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, AutoModelForSequenceClassification

torch.set_num_threads(1)
work = Path(sys.argv[1])
ids = load_file(work / "ids.safetensors")["ids"]

def load(folder, auto_class=AutoModelForCausalLM, **kwargs):
    model = auto_class.from_pretrained(folder, trust_remote_code=True, **kwargs).eval()
    assert type(model).__module__.startswith("transformers_modules."), type(model)
    return model

def dirty_memory():
    junk = [torch.full((size,), 1e20) for size in (4, 8, 16, 32) for _ in range(500)]
    del junk
"""

FIRST = """
out, report = {}, {}
dirty_memory()
with torch.no_grad():
    for name in ("tied", "untied"):
        model = load(work / name)
        out[f"{name}.logits"] = model(ids).logits
        out[f"{name}.again"] = model(ids).logits
        out[f"{name}.generated"] = model.generate(ids, max_new_tokens=8, do_sample=False)
        out |= {f"{name}.buffer.{key}": value.clone() for key, value in model.named_buffers()}
        out[f"{name}.hidden"] = load(work / name, AutoModel)(ids).last_hidden_state
        model.save_pretrained(work / f"{name}-saved")
        load(work / f"{name}-saved").save_pretrained(work / f"{name}-saved-again")
    out["linked.logits"] = load(work / "linked")(ids).logits
    seven = load(work / "tied", num_loops=7)
    calls = []
    for index, layer in enumerate(seven.model.layers):
        layer.register_forward_hook(lambda *_, index=index: calls.append(index))
    seven(ids)
    report["seven"] = calls
report["fields"] = AutoConfig.from_pretrained(work / "tied", trust_remote_code=True).num_hidden_layers
report["classifier"] = type(load(work / "tied", AutoModelForSequenceClassification, num_labels=2)).__name__
try:
    load(work / "tied", num_lops=7)
except ValueError as error:
    report["typo"] = str(error)

from transformers import Trainer, TrainingArguments
arguments = TrainingArguments(
    str(work / "trainer"), max_steps=1, save_steps=1, report_to=[], use_cpu=True, per_device_train_batch_size=2
)
model = load(work / "tied")
rows = [{"input_ids": row, "labels": row} for row in ids]
Trainer(model, arguments, train_dataset=rows).train()
with torch.no_grad():
    out["trained.logits"] = model.eval()(ids).logits
save_file({key: value.contiguous() for key, value in out.items()}, work / "first.safetensors")
(work / "first.json").write_text(json.dumps(report))
"""

SECOND = """
out = {}
with torch.no_grad():
    for name in ("tied-saved-again", "untied-saved-again", "trainer/checkpoint-1"):
        out[f"{name}.logits"] = load(work / name)(ids).logits
save_file(out, work / "second.safetensors")
"""

# Children are forked from a process that has imported everything by loading a Llama, so that a round costs no import
RACE = """
import multiprocessing
import transformers.dynamic_module_utils as dynamic
from transformers import LlamaConfig, LlamaForCausalLM
num_processes, num_rounds = int(sys.argv[2]), int(sys.argv[3])
LlamaForCausalLM(
    LlamaConfig(vocab_size=8, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1)
).save_pretrained(work / "llama")
AutoModelForCausalLM.from_pretrained(work / "llama")
context = multiprocessing.get_context("fork")

def race(barrier, cache):
    dynamic.HF_MODULES_CACHE = str(cache)
    if barrier is not None:
        barrier.wait()
    load(work / "tied")

def start(barrier, cache):
    child = context.Process(target=race, args=(barrier, cache))
    child.start()
    return child

failures = []
for round_idx in range(num_rounds):
    cache = work / f"race-{round_idx}"
    start(None, cache).join()  # the first process of a node
    barrier = context.Barrier(num_processes)
    children = [start(barrier, cache) for _ in range(num_processes)]
    for child in children:
        child.join()
    failures += [child.exitcode for child in children if child.exitcode != 0]
    assert list((cache / "transformers_modules").rglob("modeling_looped.py")), "another cache was used"
raise SystemExit(f"{len(failures)} processes failed" if failures else 0)
"""


def run(script, work, *arguments):
    """Runs a child in an empty home, away from the repository; returns its standard error, fails if it fails."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("HF_", "PYTHON"))}
    environment |= {"HF_HUB_OFFLINE": "1", "HF_HOME": str(work / "home"), "OMP_NUM_THREADS": "1"}
    child = subprocess.run(
        [sys.executable, "-I", "-c", ISOLATION + script, str(work), *map(str, arguments)],
        cwd=work,
        env=environment,
        capture_output=True,
        text=True,
    )
    assert child.returncode == 0, child.stderr
    return child.stderr


@pytest.fixture(scope="module")
def models():
    """name -> model of the exports."""
    fields = {
        "vocab_size": 64,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_attention_heads": 4,
        "num_prelude_blocks": 1,
        "num_core_blocks": 2,
        "num_coda_blocks": 1,
        "max_position_embeddings": 64,
        "bos_token_id": 0,
        "eos_token_id": None,
        "pad_token_id": 0,
        "initializer_range": 0.3,
    }
    torch.manual_seed(0)
    return {
        "tied": LoopedForCausalLM(LoopedConfig(**fields, num_loops=3, boundary_operator="norm_inject_learned")).eval(),
        "untied": LoopedForCausalLM(LoopedConfig(**fields, num_loops=2, tie_core=False)).eval(),
    }


@pytest.fixture(scope="module")
def work(models, tmp_path_factory):
    """Folder with the exports `tied` and `untied` and `linked`, which is `tied` as the Hub's cache keeps it."""
    work = tmp_path_factory.mktemp("remote_code")
    for name, model in models.items():
        model.save_pretrained(work / name)
    (work / "blobs").mkdir()
    (work / "linked").mkdir()
    for index, path in enumerate(sorted((work / "tied").iterdir())):
        shutil.copy(path, work / "blobs" / f"blob{index}")
        (work / "linked" / path.name).symlink_to(work / "blobs" / f"blob{index}")
    ids = torch.randint(1, 64, (2, 9), generator=torch.Generator().manual_seed(0))
    save_file({"ids": ids}, work / "ids.safetensors")
    return work


@pytest.fixture(scope="module")
def first(work):
    """(tensors, report) of the first child."""
    run(FIRST, work)
    return load_file(work / "first.safetensors"), json.loads((work / "first.json").read_text())


@pytest.fixture(scope="module")
def second(first, work):
    """Tensors of the second child, started after the exports and the module cache are gone."""
    for folder in ("tied", "untied", "linked", "blobs", "tied-saved", "untied-saved", "home"):
        shutil.rmtree(work / folder)
    run(SECOND, work)
    return load_file(work / "second.safetensors")


# B45, B27, B11, B47
@torch.no_grad()
@pytest.mark.parametrize("name", ["tied", "untied"])
def test_export_loads_without_the_package(first, models, work, name):
    tensors, _ = first
    ids = load_file(work / "ids.safetensors")["ids"]
    model = models[name]
    assert torch.equal(tensors[f"{name}.logits"], model(ids).logits)
    assert torch.equal(tensors[f"{name}.again"], model(ids).logits)
    assert torch.equal(tensors[f"{name}.hidden"], model.model(ids).last_hidden_state)
    assert torch.equal(tensors[f"{name}.generated"], model.generate(ids, max_new_tokens=8, do_sample=False))
    buffers = dict(model.named_buffers())
    assert {key.split(".buffer.")[1] for key in tensors if key.startswith(f"{name}.buffer.")} == set(buffers)
    for key, buffer in buffers.items():
        assert torch.equal(tensors[f"{name}.buffer.{key}"], buffer), key


# B41
def test_folder_of_symlinks_loads(first):
    tensors, _ = first
    assert torch.equal(tensors["linked.logits"], tensors["tied.logits"])


# B15
def test_remote_code_takes_overrides(first):
    _, report = first
    assert report["seven"] == [0] + [1, 2] * 7 + [3]
    assert report["fields"] == 8
    assert report["classifier"] == "LoopedForSequenceClassification"
    assert "Did you mean `num_loops`" in report["typo"]


# B39, B45
@pytest.mark.parametrize("name", ["tied", "untied"])
def test_what_remote_code_saves_is_the_export(first, models, work, name, tmp_path):
    models[name].save_pretrained(tmp_path)
    exported = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    saved = {path.name: path.read_bytes() for path in (work / f"{name}-saved-again").iterdir() if path.is_file()}
    assert saved == exported
    assert "--" not in str(json.loads(saved["config.json"])["auto_map"])


# B39
@pytest.mark.parametrize("name", ["tied", "untied"])
def test_saved_copy_loads_after_the_original_is_gone(second, first, name):
    tensors, _ = first
    assert torch.equal(second[f"{name}-saved-again.logits"], tensors[f"{name}.logits"])


# B39
def test_trainer_checkpoint_of_remote_code_loads(second, first):
    tensors, _ = first
    assert torch.equal(second["trainer/checkpoint-1.logits"], tensors["trained.logits"])
    assert not torch.equal(tensors["trained.logits"], tensors["tied.logits"])


@pytest.fixture(scope="module")
def race_work(models, tmp_path_factory):
    work = tmp_path_factory.mktemp("race")
    models["tied"].save_pretrained(work / "tied")
    save_file({"ids": torch.ones(1, 1, dtype=torch.long)}, work / "ids.safetensors")
    return work


# B43: transformers copies code into the module cache without a lock, so that processes which meet an empty cache can
# read half a file, whatever the model. One process of a node loads first; from then on any number may load at once.
def test_processes_may_load_at_once(race_work):
    run(RACE, race_work, 4, 3)


# B43
@pytest.mark.slow
def test_many_processes_may_load_at_once_many_times(race_work):
    run(RACE, race_work, 8, 20)
