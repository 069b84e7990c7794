"""The command `looped laws` as a user types it: every subcommand, its refusals, one self-contained report."""

import json
import re
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest

from modeling_looped.laws import plots, read_table
from modeling_looped.laws.cli import COMMANDS, main
from modeling_looped.laws.reproduce import Reference, Row
from modeling_looped.laws.speed import measure
from modeling_looped.laws.tables import table_from_rows

ASSETS = Path(__file__).parent / "assets" / "laws"
LADDERS = str(ASSETS / "qlabs_fineweb_ladders.csv")


@pytest.fixture
def grid_table(tmp_path):
    rng = np.random.default_rng(0)
    size, tokens = (a.ravel() for a in np.meshgrid(np.geomspace(3e7, 1e10, 6), np.geomspace(1e9, 5e11, 6)))
    loss = (1.8 + 480 * size**-0.35 + 2100 * tokens**-0.37) * np.exp(0.003 * rng.standard_normal(36))
    path = tmp_path / "runs.csv"
    lines = ["# loss: nats", "params,tokens,loss"]
    path.write_text(
        "\n".join(lines + [f"{n:.8g},{t:.8g},{l:.8g}" for n, t, l in zip(size, tokens, loss, strict=True)])
    )
    return path


def test_fit_prints_and_writes(tmp_path, capsys):
    out, png = tmp_path / "fit.json", tmp_path / "profiles.png"
    arguments = ["fit", LADDERS, "--where", "arm=vanilla", "--bootstrap", "50", "--bootstrap-kind", "residual"]
    assert main([*arguments, "--json", str(out), "--plot", str(png)]) == 0
    printed = capsys.readouterr().out
    assert "gamma = 0.1112" in printed and "starts agree" in printed and "50 residual refits" in printed
    written = json.loads(out.read_text())[0]
    assert written["parameters"]["E"] == pytest.approx(1.70643, abs=1e-4)
    assert png.read_bytes()[:4] == b"\x89PNG"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["fit.json", "profiles.png"]


def test_shared_exponents_over_arms(capsys):
    assert main(["fit", LADDERS, "--law", "compute", "--own", "A,E", "--objective", "squares", "--on", "loss"]) == 0
    printed = capsys.readouterr().out
    gammas = set(re.findall(r"gamma = ([\d.]+)", printed.split("converged")[1].split("vanilla:")[1]))
    assert len(gammas) == 1


def test_multiplier_prints_interpolated_and_models(tmp_path, capsys):
    small = tmp_path / "two.csv"
    lines = Path(LADDERS).read_text().splitlines()
    small.write_text("\n".join([lines[0], *[x for x in lines if x.startswith(("vanilla,", "untied_grow,"))]]))
    assert main(["multiplier", str(small), "--baseline", "vanilla", "--at", "1e21"]) == 0
    printed = capsys.readouterr().out
    assert "FLOPs for one loss" in printed
    assert "1.553 @ 1.01e+20" in printed and "weighted by BIC" in printed and "priors:" in printed


def test_allocate_and_plan(grid_table, capsys):
    assert main(["allocate", str(grid_table), "--flops", "1e22", "--max-parameters", "1e9"]) == 0
    printed = capsys.readouterr().out
    assert "limited by parameters" in printed and "closed form without limits" in printed
    assert main(["allocate", str(grid_table), "--flops", "1e22", "--max-tokens", "1e10"]) == 0
    assert "limited by data" in capsys.readouterr().out
    assert main(["allocate", str(grid_table), "--flops", "1e22", "--unique-tokens", "25e9"]) == 0
    assert "9.49 epochs" in capsys.readouterr().out
    assert main(["plan", str(grid_table), "--flops", "1e20", "--noise", "0.002"]) == 0
    assert "expected within" in capsys.readouterr().out
    assert main(["plan", LADDERS, "--where", "arm=vanilla", "--flops", "1e21", "--check", "5"]) == 0
    assert "simulated 5 times" in capsys.readouterr().out


