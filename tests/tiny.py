"""A model folder small enough for any test: byte-level BPE with ChatML special tokens and a 2-layer llama config.

`make_tiny_model` writes what a Hugging Face folder holds, so code under test loads it as it would load a real model.
"""

from __future__ import annotations

import json
from pathlib import Path

SPECIAL_TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
"""Ids 0, 1 and 2. `<|im_end|>` ends a turn."""

DEFAULT_SYSTEM = "You are a helpful AI assistant named Tiny."

CHAT_TEMPLATE = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\nSYSTEM<|im_end|>\n' }}{% endif %}"
    "{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
).replace("SYSTEM", DEFAULT_SYSTEM)

_CORPUS = [
    "system\nuser\nassistant\ntool\n",
    "What is the sum of the two numbers? Answer with the number only.",
    "The answer is yes. The answer is no.",
    "You are a helpful assistant. Use the tools that you are given.",
] * 4


def make_tiny_model(
    directory: Path, with_weights: bool = False, *, max_position_embeddings: int = 2048, seed: int = 0
) -> Path:
    """Write tokenizer, chat template and config (and random weights) into `directory`; returns it."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    directory.mkdir(parents=True, exist_ok=True)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=320,
        special_tokens=SPECIAL_TOKENS,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_CORPUS, trainer)
    tokenizer.save(str(directory / "tokenizer.json"))
    vocab = tokenizer.get_vocab_size()

    def write(name: str, value: object) -> None:
        (directory / name).write_text(json.dumps(value, indent=1))

    write(
        "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": "<|im_start|>",
            "eos_token": "<|im_end|>",
            "pad_token": "<|im_end|>",
            "unk_token": "<|endoftext|>",
            "model_max_length": max_position_embeddings,
            "clean_up_tokenization_spaces": False,
        },
    )
    (directory / "chat_template.jinja").write_text(CHAT_TEMPLATE)
    special = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 2}
    write("generation_config.json", special)
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "vocab_size": vocab,
        "max_position_embeddings": max_position_embeddings,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": True,
        "dtype": "float32",
        **special,
    }
    write("config.json", config)
    if with_weights:
        _save_random_weights(directory, seed)
    return directory


def _save_random_weights(directory: Path, seed: int) -> None:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(directory, local_files_only=True))
    # The default initialisation (0.02) makes all tokens near equally likely; a wider one tells tokens apart.
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 2:
                parameter.mul_(10)
    model.save_pretrained(directory)
