"""Tokenizers: byte-level round trip, determinism, BOS, special tokens in text, and GPT-2's published ids."""

import pytest

from training.data import tokenizer as module
from training.data.sources import TextSource
from training.data.tokenizer import (
    DocumentEncoder,
    bos_token_id,
    cached_tokenizer,
    load_tokenizer,
    save_tokenizer,
    train_tokenizer,
)

TEXTS = ["def f(x):\n    return x + 1\n" * 20, "The quick brown fox jumps over the lazy dog. " * 20]
ODD_TEXTS = ["", "\x00\r\n\t  ", "naïve café — 東京 🙂", "<|endoftext|>", "a<|endoftext|>b\n\n\n  c"]


@pytest.fixture(scope="module")
def trained():
    return train_tokenizer(TEXTS, 300)


def test_any_text_comes_back_and_starts_with_bos(trained):
    encoder = DocumentEncoder(trained)
    for text, ids in zip(TEXTS + ODD_TEXTS, encoder.encode(TEXTS + ODD_TEXTS), strict=True):
        assert ids[0] == trained.bos_token_id == trained.eos_token_id
        assert trained.bos_token_id not in ids[1:]
        assert trained.decode(ids[1:].tolist(), clean_up_tokenization_spaces=False) == text
    assert encoder.vocab_size == len(trained) == 300


def test_training_is_deterministic_and_survives_the_disk(trained, tmp_path):
    again = train_tokenizer(iter(TEXTS), 300)
    save_tokenizer(again, tmp_path / "tokenizer")
    loaded = load_tokenizer(tmp_path / "tokenizer")
    assert loaded.backend_tokenizer.to_str() == trained.backend_tokenizer.to_str()
    assert loaded.bos_token_id == trained.bos_token_id
    assert train_tokenizer(TEXTS, 301).get_vocab() != trained.get_vocab()


@pytest.mark.parametrize("vocab_size", [256, 0, -1, 300.0, "300", True])
def test_vocab_size_is_checked(vocab_size):
    with pytest.raises(ValueError, match="vocab_size.*257"):
        train_tokenizer(TEXTS, vocab_size)


def test_smallest_vocabulary_is_the_bytes(tmp_path):
    smallest = train_tokenizer(TEXTS, 257)
    text = "any text, é"
    assert len(smallest) == 257
    assert len(DocumentEncoder(smallest).encode([text])[0]) == 1 + len(text.encode())
    with pytest.raises(ValueError, match="no training documents"):
        train_tokenizer([], 300)


def test_saving_keeps_what_another_process_saved_first(trained, tmp_path):
    folder = tmp_path / "tokenizer"
    save_tokenizer(trained, folder)
    first = (folder / "tokenizer.json").read_bytes()
    save_tokenizer(train_tokenizer(TEXTS, 280), folder)
    assert (folder / "tokenizer.json").read_bytes() == first
    assert [path.name for path in tmp_path.iterdir()] == ["tokenizer"]


def test_cache_is_keyed_by_text_and_vocabulary(tmp_path, monkeypatch):
    monkeypatch.setenv("LOOPED_CACHE_DIR", str(tmp_path / "cache"))
    path = tmp_path / "corpus.txt"
    path.write_text(TEXTS[0])
    folder = cached_tokenizer(TextSource(paths=str(path), validation_fraction=0), 300, 1000)
    assert folder.is_relative_to(tmp_path / "cache")
    monkeypatch.setattr(module, "train_tokenizer", lambda *_: pytest.fail("trained again"))
    assert cached_tokenizer(TextSource(paths=str(path), validation_fraction=0), 300, 1000) == folder
    monkeypatch.undo()
    monkeypatch.setenv("LOOPED_CACHE_DIR", str(tmp_path / "cache"))
    assert cached_tokenizer(TextSource(paths=str(path), validation_fraction=0), 299, 1000) != folder
    path.write_text(TEXTS[1])
    assert cached_tokenizer(TextSource(paths=str(path), validation_fraction=0), 300, 1000) != folder


def test_loading_says_what_is_wrong(trained, tmp_path):
    with pytest.raises(ValueError, match="tokenizer.json"):
        load_tokenizer(tmp_path / "missing")
    bare = train_tokenizer(TEXTS, 300)
    bare.bos_token = bare.eos_token = None
    save_tokenizer(bare, tmp_path / "bare")
    with pytest.raises(ValueError, match="neither a BOS nor an EOS"):
        load_tokenizer(tmp_path / "bare")
    bare.eos_token = "<|endoftext|>"
    assert bos_token_id(bare) == trained.bos_token_id


def test_gpt2_ids(reference_dir):
    encoder = DocumentEncoder(load_tokenizer(reference_dir / "data" / "gpt2-tokenizer"))
    # 15496 995 is GPT-2's published example; the special token's text must not become id 50256.
    hello, special = encoder.encode(["Hello world", "<|endoftext|>"])
    assert hello.tolist() == [50256, 15496, 995]
    assert special.tolist()[0] == 50256 and 50256 not in special.tolist()[1:]
    assert encoder.vocab_size == 50257
