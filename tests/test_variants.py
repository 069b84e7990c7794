import json
from pathlib import Path

import pytest
import torch

from modeling_looped import LoopedForCausalLM
from modeling_looped.variants import VARIANTS, build_config, split_thirds

LADDER = json.loads((Path(__file__).parent / "assets" / "ladder.json").read_text())["checkpoints"]
NAMES = {row["variant"]: row["variant"].lower().replace(" ", "-") for row in LADDER}


def test_thirds_of_the_paper():
    published = {
        (row["depth_coordinate"]): tuple(row["prelude_core_coda"]) for row in LADDER if row["prelude_core_coda"]
    }
    assert len(published) == 9
    assert {depth: split_thirds(depth) for depth in published} == published


@pytest.mark.parametrize("depth", range(3, 40))
def test_thirds_add_up_and_differ_by_one_at_most(depth):
    prelude, core, coda = split_thirds(depth)
    assert prelude + core + coda == depth
    assert prelude <= coda <= core <= prelude + 1


@pytest.mark.parametrize("row", LADDER, ids=lambda row: f"{row['variant']}-{row['corpus']}-d{row['depth_coordinate']}")
def test_published_architectures(row):
    name = NAMES[row["variant"]]
    variant = VARIANTS[name]
    plain = row["depth_mode"] == "none"
    start = build_config(name, row["depth_coordinate"])
    if not plain:
        assert variant.num_loops == (row["core_repetitions_low"] or row["core_repetitions"])
        assert variant.grown_num_loops == (row["core_repetitions"] if row["core_repetitions_low"] else None)
        assert start.tie_core == (row["depth_mode"] == "loop")
        assert start.boundary_alpha == row["boundary_alpha"]
    final = build_config(name, row["depth_coordinate"], num_loops=variant.grown_num_loops)
    assert (start.boundary_operator == "none") == plain
    assert start.residual_multiplier == row["residual_branch_multiplier"]
    assert start.logit_scale == row["output_multiplier"]
    assert start.initializer_range == row["wte_init_std"]
    assert start.uniform_init_scale == row["uniform_init_scale"]
    assert final.hidden_size == row["width"]
    assert final.num_attention_heads == final.num_key_value_heads == row["heads"]
    assert final.head_dim == row["head_dim"]
    assert final.intermediate_size == row["mlp_hidden"]
    assert final.num_stored_blocks == row["stored_blocks"]
    assert final.num_hidden_layers == row["executed_blocks_final"]
    assert (final.vocab_size, final.max_position_embeddings) == (50257, 2048)


@pytest.mark.parametrize("name", VARIANTS)
def test_every_variant_builds_a_model_that_runs(name):
    config = build_config(name, 3, width_ratio=16, head_dim=16, vocab_size=97, max_position_embeddings=32)
    model = LoopedForCausalLM(config)
    ids = torch.arange(20).view(2, 10)
    assert model(ids).logits.shape == (2, 10, 97)
    assert VARIANTS[name].description


def test_universal_applies_one_block_depth_times():
    config = build_config("universal", 7)
    assert config.schedule() == [0] * 7
    assert config.hidden_size == 896


def test_sizes_and_overrides_win_over_the_variant():
    config = build_config(
        "untied-2", 4, width_ratio=48, head_dim=32, num_loops=3, boundary_operator="norm", num_key_value_heads=2
    )
    assert (config.hidden_size, config.num_attention_heads, config.num_key_value_heads) == (192, 6, 2)
    assert (config.num_stored_cores, config.num_loops, config.boundary_operator) == (3, 3, "norm")


def test_only_the_gpt2_vocabulary_brings_token_ids():
    assert build_config("vanilla", 6).bos_token_id == 50256
    small = build_config("vanilla", 6, vocab_size=4096)
    assert small.bos_token_id is None and small.eos_token_id is None
    assert build_config("vanilla", 6, vocab_size=4096, bos_token_id=0).bos_token_id == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"variant": "untied-grw", "depth": 6}, "`untied-grow`"),
        ({"variant": "loop-2", "depth": 2}, "at least 3, got 2"),
        ({"variant": "loop-2", "depth": 12.0}, "got 12.0"),
        ({"variant": "loop-2", "depth": True}, "got True"),
        ({"variant": "universal", "depth": 0}, "at least 1, got 0"),
        ({"variant": "loop-2", "depth": 6, "width_ratio": 100}, "not a multiple of `head_dim`"),
        ({"variant": "loop-2", "depth": 6, "head_dim": 0}, "`head_dim` must be"),
        ({"variant": "loop-2", "depth": 6, "boundary_opertor": "norm"}, "`boundary_operator`"),
        ({"variant": "loop-2", "depth": 6, "wholly_unknown": 1}, "no field `wholly_unknown`"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_errors_name_what_is_wrong(arguments, message):
    with pytest.raises(ValueError, match=message):
        build_config(arguments.pop("variant"), arguments.pop("depth"), **arguments)
