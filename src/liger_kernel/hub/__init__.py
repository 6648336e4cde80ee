"""Our layers for Hugging Face's ``kernels``, and for Transformers' own ways to choose kernels:

    AutoModelForCausalLM.from_pretrained(name, kernel_config=liger_kernel.hub.kernel_config("llama"))
    AutoModelForCausalLM.from_pretrained(name, experts_implementation="liger")

``kernels`` loads this folder by its path, as ``LocalLayerRepository(PATH,
layer_name="LigerRMSNorm")``, or in the place of a repository, with the environment variable
``LOCAL_KERNELS=kernels-community/liger-kernels=PATH``; the layers are those of the installed package.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from liger_kernel.hub import layers, registered_experts
from liger_kernel.hub.layouts import classes_of
from liger_kernel.nearest import did_you_mean

if TYPE_CHECKING:
    from liger_kernel.hub.layout_config import LigerKernelConfig

__all__ = ["PATH", "kernel_config", "layers"]

PATH = Path(__file__).parent
registered_experts.register()


def kernel_config(model_type: str) -> LigerKernelConfig:
    """A ``transformers.KernelConfig`` with which ``from_pretrained`` builds a model of this type
    with our norms, MLPs and experts; rotations follow where Transformers marks them.

    Each is a subclass of the stock class with the same parameters, so that checkpoints load and are
    saved unchanged. One configuration is for one model. Raises ``ValueError`` for a Transformers
    that cannot build a model so (5.17 and later can), and for a type of which we have nothing.
    """
    try:
        from liger_kernel.hub.layout_config import LigerKernelConfig
    except ImportError:
        import transformers

        raise ValueError(
            f"kernel_config: transformers must be 5.17 or later, which builds models by layouts, got "
            f"{transformers.__version__}"
        ) from None
    names = classes_of(model_type)
    if not names:
        from liger_kernel.transformers.recognise.families import FAMILIES

        near = did_you_mean(model_type, FAMILIES)
        raise ValueError(
            f"kernel_config: model_type must be one of which we have layers, such as 'llama', got {model_type!r}{near}"
        )
    return LigerKernelConfig(PATH, names)
