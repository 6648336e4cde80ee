"""The chunk loop of every loss of a linear head. For each chunk of tokens: one GEMM computes logits
into a reused buffer, the loss replaces them by their gradient, and one GEMM each computes dx and
dw.

Shapes: x (M, H), w (V, H), logits z (M, V). Apart from the gradients, nothing larger than one chunk
of logits is stored.

A head may have a term of low rank, thin xa (M, R) and wb (V, R):  z = x w^T + xa wb^T.  That is a
head with adapters: xa = s x A^T, wb = B, with several adapters side by side. Neither w + s B A nor
its gradient is stored. x and A get their gradients from dxa, outside the loop.
"""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

from liger_kernel.ops._core import acc
from liger_kernel.ops._core.invariance import over_tokens
from liger_kernel.ops._core.operator import counted, intercepted, on_gpu, tracing, unlike
from liger_kernel.ops._core.products import add_mm
from liger_kernel.ops._core.reduce import scale_


def rounded_sums(M: int, V: int) -> int:
    """The most chunks that are summed in a 16-bit dw. Each addition is rounded: k equal chunks have
    up to sqrt((k + 1) / 2) times the error of one product.

    A row of dw has this error if it changes in every chunk; with many more classes than tokens,
    most rows do not. RMS error relative to PyTorch's on an H200: 16384 tokens, 32000 classes, 6
    chunks 2.04; 8192 and 128256, 4 chunks 1.22, 8 chunks 1.26 (largest error 1.91); 8192 and
    151936, 8 chunks 1.17.
    More chunks than this are summed in fp32.
    """
    return 8 if 12 * M <= V else 6 if 4 * M <= V else 5


