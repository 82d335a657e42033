"""The shape of a dense decoder, read from the `config.json` of a Hugging Face model directory.

Implemented: the dense `llama`, `qwen2`, `qwen3` and `mistral` (without a sliding window) families. A key that would
change the computation and is not implemented is refused by its name; keys that those families do not read are ignored,
as transformers ignores them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from silva.types import ConfigError

RopeKind = Literal["default", "linear", "llama3"]

SUPPORTED_MODEL_TYPES = ("llama", "qwen2", "qwen3", "mistral")

# Keys of related models that alter the forward pass, with the values that switch them off.
_NEUTRAL: dict[str, tuple[object, ...]] = {
    "partial_rotary_factor": (None, 1, 1.0),
    "quantization_config": (None, {}),
    "compression_config": (None, {}),
    "num_experts": (None, 0),
    "num_local_experts": (None, 0),
    "n_routed_experts": (None, 0),
    "final_logit_softcapping": (None,),
    "attn_logit_softcapping": (None,),
    "logit_scale": (None, 1, 1.0),
    "logits_scaling": (None, 1, 1.0),
    "embedding_multiplier": (None, 1, 1.0),
    "residual_multiplier": (None, 1, 1.0),
    "attention_multiplier": (None,),
    "query_pre_attn_scalar": (None,),
    "clip_qkv": (None,),
    "dual_chunk_attention_config": (None, {}),
    "no_rope_layers": (None, []),
    "is_encoder_decoder": (None, False),
    "add_cross_attention": (None, False),
    "vision_config": (None,),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class RopeConfig:
    """Rotary embedding. The last three fields matter for `llama3` only."""

    theta: float = 10_000.0
    """The base of the frequencies."""
    kind: RopeKind = "default"
    """How the frequencies are stretched."""
    factor: float = 1.0
    """By how much, for `linear` and `llama3`."""
    low_freq_factor: float = 1.0
    """Wavelengths above `original_max_positions` over this are stretched in full."""
    high_freq_factor: float = 4.0
    """Wavelengths below `original_max_positions` over this are not stretched."""
    original_max_positions: int = 8192
    """Context of the model before it was stretched, in tokens."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DecoderConfig:
    """Everything that the forward pass depends on."""

    model_type: str
    """One of SUPPORTED_MODEL_TYPES."""
    vocab_size: int
    """Rows of the embedding."""
    hidden_size: int
    """Width of the residual stream."""
    intermediate_size: int
    """Width inside the MLP."""
    num_layers: int
    """Decoder blocks."""
    num_heads: int
    """Query heads of a block."""
    num_kv_heads: int
    """Key and value heads of a block; divides `num_heads`."""
    head_dim: int
    """Width of a head, even."""
    rms_norm_eps: float
    """Added to the mean square in each norm."""
    max_positions: int
    """Longest context in tokens."""
    tie_embeddings: bool
    """The embedding is the output head too."""
    qkv_bias: bool
    """Query, key and value projections have a bias."""
    output_bias: bool
    """The attention output projection has a bias."""
    mlp_bias: bool
    """The MLP projections have a bias."""
    qk_norm: bool
    """Queries and keys are normalised per head (qwen3)."""
    rope: RopeConfig
    """The rotary embedding."""

    @classmethod
    def from_hf(cls, config: Mapping[str, object], *, where: str = "config.json") -> DecoderConfig:
        """Read a parsed `config.json`. Raises ConfigError that names the key, its value and the file (`where`)."""
        reader = _Reader(config, where)
        model_type = reader.model_type()
        reader.refuse_unimplemented()
        reader.refuse_sliding_window(model_type)
        num_heads = reader.positive_int("num_attention_heads")
        hidden_size = reader.positive_int("hidden_size")
        head_dim = reader.head_dim(model_type, hidden_size, num_heads)
        num_kv_heads = reader.kv_heads(model_type, num_heads)
        attention_bias = reader.flag("attention_bias") if model_type in ("llama", "qwen3") else False
        max_positions = reader.positive_int("max_position_embeddings")
        return cls(
            model_type=model_type,
            vocab_size=reader.positive_int("vocab_size"),
            hidden_size=hidden_size,
            intermediate_size=reader.positive_int("intermediate_size"),
            num_layers=reader.positive_int("num_hidden_layers"),
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            rms_norm_eps=reader.positive_float(config, "rms_norm_eps", default=1e-6),
            max_positions=max_positions,
            tie_embeddings=reader.flag("tie_word_embeddings"),
            qkv_bias=attention_bias or model_type == "qwen2",
            output_bias=attention_bias,
            mlp_bias=reader.flag("mlp_bias") if model_type == "llama" else False,
            qk_norm=model_type == "qwen3",
            rope=reader.rope(max_positions),
        )


