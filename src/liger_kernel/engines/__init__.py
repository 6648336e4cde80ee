"""Our kernels in inference engines, so that sampler and trainer compute alike."""
