"""Sources: fixed order, a split that equal texts cannot straddle, resumption at any document, errors for people."""

import hashlib
import json
import random
import sysconfig
from pathlib import Path

import datasets
import pytest

from training.data.sources import (
    SOURCES,
    START,
    FineWebEduSource,
    FineWebSource,
    HubSource,
    StdlibSource,
    TextSource,
    cut_lines,
    in_validation,
)

FINEWEB_COLUMNS = ["text", "id", "dump", "url", "date", "file_path", "language", "language_score", "token_count"]


def fineweb_rows(texts: list[str]) -> datasets.Dataset:
    rows = [
        {
            "text": text,
            "id": f"<urn:uuid:{index}>",
            "dump": "CC-MAIN-2013-20",
            "url": f"http://example.org/{index}",
            "date": "2013-05-18T05:48:54Z",
            "file_path": "s3://commoncrawl/crawl-data/example.warc.gz",
            "language": "en",
            "language_score": 0.9,
            "token_count": len(text.split()),
        }
        for index, text in enumerate(texts)
    ]
    data = datasets.Dataset.from_list(rows)
    assert data.column_names == FINEWEB_COLUMNS
    return data


@pytest.fixture
def parquet_folder(tmp_path):
    """Three Parquet files in FineWeb's schema, written by the datasets library."""
    texts = [[f"file {file} document {row} " * (row + 1) for row in range(20 + file)] for file in range(3)]
    folder = tmp_path / "dataset"
    for file, rows in enumerate(texts):
        (folder / "data").mkdir(parents=True, exist_ok=True)
        fineweb_rows(rows).to_parquet(folder / "data" / f"train-{file:05d}-of-00003.parquet", batch_size=7)
    return folder, sum(texts, [])


def test_stdlib_is_real_text_in_a_fixed_order():
    source = StdlibSource(validation_fraction=0)
    documents = list(source.documents())
    assert documents == list(StdlibSource(validation_fraction=0).documents())
    assert source.provenance() == StdlibSource(validation_fraction=0).provenance()
    assert len(documents) > 100 and sum(map(len, documents)) > 1_000_000
    root = Path(sysconfig.get_paths()["stdlib"])
    assert (root / "argparse.py").read_text(encoding="utf-8") in documents
    names = [path.relative_to(root).as_posix() for path in source.parts("train")]
    assert names == sorted(names)
    assert not any(part in ("test", "site-packages", "__pycache__") for name in names for part in name.split("/"))


def test_stdlib_splits_into_two_disjoint_parts():
    train, validation = (list(StdlibSource().documents(split)) for split in ("train", "validation"))
    assert not set(train) & set(validation)
    assert sorted(train + validation) == sorted(StdlibSource(validation_fraction=0).documents())
    assert 0.01 < len(validation) / (len(train) + len(validation)) < 0.12


def test_split_follows_sha1_and_copies_stay_on_one_side(tmp_path):
    texts = [f"text number {index}" for index in range(2000)]
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts + texts[::-1]))
    source = TextSource(paths=str(path), validation_fraction=0.25)
    expected = {text for text in texts if int(hashlib.sha1(text.encode()).hexdigest()[:8], 16) < 0.25 * 2**32}
    validation = list(source.documents("validation"))
    assert set(validation) == expected and len(validation) == 2 * len(expected)
    assert not set(source.documents("train")) & expected
    assert 400 < len(expected) < 600
    assert not in_validation("x", 0.0)


def test_text_reads_every_format_in_order(tmp_path):
    (tmp_path / "sub").mkdir()
    (tmp_path / "b.txt").write_text("plain text é\r\nwith lines\n", encoding="utf-8", newline="")
    (tmp_path / "a.md").write_text("\ufeff# title\n", encoding="utf-8")
    (tmp_path / "sub" / "c.jsonl").write_text('{"text": "row 1", "n": 1}\n\n{"text": "row 2"}\n{"text": " "}\n')
    fineweb_rows(["parquet 1", "parquet 2"]).to_parquet(tmp_path / "sub" / "d.parquet")
    (tmp_path / "ignored.bin").write_bytes(b"\xff\xfe")
    (tmp_path / "empty.txt").write_text("")
    expected = ["# title\n", "plain text é\r\nwith lines\n", "row 1", "row 2", "parquet 1", "parquet 2"]

    def read(paths):
        return list(TextSource(paths=paths, validation_fraction=0).documents())

    assert read(str(tmp_path)) == expected
    assert read(str(tmp_path / "**" / "*.jsonl")) == ["row 1", "row 2"]
    assert read([str(tmp_path / "b.txt"), str(tmp_path)]) == [expected[1], expected[0], *expected[2:]]
    (tmp_path / "other.jsonl").write_text('{"body": "row 3"}\n')
    other = TextSource(paths=str(tmp_path / "other.jsonl"), validation_fraction=0, text_column="body")
    assert list(other.documents()) == ["row 3"]


