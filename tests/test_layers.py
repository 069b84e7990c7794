"""Who may import whom, and what the files that travel to the Hub may hold: read from the source, importing nothing."""

import ast
import functools
import re
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("modeling_looped", "training", "eval")
# The files that save_pretrained writes beside the weights
HUB_FILES = ("configuration_looped", "boundary", "linear_cross_entropy", "rms_norm", "modeling_looped")
# Lower layers first; a module of the library that is not named here stands beside variants, flops, growth ...
LAYERS = {
    "configuration_looped": 0,
    "boundary": 1,
    "linear_cross_entropy": 1,
    "rms_norm": 0,
    "modeling_looped": 2,
    "cli": 4,
}
BESIDE_VARIANTS = 3
MAX_LINES = 500


def sources(package):
    return sorted((ROOT / package).rglob("*.py"))


def module_name(path):
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@functools.cache
def imported_modules(path):
    """Absolute names of all modules that a file imports, anywhere in it; `from a import b` counts as a and a.b."""
    package = module_name(path).split(".")
    if path.name != "__init__.py":
        package = package[:-1]
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            module = ".".join([*base, *([node.module] if node.module else [])])
            found |= {module} | {f"{module}.{alias.name}" for alias in node.names}
    return found


def inside(name, package):
    return name == package or name.startswith(f"{package}.")


@functools.cache
def is_entry_point(path):
    return any(
        isinstance(node, ast.If) and "__main__" in ast.unparse(node.test) for node in ast.parse(path.read_text()).body
    )


ALL = [path for package in PACKAGES for path in sources(package)]
ids = {"ids": lambda path: str(path.relative_to(ROOT)) if isinstance(path, Path) else None}


def test_the_reader_of_imports_sees_all_forms(tmp_path, monkeypatch):
    """The rules below hold trivially if it is blind."""
    monkeypatch.setitem(globals(), "ROOT", tmp_path)
    path = tmp_path / "top" / "sub" / "file.py"
    path.parent.mkdir(parents=True)
    path.write_text(
        "import a.b\nfrom c import d\nfrom . import e\nfrom .f import g\ndef h():\n    from ..i import j\n"
    )
    assert imported_modules(path) >= {"a.b", "c", "c.d", "top.sub.e", "top.sub.f", "top.i"}


@pytest.mark.parametrize("path", sources("modeling_looped"), **ids)
def test_library_imports_neither_training_nor_eval(path):
    assert not [name for name in imported_modules(path) if inside(name, "training") or inside(name, "eval")]


@pytest.mark.parametrize("path", sources("eval"), **ids)
def test_eval_does_not_import_training(path):
    assert not [name for name in imported_modules(path) if inside(name, "training")]


@pytest.mark.parametrize("path", sorted((ROOT / "modeling_looped").glob("*.py")), **ids)
def test_library_imports_lower_layers_only(path):
    own = -1 if path.name == "__init__.py" else LAYERS.get(path.stem, BESIDE_VARIANTS)
    if own == -1:
        own = LAYERS["modeling_looped"] + 0.5
    for name in imported_modules(path):
        if not inside(name, "modeling_looped") or name == "modeling_looped":
            continue
        imported = name.split(".")[1]
        if not (ROOT / "modeling_looped" / f"{imported}.py").exists():
            continue  # a name from the package itself, or a subpackage
        layer = LAYERS.get(imported, BESIDE_VARIANTS)
        assert layer < own or own == layer == BESIDE_VARIANTS, f"{path.stem} imports {name}"


@pytest.mark.parametrize("path", sources("modeling_looped"), **ids)
def test_library_does_not_import_the_command(path):
    assert not [name for name in imported_modules(path) if inside(name, "modeling_looped.cli")]


@pytest.mark.parametrize("path", sources("modeling_looped/laws"), **ids)
def test_laws_stand_alone(path):
    """Numbers in, numbers out: no model, no torch."""
    allowed = {"numpy", "scipy", "matplotlib", *sys.stdlib_module_names}
    for name in imported_modules(path):
        assert name.split(".")[0] in allowed or inside(name, "modeling_looped.laws"), name


