"""Saving and loading with the package installed; without it, see test_remote_code."""

import json
import warnings

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from modeling_looped import (
    LoopedConfig,
    LoopedForCausalLM,
    LoopedForQuestionAnswering,
    LoopedForSequenceClassification,
    LoopedForTokenClassification,
    LoopedModel,
)
from modeling_looped.boundary import BOUNDARY_OPERATORS

CODE = {"configuration_looped.py", "boundary.py", "linear_cross_entropy.py", "modeling_looped.py", "rms_norm.py"}


def files(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def assert_same_parameters_and_buffers(model, other):
    tensors = dict(model.named_parameters()) | dict(model.named_buffers())
    others = dict(other.named_parameters()) | dict(other.named_buffers())
    assert tensors.keys() == others.keys()
    for name, tensor in tensors.items():
        assert torch.equal(tensor, others[name]), name


def assert_round_trip(model, tmp_path, ids):
    model.save_pretrained(tmp_path / "first")
    loaded, report = LoopedForCausalLM.from_pretrained(tmp_path / "first", output_loading_info=True)
    assert not any(report.values()), report
    loaded.save_pretrained(tmp_path / "second")
    assert files(tmp_path / "first") == files(tmp_path / "second")
    assert_same_parameters_and_buffers(loaded, model)
    assert torch.equal(loaded(ids).logits, model(ids).logits)
    assert not loaded.training


def test_variant_survives_save_load_save(variant_config, make_model, random_ids, tmp_path):
    assert_round_trip(make_model(variant_config()), tmp_path, random_ids(2, 9))


@pytest.mark.parametrize("operator", BOUNDARY_OPERATORS)
def test_operator_survives_save_load_save(tiny_config, make_model, random_ids, tmp_path, operator):
    assert_round_trip(make_model(tiny_config(boundary_operator=operator)), tmp_path, random_ids(2, 9))


@pytest.mark.parametrize(
    "fields",
    [
        {"tie_word_embeddings": True},
        {"norm_affine": True, "qk_norm": "before_rope"},
        {"qk_norm": None, "embedding_norm": False},
        {"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 10000.0}},
        {"rope_parameters": {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 10000.0}},
    ],
    ids=str,
)
def test_option_survives_save_load_save(tiny_config, make_model, random_ids, tmp_path, fields):
    assert_round_trip(make_model(tiny_config(**fields)), tmp_path, random_ids(2, 9))


def test_sharded_checkpoint_loads(tiny_config, make_model, random_ids, tmp_path):
    model = make_model(tiny_config())
    model.save_pretrained(tmp_path, max_shard_size="20KB")
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 1
    assert_same_parameters_and_buffers(LoopedForCausalLM.from_pretrained(tmp_path), model)


# B27: loading builds on the meta device, which leaves buffers outside the checkpoint with whatever memory held
def test_rope_buffers_survive_dirty_memory(tiny_config, make_model, random_ids, tmp_path):
    model = make_model(tiny_config())
    model.save_pretrained(tmp_path)
    size = model.model.rotary_emb.inv_freq.numel()
    junk = [torch.full((size,), 1e20) for _ in range(2000)]
    del junk
    loaded = LoopedForCausalLM.from_pretrained(tmp_path)
    assert_same_parameters_and_buffers(loaded, model)
    assert loaded.model.rotary_emb.inv_freq.tolist() == pytest.approx([1.0, 0.1, 0.01, 0.001])


# B15
def test_num_loops_at_load_is_executed(tiny_config, make_model, random_ids, tmp_path):
    make_model(tiny_config(num_loops=3)).save_pretrained(tmp_path)
    model = LoopedForCausalLM.from_pretrained(tmp_path, num_loops=7)
    assert (model.config.num_loops, model.config.num_hidden_layers) == (7, 16)
    calls = []
    for index, layer in enumerate(model.model.layers):
        layer.register_forward_hook(lambda *_, index=index: calls.append(index))
    model(random_ids(1, 5))
    assert calls == [0] + [1, 2] * 7 + [3]


def test_fewer_passes_at_load_keep_the_dormant_cores(tiny_config, make_model, random_ids, tmp_path):
    model = make_model(tiny_config(num_loops=4, tie_core=False))
    model.save_pretrained(tmp_path / "first")
    fewer = LoopedForCausalLM.from_pretrained(tmp_path / "first", num_loops=2)
    fewer.save_pretrained(tmp_path / "second")
    again = LoopedForCausalLM.from_pretrained(tmp_path / "second")
    assert again.config.num_loops == 2
    ids = random_ids(1, 9)
    assert torch.equal(again(ids).logits, model(ids, num_loops=2).logits)
    assert torch.equal(again(ids, num_loops=4).logits, model(ids).logits)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ({"num_lops": 7}, "no field `num_lops`. Did you mean `num_loops`"),
        ({"kk": 7}, "unexpected keyword argument 'kk'"),
        ({"num_loops": 0}, "`num_loops` must be an integer of at least 1, got 0"),
        ({"num_loops": 5}, "stores 3 cores: allowed are 1 to 3"),
    ],
    ids=str,
)
def test_bad_override_at_load_is_refused(tiny_config, make_model, tmp_path, override, message):
    make_model(tiny_config(tie_core=False)).save_pretrained(tmp_path)
    with pytest.raises((TypeError, ValueError), match=message):
        LoopedForCausalLM.from_pretrained(tmp_path, **override)


