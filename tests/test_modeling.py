"""The model's forward: equal to plain decoders where it must be, causal, the same through every attention and mask."""

import logging

import pytest
import torch
from transformers import AutoModel, AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from modeling_looped import (
    LoopedForCausalLM,
    LoopedForQuestionAnswering,
    LoopedForSequenceClassification,
    LoopedForTokenClassification,
    LoopedModel,
)
from modeling_looped.boundary import BOUNDARY_OPERATORS

DENSE = {"boundary_operator": "none", "norm_affine": True, "embedding_norm": False, "round_rope_to_bf16": False}


def dense_config(config_class, config):
    """The plain decoder with as many blocks as `config` stores."""
    return config_class(
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_hidden_layers=config.num_hidden_layers,
        num_attention_heads=config.num_attention_heads,
        num_key_value_heads=config.num_key_value_heads,
        head_dim=config.head_dim,
        rms_norm_eps=config.rms_norm_eps,
        rope_parameters=dict(config.rope_parameters),
        bos_token_id=None,
        eos_token_id=None,
    )


@pytest.mark.parametrize("num_loops", [1, 2])
@pytest.mark.parametrize("num_key_value_heads", [1, 2, 4])
def test_without_operator_equals_llama(tiny_config, make_model, random_ids, num_loops, num_key_value_heads):
    config = tiny_config(
        **DENSE, qk_norm=None, num_loops=num_loops, tie_core=False, num_key_value_heads=num_key_value_heads
    )
    model = make_model(config)
    llama = LlamaForCausalLM(dense_config(LlamaConfig, config)).eval()
    llama.load_state_dict(model.state_dict())
    ids = random_ids(2, 40)
    torch.testing.assert_close(model(ids).logits, llama(ids).logits, rtol=1e-5, atol=1e-5)


def test_qk_norm_before_rope_equals_qwen3(tiny_config, make_model, random_ids):
    config = tiny_config(**DENSE, qk_norm="before_rope", num_loops=1)
    model = make_model(config)
    qwen = Qwen3ForCausalLM(dense_config(Qwen3Config, config)).eval()
    qwen.load_state_dict(model.state_dict())
    ids = random_ids(2, 40)
    torch.testing.assert_close(model(ids).logits, qwen(ids).logits, rtol=1e-5, atol=1e-5)


def test_tied_passes_equal_a_llama_that_repeats_its_blocks(tiny_config, make_model, random_ids):
    config = tiny_config(**DENSE, qk_norm=None, num_loops=3)
    model = make_model(config)
    weights = model.state_dict()
    repeated = {name: weight for name, weight in weights.items() if "model.layers." not in name}
    for slot, block in enumerate(config.schedule()):
        for name, weight in weights.items():
            if name.startswith(f"model.layers.{block}."):
                repeated[name.replace(f"layers.{block}.", f"layers.{slot}.")] = weight
    llama = LlamaForCausalLM(dense_config(LlamaConfig, config)).eval()
    llama.load_state_dict(repeated)
    ids = random_ids(2, 40)
    torch.testing.assert_close(model(ids).logits, llama(ids).logits, rtol=1e-5, atol=1e-5)


def rms(x):
    return x / (x.square().mean(-1, keepdim=True) + 2**-23).sqrt()


