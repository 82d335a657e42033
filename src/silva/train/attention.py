"""Packed attention: several documents in one row, none of which sees another.

A packed row has batch size 1; its documents stand one after the other and their position ids start again at 0. The
function is registered with transformers under the name `silva_packed` and serves every model that goes through that
interface. No mask of the whole row is ever built: each document runs through causal SDPA alone, which on CPU beats one
block mask several times over. On CUDA the same arguments (lengths of the documents) are what a varlen kernel takes.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, PreTrainedModel
from transformers.masking_utils import AttentionMaskInterface

from silva.types import ConfigError

PACKED_ATTENTION = "silva_packed"
"""Name for `attn_implementation=`."""

_UNSUPPORTED_ARGUMENTS = ("softcap", "s_aux", "position_bias")
_PROBE_LENGTHS = (5, 9, 5)
_PROBE_TOLERANCE = 2e-4
_LEAK_TOLERANCE = 1e-6


def packed_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    is_causal: bool | None = None,
    document_lengths: Sequence[int] | None = None,
    **kwargs: object,
) -> tuple[torch.Tensor, None]:
    """Causal attention within each document.

    query: [1, heads, T, D]; key, value: [1, kv heads, T, D]; returns [1, T, heads, D]. `document_lengths` add up to T;
    without it each batch row is one document. `sliding_window` counts the keys a query sees, itself included.
    Raises ValueError for what cannot be computed here: masks, a key cache, attention that is not causal, soft-capped
    or biased scores, attention sinks.
    """
    _refuse_unsupported(module, query, key, attention_mask, is_causal, kwargs)
    groups = query.shape[1] // key.shape[1]
    if groups > 1:
        key, value = key.repeat_interleave(groups, dim=1), value.repeat_interleave(groups, dim=1)
    lengths = [query.shape[2]] if document_lengths is None else list(document_lengths)
    if document_lengths is not None and (query.shape[0] != 1 or sum(lengths) != query.shape[2]):
        raise ValueError(f"documents of {sum(lengths)} tokens do not fill rows of shape {tuple(query.shape)}")

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        length = q.shape[2]
        band = None
        if sliding_window is not None and length > sliding_window:
            ones = torch.ones(length, length, dtype=torch.bool, device=q.device)
            band = ones.tril().triu(1 - sliding_window)
        return scaled_dot_product_attention(
            q, k, v, attn_mask=band, dropout_p=dropout, scale=scaling, is_causal=band is None
        )

    if len(lengths) == 1:
        out = attend(query, key, value)
    elif len(set(lengths)) == 1:
        out = _rows_to_documents(attend, query, key, value, num=len(lengths))
    else:
        pieces = zip(*(t.split(lengths, dim=2) for t in (query, key, value)), strict=True)
        out = torch.cat([attend(*piece) for piece in pieces], dim=2)
    return out.transpose(1, 2).contiguous(), None


def _rows_to_documents(
    attend: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor],
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    num: int,
) -> torch.Tensor:
    """Documents of equal length become the batch of one call."""

    def fold(t: torch.Tensor) -> torch.Tensor:  # [1, H, num * L, D] -> [num, H, L, D]
        return t[0].unflatten(1, (num, -1)).transpose(0, 1)

    out = attend(fold(query), fold(key), fold(value))
    return out.transpose(0, 1).flatten(1, 2).unsqueeze(0)


def _refuse_unsupported(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    attention_mask: torch.Tensor | None,
    is_causal: bool | None,
    kwargs: dict[str, object],
) -> None:
    for name in _UNSUPPORTED_ARGUMENTS:
        if kwargs.get(name) is not None:
            raise ValueError(f"the model's attention uses {name!r}, which packed attention does not compute")
    if attention_mask is not None:
        raise ValueError("packed attention takes no attention mask: give document_lengths instead")
    if query.shape[2] != key.shape[2]:
        raise ValueError(f"packed attention takes no key cache: {query.shape[2]} queries, {key.shape[2]} keys")
    if not (getattr(module, "is_causal", True) if is_causal is None else is_causal):
        raise ValueError(f"packed attention is causal, {type(module).__name__} is not")


def packed_mask(
    *args: object, attention_mask: torch.Tensor | None = None, use_vmap: bool = False, **kwargs: object
) -> None:
    """Replaces transformers' mask builder: there is no mask, and what only a mask could express is refused."""
    if attention_mask is not None and not bool(attention_mask.all()):
        raise ValueError("packed attention takes no padding: pack the documents into one row instead")
    if use_vmap:
        raise ValueError("the model lays a mask of its own over causal attention, which packed attention cannot apply")