def auto_chunk_rows(
    M: int, V: int, H: int, itemsize: int, on_gpu: bool, frozen: bool = False, low: bool = False
) -> int:
    """Tokens per chunk. The remainder of M is a smaller chunk, which comes first.

    GPU: at least 1024 (H200: GEMMs of 512 rows lose a third of their speed), in multiples of 512.
    For a 16-bit w, as many tokens as are needed to sum dw in ``rounded_sums`` chunks, or half
    of the number of w's columns, so that the logits take half of dw's memory (not if ``low``), unless
    fp32 sums with chunks of 1024 take less. In that case, and for an fp32 w: an eighth of the tokens and at
    most 1 GiB. For a ``frozen`` w, which has no dw: 1024. CPU: a buffer
    of 64 MiB.
    H200, 8192 x 4096 x 128256: chunks of 1024 41.0 ms and 1.38 GB, of 1536 40.8 and 1.51, of 2048
    40.9 and 1.64.
    """
    few = -(-M // rounded_sums(M, V))
    if not on_gpu:
        rows = max(64, (1 << 26) // (V * 4)) // 8 * 8
    elif frozen:
        rows = 1024
    elif itemsize < 4 and few <= 2 * H + 1024:
        rows = max(1024, -(-few // 512) * 512, 0 if low else min(H // 2, M // 4) // 1024 * 1024)
    else:
        rows = max(1024, min(M // 8, (1 << 30) // (V * itemsize)) // 1024 * 1024)
    return max(1, min(M, rows))


def chunks_of(M: int, step: int) -> list[slice]:
    """The rows of each chunk. The remainder comes first, because the last summand is rounded
    least often."""
    first = M % step
    return [slice(0, first)] * (first > 0) + [slice(start, start + step) for start in range(first, M, step)]


def dtype_of_dw(w: Tensor) -> torch.dtype:
    """In fp16, sums over all tokens that are not scaled yet overflow: dw is in fp32 then."""
    return acc(w.dtype) if w.dtype == torch.float16 else w.dtype


def only_hidden(need: tuple[bool, ...]) -> bool:
    """Whether only hidden states (x, xa) need a gradient: the head is frozen. A token's gradient
    then depends on the loss by one factor, so that the one for an upstream gradient of 1 can be
    computed beside its logits, which spares the backward to compute these again."""
    need_dx, need_dw, need_db, need_dxa, need_dwb = (*need, False, False)[:5]
    return (need_dx or need_dxa) and not (need_dw or need_db or need_dwb)


def regathered(*weights: Tensor | None) -> contextlib.AbstractContextManager[Any]:
    """Meanwhile these are whole, also those that DeepSpeed's ZeRO-3 has divided since the forward."""
    # one that is whole is in use elsewhere, as a tied embedding is: it must not be divided here
    parts = {id(t): t for t in weights if t is not None and hasattr(t, "ds_id") and not t.numel()}
    if not parts:
        return contextlib.nullcontext()
    import deepspeed

    return deepspeed.zero.GatheredParameters(list(parts.values()))


def logits(z: Tensor, x: Tensor, w: Tensor, xa: Tensor | None, wb: Tensor | None) -> None:
    """z = x w^T + xa wb^T: the large product adds to the thin one in its epilogue."""
    if xa is not None and wb is not None:
        add_mm(z, xa, wb.t(), first=True)
    add_mm(z, x, w.t(), first=xa is None)


def _of(t: Tensor | None, rows: slice, at: Tensor | None) -> Any:
    """A chunk's rows of ``t``, or those ``at`` these positions."""
    return t if t is None else t[rows] if at is None else t.index_select(0, at)


class HeadLoop:
    """The loop over chunks of a head's logits, and the gradients that it adds up:

        loop = HeadLoop(x, w, need=(True, True, False))
        for z, rows, dz in loop:
            ...  # read z (n, V), the logits of these rows of x, and write their gradient to dz
        dx, dw, db, dxa, dwb = loop.gradients()

    ``need``: which gradients of x, w, bias (and xa, wb) are needed; without any, dz is None. dz is z
    itself, but another buffer with ``fp32_logits``.
    ``kept`` (n,): the rows of x that count. The loop then runs over these, ``rows`` are positions
    among them, and the other rows of dx are zero.
    With ``dw_into``, dw is added to that tensor. ``chunks``: a plan instead of equal chunks.
    ``single``: who calls has all logits, and adds the products of their gradient as one chunk (by
    ``add``), so that nothing is summed and gradients keep their dtype.
    A launcher's fake kernel makes the same calls: then the loop has no chunks, and the results only
    shapes.
    """

    def __init__(
        self, x: Tensor, w: Tensor, need: tuple[bool, ...], *, chunks: Iterable[slice] | None = None,
        chunk_rows: int | None = None, accum_dtype: torch.dtype | None = None, kept: Tensor | None = None,
        fp32_logits: bool = False, dw_into: Tensor | None = None, xa: Tensor | None = None, wb: Tensor | None = None,
        single: bool = False,
    ):  # fmt: skip
        self.x, self.w, self.xa, self.wb, self.kept, self.fp32_logits = x, w, xa, wb, kept, fp32_logits
        # a head without a term of low rank has three gradients
        self.need = need_dx, need_dw, need_db, need_dxa, need_dwb = (*need, False, False)[:5]
        of_rows = lambda t, needed: (t.new_empty if kept is None else t.new_zeros)(t.shape if needed else 0)
        (V, H), M = w.shape, x.shape[0] if kept is None else kept.shape[0]
        self.dx, self.dxa = of_rows(x, need_dx), of_rows(xa, True) if need_dxa and xa is not None else None
        of_dw = w.dtype if single else dtype_of_dw(w)
        self.dw = w.new_empty((V, H) if need_dw and dw_into is None else 0, dtype=of_dw)
        # a bias is small: its gradient is always summed in fp32
        self.db = x.new_zeros(V if need_db else 0, dtype=acc(x.dtype))
        self.dwb = None
        if need_dwb and wb is not None:
            self.dwb = wb.new_zeros(wb.shape, dtype=wb.dtype if single else acc(wb.dtype))
        # where dw is summed
        self.total = self.dw if dw_into is None else dw_into
        self.chunks: list[slice] = []
        self._first = dw_into is None
        self._before = 0  # rows of earlier chunks
        if single or tracing(x):
            return
        if chunks is None:
            step = max(1, min(M, chunk_rows or auto_chunk_rows(M, V, H, x.itemsize, on_gpu(x))))
            chunks = chunks_of(M, step)
        self.chunks = list(chunks)
        count = len(self.chunks)
        if accum_dtype is None:
            accum_dtype = self.dw.dtype if count - 1 <= rounded_sums(M, V) else acc(w.dtype)
        # a single chunk is one product, which rounds once in any dtype
        if dw_into is None and accum_dtype != self.dw.dtype and count > 1:
            self.total = self.dw.new_empty(self.dw.shape, dtype=accum_dtype)
        # no chunk would write dw if all tokens are ignored
        if dw_into is None and not count:
            self.total.zero_()

    def __iter__(self) -> Iterator[tuple[Tensor, slice, Tensor | None]]:
        x, w, V, kept, some = self.x, self.w, self.w.shape[0], self.kept, any(self.need)
        # the buffer must hold the largest chunk of a given plan, too
        step = max((c.stop - c.start for c in self.chunks), default=0)
        buffer = x.new_empty(step, V, dtype=acc(x.dtype) if self.fp32_logits else x.dtype)
        # the gradient may take the place of the logits, unless these are wider than the operands of
        # the products that read it
        grads = buffer if buffer.dtype == x.dtype else x.new_empty(step if some else 0, V)
        for rows in unlike(self.chunks):
            n, at = rows.stop - rows.start, None if kept is None else kept[rows]
            # a view costs the host some microseconds: none where the chunk is the whole
            x_c, xa_c = (x, self.xa) if at is None and n == len(x) else (_of(x, rows, at), _of(self.xa, rows, at))
            z, dz = (buffer, grads) if n == step else (buffer[:n], grads[:n])
            logits(z, x_c, w, xa_c, self.wb)
            yield z, rows, dz if some else None
            # z is spent now, and dz is what the products read
            if some:
                self.add(rows, dz, x_c, xa_c, at)

    def add(
        self, rows: slice, dz: Tensor, x_c: Tensor, xa_c: Tensor | None = None, at: Tensor | None = None,
        dx: bool = True,
    ) -> None:  # fmt: skip
        """Add the products of a chunk's dz to the gradients: x_c and xa_c are its rows of x and xa,
        which are ``rows``, or those ``at`` these positions. A loop of one's own calls it, too;
        ``dx=False`` leaves out that of x."""
        need_dx, need_dw, need_db, *_ = self.need
        # dx and dxa are products of the same gradient with w and with wb
        for d, of in ((self.dx if need_dx and dx else None, self.w), (self.dxa, self.wb)):
            if d is not None and at is None:
                torch.mm(dz, of, out=d if len(dz) == len(d) else d[rows])
            elif d is not None:
                d.index_copy_(0, at, torch.mm(dz, of))
        with over_tokens():
            if need_dw:
                add_mm(self.total, dz.t(), x_c, first=self._first)
            if self.dwb is not None:
                add_mm(self.dwb, dz.t(), xa_c, first=False)
        if need_db:
            self.db += dz.sum(0, dtype=self.db.dtype)
        self._first, self._before = False, rows.stop

    def scale(self, ratio: Tensor) -> None:
        """Multiply the gradients of all earlier chunks by a 0-dim tensor."""
        before = (t if t is None or self.kept is not None else t[: self._before] for t in (self.dx, self.dxa))
        for t in (*before, self.total, self.db, self.dwb):
            if t is not None:
                scale_(t, ratio)

    def gradients(self) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None]:
        """dx, dw and (in fp32) dbias, empty where they are not needed, dxa and (in fp32) dwb, or
        None. After the last chunk."""
        if self.total.shape == self.dw.shape and self.total is not self.dw:
            self.dw.copy_(self.total)
        return self.dx, self.dw, self.db, self.dxa, self.dwb


# how many targets count at most, where the host must not wait for their number
_most: contextvars.ContextVar[int | None] = contextvars.ContextVar("most", default=None)


@contextlib.contextmanager
def counting_at_most(n: int) -> Iterator[None]:
    """Meanwhile at most ``n`` targets of a call count, and ``Kept`` has so many rows: some that do not
    count among them. Nothing waits for their number, as CUDA graphs need it."""
    token = _most.set(n)
    try:
        yield
    finally:
        _most.reset(token)


def is_bounded() -> bool:
    """Whether ``counting_at_most`` says how many targets count."""
    return _most.get() is not None


class Kept:
    """The rows with targets that count. The device finds them, and the host need not wait for their
    number if this object was created early.

    ``Kept(target)`` enqueues a few small kernels and an asynchronous copy. ``rows()`` waits for
    that copy, which has finished long before if a model's forward ran in between. target: any
    shape, flattened. ``group``: also count the rows of every ``group`` consecutive targets (a
    sequence).
    """

    def __init__(self, target: Tensor, ignore_index: int = -100, group: int | None = None):
        valid = target.reshape(-1) != ignore_index
        self.total, self.most = valid.shape[0], None if group else _most.get()
        # stable: the rows that count come first, in their own order. The host takes as many as were
        # counted, and needs no ``nonzero``, which would wait
        self._order = torch.argsort(valid.logical_not(), stable=True)
        self._event: torch.cuda.Event | None = None
        if self.most is not None:
            return
        counts = valid.view(-1, group).sum(1) if group else valid.sum().view(1)
        # pinned, or the copy would not be asynchronous
        if counts.is_cuda:
            self._counts = torch.empty(counts.shape, dtype=counts.dtype, device="cpu", pin_memory=True)
            self._counts.copy_(counts, non_blocking=True)
            self._event = torch.cuda.Event()
            # the stream of their device, which need not be the current one
            self._event.record(torch.cuda.current_stream(counts.device))
        else:
            self._counts = counts

    def counts(self) -> list[int]:
        """The number of rows that count in each group, which is given if only shapes are
        computed."""
        if intercepted():
            return [counted(self.total // self._counts.numel())] * self._counts.numel()
        if self._event is not None:
            self._event.synchronize()
            self._event = None
        return self._counts.tolist()

    def rows(self, least_gain: float = 0.02) -> Tensor | None:
        """The indices of the rows that count (n,), ascending; None if omitting the other rows
        would save less than ``least_gain`` of the work."""
        n = sum(self.counts()) if self.most is None else self.most
        # a gather of x and a scatter of dx cost more than a few percent of the products
        return None if n > (1 - least_gain) * self.total else self._order[:n]
