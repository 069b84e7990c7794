"""Bits per byte: exact bytes, windows that score every token once, loss by position and its fit."""

import json
import math

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from eval.bpb import curve, fit_position_curve, main, read_text, text_loss, windows
from eval.token_bytes import token_byte_lengths
from tests.core_helpers import VOCAB_SIZE, make_tokenizer

TEXT = "Say it again. First: river stone, dann noch einmal: Straße, naïve, 水, \U0001f600!\n" * 6


@pytest.fixture
def model(tiny_config, make_model):
    return make_model(tiny_config(vocab_size=VOCAB_SIZE, max_position_embeddings=128, num_loops=2))


def token_losses(model, ids):
    """Loss of every token of `ids` but the first, in one forward."""
    with torch.no_grad():
        logits = model(torch.tensor([ids])).logits[0, :-1]
    return torch.nn.functional.cross_entropy(logits, torch.tensor(ids[1:]), reduction="none").double()


def test_short_text_is_one_forward_after_a_bos(model):
    tokenizer = make_tokenizer()
    text = TEXT[:40]
    ids = [tokenizer.bos_token_id, *tokenizer(text)["input_ids"]]
    expected = token_losses(model, ids)
    loss = text_loss(model, tokenizer, text, window=100)
    assert loss.num_tokens == len(ids) - 1
    assert loss.nats_per_token == pytest.approx(expected.mean().item(), abs=1e-6)
    bits = expected.sum().item() / math.log(2) / len(text.encode())
    assert loss.bits_per_byte == pytest.approx(bits, abs=1e-6)
    positions, losses, counts = curve(loss)
    assert positions.tolist() == list(range(1, len(ids))) and set(counts) == {1}
    np.testing.assert_allclose(losses, expected.numpy(), atol=1e-5)