# B33
@pytest.mark.parametrize("tied", [False, True])
def test_checkpoint_holds_each_weight_once(tiny_config, make_model, tmp_path, tied):
    model = make_model(tiny_config(tie_word_embeddings=tied))
    model.save_pretrained(tmp_path)
    keys = set(load_file(tmp_path / "model.safetensors"))
    assert len(keys & {"lm_head.weight", "model.embed_tokens.weight"}) == (1 if tied else 2)
    content = (tmp_path / "model.safetensors").read_bytes()
    header = 8 + int.from_bytes(content[:8], "little")
    assert len(content) == header + 4 * sum(parameter.numel() for parameter in model.parameters())


def test_tied_core_is_stored_once(tiny_config, make_model, tmp_path):
    make_model(tiny_config(num_loops=8)).save_pretrained(tmp_path)
    with safe_open(tmp_path / "model.safetensors", "pt") as weights:
        blocks = {int(name.split(".")[2]) for name in weights.keys() if ".layers." in name}
    assert blocks == {0, 1, 2, 3}


# B35: a distributed save hands over clones, in which the tie of the embeddings is lost
def test_cloned_state_dict_reloads_tied(tiny_config, make_model, tmp_path):
    model = make_model(tiny_config(tie_word_embeddings=True))
    clones = {name: weight.clone() for name, weight in model.state_dict().items()}
    assert {"lm_head.weight", "model.embed_tokens.weight"} <= set(clones)
    model.save_pretrained(tmp_path, state_dict=clones)
    loaded = LoopedForCausalLM.from_pretrained(tmp_path)
    assert loaded.lm_head.weight is loaded.model.embed_tokens.weight
    assert_same_parameters_and_buffers(loaded, model)


# B37
@pytest.mark.parametrize("vocab_size", [72, 60])
@pytest.mark.parametrize("uniform_init_scale", [None, 0.5])
@pytest.mark.parametrize("tied", [False, True])
def test_resized_embeddings_keep_old_rows(
    tiny_config, make_model, random_ids, tmp_path, tied, uniform_init_scale, vocab_size
):
    model = make_model(tiny_config(tie_word_embeddings=tied, uniform_init_scale=uniform_init_scale))
    kept = min(vocab_size, 64)
    embedding, head = model.model.embed_tokens.weight.detach().clone(), model.lm_head.weight.detach().clone()
    model.resize_token_embeddings(vocab_size)

    def check(model):
        assert model.config.vocab_size == vocab_size
        for weight, before in ((model.model.embed_tokens.weight, embedding), (model.lm_head.weight, head)):
            assert weight.shape == (vocab_size, 32)
            assert torch.equal(weight[:kept], before[:kept])
        assert (model.lm_head.weight is model.model.embed_tokens.weight) == tied

    check(model)
    before = {name: weight.clone() for name, weight in model.state_dict().items()}
    model.post_init()
    assert all(torch.equal(weight, before[name]) for name, weight in model.state_dict().items())
    ids = random_ids(1, 9) % kept
    logits = model(ids, labels=ids).logits
    assert logits.shape[-1] == vocab_size
    model.save_pretrained(tmp_path)
    loaded = LoopedForCausalLM.from_pretrained(tmp_path)
    check(loaded)
    assert torch.equal(loaded(ids).logits, logits)


