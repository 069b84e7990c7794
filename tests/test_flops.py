import json
from pathlib import Path

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from modeling_looped import LoopedForCausalLM
from modeling_looped.boundary import BOUNDARY_OPERATORS
from modeling_looped.flops import (
    SECTIONS,
    SectionCount,
    cache_bytes_per_token,
    decode_flops_per_token,
    executed_parameters,
    forward_flops_per_token,
    matrix_parameters,
    pad_vocab_size,
    stored_parameters,
    summary_table,
    training_flops,
    training_flops_per_token,
    weights_bytes,
)
from modeling_looped.variants import VARIANTS, build_config

LADDER = json.loads((Path(__file__).parent / "assets" / "ladder.json").read_text())["checkpoints"]
PADDED = pad_vocab_size(50257)


def tiny_config(variant="loop-2", depth=5, **settings):
    return build_config(
        variant,
        depth,
        **({"width_ratio": 32, "head_dim": 32, "vocab_size": 97, "max_position_embeddings": 64} | settings),
    )


def eager_model(config):
    # The counter sees products of matrices; it has no formula for torch's fused attention on a CPU
    model = LoopedForCausalLM(config)
    model.set_attn_implementation("eager")
    return model


# The counts that the paper states, in rows padded to a multiple of 64
@pytest.mark.parametrize(
    ("variant", "depth", "num_loops", "parameters", "num_blocks"),
    [
        ("operator-1", 8, 1, 205_783_040, 8),
        ("vanilla", 10, 1, 331_939_840, 10),
        ("vanilla", 12, 1, 494_272_512, 12),
        ("loop-2", 12, 2, 494_272_512, 12),
        ("deep-vanilla", 10, 2, 413_204_480, 14),
        ("untied-grow", 6, 4, 162_201_600, 12),
        ("untied-grow", 26, 4, 7_424_049_152, 53),
    ],
)
def test_published_counts(variant, depth, num_loops, parameters, num_blocks):
    config = build_config(variant, depth, num_loops=num_loops)
    assert PADDED == 50304
    assert stored_parameters(config, padded_vocab_size=PADDED).total == parameters
    assert config.num_stored_blocks == num_blocks


@pytest.mark.parametrize("row", LADDER, ids=lambda row: row["hub_id"].split("/")[1])
def test_published_training_flops(row):
    name = row["variant"].lower().replace(" ", "-")
    start = build_config(name, row["depth_coordinate"])
    settings = {"sequence_length": 2048, "padded_vocab_size": PADDED}
    if row["growth_step"] is None:
        phases = [(start, row["tokens"])]
    else:
        grown = build_config(name, row["depth_coordinate"], num_loops=VARIANTS[name].grown_num_loops)
        before = row["growth_step"] * 524288
        phases = [(start, before), (grown, row["tokens"] - before)]
        # The grown model with fewer passes is the model before growth
        assert training_flops(phases, **settings) == training_flops(
            [(2, before), (4, row["tokens"] - before)], config=grown, **settings
        )
    assert training_flops(phases, **settings) == pytest.approx(row["training_flops"], rel=1e-12)


MODELS = [
    *(pytest.param(name, {}, id=name) for name in VARIANTS),
    *(pytest.param("loop-2", {"boundary_operator": name}, id=name) for name in BOUNDARY_OPERATORS),
    *(pytest.param("untied-2", {"boundary_operator": name, "norm_affine": True}, id=f"{name}-affine")
      for name in BOUNDARY_OPERATORS),
    pytest.param("loop-2", {"norm_affine": True, "qk_norm": None, "embedding_norm": False}, id="few-norms"),
    pytest.param("loop-2", {"tie_word_embeddings": True, "uniform_init_scale": None}, id="tied-embeddings"),
    pytest.param("loop-2", {"num_attention_heads": 5, "num_key_value_heads": 1, "head_dim": 48}, id="grouped-wide"),
]  # fmt: skip


@pytest.mark.parametrize(("variant", "settings"), MODELS)
def test_stored_parameters_are_those_of_the_model(variant, settings):
    config = tiny_config(variant, **settings)
    model = LoopedForCausalLM(config)
    counted = stored_parameters(config)
    assert counted.total == sum(parameter.numel() for parameter in model.parameters())
    assert counted.boundary == sum(parameter.numel() for parameter in model.model.boundary.parameters())
    assert counted.embedding == model.model.embed_tokens.weight.numel()
    assert counted.norms == sum(p.numel() for name, p in model.named_parameters() if "norm" in name)
    assert weights_bytes(config, dtype=torch.float32) == 4 * counted.total


