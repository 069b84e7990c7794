"""The command `looped laws`: fit, multiplier, allocate, plan, report, reproduce, kaplan, simulate, speed.

    looped laws fit runs.csv
    looped laws multiplier runs.csv --baseline vanilla --at 1e25
    looped laws report runs.csv --baseline vanilla --out report.html

Exit status: 0 done, 1 refused (the reason is printed) or a reference value differs, 2 wrong arguments.
"""

import argparse
import json
import math
import os
import sys

import numpy as np

from modeling_looped.laws import LAWS, OBJECTIVES, FitRefused, data_constrained, planner, read_table
from modeling_looped.laws.allocate import closed_form, optimal, tolerated_sizes
from modeling_looped.laws.fitting import fit_law
from modeling_looped.laws.intervals import bootstrap, identification, profiles, scale_of
from modeling_looped.laws.lint import LINTS
from modeling_looped.laws.multipliers import iso_loss
from modeling_looped.laws.simulate import recovery
from modeling_looped.laws.summary import (
    clean,
    compare_arms,
    cross_checks,
    default_objective,
    law_columns,
    laws_for,
    summarise,
)


def main(argv=None):
    """Run one command; returns the exit status."""
    arguments = _parser().parse_args(argv)
    try:
        return COMMANDS[arguments.command](arguments) or 0
    except (FitRefused, ValueError, FileNotFoundError, ImportError) as error:
        print(f"looped laws {arguments.command}: {error}", file=sys.stderr)
        return 1


def _listed(values):
    return ", ".join(f"{k} {v:.4g}" for k, v in values.items())


def _pair(text):
    key, equals, value = text.partition("=")
    if not equals or not key or not value:
        raise argparse.ArgumentTypeError(f"{text!r} is not KEY=VALUE")
    return key, value


