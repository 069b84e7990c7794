"""Key/value caches: one slot an executed block, whoever built the cache, and nothing silent when it does not fit."""

import pytest
import torch
from transformers import DynamicCache, StaticCache

PASSES = [1, 2, 4, 8]


def run_in_steps(model, ids, cache, chunks, **kwargs):
    """Logits of a forward fed `chunks` tokens at a time through one cache."""
    logits = [
        model(chunk, cache=cache, use_cache=True, **kwargs).logits for chunk in torch.split(ids, list(chunks), dim=1)
    ]
    return torch.cat(logits, dim=1)


@torch.no_grad()
@pytest.mark.parametrize("num_loops", PASSES)
def test_steps_through_a_cache_equal_one_forward(variant_config, make_model, random_ids, num_loops):
    config = variant_config(num_loops=num_loops)
    model = make_model(config)
    ids = random_ids(2, 20)
    expected = model(ids, use_cache=False).logits
    # a prompt, a second turn of several tokens, single tokens
    logits = run_in_steps(model, ids, DynamicCache(config=config), (9, 6, 1, 1, 3))
    torch.testing.assert_close(logits, expected, rtol=1e-5, atol=1e-5)


# B01, B07
@torch.no_grad()
@pytest.mark.parametrize("num_loops", [None, *PASSES])
@pytest.mark.parametrize("tie_core", [True, False])
def test_every_kind_of_cache_holds_a_slot_for_each_executed_block(
    tiny_config, make_model, random_ids, tie_core, num_loops
):
    """Caches are built from the config, whatever number of passes the call then asks for."""
    config = tiny_config(tie_core=tie_core, num_stored_cores=None if tie_core else 8)
    model = make_model(config)
    ids = random_ids(2, 12)
    expected = model(ids, use_cache=False, num_loops=num_loops).logits
    for cache in (DynamicCache(), DynamicCache(config=config), StaticCache(config=config, max_cache_len=16), None):
        output = model(ids[:, :8], cache=cache, use_cache=True, num_loops=num_loops)
        assert len(output.cache.layers) == 1 + 2 * (num_loops or 3) + 1
        logits = run_in_steps(model, ids[:, 8:], output.cache, (1, 1, 2), num_loops=num_loops)
        torch.testing.assert_close(torch.cat((output.logits, logits), dim=1), expected, rtol=1e-5, atol=1e-5)
        assert len(output.cache.layers) == 1 + 2 * (num_loops or 3) + 1
        assert all(layer.get_seq_length() == 12 for layer in output.cache.layers)


@torch.no_grad()
def test_passes_write_different_keys(tiny_config, make_model, random_ids):
    """The control of the tests above: equal slots would hide passes that overwrite each other."""
    model = make_model(tiny_config())
    layers = model(random_ids(1, 6), use_cache=True).cache.layers
    for slot in (1, 2):  # the two blocks of the core
        assert not torch.allclose(layers[slot].keys, layers[slot + 2].keys, atol=1e-3)


# B05
@torch.no_grad()
@pytest.mark.parametrize("static", [False, True])
def test_reset_cache_serves_another_prompt(tiny_config, make_model, random_ids, static):
    config = tiny_config()
    model = make_model(config)
    cache = StaticCache(config=config, max_cache_len=16) if static else DynamicCache(config=config)
    run_in_steps(model, random_ids(2, 12), cache, (10, 1, 1))
    cache.reset()
    ids = random_ids(2, 9, seed=1)
    logits = run_in_steps(model, ids, cache, (6, 1, 2))
    torch.testing.assert_close(logits, model(ids, use_cache=False).logits, rtol=1e-5, atol=1e-5)
    assert len(cache.layers) == 8


@torch.no_grad()
@pytest.mark.parametrize("static", [False, True])
def test_reset_cache_serves_another_number_of_passes(tiny_config, make_model, random_ids, static):
    config = tiny_config()
    model = make_model(config)
    cache = StaticCache(config=config, max_cache_len=16) if static else DynamicCache(config=config)
    for num_loops in (3, 1, 4):
        ids = random_ids(2, 9, seed=num_loops)
        logits = run_in_steps(model, ids, cache, (6, 1, 2), num_loops=num_loops)
        expected = model(ids, use_cache=False, num_loops=num_loops).logits
        torch.testing.assert_close(logits, expected, rtol=1e-5, atol=1e-5)
        cache.reset()