# B45 (the map names no repository) and vLLM, which asks for AutoModel of a causal LM's checkpoint
@pytest.mark.parametrize(
    "cls",
    [
        LoopedForCausalLM,
        LoopedModel,
        LoopedForSequenceClassification,
        LoopedForTokenClassification,
        LoopedForQuestionAnswering,
    ],
)
def test_every_class_saves_the_whole_auto_map_and_the_code(tiny_config, tmp_path, cls):
    model = cls(tiny_config())
    model.config.auto_map = {"AutoConfig": "someone/their-repo--configuration_looped.LoopedConfig"}
    model.save_pretrained(tmp_path)
    auto_map = json.loads((tmp_path / "config.json").read_text())["auto_map"]
    assert auto_map == {
        "AutoConfig": "configuration_looped.LoopedConfig",
        "AutoModel": "modeling_looped.LoopedModel",
        "AutoModelForCausalLM": "modeling_looped.LoopedForCausalLM",
        "AutoModelForSequenceClassification": "modeling_looped.LoopedForSequenceClassification",
        "AutoModelForTokenClassification": "modeling_looped.LoopedForTokenClassification",
        "AutoModelForQuestionAnswering": "modeling_looped.LoopedForQuestionAnswering",
    }
    assert set(files(tmp_path)) >= CODE


def test_config_alone_saves_its_code(tiny_config, tmp_path):
    tiny_config().save_pretrained(tmp_path)
    assert {"config.json", "configuration_looped.py"} <= set(files(tmp_path))


def test_base_model_loads_from_a_causal_lm_checkpoint(tiny_config, make_model, random_ids, tmp_path):
    model = make_model(tiny_config())
    model.save_pretrained(tmp_path)
    base = LoopedModel.from_pretrained(tmp_path)
    ids = random_ids(2, 9)
    assert torch.equal(base(ids).last_hidden_state, model.model(ids).last_hidden_state)


# B49
@pytest.mark.parametrize("name", ["dtype", "torch_dtype"])
def test_dtype_is_accepted_under_both_names(tiny_config, make_model, random_ids, tmp_path, name):
    make_model(tiny_config()).save_pretrained(tmp_path)
    model = LoopedForCausalLM.from_pretrained(tmp_path, **{name: torch.bfloat16})
    assert model.dtype == torch.bfloat16
    assert model(random_ids(1, 5)).logits.dtype == torch.bfloat16


# B49
def test_saving_leaves_the_model_usable_and_warns_of_nothing(tiny_config, make_model, random_ids, tmp_path):
    model = make_model(tiny_config()).to(torch.bfloat16)
    ids = random_ids(1, 5)
    expected = model(ids).logits
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model.save_pretrained(tmp_path)
        logits = model(ids).logits
    assert torch.equal(logits, expected)
    assert LoopedForCausalLM.from_pretrained(tmp_path).dtype == torch.bfloat16


# B53
@pytest.mark.parametrize("how", ["wrapped", "in place", "by block"])
def test_compiled_model_saves_plain_names(tiny_config, make_model, random_ids, tmp_path, how):
    model = make_model(tiny_config())
    ids = random_ids(1, 5)
    expected = model(ids).logits
    saved = model
    if how == "wrapped":
        saved = torch.compile(model, backend="eager")
    elif how == "in place":
        model.compile(backend="eager")
    else:
        for layer in model.model.layers:
            layer.compile(backend="eager")
    saved(ids)
    saved.save_pretrained(tmp_path)
    assert not [name for name in load_file(tmp_path / "model.safetensors") if "_orig_mod" in name]
    loaded, report = LoopedForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not any(report.values()), report
    assert torch.equal(loaded(ids).logits, expected)


def test_config_of_a_checkpoint_has_only_known_fields(tiny_config, make_model, tmp_path):
    make_model(tiny_config()).save_pretrained(tmp_path)
    saved = json.loads((tmp_path / "config.json").read_text())
    added_by_transformers = {"architectures", "auto_map", "dtype", "model_type", "transformers_version"}
    assert set(saved) - added_by_transformers <= {
        name for cls in LoopedConfig.__mro__ for name in getattr(cls, "__annotations__", ())
    }
