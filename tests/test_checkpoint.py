"""Checkpoints are whole or absent: damage is named, a failed write leaves the earlier ones as they were."""

import resource

import pytest
import torch

from training.engine.checkpoint import (
    FILES,
    CheckpointError,
    check_run_dir,
    list_checkpoints,
    load_checkpoint,
    save_checkpoint,
)


def write(run_dir, config, step=3, keep_last=2, size=1000):
    weights = {"a.weight": torch.arange(size, dtype=torch.float32), "b": torch.tensor([2.0])}
    state = {"a.weight": {"momentum_buffer": torch.ones(size)}, "b": {"step": torch.tensor(7.0)}}
    return save_checkpoint(run_dir, step, config, weights, state, {"elapsed_seconds": 1.5}, keep_last)


def test_what_is_written_is_read(tmp_path, tiny_config):
    config = tiny_config(tie_core=False, num_loops=2, num_stored_cores=3)
    path = write(tmp_path, config)
    read_config, weights, state, trainer = load_checkpoint(path)
    assert read_config.to_dict() == config.to_dict()
    assert torch.equal(weights["a.weight"], torch.arange(1000, dtype=torch.float32))
    assert torch.equal(state["a.weight"]["momentum_buffer"], torch.ones(1000))
    assert state["b"]["step"].item() == 7.0
    assert trainer == {"step": 3, "elapsed_seconds": 1.5}


def test_only_the_newest_are_kept(tmp_path, tiny_config):
    for step in (1, 2, 10, 3):
        write(tmp_path, tiny_config(), step)
    assert [path.name for path in list_checkpoints(tmp_path)] == ["step-00000003", "step-00000010"]
    write(tmp_path, tiny_config(), 11, keep_last=None)
    assert len(list_checkpoints(tmp_path)) == 3


@pytest.mark.parametrize("name", [*FILES, "manifest.json"])
@pytest.mark.parametrize("damage", ["cut", "altered", "missing"])
def test_a_damaged_file_is_refused_by_name(tmp_path, tiny_config, name, damage):
    path = write(tmp_path, tiny_config())
    content = (path / name).read_bytes()
    if damage == "missing":
        (path / name).unlink()
    elif damage == "cut":
        (path / name).write_bytes(content[: len(content) // 2])
    else:
        altered = bytearray(content)
        altered[-20] ^= 1
        (path / name).write_bytes(bytes(altered))
    if name == "manifest.json" and damage == "altered":
        # a digit of a hash has changed: then the file that it belongs to is the one named
        name = FILES[-1]
    with pytest.raises(CheckpointError, match=name):
        load_checkpoint(path)


def test_a_disk_that_refuses_leaves_the_earlier_checkpoint(tmp_path, tiny_config):
    earlier = write(tmp_path, tiny_config(), step=1)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, hard))  # a write beyond it fails, as on a full disk
    try:
        with pytest.raises(CheckpointError, match="step 2 could not be written.*intact"):
            write(tmp_path, tiny_config(), step=2, size=1_000_000)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert list_checkpoints(tmp_path) == [earlier]
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == [earlier.name]
    load_checkpoint(earlier)


def test_a_run_dir_that_cannot_hold_the_run_is_refused_before_it_starts(tmp_path):
    with pytest.raises(CheckpointError, match="GB free"):
        check_run_dir(tmp_path, bytes_needed=10**18)
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="cannot be written"):
        check_run_dir(tmp_path / "file" / "run", bytes_needed=0)


def test_a_whole_checkpoint_is_not_written_over(tmp_path, tiny_config):
    # a kill while the same step is saved again must not cost the checkpoint that is there
    path = write(tmp_path, tiny_config(), step=5)
    before = {file.name: file.stat().st_mtime_ns for file in path.iterdir()}
    assert write(tmp_path, tiny_config(), step=5) == path
    assert {file.name: file.stat().st_mtime_ns for file in path.iterdir()} == before


def test_other_folders_beside_the_checkpoints_are_not_counted(tmp_path, tiny_config):
    path = write(tmp_path, tiny_config(), step=5)
    for name in ("step-backup", "step-00000005.bak"):
        (tmp_path / "checkpoints" / name).mkdir()
    assert list_checkpoints(tmp_path) == [path]
