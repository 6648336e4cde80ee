"""A local repository of layers for Hugging Face's ``kernels``: ``LocalLayerRepository(PATH,
layer_name="LigerRMSNorm")``.

``kernels`` loads this folder by its path; the layers are those of the installed package.
"""

from pathlib import Path

from liger_kernel.hub import layers as layers

PATH = Path(__file__).parent
