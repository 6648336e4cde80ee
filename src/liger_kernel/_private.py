"""Every name of PyTorch that this package uses and that PyTorch calls private, so that a new
release is checked in one place. Each says what breaks without it.

The oldest release that we run on, 2.11, has all of them, and so has 2.15; a name that is newer than
2.11 says since when it exists.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

# Without it, operators would launch kernels on tensors that have shapes but no data: under
# torch.compile, in export, and where the runtime estimates memory
from torch._subclasses.fake_tensor import (
    FakeTensor as FakeTensor,
    FakeTensorMode as FakeTensorMode,
    unset_fake_temporarily as unset_fake_temporarily,
)
from torch.autograd import forward_ad
from torch.optim import optimizer as _optimizers
from torch.utils import _python_dispatch, checkpoint

_C: Any = torch._C  # its stub lacks most of these names

# Who sees a call: launchers skip PyTorch's dispatcher, and functions of ours run kernels, only
# where nobody does. Without these, code that records or transforms a call would see no operator.

# How many `TorchDispatchMode`s are active
dispatch_modes = _C._len_torch_dispatch_stack
dispatch_mode_stack = _python_dispatch._get_current_dispatch_mode_stack
# How many `TorchFunctionMode`s are: a hook that leaves one behind changes what follows it
function_modes = _C._len_torch_function_stack
# The mode of a kind, or None
dispatch_mode = _C._get_dispatch_mode
FAKE_MODE = _C._TorchDispatchModeKey.FAKE
# modes of make_fx and of AOTAutograd, which record a graph
RECORDING_MODES = _C._TorchDispatchModeKey.PROXY, _C._TorchDispatchModeKey.FUNCTIONAL
# modes of graphs that are recorded above autograd (torch.export)
_pre_dispatch: Any = torch._ops.mode_stack_state_for_pre_dispatch()
# the innermost transform of torch.func, or None
transforms = _C._functorch.peek_interpreter_stack
# whether torch.jit.trace runs
_jit_traces = _C._is_tracing
# Modes of selective checkpointing, which keep what operators return: nobody may write to that. Without
# them, an operator that gives its result another shape would change a kept tensor.
KEEPING_MODES = checkpoint._CachingTorchDispatchMode, checkpoint._CachedTorchDispatchMode

# Whether a tensor comes from a transform of torch.func
_is_transformed = _C._functorch.is_functorch_wrapped_tensor


def apply_of(function: Any, args: Iterable[Any]) -> Callable[..., Any]:
    """What applies ``function`` to ``args``, where no transform of ``torch.func`` is active: its ``apply``, but
    without PyTorch's own Python, which takes 2 to 7 us, unless an argument comes from a finished transform."""
    if torch.compiler.is_compiling():
        return function.apply
    for t in args:
        if type(t) is torch.Tensor and _is_transformed(t):
            return function.apply
    return super(torch.autograd.Function, function).apply


def observed() -> bool:
    """Whether an eager call is traced, recorded, or transformed."""
    if transforms() is not None or forward_ad._current_level >= 0 or _jit_traces():
        return True
    if _pre_dispatch.get(0) is not None:
        return True
    return dispatch_modes() > 0 and any(dispatch_mode(key) is not None for key in RECORDING_MODES)


def is_exporting() -> bool:
    """Whether ``torch.export`` runs. The public ``torch.compiler.is_exporting`` is always true in the
    Dynamo of some releases."""
    return torch.compiler._is_exporting_flag


# Whether autocast is on for any device: one call instead of one for each. Without it a backward would
# run in the dtype of its caller, not of its forward.
autocast_is_on = _C._is_any_autocast_enabled
# A node that raises when a gradient is differentiated. Without it a second derivative would silently be
# zero: PyTorch's own `once_differentiable` treats gradients as constants.
DelayedError = _C._functions.DelayedError
# Whether the running backward keeps its graph for another one (`retain_graph`). Without it a backward
# could not give back memory by writing its gradients over what its forward saved.
graph_is_retained = _C._autograd._get_current_graph_task_keep_graph
# The hooks for saved tensors that are active, or None; argument: whether hooks that a tracer ignores
# count. Without it nobody knows whether another holds a tensor that a backward overwrites.
saved_tensors_hooks = _C._autograd._top_saved_tensors_default_hooks
# Whether hooks may be pushed: torch.func forbids them.
saved_tensors_hooks_are_enabled = _C._autograd._saved_tensors_hooks_is_enabled
# The number of the running backward, -1 outside
backward_id = _C._current_graph_task_id
# The node whose backward runs in this thread, or None: a forward below it is a recomputation.
backward_node = _C._current_autograd_node

# The CUDA stream of a device as a number, which launches of compiled kernels take. Without it each
# launch would make an object, `torch.cuda.current_stream()`. PyTorch without CUDA has none.
cuda_stream: Any = getattr(_C, "_cuda_getCurrentRawStream", None)
# Ends what a failed recording of a CUDA graph has begun in the allocator. Without it all that follows
# would ask that graph whose memory it is. PyTorch without CUDA has none.
end_of_allocating: Any = getattr(_C, "_cuda_endAllocateToPool", None)
# What the current stream allocates belongs to a pool of CUDA graphs until the former; and the pool is free
# when all who have begun have released it. Without them, the run before a recording needs memory of its own.
begin_allocating: Any = getattr(_C, "_cuda_beginAllocateCurrentStreamToPool", None)
release_pool: Any = getattr(_C, "_cuda_releasePool", None)
# A view without a place in the graph that still shares the version of what it is of: as PyTorch makes
# views above autograd. Without it a saved tensor that is changed in place would not be noticed.
exclude_dispatch_key = _C._SetExcludeDispatchKeyGuard
IN_PLACE_OR_VIEW = _C.DispatchKey.ADInplaceOrView
# Whether a tensor is a view of another: masks are known by the positions they were made of, which
# models expand. Without it each layer would look for documents in them again.
is_alias_of = _C._is_alias_of
# A context without `__torch_function__` of subclasses. Without it one that calls the function that it
# was called for would never end.
without_torch_function = _C.DisableTorchFunctionSubclass

# Batch invariance: products of PyTorch are replaced by others while it is on.


def has_kernel(name: str, key: str) -> bool:
    """Whether PyTorch's operator has a kernel of its own for a kind of device, "CPU" or "CUDA"."""
    return _C._dispatch_has_kernel_for_dispatch_key(f"aten::{name}", key)


def kernel_of(name: str, key: str) -> Callable[..., Any]:
    """That kernel. What is registered later does not change it."""
    kernel, keys = torch.library.get_kernel(f"aten::{name}", key), _C.DispatchKeySet(getattr(_C.DispatchKey, key))
    return lambda *args, **more: kernel.call_boxed(keys, *args, **more)


def new_workspaces() -> None:
    """Let cuBLAS read again how large its workspaces are."""
    if torch.cuda.is_initialized():
        _C._cuda_clearCublasWorkspaces()


def observes_steps(optimizer: torch.optim.Optimizer) -> bool:
    """Whether hooks of others see the steps of an optimizer: a step that is replayed calls none. Ours learn from
    the versions of weights, which a replay raises."""
    own: Any = optimizer
    of_all = _optimizers._global_optimizer_pre_hooks, _optimizers._global_optimizer_post_hooks
    hooks = [
        h for each in (*of_all, own._optimizer_step_pre_hooks, own._optimizer_step_post_hooks) for h in each.values()
    ]
    return any(not str(getattr(h, "__module__", "")).startswith("liger_kernel.") for h in hooks)
