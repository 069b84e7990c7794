"""Token pools: what is written comes back, damage is refused by file name, an interrupted writer goes on."""

import numpy as np
import pytest

from training.data.shards import PoolWriter, TokenPool, token_dtype

HEADER = {"source": "test"}


def random_documents(seed: int, num: int, vocab_size: int) -> list[np.ndarray]:
    rng = np.random.default_rng(seed)
    lengths = rng.integers(1, 40, size=num)
    return [np.concatenate([[0], rng.integers(1, vocab_size, size=length - 1)]) for length in lengths]


def writer(folder, vocab_size=1000, shard_tokens=300, header=HEADER) -> PoolWriter:
    return PoolWriter(folder, header, vocab_size=vocab_size, bos_token_id=0, shard_tokens=shard_tokens)


def write(folder, documents, **options) -> TokenPool:
    opened = writer(folder, **options)
    for index, document in enumerate(documents):
        opened.add(document, index + 1)
    return opened.finish(len(documents))


@pytest.mark.parametrize("vocab_size, itemsize", [(65536, 2), (65537, 4), (200_000, 4)])
def test_round_trip_in_the_smallest_dtype(tmp_path, vocab_size, itemsize):
    documents = random_documents(0, 100, vocab_size)
    documents[50][1:] = vocab_size - 1
    pool = write(tmp_path, documents, vocab_size=vocab_size)
    assert token_dtype(vocab_size).itemsize == itemsize
    assert sum(path.stat().st_size for path in tmp_path.glob("*.bin")) == itemsize * pool.num_tokens
    assert len(list(tmp_path.glob("*.bin"))) > 3
    assert (pool.num_documents, pool.num_tokens) == (100, sum(map(len, documents)))
    reopened = TokenPool(tmp_path, verify=True)
    for index, document in enumerate(documents):
        assert np.array_equal(reopened.document(index), document)
    with pytest.raises(IndexError, match="100"):
        reopened.document(100)


def test_gather_takes_spans_across_shards(tmp_path):
    documents = random_documents(1, 80, 1000)
    pool = write(tmp_path, documents)
    flat = np.concatenate(documents)
    rng = np.random.default_rng(2)
    index = rng.integers(0, 80, size=200)
    begin = np.array([rng.integers(0, len(documents[i])) for i in index])
    length = np.array([rng.integers(1, len(documents[i]) - b + 1) for i, b in zip(index, begin, strict=True)])
    start = pool.document_starts[index] + begin
    expected = np.concatenate([flat[s : s + n] for s, n in zip(start, length, strict=True)])
    gathered = pool.gather(start, length)
    assert gathered.dtype == np.int64 and np.array_equal(gathered, expected)


def test_cut_missing_and_altered_files_are_refused_by_name(tmp_path):
    for name in ("tokens-00001.bin", "documents-00001.npy"):
        folder = tmp_path / name
        write(folder, random_documents(3, 60, 1000))
        content = (folder / name).read_bytes()
        (folder / name).write_bytes(content[:-2])
        with pytest.raises(ValueError, match=f"{name}.*cut"):
            TokenPool(folder)
        altered = bytearray(content)
        altered[-1] ^= 1
        (folder / name).write_bytes(altered)
        with pytest.raises(ValueError, match=f"{name} was altered"):
            TokenPool(folder, verify=True)
        (folder / name).unlink()
        with pytest.raises(ValueError, match=f"{name} is missing"):
            TokenPool(folder)
    manifest = folder / "manifest.json"
    manifest.write_text(manifest.read_text()[:-20])
    with pytest.raises(ValueError, match="manifest.json was cut"):
        TokenPool(folder)
    with pytest.raises(FileNotFoundError, match="prepare the data first"):
        TokenPool(tmp_path / "nothing")


def test_writer_goes_on_behind_the_last_whole_shard(tmp_path):
    documents = random_documents(4, 100, 1000)
    straight = write(tmp_path / "straight", documents)
    broken = writer(tmp_path / "broken")
    for index in range(60):
        broken.add(documents[index], index + 1)
    del broken  # never finished: a shard lies half written under its temporary name
    assert list((tmp_path / "broken").glob("*.tmp"))
    resumed = writer(tmp_path / "broken")
    assert 0 < resumed.state < 60
    for index in range(resumed.state, 100):
        resumed.add(documents[index], index + 1)
    assert resumed.finish(100).sha256 == straight.sha256
    names = sorted(path.name for path in (tmp_path / "straight").iterdir())
    assert names == sorted(path.name for path in (tmp_path / "broken").iterdir())
    for name in names:
        assert (tmp_path / "straight" / name).read_bytes() == (tmp_path / "broken" / name).read_bytes()


def test_writer_refuses_a_folder_of_other_settings(tmp_path):
    begun = writer(tmp_path)
    for index, document in enumerate(random_documents(5, 60, 1000)):
        begun.add(document, index + 1)
    with pytest.raises(ValueError, match="other settings"):
        writer(tmp_path, header={"source": "another"})
    begun.finish(60)
    with pytest.raises(ValueError, match="finished pool"):
        writer(tmp_path)


def test_writer_refuses_wrong_documents(tmp_path):
    opened = writer(tmp_path)
    for document, message in (([], "BOS"), ([5, 6], "BOS"), ([0, 1000], "1000"), ([0, -1], "outside")):
        with pytest.raises(ValueError, match=message):
            opened.add(document, 0)
    with pytest.raises(ValueError, match="empty"):
        opened.finish(0)
