"""The checks of `reproduce` on paper/: derived numbers of the looped-and-growing-model paper's public tables."""

import csv

import numpy as np

from modeling_looped.laws.approaches import power_law, vertex
from modeling_looped.laws.recurrence import best_by, best_loops, compute_saved
from modeling_looped.laws.tables import read_table

PAPER_WEIGHT_DECAYS = (0.05, 0.2, 0.4, 0.8, 1.2, 1.6)
FLOOR = 1.7064  # the paper's shared irreducible loss


def _rows(path):
    with path.open() as handle:
        return list(csv.DictReader(handle))


def _quadratic(x, y):
    """(vertex, value) of a parabola in x itself, nan when it opens downwards or the vertex leaves the points."""
    a, b, c = np.polyfit(x, y, 2)
    at = -b / (2 * a)
    return (at, c - b * b / (4 * a)) if a > 0 and min(x) <= at <= max(x) else (np.nan, np.nan)


def _shared_floor_gamma(compute, loss):
    return -np.polyfit(np.log(np.asarray(compute, float)), np.log(np.asarray(loss, float) - FLOOR), 1)[0]


def _optima(ref, source, label, known, compute, loops, loss):
    found = best_loops(compute, loops, loss, [k["compute"] for k in known])
    for entry, optimum in zip(known, found, strict=True):
        name = f"{label}: best loops at {entry['compute']:.3g}"
        if entry["K_star"] is None:
            ref.add(source, name + ", censored (1 = yes)", 1, bool(optimum.censored), 0)
        else:
            ref.add(source, name, entry["K_star"], optimum.x if not optimum.censored else np.nan, 6e-4)
            ref.add(source, name + ", loss", entry["loss_star"], optimum.value, 2e-5)


def loop_optima(ref):
    known = ref.json("paper/derived_loop_optima.json")
    grid_path, regimes_path = ref.path("scaling/qlabs_loop_grid_100Mx10.csv"), ref.path("paper/regimes_wd0.8.csv")
    fresh_path = ref.path("paper/fresh_data_one_epoch.csv")
    if known is None:
        return
    source = "best loop count by budget (parabola of log loss in log K)"
    if grid_path is not None:
        grid = read_table(grid_path)
        for decay in PAPER_WEIGHT_DECAYS:
            part = grid.where(grid["weight_decay"] == decay)
            entries = known[f"replay_100M_x10_wd{decay:g}"]
            _optima(
                ref,
                source,
                f"100M x 10, wd {decay:g}",
                entries,
                part["compute_flops"],
                part["num_loops"],
                part["loss"],
            )
        printed = (1.43, 2.31, 3.31, 4.44, 6.69)
        part = grid.where(grid["weight_decay"] == 0.8)
        budgets = [k["compute"] for k in known["replay_100M_x10_wd0.8"]]
        found = best_loops(part["compute_flops"], part["num_loops"], part["loss"], budgets)
        for value, optimum in zip(printed, found, strict=True):
            ref.add(source, "100M x 10, wd 0.8, as printed", value, optimum.x, 0.005)
        known_gap = ((0, 0.00), (-1, 0.11))
        for row, value in known_gap:
            ones = part.where(part["num_loops"] == 1)
            order = np.argsort(ones["compute_flops"])
            plain = np.interp(budgets[row], ones["compute_flops"][order], ones["loss"][order])
            ref.add(source, "gap of one pass to the best loops", value, plain - found[row].value, 0.005)
    if regimes_path is not None:
        table = read_table(regimes_path)
        for regime, key in (("fresh", "fresh_wd0.8"), ("replay250m4", "replay_250M_x4_wd0.8")):
            part = table.where(table.arms() == regime)
            _optima(ref, source, regime, known[key], part["compute_flops"], part["num_loops"], part["loss"])
    if fresh_path is not None:
        table = read_table(fresh_path)
        for family, key in (("tied", "fresh_tied_recipe_wd0.05"), ("untied", "fresh_untied")):
            part = table.where((table["family"] == family) | (table["num_loops"] == 1))
            _optima(ref, source, f"fresh {family}", known[key], part["compute_flops"], part["num_loops"], part["loss"])


