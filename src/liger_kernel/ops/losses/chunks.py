"""The chunk loop under every loss of a linear head: logits by one GEMM into a reused buffer, whatever turns them into their gradient, and one GEMM
each for dx and dw.

Shapes: x (M, H), w (V, H), logits z (M, V). Beside the gradients nothing larger than one chunk of logits exists.

A head may have a term of low rank, thin xa (M, R) and wb (V, R):  z = x w^T + xa wb^T.  That is a head with adapters: xa = s x A^T, wb = B, those of several
side by side. Neither w + s B A nor its gradient exists then; what xa is made of gets its gradient from dxa, outside of the loop.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from liger_kernel.ops._core.operator import acc, intercepted, on_gpu, tracing
from liger_kernel.ops._core.reduce import scale_

Body = Callable[[Tensor, slice, Tensor | None], "Tensor | None"]


def rounded_sums(M: int, V: int) -> int:
    """Chunks whose sum a 16-bit dw may hold: each addition is rounded, and k equal chunks make up to sqrt((k + 1) / 2) times the error of one product.

    That is what a row of dw gets if it changes in every chunk; with many more classes than tokens most do not. H200, RMS error over that of PyTorch:
    16384 tokens, 32000 classes, 6 chunks 2.04; 8192 and 128256, 4 chunks 1.22, 8 chunks 1.26 (largest error 1.91); 8192 and 151936, 8 chunks 1.17.
    More chunks than this are summed in fp32.
    """
    return 8 if 12 * M <= V else 6 if 4 * M <= V else 5


def auto_chunk_rows(M: int, V: int, H: int, itemsize: int, on_gpu: bool, frozen: bool = False) -> int:
    """Tokens a chunk; the remainder of M makes a smaller chunk, the first one.

    GPU: at least 1024 (H200: GEMMs of 512 rows lose a third of their speed), in multiples of 512. For a 16-bit w as many as it takes to sum dw in
    ``rounded_sums`` chunks, or a quarter as many as w has columns, so that the logits take a quarter of dw's memory, unless fp32 sums and chunks of
    1024 take less; then, and for an fp32 w, an eighth of the tokens and at most 1 GiB. For a ``frozen`` w, which has no dw to sum, 1024. CPU: a buffer of
    64 MiB.
    H200, 8192 x 4096 x 128256: chunks of 1024 41.0 ms and 1.38 GB, of 1536 40.8 and 1.51, of 2048 40.9 and 1.64.
    """
    few = -(-M // rounded_sums(M, V))
    if not on_gpu:
        rows = max(64, (1 << 26) // (V * 4)) // 8 * 8
    elif frozen:
        rows = 1024
    elif itemsize < 4 and few <= 2 * H + 1024:
        rows = max(1024, -(-few // 512) * 512, min(H // 4, M // 4) // 1024 * 1024)
    else:
        rows = max(1024, min(M // 8, (1 << 30) // (V * itemsize)) // 1024 * 1024)
    return max(1, min(M, rows))


def chunks_of(M: int, step: int) -> list[slice]:
    """Rows of each chunk: the remainder first, as what is summed last is rounded least."""
    first = M % step
    return [slice(0, first)] * (first > 0) + [slice(start, start + step) for start in range(first, M, step)]


def add_mm(total: Tensor, a: Tensor, b: Tensor, first: bool) -> None:
    """total (+)= a b, accumulated in the dtype of ``total``."""
    if total.dtype == a.dtype:
        torch.mm(a, b, out=total) if first else torch.addmm(total, a, b, out=total)
    elif a.is_cuda:
        torch.mm(a, b, out_dtype=total.dtype, out=total) if first else torch.addmm(total, a, b, out_dtype=total.dtype, out=total)
    else:
        torch.mm(a.to(total.dtype), b.to(total.dtype), out=total) if first else total.addmm_(a.to(total.dtype), b.to(total.dtype))


def logits(z: Tensor, x: Tensor, w: Tensor, xa: Tensor | None, wb: Tensor | None) -> None:
    """z = x w^T + xa wb^T: the large product adds to the thin one in its epilogue."""
    if xa is not None and wb is not None:
        add_mm(z, xa, wb.t(), first=True)
    add_mm(z, x, w.t(), first=xa is None)


def chunk_gradients(
    x: Tensor,
    w: Tensor,
    body: Body,
    *,
    need: tuple[bool, ...],
    chunks: Iterable[slice] | None = None,
    chunk_rows: int | None = None,
    accum_dtype: torch.dtype | None = None,
    kept: Tensor | None = None,
    fp32_logits: bool = False,
    dw_into: Tensor | None = None,
    xa: Tensor | None = None,
    wb: Tensor | None = None,
) -> tuple[Any, ...]:
    """The loop: ``body(z, rows, dz)`` for each chunk of logits; returns dx, dw and (in fp32) dbias, empty where not ``need``ed.

    With ``xa`` and ``wb`` ``need`` says two more, and dxa and (in fp32) dwb are returned, too, None where not needed.

    ``body`` leaves the gradient of the logits in ``dz``: z itself, another buffer with ``fp32_logits``, None where no gradient is needed. Where it returns a
    0-dim tensor, the gradients of all chunks before are multiplied by that.
    ``kept`` (n,) are the rows of x that count: then the loop runs over these, ``rows`` counts among them, and other rows of dx are zero.
    Sums over all tokens that are not scaled yet overflow in fp16, so that dw is fp32 there, too. With ``dw_into`` dw is added to that.
    """
    (H, V), M = (x.shape[1], w.shape[0]), x.shape[0] if kept is None else kept.shape[0]
    need_dx, need_dw, need_db, need_dxa, need_dwb = (*need, False, False)[:5]
    dw_dtype = acc(w.dtype) if w.dtype == torch.float16 else w.dtype
    dx = (x.new_empty if kept is None else x.new_zeros)(x.shape if need_dx else 0)
    dw = w.new_empty((V, H) if need_dw and dw_into is None else 0, dtype=dw_dtype)
    db = x.new_zeros(V if need_db else 0, dtype=acc(x.dtype))
    dxa = dwb = None
    if xa is not None and wb is not None:
        dxa = (xa.new_empty if kept is None else xa.new_zeros)(xa.shape) if need_dxa else None
        dwb = wb.new_zeros(wb.shape, dtype=acc(wb.dtype)) if need_dwb else None
    thin = () if xa is None else (dxa, dwb)
    if tracing(x):
        return dx, dw, db, *thin
    step = max(1, min(M, chunk_rows or auto_chunk_rows(M, V, H, x.itemsize, on_gpu(x))))
    chunks = list(chunks_of(M, step) if chunks is None else chunks)
    step = max((c.stop - c.start for c in chunks), default=0)
    if accum_dtype is None:
        accum_dtype = dw.dtype if len(chunks) - 1 <= rounded_sums(M, V) else acc(w.dtype)
    total = dw if accum_dtype == dw.dtype or len(chunks) <= 1 else dw.new_empty(dw.shape, dtype=accum_dtype)
    if dw_into is not None:
        total = dw_into
    elif not chunks:
        total.zero_()
    buffer = x.new_empty(step, V, dtype=acc(x.dtype) if fp32_logits else x.dtype)
    grads = buffer if buffer.dtype == x.dtype else x.new_empty(step if any(need) else 0, V)
    for i, rows in enumerate(chunks):
        n = rows.stop - rows.start
        at = None if kept is None else kept[rows]
        x_c = x[rows] if at is None else x.index_select(0, at)
        xa_c = xa if xa is None else xa[rows] if at is None else xa.index_select(0, at)
        z, dz = buffer[:n], grads[:n] if any(need) else None
        logits(z, x_c, w, xa_c, wb)
        ratio = body(z, rows, dz)
        if ratio is not None and i:
            before = (t if t is None or kept is not None else t[: rows.start] for t in (dx, dxa))
            for t in (*before, total, db, dwb):
                if t is not None:
                    scale_(t, ratio)
        for d, of in ((dx if need_dx else None, w), (dxa, wb)):
            if d is not None and at is None:
                torch.mm(dz, of, out=d[rows])
            elif d is not None:
                d.index_copy_(0, at, torch.mm(dz, of))
        if need_dw:
            add_mm(total, dz.t(), x_c, first=i == 0 and dw_into is None)
        if need_db:
            db += dz.sum(0, dtype=db.dtype)
        if dwb is not None:
            add_mm(dwb, dz.t(), xa_c, first=False)
    return dx, dw if total is dw or dw_into is not None else dw.copy_(total), db, *thin


def values(options: Any) -> tuple[Any, ...]:
    """What a dataclass holds. (``dataclasses.astuple`` copies, which ``torch.compile`` traces in some releases of Python alone.)"""
    return tuple(getattr(options, name) for name in options.__dataclass_fields__)


class Kept:
    """The rows whose target counts, found on the device and counted on the host without waiting, if that was asked for early.

    ``Kept(target)`` enqueues a few small kernels and an asynchronous copy. ``rows()`` waits for that copy, which has long arrived where a model's
    forward lies between the two. target: any shape, flattened; ``group``: counts also for each so many targets in a row (a sequence).
    """

    def __init__(self, target: Tensor, ignore_index: int = -100, group: int | None = None):
        valid = target.reshape(-1) != ignore_index
        self.total = valid.shape[0]
        self._order = torch.argsort(valid.logical_not(), stable=True)
        self._event: torch.cuda.Event | None = None
        counts = valid.view(-1, group).sum(1) if group else valid.sum().view(1)
        if counts.is_cuda:
            self._counts = torch.empty(counts.shape, dtype=counts.dtype, device="cpu", pin_memory=True)
            self._counts.copy_(counts, non_blocking=True)
            self._event = torch.cuda.Event()
            self._event.record(torch.cuda.current_stream(counts.device))  # which is not the current device's where that is another
        else:
            self._counts = counts

    def counts(self) -> list[int]:
        """Rows that count, of each group; half of them where nothing is computed."""
        if intercepted():
            return [self.total // self._counts.numel() // 2] * self._counts.numel()
        if self._event is not None:
            self._event.synchronize()
            self._event = None
        return self._counts.tolist()

    def rows(self, least_gain: float = 0.02) -> Tensor | None:
        """Their numbers (n,), ascending; None where leaving the others out would save less than ``least_gain`` of the work."""
        n = sum(self.counts())
        return None if n > (1 - least_gain) * self.total else self._order[:n]
