from __future__ import annotations

from pathlib import Path

import pytest
import torch
from train_tiny import VOCAB, write_model
from transformers import AutoModelForCausalLM

from silva.train.attention import PACKED_ATTENTION, packed_attention, packed_forward, register_packed_attention
from silva.train.policy import PolicyTrainer
from silva.types.errors import ConfigError

register_packed_attention()

ARCHITECTURES = {
    "llama": {},
    "qwen2": {},
    "qwen3": {"head_dim": 8, "tie_word_embeddings": True},
    "gpt_neox": {},
    "gpt2": {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64},
    "mistral": {"sliding_window": 4},
    "gemma3_text": {"head_dim": 8, "sliding_window": 3, "layer_types": ["sliding_attention", "full_attention"]},
}


def load_pair(folder: Path) -> tuple[torch.nn.Module, torch.nn.Module]:
    """The model with packed attention, and as transformers runs it by itself."""
    packed = AutoModelForCausalLM.from_pretrained(folder, attn_implementation=PACKED_ATTENTION).eval()
    plain = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager").eval()
    return packed, plain


@pytest.mark.parametrize("kind", sorted(ARCHITECTURES))
def test_packed_documents_give_the_logits_and_gradients_that_they_give_alone(kind: str, tmp_path: Path) -> None:
    packed, plain = load_pair(write_model(tmp_path, kind, **ARCHITECTURES[kind]))
    generator = torch.Generator().manual_seed(1)
    for lengths in ((7, 1, 11, 4), (6, 6, 6), (13,)):
        ids = torch.randint(0, VOCAB, (sum(lengths),), generator=generator)
        weights = torch.randn(sum(lengths), VOCAB, generator=generator)
        together = packed_forward(packed, ids, lengths)  # type: ignore[arg-type]
        alone = torch.cat([plain(input_ids=part.unsqueeze(0)).logits[0] for part in ids.split(lengths)])
        torch.testing.assert_close(together, alone, rtol=1e-5, atol=1e-5)
        for model, logits in ((packed, together), (plain, alone)):
            model.zero_grad()
            (logits * weights).sum().backward()
        for (name, mine), theirs in zip(packed.named_parameters(), plain.parameters(), strict=True):
            assert mine.grad is not None and theirs.grad is not None, name
            torch.testing.assert_close(mine.grad, theirs.grad, rtol=1e-4, atol=1e-4)


def test_only_the_asked_positions_get_logits(tmp_path: Path) -> None:
    packed, _ = load_pair(write_model(tmp_path))
    ids = torch.arange(9)
    all_logits = packed_forward(packed, ids, (4, 5))  # type: ignore[arg-type]
    some = packed_forward(packed, ids, (4, 5), torch.tensor([1, 2, 7]))  # type: ignore[arg-type]
    assert some.shape == (3, VOCAB)
    torch.testing.assert_close(some, all_logits[[1, 2, 7]])


def test_rows_without_document_lengths_are_plain_causal_batches(tmp_path: Path) -> None:
    packed, plain = load_pair(write_model(tmp_path))
    ids = torch.arange(12).reshape(2, 6)
    torch.testing.assert_close(packed(input_ids=ids).logits, plain(input_ids=ids).logits, rtol=1e-5, atol=1e-5)


def test_padding_is_refused_instead_of_ignored(tmp_path: Path) -> None:
    packed, _ = load_pair(write_model(tmp_path))
    mask = torch.tensor([[0, 1, 1, 1]])
    with pytest.raises(ValueError, match="no padding"):
        packed(input_ids=torch.arange(4).unsqueeze(0), attention_mask=mask)


def test_documents_must_fill_the_row() -> None:
    q = torch.zeros(1, 2, 5, 4)
    with pytest.raises(ValueError, match="4 tokens do not fill"):
        packed_attention(torch.nn.Module(), q, q, q, None, document_lengths=(1, 3))
    with pytest.raises(ValueError, match="no key cache"):
        packed_attention(torch.nn.Module(), q[:, :, -1:], q, q, None)
    with pytest.raises(ValueError, match="no attention mask"):
        packed_attention(torch.nn.Module(), q, q, q, torch.zeros(5, 5))


@pytest.mark.parametrize(
    ("kind", "overrides", "reason"),
    [
        ("gemma2", {"head_dim": 8}, "softcap"),
        ("bloom", {"n_head": 4, "n_layer": 2}, "attention interface"),
        ("mamba", {"state_size": 4}, "carries state"),
        ("lfm2", {"layer_types": ["conv", "full_attention"]}, "carries state"),
        ("falcon", {"num_kv_heads": 2}, "silva_packed"),
    ],
)
def test_models_that_would_mix_documents_are_refused_at_start(
    kind: str, overrides: dict[str, object], reason: str, tmp_path: Path
) -> None:
    folder = write_model(tmp_path, kind, **overrides)
    with pytest.raises(ConfigError, match=reason):
        PolicyTrainer(folder)
