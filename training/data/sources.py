"""Where training text comes from: each source yields documents lazily, in one fixed order, and can say what it read.

A source is read in parts (files), so that a stopped preparation skips whole parts instead of reading them again. The
same options always give the same documents in the same order; `provenance()` records them with a content hash where
the files are local, or the pinned revision where they are not. Unless a source brings its own validation data, a
document belongs to validation when the SHA-1 of its text says so: no random state, and equal texts stay on one side.
"""

import glob
import hashlib
import itertools
import json
import os
import sys
import sysconfig
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from training.data.shards import hash_file

SPLITS = ("train", "validation")
TEXT_SUFFIXES = (".txt", ".md", ".jsonl", ".parquet")
# Not text to learn from: tests repeat themselves, and installed packages differ from one machine to the next.
SKIPPED_STDLIB_FOLDERS = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}
STDLIB_SUFFIXES = (".py", ".rst", ".txt", ".md")


class Position(NamedTuple):
    """A place between two documents of a source; (0, 0, 0) is the start.

    `part` and `document` count from 0 and name the next document to read; `num_read` is how many documents of the
    source were read before it, in both splits.
    """

    part: int = 0
    document: int = 0
    num_read: int = 0


START = Position()


def in_validation(text: str, fraction: float) -> bool:
    """Whether a document belongs to validation: the first 32 bits of its SHA-1 lie below `fraction` of their range."""
    return int.from_bytes(hashlib.sha1(text.encode()).digest()[:4], "big") < fraction * 2**32


def hash_files(paths: Sequence[Path], root: Path) -> str:
    """SHA-256 over the names below `root`, sizes and contents of files, in the order given."""
    total = hashlib.sha256()
    for path in paths:
        total.update(json.dumps([os.path.relpath(path, root), path.stat().st_size, hash_file(path)]).encode())
    return total.hexdigest()


@dataclass(frozen=True, kw_only=True)
class Source:
    """What every source has.

    Args:
        validation_fraction: share of the documents, by hash of their text, kept out of training; in [0, 1).
        max_documents: read only the first so many documents of the source, both splits together; null reads all.
        exclude_validation: leave out of training every document whose first 64 tokens occur in validation (the rule of
            the paper's data preparation), which also catches near copies that the hash of the whole text does not.
    """

    validation_fraction: float = 0.05
    max_documents: int | None = None
    exclude_validation: bool = False

    def __post_init__(self):
        for item in fields(self):
            if item.type in (str, str | None) and not isinstance(getattr(self, item.name), item.type):
                raise ValueError(f"{item.name}={getattr(self, item.name)!r} must be text")
        if isinstance(self.validation_fraction, bool) or not isinstance(self.validation_fraction, int | float):
            raise ValueError(f"validation_fraction={self.validation_fraction!r} must be a number in [0, 1)")
        if not 0 <= self.validation_fraction < 1:
            raise ValueError(f"validation_fraction={self.validation_fraction} must lie in [0, 1)")
        if not isinstance(self.exclude_validation, bool):
            raise ValueError(f"exclude_validation={self.exclude_validation!r} must be true or false")
        if self.max_documents is not None and (type(self.max_documents) is not int or self.max_documents < 1):
            raise ValueError(f"max_documents={self.max_documents!r} must be a positive integer, or null for all")

    @property
    def name(self) -> str:
        """The key in SOURCES."""
        return next(name for name, source in SOURCES.items() if source is type(self))

    @property
    def has_validation(self) -> bool:
        """Whether the source sets any document aside for validation."""
        return self.validation_fraction > 0

    def provenance(self) -> dict[str, Any]:
        """What was read, as JSON: the source's name, its options and, by source, a content hash or a revision."""
        return {"source": self.name} | {field.name: getattr(self, field.name) for field in fields(self)}

    def parts(self, split: str) -> Sequence[Any]:
        """The parts (files) that hold the documents of a split, in reading order."""
        raise NotImplementedError

    def read(self, part: Any) -> Iterator[str]:
        """All documents of one part, both splits, in order."""
        raise NotImplementedError

    def selects(self, text: str, split: str) -> bool:
        """Whether a document that was read belongs to the split."""
        return in_validation(text, self.validation_fraction) == (split == "validation")

    def documents(self, split: str = "train") -> Iterator[str]:
        """The texts of a split ("train" or "validation"), lazily and in order.

        Raises:
            ValueError: the source holds no document at all.
        """
        return (text for text, _ in self.documents_from(split) if text is not None)

    def documents_from(self, split: str, start: Position = START) -> Iterator[tuple[str | None, Position]]:
        """Pairs (text, position after it) from `start` on.

        One last pair (None, position) marks the end, so that a reader knows how far the source was read behind the
        split's last document. Empty documents (nothing but white space) are passed over.
        """
        if split not in SPLITS:
            raise ValueError(f"split={split!r} must be one of {', '.join(SPLITS)}")
        position = start
        parts = self.parts(split)
        for index in range(start.part, len(parts)):
            first = start.document if index == start.part else 0
            for number, text in enumerate(itertools.islice(self.read(parts[index]), first, None), first):
                if not text.strip():
                    continue
                if position.num_read == self.max_documents:
                    yield None, position
                    return
                position = Position(index, number + 1, position.num_read + 1)
                if self.selects(text, split):
                    yield text, position
        if position.num_read == 0:
            raise ValueError(f"source {self.name} holds no documents with text: {self.provenance()}")
        yield None, position