def test_provenance_follows_the_contents(tmp_path):
    path = tmp_path / "a.txt"
    path.write_text("one")
    before = TextSource(paths=str(path)).provenance()
    assert before == TextSource(paths=str(path)).provenance() == json.loads(json.dumps(before))
    path.write_text("two")
    assert TextSource(paths=str(path)).provenance() != before


@pytest.mark.parametrize("max_chars", [1, 7, 50, 10_000])
def test_long_files_are_cut_without_loss(max_chars):
    rng = random.Random(max_chars)
    lines = ["".join(rng.choices("ab c", k=rng.randrange(30))) * rng.randrange(3) + "\n" for _ in range(300)]
    lines[-1] = "no line end"
    pieces = list(cut_lines(iter(lines), max_chars))
    assert "".join(pieces) == "".join(lines)
    assert all(0 < len(piece) <= max_chars for piece in pieces)


def test_long_files_are_cut_at_blank_lines(tmp_path):
    paragraphs = [f"paragraph {index}\n" + "some words\n" * 5 + "\n" for index in range(40)]
    (tmp_path / "long.txt").write_text("".join(paragraphs))
    documents = list(
        TextSource(paths=str(tmp_path / "long.txt"), validation_fraction=0, max_document_chars=200).documents()
    )
    assert len(documents) > 10
    assert all(document.startswith("paragraph") and document.endswith("\n\n") for document in documents)
    whole = TextSource(paths=str(tmp_path / "long.txt"), validation_fraction=0, max_document_chars=None)
    assert list(whole.documents()) == ["".join(paragraphs)]


def sources_to_resume(folder: Path) -> list:
    (folder / "long.txt").write_text("".join(f"paragraph {index}\n\n" for index in range(60)))
    rows = [f"row {index}" if index % 5 else " " for index in range(50)]
    (folder / "rows.jsonl").write_text("".join(json.dumps({"text": row}) + "\n" for row in rows))
    texts = TextSource(paths=str(folder), validation_fraction=0.3, max_document_chars=40)
    limited = TextSource(paths=str(folder), validation_fraction=0.3, max_document_chars=40, max_documents=30)
    hub = folder / "hub"
    hub.mkdir()
    for file in range(2):
        fineweb_rows([f"hub {file} {row}" for row in range(15)]).to_parquet(hub / f"train-{file}.parquet")
    return [texts, limited, HubSource(dataset=str(hub), validation_fraction=0.3)]


def test_reading_resumes_at_any_document(tmp_path):
    for source in sources_to_resume(tmp_path):
        for split in ("train", "validation"):
            pairs = list(source.documents_from(split))
            assert pairs[-1][0] is None and all(text is not None for text, _ in pairs[:-1])
            for index, (_, position) in enumerate(pairs[:-1]):
                assert list(source.documents_from(split, position)) == pairs[index + 1 :]
        both = [text for split in ("train", "validation") for text in source.documents(split)]
        everything = [text for part in source.parts("train") for text in source.read(part) if text.strip()]
        assert sorted(both) == sorted(everything[: source.max_documents])
        num_read = list(source.documents_from("train"))[-1][1].num_read
        assert num_read == len(everything[: source.max_documents])
        assert START == (0, 0, 0)


def test_local_parquet_reads_the_same_by_either_library(parquet_folder):
    folder, texts = parquet_folder
    hub = HubSource(dataset=str(folder), validation_fraction=0)
    assert len(hub.parts("train")) == 3
    assert list(hub.documents()) == texts
    assert list(TextSource(paths=str(folder), validation_fraction=0).documents()) == texts
    limited = HubSource(dataset=str(folder), validation_fraction=0, max_documents=25)
    assert list(limited.documents()) == texts[:25]
    assert hub.provenance() == HubSource(dataset=str(folder), validation_fraction=0).provenance()
    assert json.loads(json.dumps(hub.provenance()))["sha256"]


