"""Run tables and their lint: what is read, what is refused, and each negative control flagged by name."""

import json
import math
from pathlib import Path

import numpy as np
import pytest

from modeling_looped.laws import read_table
from modeling_looped.laws.lint import LINTS, lint, usable
from modeling_looped.laws.tables import table_from_rows

ASSETS = Path(__file__).parent / "assets" / "laws"


def rows(n=12, arm="plain", **extra):
    size = np.geomspace(1e8, 1e10, n)
    tokens = 20 * size * np.tile([0.5, 1.0, 2.0], n)[:n]
    loss = 1.8 + 480 * size**-0.35 + 2100 * tokens**-0.37
    return [
        {"arm": arm, "n_params": s, "tokens": t, "flops": 6 * s * t, "loss": l, **extra}
        for s, t, l in zip(size, tokens, loss, strict=True)
    ]


def names(table, severity=None):
    return {f.rule for f in lint(table) if severity is None or f.severity == severity}


def test_clean_table_has_no_errors_or_warnings():
    declared = {"loss": "nats", "parameters": "stored", "flops": "6 N T", "tokens": "seen"}
    assert names(table_from_rows(rows(), declared)) == set()


@pytest.mark.parametrize("name", sorted(p.name for p in ASSETS.glob("*.csv")))
def test_published_tables_pass_without_errors(name):
    table = read_table(ASSETS / name)
    assert names(table, "error") == set()
    assert usable(table).all()


def test_mixed_recipes_are_an_error():
    mixed = rows(6, recipe="tuned") + rows(6, recipe="base")
    assert "mixed recipes" in names(table_from_rows(mixed), "error")
    apart = rows(6, arm="a", recipe="tuned") + rows(6, arm="b", recipe="base")
    assert "mixed recipes" not in names(table_from_rows(apart))


@pytest.mark.parametrize(
    "column, factor", [("n_params", 1e-6), ("n_params", 1e-9), ("tokens", 1e-9), ("flops", 1e-18)]
)
def test_wrong_units_are_an_error(column, factor):
    given = rows()
    for row in given:
        row[column] *= factor
    assert "wrong units" in names(table_from_rows(given), "error")


def test_parameters_in_millions_without_compute():
    given = [{k: v for k, v in r.items() if k != "flops"} | {"n_params": r["n_params"] / 1e6} for r in rows()]
    assert "wrong units" in names(table_from_rows(given), "error")


def test_mixed_conventions():
    given = rows(parameter_convention="stored")
    given[3]["parameter_convention"] = "executed"
    assert "mixed conventions" in names(table_from_rows(given), "error")
    given = rows()
    for row in given[::2]:
        row["n_params"] *= 3
    assert "mixed conventions" in names(table_from_rows(given), "warning")


def test_unfinished_and_diverged_runs_are_left_out():
    given = rows(status="finished")
    given[2]["status"], given[5]["loss"] = "diverged", float("nan")
    table = table_from_rows(given)
    assert {"unfinished runs", "bad losses"} <= names(table, "warning")
    assert np.flatnonzero(~usable(table)).tolist() == [2, 5]
    short = table_from_rows([r | {"steps": 90 if i == 1 else 100, "planned_steps": 100} for i, r in enumerate(rows())])
    assert np.flatnonzero(~usable(short)).tolist() == [1]


def test_duplicates_outliers_undertrained():
    given = rows(12)
    given.append(dict(given[4]))
    given[7] = given[7] | {"loss": given[7]["loss"] + 0.3}
    given[0] = given[0] | {"tokens": given[0]["n_params"] / 2}
    found = {f.rule: f for f in lint(table_from_rows(given))}
    assert found["duplicates"].rows == (12,)
    assert 7 in found["outliers"].rows
    assert found["undertrained"].rows == (0,)


def test_run_of_another_recipe_in_a_ladder_is_found():
    table = read_table(ASSETS / "qlabs_fineweb_ladders.csv")
    part = table.where(table.arms() == "vanilla")
    part.columns["loss"] = part["loss"].copy()
    part.columns["loss"][3] += 0.03
    assert any(f.rule == "outliers" and 3 in f.rows for f in lint(part))