@dataclass(frozen=True, kw_only=True)
class StdlibSource(Source):
    """The running Python's standard library, a document per source or text file: real text on every machine, offline.

    Files are not cut: a validation file is then never seen in part. Files that are empty or not UTF-8, tests and
    installed packages are passed over, and so are the build settings of the one machine (_sysconfigdata, config-*).
    """

    @property
    def root(self) -> Path:
        return Path(sysconfig.get_paths()["stdlib"])

    @cached_property
    def _files(self) -> list[Path]:
        files = []
        for folder, folders, names in os.walk(self.root):
            folders[:] = [n for n in folders if n not in SKIPPED_STDLIB_FOLDERS and not n.startswith("config-")]
            files += [
                Path(folder, name)
                for name in names
                if name.endswith(STDLIB_SUFFIXES) and not name.startswith("_sysconfigdata")
            ]
        if not files:
            raise FileNotFoundError(
                f"no standard library sources under {self.root} (this Python ships them compiled or zipped); "
                "use source=text paths=FOLDER with your own files"
            )
        return sorted(files, key=lambda path: path.relative_to(self.root).as_posix())

    @cached_property
    def _sha256(self) -> str:
        return hash_files(self._files, self.root)

    def provenance(self) -> dict[str, Any]:
        version = sys.version.split()[0]
        return super().provenance() | {"python": version, "num_files": len(self._files), "sha256": self._sha256}

    def parts(self, split: str) -> list[Path]:
        return self._files

    def read(self, part: Path) -> Iterator[str]:
        try:
            yield part.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            return


