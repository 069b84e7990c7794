"""The public CORE bundle: where it is, how it is fetched, whether it is the right one.

    python -m eval.bundle download        fetch it once into the cache (resumes a broken download), then verify
    python -m eval.bundle verify [PATH]   check the sha256 of every data file of the 22 tasks
    python -m eval.bundle path            print where it would be read from

PATH is the zip or an unpacked folder. Without it: the environment variable LOOPED_CORE_BUNDLE, else the cache.
"""

import argparse
import hashlib
import os
import sys
import urllib.error
import urllib.request
import zipfile
from collections.abc import Callable
from pathlib import Path

from eval.tasks import Task, TaskSet, load_task_set

# The address nanochat and the paper's code download from; unversioned, hence the sha256 of every file.
BUNDLE_URL = "https://karpathy-public.s3.us-west-2.amazonaws.com/eval_bundle.zip"
DATA_FOLDERS = ("eval_data", "eval_bundle/eval_data")


def default_bundle_path() -> Path:
    """LOOPED_CORE_BUNDLE where it is set, else eval_bundle.zip in the user's cache."""
    if configured := os.environ.get("LOOPED_CORE_BUNDLE"):
        return Path(configured)
    cache = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache"))
    return cache / "modeling_looped" / "eval_bundle.zip"


def open_bundle(path: str | Path | None = None) -> Callable[[str], bytes]:
    """Reader (data file name -> bytes) of the bundle at `path`: a zip or a folder.

    Raises FileNotFoundError when there is none, with what to do, and ValueError for something that is no bundle.
    """
    path = default_bundle_path() if path is None else Path(path)
    if path.is_dir():
        return _open_folder(path)
    if path.is_file():
        return _open_zip(path)
    raise FileNotFoundError(
        f"No CORE bundle at {path}. Fetch it with `python -m eval.bundle download`, or name a copy with --bundle or "
        f"the environment variable LOOPED_CORE_BUNDLE (its zip or the unpacked folder)."
    )


def open_data(task_set: TaskSet, bundle: str | Path | None = None) -> Callable[[str], bytes]:
    """Reader of a task set's data files: its own folder, or the CORE bundle."""
    if task_set.folder is None:
        return open_bundle(bundle)
    if bundle is not None:
        raise ValueError(f"Task set {task_set.name!r} brings its own data in {task_set.folder}: leave the bundle out.")
    return lambda file: (task_set.folder / file).read_bytes()


def _open_folder(path: Path) -> Callable[[str], bytes]:
    for inner in DATA_FOLDERS:
        if (path / inner).is_dir():
            return lambda file: (path / inner / file).read_bytes()
    raise ValueError(f"{path} is no CORE bundle: it has no folder {' or '.join(DATA_FOLDERS)}.")


def _open_zip(path: Path) -> Callable[[str], bytes]:
    try:
        with zipfile.ZipFile(path) as archive:
            names = set(archive.namelist())
    except zipfile.BadZipFile as error:
        raise ValueError(f"{path} is not a zip file: {error}. Delete it and download again.") from error
    for inner in DATA_FOLDERS:
        if any(name.startswith(inner + "/") for name in names):
            break
    else:
        raise ValueError(f"{path} is no CORE bundle: it has no folder {' or '.join(DATA_FOLDERS)}.")

    def read(file: str) -> bytes:
        with zipfile.ZipFile(path) as archive:
            return archive.read(f"{inner}/{file}")

    return read


def file_hashes(tasks: dict[str, Task], read: Callable[[str], bytes]) -> dict[str, str]:
    """sha256 of every data file of the tasks, by file name; missing files raise what `read` raises."""
    return {file: hashlib.sha256(read(file)).hexdigest() for file in sorted({t.file for t in tasks.values()})}


def verify(path: str | Path | None = None) -> list[str]:
    """What is wrong with the bundle at `path`, one line per data file; empty when all are the public ones."""
    read = open_bundle(path)
    problems = {}
    for task in load_task_set("core").tasks.values():
        try:
            digest = hashlib.sha256(read(task.file)).hexdigest()
        except (OSError, KeyError):
            problems[task.file] = f"{task.file}: missing"
            continue
        if digest != task.sha256:
            problems[task.file] = f"{task.file}: sha256 {digest}, expected {task.sha256}"
    return list(problems.values())


def download(url: str = BUNDLE_URL, destination: Path | None = None, report: Callable[[int], None] | None = None):
    """Fetches `url` to `destination` and verifies it; a broken download is taken up where it stopped.

    Returns the destination. Raises ConnectionError when the transfer breaks (what came stays for the next try) and
    ValueError when the file is not the public bundle (it is deleted).
    """
    destination = default_bundle_path() if destination is None else Path(destination)
    if destination.exists():
        raise FileExistsError(f"{destination} exists. Check it with `python -m eval.bundle verify`, or delete it.")
    destination.parent.mkdir(parents=True, exist_ok=True)
    part = destination.with_name(destination.name + ".part")
    done = part.stat().st_size if part.exists() else 0
    request = urllib.request.Request(url, headers={"Range": f"bytes={done}-"} if done else {})
    try:
        with urllib.request.urlopen(request, timeout=60) as response:
            # 206: the server sends the rest; 200: it ignored the range and sends everything
            resumed = response.status == 206
            expected = response.headers.get("Content-Length")
            received = 0
            with open(part, "ab" if resumed else "wb") as f:
                while block := response.read(1 << 20):
                    f.write(block)
                    received += len(block)
                    if report is not None:
                        report(done * resumed + received)
        if expected is not None and received < int(expected):
            raise ConnectionError(f"{url}: the connection ended after {received} of {expected} bytes.")
    except urllib.error.HTTPError as error:
        if error.code != 416:  # 416: nothing is left to send, the part is complete
            raise ConnectionError(f"{url}: {error}") from error
    except (urllib.error.URLError, TimeoutError) as error:
        raise ConnectionError(f"{url}: {error}. Run the command again to take up the download.") from error
    try:
        problems = verify(part)
    except ValueError as error:
        problems = [str(error)]
    if problems:
        part.unlink()
        raise ValueError(f"What came from {url} is not the public CORE bundle:\n" + "\n".join(problems))
    os.replace(part, destination)
    return destination


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m eval.bundle", description=__doc__.split("\n")[0])
    commands = parser.add_subparsers(dest="command", required=True)
    fetch = commands.add_parser("download", help="fetch the bundle and verify it")
    fetch.add_argument("--url", default=BUNDLE_URL)
    fetch.add_argument("--to", type=Path, help="file to write (default: the cache)")
    check = commands.add_parser("verify", help="check the sha256 of every data file")
    check.add_argument("path", nargs="?", type=Path)
    commands.add_parser("path", help="print where the bundle is read from")
    args = parser.parse_args(argv)
    try:
        if args.command == "download":
            path = download(args.url, args.to, lambda n: print(f"\r{n / 1e6:.1f} MB", end="", file=sys.stderr))
            print(f"\n{path}: complete, every file as expected")
        elif args.command == "verify":
            if problems := verify(args.path):
                print("\n".join(problems), file=sys.stderr)
                return 1
            print(f"{args.path or default_bundle_path()}: all data files of the 22 tasks are the public ones")
        else:
            print(default_bundle_path())
    except (OSError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
