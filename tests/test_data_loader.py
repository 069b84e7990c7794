"""Window loader: identical to the paper's, and a function of the step alone; validation counts each row once."""

import datetime
import json
import os
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from training.data.loader import IGNORED_TARGET, ValidationLoader, WindowLoader
from training.data.shards import PoolWriter, TokenPool

ASSETS = Path(__file__).parent / "assets" / "pipeline"
CASES = json.loads((ASSETS / "pipeline.json").read_text())
VOCAB_SIZE = 97


def write_pool(folder: Path, documents: list, shard_tokens: int = 500) -> TokenPool:
    writer = PoolWriter(folder, {}, vocab_size=VOCAB_SIZE, bos_token_id=96, shard_tokens=shard_tokens)
    for document in documents:
        writer.add(document, None)
    return writer.finish(None)


def random_pool(folder: Path, num_tokens: int, seed: int = 0) -> TokenPool:
    """Documents of 1 to 60 tokens that together have exactly num_tokens."""
    rng = np.random.default_rng(seed)
    documents = []
    while num_tokens:
        length = min(int(rng.integers(1, 61)), num_tokens)
        documents.append([96, *rng.integers(0, 96, size=length - 1)])
        num_tokens -= length
    return write_pool(folder, documents)


@pytest.fixture(scope="module")
def fixture_pools(tmp_path_factory):
    """The paper's pools, through our own files, in several shards."""
    tensors = load_file(ASSETS / "windows.safetensors")
    folder = tmp_path_factory.mktemp("pools")
    pools = {}
    for prefix, name in (("", "train"), ("val_", "val")):
        tokens, starts = tensors[f"{prefix}tokens"].numpy(), tensors[f"{prefix}doc_starts"].numpy()
        pools[name] = write_pool(folder / name, np.split(tokens, starts[1:]))
        assert np.array_equal(pools[name].document_starts, starts)
    assert len(pools["train"].manifest["shards"]) > 5
    return tensors, pools


@pytest.mark.parametrize("name", [name for name in CASES if name != "val"])
def test_training_windows_are_the_papers(fixture_pools, name):
    tensors, pools = fixture_pools
    case = CASES[name]
    world_size, rows = case.get("world_size", 1), case["B"]
    loader = WindowLoader(
        pools["train"],
        case["T"],
        global_batch_windows=world_size * rows,
        seed=case["seed"],
        token_limit=case["token_limit"],
        shuffle_documents=case["shuffle_docs"],
        shuffle_windows=case["shuffle_seqs"],
        window_multiple=rows * case["token_limit_cutoff_devices"],
    )
    assert loader.steps_per_epoch == case["steps_per_epoch"]
    assert loader.num_windows == case["packed_sequences"]
    assert loader.num_tokens == case["loaded_tokens"]
    epochs = tensors[f"{name}.epoch"].tolist()
    assert set(epochs) == {1, 2, 3}
    for step, epoch in enumerate(epochs):
        batch = loader.batch(step, case.get("rank", 0), world_size)
        assert torch.equal(batch.input_ids, tensors[f"{name}.x"][step].long())
        assert torch.equal(batch.targets, tensors[f"{name}.y"][step].long())
        assert batch.input_ids.dtype == batch.targets.dtype == torch.int64
        assert batch.epoch == loader.epoch_of(step) == epoch


def test_validation_windows_are_the_papers(fixture_pools):
    tensors, pools = fixture_pools
    case = CASES["val"]
    loader = ValidationLoader(
        pools["val"], case["T"], case["token_limit"], window_multiple=case["B"] * case["token_limit_cutoff_devices"]
    )
    assert loader.num_windows == case["packed_sequences"]
    assert loader.num_targets == case["packed_target_tokens"]
    batches = list(loader.batches(batch_windows=case["B"]))
    assert len(batches) == case["steps_per_epoch"]
    # The fixture goes round twice; the second time must be equal to the first.
    for index, (x, y) in enumerate(zip(tensors["val.x"], tensors["val.y"], strict=True)):
        batch = batches[index % len(batches)]
        assert torch.equal(batch.input_ids, x.long()) and torch.equal(batch.targets, y.long())


