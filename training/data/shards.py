"""Tokenised documents on disk: shards of token ids with document offsets, and a manifest that says what they are.

    FOLDER/tokens-00000.bin      token ids of whole documents, one after the other, little-endian uint16 or uint32
    FOLDER/documents-00000.npy   int64 (num_documents + 1,): where each document starts in its shard, and the end
    FOLDER/shard-00000.json      written last: the shard counts only with it; holds where the source was behind it
    FOLDER/manifest.json         written once the pool is complete

Every document starts with the BOS token. Files are written under a temporary name, synced and renamed, so that a
killed writer leaves whole shards, and goes on behind the last of them. Token ids are memory-mapped when read.
"""

import hashlib
import io
import json
import os
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

POOL_FORMAT = "looped-token-pool"
POOL_VERSION = 1
TEMPORARY_SUFFIX = ".tmp"


def hash_file(path: str | Path) -> str:
    """SHA-256 of a file's contents."""
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def replace_file(path: Path, content: bytes) -> None:
    """Write a file so that it is there whole or not at all, also after a power cut."""
    temporary = path.with_name(path.name + TEMPORARY_SUFFIX)
    with open(temporary, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)
    sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Make renames in a folder durable; on systems where folders cannot be opened (Windows) there is nothing to do."""
    if os.name == "posix":
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def replace_json(path: Path, value: Any) -> None:
    """`replace_file` with indented JSON."""
    replace_file(path, (json.dumps(value, indent=1) + "\n").encode())


def token_dtype(vocab_size: int) -> np.dtype:
    """The smallest unsigned little-endian type that holds every id of the vocabulary."""
    return np.dtype("<u2" if vocab_size <= 1 << 16 else "<u4")


class PoolWriter:
    """Writes a token pool shard by shard; on an unfinished folder it goes on behind the last whole shard.

    Args:
        folder: created if missing; must hold nothing, or an unfinished pool with the same `header`.
        header: JSON that describes the contents (source, tokenizer); stored with every shard and in the manifest.
        vocab_size: ids must lie below it.
        bos_token_id: the id every document starts with.
        shard_tokens: a shard is closed behind the document that brings it to this many tokens.

    Attributes:
        state: what the caller passed to `add` behind the last whole shard; None for a fresh folder. The caller
            continues its source from there.

    Raises:
        ValueError: the folder holds shards of another header, or a shard is damaged.
    """

    def __init__(
        self, folder: str | Path, header: dict[str, Any], vocab_size: int, bos_token_id: int, shard_tokens: int
    ):
        if shard_tokens < 1:
            raise ValueError(f"shard_tokens={shard_tokens} must be at least 1")
        if not 0 <= bos_token_id < vocab_size:
            raise ValueError(f"bos_token_id={bos_token_id} must lie in [0, vocab_size={vocab_size})")
        self.folder = Path(folder)
        self.bos_token_id = bos_token_id
        self.vocab_size = vocab_size
        self.shard_tokens = shard_tokens
        self._description = {
            "format": POOL_FORMAT,
            "version": POOL_VERSION,
            "dtype": token_dtype(vocab_size).str,
            "vocab_size": vocab_size,
            "bos_token_id": bos_token_id,
            "shard_tokens": shard_tokens,
            "header": json.loads(json.dumps(header)),
        }
        self.folder.mkdir(parents=True, exist_ok=True)
        if (self.folder / "manifest.json").exists():
            raise ValueError(
                f"{self.folder} holds a finished pool: open it with TokenPool, or delete it to write anew"
            )
        self._shards, self.state = self._recover()
        self._file = None
        self._open_shard()

    @property
    def num_tokens(self) -> int:
        return sum(shard["num_tokens"] for shard in self._shards) + self._offsets[-1]

    @property
    def num_documents(self) -> int:
        return sum(shard["num_documents"] for shard in self._shards) + len(self._offsets) - 1

    def _recover(self) -> tuple[list[dict[str, Any]], Any]:
        shards, state = [], None
        while (path := self.folder / f"shard-{len(shards):05d}.json").exists():
            record = json.loads(path.read_text())
            if record["pool"] != self._description:
                raise ValueError(
                    f"{path} was written with other settings: {record['pool']}, now {self._description}. "
                    f"Choose another folder, or delete {self.folder}"
                )
            shards.append(record["shard"])
            state = record["state"]
            _check_files(self.folder, shards[-1])
        kept = {shard[key] for shard in shards for key in ("tokens", "documents")}
        for path in self.folder.iterdir():
            if path.name.endswith(TEMPORARY_SUFFIX) or (path.suffix in (".bin", ".npy") and path.name not in kept):
                path.unlink()
        return shards, state

    def _open_shard(self) -> None:
        self._offsets = [0]
        self._digest = hashlib.sha256()
        self._tokens_name = f"tokens-{len(self._shards):05d}.bin"
        self._file = open(self.folder / (self._tokens_name + TEMPORARY_SUFFIX), "wb")

    def add(self, tokens: Sequence[int] | np.ndarray, state: Any) -> None:
        """Append one document; `state` (JSON) is what the caller needs to go on behind it.

        Raises:
            ValueError: the document does not start with BOS, or has an id outside the vocabulary.
        """
        ids = np.asarray(tokens, dtype=np.int64)
        if ids.ndim != 1 or len(ids) == 0 or ids[0] != self.bos_token_id:
            raise ValueError(f"document {self.num_documents} does not start with BOS {self.bos_token_id}")
        if ids.min() < 0 or ids.max() >= self.vocab_size:
            raise ValueError(f"document {self.num_documents} has an id outside [0, {self.vocab_size}): {ids.max()}")
        content = ids.astype(self._description["dtype"]).tobytes()
        self._file.write(content)
        self._digest.update(content)
        self._offsets.append(self._offsets[-1] + len(ids))
        if self._offsets[-1] >= self.shard_tokens:
            self._close_shard(state)
            self._open_shard()

    def _close_shard(self, state: Any) -> None:
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        tokens_path = self.folder / self._tokens_name
        os.replace(self._file.name, tokens_path)
        offsets = io.BytesIO()
        np.save(offsets, np.array(self._offsets, dtype="<i8"))
        documents_path = self.folder / f"documents-{len(self._shards):05d}.npy"
        replace_file(documents_path, offsets.getvalue())
        shard = {
            "tokens": tokens_path.name,
            "documents": documents_path.name,
            "num_tokens": self._offsets[-1],
            "num_documents": len(self._offsets) - 1,
            "tokens_bytes": tokens_path.stat().st_size,
            "tokens_sha256": self._digest.hexdigest(),
            "documents_bytes": len(offsets.getvalue()),
            "documents_sha256": hashlib.sha256(offsets.getvalue()).hexdigest(),
        }
        record = {"pool": self._description, "shard": shard, "state": state}
        replace_json(self.folder / f"shard-{len(self._shards):05d}.json", record)
        self._shards.append(shard)

    def finish(self, state: Any) -> "TokenPool":
        """Close the last shard, write the manifest with the final `state`, and open the pool.

        Raises:
            ValueError: no document was added.
        """
        if self.num_documents == 0:
            self.close()
            raise ValueError(f"{self.folder}: no document was added, a pool cannot be empty")
        if len(self._offsets) > 1:
            self._close_shard(state)
        else:
            self.close()
        manifest = self._description | {
            "num_tokens": sum(shard["num_tokens"] for shard in self._shards),
            "num_documents": sum(shard["num_documents"] for shard in self._shards),
            "state": state,
            "shards": self._shards,
        }
        replace_json(self.folder / "manifest.json", manifest)
        return TokenPool(self.folder)

    def close(self) -> None:
        """Drop the shard that is not whole yet; whole shards stay."""
        self._file.close()
        Path(self._file.name).unlink(missing_ok=True)


def _check_files(folder: Path, shard: dict[str, Any], verify: bool = False) -> None:
    """Refuse a shard whose files are missing, cut, or (with `verify`) changed.

    Raises:
        ValueError: names the file.
    """
    for kind in ("tokens", "documents"):
        path, size = folder / shard[kind], shard[f"{kind}_bytes"]
        advice = f"delete {folder} and prepare the data again, or copy the file again"
        if not path.exists():
            raise ValueError(f"{path} is missing: {advice}")
        if path.stat().st_size != size:
            raise ValueError(f"{path} has {path.stat().st_size} bytes, written were {size}: it was cut; {advice}")
        if verify and hash_file(path) != shard[f"{kind}_sha256"]:
            raise ValueError(f"{path} was altered, its SHA-256 is not the manifest's: {advice}")


class TokenPool:
    """A finished pool, read through memory maps. Positions count tokens over all shards in order.

    Args:
        folder: what PoolWriter wrote.
        verify: also compare the SHA-256 of every file (reads everything); sizes are always compared.

    Attributes:
        manifest: the contents of manifest.json.
        num_tokens, num_documents: counts, BOS tokens included.

    Raises:
        FileNotFoundError: the folder holds no finished pool.
        ValueError: another format version, or a file that is missing, cut or altered, by name.
    """

    def __init__(self, folder: str | Path, verify: bool = False):
        self.folder = Path(folder)
        path = self.folder / "manifest.json"
        if not path.exists():
            raise FileNotFoundError(
                f"{path} does not exist: prepare the data first (python -m training.prepare_data out=FOLDER); "
                "a preparation that was stopped goes on where it was"
            )
        try:
            self.manifest = json.loads(path.read_text())
        except ValueError as error:
            raise ValueError(f"{path} was cut or altered ({error}): prepare the data again") from None
        found = (self.manifest.get("format"), self.manifest.get("version"))
        if found != (POOL_FORMAT, POOL_VERSION):
            raise ValueError(f"{path}: format {found}, this version reads {(POOL_FORMAT, POOL_VERSION)}")
        for shard in self.manifest["shards"]:
            _check_files(self.folder, shard, verify)
        self.num_tokens: int = self.manifest["num_tokens"]
        self.num_documents: int = self.manifest["num_documents"]
        self.vocab_size: int = self.manifest["vocab_size"]
        self.bos_token_id: int = self.manifest["bos_token_id"]
        dtype = np.dtype(self.manifest["dtype"])
        # Plain array views of the maps: slicing np.memmap itself is several times slower.
        self._tokens = [
            np.asarray(np.memmap(self.folder / s["tokens"], dtype=dtype, mode="r")) for s in self.manifest["shards"]
        ]
        ends = np.cumsum([shard["num_tokens"] for shard in self.manifest["shards"]])
        self._shard_starts = np.concatenate([[0], ends[:-1]]).astype(np.int64)

    @cached_property
    def document_starts(self) -> np.ndarray:
        """Where each document starts: int64 (num_documents,), ascending, first 0."""
        starts = [
            np.load(self.folder / shard["documents"])[:-1] + first
            for shard, first in zip(self.manifest["shards"], self._shard_starts, strict=True)
        ]
        return np.concatenate(starts)

    @property
    def sha256(self) -> str:
        """One hash for the whole pool: over the hashes of its files in order."""
        shards = self.manifest["shards"]
        return hashlib.sha256("".join(s["tokens_sha256"] + s["documents_sha256"] for s in shards).encode()).hexdigest()

    def document(self, index: int) -> np.ndarray:
        """The ids of one document, BOS first, as a read-only view of the file."""
        if not 0 <= index < self.num_documents:
            raise IndexError(f"document {index}: the pool has {self.num_documents}")
        starts = self.document_starts
        end = starts[index + 1] if index + 1 < self.num_documents else self.num_tokens
        shard = int(np.searchsorted(self._shard_starts, starts[index], side="right")) - 1
        return self._tokens[shard][starts[index] - self._shard_starts[shard] : end - self._shard_starts[shard]]

    def gather(self, starts: np.ndarray, lengths: np.ndarray) -> np.ndarray:
        """The spans [start, start + length) joined, int64. A span lies within one document."""
        shards = np.searchsorted(self._shard_starts, starts, side="right") - 1
        begins = starts - self._shard_starts[shards]
        joined = np.empty(int(lengths.sum()), dtype=self.manifest["dtype"])
        place = 0
        # Copying slices is faster than one index per token, down to documents of 40 tokens.
        for shard, begin, length in zip(shards.tolist(), begins.tolist(), lengths.tolist(), strict=True):
            joined[place : place + length] = self._tokens[shard][begin : begin + length]
            place += length
        return joined.astype(np.int64)
