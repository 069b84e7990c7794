"""transformers' own decoding on a looped model: what the cache, padding, beams, drafts or num_loops may not change."""

import copy

import pytest
import torch
from transformers import (
    ContinuousBatchingConfig,
    DynamicCache,
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
    StaticCache,
)

from modeling_looped import LoopedForCausalLM

PASSES = [1, 2, 4, 8]


def greedy(model, ids, num_tokens=12, **kwargs):
    return model.generate(ids, max_new_tokens=num_tokens, do_sample=False, **kwargs)


def pad_left(rows):
    """(ids, attention_mask) of one batch whose rows end together."""
    length = max(row.shape[1] for row in rows)
    ids, mask = torch.zeros(len(rows), length, dtype=torch.long), torch.zeros(len(rows), length, dtype=torch.long)
    for index, row in enumerate(rows):
        ids[index, -row.shape[1] :] = row
        mask[index, -row.shape[1] :] = 1
    return ids, mask


class RowSeededNoise(LogitsProcessor):
    """Gumbel noise seeded by row and step: the argmax is then a sample which does not depend on the other rows."""

    def __init__(self, seeds):
        self.seeds = seeds
        self.step = 0

    def __call__(self, input_ids, scores):
        self.step += 1
        for row, seed in enumerate(self.seeds):
            generator = torch.Generator().manual_seed(1000 * seed + self.step)
            scores[row] -= torch.rand(scores.shape[1], generator=generator).clamp_min(1e-9).log().neg().log()
        return scores


# B03
@torch.no_grad()
@pytest.mark.parametrize("num_loops", PASSES)
def test_cached_generation_equals_full_forwards(variant_config, make_model, random_ids, num_loops):
    """One forward without a cache over the finished text says what each of its prefixes would have continued with."""
    model = make_model(variant_config(num_loops=num_loops))
    cached = greedy(model, random_ids(2, 8), num_tokens=64, return_dict_in_generate=True, output_logits=True)
    assert cached.sequences.shape == (2, 72)
    assert len(cached.cache.layers) == model.config.num_hidden_layers
    logits = model(cached.sequences, use_cache=False).logits[:, 7:-1]
    assert torch.equal(cached.sequences[:, 8:], logits.argmax(-1))
    torch.testing.assert_close(torch.stack(cached.logits, dim=1), logits, rtol=1e-4, atol=1e-4)


# B03
@pytest.mark.parametrize("num_loops", PASSES)
def test_cached_generation_equals_uncached(tiny_config, make_model, random_ids, num_loops):
    model = make_model(tiny_config(num_loops=num_loops))
    ids = random_ids(2, 8)
    assert torch.equal(greedy(model, ids, num_tokens=64), greedy(model, ids, num_tokens=64, use_cache=False))


# B01, B07
@pytest.mark.parametrize("num_loops", [None, 1, 4])
@pytest.mark.parametrize("tie_core", [True, False])
def test_every_kind_of_cache_gives_the_same_tokens(tiny_config, make_model, random_ids, tie_core, num_loops):
    config = tiny_config(tie_core=tie_core, num_stored_cores=None if tie_core else 8)
    model = make_model(config)
    ids = random_ids(2, 8)
    expected = greedy(model, ids, num_tokens=8, num_loops=num_loops, use_cache=False)
    caches = [
        {},
        {"cache": DynamicCache()},
        {"cache": DynamicCache(config=config)},
        {"cache": StaticCache(config=config, max_cache_len=32)},
        {"cache_implementation": "static"},
        {"past_key_values": DynamicCache(config=config)},
    ]
    for cache in caches:
        output = greedy(model, ids, num_tokens=8, num_loops=num_loops, return_dict_in_generate=True, **cache)
        assert torch.equal(output.sequences, expected), cache
        assert len(output.cache.layers) == 1 + 2 * (num_loops or 3) + 1


# B09
@pytest.mark.parametrize("num_loops", PASSES)
def test_left_padded_rows_generate_as_alone(variant_config, make_model, random_ids, num_loops):
    model = make_model(variant_config(num_loops=num_loops))
    rows = [random_ids(1, length, seed=length) for length in (9, 5, 1)]
    ids, mask = pad_left(rows)
    kwargs = {"num_tokens": 4, "return_dict_in_generate": True, "output_logits": True}
    batch = greedy(model, ids, attention_mask=mask, **kwargs)
    batch_logits = torch.stack(batch.logits)
    for index, row in enumerate(rows):
        alone = greedy(model, row, attention_mask=torch.ones_like(row), **kwargs)
        torch.testing.assert_close(batch_logits[:, index], torch.stack(alone.logits)[:, 0], rtol=1e-5, atol=1e-5)
        assert torch.equal(batch.sequences[index, 9:], alone.sequences[0, row.shape[1] :])


