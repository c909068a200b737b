"""The min-norm step: weights λ of the shortest vector `d = Σ_s λ_s Δ_s`, and the proof that it is one.

    min ‖Σ_A λ_s Δ_s + Σ_C μ_c Δ_c‖²,   λ ≥ 0, Σ_A λ_s = 1, μ ≥ 0

with active objectives `A` and protected ones `C` (none, in line 6 of the paper's algorithm). Only
the Gramian `G = ΔΔᵀ` is needed. At the solution `⟨Δ_s, d⟩ ≥ ‖d‖²` on `A` and `⟨Δ_c, d⟩ ≥ 0` on `C`.

**One problem for both cases, free of scale.** Let `u_s = Δ_s/‖Δ_s‖`, `σ = min_A ‖Δ_s‖`, and
`a_s = σ/‖Δ_s‖` on `A`, 0 on `C`. By homogeneity the solution above is `λ_s ∝ ν_s/‖Δ_s‖`, with ν that of
the nonnegative least-squares problem, which is always bounded,

    min ½ ‖Σ_s ν_s u_s‖² + ½ (aᵀν − 1)²,   ν ≥ 0.

With `H = UUᵀ + aaᵀ` and `w = a − Hν` it is solved where `w ≤ 0`, and `w = 0` wherever `ν > 0`. What a
float64 Gramian allows, `‖d‖² − ⟨Δ_s, d⟩ ≤ 1e−9‖d‖² + 16·S·ε·‖Δ_s‖·Σ_j λ_j‖Δ_j‖`, reads in these terms
`w_s ≤ 1e−9·a_s(1 − aᵀν) + 16·S·ε·Σν`.

**A ridge of the size of the noise.** The solvers see `H + 4√S·ε·I`: rounding the entries of `UUᵀ` moves
its eigenvalues by less, and `w_s` moves by `4√S·ε·ν_s`, well within what is allowed. So the matrix is
positive definite for copies, parallel rows and any rank. A row so close to another (1e−8) that the
Gramian cannot tell them apart means a long step, which ends where the other row leaves, and no
division by noise. And where long rows cancel, so that ‖d‖² keeps its last digits only, the ridge bends
`⟨Δ_s, d⟩` of the long rows, which have room for it, instead of the short ones': without it one such
problem in six misses the bound.

**Two solvers.** Block principal pivoting guesses the support, solves, exchanges all rows that are on
the wrong side, and is done after a handful of solves, or one when everything is active. It may cycle;
then an active-set method (Lawson and Hanson's, here the same as Wolfe's) finds the support row by row
with factor updates and a strictly falling objective. Both stop by the same test on `w`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from fmol.blas import one_thread

__all__ = ["Certificate", "MinNormSolution", "certificate", "min_norm"]

Array = NDArray[np.float64]
Mask = NDArray[np.bool_]

EPS = 2.0**-52
NOISE = 16 * EPS  # times S: what the certificate forgives, relative to lengths
RIDGE = 4 * EPS  # times √S: what the solvers add to the diagonal of H
TOLERANCE = 2 * EPS  # times S: how far `w` may be above zero, relative to ‖ν‖ …
RELATIVE = 1e-10  # … and to a_s(1 − aᵀν)

# What rounding in float32 may do to a Gramian, relative to ‖Δ_i‖‖Δ_j‖.
ASYMMETRY = 1e-5
EXCESS = 1e-3


@dataclass(frozen=True)
class Certificate:
    """How good a direction `d = Σ_s λ_s Δ_s` is for every objective at once.

    - `norm_squared`: `‖d‖²`.
    - `gap`: the largest `(‖d‖² − ⟨Δ_s, d⟩)/‖d‖²` over active objectives and `−⟨Δ_c, d⟩/‖d‖²` over
      protected ones; 0 (to rounding) is what the convergence proof needs, and below 1 every active
      objective falls along `−d`.
    - `min_cosine`: the smallest cosine between `d` and a non-zero `Δ_s`.
    - `stationary`: `‖d‖` is zero as far as a float64 Gramian can tell, `‖d‖² ≤ 16·S·ε·(Σ_j λ_j‖Δ_j‖)²`.
      Then nothing can be said of directions: `gap` is 0 and `min_cosine` NaN.
    """

    norm_squared: float
    gap: float
    min_cosine: float
    stationary: bool


@dataclass(frozen=True, eq=False)
class MinNormSolution(Certificate):
    """The min-norm weights λ `[S]`, float64 on the CPU, with the certificate of their direction.

    The active objectives' weights sum to one; a protected objective's is its multiplier μ_c ≥ 0.
    """

    weights: Tensor


def min_norm(
    gramian: Tensor | ArrayLike, protected: Tensor | Sequence[bool] | Mask | None = None
) -> MinNormSolution:
    """The weights of the shortest vector in the hull of the `Δ_s`, from their Gramian `[S, S]`.

    `protected` `[S]` marks objectives that do not pull and may not be hurt. A zero `Δ_s` that is
    active makes `d = 0` (all weight on such rows, evenly); one that is protected does nothing.

    >>> min_norm([[1.0, 0.0], [0.0, 4.0]]).weights  # orthogonal, of lengths 1 and 2
    tensor([0.8000, 0.2000], dtype=torch.float64)
    >>> min_norm([[1.0, -1.0], [-1.0, 4.0]], protected=[False, True]).weights
    tensor([1.0000, 0.2500], dtype=torch.float64)
    """
    correlation, norms = read_gramian(gramian)
    mask = read_protected(protected, len(norms))
    with one_thread(len(norms)):
        weights = solve_scaled(correlation, norms, mask)
        told = _certify(correlation, norms, weights, mask)
    return MinNormSolution(*told, torch.from_numpy(weights))


def certificate(
    gramian: Tensor | ArrayLike,
    weights: Tensor | ArrayLike,
    protected: Tensor | Sequence[bool] | Mask | None = None,
) -> Certificate:
    """The certificate of `d = Σ_s weights_s Δ_s` for any coefficients `[S]`, summing to one or not.

    >>> mean = certificate([[1.0, -2.0], [-2.0, 9.0]], [0.5, 0.5])  # hurts the first objective
    >>> round(mean.min_cosine, 3), round(mean.gap, 3)
    (-0.408, 1.333)
    """
    correlation, norms = read_gramian(gramian)
    if isinstance(weights, Tensor):
        weights = weights.cpu().double().numpy(force=True)
    coefficients = np.asarray(weights, dtype=np.float64)
    if coefficients.shape != norms.shape:
        raise ValueError(
            f"`weights` must have one entry per row of the {len(norms)} × {len(norms)} Gramian, got "
            f"shape {coefficients.shape}. Give a vector of length {len(norms)}."
        )
    if not np.isfinite(coefficients).all():
        raise ValueError(
            f"`weights` must be finite, got {coefficients.tolist()}. Check the rule that made them."
        )
    mask = read_protected(protected, len(norms))
    with one_thread(len(norms)):
        return Certificate(*_certify(correlation, norms, coefficients, mask))


def _certify(
    correlation: Array, norms: Array, weights: Array, protected: Mask | None
) -> tuple[float, float, float, bool]:
    """The fields of the certificate."""
    lengths = weights * norms
    along = correlation.dot(lengths)  # ⟨u_s, d⟩
    norm_squared = float(lengths.dot(along))
    if not norm_squared > NOISE * len(norms) * float(np.abs(lengths).sum()) ** 2:
        return max(norm_squared, 0.0), 0.0, math.nan, True
    falls = norms * along  # ⟨Δ_s, d⟩
    if protected is None:
        shortfall = norm_squared - _least(falls)
    else:
        shortfall = max(norm_squared - _least(falls[~protected]), -_least(falls[protected]))
    if np.count_nonzero(norms) < len(norms):
        along = along[norms > 0]
    cosine = min(_least(along) / math.sqrt(norm_squared), 1.0)
    return norm_squared, shortfall / norm_squared, cosine, False


def _least(values: Array) -> float:
    """The smallest value, NaN if one is NaN. For short vectors five times as fast as `min()`."""
    return values.item(values.argmin())


def _most(values: Array) -> float:
    """The largest value, NaN if one is NaN."""
    return values.item(values.argmax())


def read_gramian(gramian: Tensor | ArrayLike) -> tuple[Array, Array]:
    """The cosines `UUᵀ` `[S, S]`, zero for a zero `Δ_s`, and the lengths `‖Δ_s‖` `[S]`; checked."""
    if isinstance(gramian, Tensor):
        tiny = torch.finfo(gramian.dtype).tiny if gramian.is_floating_point() else 0.0
        matrix: Array = gramian.cpu().double().numpy(force=True)
    else:
        given = np.asarray(gramian)
        tiny = float(np.finfo(given.dtype).tiny) if given.dtype.kind == "f" else 0.0
        matrix = given.astype(np.float64, copy=False)
    if matrix.ndim != 2 or matrix.shape[0] != matrix.shape[1] or matrix.size == 0:
        raise ValueError(
            f"`gramian` must be a square matrix of inner products with at least one row, got shape "
            f"{tuple(matrix.shape)}. Compute it as `deltas @ deltas.T` from deltas [S, d]."
        )
    squares = matrix.diagonal()
    # A squared length below the smallest normal number has lost its digits: it is a zero.
    tiny = max(tiny, 2.0**-1022)
    short = squares < tiny
    zeros = np.count_nonzero(short)
    with np.errstate(all="ignore"):
        norms = np.sqrt(np.maximum(squares, tiny) if zeros else squares)
        correlation = matrix / (norms[:, None] * norms)
        asymmetry = _most(correlation - correlation.T)  # of which the least is minus the most
        excess = _most(np.abs(correlation)) - 1
        # So written that NaN is refused, too.
        if not (asymmetry <= ASYMMETRY and excess <= EXCESS) or (zeros and squares.min() < 0):
            _refuse(matrix, correlation)
    if asymmetry > 0:
        correlation = (correlation + correlation.T) / 2
    correlation.flat[:: len(norms) + 1] = 1.0
    if zeros:
        norms[short] = correlation[short] = correlation[:, short] = 0.0
    return correlation, norms


def _refuse(matrix: Array, correlation: Array) -> NoReturn:
    """Raises the error that says why a matrix is no Gramian."""
    wrong = np.argwhere(~np.isfinite(matrix))
    if len(wrong):
        i, j = wrong[0]
        raise ValueError(
            f"`gramian` has {len(wrong)} entries that are NaN or infinite, the first of them "
            f"{matrix[i, j]} at [{i}, {j}]. Look for a delta that diverged: a smaller `local_lr` helps."
        )
    squares = matrix.diagonal()
    i = squares.argmin()
    if squares[i] < 0:
        raise ValueError(
            f"`gramian` has {squares[i]:.6g} at [{i}, {i}], but a squared length cannot be negative. "
            "Compute it as `deltas @ deltas.T`."
        )
    difference = np.abs(correlation - correlation.T)
    if difference.max() > ASYMMETRY:
        i, j = np.unravel_index(difference.argmax(), difference.shape)
        raise ValueError(
            f"`gramian` is not symmetric: {matrix[i, j]:.6g} at [{i}, {j}] but {matrix[j, i]:.6g} at "
            f"[{j}, {i}]. Compute it as `deltas @ deltas.T`."
        )
    i, j = np.unravel_index(np.abs(correlation).argmax(), difference.shape)
    raise ValueError(
        f"`gramian` is not a matrix of inner products: {matrix[i, j]:.6g} at [{i}, {j}] is more than "
        f"vectors of squared lengths {matrix[i, i]:.6g} and {matrix[j, j]:.6g} can have. "
        "Compute it as `deltas @ deltas.T`, in float64."
    )


def read_protected(protected: Any, S: int) -> Mask | None:
    """`protected` as a mask `[S]`, None when nothing is protected."""
    if protected is None:
        return None
    if isinstance(protected, Tensor):
        protected = protected.numpy(force=True)
    mask = np.asarray(protected)
    if mask.dtype != np.bool_ or mask.shape != (S,):
        raise ValueError(
            f"`protected` must be {S} booleans, one per row of the Gramian, got {mask.dtype} of shape "
            f"{mask.shape}. Give True for each objective that may not be hurt, False for the others."
        )
    if mask.all():
        raise ValueError(
            f"`protected` marks all of the {S} objectives, so that none is left to improve. "
            "Leave at least one active."
        )
    return mask if mask.any() else None


def solve_scaled(correlation: Array, norms: Array, protected: Mask | None) -> Array:
    """λ on the active rows, μ on the protected ones, `[S]`."""
    S = len(norms)
    if np.count_nonzero(norms) < S:
        zero = norms == 0
        guarded = np.zeros(S, dtype=bool) if protected is None else protected
        idle = zero & ~guarded
        weights = np.zeros(S)
        if idle.any():
            weights[idle] = 1 / np.count_nonzero(idle)
        else:  # only protected rows are zero, and nothing can hurt those
            rest = np.flatnonzero(~zero)
            weights[rest] = solve_scaled(
                correlation[rest][:, rest], norms[rest], read_protected(guarded[rest], len(rest))
            )
        return weights
    if protected is None and S == 1:
        return np.ones(1)
    if protected is None and S == 2:
        return _weights_of_two(correlation[0, 1], norms[0] / norms[1])
    reach = _least(norms if protected is None else norms[~protected]) / norms
    a = reach if protected is None else np.where(protected, 0.0, reach)
    nu = _nonnegative(correlation + a[:, None] * a, a)
    return nu * reach / float(a.dot(nu))


def _weights_of_two(cosine: float, ratio: float) -> Array:
    """λ in closed form from the cosine of two rows and the ratio of their lengths."""
    first, second = max(1 - cosine * ratio, 0.0), max(ratio * (ratio - cosine), 0.0)
    total = first + second
    # Both are zero for copies only.
    return np.array([first / total, second / total] if total > 0 else [0.5, 0.5])


def _nonnegative(H: Array, a: Array) -> Array:
    """ν ≥ 0 `[S]` where `w = a − Hν` is at most zero, and zero wherever ν > 0. Overwrites `H`."""
    diagonal = H.diagonal().copy()
    ridge = RIDGE * math.sqrt(len(a))
    while True:
        H.flat[:: len(a) + 1] = diagonal + ridge
        try:
            nu = _pivot_blocks(H, a)
            return _grow_support(H, a) if nu is None else nu
        except np.linalg.LinAlgError:
            # A Gramian of less precise products has eigenvalues below −ridge, and then no minimum.
            # Its noise is larger: so must the ridge be. The certificate shows what that costs.
            ridge *= 10


def _tolerance(a: Array, nu: Array) -> Array:
    """How far above zero `w` `[S]` may be at the solution."""
    noise = TOLERANCE * len(a) * math.sqrt(nu.dot(nu))
    return RELATIVE * max(1.0 - float(a.dot(nu)), 0.0) * a + noise


def _pivot_blocks(H: Array, a: Array) -> Array | None:
    """ν ≥ 0 `[S]` by block principal pivoting, None where that does not get there."""
    support = np.ones(len(a), dtype=bool)
    fewest, patience = len(a) + 1, 3
    while True:
        rows = support.nonzero()[0]
        nu = np.zeros(len(a))
        nu[rows] = np.linalg.solve(H.take(rows, 0).take(rows, 1), a[rows])
        w = a - H.dot(nu)
        tolerance = _tolerance(a, nu)
        wrong = (nu < 0) | (w > tolerance)
        count = int(np.count_nonzero(wrong))
        if count == 0:
            return nu if nu.dot(w + tolerance) >= 0 else None
        # Rows may go in and out for ever: only so many exchanges without progress.
        if count < fewest:
            fewest, patience = count, 3
        elif patience > 0:
            patience -= 1
        else:
            return None
        support ^= wrong


def _grow_support(H: Array, a: Array) -> Array:
    """ν ≥ 0 `[S]` by an active-set method from ν = 0, with `RᵀR = H` on the support.

    Every step is a Newton step `p` on the support, cut short where a row reaches zero; that row
    leaves. After a full step the row with the largest `w` enters. Steps start from the residual
    `w` of the current ν, so that rounding in `R` is corrected by the next step and never piles up.
    """
    S = len(a)
    nu, R = np.zeros(S), np.zeros((S, S))
    support: list[int] = []
    full = True
    for _ in range(20 * S + 100):
        w = a - H @ nu
        tolerance = _tolerance(a, nu)
        if full:
            excess = w - tolerance
            excess[support] = -np.inf
            entering = int(excess.argmax())
            if excess[entering] > 0:
                _append(R, H, support, entering)
            elif nu @ (w + tolerance) >= 0:
                break
        k = len(support)
        p = _back_substitute(R[:k, :k], _substitute(R[:k, :k].T, w[support]))
        now = nu[support]
        falling = np.flatnonzero(p < 0)
        steps = now[falling] / -p[falling]
        full = not (len(steps) and steps.min() < 1)
        if full:
            nu[support] = now + p
            continue
        length = steps.min()
        now = np.maximum(now + length * p, 0.0)
        now[falling[steps == length]] = 0.0
        nu[support] = now
        for i in np.flatnonzero(now == 0.0)[::-1]:
            _remove(R, len(support), int(i))
            del support[i]
    return nu


def _append(R: Array, H: Array, support: list[int], row: int) -> None:
    """Lets `row` into the support and appends its column to the factor `R`."""
    k = len(support)
    column = _substitute(R[:k, :k].T, H[support, row])
    R[:k, k] = column
    pivot = H[row, row] - column @ column  # of a near copy not much is left but the ridge
    if pivot <= 0:
        raise np.linalg.LinAlgError("the matrix is not positive definite")
    R[k, k] = math.sqrt(pivot)
    support.append(row)


def _remove(R: Array, k: int, i: int) -> None:
    """Removes column `i` of the factor of `k` columns and makes it triangular again (Givens)."""
    R[:k, i : k - 1] = R[:k, i + 1 : k]
    for q in range(i, k - 1):
        c, s = R[q : q + 2, q]
        pair = R[q : q + 2, q : k - 1]
        pair[:] = np.array([[c, s], [-s, c]]) @ pair / math.hypot(c, s)
        pair[1, 0] = 0.0


def _substitute(L: Array, b: Array, block: int = 32) -> Array:
    """`x` with `Lx = b` for a lower triangular `L`, block by block: numpy has no such solver."""
    x = np.empty(len(b))
    for i in range(0, len(b), block):
        j = i + block
        x[i:j] = np.linalg.solve(L[i:j, i:j], b[i:j] - L[i:j, :i] @ x[:i])
    return x


def _back_substitute(R: Array, b: Array) -> Array:
    """`x` with `Rx = b` for an upper triangular `R`: read backwards, it is lower triangular."""
    return _substitute(R[::-1, ::-1], b[::-1])[::-1]