def written_out(model, ids):
    """Logits of the paper's architecture (arXiv 2609.19107), one formula after the other."""
    config, weights = model.config, dict(model.named_parameters())
    m, alpha, num_tokens = config.residual_multiplier, config.boundary_alpha, ids.shape[1]
    half = config.head_dim // 2
    angles = torch.arange(num_tokens)[:, None] * 10000.0 ** -(torch.arange(half) / half)
    cos, sin = (table.bfloat16().float() for table in (angles.cos(), angles.sin()))
    future = torch.ones(num_tokens, num_tokens).triu(1).bool()

    def heads(x, weight):
        return (x @ weight.T).view(*x.shape[:2], -1, config.head_dim).transpose(1, 2)

    def rotate(x):
        first, second = x[..., :half], x[..., half:]
        return rms(torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1))

    def block(x, index):
        w = {name.split(".")[-2]: weight for name, weight in weights.items() if f"layers.{index}." in name}
        y = rms(x)
        q, k, v = rotate(heads(y, w["q_proj"])), rotate(heads(y, w["k_proj"])), heads(y, w["v_proj"])
        k, v = (states.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for states in (k, v))
        scores = (q @ k.transpose(2, 3) / config.head_dim**0.5).masked_fill(future, -torch.inf)
        x = x + m * (scores.softmax(-1) @ v).transpose(1, 2).flatten(2) @ w["o_proj"].T
        y = rms(x)
        gate = y @ w["gate_proj"].T
        return x + m * (gate * gate.sigmoid() * (y @ w["up_proj"].T)) @ w["down_proj"].T

    h = e = block(rms(weights["model.embed_tokens.weight"][ids]), 0)
    for loop_idx in range(config.num_loops):
        for index in (1, 2):
            h = block(h, index if config.tie_core else index + 2 * loop_idx)
        if config.boundary_operator == "norm_inject":
            h = rms(h) + alpha * e
    h = block(h, config.num_stored_blocks - 1)
    return config.logit_scale * rms(h) @ weights["lm_head.weight"].T