@pytest.mark.parametrize("path", sources("modeling_looped"), **ids)
def test_models_do_not_import_optimizers(path):
    assert not [name for name in imported_modules(path) if inside(name, "torch.optim")]


@pytest.mark.parametrize("path", ALL, **ids)
def test_training_entry_points_are_imported_by_tests_only(path):
    """Modules of eval may be both run and imported: training evaluates through them."""
    entry_points = [module_name(other) for other in sources("training") if is_entry_point(other)]
    assert "training.pretrain" in entry_points
    imported = imported_modules(path)
    assert not [name for name in entry_points if any(inside(other, name) for other in imported)]


def test_imports_of_the_library_are_acyclic():
    modules = {module_name(path): path for path in sources("modeling_looped") if path.name != "__init__.py"}
    graph = {name: imported_modules(path) & modules.keys() for name, path in modules.items()}
    done = set()

    def visit(name, trail):
        assert name not in trail, " -> ".join([*trail, name])
        if name not in done:
            for other in graph[name]:
                visit(other, [*trail, name])
            done.add(name)

    for name in graph:
        visit(name, [])


@pytest.mark.parametrize("name", HUB_FILES)
def test_hub_files_import_only_what_a_stranger_has(name):
    """transformers refuses code that imports a missing package and finds siblings only as `from .sibling import x`."""
    path = ROOT / "modeling_looped" / f"{name}.py"
    allowed = {"torch", "transformers", "huggingface_hub", *sys.stdlib_module_names}
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            assert all(alias.name.split(".")[0] in allowed for alias in node.names), ast.unparse(node)
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            assert node.module.split(".")[0] in allowed, ast.unparse(node)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 1, ast.unparse(node)
            assert node.module in HUB_FILES, ast.unparse(node)
            assert node.col_offset == 0, f"{ast.unparse(node)} is not at the top"


@pytest.mark.parametrize("name", HUB_FILES)
def test_hub_files_have_no_sentence_that_reads_as_an_import(name):
    """Siblings are found by a regular expression that reads docstrings too."""
    path = ROOT / "modeling_looped" / f"{name}.py"
    text = path.read_text()
    found = set(re.findall(r"^\s*from\s+\.(\S*)\s+import", text, flags=re.MULTILINE))
    found |= set(re.findall(r"^\s*import\s+\.(\S+)", text, flags=re.MULTILINE))
    tree = ast.parse(text)
    assert found == {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.level}
    for line in text.splitlines():
        assert not re.match(r"\s*from\s+\.", line) or re.match(r"from \.\w+ import ", line), line


def test_hub_files_are_all_that_the_model_needs():
    """Whatever modeling_looped.py reaches inside the package travels with the checkpoint."""
    reached, todo = set(), ["modeling_looped.modeling_looped"]
    while todo:
        name = todo.pop()
        reached.add(name)
        imported = imported_modules(ROOT / f"{name.replace('.', '/')}.py")
        modules = {module_name(path) for path in sources("modeling_looped")} - {"modeling_looped"}
        todo += sorted((imported & modules) - reached)
    assert reached == {f"modeling_looped.{name}" for name in HUB_FILES}


@pytest.mark.parametrize("path", ALL, **ids)
def test_every_file_says_what_it_owns(path):
    assert path.stem not in ("utils", "common", "helpers", "misc")
    text = path.read_text()
    docstring = ast.get_docstring(ast.parse(text)) or ""
    if path.name != "__init__.py" or text.strip():
        assert docstring, "no module docstring"
    if len(text.splitlines()) > MAX_LINES:
        assert f"{MAX_LINES} lines" in docstring, f"over {MAX_LINES} lines, and the docstring does not say why"


@pytest.mark.parametrize("package", PACKAGES)
def test_packages_of_a_checkout_are_packages(package):
    assert (ROOT / package / "__init__.py").is_file()
