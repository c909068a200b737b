"""What a GPU does for convolutions of lanes, in Triton's language: `lane_conv.py` starts it.

Windows are read where they lie: written out, they would be the largest tensors of a step, and moving
them most of its time. Lanes' weights are parts of rows that hold all parameters of a lane, and lie
`apart` from one another: so many times `QUAD` numbers, where that lets four be read at once.
"""

from __future__ import annotations

import triton
import triton.language as tl

__all__ = [
    "fold",
    "forward",
    "forward_last",
    "turn",
    "turn_last",
    "unfold",
    "unfold_rows",
    "weight",
]


@triton.jit
def forward(
    x, w, b, out, images, apart, b_apart,
    C: tl.constexpr, H: tl.constexpr, W: tl.constexpr,
    F: tl.constexpr, OH: tl.constexpr, OW: tl.constexpr,
    KH: tl.constexpr, KW: tl.constexpr, SH: tl.constexpr, SW: tl.constexpr,
    PH: tl.constexpr, PW: tl.constexpr, DH: tl.constexpr, DW: tl.constexpr,
    QUAD: tl.constexpr, INSIDE: tl.constexpr, BIAS: tl.constexpr, PRECISION: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """`out[F, n] = w[F, k] · windows[k, n]`, where `n` runs over the images' pixels."""
    P: tl.constexpr = OH * OW
    KK: tl.constexpr = KH * KW
    CKK: tl.constexpr = C * KK
    lane = tl.program_id(2).to(tl.int64)
    m = tl.program_id(1) * BM + tl.arange(0, BM)
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    image, p = n // P, n % P
    top, left = (p // OW) * SH - PH, (p % OW) * SW - PW
    base = image * (C * H * W) + top * W + left
    x += lane * images * C * H * W
    w += lane * (apart * QUAD)
    acc = tl.zeros((BM, BN), dtype=tl.float32)
    for start in range(0, CKK, BK):
        k = start + tl.arange(0, BK)
        c, kh, kw = k // KK, (k % KK) // KW * DH, k % KW * DW
        weights = tl.load(
            w + m[:, None] * CKK + k[None, :], mask=(m < F)[:, None] & (k < CKK)[None, :], other=0.0
        )
        there = (k < CKK)[:, None] & (image < images)[None, :]
        if not INSIDE:
            row, column = top[None, :] + kh[:, None], left[None, :] + kw[:, None]
            there &= (row >= 0) & (row < H) & (column >= 0) & (column < W)
        windows = tl.load(
            x + (c * (H * W) + kh * W + kw)[:, None] + base[None, :], mask=there, other=0.0
        )
        acc = tl.dot(weights, windows, acc, input_precision=PRECISION)
    if BIAS:
        acc += tl.load(b + lane * b_apart + m, mask=m < F, other=0.0).to(tl.float32)[:, None]
    out += lane * images * F * P
    tl.store(
        out + m[:, None] * P + (image * (F * P) + p)[None, :],
        acc.to(out.dtype.element_ty),
        mask=(m < F)[:, None] & (image < images)[None, :],
    )


@triton.jit
def forward_last(
    x, w, out, images,
    C: tl.constexpr, H: tl.constexpr, W: tl.constexpr,
    F: tl.constexpr, OH: tl.constexpr, OW: tl.constexpr,
    KH: tl.constexpr, KW: tl.constexpr,
    PH: tl.constexpr, PW: tl.constexpr, DH: tl.constexpr, DW: tl.constexpr,
    TURNED: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """The same of images `[h, w, C]` and weights `[F, k, k, C]`, rounded.

    Both sides of the product then lie along what is summed over, as tensor cores want it for TF32.
    `TURNED`, the last tap comes first.
    """
    P: tl.constexpr = OH * OW
    KK: tl.constexpr = KH * KW
    PARTS: tl.constexpr = C // BK
    lane = tl.program_id(2).to(tl.int64)
    m = tl.program_id(1) * BM + tl.arange(0, BM)
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    k = tl.arange(0, BK)
    image, p = n // P, n % P
    top, left = p // OW - PH, p % OW - PW
    x += lane * images * H * W * C
    w += lane * F * KK * C
    acc = tl.zeros((BM, BN), dtype=tl.float32)
    for step in range(0, KK * PARTS):
        tap, first = step // PARTS, step % PARTS * BK
        row, column = top + tap // KW * DH, left + tap % KW * DW
        there = (image < images) & (row >= 0) & (row < H) & (column >= 0) & (column < W)
        windows = tl.load(
            x + ((image * H + row) * W + column)[:, None] * C + (first + k)[None, :],
            mask=there[:, None],
            other=0.0,
        )
        place = KK - 1 - tap if TURNED else tap
        weights = tl.load(
            w + m[:, None] * (KK * C) + (place * C + first + k)[None, :],
            mask=(m < F)[:, None],
            other=0.0,
        )
        acc = tl.dot(weights, tl.trans(windows), acc, input_precision="tf32")
    out += lane * images * F * P
    tl.store(
        out + m[:, None] * P + (image * (F * P) + p)[None, :],
        acc,
        mask=(m < F)[:, None] & (image < images)[None, :],
    )


@triton.jit
def turn_last(x, out, C, P, each, apart, QUAD: tl.constexpr, BC: tl.constexpr, BP: tl.constexpr):
    """`out[n, P, C]` of `x[n, C, P]`, of which every lane has `each`."""
    c = tl.program_id(1) * BC + tl.arange(0, BC)
    p = tl.program_id(2) * BP + tl.arange(0, BP)
    n = tl.program_id(0).to(tl.int64)
    there = (c < C)[:, None] & (p < P)[None, :]
    x += n // each * (apart * QUAD) + n % each * (C * P)
    part = tl.load(x + c[:, None] * P + p[None, :], mask=there)
    tl.store(out + n * C * P + p[:, None] * C + c[None, :], tl.trans(part), mask=tl.trans(there))


@triton.jit
def weight(
    x, g, dw, images, per_split, splits,
    C: tl.constexpr, H: tl.constexpr, W: tl.constexpr,
    F: tl.constexpr, OH: tl.constexpr, OW: tl.constexpr,
    KH: tl.constexpr, KW: tl.constexpr, SH: tl.constexpr, SW: tl.constexpr,
    PH: tl.constexpr, PW: tl.constexpr, DH: tl.constexpr, DW: tl.constexpr,
    INSIDE: tl.constexpr, PRECISION: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """`dw[F, k] = Σ_n g[F, n] · windows[k, n]`, a part of the sum for each split."""
    P: tl.constexpr = OH * OW
    KK: tl.constexpr = KH * KW
    CKK: tl.constexpr = C * KK
    COLUMNS: tl.constexpr = (CKK + BN - 1) // BN
    lane, split = tl.program_id(2).to(tl.int64), tl.program_id(0)
    m = tl.program_id(1) // COLUMNS * BM + tl.arange(0, BM)
    k = tl.program_id(1) % COLUMNS * BN + tl.arange(0, BN)
    c, kh, kw = k // KK, (k % KK) // KW * DH, k % KW * DW
    offset = c * (H * W) + kh * W + kw
    x += lane * images * C * H * W
    g += lane * images * F * P
    acc = tl.zeros((BM, BN), dtype=tl.float32)
    last = tl.minimum((split + 1) * per_split, images * P)
    for start in range(split * per_split, last, BK):
        n = start + tl.arange(0, BK)
        image, p = n // P, n % P
        top, left = (p // OW) * SH - PH, (p % OW) * SW - PW
        mine = tl.load(
            g + m[:, None] * P + (image * (F * P) + p)[None, :],
            mask=(m < F)[:, None] & (n < last)[None, :],
            other=0.0,
        )
        there = (n < last)[:, None] & (k < CKK)[None, :]
        if not INSIDE:
            row, column = top[:, None] + kh[None, :], left[:, None] + kw[None, :]
            there &= (row >= 0) & (row < H) & (column >= 0) & (column < W)
        windows = tl.load(
            x + (image * (C * H * W) + top * W + left)[:, None] + offset[None, :],
            mask=there,
            other=0.0,
        )
        acc = tl.dot(mine, windows, acc, input_precision=PRECISION)
    place = lane * splits + split
    tl.store(
        dw + place * F * CKK + m[:, None] * CKK + k[None, :],
        acc,
        mask=(m < F)[:, None] & (k < CKK)[None, :],
    )


@triton.jit
def unfold(
    x, out, images,
    C: tl.constexpr, H: tl.constexpr, W: tl.constexpr,
    F: tl.constexpr, OH: tl.constexpr, OW: tl.constexpr,
    KH: tl.constexpr, KW: tl.constexpr, SH: tl.constexpr, SW: tl.constexpr,
    PH: tl.constexpr, PW: tl.constexpr, DH: tl.constexpr, DW: tl.constexpr,
    BN: tl.constexpr,
):  # fmt: skip
    """The windows written out, `[C·k·k, n]` for each lane."""
    P: tl.constexpr = OH * OW
    KK: tl.constexpr = KH * KW
    lane, k = tl.program_id(2).to(tl.int64), tl.program_id(1)
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    image, p = n // P, n % P
    c, kh, kw = k // KK, (k % KK) // KW * DH, k % KW * DW
    row, column = (p // OW) * SH - PH + kh, (p % OW) * SW - PW + kw
    there = (image < images) & (row >= 0) & (row < H) & (column >= 0) & (column < W)
    value = tl.load(
        x + lane * images * C * H * W + (image * C + c) * (H * W) + row * W + column,
        mask=there,
        other=0.0,
    )
    tl.store(out + (lane * C * KK + k) * images * P + n, value, mask=image < images)


@triton.jit
def unfold_rows(
    x, out, images,
    C: tl.constexpr, H: tl.constexpr, W: tl.constexpr,
    F: tl.constexpr, OH: tl.constexpr, OW: tl.constexpr,
    KH: tl.constexpr, KW: tl.constexpr, SH: tl.constexpr, SW: tl.constexpr,
    PH: tl.constexpr, PW: tl.constexpr, DH: tl.constexpr, DW: tl.constexpr,
    BK: tl.constexpr,
):  # fmt: skip
    """The windows written out as rows, `[n, C·k·k]` for each lane."""
    P: tl.constexpr = OH * OW
    KK: tl.constexpr = KH * KW
    CKK: tl.constexpr = C * KK
    lane, n = tl.program_id(2).to(tl.int64), tl.program_id(0)
    k = tl.program_id(1) * BK + tl.arange(0, BK)
    image, p = n // P, n % P
    c, kh, kw = k // KK, (k % KK) // KW * DH, k % KW * DW
    row, column = (p // OW) * SH - PH + kh, (p % OW) * SW - PW + kw
    there = (k < CKK) & (row >= 0) & (row < H) & (column >= 0) & (column < W)
    value = tl.load(
        x + lane * images * C * H * W + (image * C + c) * (H * W) + row * W + column,
        mask=there,
        other=0.0,
    )
    tl.store(out + (lane * images * P + n) * CKK + k, value, mask=k < CKK)


@triton.jit
def fold(
    columns, dx, total, images,
    C: tl.constexpr, H: tl.constexpr, W: tl.constexpr,
    F: tl.constexpr, OH: tl.constexpr, OW: tl.constexpr,
    KH: tl.constexpr, KW: tl.constexpr, SH: tl.constexpr, SW: tl.constexpr,
    PH: tl.constexpr, PW: tl.constexpr, DH: tl.constexpr, DW: tl.constexpr,
    BY_LANE: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """Every pixel's sum over the windows it is in.

    From columns `[L, B, C·k·k, pixels]`, or, `BY_LANE`, `[L, C·k·k, B, pixels]`.
    """
    i = tl.program_id(0).to(tl.int64) * BN + tl.arange(0, BN)
    plane, p = i // (H * W), (i % (H * W)).to(tl.int32)
    top, left = p // W + PH, p % W + PW
    first, apart = plane * (KH * KW) * (OH * OW), OH * OW
    if BY_LANE:
        c, image, lane = plane % C, plane // C % images, plane // C // images
        first = ((lane * C + c) * (KH * KW) * images + image) * (OH * OW)
        apart = images * (OH * OW)
    acc = tl.zeros((BN,), dtype=tl.float32)
    for kh in tl.static_range(KH):
        for kw in tl.static_range(KW):
            row, column = top - kh * DH, left - kw * DW
            there = (i < total) & (row >= 0) & (column >= 0)
            if SH > 1:
                there &= row % SH == 0
                row = row // SH
            if SW > 1:
                there &= column % SW == 0
                column = column // SW
            there &= (row < OH) & (column < OW)
            place = first + (kh * KW + kw) * apart + row * OW + column
            acc += tl.load(columns + place, mask=there, other=0.0).to(tl.float32)
    tl.store(dx + i, acc.to(dx.dtype.element_ty), mask=i < total)


@triton.jit
def turn(
    w, out, total, apart,
    F: tl.constexpr, C: tl.constexpr, KH: tl.constexpr, KW: tl.constexpr,
    FIRST_H: tl.constexpr, FIRST_W: tl.constexpr, STEP_H: tl.constexpr, STEP_W: tl.constexpr,
    TH: tl.constexpr, TW: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """`out[L, C, F, TH, TW]` of `w[L, F, C, KH, KW]`: every so many taps, the last of them first."""
    i = tl.program_id(0).to(tl.int64) * BN + tl.arange(0, BN)
    tap, f = (i % (TH * TW)).to(tl.int32), (i // (TH * TW) % F).to(tl.int32)
    c, lane = (i // (TH * TW * F) % C).to(tl.int32), i // (TH * TW * F * C)
    kh = FIRST_H + (TH - 1 - tap // TW) * STEP_H
    kw = FIRST_W + (TW - 1 - tap % TW) * STEP_W
    place = lane * apart + (f * C + c) * (KH * KW) + kh * KW + kw
    tl.store(out + i, tl.load(w + place, mask=i < total), mask=i < total)
