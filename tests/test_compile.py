"""torch.compile and torch.export: one graph however many passes, and the numbers of eager.

The backend is "eager": what is tested is that the graphs can be captured, not what a compiler makes of them.
"""

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

from modeling_looped.boundary import BOUNDARY_OPERATORS, make_boundary_operator


@pytest.fixture(autouse=True)
def fresh_compiler():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


# B95
@pytest.mark.parametrize("tie_core", [True, False])
def test_compiled_blocks_are_one_graph_at_any_number_of_passes(tiny_config, make_model, random_ids, tie_core):
    model = make_model(tiny_config(num_loops=4, tie_core=tie_core)).train()
    ids = random_ids(2, 16)
    expected = [model(ids, labels=ids, use_cache=False, num_loops=num_loops).loss for num_loops in (1, 2, 3, 4)]
    counter = CompileCounterWithBackend("eager")
    for layer in model.model.layers:
        layer.compile(backend=counter, fullgraph=True)
    for num_loops in (1, 2, 3, 4):
        loss = model(ids, labels=ids, use_cache=False, num_loops=num_loops).loss
        torch.testing.assert_close(loss, expected[num_loops - 1], rtol=1e-6, atol=1e-6)
        loss.backward()
    assert counter.frame_count == 1


# B95
def test_compiled_model_is_one_graph_for_each_number_of_passes(tiny_config, make_model, random_ids):
    model = make_model(tiny_config(num_core_blocks=1))
    ids = random_ids(2, 16)
    counter = CompileCounterWithBackend("eager")
    compiled = torch.compile(model, backend=counter, fullgraph=True)
    for num_loops in (1, 3, 1, 3):
        logits = compiled(ids, use_cache=False, num_loops=num_loops).logits
        torch.testing.assert_close(logits, model(ids, num_loops=num_loops).logits, rtol=1e-5, atol=1e-5)
    assert counter.frame_count == 2


@pytest.mark.parametrize("operator", BOUNDARY_OPERATORS)
def test_every_operator_compiles_whole(tiny_config, operator):
    boundary = make_boundary_operator(tiny_config(boundary_operator=operator))
    h, e = torch.randn(2, 5, 32), torch.randn(2, 5, 32)
    compiled = torch.compile(boundary, backend="eager", fullgraph=True)
    for before_coda in (False, True):
        assert torch.equal(compiled(h, e, before_coda=before_coda), boundary(h, e, before_coda=before_coda))


@torch.no_grad()
def test_export_takes_the_loop(tiny_config, make_model, random_ids):
    model = make_model(tiny_config())
    ids = random_ids(2, 8)
    program = torch.export.export(model, (), {"input_ids": ids, "use_cache": False}, strict=False)
    other = random_ids(2, 8, seed=1)
    logits = program.module()(input_ids=other, use_cache=False).logits
    torch.testing.assert_close(logits, model(other).logits, rtol=1e-5, atol=1e-5)


# B53
def test_chunked_loss_compiles_around_its_blocks(tiny_config, make_model, random_ids):
    model = make_model(tiny_config()).train()
    ids = random_ids(2, 16)
    model(ids, labels=ids, skip_logits=True, use_cache=False).loss.backward()
    expected = {name: parameter.grad for name, parameter in model.named_parameters()}
    model.zero_grad(set_to_none=True)
    torch.compile(model, backend="eager")(ids, labels=ids, skip_logits=True, use_cache=False).loss.backward()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, expected[name], rtol=1e-5, atol=1e-6, msg=name)
