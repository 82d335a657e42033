"""A real model of a few thousand parameters with the ChatML test tokenizer."""

from __future__ import annotations

from pathlib import Path

from chatml_dir import build_chatml_dir


def build_tiny_model(folder: Path, *, context_len: int = 512) -> Path:
    """A random Qwen3-shaped model that transformers and the torch engine load."""
    import torch
    from transformers import AutoTokenizer, Qwen3Config, Qwen3ForCausalLM

    build_chatml_dir(folder, context_len=context_len)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=context_len,
        tie_word_embeddings=True,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=None,
    )
    Qwen3ForCausalLM(config).save_pretrained(folder)
    build_chatml_dir(folder, context_len=context_len)  # its generation_config.json names both stop ids
    return folder
