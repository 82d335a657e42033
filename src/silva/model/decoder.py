"""An eager decoder for dense Llama-like models with a static key-value cache.

One `forward` takes rows of many sequences at once: single tokens (decoding) share one attention call, longer segments
(prefill) get one causal call each, and all dense layers run over the concatenated rows, so nothing is padded.

Shape suffixes: N rows of a step, S cache slots, T cache positions, H heads, D head width.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from silva.model.config import DecoderConfig, RopeConfig
from silva.types import ConfigError


class WeightsError(ConfigError):
    """A parameter is missing, unknown, of the wrong shape, not finite or no tensor. Nothing was loaded."""


@dataclass(frozen=True, slots=True)
class Segment:
    """New tokens of one sequence."""

    slot: int
    """Its cache slot."""
    start: int
    """Position of the first new token."""
    length: int
    """How many are new."""


class KVCache:
    """Keys and values as one tensor [layer, slot, key heads then value heads, position, D]. Grows in positions.

    Memory is zeroed: masked positions still enter the arithmetic with weight 0, and 0 times a stale NaN is NaN.
    """

    def __init__(
        self, config: DecoderConfig, num_slots: int, max_positions: int, *, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.num_slots = num_slots
        self.max_positions = max_positions
        self._heads = 2 * config.num_kv_heads
        shape = (config.num_layers, num_slots, self._heads, 0, config.head_dim)
        self.data = torch.zeros(shape, dtype=dtype, device=device)

    @property
    def num_positions(self) -> int:
        return self.data.shape[3]

    def ensure(self, num_positions: int) -> None:
        """Make room for `num_positions` tokens in each slot; what is cached stays."""
        have = self.num_positions
        if num_positions <= have:
            return
        room = max(have, 64)
        while room < num_positions:
            room *= 2
        layers, slots, heads, _, width = self.data.shape
        if num_positions > self.max_positions:
            raise ValueError(f"a cache of at most {self.max_positions} positions was asked for {num_positions}")
        grown = self.data.new_zeros((layers, slots, heads, min(room, self.max_positions), width))
        grown[:, :, :, :have] = self.data
        self.data = grown

    def copy(self, source: int, target: int, start: int, stop: int) -> None:
        """Copy positions start..stop of one slot to another."""
        self.data[:, target, :, start:stop] = self.data[:, source, :, start:stop]

    def scrub(self, slot: int) -> None:
        """Zero one slot."""
        self.data[:, slot].zero_()


@dataclass(slots=True)
class _Layer:
    qkv: Tensor
    qkv_bias: Tensor | None
    out: Tensor
    out_bias: Tensor | None
    gate_up: Tensor
    gate_up_bias: Tensor | None
    down: Tensor
    down_bias: Tensor | None
    attention_norm: Tensor
    mlp_norm: Tensor
    qk_norm: Tensor | None


@dataclass(slots=True)
class _Step:
    """What all layers of one forward share."""

    num_single: int
    cache_rows: Tensor
    cos: Tensor
    sin: Tensor
    single_low: int
    single_high: int
    single_index: Tensor | None
    single_length: int
    single_mask: Tensor | None
    segments: list[tuple[Segment, Tensor | None]]


class Decoder:
    """Own copy of a causal language model's weights, with fused qkv and gate/up matrices.

    `load` fills the weights from Hugging Face parameter names; before the first `load` they are zero.
    """

    def __init__(self, config: DecoderConfig, *, dtype: torch.dtype, device: torch.device) -> None:
        self.config = config
        self.dtype = dtype
        self.device = device
        self._targets: dict[str, tuple[tuple[int, ...], Tensor]] = {}
        self._inv_freq = rope_frequencies(config.rope, config.head_dim).to(device)
        self._embed = self._new("model.embed_tokens.weight", config.vocab_size, config.hidden_size)
        self._layers = [self._new_layer(f"model.layers.{i}.") for i in range(config.num_layers)]
        self._norm = self._new("model.norm.weight", config.hidden_size)
        if config.tie_embeddings:
            self._head = self._embed
        else:
            self._head = self._new("lm_head.weight", config.vocab_size, config.hidden_size)

    def new_cache(self, num_slots: int, max_positions: int | None = None) -> KVCache:
        """An empty cache that may grow to `max_positions` (default: the config's) tokens a slot."""
        limit = max_positions or self.config.max_positions
        return KVCache(self.config, num_slots, limit, dtype=self.dtype, device=self.device)

    # ---- weights ----

    def _new(self, name: str, *shape: int) -> Tensor:
        tensor = torch.zeros(shape, dtype=self.dtype, device=self.device)
        self._targets[name] = (shape, tensor)
        return tensor

    def _fused(self, prefix: str, names: Sequence[str], sizes: Sequence[int], width: int, bias: bool):
        """One matrix (and bias) whose row blocks are the named projections."""
        matrix = torch.zeros((sum(sizes), width), dtype=self.dtype, device=self.device)
        vector = torch.zeros(sum(sizes), dtype=self.dtype, device=self.device) if bias else None
        at = 0
        for name, size in zip(names, sizes, strict=True):
            self._targets[f"{prefix}{name}.weight"] = ((size, width), matrix[at : at + size])
            if vector is not None:
                self._targets[f"{prefix}{name}.bias"] = ((size,), vector[at : at + size])
            at += size
        return matrix, vector

    def _new_layer(self, prefix: str) -> _Layer:
        c = self.config
        q_size, kv_size = c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim
        attention, mlp = f"{prefix}self_attn.", f"{prefix}mlp."
        sizes = (q_size, kv_size, kv_size)
        qkv, qkv_bias = self._fused(attention, ("q_proj", "k_proj", "v_proj"), sizes, c.hidden_size, c.qkv_bias)
        out, out_bias = self._fused(attention, ("o_proj",), (c.hidden_size,), q_size, c.output_bias)
        gate_up, gate_up_bias = self._fused(
            mlp, ("gate_proj", "up_proj"), (c.intermediate_size,) * 2, c.hidden_size, c.mlp_bias
        )
        down, down_bias = self._fused(mlp, ("down_proj",), (c.hidden_size,), c.intermediate_size, c.mlp_bias)
        qk_norm = None
        if c.qk_norm:
            qk_norm = torch.zeros((c.num_heads + c.num_kv_heads, c.head_dim), dtype=self.dtype, device=self.device)
            self._targets[f"{attention}q_norm.weight"] = ((c.head_dim,), qk_norm[: c.num_heads])
            self._targets[f"{attention}k_norm.weight"] = ((c.head_dim,), qk_norm[c.num_heads :])
        return _Layer(
            qkv=qkv,
            qkv_bias=qkv_bias,
            out=out,
            out_bias=out_bias,
            gate_up=gate_up,
            gate_up_bias=gate_up_bias,
            down=down,
            down_bias=down_bias,
            attention_norm=self._new(f"{prefix}input_layernorm.weight", c.hidden_size),
            mlp_norm=self._new(f"{prefix}post_attention_layernorm.weight", c.hidden_size),
            qk_norm=qk_norm,
        )

    def load(self, weights: Mapping[str, object]) -> None:
        """Copy all parameters in, cast to the decoder's dtype. Raises WeightsError before anything is changed.

        With tied embeddings `lm_head.weight` may be given too, if it equals the embedding.
        """
        given: dict[str, Tensor] = {}
        for name, value in weights.items():
            if not isinstance(value, Tensor):
                raise WeightsError(f"parameter {name} is a {type(value).__name__}, not a torch tensor")
            if not name.endswith("rotary_emb.inv_freq"):
                given[name] = value
        if self.config.tie_embeddings and "lm_head.weight" in given:
            head, embed = given.pop("lm_head.weight"), given.get("model.embed_tokens.weight")
            if embed is not None and head.data_ptr() != embed.data_ptr() and not torch.equal(head, embed):
                raise WeightsError("lm_head.weight differs from model.embed_tokens.weight, but the config ties them")
        missing = sorted(self._targets.keys() - given.keys())
        unknown = sorted(given.keys() - self._targets.keys())
        if missing or unknown:
            parts = [
                f"{label} {_some(names)}" for label, names in (("missing", missing), ("unknown", unknown)) if names
            ]
            raise WeightsError(f"the parameters do not fit a {self.config.model_type} config: {'; '.join(parts)}")
        for name, (shape, _) in self._targets.items():
            if tuple(given[name].shape) != shape:
                raise WeightsError(
                    f"parameter {name} has shape {list(given[name].shape)}, the config asks {list(shape)}"
                )
        with torch.inference_mode():
            for name in self._targets:
                # Cheaper than a look at each value: a sum is finite only if all its terms are.
                if not math.isfinite(given[name].detach().sum(dtype=torch.float64).item()):
                    raise WeightsError(f"parameter {name} holds a value that is not finite")
            for name, (_, target) in self._targets.items():
                target.copy_(given[name].detach())

    # ---- forward ----

    @torch.inference_mode()
    def forward(
        self,
        ids: Sequence[int],
        segments: Sequence[Segment],
        cache: KVCache,
        logit_rows: Sequence[int],
    ) -> Tensor:
        """Run the tokens `ids` (the segments' new tokens, concatenated) and write their keys and values to `cache`.

        Segments of length 1 come first and in slot order, one per slot at most; all lie inside the cache. Returns
        float32 logits [len(logit_rows), vocabulary] after the named rows of `ids`.
        """
        step = self._prepare(segments, cache)
        x = F.embedding(torch.tensor(ids, device=self.device), self._embed)
        for layer, kv in zip(self._layers, cache.data, strict=True):
            x = self._attention(layer, x, kv, step)
            x = self._mlp(layer, x)
        if len(logit_rows) < len(x):
            x = x[torch.tensor(logit_rows, dtype=torch.int64, device=self.device)]
        return F.linear(self._rms(x, self._norm), self._head).float()

    def _prepare(self, segments: Sequence[Segment], cache: KVCache) -> _Step:
        c, device = self.config, self.device
        num_single = next((i for i, s in enumerate(segments) if s.length > 1), len(segments))
        single, longer = segments[:num_single], segments[num_single:]
        positions, slots = [s.start for s in single], [s.slot for s in single]
        for s in longer:
            positions.extend(range(s.start, s.start + s.length))
            slots.extend([s.slot] * s.length)
        positions_N, slots_N = torch.tensor(positions, device=device), torch.tensor(slots, device=device)
        heads = torch.arange(2 * c.num_kv_heads, device=device)
        cache_rows = (slots_N[:, None] * (2 * c.num_kv_heads) + heads) * cache.num_positions + positions_N[:, None]
        angles = positions_N[:, None].float() * self._inv_freq
        cos, sin = angles.cos(), angles.sin()
        step = _Step(
            num_single=num_single,
            cache_rows=cache_rows.flatten(),
            cos=torch.cat((cos, cos), -1).to(self.dtype)[:, None],
            # The sign of the rotated half sits in the sine, so that a plain roll rotates.
            sin=torch.cat((-sin, sin), -1).to(self.dtype)[:, None],
            single_low=0,
            single_high=0,
            single_index=None,
            single_length=0,
            single_mask=None,
            segments=[(s, self._segment_mask(s)) for s in longer],
        )
        if num_single:
            self._prepare_single(step, positions_N[:num_single], slots_N[:num_single], single)
        return step

    def _prepare_single(self, step: _Step, positions_B: Tensor, slots_B: Tensor, single: Sequence[Segment]) -> None:
        """Decode rows attend over a slice of slots when they fill most of it, else over a gathered copy."""
        low, high = single[0].slot, single[-1].slot + 1
        step.single_length = max(s.start for s in single) + 1
        last = positions_B
        if high - low > len(single) + len(single) // 2:
            step.single_index = slots_B
        else:
            step.single_low, step.single_high = low, high
            if high - low > len(single):
                step.single_index = slots_B - low
                # Slots in between that take no part attend to their first position; the result is dropped.
                last = positions_B.new_zeros(high - low).index_copy_(0, step.single_index, positions_B)
        if len(single) > 1 or single[0].start + 1 < step.single_length:
            reach = torch.arange(step.single_length, device=self.device) > last[:, None]
            mask = torch.zeros(reach.shape, dtype=self.dtype, device=self.device).masked_fill_(reach, -math.inf)
            step.single_mask = mask[:, None, None]

    def _segment_mask(self, segment: Segment) -> Tensor | None:
        if segment.start == 0:
            return None
        keys = torch.arange(segment.start + segment.length, device=self.device)
        return keys <= keys[segment.start :, None]

    def _rms(self, x: Tensor, weight: Tensor) -> Tensor:
        return F.rms_norm(x, (x.shape[-1],), weight, self.config.rms_norm_eps)

    def _attention(self, layer: _Layer, x: Tensor, kv: Tensor, step: _Step) -> Tensor:
        c = self.config
        rows = x.shape[0]
        qkv = F.linear(self._rms(x, layer.attention_norm), layer.qkv, layer.qkv_bias)
        qkv = qkv.view(rows, c.num_heads + 2 * c.num_kv_heads, c.head_dim)
        rotated = qkv[:, : c.num_heads + c.num_kv_heads]
        plain = rotated
        if layer.qk_norm is not None:
            plain = F.rms_norm(rotated, (c.head_dim,), None, c.rms_norm_eps) * layer.qk_norm
        torch.addcmul(plain * step.cos, plain.roll(c.head_dim // 2, -1), step.sin, out=rotated)
        kv.view(-1, c.head_dim).index_copy_(0, step.cache_rows, qkv[:, c.num_heads :].reshape(-1, c.head_dim))
        q = qkv[:, : c.num_heads]
        parts = [self._attend_single(q[: step.num_single], kv, step)] if step.num_single else []
        at = step.num_single
        for segment, mask in step.segments:
            parts.append(self._attend_segment(q[at : at + segment.length], kv[segment.slot], segment, mask))
            at += segment.length
        mixed = parts[0] if len(parts) == 1 else torch.cat(parts)
        x = torch.addmm(x, mixed, layer.out.t())
        return x if layer.out_bias is None else x.add_(layer.out_bias)

    def _attend_single(self, q: Tensor, kv: Tensor, step: _Step) -> Tensor:
        """One new token per sequence: the query heads of a group are treated as query positions of their key head."""
        c = self.config
        rows = q.shape[0]
        q = q.reshape(rows, c.num_kv_heads, c.num_heads // c.num_kv_heads, c.head_dim)
        index, spread = step.single_index, step.single_high > 0
        if not spread:
            kv = kv[:, :, : step.single_length].index_select(0, index)  # type: ignore[arg-type]
        else:
            kv = kv[step.single_low : step.single_high, :, : step.single_length]
            if index is not None:
                q = q.new_zeros((kv.shape[0], *q.shape[1:])).index_copy_(0, index, q)
        out = F.scaled_dot_product_attention(
            q, kv[:, : c.num_kv_heads], kv[:, c.num_kv_heads :], attn_mask=step.single_mask
        )
        if spread and index is not None:
            out = out.index_select(0, index)
        return out.reshape(rows, c.num_heads * c.head_dim)

    def _attend_segment(self, q: Tensor, kv: Tensor, segment: Segment, mask: Tensor | None) -> Tensor:
        c = self.config
        kv = kv[None, :, : segment.start + segment.length]
        out = F.scaled_dot_product_attention(
            q.transpose(0, 1)[None],
            kv[:, : c.num_kv_heads],
            kv[:, c.num_kv_heads :],
            attn_mask=mask,
            is_causal=mask is None,
            enable_gqa=c.num_heads != c.num_kv_heads,
        )
        return out[0].transpose(0, 1).reshape(segment.length, c.num_heads * c.head_dim)

    def _mlp(self, layer: _Layer, x: Tensor) -> Tensor:
        gate_up = F.linear(self._rms(x, layer.mlp_norm), layer.gate_up, layer.gate_up_bias)
        gate, up = gate_up.chunk(2, -1)
        x = torch.addmm(x, F.silu(gate).mul_(up), layer.down.t())
        return x if layer.down_bias is None else x.add_(layer.down_bias)


def rope_frequencies(rope: RopeConfig, head_dim: int) -> Tensor:
    """Inverse frequencies [head_dim / 2] in float32 (Su et al. 2021; `llama3` as published with Llama 3.1)."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim
    inv_freq = 1.0 / (rope.theta**exponents)
    if rope.kind == "linear":
        return inv_freq / rope.factor
    if rope.kind == "llama3":
        wavelength = 2 * math.pi / inv_freq
        turns = rope.original_max_positions / wavelength
        blend = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
        blend = blend.clamp(0.0, 1.0)
        return (1 - blend) * inv_freq / rope.factor + blend * inv_freq
    return inv_freq


def _some(names: Sequence[str], limit: int = 5) -> str:
    more = f" and {len(names) - limit} more" if len(names) > limit else ""
    return ", ".join(names[:limit]) + more
