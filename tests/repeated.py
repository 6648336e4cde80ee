"""In place of CUDA graphs where there is no GPU: a replay calls the function again."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


class Repeated:
    """What ``graphs.recorder.CudaGraphs`` offers, of functions on the host."""

    def free(self) -> None:
        """Nothing is recorded in memory of its own."""

    def clock(self) -> Any:
        raise NotImplementedError("there is no GPU that waits for a host")

    def host_draws(self) -> list[int]:
        return []  # the model is on the host

    def rehearse(self, run: Callable[[], None]) -> bool:
        before = torch.get_rng_state()
        run()
        draws = not torch.equal(before, torch.get_rng_state())
        torch.set_rng_state(before)
        return draws

    def record(self, run: Callable[[], None]) -> Callable[[], None]:
        before = torch.get_rng_state()
        run()
        torch.set_rng_state(before)  # recording computes nothing
        return run

    def unowned(self, t: Tensor, owner: Any) -> Tensor:
        return t
