"""transformers: the Trainer's own flag. A tiny random Llama and random tokens stand in for a
model and data."""

import tempfile

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

config = LlamaConfig(
    vocab_size=512,
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
)
rows = [{"input_ids": ids, "labels": ids} for ids in torch.randint(0, 512, (32, 64))]

with tempfile.TemporaryDirectory() as folder:
    args = TrainingArguments(
        folder,
        use_liger_kernel=True,
        liger_kernel_config={
            "rope": True,
            "rms_norm": True,
            "swiglu": True,
            "fused_linear_cross_entropy": True,
        },  # these are on without it, too
        max_steps=8,
        per_device_train_batch_size=4,
        gradient_accumulation_steps=2,
        learning_rate=1e-2,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
    )
    trainer = Trainer(LlamaForCausalLM(config), args, train_dataset=rows, eval_dataset=rows[:8])
    trainer.train()
    print("evaluation loss", trainer.evaluate()["eval_loss"])