def step_rows(loader: WindowLoader, step: int, world_size: int = 1, micro_batch: int | None = None) -> torch.Tensor:
    """All windows of a step as dealt to every rank and micro-step, in dealing order."""
    return torch.cat(
        [
            torch.cat([batch.input_ids, batch.targets[:, -1:]], dim=1)
            for micro_step in range(loader.num_micro_steps(world_size, micro_batch))
            for rank in range(world_size)
            for batch in [loader.batch(step, rank, world_size, micro_batch, micro_step)]
        ]
    )


@pytest.fixture(scope="module")
def small_pool(tmp_path_factory):
    return random_pool(tmp_path_factory.mktemp("small"), 17 * 43 + 5)


def test_every_way_of_dealing_reads_the_same_rows(small_pool):
    """B79: ranks are disjoint and complete; processes and accumulation do not change a step."""
    loader = WindowLoader(small_pool, 16, global_batch_windows=8, seed=3)
    for step in (0, 4, 5, 13):
        rows = step_rows(loader, step)
        for world_size, micro_batch in ((1, 1), (1, 2), (2, None), (2, 2), (2, 4), (4, 1), (4, 2), (8, 1)):
            assert torch.equal(step_rows(loader, step, world_size, micro_batch), rows)
        positions = np.concatenate([loader.batch(step, rank, 2).windows for rank in range(2)])
        assert np.array_equal(positions, loader.step_windows(step)) and len(set(positions.tolist())) == 8


def test_position_depends_on_the_step_alone(small_pool):
    straight = WindowLoader(small_pool, 16, global_batch_windows=8, seed=3)
    expected = [step_rows(straight, step) for step in range(12)]
    for step in (11, 0, 7, 5, 4):
        resumed = WindowLoader(TokenPool(small_pool.folder), 16, global_batch_windows=8, seed=3)
        assert resumed.identity() == straight.identity()
        assert torch.equal(step_rows(resumed, step, world_size=4), expected[step])
        assert torch.equal(step_rows(straight, step, world_size=2, micro_batch=1), expected[step])
    other = WindowLoader(small_pool, 16, global_batch_windows=8, seed=4)
    assert other.identity() != straight.identity()
    assert not torch.equal(step_rows(other, 0), expected[0])


def test_every_epoch_has_all_rows_also_after_a_resume(tmp_path):
    """B77: stopped in epoch 1 of 3 and resumed, epoch 2 and 3 hold every row once."""
    pool = write_pool(tmp_path, [[96, *([index] * 16)] for index in range(40)])
    steps_per_epoch = 5
    resumed = WindowLoader(pool, 16, global_batch_windows=8, seed=0)
    assert resumed.steps_per_epoch == steps_per_epoch
    rows = [step_rows(resumed, step)[:, 1].tolist() for step in range(2, 3 * steps_per_epoch)]
    orders = []
    for epoch in (2, 3):
        first = (epoch - 1) * steps_per_epoch - 2
        orders.append(sum(rows[first : first + steps_per_epoch], []))
        assert sorted(orders[-1]) == list(range(40))
        assert resumed.epoch_of(first + 2) == epoch
    assert orders[0] != orders[1]


def test_windows_join_the_documents_without_gap(small_pool):
    loader = WindowLoader(small_pool, 16, 1, seed=0, shuffle_documents=False, shuffle_windows=False)
    flat = np.concatenate([small_pool.document(i) for i in range(small_pool.num_documents)])
    rows = torch.cat([step_rows(loader, step) for step in range(loader.steps_per_epoch)])
    assert rows.shape == (43, 17)
    assert np.array_equal(rows.flatten().numpy(), flat[: 43 * 17])


def test_global_random_state_is_left_alone(small_pool):
    """B75: fetching batches draws nothing from torch's or numpy's global generators."""
    torch.manual_seed(5)
    np.random.seed(5)
    before, before_numpy = torch.get_rng_state(), np.random.get_state()[1].copy()
    loader = WindowLoader(small_pool, 16, 8, seed=1)
    loader.batch(0), loader.batch(7), list(ValidationLoader(small_pool, 16).batches())
    assert torch.equal(torch.get_rng_state(), before) and np.array_equal(np.random.get_state()[1], before_numpy)


