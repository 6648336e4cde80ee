"""Several processes: one training loop under DDP, FSDP2, tensor or sequence parallelism, or
DeepSpeed's ZeRO.

torchrun --nproc-per-node 2 examples/distributed.py fsdp2     # or ddp, tp, ulysses, ulysses-fsdp2, zero1, zero2, zero3 (needs deepspeed); none in one process
"""  # noqa: E501

import os
import sys

import torch
import torch.distributed as dist
from transformers import LlamaConfig, LlamaForCausalLM

from liger_kernel.parallel import by_sharding, parallelize
from liger_kernel.transformers import apply_liger_kernel_to_llama

ranks = int(os.environ.get("WORLD_SIZE", 1))
mode = sys.argv[1] if len(sys.argv) > 1 else "ddp" if ranks > 1 else "none"
device = (
    torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0))) if torch.cuda.is_available() else torch.device("cpu")
)
if device.type == "cuda":
    torch.cuda.set_device(device)
if ranks > 1:
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")

torch.manual_seed(0)  # the same weights on every rank
config = LlamaConfig(
    vocab_size=512,
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
)
model = LlamaForCausalLM(config).to(device).train()
apply_liger_kernel_to_llama(model=model)  # patch first, then shard

ids = torch.randint(
    0, config.vocab_size, (8, 64), device=device, generator=torch.Generator(device).manual_seed(1)
)  # the batch of all ranks
labels = ids.masked_fill(
    torch.arange(8, device=device)[:, None] * 8 > torch.arange(64, device=device), -100
)  # rows learn unequal numbers of tokens

if mode.startswith("zero"):
    import deepspeed

    settings = {
        "train_batch_size": 8,
        "zero_optimization": {"stage": int(mode[-1])},
        "zero_allow_untested_optimizer": True,
        "gradient_clipping": 1.0,
    }
    engine, optimizer, *_ = deepspeed.initialize(
        model=model, optimizer=torch.optim.AdamW(model.parameters(), lr=1e-3), config=settings
    )
    rank, shares = dist.get_rank(), ranks
else:
    parallel = parallelize(model, mode)
    groups = [
        {"params": parameters} for parameters in by_sharding(parallel.module.parameters())
    ]  # what the mode has made of the parameters
    optimizer = torch.optim.AdamW(groups, lr=1e-3, fused=True)
    rank, shares = parallel.data_rank, parallel.data_ranks

share = {"input_ids": ids.chunk(shares)[rank], "labels": labels.chunk(shares)[rank]}
items = (
    labels[:, 1:] != -100
).sum() / shares  # gradients are averaged over the shares: this makes them those of the mean over all tokens
for step in range(4):
    if mode.startswith("zero"):
        out = engine(**share, num_items_in_batch=items)
        engine.backward(out.loss)
        engine.step()
    else:
        out = parallel.model(**share, num_items_in_batch=items)
        out.loss.backward()
        parallel.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()
    loss = out.loss.detach().clone()
    if shares > 1:
        dist.all_reduce(loss)
    if int(os.environ.get("RANK", 0)) == 0:
        print(
            f"step {step}  loss {loss.item() / shares:.4f}  logits {'left out' if out.logits is None else 'computed'}"
        )
if ranks > 1:
    dist.barrier()
    dist.destroy_process_group()