def _parser():
    parser = argparse.ArgumentParser(prog="looped laws", description="Scaling laws on a table of runs.")
    commands = parser.add_subparsers(dest="command", required=True)

    table = argparse.ArgumentParser(add_help=False)
    table.add_argument("table", metavar="TABLE", help=".csv, .tsv, .jsonl or a folder of run_dirs")
    table.add_argument(
        "--declare",
        type=_pair,
        action="append",
        default=[],
        metavar="KEY=TEXT",
        help="convention: loss, parameters, flops, tokens, recipe",
    )
    table.add_argument(
        "--rename",
        type=_pair,
        action="append",
        default=[],
        metavar="NAME=COLUMN",
        help="which column of the file holds loss, num_parameters, num_tokens, compute_flops, arm ...",
    )
    table.add_argument(
        "--where", type=_pair, action="append", default=[], metavar="COLUMN=VALUE", help="keep these runs"
    )
    table.add_argument(
        "--allow",
        action="append",
        default=[],
        metavar="LINT",
        choices=sorted(LINTS),
        help="go on in spite of an error",
    )

    chosen = argparse.ArgumentParser(add_help=False)
    chosen.add_argument("--law", choices=sorted(LAWS), help="default: what the columns can carry")
    chosen.add_argument("--objective", choices=sorted(OBJECTIVES), help="default: huber; squares on the loss for L(C)")
    chosen.add_argument("--delta", type=float, help="of huber, 0.001")
    chosen.add_argument("--tau", type=float, help="of asymmetric, 0.9")
    chosen.add_argument("--on", choices=("log", "loss"), help="residuals of log loss or of the loss")
    chosen.add_argument(
        "--own", default="", metavar="A,gamma", help="fit all arms at once; these parameters are each arm's own"
    )

    fit = commands.add_parser("fit", parents=[table, chosen], help="fit a law; parameters, profiles, warnings")
    fit.add_argument("--bootstrap", type=int, default=0, metavar="DRAWS")
    fit.add_argument("--bootstrap-kind", choices=("case", "residual"), default="case")
    fit.add_argument("--plot", metavar="PNG")
    fit.add_argument("--json", metavar="FILE", help="write the parameters and intervals")

    multiplier = commands.add_parser("multiplier", parents=[table], help="compute multipliers against a baseline")
    multiplier.add_argument("--baseline", required=True)
    multiplier.add_argument("--at", type=float, action="append", help="FLOPs to extrapolate to")
    multiplier.add_argument("--index", choices=("baseline", "variant"), default="baseline")
    multiplier.add_argument("--plot", metavar="PNG")

    allocate = commands.add_parser("allocate", parents=[table, chosen], help="best size and tokens for a budget")
    allocate.add_argument("--flops", type=float, required=True)
    allocate.add_argument("--flops-per-parameter-token", type=float, default=6.0)
    allocate.add_argument("--max-tokens", type=float)
    allocate.add_argument("--max-parameters", type=float)
    allocate.add_argument("--inference-tokens", type=float, default=0.0)
    allocate.add_argument(
        "--unique-tokens", type=float, help="repeat data: the published data-constrained law, no fit"
    )

    plan = commands.add_parser("plan", parents=[table, chosen], help="which runs pin the exponent best for a budget")
    plan.add_argument("--flops", type=float, required=True, help="budget of the whole study")
    plan.add_argument("--smallest", type=float, help="smallest run: FLOPs for L(C), parameters for L(N, T)")
    plan.add_argument("--noise", type=float, help="sd of log loss; default: that of the table's fit")
    plan.add_argument("--check", type=int, default=0, metavar="DRAWS", help="simulate the best plan")

    report = commands.add_parser("report", parents=[table, chosen], help="one HTML file with everything")
    report.add_argument("--baseline")
    report.add_argument("--at", type=float, action="append")
    report.add_argument("--out", default="report.html", metavar="HTML")

    reproduce = commands.add_parser("reproduce", help="recompute published values: published, ours, verdict")
    reproduce.add_argument(
        "folder",
        nargs="?",
        metavar="FOLDER",
        help="holds scaling/ and paper/; default: data below LOOPED_REFERENCE_DIR",
    )

    commands.add_parser("kaplan", help="Kaplan's derived numbers, with what follows and what does not")

    simulate = commands.add_parser(
        "simulate", parents=[table, chosen], help="do intervals hold a known truth at these runs?"
    )
    simulate.add_argument("--draws", type=int, default=200)
    simulate.add_argument("--noise", type=float, help="sd of log loss; default: that of the table's fit")

    speed = commands.add_parser("speed", parents=[table], help="our fit against a grid of L-BFGS starts")
    speed.add_argument("--every", type=int, default=1, help="take every n-th of the 4,500 starts")
    return parser


def _read(arguments):
    """The usable runs; prints what lint finds and stops at errors that are not allowed."""
    table = read_table(arguments.table, conventions=dict(arguments.declare), rename=dict(arguments.rename))
    for column, value in arguments.where:
        values = table[column]
        mask = values == float(value) if values.dtype.kind == "f" else values == value
        if not mask.any():
            raise ValueError(
                f"--where {column}={value} keeps no run; {column} holds {sorted(set(values.tolist()))[:12]}"
            )
        table = table.where(mask)
    runs, findings, left_out = clean(table)
    for finding in findings:
        print(finding)
    blocking = [f for f in findings if f.severity == "error" and f.rule not in arguments.allow]
    if blocking:
        names = sorted({f.rule for f in blocking})
        raise ValueError(f"{arguments.table} is not fit for fitting: {names}. Mend it, or pass --allow NAME for each.")
    print(f"{runs.n} runs, {left_out} left out; arms: {', '.join(dict.fromkeys(runs.arms().tolist()))}")
    return runs


def _objective(arguments, law):
    if arguments.objective is None and arguments.delta is None and arguments.on is None and arguments.tau is None:
        return default_objective(law)
    kind = arguments.objective or default_objective(law).name
    options = {"delta": arguments.delta, "tau": arguments.tau, "on": arguments.on}
    given = {k: v for k, v in options.items() if v is not None}
    try:
        return OBJECTIVES[kind](**given)
    except TypeError:
        raise ValueError(f"objective {kind} does not take {sorted(given)}") from None


def _law(arguments, runs):
    law = arguments.law or next(iter(laws_for(runs)), None)
    if law is None:
        raise ValueError(
            "no column to fit the loss on: give compute_flops, or num_parameters and num_tokens (see --rename)"
        )
    return law