def saved_compute(ref):
    known, path = ref.json("paper/multi_epoch_frontiers.json"), ref.path("scaling/qlabs_loop_grid_100Mx10.csv")
    if known is None or path is None:
        return
    source = "compute saved by loops, 100M tokens x 10 epochs"
    table = read_table(path)
    table = table.where(np.isin(table["weight_decay"], PAPER_WEIGHT_DECAYS) & (table["depth"] >= 6))
    ones = table.where(table["num_loops"] == 1)
    ones = ones.where(best_by([ones["depth"]], ones["loss"]))
    fixed = table.where(table["weight_decay"] == 0.8)
    known = known["savings"]
    tuned = compute_saved(ones["compute_flops"], ones["loss"], table["compute_flops"], table["loss"])
    ref.add(source, "operator-1 d18, tuned weight decay", 2.207, tuned[-1], 5e-4)
    for (depth, _, value), ours in zip(known["ratio_tuned_by_op1_depth"], tuned, strict=True):
        ref.add(source, f"tuned loops, by operator-1 d{depth}", value, ours, 1e-5)
    untuned = compute_saved(ones["compute_flops"], ones["loss"], fixed["compute_flops"], fixed["loss"])
    for (depth, value), ours in zip(known["ratio_op1_tuned_vs_loops_fixed"], untuned, strict=True):
        ref.add(source, f"loops at wd 0.8, by operator-1 d{depth}", value, ours, 1e-5)
    plain = fixed.where(fixed["num_loops"] == 1)
    best = int(np.argmin(plain["loss"]))
    ours = compute_saved(plain["compute_flops"][best], plain["loss"][best], fixed["compute_flops"], fixed["loss"])[0]
    ref.add(source, "operator-1 best at wd 0.8 (d14)", known["ratio_fixed_at_op1_best"], ours, 1e-5)


def weight_decays(ref):
    known, path = ref.json("paper/weight_decay_best.json"), ref.path("scaling/qlabs_loop_grid_100Mx10.csv")
    if known is None or path is None:
        return
    source = "best weight decay by loops and depth"
    table = read_table(path)
    table = table.where(np.isin(table["weight_decay"], PAPER_WEIGHT_DECAYS))
    for entry in known:
        part = table.where((table["num_loops"] == entry["loops"]) & (table["depth"] == entry["depth"]))
        best = int(np.argmin(part["loss"]))
        name = f"K {entry['loops']}, d{entry['depth']}"
        ref.add(source, name, entry["best_wd"], part["weight_decay"][best], 0)
        ref.add(source, name + ", loss", entry["best_loss"], part["loss"][best], 1e-6)


def growth(ref):
    path, known = ref.path("paper/growth_cells.csv"), ref.json("paper/growth_optima.json")
    source = "share of steps grown (parabola in the share)"
    if path is not None and known is not None:
        cells = _rows(path)
        for entry in known:
            mine = [
                (float(r["rho"]), float(r["val_loss"]))
                for r in cells
                if r["arm"] == entry["arm"]
                and float(r["budget"]) == float(entry["budget"])
                and int(r["depth"]) == entry["depth"]
            ]
            at, value = _quadratic(*np.array(mine).T)
            name = f"{entry['arm']}, budget {entry['budget']:g}, d{entry['depth']}"
            if entry["rho_star"] is None:
                ref.add(source, name + ", censored (1 = yes)", 1, np.isnan(at), 0)
                continue
            ref.add(source, name, entry["rho_star"], at, 1e-4)
            ref.add(source, name + ", loss", entry["loss_star"], value, 1e-5)
    known = ref.json("paper/deep_vanilla_growth.json")
    for depth, entry in (known or {}).items():
        at, value = _quadratic(entry["rho"], entry["loss"])
        ref.add(source, f"deep-vanilla d{depth}", entry["rho_star"], at, 1e-4)
        ref.add(source, f"deep-vanilla d{depth}, loss", entry["loss_star"], value, 1e-5)
    path = ref.path("paper/grow_targets.csv")
    if path is not None:
        rows = _rows(path)
        budgets = sorted({float(r["budget_mean_K"]) for r in rows} - {2.0})
        for budget in budgets:
            mine = [r for r in rows if float(r["budget_mean_K"]) == budget]
            best = min(mine, key=lambda r: float(r["val_loss"]))
            ref.add(source, f"best target K at mean K {budget:g}", 4, int(best["target_K"]), 0)


