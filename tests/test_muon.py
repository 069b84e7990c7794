import functools
import json
import os
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch.distributed.tensor import DTensor, Shard, distribute_tensor, init_device_mesh

from training import muon
from training.optim import MuonAdamW, OptimizerSettings, set_step

ASSETS = Path(__file__).parent / "assets" / "optim"
REFERENCE = Path(os.environ.get("LOOPED_REFERENCE_DIR", Path(__file__).parents[2] / "shared")) / "reference" / "optim"
SETTINGS = json.loads((ASSETS / "settings.json").read_text())
CASES = ("muon_start", "muon_growth_ramp")


def make_muon(parameters, lr, weight_decay, **options):
    group = {"params": parameters, "role": "matrix", "lr": lr, "base_lr": lr, "weight_decay": weight_decay}
    settings = {"matrix_lr": lr, "embedding_lr": 0.0, "head_lr": 0.0, "weight_decay": weight_decay} | options
    return MuonAdamW([group], OptimizerSettings(**settings))


def run_case(case, tensors, momentum=None, **options):
    """Runs the recorded steps; returns the parameters by name and, for each step, what the optimizer then holds."""
    recorded = SETTINGS[case]
    names = [key.removeprefix("p0.") for key in tensors if key.startswith("p0.")]
    parameters = {name: torch.nn.Parameter(tensors[f"p0.{name}"].clone()) for name in names}
    optimizer = make_muon(list(parameters.values()), recorded["lr"], recorded["wd"], **options)
    states = []
    for index, factor in enumerate(recorded["lrm"]):
        for name, parameter in parameters.items():
            parameter.grad = tensors[f"g{index + 1}.{name}"]
        set_step(optimizer, factor, momentum or recorded["momentum"][index])
        optimizer.step()
        states.append({name: {"p": p.detach().clone(), **clone(optimizer.state[p])} for name, p in parameters.items()})
    return states


def clone(state):
    return {key: value.clone() for key, value in state.items()}


def relative_error(tensors, name, result, step=3):
    before, expected = tensors[f"p0.{name}"], tensors[f"p{step}.{name}"]
    return ((result - expected).norm() / (expected - before).norm().clamp_min(1e-12)).item()


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 0.05), ("bfloat16", 0.06)])
def test_three_steps_of_the_papers_code(case, dtype, tolerance):
    tensors = load_file(ASSETS / f"{case}.safetensors")
    states = run_case(case, tensors, orthogonalize_dtype=dtype)
    assert "sq_zero" in states[-1]
    for name, state in states[-1].items():
        torch.testing.assert_close(state["momentum_buffer"], tensors[f"m3.{name}"], rtol=0, atol=1e-9)
        assert relative_error(tensors, name, state["p"]) < tolerance, name
    for step, recorded in enumerate(states, start=1):
        for name, state in recorded.items():
            expected = tensors[f"v{step}.{name}"]
            assert state["second_moment"].shape == expected.shape
            assert (state["second_moment"] - expected).norm() <= 0.04 * expected.norm(), (name, step)


@pytest.mark.parametrize("case", CASES)
def test_every_step_of_the_full_reference(case):
    if not REFERENCE.is_dir():
        pytest.skip(f"reference data not found at {REFERENCE}")
    tensors = load_file(REFERENCE / f"{case}.eager.safetensors") | load_file(
        REFERENCE / f"{case}.compiled.safetensors"
    )
    for step, recorded in enumerate(run_case(case, tensors), start=1):
        for name, state in recorded.items():
            assert torch.equal(state["momentum_buffer"], tensors[f"m{step}.{name}"]), (name, step)
            assert relative_error(tensors, name, state["p"], step) < 0.08, (name, step)


@pytest.mark.parametrize(
    ("left_out", "options"),
    [
        ("all", {}),
        ("no_row", {"row_normalize": False}),
        ("no_var", {"variance_reduction": False}),
        ("no_nest", {"nesterov": False}),
        ("no_caut", {"cautious_weight_decay": False}),
        ("mom95", {"momentum": 0.95}),
    ],
)
def test_each_option_left_out_is_as_far_off_as_recorded(left_out, options):
    tensors = load_file(ASSETS / "muon_start.safetensors")
    recorded = json.loads((ASSETS / "discrimination.json").read_text())[left_out]
    states = run_case("muon_start", tensors, orthogonalize_dtype="float32", **options)
    for name, distance in recorded.items():
        assert relative_error(tensors, name, states[-1][name]["p"]) == pytest.approx(distance, abs=2e-3), name


def minimax_quintic(low, high):
    """Odd quintic closest to 1 on [low, high] (Remez exchange over its four points of largest error)."""
    inner = [0.75 * low + 0.25 * high, 0.25 * low + 0.75 * high]
    for _ in range(100):
        points = np.array([low, *inner, high])
        system = np.stack([points, points**3, points**5, [1, -1, 1, -1]], axis=1)
        a, b, c, _ = np.linalg.solve(system, np.ones(4))
        inner = np.sqrt((-3 * b + np.array([-1, 1]) * np.sqrt(9 * b * b - 20 * a * c)) / (10 * c))
    return np.array([a, b, c])


