"""The files of a checkpoint whose weights are quantised, as it is published: decoded, or written again
with other numbers in the same storage.

Knows FP8 with scales of blocks, compressed-tensors in 4 or 8 bits and NVFP4, GPTQ, AWQ, and gpt-oss's
MXFP4. Of each weight one tensor holds the numbers; a merge keeps its scales.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from liger_kernel.ops.projections import mxfp4, packed_weights
from liger_kernel.ops.projections.float8_blocks import float8_blocks
from liger_kernel.ops.projections.weights import Weight, dense
from liger_kernel.train.mistakes import UserError

METHODS = "fp8", "compressed-tensors", "gptq", "awq", "mxfp4"
# what a key with the numbers of a weight ends with, and what a key of the weight decoded ends with
_NUMBERS = {".weight_packed": ".weight", ".qweight": ".weight", "_blocks": "", ".weight": ".weight"}
_BESIDE = (
    *(".weight_scale", ".weight_zero_point", ".weight_global_scale", ".weight_shape", ".input_global_scale"),
    *(".weight_scale_inv", ".activation_scale", ".scales", ".qzeros", ".g_idx", "_scales"),
)


def method_of(config: Any) -> str | None:
    """How the weights of this model are quantised, if it is one of ``METHODS``."""
    found = getattr(config, "quantization_config", None)
    method = found.get("quant_method") if isinstance(found, dict) else getattr(found, "quant_method", None)
    return getattr(method, "value", method) if method in METHODS else None


class StoredWeights:
    """The weights in the files of ``folder``, whose model has this ``config``. ``numbers``: what ``write``
    puts in their place, by keys."""

    def __init__(self, folder: str | Path, config: Any, device: Any = "cpu"):
        from safetensors import safe_open

        self.folder, self.method, self.device = Path(folder), method_of(config), device
        self.numbers: dict[str, Tensor] = {}
        how = getattr(config, "quantization_config", None) or {}
        self.how: dict[str, Any] = how if isinstance(how, dict) else how.to_dict()
        files = sorted(self.folder.glob("*.safetensors"))
        if not files:
            raise UserError(f"{folder} has no .safetensors files")
        self._open = {path: safe_open(path, framework="pt") for path in files}
        self._file = {key: path for path, file in self._open.items() for key in file.keys()}  # noqa: SIM118

    def _get(self, key: str) -> Tensor | None:
        return self._open[self._file[key]].get_tensor(key).to(self.device) if key in self._file else None

    def _must(self, key: str) -> Tensor:
        if (found := self._get(key)) is None:
            raise ValueError(f"{key} is missing")
        return found

    def key_of(self, name: str) -> str:
        """The key with the numbers of the weight ``name``: a layer, or a parameter of experts."""
        found = next((name + end for end in _NUMBERS if name + end in self._file), None)
        if found is None:
            raise ValueError(f"{name} is not among the weights of {self.folder}")
        return found

    def weight(self, key: str) -> Weight:
        """What is stored under a key with numbers. ``ValueError`` for a form that is not known here."""
        numbers = self._must(key)
        name = next(key.removesuffix(end) for end in _NUMBERS if key.endswith(end))
        try:
            if key.endswith("_blocks"):
                scales = self._must(f"{name}_scales")
                mxfp4.check("checkpoint", name, numbers, scales)
                return mxfp4.mxfp4_experts(numbers, scales)
            if key.endswith(".weight_packed"):
                return self._compressed(name, numbers)
            if key.endswith(".qweight"):
                return self._by_columns(name, numbers)
            scale = self._get(f"{name}.weight_scale_inv")
            if scale is not None:
                block = self.how.get("weight_block_size")
                return float8_blocks(numbers, scale, block and (block[0], block[1]))
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from error
        if numbers.itemsize == 1 or numbers.ndim != 2:
            raise ValueError(f"{name}: weights in {numbers.dtype} of {self.method} are not known here")
        return dense(numbers)

    def _compressed(self, name: str, packed: Tensor) -> Weight:
        parts = [self._get(f"{name}.weight_{part}") for part in ("scale", "zero_point", "global_scale", "g_idx")]
        scale, zero, divisor, index = parts
        if scale is None or index is not None:
            raise ValueError("its scales are missing, or its columns are reordered")
        if divisor is not None:
            return packed_weights.nvfp4_rows(packed, scale, divisor)
        N, K = self._must(f"{name}.weight_shape").tolist()
        bits = next((b for b in (4, 8) if packed.shape[1] == -(-K * b // 32)), 0)
        scale = scale.expand(N, 1).contiguous() if scale.numel() == 1 and zero is None else scale
        return packed_weights.integer_rows(packed, scale, zero, (N, K), K // max(scale.shape[1], 1), bits)

    def _by_columns(self, name: str, words: Tensor) -> Weight:
        zeros, scale = (self._must(f"{name}.{part}") for part in ("qzeros", "scales"))
        bits, group = self.how.get("bits", 4), self.how.get("group_size", 128)
        if self.method == "awq":
            if bits != 4 or str(self.how.get("version", "gemm")).lower() != "gemm":
                raise ValueError(f"AWQ of {bits} bits and version {self.how.get('version')} is not known here")
            K, N = words.shape[0], 8 * words.shape[1]
            return packed_weights.awq_columns(words, zeros, scale, (N, K), group if group > 0 else K)
        K, N = words.shape[0] * 32 // bits, words.shape[1]
        version = 2 if self.how.get("checkpoint_format") == "gptq_v2" else 1
        index = self._get(f"{name}.g_idx")
        return packed_weights.gptq_columns(words, zeros, scale, index, (N, K), group if group > 0 else K, bits, version)

    def decoded(self, dtype: torch.dtype) -> dict[str, Tensor]:
        """All tensors by the names of a model that is not quantised. ``ValueError`` as of ``weight``."""
        return dict(self._decoded(dtype))

    def _decoded(self, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
        for key in self._file:
            end = next((end for end in _NUMBERS if key.endswith(end)), None)
            if end is None and key.endswith(_BESIDE):
                continue
            quantised = end is not None and any(f"{key.removesuffix(end)}{beside}" in self._file for beside in _BESIDE)
            if not quantised or end is None:
                yield key, self._must(key)
                continue
            w = self.weight(key).dense(dtype)
            # gpt-oss's parameters of experts are (E, in, out)
            yield key.removesuffix(end) + _NUMBERS[end], w.mT.contiguous() if end == "_blocks" else w

    def write(self, folder: Path) -> None:
        """A copy of the checkpoint in ``folder``, with ``numbers``."""
        from safetensors.torch import save_file

        for path in self.folder.iterdir():
            if path.is_file() and path.suffix in (".json", ".jinja", ".py", ".txt", ".model"):
                shutil.copy(path, folder)
        for path, file in self._open.items():
            tensors = {key: self.numbers.get(key, self._must(key)).cpu() for key in file.keys()}  # noqa: SIM118
            save_file(tensors, folder / path.name, metadata=file.metadata())


def opened(name: str, config: Any, device: Any = "cpu") -> StoredWeights:
    """Of a folder, or of a model of the hub."""
    if not Path(name).is_dir():
        import huggingface_hub

        kinds = ["*.safetensors", "*.json", "*.jinja", "*.py", "*.txt", "*.model"]
        name = huggingface_hub.snapshot_download(name, allow_patterns=kinds)
    return StoredWeights(name, config, device)