# B09
@pytest.mark.parametrize("static", [False, True])
def test_left_padded_rows_sample_as_alone(variant_config, make_model, random_ids, static):
    model = make_model(variant_config())
    rows = [random_ids(1, length, seed=length) for length in (9, 5, 1)]
    ids, mask = pad_left(rows)
    kwargs = {"cache_implementation": "static"} if static else {}

    def sample(ids, mask, seeds):
        noise = LogitsProcessorList([RowSeededNoise(seeds)])
        return greedy(model, ids, 6, attention_mask=mask, logits_processor=noise, **kwargs)[:, ids.shape[1] :]

    batch = sample(ids, mask, [0, 1, 2])
    assert not torch.equal(batch, greedy(model, ids, 6, attention_mask=mask)[:, 9:])
    for index, row in enumerate(rows):
        assert torch.equal(batch[index], sample(row, torch.ones_like(row), [index])[0])


# B17
@pytest.mark.parametrize("cache", [{}, {"cache_implementation": "static"}], ids=["dynamic", "static"])
def test_beams_with_a_cache_equal_beams_without(variant_config, make_model, random_ids, cache):
    model = make_model(variant_config())
    ids, mask = pad_left([random_ids(1, 8), random_ids(1, 5)])
    kwargs = {"attention_mask": mask, "num_beams": 3, "num_return_sequences": 3}
    kwargs |= {"return_dict_in_generate": True, "output_scores": True}
    with_cache = greedy(model, ids, num_tokens=6, **kwargs, **cache)
    without = greedy(model, ids, num_tokens=6, use_cache=False, **kwargs)
    assert len(set(map(tuple, with_cache.sequences.tolist()))) == 6
    assert torch.equal(with_cache.sequences, without.sequences)
    torch.testing.assert_close(with_cache.sequences_scores, without.sequences_scores, rtol=1e-5, atol=1e-5)


# B19
@pytest.mark.parametrize("num_loops", [None, 2])
@pytest.mark.parametrize("only_new_tokens", [False, True])
def test_kept_cache_continues_the_conversation(tiny_config, make_model, random_ids, only_new_tokens, num_loops):
    model = make_model(tiny_config())
    first = greedy(model, random_ids(1, 8), num_loops=num_loops, return_dict_in_generate=True)
    text = torch.cat((first.sequences, random_ids(1, 5, seed=1)), dim=1)
    expected = greedy(model, text, num_loops=num_loops)[:, text.shape[1] :]
    cached = first.cache.get_seq_length()
    prompt = text[:, cached:] if only_new_tokens else text
    second = greedy(model, prompt, attention_mask=torch.ones_like(text), cache=first.cache, num_loops=num_loops)
    assert torch.equal(second[:, prompt.shape[1] :], expected)


# B19
@pytest.mark.parametrize("removed", [0, 3])
@pytest.mark.parametrize("padded", [False, True])
def test_prompt_that_is_all_in_the_cache_is_refused(tiny_config, make_model, random_ids, removed, padded):
    model = make_model(tiny_config())
    ids, mask = pad_left([random_ids(1, 8), random_ids(1, 5 if padded else 8, seed=1)])
    first = greedy(model, ids, attention_mask=mask, return_dict_in_generate=True)
    cached = first.cache.get_seq_length()
    prompt = first.sequences[:, : cached - removed]
    mask = torch.cat((mask, mask.new_ones(2, prompt.shape[1] - 8)), dim=1)
    with pytest.raises(ValueError, match=f"cache holds {cached} tokens and the prompt has {cached - removed}"):
        greedy(model, prompt, attention_mask=mask, cache=first.cache)
    # the way out that the message names
    first.cache.crop(-removed - 1)
    assert torch.equal(
        greedy(model, prompt, attention_mask=mask, cache=first.cache), greedy(model, prompt, attention_mask=mask)
    )


@pytest.mark.parametrize("num_loops", [1, 2, 5])
def test_kept_cache_refuses_another_number_of_passes(tiny_config, make_model, random_ids, num_loops):
    model = make_model(tiny_config())
    first = greedy(model, random_ids(1, 8), return_dict_in_generate=True)
    before = copy.deepcopy(first.cache)
    text = torch.cat((first.sequences, random_ids(1, 5, seed=1)), dim=1)
    with pytest.raises(ValueError, match="`num_loops` cannot change within a sequence"):
        greedy(model, text, cache=first.cache, num_loops=num_loops)
    assert first.cache.get_seq_length() == before.get_seq_length()
    assert len(first.cache.layers) == 8


# Trap: assistant_early_exit lowers config.num_hidden_layers while it drafts
@pytest.mark.parametrize("num_loops", [None, 1, 5])
@pytest.mark.parametrize("exit_after", [1, 2, 5])
def test_early_exit_drafts_do_not_change_greedy(tiny_config, make_model, random_ids, exit_after, num_loops):
    model = make_model(tiny_config())
    ids = random_ids(1, 8)
    expected = greedy(model, ids, num_loops=num_loops)
    assert torch.equal(greedy(model, ids, num_loops=num_loops, assistant_early_exit=exit_after), expected)
    assert model.config.num_hidden_layers == 8


