"""Preparation of data: source -> tokenizer -> token pools, in one folder that says what it was made of.

OUT/plan.json names everything that decides the contents; OUT/tokenizer, OUT/val and OUT/train follow, validation
first, because training may have to leave out what occurs in it. A preparation that was stopped or killed goes on
behind its last whole shard and ends in the same bytes. Memory is bounded by one batch of documents.
"""

import contextlib
import dataclasses
import difflib
import hashlib
import json
import shutil
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from filelock import FileLock, Timeout
from tqdm import tqdm

from training.data.shards import TEMPORARY_SUFFIX, PoolWriter, TokenPool, hash_file, replace_json
from training.data.sources import SOURCES, START, Position, Source
from training.data.tokenizer import (
    DocumentEncoder,
    cache_dir,
    cached_tokenizer,
    check_vocab_size,
    load_tokenizer,
    save_tokenizer,
)

PLAN_VERSION = 1
# A batch is encoded in parallel and bounds the memory of a preparation, whatever the size of the source.
BATCH_DOCUMENTS = 1024
BATCH_CHARS = 4_000_000
EXCLUSION_TOKENS = 64


@dataclass(frozen=True)
class PrepareConfig:
    """What to prepare; the source's own options (training/data/sources.py) are given beside these.

    Attributes:
        source: a name in SOURCES.
        out: folder to write; null takes one in the cache, named after everything that decides its contents.
        tokenizer: folder or Hub name of a tokenizer; null trains one on the source.
        vocab_size: of a trained tokenizer (an upper bound: little text gives fewer tokens).
        tokenizer_chars: train the tokenizer on the first so many characters of the training documents.
        train_tokens, validation_tokens: stop a pool at the document that reaches this; null reads the source to its
            end. Documents of the validation part beyond its limit are used in neither pool. A finished folder with
            more training tokens is taken as it is: give the loader the limit as its token_limit.
        shard_tokens: tokens per shard file: what a killed preparation loses at most.
    """

    source: str = "stdlib"
    out: str | None = None
    tokenizer: str | None = None
    vocab_size: int = 4096
    tokenizer_chars: int = 100_000_000
    train_tokens: int | None = None
    validation_tokens: int | None = 10_000_000
    shard_tokens: int = 100_000_000
    source_options: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self):
        for name in ("vocab_size", "tokenizer_chars", "train_tokens", "validation_tokens", "shard_tokens"):
            value = getattr(self, name)
            if isinstance(value, float) and value.is_integer():
                object.__setattr__(self, name, int(value))
            elif value is None and name in ("train_tokens", "validation_tokens"):
                continue
            elif type(value) is not int or value < 1:
                raise ValueError(f"{name}={value!r} must be a positive integer")
        if self.tokenizer is None:
            check_vocab_size(self.vocab_size)

    def make_source(self) -> Source:
        """The source with its options.

        Raises:
            ValueError: an unknown source or option, with the nearest name, or an option that is missing.
        """
        if self.source not in SOURCES:
            raise ValueError(f"source={self.source!r} must be one of {', '.join(SOURCES)}")
        source_class = SOURCES[self.source]
        options = {item.name: item for item in dataclasses.fields(source_class)}
        own = [item.name for item in dataclasses.fields(self) if item.name != "source_options"]
        for name in self.source_options:
            if name not in options:
                allowed = [*own, *options]
                nearest = difflib.get_close_matches(name, allowed, n=1)
                hint = f"did you mean {nearest[0]}? " if nearest else ""
                raise ValueError(f"unknown option {name}: {hint}source={self.source} takes {', '.join(allowed)}")
        for name, option in options.items():
            if option.default is dataclasses.MISSING and name not in self.source_options:
                raise ValueError(f"source={self.source} needs {name}=...: {source_class.__doc__.splitlines()[0]}")
        return source_class(**self.source_options)


@dataclass(frozen=True)
class PreparedData:
    """A prepared folder: its tokenizer's folder and its pools; `validation` is None if the source sets none aside."""

    folder: Path
    tokenizer_folder: Path
    train: TokenPool
    validation: TokenPool | None


def prepare(source: str = "stdlib", *, progress: bool = True, verify: bool = False, **options: Any) -> PreparedData:
    """Prepare the data if it is not there yet, and open it.

    Every process of a run may call this: the first does the work under a lock on the folder, the others wait.

    Args:
        source: a name in SOURCES.
        progress: show a bar with tokens per second.
        verify: also check the hashes of pools that were there already.
        **options: fields of PrepareConfig, and of the source.

    Raises:
        ValueError: an option is wrong, the source is empty, or `out` holds data of other options.
    """
    own = {item.name for item in dataclasses.fields(PrepareConfig)}
    config = PrepareConfig(
        source=source,
        source_options={name: value for name, value in options.items() if name not in own},
        **{name: value for name, value in options.items() if name in own},
    )
    text_source = config.make_source()
    plan = _plan(config, text_source)
    folder = Path(str(config.out)).expanduser() if config.out is not None else _cache_folder(plan)
    folder.mkdir(parents=True, exist_ok=True)
    # The training manifest is written last. A finished folder needs no lock, and may be read-only.
    if not (folder / "train" / "manifest.json").exists():
        with _lock(folder, progress):
            _claim(folder, plan)
            if not (folder / "tokenizer").exists():
                _prepare_tokenizer(config, text_source, folder / "tokenizer")
            if not (folder / "train" / "manifest.json").exists():
                _Preparation(config, text_source, folder, progress).run()
    _claim(folder, plan)
    return open_prepared(folder, verify=verify)