def recurrence_by_tokens(ref):
    path, known = ref.path("paper/tpl_recurrence_by_budget.csv"), ref.json("paper/tpl_optima.json")
    if path is None or known is None:
        return
    source = "best loops against tokens per parameter"
    rows = _rows(path)
    points = {"loop": [], "dep": []}
    for entry in known["optima"]:
        mine = [
            r
            for r in rows
            if int(r["anchor_depth"]) == entry["anchor"]
            and float(r["budget_depth"]) == float(entry["budget"])
            and r["family"] == entry["family"]
        ]
        loops = np.array([float(r["K"]) for r in mine])
        active = np.array([float(r["N_compute_active"]) for r in mine])
        optimum = vertex(loops, [float(r["val_loss"]) for r in mine], log_value=True)
        expansion = np.interp(optimum.x, loops, active) / active[np.argmin(loops)]
        name = f"{entry['family']}, anchor d{entry['anchor']}, budget d{entry['budget']}"
        ref.add(source, name, entry["K_star"], optimum.x, 6e-4)
        ref.add(source, name + ": executed over stored", entry["expansion"], expansion, 1e-4)
        points[entry["family"]].append((entry["tpp_K1"], expansion))
    for family, pairs in points.items():
        fit = power_law(*np.array(pairs).T)
        k, slope = known["fits"][family]["expansion ~ a*TPP_K1^b"]
        ref.add(source, f"{family}: expansion = a TPP^b, a", k, fit["k"], 5e-4)
        ref.add(source, f"{family}: expansion = a TPP^b, b", slope, fit["slope"], 5e-4)
        ref.add(source, f"{family}: points", known["fits"][family]["points"], fit["n"], 0)


def sensitivity(ref):
    known = ref.json("paper/hyper_slices.json")
    source = "hyper-parameter slices"
    if known is not None:
        stored = np.log2(np.array([205783040, 259227648, 331939840], float))  # d8, d9, d10, padded rows
        steps = np.array(known["log2_multipliers"], float)
        untied = np.log2(np.array([244318208, 307003392, 413204480], float))  # the same at two cores
        for arm, entry in known["derived_glr_exponent"].items():
            if "constant" not in known["loss"][arm]:
                continue
            curves = [known["loss"][arm]["scaled"]["glr"]["8"]]
            curves += [known["loss"][arm]["constant"]["glr"][d] for d in ("9", "10")]
            at = [-b / (2 * a) for a, b, _ in (np.polyfit(steps, np.log(c), 2) for c in curves)]
            for depth, value, ours in zip((8, 9, 10), entry["log2_vertex"], at, strict=True):
                ref.add(source, f"{arm} d{depth}: log2 of the best learning rate", value, ours, 1e-3)
            size = untied if arm.startswith("Untied") else stored
            ref.add(
                source, f"{arm}: exponent of the learning rate", entry["beta_fit"], -np.polyfit(size, at, 1)[0], 2e-3
            )
        for arm, knobs in known["derived_sensitivity_percent"].items():
            for knob, entry in knobs.items():
                curves = known["loss"][arm]["scaled"][knob].values()
                change = [(x / c[2] - 1) * 100 for c in curves for i, x in enumerate(c) if i != 2]
                ref.add(source, f"{arm}, {knob}: largest change in %", entry["max_%"], max(change), 2e-3)
                ref.add(source, f"{arm}, {knob}: smallest change in %", entry["min_%"], min(change), 2e-3)
    known = ref.json("paper/hyper1d_vanilla.json")
    if known is not None:
        printed = {
            "glr": 4.57,
            "wd": 2.69,
            "om": 1.38,
            "hlrm": 1.32,
            "rm": 0.58,
            "elrm": 0.28,
            "wte": 0.20,
            "uis": 0.16,
        }
        for knob, value in printed.items():
            centre = known["centre_loss"]
            changes = [abs(x / centre[d] - 1) * 100 for d, losses in known["loss"][knob].items() for x in losses]
            ref.add(source, f"constant vanilla, {knob}: largest change in %", value, max(changes), 0.006)