def test_early_exit_runs_the_first_blocks_only(variant_config, make_model, random_ids):
    model = make_model(variant_config())
    schedule = model.config.schedule()
    ran = []
    for index, layer in enumerate(model.model.layers):
        layer.register_forward_hook(lambda *_, index=index: ran.append(index))
    ids = random_ids(1, 6)
    full = model(ids).logits
    for exit_after in range(1, len(schedule) + 1):
        ran.clear()
        model.config.num_hidden_layers = exit_after
        logits = model(ids).logits
        assert ran == schedule[:exit_after]
    assert torch.equal(logits, full)


@pytest.mark.parametrize("num_loops", [None, 2, 5])
def test_drafts_of_another_model_do_not_change_greedy(tiny_config, make_model, random_ids, num_loops):
    model = make_model(tiny_config())
    draft = LoopedForCausalLM(tiny_config(num_loops=1)).eval()
    draft.load_state_dict(model.state_dict())
    ids = random_ids(1, 8)
    expected = greedy(model, ids, num_tokens=20, num_loops=num_loops)
    assert torch.equal(greedy(model, ids, num_tokens=20, num_loops=num_loops, assistant_model=draft), expected)
    assert torch.equal(greedy(model, ids, num_tokens=20, num_loops=num_loops, prompt_lookup_num_tokens=3), expected)


def test_chunked_prefill_does_not_change_greedy(variant_config, make_model, random_ids):
    model = make_model(variant_config())
    ids = random_ids(2, 10)
    assert torch.equal(greedy(model, ids, prefill_chunk_size=3), greedy(model, ids))


def test_continuous_batching_does_not_change_greedy(tiny_config, make_model, random_ids):
    """Its paged store is sized by the config and found by layer_idx, as in serving engines."""
    model = make_model(tiny_config())
    rows = [random_ids(1, length, seed=length) for length in (8, 3)]
    expected = [greedy(model, row, num_tokens=8)[0, row.shape[1] :].tolist() for row in rows]
    outputs = model.generate_batch(
        [row[0].tolist() for row in rows],
        generation_config=GenerationConfig(max_new_tokens=8, do_sample=False, eos_token_id=-1),
        continuous_batching_config=ContinuousBatchingConfig(num_blocks=8, max_batch_tokens=64),
    )
    assert [output.generated_tokens for output in outputs.values()] == expected


def test_generate_from_embeddings_equals_ids(tiny_config, make_model, random_ids):
    model = make_model(tiny_config())
    ids = random_ids(2, 8)
    embeddings = model.get_input_embeddings()(ids)
    for num_loops in (None, 1, 5):
        expected = greedy(model, ids, num_loops=num_loops)[:, 8:]
        assert torch.equal(model.generate(inputs_embeds=embeddings, max_new_tokens=12, num_loops=num_loops), expected)


@pytest.mark.parametrize("num_loops", [1, 2, 5])
def test_num_loops_of_generate_equals_num_loops_of_the_config(tiny_config, make_model, random_ids, num_loops):
    model = make_model(tiny_config())
    other = LoopedForCausalLM(tiny_config(num_loops=num_loops)).eval()
    other.load_state_dict(model.state_dict())
    ids = random_ids(2, 8)
    assert torch.equal(greedy(model, ids, num_loops=num_loops), greedy(other, ids))


# B21
def test_returned_sequences_begin_with_different_tokens(tiny_config, make_model, random_ids):
    model = make_model(tiny_config())
    model.lm_head.weight.data.mul_(1e-3)  # near-uniform
    torch.manual_seed(0)
    sequences = model.generate(random_ids(1, 4), max_new_tokens=2, do_sample=True, num_return_sequences=64)
    assert sequences.shape == (64, 6)
    # of 64 draws from 64 tokens about 41 differ
    assert len(sequences[:, 4].unique()) > 20


@pytest.mark.parametrize("unknown", ["num_lops", "num_steps", "anything"])
def test_unknown_keyword_is_refused(tiny_config, make_model, random_ids, unknown):
    with pytest.raises(ValueError, match=f"not used by the model: \\['{unknown}'\\]"):
        greedy(make_model(tiny_config()), random_ids(1, 4), **{unknown: 2})


@pytest.mark.parametrize("num_loops", [0, -1, 2.0, True])
def test_bad_num_loops_is_refused(tiny_config, make_model, random_ids, num_loops):
    with pytest.raises(ValueError, match="`num_loops` must be an integer of at least 1, got"):
        greedy(make_model(tiny_config()), random_ids(1, 4), num_loops=num_loops)


def test_untied_model_refuses_more_passes(tiny_config, make_model, random_ids):
    with pytest.raises(ValueError, match="stores 2 cores: allowed are 1 to 2"):
        greedy(make_model(tiny_config(num_loops=2, tie_core=False)), random_ids(1, 4), num_loops=3)


# B47
def test_can_generate(tiny_config):
    model = LoopedForCausalLM(tiny_config())
    assert model.can_generate()
    assert not model.model.can_generate()
