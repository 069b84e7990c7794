"""Growth: against the paper's block maps and weights, and the promises of `grow` one by one."""

import copy
import json
import weakref
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from modeling_looped import LoopedForCausalLM, LoopedForQuestionAnswering, LoopedForSequenceClassification, LoopedModel
from modeling_looped.growth import GROWTH_OPERATORS, GrowthPlan, grow, grow_state_dict
from modeling_looped.upcycle import convert_paper_tensors, from_paper_checkpoint

ASSET = Path(__file__).parent / "assets" / "growth" / "growth.json"
UNTIED = {"tie_core": False, "num_loops": 2}


def layouts():
    """name -> (sections, K before, K after, [new block, source block] pairs) of the paper's code.

    It stores all cores from the start, so that only the indices of its coda are not those of our stored order.
    """
    said = json.loads(ASSET.read_text())
    found = {}
    for name, layout in said["other_patterns"].items():
        low, high = (int(number) for number in name.rsplit("_", 1)[1].split("to"))
        cores = layout["core_blocks"]
        sections = (cores[0][0], len(cores[0]), len(layout["coda_blocks"]))
        found[name] = (sections, low, high, layout["block_copies_dst_src"])
    config = said["config"]
    sections = (config["prelude_layer_count"], config["core_layer_count"], config["coda_layer_count"])
    found["d4"] = (sections, said["from_K"], said["to_K"], said["block_copies_dst_src"])
    return found


@pytest.mark.parametrize("name", layouts())
def test_block_map_is_the_papers(tiny_config, name):
    (prelude, core, coda), low, high, copies = layouts()[name]
    config = tiny_config(
        num_prelude_blocks=prelude, num_core_blocks=core, num_coda_blocks=coda, num_loops=low, tie_core=False
    )
    plan = GrowthPlan(config, high)
    first_coda = prelude + high * core
    assert {block: plan.sources[block] for block in plan.copies} == {new: old for new, old in copies}
    kept = {block: source for block, source in enumerate(plan.sources) if block not in plan.copies}
    assert kept == {
        **{block: block for block in range(prelude + low * core)},
        **{first_coda + i: prelude + low * core + i for i in range(coda)},
    }
    assert plan.config.num_stored_blocks == len(plan.sources) == first_coda + coda


def test_origins_are_the_papers(tiny_config, make_model):
    said = json.loads(ASSET.read_text())
    model = make_model(tiny_config(num_prelude_blocks=1, num_core_blocks=2, num_coda_blocks=1, **UNTIED))
    grown = grow(model, 4)
    projections = {"attn.c_q": "self_attn.q_proj", "mlp.c_proj": "mlp.down_proj"}
    checked = 0
    for new, old in said["parameter_source"].items():
        parts = new.split(".")
        if ".".join(parts[3:5]) not in projections:
            continue
        tail = f"{projections['.'.join(parts[3:5])]}.weight"
        old_block = int(old.split(".")[2])
        # the coda is block 9 in all of the paper's checkpoint, block 5 of ours before the growth
        ours = f"model.layers.{5 if old_block == 9 else old_block}.{tail}"
        assert grown.origins[f"model.layers.{parts[2]}.{tail}"] == ours
        assert (f"model.layers.{parts[2]}.{tail}" in grown.created) == (new != old)
        checked += 1
    assert checked == 20


@pytest.fixture
def paper_growth(reference_dir, tmp_path):
    """Function (tensors, K) -> model; tensors before and after; what the paper's code said; its logits."""
    folder = reference_dir / "reference" / "growth"
    said = json.loads((folder / "growth.json").read_text())

    def fold(tensors):
        # Its blocks had multipliers of their own, to see them copied: they go into the output projections
        folded = {name: tensor.clone() for name, tensor in tensors.items() if not name.startswith("buffer.")}
        for name, multipliers in tensors.items():
            if name.startswith("buffer."):
                block = name.removeprefix("buffer.").removesuffix("residual_branch_multipliers")
                folded[f"{block}attn.c_proj.weight"] *= multipliers[0] / 0.25
                folded[f"{block}mlp.c_proj.weight"] *= multipliers[1] / 0.25
        return folded

    def load(tensors, num_loops):
        args = said["config"] | {"core_repetitions": num_loops}
        torch.save({"model": tensors, "args": args}, tmp_path / "final.pt")
        return from_paper_checkpoint(tmp_path / "final.pt", vocab_size=97, max_position_embeddings=32)

    before, after = (fold(load_file(folder / f"{when}.safetensors")) for when in ("before", "after"))
    return load, before, after, load_file(folder / "io.safetensors")


