"""What is wrong with a run table before anything is fitted: LINTS, each one question with a name.

An "error" means that pooling these runs gives a wrong answer (mixed recipes, parameters in millions); commands stop at
it unless told `--allow NAME`. A "warning" is printed with every result. A "note" says what the table leaves open.
"""

from dataclasses import dataclass

import numpy as np

from modeling_looped.laws.fitting import FitRefused, fit_law
from modeling_looped.laws.objectives import Huber
from modeling_looped.laws.tables import CONVENTIONS

_FINISHED = {"", "finished", "done", "complete", "completed", "ok", "success", "1", "true"}


@dataclass(frozen=True)
class Finding:
    """One thing found: rule name, severity (error, warning, note), rows concerned (from 0), what to do."""

    rule: str
    severity: str
    rows: tuple
    message: str

    def __str__(self):
        rows = (
            ""
            if not self.rows
            else f" [rows {', '.join(map(str, self.rows[:8]))}{' ...' if len(self.rows) > 8 else ''}]"
        )
        return f"{self.severity}: {self.rule}: {self.message}{rows}"


def lint(table):
    """All findings on a RunTable, errors first."""
    found = [finding for rule in LINTS.values() for finding in rule(table)]
    order = {"error": 0, "warning": 1, "note": 2}
    return sorted(found, key=lambda f: order[f.severity])


def usable(table):
    """Mask of runs with a finite positive loss that are finished and not diverged."""
    mask = np.isfinite(table["loss"]) & (table["loss"] > 0)
    for finding in unfinished_runs(table):
        mask[list(finding.rows)] = False
    return mask


def _rows(mask):
    return tuple(int(i) for i in np.flatnonzero(mask))


def bad_losses(table):
    if "loss" not in table:
        yield Finding(
            "no loss", "error", (), f"no column for the loss among {sorted(table.columns)}; name it with loss=COLUMN"
        )
        return
    bad = ~(np.isfinite(table["loss"]) & (table["loss"] > 0))
    if bad.any():
        yield Finding("bad losses", "warning", _rows(bad), f"{bad.sum()} losses are missing or not positive; left out")


def unfinished_runs(table):
    if "status" in table:
        mask = np.array([s.strip().lower() not in _FINISHED for s in table["status"]])
        if mask.any():
            kinds = sorted(set(table["status"][mask].tolist()))
            yield Finding("unfinished runs", "warning", _rows(mask), f"{mask.sum()} runs are {kinds}; left out")
    if "steps" in table and "planned_steps" in table:
        mask = table["steps"] < 0.999 * table["planned_steps"]
        if mask.any():
            yield Finding(
                "unfinished runs",
                "warning",
                _rows(mask),
                f"{mask.sum()} runs stopped before their planned steps; left out",
            )


def mixed_recipes(table):
    if "recipe" not in table:
        return
    for arm in dict.fromkeys(table.arms().tolist()):
        mask = table.arms() == arm
        recipes = sorted(set(table["recipe"][mask].tolist()))
        if len(recipes) > 1:
            yield Finding(
                "mixed recipes",
                "error",
                _rows(mask),
                f"arm {arm} pools the recipes {recipes}; an exponent over two recipes is neither's. Split the arm or "
                "drop one.",
            )


def mixed_conventions(table):
    for column in ("parameter_convention", "flops_rule", "loss_unit"):
        if column in table and len(set(table[column].tolist())) > 1:
            kinds = sorted(set(table[column].tolist()))
            yield Finding(
                "mixed conventions", "error", (), f"{column} differs between runs: {kinds}; convert them to one"
            )
    ratio = _flops_per_parameter_token(table)
    if ratio is None:
        return
    for arm in dict.fromkeys(table.arms().tolist()):
        mask = (table.arms() == arm) & np.isfinite(ratio)
        if mask.sum() < 3:
            continue
        low, high = np.percentile(ratio[mask], [5, 95])
        if high > 2 * low:
            yield Finding(
                "mixed conventions",
                "warning",
                (),
                f"arm {arm}: FLOPs per parameter and token run from {low:.2f} to {high:.2f}; parameters, tokens or "
                "FLOPs are not counted alike in all runs (embedding? head? repeated blocks?)",
            )


