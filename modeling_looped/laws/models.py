"""A law bound to a table: log predictions, gradients and Hessians for many parameter vectors at once.

Both classes answer the same calls, with B parameter vectors of length p and n runs:
`evaluate(theta)` -> log predictions (B, n) and gradient (B, n, p); `curvature(theta, c)` -> sum_i c_i d2 f_i (B, p,
p). Layout: each parameter has one column if the arms share it, else one column per arm, named `gamma[vanilla]`.
"""

from itertools import combinations

import numpy as np
from scipy.optimize import nnls

GRID_EXPONENTS = np.geomspace(0.02, 2.0, 24)


class Model:
    """What both kinds of law have in common: pivots, the layout of arms, names."""

    def __init__(self, law, columns, arms=None, own=(), pivots=None):
        missing = [c for c in law.columns if c not in columns]
        if missing:
            raise ValueError(f"the law {law.formula!r} needs the columns {list(law.columns)}; missing: {missing}")
        unknown = [p for p in own if p not in law.parameters]
        if unknown:
            raise ValueError(f"own={unknown}: the law has the parameters {list(law.parameters)}")
        self.law = law
        self.columns = {c: np.asarray(columns[c], float) for c in law.columns}
        for name, values in self.columns.items():
            if not (np.isfinite(values).all() and (values > 0).all()):
                raise ValueError(f"column {name} must be finite and positive; row {int(np.argmin(values > 0))} is not")
        self.n = len(next(iter(self.columns.values())))
        self.arm_names = list(dict.fromkeys(arms)) if arms is not None else [None]
        self.arm_index = (
            np.array([self.arm_names.index(a) for a in arms]) if arms is not None else np.zeros(self.n, int)
        )
        self.own = tuple(own) if len(self.arm_names) > 1 else ()
        self.pivots = pivots or {c: float(np.exp(np.log(v).mean())) for c, v in self.columns.items()}
        self.names, self.slots = [], {}
        for parameter in law.parameters:
            self.slots[parameter] = {}
            if parameter in self.own:
                for arm in self.arm_names:
                    self.slots[parameter][arm] = len(self.names)
                    self.names.append(f"{parameter}[{arm}]")
            else:
                self.slots[parameter] = dict.fromkeys(self.arm_names, len(self.names))
                self.names.append(parameter)
        self.p = len(self.names)

    def _columns_of(self, parameter):
        """Index of the parameter's column for each run, (n,)."""
        table = np.array([self.slots[parameter][arm] for arm in self.arm_names])
        return table[self.arm_index]

    def local(self, theta, arm):
        """The law's own parameter vector for one arm, in fitting coordinates."""
        return np.array([theta[self.slots[parameter][arm]] for parameter in self.law.parameters])

    def natural(self, theta):
        """{arm: {symbol: value}}, or {None: ...} without arms."""
        return {arm: self.local_to_natural(self.local(theta, arm)) for arm in self.arm_names}

    def from_natural(self, natural):
        """Inverse of `natural`; a plain {symbol: value} serves every arm. Shared parameters come from the first
        arm.
        """
        theta = np.full(self.p, np.nan)
        for arm in reversed(self.arm_names):
            values = natural.get(arm, natural) if arm is not None else natural.get(None, natural)
            q = self.natural_to_local(values)
            for parameter, value in zip(self.law.parameters, q, strict=True):
                theta[self.slots[parameter][arm]] = value
        return theta

    def rebind(self, columns, arms=None):
        """The same law, pivots and layout on other runs (for predictions). Unknown arms raise ValueError."""
        if arms is None and len(self.arm_names) > 1:
            raise ValueError(f"this fit has the arms {self.arm_names}; say which arm to predict")
        n = len(np.atleast_1d(next(iter(columns.values()))))
        arms = list(arms) if arms is not None else [None] * n
        unknown = set(arms) - set(self.arm_names)
        if unknown and self.arm_names != [None]:
            raise ValueError(f"arms {sorted(unknown)} were not in the fit; it has {self.arm_names}")
        other = type(self).__new__(type(self))
        order = list(self.arm_names)
        Model.__init__(
            other, self.law, {c: np.atleast_1d(columns[c]) for c in self.law.columns}, None, (), self.pivots
        )
        other.arm_names, other.own, other.slots, other.names, other.p = order, self.own, self.slots, self.names, self.p
        other.arm_index = np.array([order.index(a) if self.arm_names != [None] else 0 for a in arms])
        other.prepare()
        return other