class _Page(HTMLParser):
    def __init__(self):
        super().__init__()
        self.references, self.images, self.open_tags = [], 0, []

    def handle_starttag(self, tag, attributes):
        attributes = dict(attributes)
        self.images += tag == "img"
        self.references += [attributes[k] for k in ("src", "href") if k in attributes]
        assert tag not in ("script", "link", "iframe")
        if tag not in ("img", "meta", "br"):
            self.open_tags.append(tag)

    def handle_endtag(self, tag):
        assert self.open_tags.pop() == tag


def test_report_is_one_file_without_network(tmp_path, grid_table, capsys):
    out = tmp_path / "report.html"
    assert main(["report", str(grid_table), "--out", str(out)]) == 0
    text = out.read_text()
    page = _Page()
    page.feed(text)
    assert page.open_tags == [] and page.images >= 2
    assert all(r.startswith("data:image/png;base64,") for r in page.references)
    for needed in (
        "approach 2 (isoFLOP)",
        "surface without formula",
        "L(N, T)",
        "objective",
        "identified",
        "Largest run left out",
        "declared",
    ):
        assert needed in text
    small = tmp_path / "two.csv"
    lines = Path(LADDERS).read_text().splitlines()
    small.write_text("\n".join([lines[0], *[x for x in lines if x.startswith(("vanilla,", "untied_grow,"))]]))
    assert main(["report", str(small), "--baseline", "vanilla", "--out", str(out), "--law", "compute"]) == 0
    text = out.read_text()
    assert "Exponent or constant?" in text and "1.553" in text and "Priors" in text


def test_report_shows_refusals(tmp_path):
    out = tmp_path / "report.html"
    table = ASSETS / "qlabs_ladders_with_N_T.csv"
    assert main(["report", str(table), "--where", "arm=vanilla", "--out", str(out), "--law", "chinchilla"]) == 0
    assert "Refused: runs on one line" in out.read_text()


def test_refusals_and_wrong_input_exit_with_one(tmp_path, grid_table, capsys):
    assert main(["fit", str(tmp_path / "none.csv")]) == 1
    assert "no table" in capsys.readouterr().err
    line = ["fit", str(ASSETS / "qlabs_ladders_with_N_T.csv"), "--law", "chinchilla", "--where", "arm=vanilla"]
    assert main(line) == 1
    assert "refused" in capsys.readouterr().out
    assert main(["multiplier", LADDERS, "--baseline", "plain"]) == 1
    assert "baseline 'plain'" in capsys.readouterr().err
    assert main(["fit", LADDERS, "--where", "arm=plain"]) == 1
    assert main(["fit", LADDERS, "--objective", "squares", "--delta", "0.1"]) == 1
    assert "does not take ['delta']" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["fits"])


def test_mixed_recipes_stop_the_command_unless_allowed(tmp_path, capsys):
    rows = ["flops,loss,recipe"]
    rows += [f"{1e18 * 2**i},{1.7 + 1.6 * 2 ** (-0.15 * i)},{'a' if i % 2 else 'b'}" for i in range(8)]
    path = tmp_path / "mixed.csv"
    path.write_text("\n".join(rows))
    assert main(["fit", str(path)]) == 1
    captured = capsys.readouterr()
    assert "mixed recipes" in captured.out and "--allow" in captured.err
    assert main(["fit", str(path), "--allow", "mixed recipes"]) == 0


def test_parameters_in_millions_stop_the_command(tmp_path, capsys):
    rows = ["params,tokens,flops,loss"]
    rows += [f"{100 * 2**i},{2e9 * 2**i},{6 * 1e8 * 2e9 * 4**i},{3.5 - 0.1 * i}" for i in range(8)]
    path = tmp_path / "millions.csv"
    path.write_text("\n".join(rows))
    assert main(["fit", str(path)]) == 1
    assert "wrong units" in capsys.readouterr().err


