"""How well a saved model predicts the rows that its run held back."""

from __future__ import annotations

import contextlib
import math
from typing import Any

import torch

from liger_kernel.train.config import TrainConfig, UserError
from liger_kernel.train.data import load
from liger_kernel.train.model import attend, build, check_packing, device_and_precision, mixed
from liger_kernel.train.token_rows import on


@torch.no_grad()
def evaluate(config: TrainConfig) -> dict[str, Any]:
    """Mean loss (nats) and perplexity over the learnt tokens of the rows kept back, by
    ``config.model``, in one process."""
    device, precision = device_and_precision(config)
    check_packing(config)
    with contextlib.closing(load(config)) as data:
        if not data.eval:
            raise UserError("there are no rows to evaluate on: eval_fraction is 0")
        model = build(config, data.tokenizer, device, precision).eval()
        data.check(model.config.get_text_config().vocab_size)
        attend(config, data.rows, model, device, precision)
        total, (_, tokens) = 0.0, data.rows.count(data.eval)
        for batch in data.batches(data.eval, 0, 1, config.batch):
            with mixed(device, precision):
                total += float(model(**on(device, batch), use_cache=False, num_items_in_batch=1).loss)
        loss, rows = total / max(1, tokens), len(data.eval)
    return {"loss": loss, "perplexity": math.exp(loss) if loss < 700 else math.inf, "tokens": tokens, "rows": rows}