def test_polar_express_coefficients_follow_from_their_definition():
    powers = np.array([1, 3, 5])
    low, high, cushion, safety = 1e-3, 1.0, 0.02, 1.02
    for step, published in enumerate(muon.POLAR_EXPRESS):
        coefficients = minimax_quintic(max(low, cushion * high), high)
        if low < cushion * high:
            coefficients *= 2 / ((coefficients * low**powers).sum() + (coefficients * high**powers).sum())
        if step < len(muon.POLAR_EXPRESS) - 1:
            coefficients /= safety**powers
        np.testing.assert_allclose(coefficients, published, rtol=1e-10)
        low = (coefficients * low**powers).sum()
        high = 2 - low


@pytest.mark.parametrize("shape", [(32, 32), (96, 32), (32, 96)])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_first_update_has_singular_values_near_the_scale(shape, dtype):
    rows, cols = shape
    generator = torch.Generator().manual_seed(0)
    left, _ = torch.linalg.qr(torch.randn(rows, 32, generator=generator))
    right, _ = torch.linalg.qr(torch.randn(cols, 32, generator=generator))
    spectrum = torch.logspace(0, -2, 32)
    parameter = torch.nn.Parameter(torch.zeros(shape))
    parameter.grad = left * spectrum @ right.mT
    options = {"row_normalize": False, "variance_reduction": False, "orthogonalize_dtype": dtype}
    make_muon([parameter], 0.5, 0.0, **options).step()
    scale = 0.5 * max(1.0, rows / cols) ** 0.5
    values = torch.linalg.svdvals(parameter.detach()) / scale
    assert 0.7 < values.min() and values.max() < 1.3
    # The direction is kept: U V^T of the gradient, downhill
    alignment = -(left.mT @ parameter.detach() @ right).diagonal() / scale
    assert alignment.min() > 0.7


@pytest.mark.parametrize("shape", [(32, 32), (48, 16), (16, 48)])
def test_variance_reduction_evens_out_and_keeps_the_norm(shape):
    generator = torch.Generator().manual_seed(0)
    grad = torch.randn(shape, generator=generator) * torch.logspace(0, -1, shape[0])[:, None]
    updates = {}
    for variance_reduction in (False, True):
        parameter = torch.nn.Parameter(torch.zeros(shape))
        parameter.grad = grad
        options = {"variance_reduction": variance_reduction, "orthogonalize_dtype": "float32"}
        make_muon([parameter], 1.0, 0.0, **options).step()
        updates[variance_reduction] = parameter.detach()
    torch.testing.assert_close(updates[True].norm(), updates[False].norm(), rtol=1e-5, atol=0)
    axis = -1 if shape[0] >= shape[1] else -2
    # After one step v is .05 of the mean squares, so that all rows (columns) of the update have one size
    sizes = updates[True].norm(dim=axis)
    torch.testing.assert_close(sizes, sizes.mean().expand_as(sizes), rtol=1e-4, atol=0)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_zero_gradient_changes_nothing_but_decay(dtype):
    for weight_decay in (0.0, 0.1):
        before = torch.randn(8, 16)
        parameter = torch.nn.Parameter(before.clone())
        parameter.grad = torch.zeros_like(parameter)
        optimizer = make_muon([parameter], 0.5, weight_decay, orthogonalize_dtype=dtype)
        for _ in range(2):
            optimizer.step()
        torch.testing.assert_close(parameter.detach(), before * (1 - 0.5 * weight_decay) ** 2)


def random_steps(optimizer, parameters, num_steps=3, seed=0):
    generator = torch.Generator().manual_seed(seed)
    for step in range(num_steps):
        for parameter in parameters:
            parameter.grad = torch.randn(parameter.shape, generator=generator)
        set_step(optimizer, 1.0 - 0.1 * step, 0.85 + 0.01 * step)
        optimizer.step()


def random_matrices(*shapes):
    generator = torch.Generator().manual_seed(1)
    return [torch.nn.Parameter(torch.randn(shape, generator=generator)) for shape in shapes]


@pytest.mark.parametrize("max_stack_elements", [1, 3 * 24 * 16, None])
def test_stacked_matrices_equal_matrices_alone(max_stack_elements):
    shapes = [(24, 16), (16, 24), (24, 16), (16, 16), (24, 16), (24, 16)]
    options = {"orthogonalize_dtype": "float32"}
    together, alone = random_matrices(*shapes), random_matrices(*shapes)
    random_steps(make_muon(together, 0.1, 0.1, max_stack_elements=max_stack_elements, **options), together)
    optimizers = [make_muon([parameter], 0.1, 0.1, **options) for parameter in alone]

    class Each:
        param_groups = [group for optimizer in optimizers for group in optimizer.param_groups]

        @staticmethod
        def step():
            for optimizer in optimizers:
                optimizer.step()

    random_steps(Each, alone)
    for stacked, single in zip(together, alone, strict=True):
        torch.testing.assert_close(stacked, single, rtol=1e-5, atol=1e-6)


