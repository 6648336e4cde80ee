"""Lightning: a patched model inside a module. The loss is computed in the model's own forward,
so that sharding strategies see it."""

import lightning
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from liger_kernel.transformers import apply_liger_kernel_to_llama

config = LlamaConfig(
    vocab_size=512,
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
)


class Module(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.model = LlamaForCausalLM(config)
        apply_liger_kernel_to_llama(model=self.model)

    def training_step(self, batch, index):
        loss = self.model(**batch).loss
        print(f"step {index}: loss {loss.item():.4f}")
        return loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


rows = [{"input_ids": ids, "labels": ids} for ids in torch.randint(0, 512, (32, 64))]
trainer = lightning.Trainer(
    max_epochs=1, precision="bf16-mixed", logger=False, enable_checkpointing=False, enable_progress_bar=False
)
trainer.fit(Module(), torch.utils.data.DataLoader(rows, batch_size=4))