def test_variant_equals_its_formulas_written_out(variant_config, make_model, random_ids):
    model = make_model(variant_config())
    ids = random_ids(2, 20)
    torch.testing.assert_close(model(ids).logits, written_out(model, ids), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("operator", BOUNDARY_OPERATORS)
def test_gradient_equals_finite_differences(tiny_config, make_model, random_ids, operator):
    """Of every weight, through all passes: nothing on the way is detached."""
    model = make_model(tiny_config(boundary_operator=operator)).double()
    ids = random_ids(2, 8)
    model(ids, labels=ids).loss.backward()
    generator = torch.Generator().manual_seed(1)
    for name, parameter in model.named_parameters():
        direction = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
        slope = (parameter.grad * direction).sum()
        values = []
        with torch.no_grad():
            for sign in (1, -1):
                parameter += sign * 1e-5 * direction
                logits = model(ids).logits[:, :-1].flatten(0, 1)  # the loss itself is computed in float32
                values.append(torch.nn.functional.cross_entropy(logits, ids[:, 1:].flatten()))
                parameter -= sign * 1e-5 * direction
        torch.testing.assert_close((values[0] - values[1]) / 2e-5, slope, rtol=1e-3, atol=1e-5, msg=name)


def test_fields_that_set_us_apart_change_the_logits(tiny_config, make_model, random_ids):
    """Guards the equalities above and in the other files: no field is dead."""
    ids = random_ids(2, 40)
    base = make_model(tiny_config())
    logits = base(ids).logits
    for fields in (
        {"round_rope_to_bf16": False},
        {"qk_norm": None},
        {"qk_norm": "before_rope", "norm_affine": True},
        {"residual_multiplier": 0.9},
        {"logit_scale": 0.9},
        {"embedding_norm": False},
        {"boundary_alpha": 0.9},
        {"rms_norm_eps": 1e-2},
        {"rope_parameters": {"rope_type": "default", "rope_theta": 500.0}},
        *({"boundary_operator": name} for name in ("none", "norm", "inject", "norm_inject_between")),
    ):
        other = LoopedForCausalLM(tiny_config(**fields)).eval()
        missing, unexpected = other.load_state_dict(base.state_dict(), strict=False)
        assert not unexpected
        assert all("norm" in name for name in missing)
        assert not torch.allclose(other(ids).logits, logits, atol=1e-4), fields


@pytest.mark.parametrize("num_loops", [1, 2, 4])
@pytest.mark.parametrize("operator", BOUNDARY_OPERATORS)
def test_untied_with_equal_cores_equals_tied(tiny_config, make_model, random_ids, operator, num_loops):
    tied = make_model(tiny_config(boundary_operator=operator, num_loops=num_loops))
    untied = LoopedForCausalLM(tiny_config(boundary_operator=operator, num_loops=num_loops, tie_core=False)).eval()
    stored_in = dict(enumerate(tied.config.schedule()))  # untied block -> tied block

    def name_in_tied(name):
        if not name.startswith("model.layers."):
            return name
        block = int(name.split(".")[2])
        return name.replace(f"layers.{block}.", f"layers.{stored_in[block]}.")

    weights = tied.state_dict()
    untied.load_state_dict({name: weights[name_in_tied(name)] for name in untied.state_dict()})

    ids = random_ids(2, 20)
    outputs = [model(ids, labels=ids) for model in (tied, untied)]
    torch.testing.assert_close(outputs[0].logits, outputs[1].logits, rtol=0, atol=1e-6)
    for output in outputs:
        output.loss.backward()
    summed = {}
    for name, parameter in untied.named_parameters():
        summed[name_in_tied(name)] = summed.get(name_in_tied(name), 0) + parameter.grad
    for name, parameter in tied.named_parameters():
        torch.testing.assert_close(parameter.grad, summed[name], rtol=1e-4, atol=1e-6, msg=name)


def test_no_logit_depends_on_a_later_token(variant_config, make_model, random_ids):
    model = make_model(variant_config())
    embeddings = model.get_input_embeddings()(random_ids(1, 12)).detach().requires_grad_()
    for position in (0, 5, 10, 11):
        logits = model(inputs_embeds=embeddings).logits
        (gradient,) = torch.autograd.grad(logits[0, position].square().sum(), embeddings)
        assert not gradient[0, position + 1 :].any()
        assert gradient[0, : position + 1].abs().amax(-1).gt(0).all()


# B11
def test_two_forwards_are_bitwise_equal(variant_config, make_model, random_ids):
    model = make_model(variant_config())
    ids = random_ids(2, 20)
    assert torch.equal(model(ids).logits, model(ids).logits)


def assert_attention_equals_eager(model, ids, implementation):
    mask = torch.ones_like(ids)
    mask[1, :6] = 0
    model.set_attn_implementation("eager")
    expected = model(ids, attention_mask=mask).logits
    model.set_attn_implementation(implementation)
    assert model.model.layers[0].self_attn.config._attn_implementation == implementation
    logits = model(ids, attention_mask=mask).logits
    torch.testing.assert_close(logits[mask.bool()], expected[mask.bool()], rtol=1e-5, atol=1e-5)


def test_sdpa_equals_eager(variant_config, make_model, random_ids):
    assert_attention_equals_eager(make_model(variant_config()), random_ids(2, 20), "sdpa")


@pytest.mark.slow  # compiles for half a minute
@torch.no_grad()  # flex attention has no backward on CPU
def test_flex_attention_equals_eager(tiny_config, make_model, random_ids):
    assert_attention_equals_eager(make_model(tiny_config()), random_ids(2, 20), "flex_attention")


def test_four_dimensional_mask_equals_its_rows_alone(tiny_config, make_model, random_ids):
    """Two documents in one row, kept apart by a 4-D mask and by position ids."""
    model = make_model(tiny_config())
    ids = random_ids(1, 16)
    document = torch.tensor([0] * 6 + [1] * 10)
    allowed = (document[:, None] == document) & torch.ones(16, 16, dtype=torch.bool).tril()
    mask = torch.where(allowed, 0.0, torch.finfo(torch.float32).min)[None, None]
    positions = torch.cat((torch.arange(6), torch.arange(10)))[None]
    packed = model(ids, attention_mask=mask, position_ids=positions).logits
    apart = torch.cat((model(ids[:, :6]).logits, model(ids[:, 6:]).logits), dim=1)
    torch.testing.assert_close(packed, apart, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
def test_position_ids_alone_keep_packed_documents_apart(tiny_config, make_model, random_ids, implementation):
    """B85, padding-free batches: positions that restart at 0 begin a new document."""
    model = make_model(tiny_config())
    model.set_attn_implementation(implementation)
    ids = random_ids(1, 16)
    positions = torch.cat((torch.arange(6), torch.arange(10)))[None]
    packed = model(ids, position_ids=positions, use_cache=False).logits
    apart = torch.cat((model(ids[:, :6]).logits, model(ids[:, 6:]).logits), dim=1)
    torch.testing.assert_close(packed, apart, rtol=1e-5, atol=1e-5)


# B08: padded batches and single rows, without a cache
@pytest.mark.parametrize("side", ["left", "right"])
def test_padded_rows_equal_single_rows(variant_config, make_model, random_ids, side):
    model = make_model(variant_config())
    rows = [random_ids(1, length, seed=length) for length in (9, 4, 1)]
    ids = torch.zeros(3, 9, dtype=torch.long)
    mask = torch.zeros_like(ids)
    for index, row in enumerate(rows):
        where = slice(9 - row.shape[1], 9) if side == "left" else slice(0, row.shape[1])
        ids[index, where] = row
        mask[index, where] = 1
    position_ids = (mask.cumsum(-1) - 1).clamp_min(0)
    logits = model(ids, attention_mask=mask, position_ids=position_ids).logits
    for index, row in enumerate(rows):
        torch.testing.assert_close(logits[index, mask[index].bool()], model(row).logits[0], rtol=1e-5, atol=1e-5)


def test_logits_to_keep_are_the_last_ones(tiny_config, make_model, random_ids):
    model = make_model(tiny_config())
    ids = random_ids(2, 12)
    logits = model(ids).logits
    torch.testing.assert_close(model(ids, logits_to_keep=3).logits, logits[:, -3:])
    torch.testing.assert_close(model(ids, logits_to_keep=torch.tensor([0, 7])).logits, logits[:, [0, 7]])


def test_inputs_embeds_equal_input_ids(variant_config, make_model, random_ids):
    model = make_model(variant_config())
    ids = random_ids(2, 12)
    torch.testing.assert_close(model(inputs_embeds=model.get_input_embeddings()(ids)).logits, model(ids).logits)
    with pytest.raises(ValueError, match="exactly one of input_ids or inputs_embeds"):
        model()


# Trap: hidden states, attentions and cache slots all count executed blocks
@pytest.mark.parametrize("num_loops", [None, 1, 4])
def test_recorded_outputs_count_executed_blocks(tiny_config, make_model, random_ids, num_loops):
    model = make_model(tiny_config())
    model.set_attn_implementation("eager")
    output = model(random_ids(2, 5), num_loops=num_loops, output_hidden_states=True, output_attentions=True)
    executed = 1 + 2 * (num_loops or 3) + 1
    assert len(output.hidden_states) == executed + 1
    assert [weights.shape for weights in output.attentions] == [(2, 4, 5, 5)] * executed
    assert len(output.cache.layers) == executed


# Trap: serving backends find their key/value store by the layer_idx of the module that they are handed
def test_every_execution_of_a_tied_block_shows_its_own_layer_idx(tiny_config, make_model, random_ids):
    seen = []

    def attend(module, query, key, value, attention_mask, **kwargs):
        seen.append((module.layer_idx, module.num_key_value_groups, module.is_causal))
        return ALL_ATTENTION_FUNCTIONS["sdpa"](module, query, key, value, attention_mask, **kwargs)

    ALL_ATTENTION_FUNCTIONS.register("recording", attend)
    model = make_model(tiny_config())
    model.set_attn_implementation("recording")
    model(random_ids(1, 5))
    assert seen == [(slot, 2, True) for slot in range(8)]


# As vLLM's Transformers backend calls a model: one attention object a cache slot, found by layer_idx
def test_serving_call_reaches_one_attention_object_for_each_slot(tiny_config, make_model, random_ids):
    used = []

    def attend(module, query, key, value, attention_mask, attention_instances, **kwargs):
        used.append(attention_instances[module.layer_idx])
        return ALL_ATTENTION_FUNCTIONS["sdpa"](module, query, key, value, attention_mask, **kwargs)

    ALL_ATTENTION_FUNCTIONS.register("serving", attend)
    model = make_model(tiny_config())
    ids = random_ids(1, 5)
    expected = model.model(ids).last_hidden_state
    model.set_attn_implementation("serving")
    (hidden_states,) = model.model(
        input_ids=ids,
        use_cache=False,
        position_ids=torch.arange(5)[None],
        attention_instances=[f"slot {slot}" for slot in range(model.config.num_hidden_layers)],
        return_dict=False,
    )
    torch.testing.assert_close(hidden_states, expected, rtol=1e-6, atol=1e-6)
    assert used == [f"slot {slot}" for slot in range(8)]


@pytest.mark.parametrize("num_loops", [1, 2, 4])
def test_num_loops_at_call_equals_num_loops_in_the_config(tiny_config, make_model, random_ids, num_loops):
    ids = random_ids(2, 12)
    model = make_model(tiny_config())
    other = LoopedForCausalLM(tiny_config(num_loops=num_loops)).eval()
    other.load_state_dict(model.state_dict())
    assert torch.equal(model(ids, num_loops=num_loops).logits, other(ids).logits)
    assert torch.equal(model.model(ids, num_loops=num_loops).last_hidden_state, other.model(ids).last_hidden_state)
    assert not torch.allclose(model(ids).logits, other(ids).logits, atol=1e-3)


def test_dormant_cores_do_not_run(tiny_config, make_model, random_ids):
    model = make_model(tiny_config(num_loops=4, tie_core=False))
    ran = []
    for index, layer in enumerate(model.model.layers):
        layer.register_forward_hook(lambda *_, index=index: ran.append(index))
    model(random_ids(1, 5), num_loops=2)
    assert ran == [0, 1, 2, 3, 4, 9]


# B13
def test_more_passes_than_configured_run_and_warn_once(tiny_config, make_model, random_ids, caplog, monkeypatch):
    from transformers.utils import logging as transformers_logging

    monkeypatch.setattr(transformers_logging.get_logger("modeling_looped.modeling_looped"), "propagate", True)
    monkeypatch.setattr(transformers_logging.get_logger("transformers"), "propagate", True)
    logging.Logger.warning_once.cache_clear()  # another test may have warned in the same words
    model = make_model(tiny_config(num_loops=3))
    ids = random_ids(1, 5)
    with caplog.at_level(logging.WARNING):
        executed = len(model(ids, num_loops=5, output_hidden_states=True).hidden_states) - 1
        model(ids, num_loops=5)
        model(ids, num_loops=2)
        model(ids)
    assert executed == 12
    warnings = [record.message for record in caplog.records if "passes" in record.message]
    assert len(warnings) == 1
    assert "Running 5 passes of a core whose config says 3" in warnings[0]


def test_waking_a_dormant_core_does_not_warn(tiny_config, make_model, random_ids, caplog):
    config = tiny_config(num_loops=4, tie_core=False)
    config.num_loops = 2
    model = make_model(config)
    with caplog.at_level(logging.WARNING):
        model(random_ids(1, 5), num_loops=4)
    assert not [record for record in caplog.records if "passes" in record.message]


@pytest.mark.parametrize("num_loops", [0, -1, 2.0, True, "2"])
def test_bad_num_loops_is_refused_at_call(tiny_config, make_model, random_ids, num_loops):
    model = make_model(tiny_config())
    for call in (model, model.model):
        with pytest.raises(ValueError, match="`num_loops` must be an integer of at least 1, got"):
            call(random_ids(1, 5), num_loops=num_loops)


def test_untied_model_refuses_more_passes_at_call(tiny_config, make_model, random_ids):
    model = make_model(tiny_config(num_loops=2, tie_core=False))
    with pytest.raises(ValueError, match="stores 2 cores: allowed are 1 to 2"):
        model(random_ids(1, 5), num_loops=3)


@pytest.mark.parametrize(
    ("misspelt", "meant"),
    [("num_lops", "num_loops"), ("num_steps", "num_loops"), ("attention_msk", "attention_mask"), ("label", "labels")],
)
def test_misspelt_keyword_is_refused_at_call(tiny_config, make_model, random_ids, misspelt, meant):
    model = make_model(tiny_config())
    with pytest.raises(TypeError, match=f"no argument `{misspelt}`. Did you mean `{meant}`"):
        model(random_ids(1, 5), **{misspelt: 2})


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_near_float32(variant_config, make_model, random_ids, dtype):
    model = make_model(variant_config())
    ids = random_ids(2, 12)
    exact = model(ids).logits
    logits = model.to(dtype)(ids).logits
    assert logits.dtype == dtype
    assert (logits.float() - exact).norm() < 0.05 * exact.norm()


@pytest.mark.parametrize("tie_word_embeddings", [False, True])
def test_head_is_tied_only_when_asked(tiny_config, tie_word_embeddings):
    model = LoopedForCausalLM(tiny_config(tie_word_embeddings=tie_word_embeddings))
    assert (model.lm_head.weight is model.model.embed_tokens.weight) == tie_word_embeddings


@pytest.mark.parametrize("auto_class", [AutoModel, AutoModelForCausalLM])
def test_auto_classes_build_from_the_config(tiny_config, auto_class):
    model = auto_class.from_config(tiny_config())
    assert type(model) is {AutoModel: LoopedModel, AutoModelForCausalLM: LoopedForCausalLM}[auto_class]


@pytest.mark.parametrize(
    ("cls", "labels"),
    [
        (LoopedForSequenceClassification, {"labels": torch.tensor([0, 1])}),
        (LoopedForTokenClassification, {"labels": torch.zeros(2, 9, dtype=torch.long)}),
        (LoopedForQuestionAnswering, {"start_positions": torch.tensor([1, 2]), "end_positions": torch.tensor([3, 4])}),
    ],
)
def test_generic_heads_train_and_take_num_loops(tiny_config, random_ids, cls, labels):
    torch.manual_seed(0)
    model = cls(tiny_config(num_labels=2, pad_token_id=0))
    ids = random_ids(2, 9)
    output = model(ids, **labels)
    output.loss.backward()
    assert all(parameter.grad is not None for parameter in model.parameters())
    assert model(ids, **labels, num_loops=1).loss != output.loss


# B51
def test_no_block_is_split_across_devices(tiny_config):
    accelerate = pytest.importorskip("accelerate")
    model = LoopedForCausalLM(tiny_config())
    classes = {type(module).__name__ for module in model.modules()}
    assert set(model._no_split_modules) <= classes
    block_bytes = sum(parameter.nbytes for parameter in model.model.layers[0].parameters())
    device_map = accelerate.infer_auto_device_map(
        model,
        max_memory={0: int(2.5 * block_bytes), 1: int(2.5 * block_bytes), "cpu": 10**9},
        no_split_module_classes=model._no_split_modules,
    )
    assert len(set(device_map.values())) > 1
    for index in range(len(model.model.layers)):
        assert f"model.layers.{index}" in device_map, device_map


@torch.no_grad()
@pytest.mark.parametrize("tie_core", [True, False])
def test_model_that_is_partly_on_disk_equals_the_whole(tiny_config, make_model, random_ids, tmp_path, tie_core):
    """Hooks that move weights and inputs, as between devices, stand several passes through one block."""
    pytest.importorskip("accelerate")
    model = make_model(tiny_config(tie_core=tie_core))
    model.save_pretrained(tmp_path / "model")
    names = [name for name, _ in model.model.named_children() if name != "layers"]
    device_map = {f"model.{name}": "cpu" for name in names} | {"lm_head": "cpu"}
    device_map |= {f"model.layers.{i}": "disk" if i % 2 else "cpu" for i in range(len(model.model.layers))}
    spread = LoopedForCausalLM.from_pretrained(
        tmp_path / "model", device_map=device_map, offload_folder=tmp_path / "offload"
    )
    assert spread.model.layers[1].self_attn.q_proj.weight.device.type == "meta"
    ids = random_ids(1, 9)
    assert torch.equal(spread(ids).logits, model(ids).logits)
    expected = model.generate(ids, max_new_tokens=5, do_sample=False)
    assert torch.equal(spread.generate(ids, max_new_tokens=5, do_sample=False), expected)