def test_stacked_parameter_is_orthogonalised_per_slice():
    (stacked,) = random_matrices((3, 24, 16))
    slices = [torch.nn.Parameter(part.clone()) for part in stacked.detach()]
    optimizer, reference = make_muon([stacked], 0.1, 0.1), make_muon(slices, 0.1, 0.1)
    for step in range(3):
        stacked.grad = torch.randn(stacked.shape, generator=torch.Generator().manual_seed(step))
        for part, grad in zip(slices, stacked.grad, strict=True):
            part.grad = grad
        optimizer.step()
        reference.step()
    for index, part in enumerate(slices):
        assert torch.equal(stacked[index], part)
        for key, value in reference.state[part].items():
            assert torch.equal(optimizer.state[stacked][key][index], value)


def test_bf16_parameters_and_gradients_are_accepted():
    full = random_matrices((24, 16))
    half = [torch.nn.Parameter(parameter.detach().bfloat16()) for parameter in full]
    start = full[0].detach().clone()
    for parameters in (full, half):
        optimizer = make_muon(parameters, 0.1, 0.1)
        for parameter in parameters:
            parameter.grad = torch.ones_like(parameter).tril()
        optimizer.step()
        assert all(value.dtype == parameters[0].dtype for value in optimizer.state[parameters[0]].values())
    error = (half[0].float() - full[0]).norm() / (full[0] - start).norm()
    assert error < 0.1


def test_flattened_matrix_is_refused():
    parameter = torch.nn.Parameter(torch.zeros(24))
    parameter.grad = torch.ones(24)
    with pytest.raises(ValueError, match=r"shape \(24,\) at the optimizer step"):
        make_muon([parameter], 0.1, 0.0).step()


def test_one_compiled_graph_a_shape_serves_every_step(monkeypatch):
    graphs = []

    def backend(module, inputs):
        graphs.append(module)
        return module.forward

    torch._dynamo.reset()
    muon.compiled_muon_step.cache_clear()
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend=backend))
    # More shapes than the eight graphs that dynamo allows a function by itself
    shapes = [(8 + rows, 16) for rows in range(9)] + [(8, 16)]
    compiled, eager = random_matrices(*shapes), random_matrices(*shapes)
    random_steps(make_muon(compiled, 0.1, 0.1, compile=True), compiled)
    muon.compiled_muon_step.cache_clear()
    random_steps(make_muon(eager, 0.1, 0.1), eager)
    assert len(graphs) == 9
    for left, right in zip(compiled, eager, strict=True):
        torch.testing.assert_close(left, right, rtol=1e-5, atol=1e-6)


@pytest.mark.slow
def test_inductor_agrees_with_the_papers_code():
    muon.compiled_muon_step.cache_clear()
    tensors = load_file(ASSETS / "muon_start.safetensors")
    states = run_case("muon_start", tensors, compile=True)
    for name, state in states[-1].items():
        assert relative_error(tensors, name, state["p"]) < 0.08, name


SHARDED_SHAPES = [(33, 16), (16, 33), (33, 16), (3, 16, 8)]


def sharded_worker(rank, num_processes, folder):
    torch.set_num_threads(1)
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=num_processes
    )
    mesh = init_device_mesh("cpu", (num_processes,))
    parameters = [
        torch.nn.Parameter(distribute_tensor(parameter.detach(), mesh, [Shard(0)]))
        for parameter in random_matrices(*SHARDED_SHAPES)
    ]
    optimizer = make_muon(parameters, 0.1, 0.1, orthogonalize_dtype="float32")
    generator = torch.Generator().manual_seed(0)
    for step in range(3):
        for parameter in parameters:
            grad = torch.randn(parameter.shape, generator=generator)
            parameter.grad = distribute_tensor(grad, mesh, [Shard(0)])
        set_step(optimizer, 1.0 - 0.1 * step, 0.85 + 0.01 * step)
        optimizer.step()
    assert all(isinstance(optimizer.state[p]["momentum_buffer"], DTensor) for p in parameters)
    torch.save([parameter.detach().full_tensor() for parameter in parameters], f"{folder}/rank{rank}.pt")
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()
    # gloo's threads can abort an interpreter that exits the ordinary way
    os._exit(0)


def test_sharded_matrices_equal_whole_ones(tmp_path):
    torch.multiprocessing.spawn(sharded_worker, args=(2, str(tmp_path)), nprocs=2)
    whole = random_matrices(*SHARDED_SHAPES)
    random_steps(make_muon(whole, 0.1, 0.1, orthogonalize_dtype="float32"), whole)
    first, second = (torch.load(tmp_path / f"rank{rank}.pt", weights_only=True) for rank in range(2))
    for one, two, expected in zip(first, second, whole, strict=True):
        assert torch.equal(one, two)
        torch.testing.assert_close(one, expected.detach(), rtol=1e-5, atol=1e-6)