@dataclass(frozen=True, kw_only=True)
class TextSource(Source):
    """Your own files: .txt, .md (one document, long ones cut), .jsonl and .parquet (one document per row).

    Args:
        paths: files, folders (read recursively) or glob patterns; a string or a list of strings.
        text_column: the field of a JSON line or the column of a Parquet file that holds the text.
        max_document_chars: a .txt or .md file longer than this is cut at the last blank line, or else line end, before
            it, so that one large file can be shuffled and split; null never cuts. The pieces joined give the file.
    """

    paths: str | Sequence[str]
    text_column: str = "text"
    max_document_chars: int | None = 16384

    def __post_init__(self):
        super().__post_init__()
        paths = [self.paths] if isinstance(self.paths, str | Path) else self.paths
        if not isinstance(paths, list | tuple) or not paths or not all(isinstance(p, str | Path) for p in paths):
            raise ValueError(f"paths={self.paths!r} must be a file, a folder or a glob pattern, or a list of them")
        object.__setattr__(self, "paths", [str(path) for path in paths])
        limit = self.max_document_chars
        if limit is not None and (type(limit) is not int or limit < 1):
            raise ValueError(f"max_document_chars={limit!r} must be a positive integer, or null to keep files whole")

    @cached_property
    def _files(self) -> list[Path]:
        files: dict[str, Path] = {}
        for pattern in self.paths:
            for path in self._expand(pattern):
                files.setdefault(str(path.resolve()), path)
        return list(files.values())

    def _expand(self, pattern: str) -> list[Path]:
        path = Path(pattern).expanduser()
        if path.is_file():
            if path.suffix not in TEXT_SUFFIXES:
                raise ValueError(f"{path}: suffix {path.suffix!r} is not one of {', '.join(TEXT_SUFFIXES)}")
            if path.stat().st_size == 0:
                raise ValueError(f"{path} is empty: put text into it or leave it out of paths")
            return [path]
        if path.is_dir():
            found = [p for p in path.rglob("*") if p.is_file()]
        else:
            found = [Path(p) for p in glob.glob(str(path), recursive=True) if os.path.isfile(p)]
            if not found:
                raise FileNotFoundError(f"paths: {pattern} is no file, no folder and matches nothing; check the name")
        found = sorted((p for p in found if p.suffix in TEXT_SUFFIXES), key=lambda p: p.as_posix())
        if not found:
            raise ValueError(f"paths: {pattern} holds no file ending in {', '.join(TEXT_SUFFIXES)}")
        return found

    @cached_property
    def _sha256(self) -> str:
        return hash_files(self._files, Path(os.path.commonpath([path.parent.resolve() for path in self._files])))

    def provenance(self) -> dict[str, Any]:
        return super().provenance() | {"num_files": len(self._files), "sha256": self._sha256}

    def parts(self, split: str) -> list[Path]:
        return self._files

    def read(self, part: Path) -> Iterator[str]:
        try:
            yield from TEXT_READERS[part.suffix](self, part)
        except UnicodeDecodeError as error:
            raise ValueError(f"{part} is not UTF-8 ({error}); convert it or leave it out of paths") from None

    def _read_text(self, path: Path) -> Iterator[str]:
        # newline="" keeps \r\n as it is, so that the pieces joined are the file.
        with open(path, encoding="utf-8-sig", newline="") as file:
            if self.max_document_chars is None:
                yield file.read()
            else:
                yield from cut_lines(file, self.max_document_chars)

    def _read_jsonl(self, path: Path) -> Iterator[str]:
        with open(path, encoding="utf-8-sig") as file:
            for number, line in enumerate(file, 1):
                if not line.strip():
                    continue
                try:
                    row = json.loads(line)
                except json.JSONDecodeError as error:
                    raise ValueError(f"{path}, line {number} is not JSON: {error}") from None
                text = row.get(self.text_column) if isinstance(row, dict) else None
                if not isinstance(text, str):
                    has = f"has {', '.join(row)}" if isinstance(row, dict) else "is no object"
                    raise ValueError(f"{path}, line {number}: no string under {self.text_column!r} (the line {has})")
                # Half a surrogate pair is legal in JSON but is no text: it has no UTF-8 form to tokenize.
                if "\\ud" in line.lower() and any("\ud800" <= char <= "\udfff" for char in text):
                    raise ValueError(
                        f"{path}, line {number}: the text holds an unpaired surrogate (\\ud8xx); remove it"
                    )
                yield text

    def _read_parquet(self, path: Path) -> Iterator[str]:
        import pyarrow
        from pyarrow import parquet

        try:
            file = parquet.ParquetFile(path)
        except pyarrow.ArrowInvalid as error:
            raise ValueError(f"{path} is not a readable Parquet file: {error}") from None
        with file:
            if self.text_column not in file.schema_arrow.names:
                names = ", ".join(file.schema_arrow.names)
                raise ValueError(f"{path}: no column {self.text_column!r}; it has {names}: set text_column")
            for batch in file.iter_batches(batch_size=1024, columns=[self.text_column]):
                yield from (text or "" for text in batch.column(0).to_pylist())


def cut_lines(lines: Iterator[str], max_chars: int) -> Iterator[str]:
    """Join lines to pieces of at most `max_chars`, ending at the last blank line that fits, else at a line end.

    A single line longer than `max_chars` is cut by length. Nothing is dropped: the pieces joined are the lines joined.
    """
    held: list[str] = []
    size = 0
    for line in lines:
        for begin in range(0, len(line), max_chars):
            piece = line[begin : begin + max_chars]
            if size + len(piece) > max_chars:
                blank = next((i for i in range(len(held) - 1, 0, -1) if not held[i].strip()), len(held) - 1)
                yield "".join(held[: blank + 1])
                held = held[blank + 1 :]
                size = sum(map(len, held))
                if held and size + len(piece) > max_chars:
                    yield "".join(held)
                    held, size = [], 0
            held.append(piece)
            size += len(piece)
    if held:
        yield "".join(held)