def _fits(arguments, runs, law):
    """[(label, Fit)]: one joint fit with --own, else one per arm."""
    loss, objective = runs.loss_in_nats(), _objective(arguments, law)
    own = tuple(p for p in arguments.own.split(",") if p)
    arms = runs.arms()
    if own:
        return [("all arms", fit_law(law, law_columns(runs, law), loss, arms=arms, own=own, objective=objective))]
    found = []
    for arm in dict.fromkeys(arms.tolist()):
        rows = arms == arm
        try:
            found.append(
                (
                    arm,
                    fit_law(
                        law, {c: v[rows] for c, v in law_columns(runs, law).items()}, loss[rows], objective=objective
                    ),
                )
            )
        except FitRefused as refused:
            print(f"\n{arm}: {law} refused: {refused}")
    if not found:
        raise FitRefused("no fit", f"{law} was refused for every arm")
    return found


def fit(arguments):
    runs = _read(arguments)
    law = _law(arguments, runs)
    written = []
    fits = _fits(arguments, runs, law)
    print(f"\n{LAWS[law].formula}\n{LAWS[law].source}")
    for label, one in fits:
        c = one.certificate
        print(
            f"\n{label}: {one.n} runs, {one.objective_kind.describe()}, objective {one.objective:.8g}, "
            f"R2 {one.r_squared:.5f}"
        )
        print(
            f"  converged: predicted further decrease {c['decrement']:.1e}, {c['agreeing']} of {c['polished']} starts "
            f"agree, condition {c['condition']:.1e}"
        )
        verdicts = identification(one)
        shapes = profiles(one)
        for name, shape in shapes.items():
            print(f"  {verdicts.get(name, shape)}")
        quoted = one.parameters if one.arms == [None] else None
        if quoted:
            loose = (
                "" if all(v.identified for v in verdicts.values()) else "  (not all identified: do not quote alone)"
            )
            print("  symbols: " + ", ".join(f"{k} = {v:.6g}" for k, v in quoted.items()) + loose)
        else:
            for arm, values in one.parameters.items():
                print(f"  {arm}: " + ", ".join(f"{k} = {v:.6g}" for k, v in values.items()))
        for warning in one.warnings:
            print(f"  warning: {warning}")
        if law == "chinchilla" and one.arms == [None]:
            for check, said in cross_checks(one):
                print(f"  {check}: {said}")
        entry = {
            "arm": label,
            "law": law,
            "parameters": one.parameters,
            "objective": one.objective,
            "warnings": one.warnings,
        }
        entry["intervals"] = {n: [s.low, s.high, s.identified] for n, s in shapes.items()}
        if arguments.bootstrap:
            found = bootstrap(one, arguments.bootstrap_kind, draws=arguments.bootstrap)
            for arm in one.arms:
                errors = found.standard_errors(arm)
                whose = "" if arm is None else f" {arm}"
                print(f"  {arguments.bootstrap} {found.kind} refits, standard errors{whose}: {_listed(errors)}")
        written.append(entry)
        if arguments.plot:
            from modeling_looped.laws import plots

            path = arguments.plot if len(fits) == 1 else f"{os.path.splitext(arguments.plot)[0]}-{label}.png"
            plots.save(plots.plot_profiles(shapes), path)
            print(f"  profiles drawn to {path}")
    if arguments.json:
        partial = arguments.json + ".part"
        with open(partial, "w", encoding="utf-8") as handle:
            json.dump(written, handle, indent=1, default=float)
        os.replace(partial, arguments.json)


