"""TRL: direct preference optimisation with its flag. Up to TRL 1.12 the loss is ours as well,
later the layers alone."""

import tempfile

import torch
from datasets import Dataset
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from trl import DPOConfig, DPOTrainer

letters = Tokenizer(
    models.WordLevel(
        {w: i for i, w in enumerate(["<pad>", "<s>", "</s>", "?", *"abcdefghijklmnopqrstuvwxyz "])}, unk_token="?"
    )
)
letters.pre_tokenizer, letters.decoder = pre_tokenizers.Split("", "isolated"), decoders.Fuse()
tokenizer = PreTrainedTokenizerFast(tokenizer_object=letters, pad_token="<pad>", bos_token="<s>", eos_token="</s>")
config = LlamaConfig(
    vocab_size=64,
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
)
pairs = Dataset.from_dict({"prompt": ["what is it "] * 8, "chosen": ["it is good"] * 8, "rejected": ["no idea"] * 8})

with tempfile.TemporaryDirectory() as folder:
    LlamaForCausalLM(config).save_pretrained(folder)  # the reference is loaded from where the model comes from
    model = LlamaForCausalLM.from_pretrained(folder)
    args = DPOConfig(
        folder,
        use_liger_kernel=True,
        bf16=torch.cuda.is_available(),
        max_steps=6,
        per_device_train_batch_size=4,
        learning_rate=1e-3,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
    )
    trainer = DPOTrainer(model, args=args, train_dataset=pairs, processing_class=tokenizer)
    trainer.train()
    print("last loss", trainer.state.log_history[-2]["loss"], "beside log(2) = 0.693")
