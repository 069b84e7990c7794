"""Optimizers: roles, rules, state by name, growth. Over 500 lines because each rule has its own truth to meet."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from training.optim import (
    OPTIMIZERS,
    OptimizerSettings,
    build_optimizer,
    carry_state,
    check_groups,
    describe_groups,
    load_state_by_name,
    parameter_roles,
    set_step,
    state_by_name,
)

ASSETS = Path(__file__).parent / "assets" / "optim"
RECORDED = json.loads((ASSETS / "settings.json").read_text())
HIDDEN, INTERMEDIATE, VOCAB = 16, 24, 40


class Gain(nn.Module):
    def __init__(self, size):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))

    def forward(self, x):
        return nn.functional.rms_norm(x, x.shape[-1:]) * self.weight


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.q_proj = nn.Linear(HIDDEN, HIDDEN, bias=False)
        self.k_proj = nn.Linear(HIDDEN, HIDDEN // 2, bias=False)
        self.v_proj = nn.Linear(HIDDEN, HIDDEN // 2, bias=True)
        self.o_proj = nn.Linear(HIDDEN, HIDDEN, bias=False)

    def forward(self, x):
        gate = (self.k_proj(x) * self.v_proj(x)).sum(dim=-1, keepdim=True)
        return self.o_proj(self.q_proj(x) * gate)


class Mlp(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate_proj = nn.Linear(HIDDEN, INTERMEDIATE, bias=False)
        self.up_proj = nn.Linear(HIDDEN, INTERMEDIATE, bias=False)
        self.down_proj = nn.Linear(INTERMEDIATE, HIDDEN, bias=False)

    def forward(self, x):
        return self.down_proj(nn.functional.silu(self.gate_proj(x)) * self.up_proj(x))


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.input_layernorm = Gain(HIDDEN)
        self.self_attn = Attention()
        self.mlp = Mlp()

    def forward(self, x):
        x = x + self.self_attn(self.input_layernorm(x))
        return x + self.mlp(x)


class Boundary(nn.Module):
    def __init__(self):
        super().__init__()
        self.learned_alpha = nn.Parameter(torch.full((1,), 0.7))
        self.log_scale = nn.Parameter(torch.zeros(()))
        self.proj = nn.Linear(2 * HIDDEN, HIDDEN, bias=False)

    def forward(self, x, e):
        return self.learned_alpha * self.log_scale.exp() * self.proj(torch.cat((x, e), dim=-1))


class Stack(nn.Module):
    def __init__(self, num_layers):
        super().__init__()
        self.embed_tokens = nn.Embedding(VOCAB, HIDDEN)
        self.layers = nn.ModuleList(Block() for _ in range(num_layers))
        self.boundary = Boundary()
        self.norm = Gain(HIDDEN)


class TinyModel(nn.Module):
    """The parameter names of the looped model, in a function of no other meaning."""

    def __init__(self, num_layers=3, tied=False, seed=0):
        super().__init__()
        torch.manual_seed(seed)
        self.model = Stack(num_layers)
        self.lm_head = nn.Linear(HIDDEN, VOCAB, bias=False)
        if tied:
            self.lm_head.weight = self.model.embed_tokens.weight

    def forward(self, tokens):
        e = x = self.model.embed_tokens(tokens)
        for layer in self.model.layers:
            x = layer(x)
        return self.lm_head(self.model.norm(x + self.model.boundary(x, e)))


def make_settings(**changes):
    settings = {"matrix_lr": 0.02, "embedding_lr": 0.01, "head_lr": 0.005, "scalar_lr": 0.002, "weight_decay": 0.1}
    return OptimizerSettings(**settings | changes)


def train(model, optimizer, steps):
    for step in steps:
        generator = torch.Generator().manual_seed(step)
        tokens = torch.randint(VOCAB, (4, 9), generator=generator)
        logits = model(tokens[:, :-1])
        nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()).backward()
        set_step(optimizer, min(1.0, 0.2 * (step + 1)), 0.85 + 0.01 * step)
        optimizer.step()
        optimizer.zero_grad()


def copies(model):
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


EXPECTED_ROLES = {
    "model.embed_tokens.weight": "embedding",
    "lm_head.weight": "head",
    "model.layers.1.self_attn.q_proj.weight": "matrix",
    "model.layers.1.self_attn.k_proj.weight": "matrix",
    "model.layers.2.mlp.down_proj.weight": "matrix",
    "model.boundary.proj.weight": "matrix",
    "model.boundary.learned_alpha": "scalar",
    "model.boundary.log_scale": "scalar",
    "model.layers.0.input_layernorm.weight": "scalar",
    "model.layers.0.self_attn.v_proj.bias": "scalar",
    "model.norm.weight": "scalar",
}


def test_roles_by_position_and_shape():
    model = TinyModel()
    roles = parameter_roles(model)
    assert list(roles) == [name for name, _ in model.named_parameters()]
    assert EXPECTED_ROLES.items() <= roles.items()
    for name, parameter in model.named_parameters():
        assert (roles[name] == "scalar") == (parameter.ndim < 2), name
        assert (roles[name] == "matrix") == (parameter.ndim == 2 and "layers" in name or "boundary.proj" in name), name


def test_roles_of_unusual_shapes():
    model = nn.Module()
    model.stacked = nn.Parameter(torch.zeros(3, 8, 8))
    model.column = nn.Parameter(torch.zeros(8, 1))
    model.positions = nn.Embedding(8, 8)
    assert parameter_roles(model) == {"stacked": "matrix", "column": "scalar", "positions.weight": "embedding"}
    model.kernel = nn.Parameter(torch.zeros(2, 2, 2, 2))
    with pytest.raises(ValueError, match=r"kernel has shape \(2, 2, 2, 2\)"):
        parameter_roles(model)


def test_tied_head_is_an_embedding_once():
    model = TinyModel(tied=True)
    roles = parameter_roles(model)
    assert roles["model.embed_tokens.weight"] == "embedding" and "lm_head.weight" not in roles
    optimizer = build_optimizer(model, make_settings())
    assert [group["role"] for group in optimizer.param_groups] == ["matrix", "embedding", "scalar"]
    # The head may be registered first and give the shared tensor its name
    model = nn.Module()
    model.lm_head, model.embed_tokens = nn.Linear(8, 12, bias=False), nn.Embedding(12, 8)
    model.embed_tokens.weight = model.lm_head.weight
    assert parameter_roles(model) == {"lm_head.weight": "embedding"}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_parameter_in_exactly_one_group(name):
    model = TinyModel()
    optimizer = build_optimizer(model, make_settings(), name)
    held = [id(parameter) for group in optimizer.param_groups for parameter in group["params"]]
    assert sorted(held) == sorted(id(parameter) for parameter in model.parameters())
    by_role = {group["role"]: group for group in optimizer.param_groups}
    assert {role: group["base_lr"] for role, group in by_role.items()} == {
        "matrix": 0.02,
        "embedding": 0.01,
        "head": 0.005,
        "scalar": 0.002,
    }
    assert {role: group["weight_decay"] for role, group in by_role.items()} == {
        "matrix": 0.1,
        "embedding": 0.1,
        "head": 0.1,
        "scalar": 0.0,
    }
    train(model, optimizer, range(1))
    roles = parameter_roles(model)
    for key, state in state_by_name(model, optimizer).items():
        muon = roles[key] == "matrix" and name != "adamw"
        assert ("momentum_buffer" in state) == muon, key
        assert ("exp_avg" in state) == (not muon), key


def test_a_parameter_out_of_place_is_named():
    model = TinyModel()
    optimizer = build_optimizer(model, make_settings())
    head = next(group for group in optimizer.param_groups if group["role"] == "head")
    head["params"] = []
    with pytest.raises(ValueError, match="in no group: lm_head.weight"):
        check_groups(model, optimizer)
    head["params"] = [model.lm_head.weight, model.model.norm.weight, nn.Parameter(torch.zeros(1))]
    with pytest.raises(ValueError, match="in several groups: model.norm.weight; foreign to the model: 1 tensors"):
        check_groups(model, optimizer)


def test_frozen_parameters_are_left_out():
    model = TinyModel()
    model.lm_head.requires_grad_(False)
    model.model.embed_tokens.requires_grad_(False)
    optimizer = build_optimizer(model, make_settings())
    assert [group["role"] for group in optimizer.param_groups] == ["matrix", "scalar"]
    with pytest.raises(ValueError, match="no parameter that requires a gradient"):
        build_optimizer(model.requires_grad_(False), make_settings())


def test_describe_groups_counts_every_parameter():
    model = TinyModel()
    lines = describe_groups(build_optimizer(model, make_settings()))
    assert [line.split()[:3] for line in lines] == [
        ["matrix", "Muon", "22"],
        ["embedding", "AdamW", "1"],
        ["head", "AdamW", "1"],
        ["scalar", "AdamW", "9"],
    ]
    counts = [int(line.split()[4].replace(",", "")) for line in lines]
    assert sum(counts) == sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_set_step_scales_base_rates(name):
    optimizer = build_optimizer(TinyModel(), make_settings(), name)
    for factor, momentum in ((0.5, 0.9), (0.25, None)):
        set_step(optimizer, factor, momentum)
        assert all(group["lr"] == group["base_lr"] * factor for group in optimizer.param_groups)
        assert all(group["momentum"] == 0.9 for group in optimizer.param_groups if "momentum" in group)
    assert ("momentum" in optimizer.param_groups[0]) == (name != "adamw")


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_zero_rate_and_missing_gradient_change_nothing(name):
    model = TinyModel()
    optimizer = build_optimizer(model, make_settings(), name)
    before = copies(model)
    for parameter in model.model.parameters():
        parameter.grad = torch.ones_like(parameter)
    set_step(optimizer, 0.0, 0.9)
    optimizer.step()
    assert all(torch.equal(parameter, before[key]) for key, parameter in model.named_parameters())
    states = state_by_name(model, optimizer)
    assert states["lm_head.weight"] == {}
    # The step without a rate still counts: its gradients enter the moments, as at a growth step
    assert states["model.embed_tokens.weight"]["exp_avg"].abs().min() > 0
    set_step(optimizer, 1.0, 0.9)
    optimizer.step()
    assert torch.equal(model.lm_head.weight, before["lm_head.weight"])
    assert not torch.equal(model.model.embed_tokens.weight, before["model.embed_tokens.weight"])


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_zero_gradients_give_no_nan(name):
    model = TinyModel()
    optimizer = build_optimizer(model, make_settings(), name)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    optimizer.step()
    assert all(parameter.isfinite().all() for parameter in model.parameters())


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_training_learns_a_fixed_batch(name):
    model = TinyModel()
    optimizer = build_optimizer(model, make_settings(), name)
    tokens = torch.randint(VOCAB, (4, 9), generator=torch.Generator().manual_seed(0))
    losses = []

    def closure():
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        losses.append(loss.item())
        return loss

    for _ in range(30):
        returned = optimizer.step(closure)
    assert returned.item() == losses[-1] < 0.5 * losses[0]


@pytest.mark.parametrize("case", ["adamw_head", "adamw_embed_bf16"])
@pytest.mark.parametrize("name", ["muon_adamw", "adamw"])
def test_three_adamw_steps_of_the_papers_code(case, name):
    tensors, recorded = load_file(ASSETS / f"{case}.safetensors"), RECORDED[case]
    model = nn.Module()
    module = nn.Embedding if "embed" in case else nn.Linear
    model.lm_head = module(*(tensors["p0"].shape if "embed" in case else tensors["p0"].shape[::-1]))
    parameter = model.lm_head.weight = nn.Parameter(tensors["p0"].clone())
    rates = {"embedding_lr": recorded["lr"], "head_lr": recorded["lr"], "weight_decay": recorded["wd"]}
    settings = make_settings(**rates, adam_betas=recorded["betas"], adam_eps=recorded["eps"])
    optimizer = build_optimizer(model, settings, name)
    # bf16 keeps 8 bits, and the two programs round once at different places
    tolerance = {"rtol": 2**-7, "atol": 1e-6} if parameter.dtype == torch.bfloat16 else {"rtol": 0, "atol": 1e-6}
    for step, factor in enumerate(recorded["lrm"], start=1):
        parameter.grad = tensors[f"g{step}"]
        set_step(optimizer, factor)
        optimizer.step()
        state = optimizer.state[parameter]
        torch.testing.assert_close(parameter.detach(), tensors[f"p{step}"], **tolerance)
        torch.testing.assert_close(state["exp_avg"], tensors[f"m{step}"], **tolerance)
        torch.testing.assert_close(state["exp_avg_sq"], tensors[f"v{step}"], **tolerance)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_adam_eps_stands_outside_the_bias_correction(name):
    """First step, gradient = eps: the update is lr g / (|g| + eps) = lr / 2; with eps inside it would be .183 lr."""
    model = nn.Module()
    model.lm_head = nn.Linear(3, 5, bias=False)
    before = model.lm_head.weight.detach().clone()
    model.lm_head.weight.grad = torch.full((5, 3), 1e-8)
    settings = make_settings(head_lr=1.0, weight_decay=0.0, adam_betas=(0.9, 0.95), adam_eps=1e-8)
    build_optimizer(model, settings, name).step()
    torch.testing.assert_close(before - model.lm_head.weight, torch.full((5, 3), 0.5), rtol=0, atol=1e-6)


def test_adamw_of_muon_adamw_equals_torch():
    """All roles but matrices, many steps, against torch.optim.AdamW's plain loop."""
    ours, theirs = TinyModel(), TinyModel()
    for model in (ours, theirs):
        model.model.layers.requires_grad_(False)
        model.model.boundary.proj.requires_grad_(False)
    optimizer = build_optimizer(ours, make_settings())
    groups = [dict(group) for group in build_optimizer(theirs, make_settings()).param_groups]
    keys = ("params", "lr", "base_lr", "weight_decay", "betas", "eps")
    plain = torch.optim.AdamW([{key: group[key] for key in keys} for group in groups], foreach=False, fused=False)
    for step in range(6):
        train(ours, optimizer, [step])
        train(theirs, plain, [step])
    for left, right in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(left, right, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("by_name", [False, True], ids=["state_dict", "by_name"])
def test_resume_equals_the_straight_run(name, by_name, tmp_path):
    straight = TinyModel()
    train(straight, build_optimizer(straight, make_settings(), name), range(10))
    first = TinyModel()
    optimizer = build_optimizer(first, make_settings(), name)
    train(first, optimizer, range(5))
    state = state_by_name(first, optimizer) if by_name else optimizer.state_dict()
    torch.save({"model": first.state_dict(), "optimizer": state}, tmp_path / "checkpoint.pt")
    saved = torch.load(tmp_path / "checkpoint.pt", weights_only=True)
    resumed = TinyModel(seed=1)
    resumed.load_state_dict(saved["model"])
    optimizer = build_optimizer(resumed, make_settings(), name)
    if by_name:
        load_state_by_name(resumed, optimizer, saved["optimizer"])
    else:
        optimizer.load_state_dict(saved["optimizer"])
    train(resumed, optimizer, range(5, 10))
    for (key, expected), parameter in zip(straight.named_parameters(), resumed.parameters(), strict=True):
        assert torch.equal(parameter, expected), key


# Growth of an untied core 1 -> 2 blocks: prelude 0, core 1, coda 2 become prelude 0, core 1 and 2, coda 3
ORIGIN_OF_LAYER = {0: 0, 1: 1, 2: 1, 3: 2}
NEW_LAYER = "model.layers.2."


def grow(old):
    new = TinyModel(num_layers=4, seed=5)
    origins = {}
    for name, parameter in new.named_parameters():
        parts = name.split(".")
        if parts[1] == "layers":
            parts[2] = str(ORIGIN_OF_LAYER[int(parts[2])])
        origins[name] = ".".join(parts)
        parameter.data.copy_(old.get_parameter(origins[name]).detach())
    return new, origins, {name for name in origins if name.startswith(NEW_LAYER)}


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("policy", ["zero", "copy"])
def test_growth_keeps_the_state_of_trained_parameters(name, policy):
    # One matrix a stack: the size of a stack may change rounding, and this test is about bits
    settings = make_settings(max_stack_elements=1)
    old = TinyModel()
    old_optimizer = build_optimizer(old, settings, name)
    train(old, old_optimizer, range(4))
    new, origins, new_names = grow(old)
    optimizer = build_optimizer(new, settings, name)
    old_states = state_by_name(old, old_optimizer)
    load_state_by_name(new, optimizer, carry_state(old_states, origins, new_names, policy))
    states = state_by_name(new, optimizer)
    for key, state in states.items():
        if key in new_names and policy == "zero":
            assert state == {}
            continue
        origin = old_states[origins[key]]
        assert state.keys() == origin.keys()
        for tensor_name, value in state.items():
            assert torch.equal(value, origin[tensor_name]), (key, tensor_name)
            assert value.data_ptr() != origin[tensor_name].data_ptr()

    # The same gradients for old and new model: the next update of a trained parameter is that without growth
    gradients = {
        key: torch.randn(p.shape, generator=torch.Generator().manual_seed(7)) for key, p in copies(old).items()
    }
    for key, parameter in old.named_parameters():
        parameter.grad = gradients[key]
    for key, parameter in new.named_parameters():
        parameter.grad = gradients[origins[key]]
    before = copies(new)
    for each in (old_optimizer, optimizer):
        set_step(each, 0.7, 0.9)
        each.step()
    fresh = grow(old)[0]
    fresh.load_state_dict(before, strict=True)
    fresh_optimizer = build_optimizer(fresh, settings, name)
    for key, parameter in fresh.named_parameters():
        parameter.grad = gradients[origins[key]]
    set_step(fresh_optimizer, 0.7, 0.9)
    fresh_optimizer.step()
    for key, parameter in new.named_parameters():
        expected = (
            fresh.get_parameter(key) if key in new_names and policy == "zero" else old.get_parameter(origins[key])
        )
        assert torch.equal(parameter, expected), key


def test_zero_policy_restarts_adam_steps_of_new_parameters_alone():
    old = TinyModel()
    old_optimizer = build_optimizer(old, make_settings(), "adamw")
    train(old, old_optimizer, range(4))
    new, origins, new_names = grow(old)
    optimizer = build_optimizer(new, make_settings(), "adamw")
    states = carry_state(state_by_name(old, old_optimizer), origins, new_names)
    load_state_by_name(new, optimizer, states)
    train(new, optimizer, [4])
    for key, state in state_by_name(new, optimizer).items():
        assert state["step"] == (1 if key in new_names else 5), key


def test_carry_state_refuses_to_lose_or_invent_state():
    old = TinyModel()
    optimizer = build_optimizer(old, make_settings())
    train(old, optimizer, range(1))
    states = state_by_name(old, optimizer)
    _, origins, new_names = grow(old)
    with pytest.raises(ValueError, match="policy is 'keep'; allowed are 'zero', 'copy'"):
        carry_state(states, origins, new_names, "keep")
    with pytest.raises(ValueError, match="without optimizer state by name: model.layers.9"):
        carry_state(states, origins | {"model.norm.weight": "model.layers.9"}, new_names)
    without_norm = {new: old for new, old in origins.items() if new != "model.norm.weight"}
    with pytest.raises(ValueError, match="continues the state of model.norm.weight"):
        carry_state(states, without_norm, new_names)


def test_load_state_by_name_refuses_what_does_not_fit():
    model = TinyModel()
    optimizer = build_optimizer(model, make_settings())
    train(model, optimizer, range(1))
    states = state_by_name(model, optimizer)
    key = "model.layers.0.mlp.up_proj.weight"
    with pytest.raises(ValueError, match="given for 'model.nowhere'"):
        load_state_by_name(model, optimizer, {"model.nowhere": {}})
    with pytest.raises(ValueError, match=f"state of {key} holds \\['exp_avg'\\]"):
        load_state_by_name(model, optimizer, {key: {"exp_avg": torch.zeros(1)}})
    for tensor_name in states[key]:
        wrong = states[key] | {tensor_name: torch.zeros(3, 5)}
        with pytest.raises(ValueError, match=rf"{tensor_name} of {key} has shape \(3, 5\)"):
            load_state_by_name(model, optimizer, {key: wrong})
    # A refused load leaves the state as it was
    assert state_by_name(model, optimizer).keys() == states.keys()
    assert all(state_by_name(model, optimizer)[name] for name in states)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"matrix_lr": -0.1}, "matrix_lr is -0.1"),
        ({"weight_decay": float("nan")}, "weight_decay is nan"),
        ({"adam_betas": (0.8, 1.0)}, r"adam_betas\[1\] is 1.0"),
        ({"adam_betas": (0.8,)}, "it takes two numbers"),
        ({"muon_beta2": 1.5}, "muon_beta2 is 1.5"),
        ({"ns_steps": 6}, "ns_steps is 6; allowed are 1 to 5"),
        ({"orthogonalize_dtype": "float16"}, "orthogonalize_dtype is 'float16'"),
        ({"max_stack_elements": 0}, "max_stack_elements is 0"),
    ],
)
def test_settings_errors_name_the_field(change, message):
    with pytest.raises(ValueError, match=message):
        make_settings(**change)


def test_unknown_optimizer_is_named():
    with pytest.raises(ValueError, match="optimizer is 'adam'; allowed are 'muon_adamw', 'adamw', 'torch_muon'"):
        build_optimizer(TinyModel(), make_settings(), "adam")