def test_first_files_as_validation(parquet_folder):
    folder, texts = parquet_folder
    source = FineWebEduSource(dataset=str(folder), config=None, revision=None)
    assert list(source.documents("validation")) == texts[:20]
    assert list(source.documents("train")) == texts[20:]
    with pytest.raises(ValueError, match="validation_parts=3 leaves nothing"):
        HubSource(dataset=str(folder), validation_parts=3).parts("train")


def test_another_config_as_validation(tmp_path):
    configs = {"sample-100BT": ["shared", "train only"], "sample-10BT": ["shared", "validation only"]}
    readme = "---\nconfigs:\n"
    for config, texts in configs.items():
        (tmp_path / config).mkdir()
        fineweb_rows(texts).to_parquet(tmp_path / config / "0.parquet")
        readme += f"- config_name: {config}\n  data_files:\n  - split: train\n    path: {config}/*\n"
    (tmp_path / "README.md").write_text(readme + "---\n")
    source = FineWebSource(dataset=str(tmp_path), revision=None)
    assert list(source.documents("train")) == ["shared", "train only"]
    assert list(source.documents("validation")) == ["shared", "validation only"]
    assert source.exclude_validation


def test_paper_recipes_are_pinned():
    fineweb, edu = FineWebSource().provenance(), FineWebEduSource().provenance()
    assert (fineweb["dataset"], fineweb["config"]) == ("HuggingFaceFW/fineweb", "sample-100BT")
    assert fineweb["revision"] == "9bb295ddab0e05d785b879661af7260fed5140fc"
    assert fineweb["validation_config"] == "sample-10BT"
    assert edu["revision"] == "87f09149ef4734204d70ed1d046ddc9ca3f2b8f9"
    assert {name: source.__name__ for name, source in SOURCES.items()}.keys() >= {"stdlib", "text", "hub", "fineweb"}


def write(path: Path, content: bytes) -> Path:
    path.write_bytes(content)
    return path


@pytest.mark.parametrize(
    "name, content, message",
    [
        ("a.txt", b"", "a.txt is empty"),
        ("a.txt", b" \n \n", "holds no documents"),
        ("a.txt", b"caf\xe9", "a.txt is not UTF-8"),
        ("a.csv", b"x", "suffix '.csv' is not one of"),
        ("a.jsonl", b'{"text": "x"}\n{"text":', "a.jsonl, line 2 is not JSON"),
        ("a.jsonl", b'{"body": "x"}\n', "line 1: no string under 'text' .*has body"),
        ("a.jsonl", b'["x"]\n', "line 1: no string under 'text' .*is no object"),
        ("a.jsonl", b'{"text": "x\\ud800"}\n', "line 1: .*unpaired surrogate"),
        ("a.parquet", b"PAR1 nonsense", "a.parquet is not a readable Parquet file"),
    ],
)
def test_bad_files_are_named(tmp_path, name, content, message):
    path = write(tmp_path / name, content)
    with pytest.raises(ValueError, match=message):
        list(TextSource(paths=str(path), validation_fraction=0).documents())


def test_bad_places_and_options_are_named(tmp_path, parquet_folder):
    with pytest.raises(FileNotFoundError, match="missing.txt"):
        TextSource(paths=str(tmp_path / "missing.txt")).parts("train")
    (tmp_path / "folder").mkdir()
    with pytest.raises(ValueError, match="holds no file ending in .txt"):
        TextSource(paths=str(tmp_path / "folder")).parts("train")
    with pytest.raises(ValueError, match=r"no column 'content'; it has text, id.*set text_column"):
        list(TextSource(paths=str(parquet_folder[0]), text_column="content").documents())
    with pytest.raises(ValueError, match=r"no column 'content'; it has text, id.*set text_column"):
        list(HubSource(dataset=str(parquet_folder[0]), text_column="content").documents())
    with pytest.raises(ValueError, match="cannot open .* split test"):
        list(HubSource(dataset=str(parquet_folder[0]), split="test").documents())
    with pytest.raises(ValueError, match="revision is missing"):
        HubSource(dataset="owner/name")
    for options in ({"validation_fraction": 1}, {"max_documents": 0}, {"exclude_validation": "yes"}):
        with pytest.raises(ValueError, match=next(iter(options))):
            StdlibSource(**options)
    for options in ({"paths": []}, {"paths": 5}, {"paths": "x", "max_document_chars": 0}):
        with pytest.raises(ValueError, match=list(options)[-1]):
            TextSource(**options)
    with pytest.raises(ValueError, match="split='val'"):
        list(StdlibSource().documents("val"))
