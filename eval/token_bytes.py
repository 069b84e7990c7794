"""How many bytes each token stands for: what bits per byte divide by.

Counted from the vocabulary's own spelling of a piece, not by decoding it: a piece may hold part of a character, which
decodes to U+FFFD. Special tokens stand for no text: 0 bytes.
"""

import json
import re

import numpy as np
from transformers import PreTrainedTokenizerBase

BYTE_PIECE = re.compile(r"^<0x[0-9A-Fa-f]{2}>$")


def token_byte_lengths(tokenizer: PreTrainedTokenizerBase) -> np.ndarray:
    """int64 array (vocabulary,) of bytes per token.

    Byte-level vocabularies (GPT-2's) spell each byte as one character; Metaspace ones (SentencePiece) write a space as
    U+2581 and single bytes as <0x0A>; others spell text as it is. Raises ValueError for a tokenizer without the fast
    backend that says which.
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        raise ValueError(f"{type(tokenizer).__name__} is no fast tokenizer: its spelling of bytes is not known.")
    description = json.loads(backend.to_str())
    kept = [description.get(part) for part in ("pre_tokenizer", "decoder", "normalizer")]
    parts = json.dumps(kept, ensure_ascii=False)
    byte_level = '"ByteLevel"' in parts
    spaces = "\u2581" in parts
    vocabulary = tokenizer.get_vocab()
    added = tokenizer.added_tokens_decoder
    special = set(tokenizer.all_special_ids) | {i for i, token in added.items() if token.special}
    lengths = np.zeros(max(vocabulary.values()) + 1, dtype=np.int64)
    for piece, index in vocabulary.items():
        if index in special:
            continue
        if index in added:  # added tokens are spelled as text in every vocabulary
            lengths[index] = len(piece.encode())
        elif byte_level:
            lengths[index] = len(piece)
        elif BYTE_PIECE.match(piece):
            lengths[index] = 1
        else:
            text = piece.replace("\u2581", " ") if spaces else piece.removeprefix(_continuing(description))
            lengths[index] = len(text.encode())
    return lengths


def _continuing(description: dict) -> str:
    """What a WordPiece vocabulary writes before a piece that continues a word."""
    return description["model"].get("continuing_subword_prefix") or ""