class TermModel(Model):
    """log L = logsumexp_k (M_k theta): theta holds log levels (at the pivots) and exponents."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.prepare()

    def prepare(self):
        self.logs = {c: np.log(v / self.pivots[c]) for c, v in self.columns.items()}
        rows = np.arange(self.n)
        blocks = []
        for level, powers in self.law.terms.items():
            block = np.zeros((self.n, self.p))
            block[rows, self._columns_of(level)] = 1.0
            for exponent, column in powers.items():
                block[rows, self._columns_of(exponent)] = -self.logs[column]
            blocks.append(block)
        self.design = np.stack(blocks)  # (terms, n, p)
        self._outer = np.einsum("knp,knq->knpq", self.design, self.design).reshape(len(blocks), self.n, -1)

    def _shares(self, theta):
        z = theta @ self.design.reshape(-1, self.p).T
        z = z.reshape(len(theta), len(self.design), self.n)
        top = z.max(axis=1, keepdims=True)
        weights = np.exp(z - top)
        total = weights.sum(axis=1, keepdims=True)
        return top[:, 0] + np.log(total[:, 0]), weights / total  # (B, n), (B, terms, n)

    def values(self, theta):
        return self._shares(theta)[0]

    def evaluate(self, theta):
        value, shares = self._shares(theta)
        gradient = sum(shares[:, k, :, None] * self.design[k] for k in range(len(self.design)))
        return value, gradient

    def curvature(self, theta, c):
        _, shares = self._shares(theta)
        gradient = sum(shares[:, k, :, None] * self.design[k] for k in range(len(self.design)))
        second = sum((c * shares[:, k]) @ self._outer[k] for k in range(len(self.design)))
        weighted = gradient * c[..., None]
        return second.reshape(len(theta), self.p, self.p) - np.swapaxes(gradient, 1, 2) @ weighted

    def local_to_natural(self, q):
        q = dict(zip(self.law.parameters, q, strict=True))
        natural = {}
        for level, powers in self.law.terms.items():
            shift = sum(
                q[x] * np.log(self.pivots[column] / self.law.units.get(column, 1.0)) for x, column in powers.items()
            )
            natural[level] = np.exp(q[level] + shift)
        return natural | {name: q[name] for name in self.law.parameters if name not in natural}

    def natural_to_local(self, natural):
        q = []
        for parameter in self.law.parameters:
            if parameter in self.law.terms:
                powers = self.law.terms[parameter].items()
                shift = sum(natural[x] * np.log(self.pivots[c] / self.law.units.get(c, 1.0)) for x, c in powers)
                q.append(np.log(natural[parameter]) - shift)
            else:
                q.append(natural[parameter])
        return np.array(q)

    def starts(self, target):
        """Variable projection: on a grid of exponents (shared by the arms) the levels are a non-negative linear solve.

        Returns (nodes, p) vectors and the number of nodes along each exponent.
        """
        exponents = [x for x in self.law.parameters if x not in self.law.terms]
        axis = GRID_EXPONENTS if len(exponents) <= 2 else GRID_EXPONENTS[::2]
        mesh = np.stack(np.meshgrid(*[axis] * len(exponents), indexing="ij"), axis=-1).reshape(-1, len(exponents))
        levels = [(level, i) for level in self.law.terms for i in sorted(set(self.slots[level].values()))]
        masks = {i: (self._columns_of(level) == i) / target for level, i in levels}
        at = np.searchsorted(axis, mesh)
        design = np.empty((len(mesh), self.n, len(levels)))
        for column, (level, i) in enumerate(levels):
            value = np.broadcast_to(masks[i], (len(mesh), self.n))
            for x, c in self.law.terms[level].items():
                value = value * np.exp(-np.outer(axis, self.logs[c]))[at[:, exponents.index(x)]]
            design[:, :, column] = value
        solution = np.log(np.maximum(_nonnegative(design), 1e-3 * target.min()))
        found = np.empty((len(mesh), self.p))
        found[:, [i for _, i in levels]] = solution
        for j, x in enumerate(exponents):
            found[:, sorted(set(self.slots[x].values()))] = mesh[:, j, None]
        return found


class CurveModel(Model):
    """A law with its own curve; the Hessian is a central difference of the exact gradient."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.prepare()

    def prepare(self):
        self.curve = self.law.curve(self.columns, self.pivots)
        self._where = np.stack([self._columns_of(parameter) for parameter in self.law.parameters])  # (P, n)

    def values(self, theta):
        return self.curve.value_and_gradient(np.moveaxis(theta[:, self._where], 1, 0))[0]

    def evaluate(self, theta):
        value, partials = self.curve.value_and_gradient(np.moveaxis(theta[:, self._where], 1, 0))
        gradient = np.zeros((len(theta), self.n, self.p))
        rows = np.arange(self.n)
        for where, partial in zip(self._where, partials, strict=True):
            gradient[:, rows, where] = partial
        return value, gradient

    def curvature(self, theta, c):
        second = np.empty((len(theta), self.p, self.p))
        for j in range(self.p):
            step = np.zeros(self.p)
            step[j] = 1e-5
            ahead, behind = self.evaluate(theta + step)[1], self.evaluate(theta - step)[1]
            second[:, j] = np.einsum("bn,bnp->bp", c, ahead - behind) / 2e-5
        return 0.5 * (second + np.swapaxes(second, 1, 2))

    def local_to_natural(self, q):
        return self.curve.to_natural(q)

    def natural_to_local(self, natural):
        return self.curve.from_natural(natural)

    def starts(self, target):
        found = np.zeros((0, self.p))
        local = self.curve.starts(target)
        found = np.zeros((len(local), self.p))
        for j, parameter in enumerate(self.law.parameters):
            for i in set(self.slots[parameter].values()):
                found[:, i] = local[:, j]
        return found