@dataclass(frozen=True, kw_only=True)
class HubSource(Source):
    """A dataset of the Hugging Face Hub, or a local dataset folder, streamed by `datasets`; its files are the parts.

    Args:
        dataset: "owner/name" on the Hub, or a folder.
        config, split: as in datasets.load_dataset; the split read for training.
        revision: commit or tag. Required for the Hub, so that a preparation stopped today and resumed next week reads
            the same documents.
        text_column: the column that holds the text.
        validation_config, validation_split: another config or split that is the validation data.
        validation_parts: the first so many files are the validation data and are not trained on.
            Without any of these, validation is drawn by the hash of the text.
    """

    dataset: str
    config: str | None = None
    split: str = "train"
    revision: str | None = None
    text_column: str = "text"
    validation_config: str | None = None
    validation_split: str | None = None
    validation_parts: int | None = None

    def __post_init__(self):
        super().__post_init__()
        if self.revision is None and not self._is_local:
            raise ValueError(
                f"revision is missing: pin {self.dataset} to a commit (its page on the Hub, Files and versions), "
                "as in revision=9bb295ddab0e05d785b879661af7260fed5140fc"
            )
        if self.validation_parts is not None and (type(self.validation_parts) is not int or self.validation_parts < 1):
            raise ValueError(f"validation_parts={self.validation_parts!r} must be a positive integer or null")
        if self.validation_parts is not None and (self.validation_config or self.validation_split):
            raise ValueError("validation_parts excludes validation_config and validation_split: give one of them")

    @property
    def _is_local(self) -> bool:
        return os.path.isdir(self.dataset)

    @property
    def _has_own_validation(self) -> bool:
        return bool(self.validation_config or self.validation_split or self.validation_parts)

    @property
    def has_validation(self) -> bool:
        return self._has_own_validation or super().has_validation

    @cached_property
    def _streams(self) -> dict[str, Any]:
        return {}

    def _stream(self, split: str) -> Any:
        if split not in self._streams:
            self._streams[split] = self._open(split)
        return self._streams[split]

    def _open(self, split: str) -> Any:
        import datasets

        config, name = self.config, self.split
        if split == "validation":
            config, name = self.validation_config or config, self.validation_split or name
        what = f"dataset {self.dataset}, config {config}, split {name}, revision {self.revision}"
        try:
            stream = datasets.load_dataset(self.dataset, config, split=name, revision=self.revision, streaming=True)
        except ConnectionError as error:
            raise ConnectionError(
                f"cannot reach the Hub for {what}: {error}. Connect (and unset HF_HUB_OFFLINE), or use local text: "
                "source=stdlib, or source=text paths=FOLDER"
            ) from error
        except (OSError, ValueError) as error:
            raise ValueError(f"cannot open {what}: {error}") from error
        if stream.column_names is not None and self.text_column not in stream.column_names:
            names = ", ".join(stream.column_names)
            raise ValueError(f"{what}: no column {self.text_column!r}; it has {names}: set text_column")
        return stream.select_columns([self.text_column])

    @cached_property
    def _sha256(self) -> str | None:
        """Contents of a local folder; None for the Hub, where the revision says it."""
        if not self._is_local:
            return None
        root = Path(self.dataset)
        files = sorted((path for path in root.rglob("*") if path.is_file()), key=lambda path: path.as_posix())
        return hash_files(files, root)

    def provenance(self) -> dict[str, Any]:
        return super().provenance() | {"sha256": self._sha256}

    def parts(self, split: str) -> list[tuple[str, int]]:
        indices = range(self._stream(split).num_shards)
        if self.validation_parts is not None:
            cut = self.validation_parts
            if cut >= len(indices):
                raise ValueError(f"validation_parts={cut} leaves nothing: {self.dataset} has {len(indices)} file(s)")
            indices = indices[:cut] if split == "validation" else indices[cut:]
        return [(split, index) for index in indices]

    def read(self, part: tuple[str, int]) -> Iterator[str]:
        split, index = part
        stream = self._stream(split)
        for row in stream.shard(num_shards=stream.num_shards, index=index):
            yield row[self.text_column] or ""

    def selects(self, text: str, split: str) -> bool:
        return self._has_own_validation or super().selects(text, split)


@dataclass(frozen=True, kw_only=True)
class FineWebSource(HubSource):
    """The paper's FineWeb: validates on the start of sample-10BT, trains on sample-100BT less what occurs there."""

    dataset: str = "HuggingFaceFW/fineweb"
    config: str | None = "sample-100BT"
    revision: str | None = "9bb295ddab0e05d785b879661af7260fed5140fc"
    validation_config: str | None = "sample-10BT"
    exclude_validation: bool = True


@dataclass(frozen=True, kw_only=True)
class FineWebEduSource(HubSource):
    """The paper's FineWeb-Edu: sample-100BT, whose first file in sorted order is the validation data."""

    dataset: str = "HuggingFaceFW/fineweb-edu"
    config: str | None = "sample-100BT"
    revision: str | None = "87f09149ef4734204d70ed1d046ddc9ca3f2b8f9"
    validation_parts: int | None = 1
    exclude_validation: bool = True


TEXT_READERS = {
    ".txt": TextSource._read_text,
    ".md": TextSource._read_text,
    ".jsonl": TextSource._read_jsonl,
    ".parquet": TextSource._read_parquet,
}

SOURCES = {
    "stdlib": StdlibSource,
    "text": TextSource,
    "hub": HubSource,
    "fineweb": FineWebSource,
    "fineweb-edu": FineWebEduSource,
}
