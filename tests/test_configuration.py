"""LoopedConfig: derived counts, the schedule, overrides, and the errors of bad input."""

import copy
import json

import pytest

from modeling_looped import LoopedConfig, LoopedForCausalLM


@pytest.mark.parametrize(
    ("sections", "executed", "stored"),
    [
        ((2, 2, 2, 1, True), 6, 6),
        ((2, 3, 3, 4, True), 17, 8),
        ((2, 3, 3, 4, False), 17, 17),
        ((0, 1, 0, 12, True), 12, 1),  # a universal transformer
    ],
)
def test_derived_counts_follow_from_the_sections(sections, executed, stored):
    prelude, core, coda, num_loops, tie_core = sections
    config = LoopedConfig(
        num_prelude_blocks=prelude,
        num_core_blocks=core,
        num_coda_blocks=coda,
        num_loops=num_loops,
        tie_core=tie_core,
    )
    assert config.num_hidden_layers == executed == len(config.schedule())
    assert config.num_stored_blocks == stored


# 256 * ceil(floor(8 * 128 d / 3) / 256), worked out by hand for d = 6, 8, 26
@pytest.mark.parametrize(("hidden_size", "intermediate_size"), [(768, 2048), (1024, 2816), (3328, 8960)])
def test_intermediate_size_follows_the_swiglu_rule(hidden_size, intermediate_size):
    config = LoopedConfig(hidden_size=hidden_size, num_attention_heads=hidden_size // 128)
    assert config.intermediate_size == intermediate_size
    assert config.head_dim == 128


def test_schedule_lists_stored_blocks_in_executed_order(tiny_config):
    assert tiny_config(num_loops=3).schedule() == [0, 1, 2, 1, 2, 1, 2, 3]
    untied = tiny_config(num_loops=3, tie_core=False)
    assert untied.schedule() == [0, 1, 2, 3, 4, 5, 6, 7]
    # the coda is stored last: fewer passes jump over the dormant cores
    assert untied.schedule(num_loops=1) == [0, 1, 2, 7]


def test_tied_schedule_takes_any_number_of_passes(tiny_config):
    assert tiny_config(num_loops=1).schedule(num_loops=3) == [0, 1, 2, 1, 2, 1, 2, 3]


@pytest.mark.parametrize("name", ["num_prelude_blocks", "num_core_blocks", "num_coda_blocks", "num_loops"])
def test_executed_blocks_follow_a_field_that_is_set_later(tiny_config, name):
    config = tiny_config()
    setattr(config, name, getattr(config, name) + 1)
    assert (
        config.num_hidden_layers
        == len(config.schedule())
        == tiny_config(**{name: getattr(config, name)}).num_hidden_layers
    )


def test_config_survives_a_json_round_trip(variant_config):
    config = variant_config()
    again = LoopedConfig(**json.loads(config.to_json_string()))
    assert again.to_dict() == config.to_dict()
    assert again.schedule() == config.schedule()
    assert copy.deepcopy(config).to_dict() == config.to_dict()


def test_config_file_holds_no_private_field(tiny_config, tmp_path):
    tiny_config().save_pretrained(tmp_path)
    assert not [name for name in json.loads((tmp_path / "config.json").read_text()) if name.startswith("_")]


# B15: an override at load is a real override
def test_from_pretrained_overrides_the_number_of_passes(tiny_config, tmp_path):
    tiny_config().save_pretrained(tmp_path)
    config = LoopedConfig.from_pretrained(tmp_path, num_loops=7)
    assert (config.num_loops, config.num_hidden_layers) == (7, 16)


def test_fewer_passes_than_stored_cores_are_kept_through_saving(tiny_config, tmp_path):
    tiny_config(num_loops=4, tie_core=False).save_pretrained(tmp_path)
    LoopedConfig.from_pretrained(tmp_path, num_loops=2).save_pretrained(tmp_path)
    config = LoopedConfig.from_pretrained(tmp_path)
    assert (config.num_loops, config.num_stored_cores, config.num_stored_blocks) == (2, 4, 10)
    config.num_loops = 4
    assert config.num_hidden_layers == 10


def test_legacy_rope_theta_lands_in_rope_parameters(tiny_config):
    assert tiny_config(rope_theta=500.0).rope_parameters == {"rope_theta": 500.0, "rope_type": "default"}


@pytest.mark.parametrize("num_loops", [0, -1, 2.0, 2.5, True, "2"])
def test_num_loops_must_be_a_positive_integer(tiny_config, num_loops):
    with pytest.raises(Exception, match="num_loops.*(integer of at least 1|expected int), got"):
        tiny_config(num_loops=num_loops)
    config = tiny_config()
    with pytest.raises(Exception, match="num_loops.*(integer of at least 1|expected int), got"):
        config.num_loops = num_loops
    assert config.num_loops == 3
    with pytest.raises(ValueError, match="`num_loops` must be an integer of at least 1, got"):
        config.schedule(num_loops)


def test_untied_model_refuses_more_passes_than_it_stores(tiny_config, tmp_path):
    message = "`num_loops` is 3, but this untied model stores 2 cores: allowed are 1 to 2"
    with pytest.raises(Exception, match=message):
        tiny_config(num_loops=3, tie_core=False, num_stored_cores=2)
    config = tiny_config(num_loops=2, tie_core=False)
    with pytest.raises(ValueError, match=message):
        config.num_loops = 3
    with pytest.raises(ValueError, match=message):
        config.schedule(3)
    config.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=message):
        LoopedConfig.from_pretrained(tmp_path, num_loops=3)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"hidden_size": 30}, r"`hidden_size` \(30\) is not a multiple of `num_attention_heads` \(4\)"),
        ({"num_key_value_heads": 3}, r"`num_attention_heads` \(4\) is not a multiple of `num_key_value_heads` \(3\)"),
        ({"head_dim": 7}, "`head_dim` must be even for rotary embeddings, got 7"),
        ({"num_attention_heads": 0}, "`num_attention_heads` must be at least 1, got 0"),
        ({"num_core_blocks": 0}, "`num_core_blocks` must be at least 1, got 0"),
        ({"num_core_blocks": 1.5}, "num_core_blocks.*expected int, got float"),
        ({"num_prelude_blocks": -1}, "`num_prelude_blocks` must be at least 0, got -1"),
        ({"num_coda_blocks": -1}, "`num_coda_blocks` must be at least 0, got -1"),
        ({"vocab_size": 0}, "`vocab_size` must be at least 1, got 0"),
        ({"num_stored_cores": 2}, "A tied core is stored once: `num_stored_cores` must be 1 .* got 2"),
        ({"num_hidden_layers": 7}, "`num_hidden_layers` is derived: .* = 8, got 7"),
        ({"qk_norm": "after"}, "qk_norm.*'after_rope', 'before_rope'"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_sizes_that_do_not_fit_are_refused(tiny_config, fields, message):
    with pytest.raises(Exception, match=f"(?s){message}"):
        tiny_config(**fields)


@pytest.mark.parametrize(
    ("misspelt", "meant"),
    [
        ("num_lops", "num_loops"),
        ("num_passes", "num_loops"),
        ("num_recurrences", "num_loops"),
        ("tie_cores", "tie_core"),
        ("boundary_operater", "boundary_operator"),
        ("num_prelude_block", "num_prelude_blocks"),
    ],
)
def test_misspelt_field_is_refused_with_the_nearest_name(tiny_config, tmp_path, misspelt, meant):
    with pytest.raises(ValueError, match=f"no field `{misspelt}`. Did you mean `{meant}`"):
        tiny_config(**{misspelt: 3})
    tiny_config().save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=f"no field `{misspelt}`. Did you mean `{meant}`"):
        LoopedConfig.from_pretrained(tmp_path, **{misspelt: 3})


def test_unknown_boundary_operator_is_refused_with_the_list(tiny_config):
    with pytest.raises(ValueError, match="`boundary_operator` is 'norm_injet', allowed are: .*norm_inject,"):
        LoopedForCausalLM(tiny_config(boundary_operator="norm_injet"))


@pytest.mark.parametrize(
    "override", [{"num_hidden_layers": 3}, {"tie_core": True}, {"num_coda_blocks": -1}, {"num_stored_cores": 1}]
)
def test_contradictory_overrides_are_refused_at_load(tiny_config, override):
    saved = tiny_config(tie_core=False, num_loops=2).to_dict()
    with pytest.raises(ValueError, match="num_hidden_layers|num_stored_cores|num_coda_blocks|stores 1 core"):
        LoopedConfig.from_dict(saved, **override)