def test_dormant_cores_are_stored_but_not_executed():
    config = tiny_config("untied-2", num_loops=4)
    stored, executed = stored_parameters(config), executed_parameters(config, num_loops=1)
    assert stored.core == 4 * executed.core
    assert (stored.prelude, stored.coda, stored.head) == (executed.prelude, executed.coda, executed.head)
    tied = tiny_config("loop-2")
    assert executed_parameters(tied, num_loops=8).core == 8 * stored_parameters(tied).core


@pytest.mark.parametrize("num_loops", [1, 2, 4])
@pytest.mark.parametrize(("variant", "settings"), [
    ("loop-2", {}),
    ("untied-2", {"num_loops": 4}),
    ("vanilla", {}),
    ("loop-2", {"boundary_operator": "linear_adapter"}),
    ("loop-2", {"num_attention_heads": 5, "num_key_value_heads": 1, "head_dim": 48}),
], ids=["tied", "untied", "vanilla", "adapter", "grouped-wide"])  # fmt: skip
def test_flops_are_those_that_torch_counts(variant, settings, num_loops):
    config = tiny_config(variant, **settings)
    model = eager_model(config)
    batch, length = 2, 48
    ids = torch.randint(0, config.vocab_size, (batch, length))
    # The counter sees the dense products, without regard to the mask: causal=False
    rule = {"num_loops": num_loops, "sequence_length": length, "causal": False}
    with FlopCounterMode(display=False) as counter:
        model(ids, num_loops=num_loops)
    assert forward_flops_per_token(config, **rule).total * batch * length == pytest.approx(
        counter.get_total_flops(), rel=1e-2
    )
    with FlopCounterMode(display=False) as counter:
        model(ids, labels=ids, num_loops=num_loops).loss.backward()
    assert training_flops_per_token(config, **rule).total * batch * length == pytest.approx(
        counter.get_total_flops(), rel=1e-2
    )


def test_causal_flops_are_those_of_decoding_a_sequence_token_by_token():
    config = tiny_config()
    length = 48
    for num_loops in (1, 3):
        rule = {"num_loops": num_loops}
        token_by_token = sum(
            decode_flops_per_token(config, context_length=position, **rule).total
            for position in range(1, length + 1)
        )  # fmt: skip
        assert forward_flops_per_token(config, sequence_length=length, **rule).total * length == token_by_token


@pytest.mark.parametrize("num_loops", [1, 3])
def test_decoding_and_its_cache_are_what_the_model_does(num_loops):
    config = tiny_config(num_attention_heads=5, num_key_value_heads=1, head_dim=48)
    model = eager_model(config).eval()
    prompt = torch.randint(0, config.vocab_size, (1, 20))
    with torch.no_grad():
        cache = model(prompt[:, :-1], use_cache=True, num_loops=num_loops).cache
        with FlopCounterMode(display=False) as counter:
            model(prompt[:, -1:], cache=cache, num_loops=num_loops)
    counted = decode_flops_per_token(config, context_length=20, num_loops=num_loops).total
    assert counted == pytest.approx(counter.get_total_flops(), rel=1e-2)
    held = sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers)
    assert cache_bytes_per_token(config, num_loops=num_loops, dtype=torch.float32) * 20 == held


def test_padded_rows_reach_embedding_and_head_alone():
    config = tiny_config(vocab_size=97)
    plain, padded = (matrix_parameters(config, padded_vocab_size=rows) for rows in (None, 128))
    assert padded.total - plain.total == padded.head - plain.head == 31 * config.hidden_size
    stored = stored_parameters(config, padded_vocab_size=128).total - stored_parameters(config).total
    assert stored == 2 * 31 * config.hidden_size
    assert [pad_vocab_size(size) for size in (1, 64, 65, 4096)] == [64, 64, 128, 4096]


def test_summary_shows_every_section_and_the_totals():
    config = tiny_config()
    text = summary_table(config, num_loops=3, sequence_length=32)
    assert all(section in text for section in SECTIONS)
    assert f"{stored_parameters(config).total:,}" in text
    assert f"{training_flops_per_token(config, num_loops=3, sequence_length=32).total:,}" in text
    assert f"{cache_bytes_per_token(config, num_loops=3):,} bytes per token in bfloat16" in text


def test_what_cannot_be_counted_is_refused():
    config = tiny_config("untied-2")
    with pytest.raises(ValueError, match="stores 2 cores"):
        training_flops_per_token(config, num_loops=3)
    with pytest.raises(ValueError, match="`sequence_length` must be at least 1, got 0"):
        training_flops_per_token(config, sequence_length=0)
    with pytest.raises(ValueError, match="`context_length`"):
        decode_flops_per_token(config, context_length=0)
    with pytest.raises(ValueError, match="pass `config` too"):
        training_flops([(2, 100)])
    with pytest.raises(ValueError, match="-1 tokens"):
        training_flops([(config, -1)])
    with pytest.raises(AssertionError, match="sections sum to 3"):
        SectionCount(total=4, core=3)
