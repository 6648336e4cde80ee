"""Our kernels in vLLM, so that the sampler rounds where the training forward does.

``register`` is an entry point of ``vllm.general_plugins``: vLLM calls it in each of its processes,
before it makes a model. It does nothing unless ``LIGER_VLLM`` says so: ``1`` is all of ``PARTS``,
else some of them, with commas between.

    norms     RMSNorm, also behind a residual (its sum is rounded first, as in Transformers), and
              Gemma's
    glu       SiluAndMul and GeluAndMul
    rope      RotaryEmbedding and the classes that only change its table; of models that vLLM runs
              as Transformers' (``model_impl="transformers"``) their own function
    logprobs  log-probabilities by the kernel of ``linear_logprobs``

Methods of the classes are replaced, not classes by name (``CustomOp.register_oot``): vLLM's
subclasses, such as the norms of Transformers' models, have other names and the same methods.
Under ``torch.compile`` vLLM's graph has the formulas of our kernels and not the kernels.
"""

from __future__ import annotations

import functools
import importlib
import importlib.metadata
import inspect
import os
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from liger_kernel.ops import fused_add_rms_norm, glu, rms_norm, rope
from liger_kernel.ops._core.operator import acc
from liger_kernel.ops.losses.logprob_tiles import Found, Numbers, tile
from liger_kernel.train.mistakes import one_of

LAYERS = "vllm.model_executor.layers"


def register() -> None:
    """Replace what ``LIGER_VLLM`` names. ``ValueError`` for an unknown part, ``ImportError`` where
    vLLM has other methods than those that we know."""
    wanted = os.environ.get("LIGER_VLLM", "0")
    names = list(PARTS) if wanted == "1" else [] if wanted in ("", "0") else wanted.split(",")
    for name in [one_of("part of LIGER_VLLM", name.strip(), PARTS) for name in names]:
        PARTS[name]()


def _replace(module: str, owner: str, name: str, parameters: str, make: Callable[[Any], Any]) -> None:
    """Put ``make(stock)`` in the place of a function: a method of class ``owner``, or without one of
    the module. vLLM may call a plugin twice; the second time nothing changes."""
    place: Any = importlib.import_module(module)
    place = getattr(place, owner, None) if owner else place
    stock: Any = getattr(place, name, None)
    found = None if stock is None else " ".join(inspect.signature(stock).parameters)
    if found != parameters:
        version = importlib.metadata.version("vllm")
        where = ".".join(filter(None, [module, owner, name]))
        raise ImportError(f"vLLM {version}: {where} must have the parameters ({parameters}), got ({found})")
    if not hasattr(stock, "_liger"):
        ours = functools.wraps(stock)(make(stock))
        ours._liger = True  # type: ignore[attr-defined]  # functions have attributes
        setattr(place, name, staticmethod(ours) if isinstance(vars(place).get(name), staticmethod) else ours)


def _methods(module: str, owner: str, parameters: str, make: Callable[[Any], Any]) -> None:
    """Replace the two methods between which vLLM chooses: by its settings, and by the platform."""
    for name in ("forward_native", "forward_cuda"):
        _replace(f"{LAYERS}.{module}", owner, name, parameters, make)


# -- layers


def _norms() -> None:
    def of_llama(stock: Any) -> Any:
        def forward(self: Any, x: Tensor, residual: Tensor | None = None) -> Any:
            # statistics of a part of the columns
            if self.variance_size_override is not None:
                return stock(self, x, residual)
            weighted = self.pass_weight if residual is None else self.pass_weight_add
            return _norm(x, residual, self.weight.data if weighted else None, eps=self.variance_epsilon)

        return forward

    def of_gemma(stock: Any) -> Any:
        def forward(self: Any, x: Tensor, residual: Tensor | None = None) -> Any:
            how = dict(eps=self.variance_epsilon, offset=1.0, casting="gemma")
            return _norm(x, residual, self.weight.data, **how)

        return forward

    _methods("layernorm", "RMSNorm", "self x residual", of_llama)
    _methods("layernorm", "GemmaRMSNorm", "self x residual", of_gemma)