@pytest.mark.parametrize("window, stride", [(20, 10), (20, 20), (33, 1), (16, 5)])
def test_every_token_is_scored_once_in_its_window(model, window, stride):
    tokenizer = make_tokenizer()
    tokens = tokenizer(TEXT[:150])["input_ids"]
    total = token_losses(model, [tokenizer.bos_token_id, *tokens[:window]]).sum().item()
    scored = window
    while scored < len(tokens):
        end = min(len(tokens), scored + stride)
        losses = token_losses(model, [tokenizer.bos_token_id, *tokens[max(0, end - window) : end]])
        total += losses[-(end - scored) :].sum().item()
        scored = end
    loss = text_loss(model, tokenizer, TEXT[:150], window=window, stride=stride, tokens_per_batch=100)
    assert loss.nats_per_token == pytest.approx(total / len(tokens), abs=1e-6)
    assert sum(loss.position_count) == len(tokens)
    # BOS and window are all the model sees: the first position of the curve is the text's first token alone
    assert loss.position_count[0] == 1 + (stride == window) * ((len(tokens) - 1) // window)


def test_windows_cover_and_do_not_overlap():
    for num_tokens in (1, 7, 8, 9, 30, 31):
        cut = windows(num_tokens, 8, 3)
        assert [token for start, end, scored in cut for token in range(scored, end)] == list(range(num_tokens))
        assert all(end - start <= 8 and start <= scored < end for start, end, scored in cut)
    with pytest.raises(ValueError, match="stride must be between 1 and the window of 8"):
        windows(10, 8, 9)


def test_batch_size_changes_nothing(model):
    one = text_loss(model, make_tokenizer(), TEXT, window=30, tokens_per_batch=1)
    many = text_loss(model, make_tokenizer(), TEXT, window=30, tokens_per_batch=10**5)
    assert one.bits_per_byte == pytest.approx(many.bits_per_byte, abs=1e-7)
    assert one.position_count == many.position_count


def test_bytes_of_pieces_add_up_to_the_text():
    tokenizer = make_tokenizer()
    lengths = token_byte_lengths(tokenizer)
    for text in (TEXT, "水", "\U0001f600 x", " \n\t"):
        ids = tokenizer(text)["input_ids"]
        assert lengths[ids].sum() == len(text.encode())
    # a piece of a character decodes to U+FFFD, which is three bytes; it is one
    piece = tokenizer("水")["input_ids"]
    assert len(piece) == 3 and all(tokenizer.decode([i]) == "\ufffd" for i in piece)
    assert lengths[piece].tolist() == [1, 1, 1]
    assert lengths[tokenizer.bos_token_id] == 0


def test_bytes_of_a_sentencepiece_vocabulary():
    vocabulary = {"<unk>": 0, "<s>": 1, "<0xE6>": 2, "<0x0A>": 3, "\u2581the": 4, "\u2581": 5, "ß": 6}
    backend = Tokenizer(models.BPE(vocabulary, [], unk_token="<unk>", byte_fallback=True))
    backend.normalizer = normalizers.Replace(" ", "\u2581")
    backend.decoder = decoders.Sequence([decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", unk_token="<unk>")
    assert token_byte_lengths(tokenizer).tolist() == [0, 0, 1, 1, 4, 1, 2]


def test_bytes_of_a_wordpiece_vocabulary():
    backend = Tokenizer(models.WordPiece(vocab={"[UNK]": 0, "ab": 1, "##cd": 2}, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="[UNK]")
    assert token_byte_lengths(tokenizer).tolist() == [0, 2, 2]


def test_invalid_utf8_counts_as_the_bytes_it_is(model, tmp_path):
    (tmp_path / "text").write_bytes(b"river \xff\xfe stone \xe6\xb0")
    text, num_bytes, num_invalid = read_text(tmp_path / "text")
    assert text == "river \ufffd\ufffd stone \ufffd\ufffd" and (num_bytes, num_invalid) == (17, 4)
    loss = text_loss(model, make_tokenizer(), text, num_bytes, num_invalid, window=100)
    assert loss.bits_per_byte == pytest.approx(loss.nats_per_token * loss.num_tokens / math.log(2) / 17)
    assert loss.num_invalid_bytes == 4


def test_bad_arguments(model):
    with pytest.raises(ValueError, match="empty"):
        text_loss(model, make_tokenizer(), "")
    with pytest.raises(ValueError, match="window must be at most 127"):
        text_loss(model, make_tokenizer(), TEXT, window=128)


def test_fit_finds_the_curve_it_was_made_from():
    positions = np.arange(1, 500)
    for a, b, p in ((2.4, 4.0, 0.56), (4.0, 3.2, 0.47), (0.0, 8.0, 0.1)):
        found = fit_position_curve(positions, a + b * positions**-p, np.ones(len(positions)))
        assert found == pytest.approx((a, b, p), abs=1e-3)
    # positions that were never scored often weigh little
    losses = 2.4 + 4.0 * positions**-0.56
    losses[100:] += 5.0
    counts = np.where(positions > 100, 1e-9, 1.0)
    assert fit_position_curve(positions, losses, counts) == pytest.approx((2.4, 4.0, 0.56), abs=1e-2)
    with pytest.raises(ValueError, match="at least 4 positions"):
        fit_position_curve(positions[:3], losses[:3], counts[:3])


def test_command(model, tmp_path, capsys):
    model.save_pretrained(tmp_path / "model")
    make_tokenizer().save_pretrained(tmp_path / "model")
    (tmp_path / "a.txt").write_text(TEXT, encoding="utf-8")
    (tmp_path / "b.txt").write_bytes(b"river \xff")
    files = [str(tmp_path / name) for name in ("a.txt", "b.txt")]
    outputs = ["--output", str(tmp_path / "bpb.json"), "--plot", str(tmp_path / "curve.png")]
    assert main([str(tmp_path / "model"), *files, "--window", "50", "--num-loops", "1", *outputs]) == 0
    printed = capsys.readouterr().out
    assert "bits per byte" in printed and "(1 not UTF-8)" in printed and "by position: L(T)" in printed
    texts = json.loads((tmp_path / "bpb.json").read_text())["texts"]
    expected = text_loss(model, make_tokenizer(), TEXT, window=50, num_loops=1)
    assert texts[files[0]]["bits_per_byte"] == pytest.approx(expected.bits_per_byte, abs=1e-7)
    assert (tmp_path / "curve.png").exists()
    assert main([str(tmp_path / "model"), str(tmp_path / "none.txt")]) == 1