def open_prepared(folder: str | Path, verify: bool = False) -> PreparedData:
    """Open a folder that `prepare` finished; its source is not needed any more.

    Raises:
        FileNotFoundError: there is no finished preparation.
        ValueError: a file is missing, cut, or (with `verify`) altered.
    """
    folder = Path(folder)
    train = TokenPool(folder / "train", verify=verify)
    has_validation = (folder / "val").exists()
    validation = TokenPool(folder / "val", verify=verify) if has_validation else None
    tokenizer_path = folder / "tokenizer" / "tokenizer.json"
    for pool in (train, validation):
        if pool is not None and hash_file(tokenizer_path) != pool.manifest["header"]["tokenizer_sha256"]:
            raise ValueError(
                f"{tokenizer_path} is not the tokenizer {pool.folder} was made with: put it back, or prepare anew"
            )
    return PreparedData(folder, folder / "tokenizer", train, validation)


@contextlib.contextmanager
def _lock(folder: Path, progress: bool) -> Iterator[None]:
    """Hold the folder alone; the system frees the lock of a process that is killed."""
    lock = FileLock(folder / "prepare.lock")
    try:
        lock.acquire(timeout=0)
    except Timeout:
        if progress:
            tqdm.write(f"{folder} is being prepared by another process: waiting for it", file=sys.stderr)
        lock.acquire()
    try:
        yield
    finally:
        lock.release()


def _plan(config: PrepareConfig, source: Source) -> dict[str, Any]:
    """Everything that decides the contents of the folder."""
    plan = {"version": PLAN_VERSION, "source": source.provenance(), "tokenizer": config.tokenizer}
    if config.tokenizer is None:
        plan |= {"vocab_size": config.vocab_size, "tokenizer_chars": config.tokenizer_chars}
    for name in ("train_tokens", "validation_tokens", "shard_tokens"):
        plan[name] = getattr(config, name)
    return json.loads(json.dumps(plan))


def _cache_folder(plan: dict[str, Any]) -> Path:
    """The folder for the plan; or, while there is none, the smallest one there that serves it."""
    key = hashlib.sha256(json.dumps(_without_train_tokens(plan), sort_keys=True).encode()).hexdigest()[:24]
    name = f"{plan['source']['source']}-{key}-"
    exact = cache_dir() / "data" / f"{name}{plan['train_tokens'] or 'all'}"
    if not exact.exists():
        others = (path for path in exact.parent.glob(f"{name}*") if _serves(path, plan))
        return min(others, key=_num_train_tokens, default=exact)
    return exact


def _without_train_tokens(plan: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in plan.items() if name != "train_tokens"}


def _num_train_tokens(folder: Path) -> int:
    return json.loads((folder / "train" / "manifest.json").read_text())["num_tokens"]


def _serves(folder: Path, plan: dict[str, Any]) -> bool:
    """Whether a folder was finished with this plan, or differs only in that training holds more tokens than asked for.

    A pool of fewer tokens is the beginning of a pool of more, and a loader's token_limit cuts it there, so that the
    runs of a ladder share the data of the largest. A pool that ends below its own limit has the whole source.
    """
    if not (folder / "train" / "manifest.json").exists() or not (folder / "plan.json").exists():
        return False
    found = json.loads((folder / "plan.json").read_text())
    if _without_train_tokens(found) != _without_train_tokens(plan):
        return False
    held, wanted = found["train_tokens"], plan["train_tokens"]
    has_all = held is None or _num_train_tokens(folder) < held
    return has_all or (wanted is not None and wanted <= held)


def _claim(folder: Path, plan: dict[str, Any]) -> None:
    """Write the plan into a new folder; refuse a folder that holds tokens of another plan."""
    path = folder / "plan.json"
    names = ("train", "val", "tokenizer")
    if path.exists():
        found = json.loads(path.read_text())
        if found == plan or _serves(folder, plan):
            return
        if any(folder.glob("*/shard-*.json")):
            changed = [f"{name}: {old} there, {new} now" for name, old, new in _differences(found, plan)]
            raise ValueError(
                f"{folder} holds data of other options ({'; '.join(changed)}). Give another out=, or delete {folder}"
            )
        # Begun, but without a single whole shard: a first try that failed stands in nobody's way.
        for name in names:
            shutil.rmtree(folder / name, ignore_errors=True)
    elif any((folder / name).exists() for name in names):
        raise ValueError(f"{folder} has train, val or tokenizer but no plan.json: give another out=, or delete them")
    replace_json(path, plan)


