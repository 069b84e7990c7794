"""Shared by the tests: tiny models of every variant, and the folder of reference data.

The tiny variants are written out here, not built by `modeling_looped.variants`, so that the model's tests stand alone.
"""

import json
import os
import random

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

from pathlib import Path

import pytest
import torch

from modeling_looped import LoopedConfig, LoopedForCausalLM

torch.set_num_threads(1)

TINY = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_prelude_blocks": 1,
    "num_core_blocks": 2,
    "num_coda_blocks": 1,
    "num_loops": 3,
    "max_position_embeddings": 128,
    "bos_token_id": 0,
    "eos_token_id": None,
}

# The paper's variants: https://arxiv.org/abs/2609.19107; those that grow, at their last stage
TINY_VARIANTS = {
    "vanilla": {"num_loops": 1, "boundary_operator": "none", "logit_scale": 0.5, "residual_multiplier": 0.25},
    "deep-vanilla": {"num_loops": 2, "tie_core": False, "boundary_operator": "none", "residual_multiplier": 0.5},
    "deep-vanilla-grow": {"num_loops": 4, "tie_core": False, "boundary_operator": "none", "residual_multiplier": 0.5},
    "operator-1": {"num_loops": 1, "boundary_alpha": 1.0, "residual_multiplier": 0.5},
    "loop-2": {"num_loops": 2, "boundary_alpha": 0.5**0.5, "residual_multiplier": 0.25},
    "untied-2": {"num_loops": 2, "tie_core": False, "residual_multiplier": 0.25},
    "loop-grow": {"num_loops": 4, "boundary_alpha": 0.5**0.5, "residual_multiplier": 0.25},
    "untied-grow": {"num_loops": 4, "tie_core": False, "residual_multiplier": 0.25},
}


@pytest.fixture
def tiny_config():
    """Function (**fields) -> LoopedConfig of 8 executed blocks at width 32; fields override the defaults."""
    return lambda **fields: LoopedConfig(**{**TINY, **fields})


@pytest.fixture(params=TINY_VARIANTS)
def variant_config(request, tiny_config):
    """Function (**fields) -> LoopedConfig of the variant at hand; a test that takes it runs once a variant."""
    return lambda **fields: tiny_config(**{**TINY_VARIANTS[request.param], **fields})


@pytest.fixture
def make_model():
    """Function (config, seed=0, cls=LoopedForCausalLM) -> model in eval mode."""

    def make(config, seed=0, cls=LoopedForCausalLM):
        model = cls(config)
        generator = torch.Generator().manual_seed(seed)
        # Drawn anew: the paper's initialisation has zero matrices, which would hide what runs through them
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if parameter.ndim < 2:
                parameter.data.add_(0.1 * noise)
            elif "boundary" in name:
                parameter.data.add_(noise * 0.3 / parameter.shape[-1] ** 0.5)
            else:
                parameter.data.copy_(noise * 2 / parameter.shape[-1] ** 0.5)
        return model.eval()

    return make


@pytest.fixture
def random_ids():
    """Function (*shape, seed=0) -> token ids from 1 on (0 is left for padding)."""

    def draw(*shape, seed=0):
        return torch.randint(1, TINY["vocab_size"], shape, generator=torch.Generator().manual_seed(seed))

    return draw


@pytest.fixture(scope="session")
def reference_dir() -> Path:
    """Larger reference data, kept outside the repository: LOOPED_REFERENCE_DIR, by default ../shared."""
    folder = Path(os.environ.get("LOOPED_REFERENCE_DIR", Path(__file__).resolve().parents[2] / "shared"))
    if not folder.is_dir():
        pytest.skip(f"reference data not found at {folder}")
    return folder


@pytest.fixture(scope="session")
def corpus(tmp_path_factory) -> Path:
    """A few files of text made of a small vocabulary, with something to learn in it."""
    folder = tmp_path_factory.mktemp("corpus")
    draw = random.Random(0)
    words = ["loop", "core", "pass", "grow", "norm", "state", "prelude", "coda", "\n", "= 1", "+ 2"]
    for index in range(40):
        text = " ".join(draw.choices(words, weights=range(1, len(words) + 1), k=300))
        (folder / f"{index:02d}.txt").write_text(text)
    return folder


@pytest.fixture(scope="session")
def words(corpus, tmp_path_factory):
    """Function (run_dir, **changes) -> words of the command line for a tiny run that grows at step 6."""
    data = tmp_path_factory.mktemp("data")

    def make(run_dir, recipe="demo", **changes):
        settings = {
            "depth": 3, "model.width_ratio": 16, "model.head_dim": 16, "model.sequence_length": 32,
            "data.source": "text", "data.options.paths": str(corpus), "data.options.validation_fraction": 0.3,
            "data.out": str(data / "prepared"),
            "data.vocab_size": 300, "data.validation_tokens": 600,
            "optimizer.lr_exponent": 0.0, "schedule.warmup_steps": 2, "schedule.ramp_steps": 2, "growth.fraction": 0.5,
            "budget.steps": 12, "budget.tokens_per_step": 256, "budget.micro_batch_size": 8,
            "training.run_dir": str(run_dir), "training.log_every_steps": 1, "training.eval_every_steps": 4,
            "training.save_every_steps": 4, "training.keep_last": 10,
            "training.compile": False, **changes,
        }  # fmt: skip
        if recipe == "demo-vanilla":
            settings = {key: value for key, value in settings.items() if not key.startswith("growth.")}
        return [recipe, *(f"{key}={json.dumps(value)}" for key, value in settings.items())]

    return make


@pytest.fixture(scope="session")
def run_to_the_end():
    """Function (words) -> run_dir, after training.pretrain has run there in this process."""
    from training import pretrain  # the model's own tests need nothing of training

    def run(words) -> Path:
        assert pretrain.main(words) == 0
        return next(Path(json.loads(word.split("=", 1)[1])) for word in words if word.startswith("training.run_dir="))

    return run


@pytest.fixture(scope="session")
def straight(words, run_to_the_end, tmp_path_factory) -> Path:
    """The run_dir of the undisturbed tiny run that others are compared with."""
    return run_to_the_end(words(tmp_path_factory.mktemp("straight") / "run"))