def without_dormant_cores(tensors):
    """The paper's K = 4 checkpoint with cores 3 and 4 (blocks 5 to 8) taken out."""
    kept = {}
    for name, tensor in tensors.items():
        if any(f".h.{block}." in name for block in range(5, 9)):
            continue
        kept[name.replace(".h.9.", ".h.5.")] = tensor
    return kept


def test_paper_growth_bit_for_bit(paper_growth):
    load, before, after, tensors = paper_growth
    model = load(without_dormant_cores(before), 2)
    grown = grow(model, 4).model
    expected = convert_paper_tensors(dict(after), grown.config)
    assert expected.keys() == grown.state_dict().keys()
    for name, tensor in grown.state_dict().items():
        assert torch.equal(tensor, expected[name]), name
    with torch.no_grad():
        for logits, theirs in {
            "k2_before": model(tensors["input_ids"]).logits,
            "k2_after": grown(tensors["input_ids"], num_loops=2).logits,
            "k4_after": grown(tensors["input_ids"]).logits,
            "k4_before": load(before, 4)(tensors["input_ids"]).logits,
        }.items():
            torch.testing.assert_close(theirs, tensors[f"logits_{logits}"], rtol=0, atol=2e-5)


def test_stack_preserves_the_function_at_the_old_number_of_passes(variant_config, make_model, random_ids):
    config = variant_config()
    model, ids = make_model(config), random_ids(2, 12)
    before = model(ids).logits
    grown = grow(model, config.num_loops + 3).model
    assert torch.equal(grown(ids, num_loops=config.num_loops).logits, before)
    assert grown.config.num_loops == config.num_loops + 3
    assert grown.config.num_hidden_layers == len(grown.config.schedule())
    assert not torch.equal(grown(ids).logits, before)


def test_stacked_cores_run_as_the_old_ones_would_in_turn(tiny_config, make_model, random_ids):
    """Untied C1 C2 C1 C2 equals a model built by hand from the same blocks."""
    model = make_model(tiny_config(**UNTIED))
    by_hand = make_model(tiny_config(tie_core=False, num_loops=4), seed=1)
    order = [0, 1, 2, 3, 4, 1, 2, 3, 4, 5]
    by_hand.model.embed_tokens.load_state_dict(model.model.embed_tokens.state_dict())
    by_hand.lm_head.load_state_dict(model.lm_head.state_dict())
    for layer, source in zip(by_hand.model.layers, order, strict=True):
        layer.load_state_dict(model.model.layers[source].state_dict())
    ids = random_ids(2, 12)
    assert torch.equal(grow(model, 4).model(ids).logits, by_hand(ids).logits)


def test_interleave_repeats_each_core_in_place(tiny_config, make_model):
    model = make_model(tiny_config(**UNTIED))
    plan = GrowthPlan(model.config, 6, "interleave")
    assert plan.sources == [0, 1, 2, 1, 2, 1, 2, 3, 4, 3, 4, 3, 4, 5]
    assert plan.copies == {3, 4, 5, 6, 9, 10, 11, 12}


@pytest.mark.parametrize("operator", GROWTH_OPERATORS)
def test_origins_name_the_values_and_created_the_copies(tiny_config, make_model, operator):
    config = tiny_config(norm_affine=True, boundary_operator="norm_inject_learned", **UNTIED)
    model = make_model(config)
    grown = grow(model, 4, operator)
    old, new = dict(model.named_parameters()), dict(grown.model.named_parameters())
    assert grown.origins.keys() == new.keys()
    for name, origin in grown.origins.items():
        assert torch.equal(new[name], old[origin]), name
    # Every old parameter lives on exactly once, so that its optimizer state has one place to go
    kept = [origin for name, origin in grown.origins.items() if name not in grown.created]
    assert sorted(kept) == sorted(old)
    assert grown.created < new.keys()
    assert len(grown.created) == len(new) - len(old) > 0