def ablation_exponents(ref):
    source = f"exponents with E = {FLOOR}"
    path = ref.path("paper/constant_recipe_ladders.csv")
    if path is not None:
        rows = _rows(path)
        printed = {
            "Vanilla": 0.0977, "Operator-1": 0.1048, "Loop-2": 0.1087,
            "Loop-Grow": 0.1094, "Untied-2": 0.1021, "Untied-Grow": 0.1037,
        }  # fmt: skip
        for arm, value in printed.items():
            mine = [r for r in rows if r["variant"] == arm]
            ours = _shared_floor_gamma(
                [r["compute_flops"] for r in mine], [r["val_loss_constant_recipe"] for r in mine]
            )
            ref.add(source, f"{arm}, one recipe at every depth", value, ours, 1e-4)
    path = ref.path("paper/random_recurrence.csv")
    if path is not None:
        rows = _rows(path)
        compute = [r["compute_flops"] for r in rows]
        random = _shared_floor_gamma(compute, [r["val_loss_at_K4"] for r in rows])
        ref.add(source, "loop-grow with random K after growth", 0.1153, random, 1e-4)
        ladder = ref.path("scaling/qlabs_fineweb_ladders.csv")
        if ladder is not None:
            table = read_table(ladder)
            part = table.where(table.arms() == "loop_grow")
            fixed = _shared_floor_gamma(part["compute_flops"], part["loss"])
            ref.add(source, "loop-grow with fixed K", 0.1159, fixed, 1e-4)


def other_loop_counts(ref):
    known, path = ref.json("paper/recurrence_at_eval.json"), ref.path("scaling/qlabs_fineweb_ladders.csv")
    if known is None or path is None:
        return
    source = "loss at the trained loop count against the ladder"
    table = read_table(path)
    for arm, loops in known["trained_K"].items():
        name = arm.lower().replace("-", "_")
        for depth, losses in known["ce_at_K1.."][arm].items():
            rows = (table.arms() == name) & (table["depth"] == float(depth))
            if rows.any() and len(losses) >= loops:
                late = depth == "18" and arm in ("Loop-Grow", "Untied-Grow")
                expected = table["loss"][rows][0] + (0.0016 if late else 0.0)
                ref.add(
                    source,
                    f"{arm} d{depth}" + (" (+.0016)" if late else ""),
                    expected,
                    losses[loops - 1],
                    5e-5 if late else 2e-5,
                )


def tasks(ref):
    source = "CORE summaries from their tasks"
    known = ref.json("paper/core_tasks.json")
    path = ref.path("paper/vanilla_task_answer_nll.csv")
    if known is None:
        return
    names = known["tasks_in_suite_order"]
    summaries = {}
    if path is not None:
        for row in _rows(path):
            mean = np.mean([float(row[n]) for n in names])
            ref.add(source, f"answer NLL, vanilla d{row['depth']}", float(row["answer_nll"]), mean, 2e-5)
            summaries[row["depth"]] = row
    path = ref.path("paper/vanilla_task_centered_accuracy_d6_d16.csv")
    if path is not None:
        for row in _rows(path):
            stored = summaries.get(row["depth"])
            if stored is None:
                continue
            full = np.mean([float(row[n]) for n in names])
            kept = np.mean([float(row[n]) for n in known["filtered_keep"]])
            ref.add(source, f"CORE of 22 tasks, vanilla d{row['depth']}", float(stored["full_core"]), full, 1e-5)
            ref.add(source, f"CORE of 17 tasks, vanilla d{row['depth']}", float(stored["filtered_core"]), kept, 1e-5)


def effective_depths(ref):
    known = ref.json("paper/grow_lens_kl.json")
    if known is None:
        return
    for name, cell in known["cells"].items():
        curve = np.array(cell["kl_to_final"], float)
        peak = int(np.argmax(curve))
        depth = peak + 1 + int(np.argmax(curve[peak + 1 :] < known["threshold_nats"]))
        ref.add("KL effective depth", name, cell["kl_effective_depth"], depth, 0)


CHECKS = (
    loop_optima,
    saved_compute,
    weight_decays,
    growth,
    recurrence_by_tokens,
    sensitivity,
    ablation_exponents,
    other_loop_counts,
    tasks,
    effective_depths,
)
