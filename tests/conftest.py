"""Shared by the tests: tiny models of every variant, and the folder of reference data.

The tiny variants are written out here, not built by `modeling_looped.variants`, so that the model's tests stand alone.
"""

import os

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
