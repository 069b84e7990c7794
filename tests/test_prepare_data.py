"""Preparation: the command a user types, killed at every point and resumed, raced, and refused with a message."""

import hashlib
import os
import subprocess
import sys
import sysconfig
from pathlib import Path

import numpy as np
import pytest
import torch
from huggingface_hub.constants import HF_HUB_OFFLINE

from training.data.loader import ValidationLoader, WindowLoader
from training.data.preparation import open_prepared, prepare
from training.data.shards import TokenPool
from training.data.sources import FineWebSource, TextSource
from training.data.tokenizer import load_tokenizer
from training.prepare_data import main

from .test_data_sources import fineweb_rows

ROOT = Path(__file__).parents[1]
MODULES = ("argparse", "ast", "bisect", "calendar", "csv", "heapq", "inspect", "pprint", "shlex", "textwrap")


@pytest.fixture(scope="module")
def corpus(tmp_path_factory) -> Path:
    """Ten modules of the standard library as text files."""
    folder = tmp_path_factory.mktemp("corpus")
    for name in MODULES:
        text = Path(sysconfig.get_paths()["stdlib"], f"{name}.py").read_text(encoding="utf-8")
        (folder / f"{name}.txt").write_text(text[:20000], encoding="utf-8")
    return folder


@pytest.fixture
def cache(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("LOOPED_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache"


def options(corpus: Path, out: Path) -> dict:
    return {
        "source": "text",
        "paths": str(corpus),
        "max_document_chars": 2000,
        "validation_fraction": 0.3,
        "vocab_size": 300,
        "shard_tokens": 20000,
        "out": str(out),
    }


def words(**given) -> list[str]:
    return [f"{name}={value}" for name, value in given.items()]


def run(*arguments: str, **environment: str) -> str:
    """Run Python from the root, as a user does; its standard output."""
    result = subprocess.run(
        [sys.executable, *arguments],
        cwd=ROOT,
        env=os.environ | {"HF_HUB_OFFLINE": "1"} | environment,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


def contents(folder: Path) -> dict[str, str]:
    """SHA-256 by name of everything below a folder, the lock aside."""
    return {
        path.relative_to(folder).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.name != "prepare.lock"
    }


def test_pools_hold_every_document_once(corpus, cache, tmp_path):
    data = prepare(**options(corpus, tmp_path / "out"), progress=False)
    tokenizer = load_tokenizer(data.tokenizer_folder)
    source = TextSource(paths=str(corpus), max_document_chars=2000, validation_fraction=0.3)
    for split, pool in (("train", data.train), ("validation", data.validation)):
        documents = list(source.documents(split))
        assert pool.num_documents == len(documents) > 10
        for index, text in enumerate(documents):
            ids = pool.document(index)
            assert ids[0] == tokenizer.bos_token_id
            assert tokenizer.decode(ids[1:].tolist(), clean_up_tokenization_spaces=False) == text
    assert len(data.train.manifest["shards"]) >= 2
    assert data.train.manifest["header"]["source"]["sha256"] == source.provenance()["sha256"]
    assert WindowLoader(data.train, 128, 4, seed=0).batch(0).input_ids.shape == (4, 128)
    assert ValidationLoader(data.validation, 128).num_windows == data.validation.num_tokens // 129


# Children are forks of one process that has imported everything, so that each costs only its own work.
KILLED = """
import os, signal, sys
from training.prepare_data import main

def run_killed(arguments, number):
    '''Run the command in a child that is killed before its rename number `number`; whether it came to that.'''
    child = os.fork()
    if child == 0:
        count = 0
        def killing(rename):
            def call(*names, **options):
                nonlocal count
                count += 1
                if count == number:
                    os.kill(os.getpid(), signal.SIGKILL)
                return rename(*names, **options)
            return call
        os.replace, os.rename = killing(os.replace), killing(os.rename)
        main(arguments)
        os._exit(0)
    status = os.waitpid(child, 0)[1]
    assert status in (0, signal.SIGKILL), status
    return status == signal.SIGKILL

out, num_renames, *arguments = sys.argv[1:]
for number in range(1, int(num_renames) + 1):
    assert run_killed([*arguments, f"out={out}/{number}"], number), number
    assert not run_killed([*arguments, f"out={out}/{number}"], 0), number
num_runs = 1
while run_killed([*arguments, f"out={out}/again"], 4):
    num_runs += 1
    assert num_runs < 100, "it does not get further"
os.write(1, str(num_runs).encode())
os._exit(0)
"""

RACED = """
import os, sys
from training.prepare_data import main

children = []
for out, parallelism in zip(sys.argv[1:4], ("true", "true", "false")):
    if (child := os.fork()) == 0:
        os.environ["TOKENIZERS_PARALLELISM"] = parallelism
        main([*sys.argv[4:], f"out={out}"])
        os._exit(0)
    children.append(child)
statuses = [os.waitpid(child, 0)[1] for child in children]
assert statuses == [0, 0, 0], statuses
os._exit(0)
"""


def test_a_killed_preparation_ends_in_the_same_bytes(corpus, cache, tmp_path):
    """kill -9 before each rename there is, then the same command again; and killed over and over, one shard a run."""
    arguments = {**options(corpus, tmp_path / "straight"), "max_documents": 50, "shard_tokens": 15000}
    run("-m", "training.prepare_data", *words(**arguments))
    straight = contents(tmp_path / "straight")
    num_shards = sum(name.endswith(".bin") for name in straight)
    assert num_shards >= 3
    # plan, tokenizer folder, three files a shard, two manifests: every rename of a preparation
    num_renames = 1 + 1 + 3 * num_shards + 2
    del arguments["out"]
    num_runs = run("-c", KILLED, str(tmp_path / "killed"), str(num_renames), *words(**arguments)).split()[-1]
    assert int(num_runs) >= num_shards
    for name in [*range(1, num_renames + 1), "again"]:
        assert contents(tmp_path / "killed" / str(name)) == straight, name


def test_processes_that_race_end_in_the_same_files(corpus, cache, tmp_path):
    """Three at once with an empty cache: two on one folder, one elsewhere with another number of threads."""
    arguments = options(corpus, tmp_path)
    del arguments["out"]
    folders = [tmp_path / name for name in ("one", "one", "two")]
    run("-c", RACED, *map(str, folders), *words(**arguments))
    assert contents(tmp_path / "one") == contents(tmp_path / "two")
    TokenPool(tmp_path / "one" / "train", verify=True)
    assert len(list((cache / "tokenizers").iterdir())) == 1


def test_second_call_opens_what_is_there(corpus, cache, tmp_path, monkeypatch):
    given = options(corpus, tmp_path / "out")
    first = prepare(**given, progress=False)
    before = contents(tmp_path / "out")
    monkeypatch.setattr("training.data.preparation.DocumentEncoder", lambda *_: pytest.fail("encoded again"))
    again = prepare(**given, progress=False, verify=True)
    assert again.train.sha256 == first.train.sha256 and contents(tmp_path / "out") == before
    assert open_prepared(tmp_path / "out").validation.sha256 == first.validation.sha256
    with pytest.raises(ValueError, match="vocab_size: 300 there, 301 now"):
        prepare(**given | {"vocab_size": 301}, progress=False)
    tokenizer = tmp_path / "out" / "tokenizer" / "tokenizer.json"
    tokenizer.write_text(tokenizer.read_text() + "\n")
    with pytest.raises(ValueError, match="tokenizer.json is not the tokenizer"):
        open_prepared(tmp_path / "out")


def test_a_failed_first_try_does_not_block_the_folder(corpus, cache, tmp_path):
    given = options(corpus, tmp_path / "out")
    with pytest.raises(ValueError, match="fell into validation"):
        prepare(**given | {"validation_fraction": 1e-9, "vocab_size": 260}, progress=False)
    tokenizer = load_tokenizer(prepare(**given, progress=False).tokenizer_folder)
    assert len(tokenizer) == given["vocab_size"]


def test_default_folder_is_named_after_its_contents(corpus, cache, tmp_path):
    given = options(corpus, tmp_path)
    del given["out"]
    first = prepare(**given, progress=False)
    assert first.folder.is_relative_to(cache) and prepare(**given, progress=False).folder == first.folder
    assert prepare(**given | {"validation_tokens": 5000}, progress=False).folder != first.folder


@pytest.mark.parametrize("in_cache", [False, True])
def test_a_ladder_shares_the_data_of_its_largest_run(corpus, cache, tmp_path, in_cache):
    given = options(corpus, tmp_path / "shared")
    alone = prepare(**given | {"train_tokens": 20000, "out": str(tmp_path / "alone")}, progress=False)
    if in_cache:
        del given["out"]
    large = prepare(**given, train_tokens=50000, progress=False)
    small = prepare(**given, train_tokens=20000, progress=False)
    assert small.folder == large.folder and small.train.num_tokens >= 50000 > alone.train.num_tokens
    for step in (0, 3):
        shared, own = (WindowLoader(data.train, 128, 8, 0, token_limit=20000).batch(step) for data in (small, alone))
        assert torch.equal(shared.input_ids, own.input_ids)
    if in_cache:
        everything = prepare(**given, train_tokens=10**9, progress=False)
        assert everything.folder != large.folder
        assert prepare(**given, train_tokens=10**8, progress=False).folder == everything.folder
        assert prepare(**given, progress=False).folder == everything.folder
        assert prepare(**given, train_tokens=20000, progress=False).folder == large.folder
    else:
        with pytest.raises(ValueError, match="train_tokens: 50000 there, 1000000000 now"):
            prepare(**given, train_tokens=10**9, progress=False)


def test_token_limits_stop_at_a_document(corpus, cache, tmp_path):
    full = prepare(**options(corpus, tmp_path / "full"), progress=False)
    given = options(corpus, tmp_path / "limited") | {"train_tokens": 2.5e4, "validation_tokens": 3000}
    limited = prepare(**given, progress=False)
    for pool, whole, limit in ((limited.train, full.train, 25000), (limited.validation, full.validation, 3000)):
        last = pool.num_documents - 1
        assert pool.num_tokens - len(pool.document(last)) < limit <= pool.num_tokens
        assert np.array_equal(pool.document(last), whole.document(last))


def test_training_leaves_out_what_begins_like_validation(cache, tmp_path):
    """The paper's rule on its FineWeb layout: the first 64 tokens, or a whole shorter text, occur in validation."""
    start = "".join(f"{index % 10}" for index in range(64))  # 64 tokens of one byte each under a 257-token vocabulary
    texts = {
        "sample-10BT": [start + "validation", "short", start[:40]],
        "sample-100BT": [
            start + "training",
            start[:63] + "z",
            "short",
            "short one",
            *(start[:n] for n in (39, 40, 41)),
        ],
    }
    readme = "---\nconfigs:\n"
    dataset = tmp_path / "dataset"
    for config, rows in texts.items():
        (dataset / config).mkdir(parents=True)
        fineweb_rows(rows).to_parquet(dataset / config / "0.parquet")
        readme += f"- config_name: {config}\n  data_files:\n  - split: train\n    path: {config}/*\n"
    (dataset / "README.md").write_text(readme + "---\n")
    common = {"source": "fineweb", "dataset": str(dataset), "revision": None, "vocab_size": 257, "progress": False}
    data = prepare(**common, out=str(tmp_path / "out"))
    tokenizer = load_tokenizer(data.tokenizer_folder)
    kept = [tokenizer.decode(data.train.document(i)[1:].tolist()) for i in range(data.train.num_documents)]
    assert kept == [start[:63] + "z", "short one", start[:39], start[:41]]
    assert data.train.manifest["state"]["num_excluded"] == 3
    assert data.validation.num_documents == 3
    everything = prepare(**common, out=str(tmp_path / "all"), exclude_validation=False)
    assert everything.train.num_documents == 7
    assert FineWebSource().exclude_validation


def test_gpt2_tokenizer_folder(corpus, cache, tmp_path, reference_dir):
    folder = reference_dir / "data" / "gpt2-tokenizer"
    data = prepare(source="text", paths=str(corpus), tokenizer=str(folder), out=str(tmp_path / "out"), progress=False)
    assert (data.train.vocab_size, data.train.bos_token_id) == (50257, 50256)
    text = next(TextSource(paths=str(corpus)).documents())
    expected = load_tokenizer(folder)(text, add_special_tokens=False)["input_ids"]
    assert data.train.document(0).tolist() == [50256, *expected]


@pytest.mark.parametrize(
    "arguments, message",
    [
        ({"source": "stdlb"}, "source='stdlb' must be one of stdlib, text"),
        ({"vocab_sizes": 300}, "unknown option vocab_sizes: did you mean vocab_size"),
        ({"source": "stdlib", "paths": "x"}, "unknown option paths"),
        ({"source": "text"}, "source=text needs paths="),
        ({"vocab_size": 100}, "vocab_size=100"),
        ({"train_tokens": 0}, "train_tokens=0 must be a positive integer"),
        ({"shard_tokens": None}, "shard_tokens=None must be"),
        ({"tokenizer": "/nowhere/at/all", "max_documents": 3}, "tokenizer /nowhere/at/all cannot be loaded"),
        ({"max_documents": 3, "validation_fraction": 1e-9}, "none of the 3 documents fell into validation"),
        ({"max_documents": 3, "validation_fraction": 1 - 1e-9}, "no training documents.*lower validation_fraction"),
    ],
)
def test_wrong_options_are_named(cache, tmp_path, arguments, message):
    with pytest.raises(ValueError, match=message):
        prepare(**{"out": str(tmp_path / "out"), "vocab_size": 300, "progress": False} | arguments)


def test_without_validation(corpus, cache, tmp_path):
    data = prepare(**options(corpus, tmp_path / "out") | {"validation_fraction": 0}, progress=False)
    assert data.validation is None
    source = TextSource(paths=str(corpus), max_document_chars=2000, validation_fraction=0)
    assert data.train.num_documents == len(list(source.documents()))


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["source=fineweb"], "cannot reach the Hub for dataset HuggingFaceFW/fineweb.*source=stdlib"),
        (["source=text", "paths=/nowhere.txt"], "/nowhere.txt is no file"),
        (["stdlib"], "'stdlib' is not of the form key=value"),
    ],
)
def test_command_fails_with_one_message(cache, tmp_path, arguments, message):
    """Offline Hub, a missing file and a malformed word, as the command reports them."""
    if not HF_HUB_OFFLINE:
        pytest.skip("needs HF_HUB_OFFLINE=1, so that no test reaches the Hub")
    with pytest.raises(SystemExit, match=f"^prepare_data: .*{message}"):
        main([*arguments, f"out={tmp_path / 'out'}"])