@torch.no_grad()
@pytest.mark.parametrize("kind", ["bare", "from config", "static"])
@pytest.mark.parametrize("num_loops", [1, 2, 4])
def test_num_loops_cannot_change_within_a_sequence(tiny_config, make_model, random_ids, kind, num_loops):
    config = tiny_config()
    model = make_model(config)
    cache = {
        "bare": lambda: DynamicCache(),
        "from config": lambda: DynamicCache(config=config),
        "static": lambda: StaticCache(config=config, max_cache_len=16),
    }[kind]()
    model(random_ids(1, 5), cache=cache)
    with pytest.raises(ValueError, match="filled by a forward with 8 executed blocks, this one executes"):
        model(random_ids(1, 1), cache=cache, num_loops=num_loops)
    assert len(cache.layers) == 8
    assert cache.get_seq_length() == 5


# B08: the padding of the prompt stays masked while tokens are added
@torch.no_grad()
@pytest.mark.parametrize("static", [False, True])
def test_left_padded_rows_through_a_cache_equal_single_rows(variant_config, make_model, random_ids, static):
    config = variant_config()
    model = make_model(config)
    rows = [random_ids(1, length, seed=length) for length in (12, 7, 4)]
    ids, mask = torch.zeros(3, 12, dtype=torch.long), torch.zeros(3, 12, dtype=torch.long)
    for index, row in enumerate(rows):
        ids[index, -row.shape[1] :] = row
        mask[index, -row.shape[1] :] = 1
    position_ids = (mask.cumsum(-1) - 1).clamp_min(0)
    cache = StaticCache(config=config, max_cache_len=16) if static else DynamicCache(config=config)
    logits = []
    for start, end in ((0, 9), (9, 10), (10, 12)):
        output = model(
            ids[:, start:end], attention_mask=mask[:, :end], position_ids=position_ids[:, start:end], cache=cache
        )
        logits.append(output.logits)
    logits = torch.cat(logits, dim=1)
    for index, row in enumerate(rows):
        torch.testing.assert_close(logits[index, mask[index].bool()], model(row).logits[0], rtol=1e-5, atol=1e-5)


# B23
@torch.no_grad()
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_cache_is_in_the_dtype_of_the_model(tiny_config, make_model, random_ids, dtype):
    config = tiny_config()
    model = make_model(config).to(dtype)
    for cache in (DynamicCache(config=config), StaticCache(config=config, max_cache_len=16)):
        model(random_ids(1, 5), cache=cache)
        assert (
            {layer.keys.dtype for layer in cache.layers} == {layer.values.dtype for layer in cache.layers} == {dtype}
        )


@torch.no_grad()
def test_cache_is_in_the_dtype_of_autocast(tiny_config, make_model, random_ids):
    model = make_model(tiny_config())
    with torch.autocast("cpu", torch.bfloat16):
        cache = model(random_ids(1, 5), use_cache=True).cache
    assert {layer.values.dtype for layer in cache.layers} == {torch.bfloat16}
    assert {layer.keys.dtype for layer in cache.layers} == {torch.bfloat16}


# B25
@torch.no_grad()
def test_cache_position_is_neither_needed_nor_harmful(tiny_config, make_model, random_ids):
    config = tiny_config()
    model = make_model(config)
    ids = random_ids(1, 8)
    expected = run_in_steps(model, ids, DynamicCache(config=config), (5, 3))
    cache = DynamicCache(config=config)
    first = model(ids[:, :5], cache=cache, cache_position=torch.arange(5)).logits
    second = model(ids[:, 5:], cache=cache, cache_position=torch.arange(5, 8)).logits
    assert torch.equal(torch.cat((first, second), dim=1), expected)


@torch.no_grad()
def test_past_key_values_is_still_understood(tiny_config, make_model, random_ids):
    config = tiny_config()
    model = make_model(config)
    ids = random_ids(1, 8)
    cache = DynamicCache(config=config)
    model(ids[:, :5], past_key_values=cache)
    logits = model(ids[:, 5:], past_key_values=cache).logits
    torch.testing.assert_close(logits, model(ids).logits[:, 5:], rtol=1e-5, atol=1e-5)


@torch.no_grad()
def test_cropped_cache_continues_from_the_cut(tiny_config, make_model, random_ids):
    config = tiny_config()
    model = make_model(config)
    ids = random_ids(1, 10)
    cache = DynamicCache(config=config)
    model(ids, cache=cache)
    cache.crop(-4)
    assert cache.get_seq_length() == 6
    logits = model(ids[:, 6:], cache=cache).logits
    torch.testing.assert_close(logits, model(ids).logits[:, 6:], rtol=1e-5, atol=1e-5)


@torch.no_grad()
def test_use_cache_false_leaves_no_cache(tiny_config, make_model, random_ids):
    model = make_model(tiny_config())
    assert model(random_ids(1, 5), use_cache=False).cache is None
    assert model(random_ids(1, 5), use_cache=True).cache.get_seq_length() == 5
