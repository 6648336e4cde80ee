"""Which operators run, and what they make."""

from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Dispatched(TorchDispatchMode):
    """Names of the operators that run; ``largest``: the most elements of a floating-point tensor
    that one makes, views aside."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []
        self.largest = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self.names.append(func.overloadpacket.__name__)
        made = [t.numel() for t in tree_leaves(out) if isinstance(t, Tensor) and t.is_floating_point()]
        self.largest = max(self.largest, *made, 0) if not func.is_view else self.largest
        return out

    @property
    def reads(self) -> int:
        """How often the host reads a value, for which it waits on a GPU."""
        return self.names.count("_local_scalar_dense")