def test_sizes_that_do_not_fit_are_refused(small_pool):
    with pytest.raises(ValueError, match="43 windows.*one step needs 64"):
        WindowLoader(small_pool, 16, 64, seed=0)
    with pytest.raises(ValueError, match="window_multiple=12.*global_batch_windows=8"):
        WindowLoader(small_pool, 16, 8, seed=0, window_multiple=12)
    with pytest.raises(ValueError, match="sequence_length=0"):
        WindowLoader(small_pool, 0, 8, seed=0)
    loader = WindowLoader(small_pool, 16, 8, seed=0)
    with pytest.raises(ValueError, match=r"world_size \* micro_batch = 3 \* 1"):
        loader.batch(0, 0, 3)
    with pytest.raises(ValueError, match="rank=2"):
        loader.batch(0, 2, 2)
    with pytest.raises(ValueError, match="micro_step=2"):
        loader.batch(0, 0, 2, 2, micro_step=2)
    with pytest.raises(ValueError, match="step=-1"):
        loader.batch(-1)
    with pytest.raises(ValueError, match="no validation window"):
        ValidationLoader(small_pool, 1000)


def bigram_loss_sum(batch) -> torch.Tensor:
    """A fixed model: the next token's logits are a row of a random table."""
    table = torch.randn(VOCAB_SIZE, VOCAB_SIZE, generator=torch.Generator().manual_seed(0))
    logits = table[batch.input_ids].flatten(0, 1)
    return torch.nn.functional.cross_entropy(
        logits, batch.targets.flatten(), ignore_index=IGNORED_TARGET, reduction="sum"
    )


def evaluate_on_a_rank(rank: int, folder: Path) -> None:
    torch.distributed.init_process_group(
        "gloo",
        init_method=f"file://{folder}/rendezvous",
        rank=rank,
        world_size=2,
        timeout=datetime.timedelta(seconds=60),
    )
    loader = ValidationLoader(TokenPool(folder / "pool"), 16)
    windows, num_batches = [], 0
    for batch in loader.batches(rank, 2, 2):
        num_batches += 1
        # Sharded models communicate inside the forward: a rank with fewer batches would leave the other hanging.
        torch.distributed.all_reduce(torch.zeros(1))
        windows += batch.windows[(batch.targets != IGNORED_TARGET).any(dim=1).numpy()].tolist()
    mean = loader.mean_loss(bigram_loss_sum, rank, 2, 2)
    result = {"num_batches": num_batches, "windows": windows, "mean": mean}
    (folder / f"rank{rank}.json").write_text(json.dumps(result))
    torch.distributed.barrier()
    # gloo's threads can abort at interpreter exit, after all work is done
    os._exit(0)


def test_two_ranks_score_each_validation_row_once(tmp_path):
    """B81 and B83: 7 rows, 2 ranks, 2 rows a batch: as many batches on both, no row twice, the mean of one rank."""
    pool = random_pool(tmp_path / "pool", 17 * 7 + 3, seed=2)
    loader = ValidationLoader(pool, 16)
    flat = torch.from_numpy(np.concatenate([pool.document(i) for i in range(pool.num_documents)]).astype(np.int64))
    rows = flat[: 7 * 17].view(7, 17)
    table = torch.randn(VOCAB_SIZE, VOCAB_SIZE, generator=torch.Generator().manual_seed(0))
    expected = torch.nn.functional.cross_entropy(table[rows[:, :-1]].flatten(0, 1), rows[:, 1:].flatten()).item()
    for batch_windows in (1, 2, 7, 16):
        assert loader.mean_loss(bigram_loss_sum, batch_windows=batch_windows) == pytest.approx(expected, abs=1e-6)
    torch.multiprocessing.spawn(evaluate_on_a_rank, args=(tmp_path,), nprocs=2)
    ranks = [json.loads((tmp_path / f"rank{rank}.json").read_text()) for rank in range(2)]
    assert [rank["num_batches"] for rank in ranks] == [2, 2]
    assert [len(rank["windows"]) for rank in ranks] == [4, 3]
    assert sorted(ranks[0]["windows"] + ranks[1]["windows"]) == list(range(7))
    for rank in ranks:
        assert rank["mean"] == pytest.approx(expected, abs=1e-6)
