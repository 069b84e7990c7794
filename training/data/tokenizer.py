"""The tokenizer of a run: a byte-level BPE trained on the source's own training text, or one loaded by folder or name.

Training is deterministic, so its result is cached by what went in (source provenance, vocabulary size, amount of text)
under LOOPED_CACHE_DIR (default ~/.cache/modeling-looped), and processes that race for it write the same files. One
special token, <|endoftext|>, is BOS and EOS, as in GPT-2; in the text of a document it is plain characters.
"""

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from training.data.shards import sync_folder
from training.data.sources import Source

END_OF_TEXT = "<|endoftext|>"
MIN_VOCAB_SIZE = 257  # the 256 bytes and the special token


def cache_dir() -> Path:
    """Folder for trained tokenizers and prepared data: LOOPED_CACHE_DIR, or ~/.cache/modeling-looped."""
    return Path(os.environ.get("LOOPED_CACHE_DIR") or "~/.cache/modeling-looped").expanduser()


def train_tokenizer(documents: Iterable[str], vocab_size: int) -> PreTrainedTokenizerFast:
    """Byte-level BPE over the documents, with GPT-2's splitting of text into words.

    Args:
        documents: read once.
        vocab_size: upper bound of the vocabulary, special token included; little text gives fewer tokens.

    Raises:
        ValueError: vocab_size is below 257, or the documents hold no text.
    """
    check_vocab_size(vocab_size)
    num_documents = 0

    def count() -> Iterator[str]:
        nonlocal num_documents
        for text in documents:
            num_documents += 1
            yield text

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(count(), trainer)
    if num_documents == 0:
        raise ValueError(
            "no training documents to train the tokenizer on: add documents, or lower validation_fraction"
        )
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token=END_OF_TEXT, eos_token=END_OF_TEXT)


def check_vocab_size(vocab_size: int) -> None:
    """Raises ValueError unless vocab_size is an integer of at least 257."""
    if type(vocab_size) is not int or vocab_size < MIN_VOCAB_SIZE:
        raise ValueError(
            f"vocab_size={vocab_size!r} must be an integer of at least {MIN_VOCAB_SIZE}: 256 bytes and {END_OF_TEXT}"
        )


def cached_tokenizer(source: Source, vocab_size: int, max_chars: int) -> Path:
    """Folder of the tokenizer trained on the first `max_chars` characters of a source's training documents.

    Trains on the first call, finds the folder on later ones. The folder appears whole, by one rename; when two
    processes train at once, the second drops its own copy.
    """
    check_vocab_size(vocab_size)
    request = {"source": source.provenance(), "vocab_size": vocab_size, "max_chars": max_chars, "algorithm": "bpe-1"}
    key = hashlib.sha256(json.dumps(request, sort_keys=True).encode()).hexdigest()[:24]
    folder = cache_dir() / "tokenizers" / f"{source.name}-{vocab_size}-{key}"
    if not folder.exists():
        save_tokenizer(train_tokenizer(_first_chars(source.documents("train"), max_chars), vocab_size), folder)
    return folder


def _first_chars(documents: Iterable[str], max_chars: int) -> Iterator[str]:
    for text in documents:
        yield text[:max_chars]
        max_chars -= len(text)
        if max_chars <= 0:
            return


def save_tokenizer(tokenizer: PreTrainedTokenizerFast, folder: Path) -> None:
    """Write a tokenizer's folder whole or not at all; a folder that is there already is kept."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(prefix=folder.name + ".", suffix=".tmp", dir=folder.parent))
    try:
        tokenizer.save_pretrained(temporary)
        temporary.chmod(0o755)
        for path in temporary.iterdir():
            with open(path, "rb") as file:
                os.fsync(file.fileno())
        try:
            os.rename(temporary, folder)
        except OSError:
            if not folder.exists():
                raise
        sync_folder(folder.parent)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def load_tokenizer(name_or_path: str | Path) -> PreTrainedTokenizerFast:
    """Any fast tokenizer with a BOS or EOS token: a folder (offline) or a name on the Hub.

    A tokenizer that has EOS but no BOS (as GPT-2's successors often do) starts documents with EOS: see `bos_token_id`.

    Raises:
        ValueError: it cannot be loaded, is not a fast tokenizer, or has neither token.
    """
    try:
        tokenizer = AutoTokenizer.from_pretrained(str(name_or_path))
    except (OSError, ValueError) as error:
        raise ValueError(
            f"tokenizer {name_or_path} cannot be loaded: give a folder that holds tokenizer.json, or a name on the "
            f"Hub with a connection (HF_HUB_OFFLINE unset). {error}"
        ) from error
    if not tokenizer.is_fast:
        raise ValueError(f"tokenizer {name_or_path} is not a fast tokenizer (tokenizer.json); convert it first")
    bos_token_id(tokenizer)
    return tokenizer


def bos_token_id(tokenizer: PreTrainedTokenizerFast) -> int:
    """The id that starts every document: the tokenizer's BOS, else its EOS; ValueError if it has neither."""
    for token_id in (tokenizer.bos_token_id, tokenizer.eos_token_id):
        if token_id is not None:
            return token_id
    raise ValueError("the tokenizer has neither a BOS nor an EOS token to start documents with: set bos_token in it")


class DocumentEncoder:
    """Turns documents into ids with BOS first; special tokens written in the text stay plain characters.

    Encoding runs in parallel over the documents of a batch, in `tokenizers`' own threads.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerFast):
        self.bos_token_id = bos_token_id(tokenizer)
        # A copy: truncation, padding and special-token handling of the caller's tokenizer stay as they are.
        self._tokenizer = Tokenizer.from_str(tokenizer.backend_tokenizer.to_str())
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._tokenizer.encode_special_tokens = True
        self.vocab_size: int = max(self._tokenizer.get_vocab(with_added_tokens=True).values()) + 1

    def encode(self, texts: Sequence[str]) -> list[np.ndarray]:
        """One int64 array per text."""
        encodings: list[Any] = self._tokenizer.encode_batch_fast(texts, add_special_tokens=False)
        return [np.array([self.bos_token_id, *encoding.ids], dtype=np.int64) for encoding in encodings]
