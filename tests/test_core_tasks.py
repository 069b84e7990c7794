"""Task sets, rows and the bundle: what is read, and what is refused with which words."""

import hashlib
import http.server
import io
import json
import threading
import zipfile

import pytest

from eval import bundle
from eval.tasks import TASK_SETS, Task, TaskError, load_task_set, read_rows


def make_task(**fields):
    defaults = {
        "name": "toy",
        "type": "multiple_choice",
        "num_fewshot": 1,
        "delimiter": " ",
        "file": "toy.jsonl",
        "chance_percent": {"v1": 50.0, "v2": 50.0},
    }
    return Task(**{**defaults, **fields})


GOOD = {
    "multiple_choice": {"query": "q", "choices": ["a", "b"], "gold": 1},
    "schema": {"context_options": ["a", "b"], "continuation": "c", "gold": 0},
    "language_modeling": {"context": "a", "continuation": "b"},
}


def reader(*rows):
    content = "\n".join(row if isinstance(row, str) else json.dumps(row) for row in rows).encode()
    return lambda file: content


@pytest.mark.parametrize("name", [path.stem for path in TASK_SETS.glob("*.yaml")])
def test_task_sets_of_the_project_load(name):
    task_set = load_task_set(name)
    assert task_set.name == name and task_set.tasks


def test_tiny_tasks_have_rows_of_every_kind():
    task_set = load_task_set("tiny")
    read = bundle.open_data(task_set)
    kinds = set()
    for task in task_set.tasks.values():
        assert len(read_rows(task, read)) >= 50
        kinds.add(task.type)
    assert kinds == set(GOOD)


def test_misspelt_key_names_the_nearest(tmp_path):
    text = (TASK_SETS / "tiny.yaml").read_text().replace("num_fewshot: 5", "num_fewshots: 5")
    (tmp_path / "set.yaml").write_text(text)
    with pytest.raises(ValueError, match="'num_fewshots'.*'num_fewshot'"):
        load_task_set(tmp_path / "set.yaml")


def test_unknown_task_set_and_task():
    with pytest.raises(FileNotFoundError, match="core, tiny"):
        load_task_set("cores")
    with pytest.raises(ValueError, match="Did you mean 'counting'"):
        load_task_set("tiny").select(["countin"])


@pytest.mark.parametrize("kind", GOOD)
def test_good_rows_pass(kind):
    assert read_rows(make_task(type=kind), reader(GOOD[kind], GOOD[kind])) == [GOOD[kind]] * 2


def test_line_separators_inside_strings_do_not_split_rows():
    row = {"context": "one\u2028two\x85", "continuation": "c"}
    content = json.dumps(row, ensure_ascii=False).encode()
    assert read_rows(make_task(type="language_modeling"), lambda file: content) == [row]


@pytest.mark.parametrize(
    "kind, change, words",
    [
        ("multiple_choice", {"gold": None}, "'gold'"),
        ("multiple_choice", {"gold": 2}, "index into the 2 options, got 2"),
        ("multiple_choice", {"gold": -1}, "got -1"),
        ("multiple_choice", {"gold": True}, "got True"),
        ("multiple_choice", {"choices": ["a", " "]}, r"choices\[1\].*nothing to score"),
        ("multiple_choice", {"choices": ["a"]}, "at least two options"),
        ("multiple_choice", {"choices": ["a", 3]}, "must be a string, got 3"),
        ("schema", {"continuation": ""}, "'continuation' is empty"),
        ("language_modeling", {"continuation": "\n"}, "'continuation' is empty"),
        ("language_modeling", {"context": 7}, "must be a string"),
    ],
)
def test_bad_rows_are_refused_with_their_line(kind, change, words):
    with pytest.raises(TaskError, match=f"toy.jsonl line 2.*{words}"):
        read_rows(make_task(type=kind), reader(GOOD[kind], {**GOOD[kind], **change}))


@pytest.mark.parametrize("kind", GOOD)
def test_missing_key_is_named(kind):
    for key in GOOD[kind]:
        row = {k: v for k, v in GOOD[kind].items() if k != key}
        with pytest.raises(TaskError, match=f"needs the key '{key}'"):
            read_rows(make_task(type=kind), reader(row))


def test_broken_files_are_refused():
    with pytest.raises(TaskError, match="line 1: not JSON"):
        read_rows(make_task(), reader("{"))
    with pytest.raises(TaskError, match="expected a JSON object, got list"):
        read_rows(make_task(), reader([1]))
    with pytest.raises(TaskError, match="no rows"):
        read_rows(make_task(), lambda file: b"")
    with pytest.raises(TaskError, match="not UTF-8"):
        read_rows(make_task(), lambda file: b"\xff")


