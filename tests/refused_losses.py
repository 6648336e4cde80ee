"""Calls that the losses must refuse: for each operator, the arguments of a call, and changes of these
with the text of the ``ValueError``, which begins with the operator's name."""

from __future__ import annotations

import torch

from liger_kernel.ops._core.operator import T
from liger_kernel.ops.losses.logprob_tiles import OUTPUTS


def integers(*shape: int) -> T:
    return T(shape, dtype=torch.int64)


_TOP_K = dict(topk_log_probs=T((4, 2), grad=False), topk_indices=integers(4, 2), kind="forward_kl")

REFUSED = {
    "cross_entropy": (
        dict(logits=T((3, 5)), target=integers(3)),
        (
            dict(target=T((3, 5))),
            "target must hold class indices, got torch.float32 (class probabilities are not supported)",
        ),
        (dict(target=integers(4)), "target must have shape (3,), got (4,)"),
        (dict(class_weight=T((4,))), "class_weight must have shape (5,), got (4,)"),
        (dict(reduction="avg"), "reduction must be one of ('mean', 'sum', 'none'), got 'avg'"),
        (dict(logits=integers(3, 5)), "logits must be floating point, got torch.int64"),
        (dict(logits=T((3, 5, 2))), "logits must have shape (M, V), got (3, 5, 2)"),
    ),
    "fused_ce_tvd": (
        dict(student=T((3, 5)), teacher=T((3, 5), grad=False), target=integers(3)),
        (
            dict(student=T((2, 3, 5)), teacher=T((2, 3, 5), grad=False), target=integers(6)),
            "student must have shape (M, V), got (2, 3, 5)",
        ),
        (dict(teacher=T((3, 6), grad=False)), "teacher must have shape (3, 5), got (3, 6)"),
        (dict(target=integers(4)), "target must have shape (3,), got (4,)"),
        (dict(teacher=integers(3, 5)), "student and teacher must be floating point, got torch.float32 and torch.int64"),
    ),
    "linear_cross_entropy": (
        dict(x=T((4, 8)), w=T((10, 8)), target=integers(4)),
        (dict(x=integers(4, 8)), "x and w must be floating point, got torch.int64 and torch.float32"),
        (dict(w=T((10, 6))), "w must have shape (V, 8), got (10, 6)"),
        (dict(bias=T((4,))), "bias must have shape (10,), got (4,)"),
        (dict(target=integers(5)), "target must have shape (4,), got (5,)"),
        (dict(xa=T((4, 2))), "xa and wb must have shapes (4, R) and (10, R), got (4, 2) and None"),
        (dict(xa=T((4, 2)), wb=T((10, 3))), "xa and wb must have shapes (4, R) and (10, R), got (4, 2) and (10, 3)"),
        (dict(x=T((2, 4, 8)), target=integers(8)), "x must have shape (M, H), got (2, 4, 8)"),
        (
            dict(x=T((4, 16)), w=T((10, 16)), fp8="blockwise"),
            "fp8 must be None or one of ('tensorwise', 'rowwise'), got 'blockwise'",
        ),
        (
            dict(x=T((4, 16)), w=T((10, 16)), fp8="rowwise", fp32_logits=True),
            "fp32_logits must be False with fp8, got True",
        ),
        (
            dict(x=T((4, 16)), w=T((10, 16)), fp8="rowwise", xa=T((4, 2)), wb=T((10, 2))),
            "xa must be None with fp8, got a tensor",
        ),
    ),
    "linear_divergence": (
        dict(x=T((4, 8)), w=T((10, 8))),
        (dict(w=T((10, 6))), "w must have shape (V, 8), got (10, 6)"),
        (
            dict(teacher_x=T((4, 8), grad=False)),
            "the teacher must be teacher_x and teacher_w, or teacher_logits, or teacher_probs, or "
            "topk_log_probs and topk_indices, got teacher_x",
        ),
        (
            dict(teacher_logits=T((4, 10), grad=False), teacher_bias=T((10,))),
            "teacher_bias must be None without teacher_w, got (10,)",
        ),
        (
            dict(teacher_x=T((4, 6), grad=False), teacher_w=T((11, 6), grad=False)),
            "teacher_w must have shape (10, 6), got (11, 6)",
        ),
        (
            dict(teacher_x=T((4, 6)), teacher_w=T((10, 6), grad=False)),
            "teacher_x must not require a gradient (there is none for the teacher: detach it), got one that does",
        ),
        (
            dict(teacher_x=T((4, 6), grad=False), teacher_w=T((10, 6), grad=False), weight_hard=0.5),
            "target must be given for a hard loss, got None",
        ),
        (
            dict(teacher_x=T((4, 6), grad=False), teacher_w=T((10, 6), grad=False), kind="kl"),
            "kind must be one of ('jsd', 'forward_kl', 'reverse_kl', 'tvd', 'cosine'), got 'kl'",
        ),
        (
            dict(topk_log_probs=T((4, 2), grad=False), topk_indices=integers(4, 2)),
            "kind must be 'forward_kl' for a top-k teacher, got 'jsd'",
        ),
        (
            dict(teacher_probs=T((4, 10), grad=False)),
            "kind must be 'forward_kl' for a teacher's probabilities, got 'jsd'",
        ),
        (dict(teacher_probs=T((4, 10), grad=False), kind="forward_kl", eps=-1.0), "eps must not be negative, got -1.0"),
        (
            dict(teacher_x=T((4, 6), grad=False), teacher_w=T((10, 6), grad=False), beta=2.0),
            "beta must be between 0 and 1, got 2.0",
        ),
        (
            dict(teacher_x=T((4, 6), grad=False), teacher_w=T((10, 6), grad=False), temperature=0.0),
            "temperature must be positive, got 0.0",
        ),
        (dict(teacher_logits=T((4, 10), grad=False), softcap=0.0), "softcap must be positive or None, got 0.0"),
        (
            dict(teacher_logits=T((4, 10), grad=False), kind="cosine", entropy=True),
            "entropy must be False for kind 'cosine', got True",
        ),
        (_TOP_K | dict(entropy=True), "entropy must be False for a top-k teacher, got True"),
        (_TOP_K | dict(logit_scale=0.5), "logit_scale must be 1.0 for a top-k teacher, got 0.5"),
        (
            dict(teacher_probs=T((4, 10), grad=False), kind="forward_kl", teacher_softcap=2.0),
            "teacher_softcap must be None for a teacher's probabilities, got 2.0",
        ),
        (
            dict(teacher_x=T((4, 6), grad=False), teacher_w=T((10, 6), grad=False), target=integers(5)),
            "target must have shape (4,), got (5,)",
        ),
    ),
    "logit_divergence": (
        dict(student=T((3, 5)), teacher=T((3, 5))),
        (dict(teacher=T((3, 4))), "teacher must have shape (3, 5), got (3, 4)"),
        (dict(kind="kl"), "kind must be one of ('jsd', 'forward_kl', 'reverse_kl', 'tvd'), got 'kl'"),
        (dict(beta=-0.5), "beta must be between 0 and 1, got -0.5"),
        (dict(temperature=0.0), "temperature must be positive, got 0.0"),
    ),
    "jsd": (
        dict(log_q=T((3, 5)), log_p=T((3, 5))),
        (dict(log_p=T((3, 4))), "log_p must have shape (3, 5), got (3, 4)"),
        (dict(shift_labels=integers(4)), "shift_labels must have shape (3,), got (4,)"),
        (dict(shift_labels=T((3,))), "shift_labels must hold integers, got torch.float32"),
        (dict(beta=1.5), "beta must be between 0 and 1, got 1.5"),
        (dict(reduction="mean"), "reduction must be one of ('none', 'sum', 'batchmean'), got 'mean'"),
    ),
    "kl_div": (
        dict(input=T((3, 5)), target=T((3, 5))),
        (dict(target=T((5,))), "target must have shape (3, 5), got (5,)"),
        (dict(target=integers(3, 5)), "input and target must be floating point, got torch.float32 and torch.int64"),
        (dict(reduction="avg"), "reduction must be one of ('none', 'sum', 'mean', 'batchmean'), got 'avg'"),
        (dict(eps=-1.0), "eps must not be negative, got -1.0"),
    ),
    "tvd": (
        dict(p=T((3, 5)), q=T((3, 4))),
        (dict(), "q must have shape (3, 5), got (3, 4)"),
        (dict(q=T((3, 5)), shift_labels=integers(4)), "shift_labels must have shape (3,), got (4,)"),
    ),
    "linear_logprobs": (
        dict(x=T((4, 8)), w=T((10, 6)), target=integers(4)),
        (dict(), "w must have shape (V, 8), got (10, 6)"),
        (dict(w=T((10, 8)), temperature=0.0), "temperature must be positive, got 0.0"),
        (
            dict(w=T((10, 8)), temperature=T((3,), grad=False)),
            "temperature must be a number or of shape (4,), got (3,)",
        ),
        (dict(w=T((10, 8)), temperature=T((4,))), "temperature must need no gradient, got one that does"),
        (
            dict(w=T((10, 8)), keep_ids=T((6,), grad=False), keep_offsets=integers(5)),
            "keep_ids must be integers of one dim, got torch.float32 (6,)",
        ),
        (dict(w=T((10, 8)), outputs=("perplexity",)), f"outputs must be some of {OUTPUTS}, got 'perplexity'"),
        (dict(w=T((10, 8)), vocab_size=11), "vocab_size must be in [1, 10], got 11"),
        (dict(w=T((10, 8)), target=integers(5)), "target must have shape (4,) or (4, K), got (5,)"),
        (
            dict(w=T((10, 8)), keep_ids=integers(6)),
            "keep_ids and keep_offsets must have n and 5 numbers, got 6 and None",
        ),
        (
            dict(w=T((10, 8)), fp8="rowwise", outputs=("lse",)),
            "with fp8, only one target and the outputs 'entropy', 'mean_logit' and 'top1' are possible, "
            "got 1 targets and ('lse',)",
        ),
    ),
    "expert_load": (
        dict(logits=T((4, 8)), index=integers(4, 2)),
        (dict(logits=T((1, 4, 8))), "logits must have shape (M, E), got (1, 4, 8)"),
        (dict(index=T((4, 2))), "index must be integers of shape (4, K), got torch.float32 (4, 2)"),
        (dict(weight=T((5,), grad=False)), "weight must have shape (4,), got (5,)"),
        (dict(logits=integers(4, 8)), "logits must be floating point, got torch.int64"),
    ),
    "vocab_parallel_cross_entropy": (
        dict(logits=T((3, 5)), target=integers(3)),
        (dict(target=integers(4)), "target must have shape (3,), got (4,)"),
        (dict(logits=integers(3, 5)), "logits must be floating point, got torch.int64"),
        (dict(formula="torch"), "formula must be one of ('pytorch', 'megatron'), got 'torch'"),
        (dict(mode="local"), "mode must be one of ('global', 'partition'), got 'local'"),
        (dict(sizes=(5, 5)), "sizes must be the classes of 1 ranks, 5 of rank 0, got (5, 5)"),
        (dict(logits=T((3, 0))), "every rank must have a class, got none"),
        (
            dict(logits=T((3, 1)), formula="megatron", label_smoothing=0.1),
            "formula 'megatron' must smooth over two classes or more, got one",
        ),
    ),
    "vocab_parallel_linear_cross_entropy": (
        dict(x=T((4, 8)), w=T((10, 8)), target=integers(4)),
        (dict(x=integers(4, 8)), "x and w must be floating point, got torch.int64 and torch.float32"),
        (dict(w=T((10, 6))), "w must have shape (N, 8), got (10, 6)"),
        (dict(bias=T((4,))), "bias must have shape (10,), got (4,)"),
        (dict(target=integers(5)), "target must have shape (4,), got (5,)"),
        (dict(x=T((2, 4, 8)), target=integers(8)), "x must have shape (M, H), got (2, 4, 8)"),
        (dict(entropy=True), "reduction must be 'none' with entropy, got 'mean'"),
        (dict(chunk_rows=0), "chunk_rows must be positive, got 0"),
    ),
}