def _nonnegative(design):
    """Least-squares levels >= 0 with design (nodes, n, levels) @ levels = 1, for every node, (nodes, levels).

    Up to three levels every set of active ones is solved at once; beyond that one node after the other.
    """
    nodes, n, count = design.shape
    if count > 3:
        return np.stack([nnls(d, np.ones(n))[0] for d in design])
    gram = np.swapaxes(design, 1, 2) @ design
    right = design.sum(axis=1)
    best = np.zeros((nodes, count))
    least = np.full(nodes, np.inf)
    for subset in (s for size in range(1, count + 1) for s in combinations(range(count), size)):
        part = np.ix_(range(nodes), subset, subset)
        ridge = 1e-13 * np.einsum("kii->k", gram)[:, None, None] * np.eye(len(subset))
        levels = np.linalg.solve(gram[part] + ridge, right[:, subset][..., None])[..., 0]
        error = -(levels * right[:, subset]).sum(axis=1)  # up to the constant n
        better = (levels >= 0).all(axis=1) & (error < least)
        best[better] = 0.0
        best[np.ix_(better, subset)] = levels[better]
        least[better] = error[better]
    return best


def bind(law, columns, arms=None, own=()):
    """The law on these columns: a TermModel or a CurveModel. Raises ValueError on missing or non-positive columns."""
    kind = CurveModel if law.curve is not None else TermModel
    return kind(law, columns, arms, own)