def multiplier(arguments):
    runs = _read(arguments)
    at = tuple(arguments.at or (1e25,))
    ladders, found = compare_arms(runs, arguments.baseline, at=at)
    print(f"\ncompute multipliers against {arguments.baseline}, interpolated, by the compute of the {arguments.index}")
    for arm, by_index in found["interpolated"].items():
        rows = by_index[arguments.index]
        known = np.isfinite(rows["multiplier"])
        print(
            f"  {arm:20s} "
            + "  ".join(
                f"{m:.3f} @ {c:.2e}" for c, m in zip(rows["compute"][known], rows["multiplier"][known], strict=True)
            )
        )
    print(f"\nFLOPs for one loss (interpolated), at the losses of {arguments.baseline}")
    losses = ladders[arguments.baseline].loss
    print(f"  {'loss':20s} " + " ".join(f"{x:9.4f}" for x in losses))
    for arm, needed in iso_loss(ladders, losses).items():
        print(f"  {arm:20s} " + " ".join(f"{x:9.3g}" if np.isfinite(x) else f"{'-':>9s}" for x in needed))
    if found["refusal"]:
        print(f"laws refused: {found['refusal']}")
    if found["verdict"]:
        print(f"\n{found['verdict']['sentence']}")
        for c in found["models"]:
            said = found["bayes"][c.name]
            print(f"  {c.name:40s} BIC {c.delta:+7.1f}  weight {c.weight:6.3f}  Bayes {said['probability']:6.3f}")
        print(f"  priors: {found['priors']}")
    for arm, by_key in found["by_model"].items():
        for (flops, index), rows in by_key.items():
            if index == arguments.index:
                print(f"\n{arm} extrapolated to {flops:.3g} FLOPs of the {index}")
                for r in rows:
                    print(
                        f"  {r['model']:40s} weight {r['weight']:6.3f}  {r['multiplier']:8.3f} "
                        f"[{r['low']:.3f}, {r['high']:.3f}]"
                    )
    if arguments.plot:
        from modeling_looped.laws import plots

        plots.save(plots.plot_multipliers(found["interpolated"], arguments.index), arguments.plot)


def allocate(arguments):
    if arguments.unique_tokens is not None:
        tokens, size, loss = data_constrained.allocation(arguments.flops, arguments.unique_tokens)
        epochs = tokens / arguments.unique_tokens
        print(f"published data-constrained law: N {size:.5g}, T {tokens:.6g} ({epochs:.2f} epochs), loss {loss:.4f}")
        return
    runs = _read(arguments)
    arguments.law = arguments.law or "chinchilla"
    for label, one in _fits(arguments, runs, arguments.law):
        loose = [str(v) for v in identification(one).values() if not v.identified]
        for line in loose:
            print(f"  warning: {line}; the allocation rests on it")
        k = arguments.flops_per_parameter_token
        best = optimal(
            one.local(),
            arguments.flops,
            k=k,
            max_tokens=arguments.max_tokens,
            max_parameters=arguments.max_parameters,
            inference_tokens=arguments.inference_tokens,
        )
        print(
            f"\n{label}: N {best.num_parameters:.5g}, T {best.num_tokens:.5g}, T/N {best.tokens_per_parameter:.2f}, "
            f"loss {best.loss:.4f}, training {best.training_flops:.4g}, inference {best.inference_flops:.4g}, "
            f"limited by {best.limit}"
        )
        exact = closed_form(one.local(), arguments.flops, k=k)
        low, high = tolerated_sizes(one.local(), arguments.flops, 0.1, k=k)
        print(
            f"  closed form without limits: N {exact.num_parameters:.5g}, T {exact.num_tokens:.5g}; "
            f"sizes {low:.2f} to {high:.2f} of it cost at most 10% more"
        )