def _flops_per_parameter_token(table):
    if not all(c in table for c in ("compute_flops", "num_parameters", "num_tokens")):
        return None
    with np.errstate(all="ignore"):
        ratio = table["compute_flops"] / (table["num_parameters"] * table["num_tokens"])
    return np.where(np.isfinite(ratio) & (ratio > 0), ratio, np.nan)


def wrong_units(table):
    """Parameters in millions, tokens in billions, compute in PF-days: factors of a thousand against C = 6 N T."""
    ratio = _flops_per_parameter_token(table)
    if ratio is not None and np.isfinite(ratio).any():
        power = float(np.log10(np.nanmedian(ratio) / 6))
        nearest = round(power / 3) * 3
        if nearest != 0 and abs(power - nearest) < 0.6:
            size, tokens = np.nanmedian(table["num_parameters"]), np.nanmedian(table["num_tokens"])
            guess = "parameters" if size < 1e5 else "tokens" if tokens < 1e6 else "compute"
            middle = {"parameters": size, "tokens": tokens, "compute": np.nanmedian(table["compute_flops"])}[guess]
            message = (
                f"compute is {10.0**power:.2g} times 6 N T: {guess} (median {middle:.4g}) seem to be in units of "
            )
            message += f"1e{abs(nearest)}. Multiply the column; exponents survive a unit, levels and N0 do not."
            yield Finding("wrong units", "error", (), message)
            return
    for column, least in (("num_parameters", 1e4), ("num_tokens", 1e5)):
        if column in table:
            values = table[column][np.isfinite(table[column])]
            if len(values) and np.median(values) < least:
                message = f"median {column} is {np.median(values):.4g}: in millions or billions? Multiply the column."
                yield Finding("wrong units", "error", (), message)


def loss_units(table):
    if "loss" not in table:
        return
    declared = table.conventions.get("loss", "")
    values = table["loss"][np.isfinite(table["loss"])]
    if not len(values):
        return
    middle = np.median(values)
    if middle > 7:  # a trained model lies below; ln of a 50,000-token vocabulary is 10.8
        message = f"median loss is {middle:.3g}: perplexity? Laws are fitted in nats per token."
        yield Finding("loss units", "error", (), message)
    elif middle < 1.3 and "nats" not in declared:
        message = f"median loss is {middle:.3g}: bits per byte? Declare loss: nats, or convert."
        yield Finding("loss units", "warning", (), message)


def undertrained(table):
    if "num_parameters" in table and "num_tokens" in table:
        with np.errstate(all="ignore"):
            mask = table["num_tokens"] / table["num_parameters"] < 1
        if mask.any():
            yield Finding(
                "undertrained",
                "warning",
                _rows(mask),
                f"{mask.sum()} runs saw less than one token per parameter; they bend beta upwards (the five highest "
                "losses of the Chinchilla points are of this kind)",
            )


def duplicates(table):
    settings = ("compute_flops", "num_parameters", "num_tokens", "unique_tokens", "depth", "num_loops", "weight_decay")
    keys = [c for c in (*settings, "seed") if c in table]
    text = [c for c in ("recipe",) if c in table]
    if not keys or "loss" not in table:
        return
    seen, same, conflict = {}, [], []
    for i in range(table.n):
        key = (table.arms()[i], *(float(table[c][i]) for c in keys), *(table[c][i] for c in text))
        if key in seen:
            equal = abs(table["loss"][i] - table["loss"][seen[key]]) < 1e-9
            (same if equal else conflict).append(i)
        seen.setdefault(key, i)
    if same:
        yield Finding(
            "duplicates", "warning", tuple(same), f"{len(same)} runs repeat an earlier one exactly; they count twice"
        )
    if conflict and "seed" not in table:
        yield Finding(
            "duplicates",
            "warning",
            tuple(conflict),
            f"{len(conflict)} runs have another's settings and a different loss: seeds, or two recipes without a "
            "recipe column?",
        )


