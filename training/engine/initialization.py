"""The first weights of a run, drawn in the order of the paper's code, so that a seed gives the paper's own numbers.

The distributions are those of the model's own initialisation (modeling_looped.py); only the order of the draws is
added. Numbers are equal to the paper's on the same kind of device: torch's CPU and CUDA generators differ.
"""

import torch

from modeling_looped import LoopedForCausalLM
from modeling_looped.flops import pad_vocab_size


@torch.no_grad()
def initialize_as_paper(model: LoopedForCausalLM, seed: int, num_drawn_cores: int | None = None) -> None:
    """Draws the weights of `model` anew: after the seed the embedding, then block by block q, k, v, gate, up.

    Embedding rows of the padding to a multiple of 64 are drawn and dropped. Projections out of a block and the head
    become zero (arXiv 2609.19107). The paper's code rotates q and k the other way round, so half of their rows change
    sign, as in `modeling_looped.upcycle`. Boundary operators and gains of norms keep what they have, and so does the
    whole model where `uniform_init_scale` is None.

    Args:
        seed: of torch's global generators, which this sets.
        num_drawn_cores: cores for which numbers are drawn, None for those stored. The paper's code holds the cores of
            an untied model that will grow from the start, so that the coda's numbers come after theirs.

    Raises:
        ValueError: `num_drawn_cores` is less than the cores stored.
    """
    config = model.config
    if config.uniform_init_scale is None:
        return
    num_drawn_cores = config.num_stored_cores if num_drawn_cores is None else num_drawn_cores
    if num_drawn_cores < config.num_stored_cores:
        raise ValueError(f"num_drawn_cores is {num_drawn_cores}; the model stores {config.num_stored_cores} cores")
    torch.manual_seed(seed)
    embedding = model.model.embed_tokens.weight
    rows = embedding.new_empty((pad_vocab_size(config.vocab_size), config.hidden_size), dtype=torch.float32)
    embedding.copy_(rows.normal_(0.0, config.initializer_range)[: config.vocab_size])
    if not config.tie_word_embeddings:
        model.lm_head.weight.zero_()

    bound = config.uniform_init_scale / config.hidden_size**0.5
    layers = list(model.model.layers)
    first_coda = len(layers) - config.num_coda_blocks
    num_dropped = (num_drawn_cores - config.num_stored_cores) * config.num_core_blocks
    for layer in (*layers[:first_coda], *[None] * num_dropped, *layers[first_coda:]):
        attention, mlp = (layer or layers[0]).self_attn, (layer or layers[0]).mlp
        for projection in (attention.q_proj, attention.k_proj, attention.v_proj, mlp.gate_proj, mlp.up_proj):
            drawn = torch.empty_like(projection.weight, dtype=torch.float32).uniform_(-bound, bound)
            if layer is None:
                continue
            if projection in (attention.q_proj, attention.k_proj):
                drawn.view(-1, 2, config.head_dim // 2, config.hidden_size)[:, 1].neg_()
            projection.weight.copy_(drawn)
        if layer is not None:
            attention.o_proj.weight.zero_()
            mlp.down_proj.weight.zero_()
