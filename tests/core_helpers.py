"""Shared by the tests of eval: a byte-level tokenizer trained on the tiny tasks, and their examples."""

from functools import cache

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from eval.bundle import open_data
from eval.prompts import COMPAT, Encoder, build_examples, order_rows
from eval.tasks import load_task_set, read_rows

VOCAB_SIZE = 384


@cache
def make_tokenizer(bos_token: str | None = "<|endoftext|>") -> PreTrainedTokenizerFast:
    """GPT-2's kind of tokenizer with VOCAB_SIZE tokens, the last but one of training order being the BOS if any."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    task_set = load_task_set("tiny")
    read = open_data(task_set)
    texts = [read(task.file).decode() for task in task_set.tasks.values()]
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=[] if bos_token is None else [bos_token],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token=bos_token)


def tiny_examples(max_per_task=None, compat="nanochat", context_length=None, seed=None, **kwargs):
    """Examples of all tiny tasks under make_tokenizer()."""
    task_set = load_task_set("tiny")
    read, encoder, rules = open_data(task_set), Encoder(make_tokenizer()), COMPAT[compat]
    examples = []
    for task in task_set.tasks.values():
        rows = order_rows(read_rows(task, read), max_per_task)
        seed = rules.seeds[0] if seed is None else seed
        examples += build_examples(task, rows, encoder, rules, seed, context_length, **kwargs)
    return examples
