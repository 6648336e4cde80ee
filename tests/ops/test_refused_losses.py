"""What losses say of calls that they refuse."""

import pytest
import torch
from refused_losses import REFUSED

from liger_kernel.ops._core.operator import OPS, T


@pytest.mark.parametrize(
    "name, args, text",
    [
        pytest.param(name, base | changes, text, id=f"{name}-{i}")
        for name, (base, *changed) in REFUSED.items()
        for i, (changes, text) in enumerate(changed)
    ],
)
def test_says_what_is_wrong(name, args, text):
    made = {k: v.make(torch.float32, "cpu") if isinstance(v, T) else v for k, v in args.items()}
    with pytest.raises(ValueError) as error:
        OPS[name].fn(**made)
    assert str(error.value) == f"{name}: {text}"