def test_kaplan_and_every_command_has_help(capsys):
    assert main(["kaplan"]) == 0
    printed = capsys.readouterr().out
    assert "does not follow" in printed and "table 2: alpha_N 0.076" in printed
    for command in COMMANDS:
        with pytest.raises(SystemExit) as stop:
            main([command, "--help"])
        assert stop.value.code == 0


def test_reproduce_needs_a_folder_of_references(tmp_path, capsys, monkeypatch):
    monkeypatch.delenv("LOOPED_REFERENCE_DIR", raising=False)
    assert main(["reproduce"]) == 1
    assert "LOOPED_REFERENCE_DIR" in capsys.readouterr().err
    assert main(["reproduce", str(tmp_path)]) == 1
    assert "neither scaling/ nor paper/" in capsys.readouterr().err
    (tmp_path / "scaling").mkdir()
    reference = Reference(tmp_path)
    assert reference.path("scaling/none.csv") is None and reference.missing == ["scaling/none.csv"]
    assert main(["reproduce", str(tmp_path)]) == 0
    assert "missing files" in capsys.readouterr().out


def test_verdicts_of_reproduced_values():
    assert Row("s", "n", 1.0, 1.0005, 0.001).verdict == "reproduced"
    assert Row("s", "n", 1.0, 1.002, 0.001).verdict == "DIFFERS"
    assert Row("s", "n", 100.0, 119.0, 0.2, relative=True).verdict == "reproduced"
    assert Row("s", "n", 1.0, 1.0001, 0.0, at_most=True).verdict == "DIFFERS"
    assert Row("s", "n", 1.0, float("nan"), 0.1).verdict == "DIFFERS"


def test_grid_of_starts_is_no_better_than_the_fit(grid_table):
    found = measure(read_table(grid_table), every=60, refits=20)
    assert found["grid_starts"] == 75
    assert found["fit_objective"] <= found["grid_objective"] * (1 + 1e-9)


def test_simulate_reports_coverage(grid_table, capsys):
    assert main(["simulate", str(grid_table), "--draws", "5", "--noise", "0.002"]) == 0
    assert "95% intervals cover" in capsys.readouterr().out


def test_isoflop_plot(tmp_path):
    from modeling_looped.laws.approaches import approach_2

    table = read_table(ASSETS / "qlabs_isocompute_tpp.csv")
    table = table.where(table.arms() == "vanilla")
    labels = table["budget_ref_depth"]
    found = approach_2(table["compute_flops"], table["num_parameters"], table["loss"], budgets=labels)
    optima = dict(zip(np.unique(labels).tolist(), [r["optimum"] for r in found["optima"]], strict=True))
    plots.save(plots.plot_budgets(table["num_parameters"], table["loss"], labels, optima), tmp_path / "iso.png")
    assert (tmp_path / "iso.png").stat().st_size > 5000


def test_laws_import_nothing_else_of_the_project():
    import ast

    folder = Path(__file__).parents[1] / "modeling_looped" / "laws"
    allowed = {"numpy", "scipy", "modeling_looped.laws"}
    for path in folder.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
            names += [node.module] if isinstance(node, ast.ImportFrom) else []
            for name in names:
                root = name.split(".")[0]
                if root in (
                    "torch",
                    "transformers",
                    "modeling_looped",
                    "matplotlib",
                    "scipy",
                    "numpy",
                    "yaml",
                    "pandas",
                ):
                    inside = any(name == a or name.startswith(a + ".") for a in allowed)
                    assert inside or (root == "matplotlib" and path.name == "plots.py"), f"{path.name} imports {name}"


def test_a_table_of_one_arm_needs_no_arm_column():
    table = table_from_rows([{"flops": 1e18 * 2**i, "loss": 3.0 - 0.1 * i} for i in range(6)])
    assert set(table.arms()) == {"all"}
