"""One self-contained HTML file about a run table: lint, fits with profiles and warnings, multipliers.

looped laws report runs.csv --baseline vanilla --out report.html
"""

import html
import os
from pathlib import Path

import numpy as np

from modeling_looped.laws import plots
from modeling_looped.laws.allocate import closed_form
from modeling_looped.laws.forms import LAWS
from modeling_looped.laws.intervals import scale_of
from modeling_looped.laws.multipliers import iso_loss

_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 1100px; margin: 2em auto; padding: 0 1em; color: #222; }
table { border-collapse: collapse; margin: .6em 0; } td, th { padding: .2em .7em; border-bottom: 1px solid #ddd;
text-align: right; } td:first-child, th:first-child { text-align: left; } img { max-width: 100%; }
.error { color: #a00; } .warning { color: #a60; } .note { color: #666; } h2 { margin-top: 2em; }
code { background: #f4f4f4; padding: 0 .2em; }
"""


def write_report(summary, path, *, title=None):
    """Write the report, readable without a network: to a temporary name, then renamed. Returns the path."""
    path = Path(path)
    partial = path.with_name(path.name + ".part")
    partial.write_text(render(summary, title or Path(summary.table.path or "runs").name), encoding="utf-8")
    os.replace(partial, path)
    return path


def render(summary, title):
    """The report as text."""
    parts = [f"<h1>Scaling laws: {html.escape(title)}</h1>", _runs(summary), _ladders(summary)]
    parts += [_fit(result) for result in summary.fits]
    if summary.comparison is not None:
        parts.append(_comparison(summary))
    body = "\n".join(parts)
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{html.escape(title)}</title>'
        f"<style>{_STYLE}</style></head>\n<body>\n{body}\n</body></html>\n"
    )


def _table(head, rows):
    cells = "".join(f"<th>{html.escape(str(c))}</th>" for c in head)
    lines = ["<tr>" + "".join(f"<td>{html.escape(_cell(c))}</td>" for c in row) + "</tr>" for row in rows]
    return f"<table><tr>{cells}</tr>{''.join(lines)}</table>"


def _cell(value):
    if isinstance(value, float | np.floating):
        return "" if np.isnan(value) else f"{value:.4g}"
    return str(value)


def _image(figure):
    return f'<p><img alt="" src="{plots.embedded(figure)}"></p>'


def _runs(summary):
    table = summary.table
    declared = [(k, v) for k, v in table.conventions.items()]
    parts = [f"<p>{table.n} runs used, {summary.num_left_out} left out. Arms: "]
    parts.append(", ".join(html.escape(a) for a in dict.fromkeys(table.arms().tolist())) + ".</p>")
    parts.append(
        _table(("convention", "declared"), declared) if declared else "<p class=note>No conventions declared.</p>"
    )
    parts += [f'<p class="{f.severity}">{html.escape(str(f))}</p>' for f in summary.findings]
    return "<h2>Runs</h2>" + "".join(parts)


def _ladders(summary):
    if not summary.ladders:
        return ""
    fits = {r.arm: r.fit for r in summary.fits if r.law == "compute" and r.fit is not None}
    return _image(plots.plot_ladders(summary.ladders, fits))


def _fit(result):
    law = LAWS[result.law]
    parts = [f"<h2>{html.escape(result.law)}: {html.escape(str(result.arm))}</h2>"]
    parts.append(
        f"<p><code>{html.escape(law.formula)}</code><br><span class=note>{html.escape(law.source)}</span></p>"
    )
    if result.fit is None:
        return "".join(parts) + f'<p class="error">Refused: {html.escape(result.refusal)}</p>'
    fit, c = result.fit, result.fit.certificate
    parts.append(
        f"<p>{fit.n} runs, {html.escape(fit.objective_kind.describe())}; objective {fit.objective:.6g}; "
        f"R2 {fit.r_squared:.5f}; noise about {np.sqrt(scale_of(fit)):.2g}. Converged: predicted further decrease "
        f"{c['decrement']:.1e} of the objective, {c['agreeing']} of {c['polished']} starts agree, condition "
        f"{c['condition']:.1e}.</p>"
    )
    rows = []
    for name, shape in result.profiles.items():
        verdict = result.verdicts.get(name)
        low = shape.low if shape.closed[0] else f"below {shape.low:.3g}"
        high = shape.high if shape.closed[1] else f"above {shape.high:.3g}"
        said = "" if verdict is None else "identified" if verdict.identified else f"NOT IDENTIFIED: {verdict.reason}"
        said += f" (unstable: {verdict.unstable})" if verdict is not None and verdict.unstable else ""
        rows.append((name, shape.estimate, low, high, said))
    pivots = ", ".join(f"{k} {v:.3g}" for k, v in fit.pivots.items())
    parts.append(
        f"<p>Levels are quoted at the centre of the runs ({html.escape(pivots)}), with 95% profile intervals.</p>"
    )
    parts.append(_table(("parameter", "estimate", "low", "high", "verdict"), rows))
    trusted = all(v.identified for v in result.verdicts.values())
    quoted = ", ".join(f"{k} = {v:.5g}" for k, v in fit.parameters.items())
    parts.append(
        f"<p>As published symbols: {html.escape(quoted)}" + ("" if trusted else " (not all identified)") + ".</p>"
    )
    parts += [f'<p class="warning">{html.escape(w)}</p>' for w in fit.warnings]
    if result.bootstrap_errors:
        parts.append("<p>Case bootstrap, standard errors: ")
        parts.append(html.escape(", ".join(f"{k} {_cell(v)}" for k, v in result.bootstrap_errors.items())) + ".</p>")
    if result.law == "chinchilla" and trusted:
        rows = []
        for flops in (1e20, 1e22, 1e24):
            best = closed_form(fit.local(), flops)
            rows.append((f"{flops:.0e}", best.num_parameters, best.num_tokens, best.tokens_per_parameter, best.loss))
        parts.append(_table(("C = 6 N T", "N", "T", "T / N", "loss"), rows))
    if result.checks:
        parts.append(_table(("method", "says"), result.checks))
    parts.append(_image(plots.plot_profiles(result.profiles)))
    parts.append(_image(plots.plot_residuals(fit)))
    rows = [(o, *(p.values() if isinstance(p, dict) else [p])) for o, p in result.sensitivity]
    parts.append("<p>The same law under other objectives:</p>")
    parts.append(_table(("objective", *law.parameters), rows))
    for row in result.forecast:
        parts.append(
            f"<p>Largest run left out: forecast {row['forecast']:.4f}, observed {row['observed']:.4f}, "
            f"error {row['error']:+.4f} nats.</p>"
        )
    return "".join(parts)


def _comparison(summary):
    found, base = summary.comparison, html.escape(str(summary.baseline))
    parts = [
        f"<h2>Compute multipliers against {base}</h2>",
        "<p>Interpolated between measured runs (the headline):</p>",
    ]
    for index in ("baseline", "variant"):
        rows = []
        for arm, by_index in found["interpolated"].items():
            r = by_index[index]
            known = np.isfinite(r["multiplier"])
            rows += [
                (arm, c, l, m)
                for c, l, m in zip(*(r[k][known] for k in ("compute", "loss", "multiplier")), strict=True)
            ]
        parts.append(f"<p>Indexed by the compute of the {index}:</p>")
        parts.append(_table(("arm", "FLOPs", "loss", "multiplier"), rows))
    parts.append(_image(plots.plot_multipliers(found["interpolated"])))
    losses = summary.ladders[summary.baseline].loss
    needed = iso_loss(summary.ladders, losses)
    parts.append("<p>FLOPs for one loss, interpolated:</p>")
    parts.append(_table(("loss", *needed), [(x, *(needed[a][i] for a in needed)) for i, x in enumerate(losses)]))
    if found["refusal"]:
        parts.append(f'<p class="error">Laws refused: {html.escape(found["refusal"])}</p>')
    if found["models"]:
        parts.append("<h2>Exponent or constant?</h2>")
        parts.append(f"<p><b>{html.escape(found['verdict']['sentence'])}</b></p>")
        rows = [
            (
                c.name,
                c.fit.model.p,
                c.delta,
                c.weight,
                found["bayes"][c.name]["probability"],
                found["bayes"][c.name]["effective_draws"],
            )
            for c in found["models"]
        ]
        parts.append(
            _table(
                ("model", "parameters", "BIC - best", "weight by BIC", "Bayes probability", "effective draws"), rows
            )
        )
        parts.append(f"<p class=note>Priors: {html.escape(found['priors'])}.</p>")
    for arm, by_key in found["by_model"].items():
        for (flops, index), rows in by_key.items():
            parts.append(f"<p>{html.escape(arm)} extrapolated to {flops:.3g} FLOPs of the {index}:</p>")
            parts.append(
                _table(
                    ("model", "weight", "multiplier", "95% low", "95% high"),
                    [(r["model"], r["weight"], r["multiplier"], r["low"], r["high"]) for r in rows],
                )
            )
    return "".join(parts)