@pytest.mark.parametrize("operator", GROWTH_OPERATORS)
def test_state_dict_grows_like_the_model(tiny_config, make_model, operator):
    model = make_model(tiny_config(norm_affine=True, boundary_operator="linear_adapter", **UNTIED))
    in_memory = grow(model, 4, operator).model.state_dict()
    offline = dict(grow_state_dict(model.state_dict(), model.config, 4, operator))
    assert offline.keys() == in_memory.keys()
    assert all(torch.equal(offline[name], in_memory[name]) for name in in_memory)
    assert len({tensor.data_ptr() for tensor in offline.values()}) == len(offline)

    from_parts = {}
    names = list(model.state_dict())
    for part in (names[: len(names) // 2], names[len(names) // 2 :]):
        shard = {name: model.state_dict()[name] for name in part}
        from_parts |= dict(grow_state_dict(shard, model.config, 4, operator))
    assert from_parts.keys() == in_memory.keys()


def test_state_dict_streams(tiny_config, make_model):
    """A mapping that reads from a file is never asked for a second tensor while more than one is held."""
    model = make_model(tiny_config(**UNTIED))
    held = []

    class Lazy(Mapping):
        def __iter__(self):
            return iter(model.state_dict())

        def __len__(self):
            return len(model.state_dict())

        def __getitem__(self, name):
            assert sum(reference() is not None for reference in held) <= 1
            tensor = model.state_dict()[name].clone()
            held.append(weakref.ref(tensor))
            return tensor

    seen = set()
    for name, tensor in grow_state_dict(Lazy(), model.config, 4):
        seen.add(name)
        del tensor
    assert seen == grow(model, 4).model.state_dict().keys()
    assert len(held) == len(model.state_dict())


def test_wrong_config_for_a_state_dict(tiny_config, make_model):
    state_dict = make_model(tiny_config(tie_core=False, num_loops=4)).state_dict()
    with pytest.raises(ValueError, match="model.layers.6.*stores only 6 blocks"):
        dict(grow_state_dict(state_dict, tiny_config(**UNTIED), 4))


@pytest.mark.parametrize("tie_core", [True, False])
def test_old_model_is_left_alone(tiny_config, make_model, tie_core):
    model = make_model(tiny_config(tie_core=tie_core, num_loops=2))
    before, config = copy.deepcopy(model.state_dict()), model.config.to_dict()
    grown = grow(model, 4).model
    old_storage = {tensor.data_ptr() for tensor in (*model.parameters(), *model.buffers())}
    new = [*grown.parameters(), *grown.buffers()]
    assert not old_storage & {tensor.data_ptr() for tensor in new}
    assert len({tensor.data_ptr() for tensor in new}) == len(new)
    for parameter in grown.parameters():
        parameter.data.fill_(1.0)
    assert model.config.to_dict() == config
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    if tie_core:
        assert grown.num_parameters() == model.num_parameters()


def test_state_of_the_model_is_kept(tiny_config, make_model):
    model = make_model(tiny_config(**UNTIED)).to(torch.bfloat16).train()
    model.model.layers[0].requires_grad_(False)  # prelude
    model.model.layers[2].requires_grad_(False)  # second block of the first core: its copy is frozen too
    model.model.layers[5].eval()
    model.gradient_checkpointing_enable()
    model.config.auto_map = {"AutoModelForCausalLM": "modeling_looped.LoopedForCausalLM"}
    model.config.note = "kept"
    model.generation_config.max_new_tokens = 7
    grown = grow(model, 4).model
    assert {parameter.dtype for parameter in grown.parameters()} == {torch.bfloat16}
    frozen = {name.split(".")[2] for name, p in grown.named_parameters() if not p.requires_grad}
    assert frozen == {"0", "2", "6"}
    assert grown.training and not grown.model.layers[9].training and grown.model.layers[8].training
    assert all(layer.gradient_checkpointing for layer in grown.model.layers)
    assert grown.config.auto_map == model.config.auto_map and grown.config.note == "kept"
    assert grown.generation_config.max_new_tokens == 7
    assert type(grown) is type(model)
    # one config object: a later change of it reaches the copied blocks too
    configs = {id(layer.self_attn.config) for layer in grown.model.layers}
    assert configs == {id(grown.config)} == {id(grown.model.config)}


def test_grown_model_caches_records_trains_and_reloads(tiny_config, make_model, random_ids, tmp_path):
    model, ids = make_model(tiny_config(**UNTIED)), random_ids(2, 8)
    model(ids, output_hidden_states=True)  # installs transformers' hooks before the growth
    grown = grow(model, 4).model
    assert [layer.self_attn.layer_idx for layer in grown.model.layers] == list(range(10))
    assert len(grown(ids, output_hidden_states=True).hidden_states) == 11
    keywords = {"max_new_tokens": 8, "do_sample": False}
    cached = grown.generate(ids, use_cache=True, **keywords)
    assert torch.equal(cached, grown.generate(ids, use_cache=False, **keywords))

    grown(ids, labels=ids).loss.backward()
    assert all(parameter.grad is not None for parameter in grown.parameters())
    assert all(parameter.grad is None for parameter in model.parameters())

    grown.save_pretrained(tmp_path)
    reloaded = LoopedForCausalLM.from_pretrained(tmp_path)
    assert torch.equal(reloaded(ids).logits, grown(ids).logits)
    assert torch.equal(grow(reloaded, 5).model(ids, num_loops=4).logits, grown(ids).logits)


@pytest.mark.parametrize("cls", [LoopedModel, LoopedForSequenceClassification, LoopedForQuestionAnswering])
def test_other_heads_grow(tiny_config, make_model, random_ids, cls):
    model, ids = make_model(tiny_config(pad_token_id=0, **UNTIED), cls=cls), random_ids(2, 8)
    grown = grow(model, 4)
    assert torch.equal(grown.model(ids, num_loops=2)[0], model(ids)[0])
    assert any("layers.5." in name for name in grown.created)
    assert dict(grow_state_dict(model.state_dict(), model.config, 4)).keys() == grown.model.state_dict().keys()


@pytest.mark.parametrize(
    ("num_loops", "operator", "message"),
    [
        (2, "stack", "more than the 2"),
        (1, "stack", "more than the 2"),
        (3.5, "stack", "integer"),
        (4.0, "stack", "integer"),
        (True, "stack", "integer"),
        (3, "interleave", "multiple of 2"),
        (4, "stak", "Did you mean 'stack'"),
        (4, "nothing like it", "stack, interleave"),
    ],
)
@pytest.mark.parametrize("tie_core", [True, False])
def test_refusals(tiny_config, make_model, tie_core, num_loops, operator, message):
    model = make_model(tiny_config(tie_core=tie_core, num_loops=2))
    if tie_core and operator == "interleave":
        assert grow(model, num_loops, operator).model.config.num_loops == num_loops
        return
    with pytest.raises(ValueError, match=message):
        grow(model, num_loops, operator)
    with pytest.raises(ValueError, match=message):
        grow_state_dict(model.state_dict(), model.config, num_loops, operator)


def test_dormant_cores_are_named(tiny_config, make_model):
    model = make_model(tiny_config(tie_core=False, num_loops=2, num_stored_cores=4))
    with pytest.raises(ValueError, match="last 2 are dormant.*num_loops = 4"):
        grow(model, 6)
    model.config.num_loops = 4
    assert grow(model, 6).model.config.num_stored_cores == 6


def test_wrapped_and_foreign_models_are_refused(tiny_config, make_model):
    model = make_model(tiny_config(**UNTIED))
    with pytest.raises(TypeError, match="unwrapped, got OptimizedModule"):
        grow(torch.compile(model), 4)
    with pytest.raises(TypeError, match="got Linear"):
        grow(torch.nn.Linear(2, 2), 4)