def _differences(found: dict[str, Any], plan: dict[str, Any]) -> Iterator[tuple[str, Any, Any]]:
    for name in found | plan:
        old, new = found.get(name), plan.get(name)
        if isinstance(old, dict) and isinstance(new, dict):
            yield from ((f"{name}.{inner}", *values) for inner, *values in _differences(old, new))
        elif old != new:
            yield name, old, new


def _prepare_tokenizer(config: PrepareConfig, source: Source, folder: Path) -> None:
    for leftover in folder.parent.glob(f"{folder.name}.*{TEMPORARY_SUFFIX}"):
        shutil.rmtree(leftover)
    name = config.tokenizer or cached_tokenizer(source, config.vocab_size, config.tokenizer_chars)
    save_tokenizer(load_tokenizer(name), folder)


class _Preparation:
    """Fills the pools of one folder; what is finished is left alone, what is begun goes on."""

    def __init__(self, config: PrepareConfig, source: Source, folder: Path, progress: bool):
        self.config = config
        self.source = source
        self.folder = folder
        self.progress = progress
        self.encoder = DocumentEncoder(load_tokenizer(folder / "tokenizer"))
        self.tokenizer_sha256 = hash_file(folder / "tokenizer" / "tokenizer.json")
        self.excluded: set[bytes] = set()

    def run(self) -> None:
        if self.source.has_validation:
            if not (self.folder / "val" / "manifest.json").exists():
                self._fill("validation", "val")
            if self.source.exclude_validation:
                pool = TokenPool(self.folder / "val")
                self.excluded = {_exclusion_key(pool.document(i)) for i in range(pool.num_documents)}
        self._fill("train", "train")

    def _fill(self, split: str, name: str) -> None:
        limit = self.config.train_tokens if split == "train" else self.config.validation_tokens
        header = {
            "split": split,
            "source": self.source.provenance(),
            "tokenizer_sha256": self.tokenizer_sha256,
            "max_tokens": limit,
            "exclude_validation": bool(self.excluded) if split == "train" else False,
        }
        writer = PoolWriter(
            self.folder / name,
            header,
            vocab_size=self.encoder.vocab_size,
            bos_token_id=self.encoder.bos_token_id,
            shard_tokens=self.config.shard_tokens,
        )
        state = writer.state or {"position": list(START), "num_excluded": 0}
        done = limit is not None and writer.num_tokens >= limit
        bar = tqdm(
            desc=f"prepare {name}",
            total=limit,
            initial=writer.num_tokens,
            unit="tok",
            unit_scale=True,
            disable=not self.progress,
        )
        documents = self.source.documents_from(split, Position(*state["position"]))
        with bar, contextlib.closing(documents):
            for texts, positions in () if done else _batches(documents):
                ids = self.encoder.encode([text for text in texts if text is not None])
                for number, position in enumerate(positions):
                    state = state | {"position": list(position)}
                    if number == len(ids):
                        break
                    if split == "train" and self.excluded and _exclusion_key(ids[number]) in self.excluded:
                        state["num_excluded"] += 1
                        continue
                    writer.add(ids[number], state)
                    bar.update(len(ids[number]))
                    done = limit is not None and writer.num_tokens >= limit
                    if done:
                        break
                bar.set_postfix(documents=writer.num_documents, refresh=False)
                if done:
                    break
        if writer.num_documents == 0:
            writer.close()
            raise ValueError(self._empty(split, state))
        writer.finish(state)

    def _empty(self, split: str, state: dict[str, Any]) -> str:
        read = Position(*state["position"]).num_read
        if split == "validation":
            return (
                f"none of the {read} documents fell into validation (validation_fraction="
                f"{self.source.validation_fraction}): raise validation_fraction, add documents, or set "
                "validation_fraction=0 to train without validation"
            )
        return (
            f"none of the {read} documents is left for training ({state['num_excluded']} excluded because they occur "
            "in validation): lower validation_fraction or add documents"
        )


def _batches(documents: Iterator[tuple[str | None, Position]]) -> Iterator[tuple[list[str | None], list[Position]]]:
    texts: list[str | None] = []
    positions: list[Position] = []
    chars = 0
    for text, position in documents:
        texts.append(text)
        positions.append(position)
        chars += len(text or "")
        if len(texts) == BATCH_DOCUMENTS or chars >= BATCH_CHARS:
            yield texts, positions
            texts, positions, chars = [], [], 0
    if texts:
        yield texts, positions


def _exclusion_key(ids: np.ndarray) -> bytes:
    """SHA-1 of a document's first 64 tokens (or all it has) behind BOS, as uint32: the paper's rule."""
    return hashlib.sha1(ids[1 : 1 + EXCLUSION_TOKENS].astype("<u4").tobytes()).digest()