def outliers(table):
    if "loss" not in table:
        return
    for arm in dict.fromkeys(table.arms().tolist()):
        mask = (table.arms() == arm) & np.isfinite(table["loss"]) & (table["loss"] > 0)
        for law, columns in (("chinchilla", ("num_parameters", "num_tokens")), ("compute", ("compute_flops",))):
            if not all(c in table and np.isfinite(table[c][mask]).all() for c in columns):
                continue
            try:
                fit = fit_law(law, {c: table[c][mask] for c in columns}, table["loss"][mask], objective=Huber())
            except (FitRefused, ValueError):
                continue
            residual = fit.residuals
            spread = max(1.4826 * np.median(np.abs(residual - np.median(residual))), 1e-4)
            far = np.abs(residual) > 6 * spread
            if far.any():
                rows = tuple(int(i) for i in np.flatnonzero(mask)[far])
                yield Finding(
                    "outliers",
                    "warning",
                    rows,
                    f"arm {arm}: {far.sum()} runs lie over 6 robust standard deviations off {law} L",
                )
            break


def beaten_by_cheaper(table):
    if "compute_flops" not in table or "loss" not in table or "num_parameters" in table:
        return
    for arm in dict.fromkeys(table.arms().tolist()):
        rows = np.flatnonzero((table.arms() == arm) & np.isfinite(table["loss"]) & np.isfinite(table["compute_flops"]))
        order = rows[np.argsort(table["compute_flops"][rows], kind="stable")]
        if len(order) < 2 or len(order) > 60:
            continue
        best = np.minimum.accumulate(table["loss"][order])
        worse = order[1:][table["loss"][order][1:] > best[:-1]]
        if len(worse):
            yield Finding(
                "beaten by cheaper runs",
                "warning",
                tuple(int(i) for i in worse),
                f"arm {arm}: {len(worse)} runs lose to a cheaper one: badly tuned, overfitted, or not one ladder",
            )


def one_line(table):
    if not ("num_parameters" in table and "num_tokens" in table):
        return
    for arm in dict.fromkeys(table.arms().tolist()):
        mask = table.arms() == arm
        with np.errstate(all="ignore"):
            x, y = np.log(table["num_parameters"][mask]), np.log(table["num_tokens"][mask])
        if mask.sum() < 3 or not (np.isfinite(x).all() and np.isfinite(y).all()):
            continue
        axes = np.linalg.svd(np.stack([x - x.mean(), y - y.mean()], axis=1), compute_uv=False)
        if axes[1] < 0.03 * max(axes[0], 1e-12):
            message = f"arm {arm}: tokens follow parameters; L(N, T) cannot be fitted, L(C) can"
            yield Finding("runs on one line", "note", (), message)


def undeclared(table):
    wanted = {"loss": "loss", "parameters": "num_parameters", "flops": "compute_flops", "tokens": "num_tokens"}
    missing = [key for key, column in wanted.items() if column in table and key not in table.conventions]
    if missing:
        words = "; ".join(f"{key} ({CONVENTIONS[key]})" for key in missing)
        yield Finding("undeclared conventions", "note", (), f"declare {words}")


LINTS = {
    "bad losses": bad_losses,
    "unfinished runs": unfinished_runs,
    "mixed recipes": mixed_recipes,
    "mixed conventions": mixed_conventions,
    "wrong units": wrong_units,
    "loss units": loss_units,
    "undertrained": undertrained,
    "duplicates": duplicates,
    "outliers": outliers,
    "beaten by cheaper runs": beaten_by_cheaper,
    "runs on one line": one_line,
    "undeclared conventions": undeclared,
}