class _Reader:
    """Typed access to a `config.json`; every complaint names the file and the key."""

    def __init__(self, config: Mapping[str, object], where: str) -> None:
        self.config = config
        self.where = where

    def bad(self, key: str, value: object, advice: str) -> ConfigError:
        return ConfigError(f"{self.where}: `{key}` is {value!r}: {advice}")

    def model_type(self) -> str:
        model_type = self.config.get("model_type")
        if model_type not in SUPPORTED_MODEL_TYPES:
            raise self.bad(
                "model_type",
                model_type,
                f"the torch engine runs dense models of type {', '.join(SUPPORTED_MODEL_TYPES)}",
            )
        architectures = self.config.get("architectures")
        names = architectures if isinstance(architectures, list) else []
        if names and not any(str(name).endswith("ForCausalLM") for name in names):
            raise self.bad("architectures", names, "only causal language models (...ForCausalLM) can sample")
        return str(model_type)

    def refuse_unimplemented(self) -> None:
        for key, neutral in _NEUTRAL.items():
            if self.config.get(key) not in neutral:
                raise self.bad(
                    key, self.config[key], "the torch engine does not implement this; use another model or engine"
                )
        act = self.config.get("hidden_act", "silu")
        if act not in ("silu", "swish"):
            raise self.bad("hidden_act", act, "the torch engine implements only silu")

    def refuse_sliding_window(self, model_type: str) -> None:
        config = self.config
        advice = "the torch engine implements full attention only"
        layer_types = config.get("layer_types")
        if isinstance(layer_types, list) and any(kind != "full_attention" for kind in layer_types):
            raise self.bad("layer_types", layer_types, advice)
        window = config.get("sliding_window")
        if model_type == "mistral" and isinstance(window, int):
            # A window that no context can outgrow is no window.
            if window < self.positive_int("max_position_embeddings"):
                raise self.bad("sliding_window", window, f"{advice}; set it to null for contexts below the window")
        elif (
            model_type != "mistral" and config.get("use_sliding_window") and window is not None and layer_types is None
        ):
            raise self.bad("use_sliding_window", True, advice)

    def positive_int(self, key: str) -> int:
        value = self.config.get(key)
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise self.bad(key, value, "it must be a positive whole number")
        return value

    def positive_float(self, source: Mapping[str, object], key: str, *, default: float | None = None) -> float:
        value = source.get(key)
        value = default if value is None else value
        if isinstance(value, bool) or not isinstance(value, int | float) or not (0 < value < math.inf):
            raise self.bad(key, value, "it must be a positive number")
        return float(value)

    def flag(self, key: str) -> bool:
        value = self.config.get(key)
        if value is not None and not isinstance(value, bool):
            raise self.bad(key, value, "it must be true or false")
        return bool(value)

    def head_dim(self, model_type: str, hidden_size: int, num_heads: int) -> int:
        if self.config.get("head_dim") is not None:
            head_dim = self.positive_int("head_dim")
        elif model_type == "qwen3":
            head_dim = 128
        elif hidden_size % num_heads:
            raise self.bad(
                "hidden_size", hidden_size, f"no multiple of num_attention_heads ({num_heads}) and no head_dim"
            )
        else:
            head_dim = hidden_size // num_heads
        if head_dim % 2:
            raise self.bad("head_dim", head_dim, "rotary embeddings need an even number")
        return head_dim

    def kv_heads(self, model_type: str, num_heads: int) -> int:
        if self.config.get("num_key_value_heads") is None and (
            model_type == "llama" or "num_key_value_heads" in self.config
        ):
            return num_heads
        num_kv_heads = self.positive_int("num_key_value_heads")
        if num_heads % num_kv_heads:
            raise self.bad("num_key_value_heads", num_kv_heads, f"it must divide num_attention_heads ({num_heads})")
        return num_kv_heads

    def rope(self, max_positions: int) -> RopeConfig:
        """`rope_parameters` (transformers 5) or `rope_scaling` with a top-level `rope_theta` (transformers 4)."""
        name = "rope_scaling" if self.config.get("rope_scaling") else "rope_parameters"
        given = self.config.get(name) or {}
        if not isinstance(given, Mapping):
            raise self.bad(name, given, "it must be an object")
        kind = given.get("rope_type", given.get("type", "default"))
        if kind not in ("default", "linear", "llama3"):
            raise self.bad(f"{name}.rope_type", kind, "the torch engine implements default, linear and llama3")
        partial = given.get("partial_rotary_factor")
        if partial not in (None, 1, 1.0):
            raise self.bad(f"{name}.partial_rotary_factor", partial, "the torch engine rotates whole heads only")
        theta = given.get("rope_theta", self.config.get("rope_theta"))
        theta = self.positive_float({"rope_theta": theta}, "rope_theta", default=10_000.0)
        if kind == "default":
            return RopeConfig(theta=theta)
        factor = self.positive_float(given, "factor")
        if kind == "linear":
            return RopeConfig(theta=theta, kind="linear", factor=factor)
        return RopeConfig(
            theta=theta,
            kind="llama3",
            factor=factor,
            low_freq_factor=self.positive_float(given, "low_freq_factor"),
            high_freq_factor=self.positive_float(given, "high_freq_factor"),
            original_max_positions=int(
                self.positive_float(given, "original_max_position_embeddings", default=float(max_positions))
            ),
        )