def _norm(x: Tensor, residual: Tensor | None, w: Tensor | None, **how: Any) -> Any:
    return rms_norm(x, w, **how) if residual is None else fused_add_rms_norm(x, residual, w, **how)


def _glu() -> None:
    module = f"{LAYERS}.activation"
    _replace(module, "SiluAndMul", "forward_native", "x", lambda stock: lambda x: glu(x))
    _replace(module, "SiluAndMul", "forward_cuda", "self x", lambda stock: lambda self, x: glu(x))
    acts = {"none": "gelu", "tanh": "gelu_tanh"}
    _methods("activation", "GeluAndMul", "self x", lambda stock: lambda self, x: glu(x, act=acts[self.approximate]))


def _rope() -> None:
    def turned(stock: Any) -> Any:
        def forward(self: Any, positions: Tensor, query: Tensor, key: Tensor | None = None) -> Any:
            # one table for all heads, one position a token
            if key is None or positions.ndim > 1 or self.cos_sin_cache.ndim != 2:
                return stock(self, positions, query, key)
            cos, sin = self._match_cos_sin_cache_dtype(query).chunk(2, dim=-1)
            q, k = (t.view(1, len(positions), -1, self.head_size) for t in (query, key))
            # each product is rounded, as in Transformers
            how: Any = dict(layout="halves" if self.is_neox_style else "pairs", unsqueeze_dim=2, casting="none")
            for t, new in zip((query, key), rope(q, k, cos, sin, positions[None], **how)):
                t.copy_(new.view(t.shape))  # vLLM's kernel writes in place, and some models rely on it
            return query, key

        return forward

    _methods("rotary_embedding.base", "RotaryEmbedding", "self positions query key", turned)
    _replace("vllm.model_executor.models.transformers.base", "Base", "_create_model", "self", _of_transformers)


def _of_transformers(stock: Any) -> Any:
    def create(self: Any) -> Any:
        from liger_kernel.transformers import _apply_liger_kernel
        from liger_kernel.transformers.recognise.families import flags_of

        kind = self.config.get_text_config().model_type
        if "rope" in (known := flags_of(kind)):
            # only the function: vLLM looks for stock norms and MLPs, and puts its own there
            others = {name: False for name, default in known.items() if default is True}
            _apply_liger_kernel(kind, **others | {"rope": True})
        return stock(self)

    return create


# -- log-probabilities


def _fold(logits: Tensor, ids: Tensor) -> Found:
    numbers = Numbers(logits.shape[1], 0, "", -100, 1.0, None, *(False,) * 5)
    found = Found.empty(ids, numbers, acc(logits.dtype))
    tile(logits, ids, numbers, found, 0, first=True, finish=True)
    return found


def token_logprobs(logits: Tensor, token_ids: Tensor) -> Tensor:
    """logits (M, V), token_ids (M, K) -> fp32 (M, K), with the bits of ``linear_logprobs`` for the
    same logits in one tile, as a batch-invariant head has them."""
    return _fold(logits.contiguous(), token_ids.long().contiguous()).logp


def all_logprobs(logits: Tensor) -> Tensor:
    """(M, V) -> fp32 (M, V): those of ``token_logprobs``, of all tokens."""
    logits = logits.contiguous()
    m, log_s = _fold(logits, torch.zeros_like(logits[:, :1], dtype=torch.int64)).state[:2]
    return ((logits.float() - m[:, None]) - log_s[:, None]).clamp(max=0)


def _logprobs() -> None:
    _replace("vllm.v1.sample.sampler", "Sampler", "compute_logprobs", "logits", lambda stock: all_logprobs)
    for module in ("logprob", "prompt_logprob"):
        place = f"vllm.v1.worker.gpu.sample.{module}"
        _replace(place, "", "compute_token_logprobs", "logits token_ids", lambda stock: token_logprobs)


PARTS: dict[str, Callable[[], None]] = {"norms": _norms, "glu": _glu, "rope": _rope, "logprobs": _logprobs}