def register_packed_attention() -> None:
    """Make `attn_implementation="silva_packed"` known to transformers. Doing it again changes nothing."""
    AttentionInterface.register(PACKED_ATTENTION, packed_attention)
    AttentionMaskInterface.register(PACKED_ATTENTION, packed_mask)


def packed_forward(
    model: PreTrainedModel,
    token_ids_T: torch.Tensor,
    document_lengths: Sequence[int],
    predict_N: torch.Tensor | None = None,
) -> torch.Tensor:
    """Logits of a packed row: [T, vocab], or [N, vocab] at the positions `predict_N` only.

    `model` must have been loaded with `attn_implementation="silva_packed"`.
    """
    if predict_N is None:
        return _run_packed(model, token_ids_T, document_lengths).logits[0]
    if "logits_to_keep" in inspect.signature(model.forward).parameters:
        return _run_packed(model, token_ids_T, document_lengths, logits_to_keep=predict_N).logits[0]
    return _run_packed(model, token_ids_T, document_lengths).logits[0][predict_N]


def packed_states(decoder: PreTrainedModel, token_ids_T: torch.Tensor, document_lengths: Sequence[int]) -> torch.Tensor:
    """Last hidden states [T, width] of a packed row, by the decoder of such a model, which has no language head."""
    return _run_packed(decoder, token_ids_T, document_lengths).last_hidden_state[0]


def _run_packed(
    model: PreTrainedModel, token_ids_T: torch.Tensor, document_lengths: Sequence[int], **kwargs: torch.Tensor
) -> Any:
    position_ids_T = torch.cat([torch.arange(length, device=token_ids_T.device) for length in document_lengths])
    return model(
        input_ids=token_ids_T.unsqueeze(0),
        position_ids=position_ids_T.unsqueeze(0),
        use_cache=False,
        document_lengths=tuple(document_lengths),
        **kwargs,
    )


def check_packed_attention(model: PreTrainedModel) -> None:
    """Prove on a few tokens that packed documents give the same logits as alone, whatever precedes them in the row.

    Raises ConfigError for an architecture that keeps its own attention code, carries state from token to token
    (recurrent layers), or needs something that packed attention does not compute.
    """
    name, device = type(model).__name__, model.device
    chunk = getattr(model.config, "attention_chunk_size", None)
    if chunk:
        raise ConfigError(f"{name} cannot be trained in packed rows: its attention works in chunks of {chunk} tokens")
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, model.config.get_text_config().vocab_size, (sum(_PROBE_LENGTHS),), generator=generator)
    ids = ids.to(device)
    try:
        with torch.no_grad():
            packed = packed_forward(model, ids, _PROBE_LENGTHS)
            alone = torch.cat([packed_forward(model, part, (len(part),)) for part in ids.split(_PROBE_LENGTHS)])
            first = _PROBE_LENGTHS[0]
            other = packed_forward(model, torch.cat([ids[:first].flip(0), ids[first:]]), _PROBE_LENGTHS)
    except (ValueError, TypeError, LookupError, AttributeError, RuntimeError) as error:
        # models that are not built for exchangeable attention fail here in ways of their own
        raise ConfigError(f"{name} cannot be trained in packed rows: {type(error).__name__}: {error}") from error
    scale = float(alone.abs().max())
    # the second test computes the same numbers in the same shapes, so a weak leak cannot hide in rounding
    packing, leak = float((packed - alone).abs().max()), float((packed - other)[first:].abs().max())
    if not (packing <= _PROBE_TOLERANCE * scale and leak <= _LEAK_TOLERANCE * scale):
        raise ConfigError(
            f"{name} cannot be trained in packed rows: logits of size {scale:.2g} differ by {packing:.2g} "
            f"when a document is packed and by {leak:.2g} when another document of its row changes; attention does not "
            "go through transformers' attention interface, or it carries state from token to token"
        )