def test_missing_file_and_wrong_hash(tmp_path):
    with pytest.raises(TaskError, match="toy.jsonl cannot be read"):
        read_rows(make_task(), lambda file: (tmp_path / file).read_bytes())
    content = json.dumps(GOOD["multiple_choice"]).encode()
    task = make_task(sha256=hashlib.sha256(content).hexdigest())
    assert read_rows(task, lambda file: content)
    with pytest.raises(TaskError, match=f"expected {task.sha256}"):
        read_rows(task, lambda file: content + b"\n")


def test_bundle_in_a_folder_or_a_zip_reads_alike(tmp_path):
    inner = tmp_path / "folder" / "eval_bundle" / "eval_data" / "kind"
    inner.mkdir(parents=True)
    (inner / "a.jsonl").write_text("rows")
    with zipfile.ZipFile(tmp_path / "b.zip", "w") as archive:
        archive.write(inner / "a.jsonl", "eval_bundle/eval_data/kind/a.jsonl")
    for path in (tmp_path / "folder", tmp_path / "folder" / "eval_bundle", tmp_path / "b.zip"):
        assert bundle.open_bundle(path)("kind/a.jsonl") == b"rows"


def test_missing_or_foreign_bundle_says_what_to_do(tmp_path, monkeypatch):
    monkeypatch.setenv("LOOPED_CORE_BUNDLE", str(tmp_path / "none.zip"))
    with pytest.raises(FileNotFoundError, match="eval.bundle download"):
        bundle.open_bundle()
    (tmp_path / "broken.zip").write_bytes(b"PK")
    with pytest.raises(ValueError, match="not a zip"):
        bundle.open_bundle(tmp_path / "broken.zip")
    with pytest.raises(ValueError, match="no CORE bundle"):
        bundle.open_bundle(tmp_path)


class BreakingServer(http.server.BaseHTTPRequestHandler):
    """Sends half of `content` on the first request and honours ranges on later ones."""

    content = b""
    ranges = []

    def do_GET(self):
        asked = self.headers.get("Range")
        BreakingServer.ranges.append(asked)
        start = int(asked.removeprefix("bytes=").rstrip("-")) if asked else 0
        body = self.content[start:]
        self.send_response(206 if asked else 200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body if asked else body[: len(body) // 2])

    def log_message(self, *arguments):
        pass


def test_download_resumes_and_refuses_other_data(tmp_path, monkeypatch):
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.writestr("eval_bundle/eval_data/a.jsonl", "x" * 1000)
    BreakingServer.content, BreakingServer.ranges = buffer.getvalue(), []
    server = http.server.HTTPServer(("127.0.0.1", 0), BreakingServer)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    url = f"http://127.0.0.1:{server.server_port}/bundle.zip"
    target = tmp_path / "bundle.zip"
    try:
        monkeypatch.setattr(bundle, "verify", lambda path: [])
        with pytest.raises(ConnectionError):
            bundle.download(url, target)
        half = (tmp_path / "bundle.zip.part").stat().st_size
        assert not target.exists() and 0 < half < len(BreakingServer.content)
        bundle.download(url, target)
        assert target.read_bytes() == BreakingServer.content
        assert BreakingServer.ranges == [None, f"bytes={half}-"]
        with pytest.raises(FileExistsError):
            bundle.download(url, target)

        monkeypatch.undo()
        target.unlink()
        (tmp_path / "bundle.zip.part").write_bytes(BreakingServer.content[:10])
        with pytest.raises(ValueError, match="not the public CORE bundle"):
            bundle.download(url, target)
        assert not target.exists() and not (tmp_path / "bundle.zip.part").exists()
    finally:
        server.shutdown()


def test_the_public_bundle_verifies(reference_dir, capsys):
    path = reference_dir / "data" / "core" / "eval_bundle.zip"
    if not path.is_file():
        pytest.skip(f"reference data not found at {path}")
    assert bundle.main(["verify", str(path)]) == 0
    task_set = load_task_set("core")
    read = bundle.open_bundle(path)
    counts = {name: len(read_rows(task, read)) for name, task in task_set.tasks.items()}
    assert counts == {name: task.num_rows for name, task in task_set.tasks.items()}
    assert sum(counts.values()) == 91037


def test_verify_names_what_is_missing(tmp_path, capsys):
    (tmp_path / "eval_data").mkdir()
    assert bundle.main(["verify", str(tmp_path)]) == 1
    assert "world_knowledge/arc_easy.jsonl: missing" in capsys.readouterr().err
