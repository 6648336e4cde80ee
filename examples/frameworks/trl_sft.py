"""TRL: supervised fine-tuning on chats, where only what the assistant says is learnt."""

import tempfile

import torch
from datasets import Dataset
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from trl import SFTConfig, SFTTrainer

letters = Tokenizer(
    models.WordLevel(
        {w: i for i, w in enumerate(["<pad>", "<s>", "</s>", "?", *"abcdefghijklmnopqrstuvwxyz "])}, unk_token="?"
    )
)
letters.pre_tokenizer, letters.decoder = pre_tokenizers.Split("", "isolated"), decoders.Fuse()
tokenizer = PreTrainedTokenizerFast(tokenizer_object=letters, pad_token="<pad>", bos_token="<s>", eos_token="</s>")
tokenizer.chat_template = """
{%- for m in messages %}
{%- if m['role'] == 'assistant' %}{% generation %}{{ m['content'] }}{% endgeneration %}{% else %}{{ m['content'] }}{% endif %}
{%- endfor %}"""  # noqa: E501
config = LlamaConfig(
    vocab_size=64,
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
)
chats = Dataset.from_dict(
    {"messages": [[{"role": "user", "content": "what is it "}, {"role": "assistant", "content": "it is good"}]] * 16}
)

with tempfile.TemporaryDirectory() as folder:
    args = SFTConfig(
        folder,
        use_liger_kernel=True,
        assistant_only_loss=True,
        bf16=torch.cuda.is_available(),
        max_steps=6,
        per_device_train_batch_size=4,
        learning_rate=1e-2,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
    )
    trainer = SFTTrainer(LlamaForCausalLM(config), args=args, train_dataset=chats, processing_class=tokenizer)
    trainer.train()
    print("last loss", trainer.state.log_history[-2]["loss"])
