"""Steps of training under DeepSpeed's ZeRO in a process of its own: ``zero.py STAGE 0|1 PORT``
prints losses and whether logits were left out."""

import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
stage, use, port = map(int, sys.argv[1:])
os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "DS_ACCELERATOR": "cpu"}
os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}

import deepspeed
import torch
from hf_models import make, tokens

import liger_kernel.transformers as liger

deepspeed.init_distributed(dist_backend="gloo")
model = make("llama")
if use:
    liger._apply_liger_kernel_to_instance(model=model)
config = {
    "train_batch_size": 2,
    "zero_allow_untested_optimizer": True,
    "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},  # every parameter comes and goes
}
engine, *_ = deepspeed.initialize(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), config=config)
losses = []
for _ in range(3):
    out = engine(**tokens(), use_cache=False)
    engine.backward(out.loss)
    engine.step()
    losses.append(out.loss.item())
print("RESULT", *losses, out.logits is None)