def test_line_and_undeclared_are_noted():
    size = np.geomspace(1e8, 1e10, 6)
    table = table_from_rows([{"params": s, "tokens": 20 * s, "loss": 3.0 - 0.01 * i} for i, s in enumerate(size)])
    assert {"runs on one line", "undeclared conventions"} <= names(table, "note")


def test_perplexity_is_refused_as_a_loss():
    given = [r | {"loss": math.exp(r["loss"])} for r in rows()]
    assert "loss units" in names(table_from_rows(given), "error")


def test_every_lint_can_fire():
    size = np.geomspace(1e8, 1e10, 8)
    losing = [{"flops": 1e18 * 2**i, "loss": 3.0 - 0.1 * i + (0.5 if i == 4 else 0)} for i in range(8)]
    fired = {f.rule for f in lint(table_from_rows(losing))}
    assert "beaten by cheaper runs" in fired
    assert set(LINTS) >= fired and len(size) == 8


def test_csv_jsonl_and_run_dirs_read_alike(tmp_path):
    given = rows(4)
    head = list(given[0])
    lines = ["# loss: nats", "# parameters: stored", ",".join(head)] + [
        ",".join(str(r[k]) for k in head) for r in given
    ]
    (tmp_path / "runs.csv").write_text("\n".join(lines))
    records = [{"conventions": {"loss": "nats", "parameters": "stored"}}, *given]
    (tmp_path / "runs.jsonl").write_text("\n".join(json.dumps(r) for r in records))
    folder = tmp_path / "runs"
    for i, row in enumerate(given):
        (folder / f"run{i}").mkdir(parents=True)
        nested = {"arm": row["arm"], "final": {"val_loss": row["loss"]}} | {
            k: row[k] for k in ("n_params", "tokens", "flops")
        }
        (folder / f"run{i}" / "results.json").write_text(json.dumps(nested))
    (folder / "conventions.json").write_text(json.dumps({"loss": "nats", "parameters": "stored"}))
    tables = [read_table(p) for p in (tmp_path / "runs.csv", tmp_path / "runs.jsonl", folder)]
    for table in tables:
        assert table.conventions == {"loss": "nats", "parameters": "stored"}
        for column in ("loss", "num_parameters", "num_tokens", "compute_flops"):
            np.testing.assert_allclose(table[column], tables[0][column], rtol=1e-12)


def test_bits_become_nats_and_unknown_units_are_refused():
    table = table_from_rows(rows(3), {"loss": "bits, FineWeb"})
    np.testing.assert_allclose(table.loss_in_nats(), table["loss"] * math.log(2))
    with pytest.raises(ValueError, match="nats per token"):
        table_from_rows(rows(3), {"loss": "bits_per_byte"}).loss_in_nats()


def test_errors_name_file_column_and_choice(tmp_path):
    with pytest.raises(FileNotFoundError, match="no table"):
        read_table(tmp_path / "none.csv")
    (tmp_path / "two.csv").write_text("flops,compute,loss\n1,2,3\n")
    with pytest.raises(ValueError, match=r"\['flops', 'compute'\] all mean compute_flops"):
        read_table(tmp_path / "two.csv")
    assert read_table(tmp_path / "two.csv", rename={"compute_flops": "compute"})["compute_flops"][0] == 2
    (tmp_path / "ragged.csv").write_text("flops,loss\n1,2\n3\n")
    with pytest.raises(ValueError, match="row 3"):
        read_table(tmp_path / "ragged.csv")
    (tmp_path / "empty.csv").write_text("flops,loss\n")
    with pytest.raises(ValueError, match="no runs"):
        read_table(tmp_path / "empty.csv")
    (tmp_path / "bad.jsonl").write_text('{"loss": 3}\n{oops\n')
    with pytest.raises(ValueError, match="line 2"):
        read_table(tmp_path / "bad.jsonl")
    with pytest.raises(ValueError, match="unknown conventions"):
        read_table(tmp_path / "two.csv", conventions={"los": "nats"}, rename={"compute_flops": "flops"})
    with pytest.raises(ValueError, match="no column num_tokens"):
        table_from_rows([{"flops": 1, "loss": 3}])["num_tokens"]