def plan(arguments):
    runs = _read(arguments)
    law = arguments.law or ("compute" if "compute_flops" in runs else "chinchilla")
    if law not in ("compute", "chinchilla"):
        raise ValueError(f"plan knows the laws compute and chinchilla, not {law}")
    arguments.law = law
    for label, one in _fits(arguments, runs, law):
        fitted = math.sqrt(scale_of(one))
        if one.objective_kind.on == "loss":
            fitted /= float(np.exp(one.target.mean()))
        noise = arguments.noise or fitted
        column = "compute_flops" if law == "compute" else "num_parameters"
        smallest = arguments.smallest or float(one.model.columns[column].min())
        make = planner.plan_ladder if law == "compute" else planner.plan_grid
        plans = make(one.local(), arguments.flops, noise=noise, smallest=smallest)
        symbol = "gamma" if law == "compute" else "alpha"
        print(f"\n{label}: truth assumed {_listed(one.local())}; noise {noise:.2g} of log loss")
        for p in plans[:5]:
            widths = ", ".join(f"{k} +- {v:.2g}" for k, v in p.half_width.items())
            print(f"  {p.num_runs:3d} runs, {p.total_flops:.3g} FLOPs, {p.name}: {widths}")
        best = plans[0]
        value, half = one.local()[symbol], best.half_width[symbol]
        print(f"  best: {symbol} = {value:.4g} expected within [{value - half:.4g}, {value + half:.4g}]")
        print("  runs: " + "; ".join(f"{k} " + " ".join(f"{x:.3g}" for x in v) for k, v in best.columns.items()))
        if arguments.check:
            found = planner.check(law, one.local(), best, noise=noise, draws=arguments.check)
            said = found[symbol]
            print(
                f"  simulated {arguments.check} times: {symbol} covered {said['covered']:.0%}, median half-width "
                f"{said['median_width'] / 2:.2g}, called identified {said['identified']:.0%}"
            )


def report(arguments):
    from modeling_looped.laws.report import write_report

    runs = _read(arguments)
    laws = [arguments.law] if arguments.law else None
    objective = _objective(arguments, arguments.law) if arguments.objective else None
    found = summarise(
        runs, laws=laws, baseline=arguments.baseline, objective=objective, at=tuple(arguments.at or (1e25,))
    )
    print(f"written: {write_report(found, arguments.out)}")


def reproduce(arguments):
    from modeling_looped.laws.reproduce import print_rows
    from modeling_looped.laws.reproduce import reproduce as recompute

    folder = arguments.folder
    if folder is None:
        if "LOOPED_REFERENCE_DIR" not in os.environ:
            raise ValueError("say which FOLDER holds scaling/ and paper/, or set LOOPED_REFERENCE_DIR")
        folder = os.path.join(os.environ["LOOPED_REFERENCE_DIR"], "data")
    return int(print_rows(*recompute(folder)) > 0)


def kaplan(arguments):
    from modeling_looped.laws.kaplan import CONSTANTS
    from modeling_looped.laws.kaplan_checks import kaplan_checks

    for name, values in CONSTANTS.items():
        print(f"{name}: " + ", ".join(f"{k} {v:.4g}" for k, v in values.items()))
    for c in kaplan_checks():
        value = ", ".join(f"{v:.6g}" for v in (c.value if isinstance(c.value, tuple) else (c.value,)))
        published = "" if c.published is None else f"{c.published:g}"
        print(f"{c.name[:58]:58s} {value:>24s} {published:>12s}  {c.verdict}" + (f" ({c.note})" if c.note else ""))


def simulate(arguments):
    runs = _read(arguments)
    law = _law(arguments, runs)
    for label, one in _fits(arguments, runs, law):
        noise = arguments.noise or math.sqrt(scale_of(one)) / (
            float(np.exp(one.target.mean())) if one.objective_kind.on == "loss" else 1
        )
        found = recovery(law, one.local(), one.model.columns, noise=noise, draws=arguments.draws)
        print(f"\n{label}: {found['draws']} studies at these runs, noise {noise:.2g}, {found['refused']} fits refused")
        for symbol, said in found.items():
            if isinstance(said, dict):
                print(
                    f"  {symbol}: truth {one.local()[symbol]:.4g}, median {said['median']:.4g}, 95% intervals cover "
                    f"{said['covered']:.1%}, called identified {said['identified']:.0%}, median width "
                    f"{said['median_width']:.3g}"
                )


def speed(arguments):
    from modeling_looped.laws.speed import measure

    for key, value in measure(_read(arguments), every=arguments.every).items():
        print(f"{key:30s} {value:.10g}")


COMMANDS = {
    "fit": fit,
    "multiplier": multiplier,
    "allocate": allocate,
    "plan": plan,
    "report": report,
    "reproduce": reproduce,
    "kaplan": kaplan,
    "simulate": simulate,
    "speed": speed,
}

if __name__ == "__main__":
    sys.exit(main())
