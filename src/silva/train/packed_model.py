"""A causal LM from a Hugging Face directory that computes packed rows: the policy, and models that stay as they are."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.utils import logging as transformers_logging

from silva.model import Dtype, ModelOptions
from silva.train.attention import PACKED_ATTENTION, check_packed_attention, packed_forward, register_packed_attention
from silva.train.losses.tokens import token_logprobs
from silva.train.options import RowOptions
from silva.train.packing import PackedRow, pack_batch
from silva.types import ConfigError, SamplingOptions, SilvaError, TrainingSample


@dataclass(frozen=True, kw_only=True)
class ComputeConfig(ModelOptions, SamplingOptions, RowOptions):
    """How a model computes: in which number type (the weights are always float32), in which rows, at the temperature
    of the rollout.
    """

    num_threads: int | None = None
    """Torch threads of the calling thread; None leaves them."""
    device: str | None = None
    """Torch name; None is CUDA where there is one."""

    @property
    def torch_device(self) -> torch.device:
        return torch.device(self.device or _default_device())

    @property
    def compute_dtype(self) -> torch.dtype:
        default: Dtype = "bfloat16" if self.torch_device.type == "cuda" else "float32"
        return torch.bfloat16 if (self.dtype or default) == "bfloat16" else torch.float32

    def autocast(self) -> torch.autocast:
        """Forward passes run under this."""
        narrow = self.compute_dtype != torch.float32
        return torch.autocast(self.torch_device.type, dtype=torch.bfloat16, enabled=narrow)

    def enter_thread(self) -> None:
        # torch keeps its thread count per calling thread, and each call may come from another one
        if self.num_threads is not None:
            torch.set_num_threads(self.num_threads)


@functools.cache
def _default_device() -> str:
    # read for every row, and the driver is slow to answer
    return "cuda" if torch.cuda.is_available() else "cpu"


class PackedModel:
    """The model of a directory, in float32 with packed attention, and its log-probs of sampled tokens.

    Raises ConfigError when the directory cannot be loaded, lacks weights, or has a model that cannot compute packed
    rows. `role` names the model in errors.
    """

    def __init__(self, hf_dir: str | Path, config: ComputeConfig, *, role: str = "model", frozen: bool = False):
        self.hf_dir = Path(hf_dir)
        self.config = config
        self._role = role
        self.model = load_packed(self.hf_dir, config)
        if frozen:
            self.model.requires_grad_(False)

    def forward(self, row: PackedRow) -> tuple[torch.Tensor, torch.Tensor]:
        """Logits [N, vocab] and ids [N] of the row's trainable tokens."""
        token_ids_T, predict_N, targets_N = row_tensors(row, self.config)
        with self.config.autocast():
            logits_NV = packed_forward(self.model, token_ids_T, row.document_lengths, predict_N)
        return logits_NV, targets_N

    def compute_logprobs(self, samples: Sequence[TrainingSample]) -> list[NDArray[np.float32]]:
        """Log-probs under the current weights, one array [T] per sample; 0.0 where the mask is 0."""

        def logprobs(row: PackedRow) -> torch.Tensor:
            logits_NV, targets_N = self.forward(row)
            return token_logprobs(logits_NV, targets_N, self.config.rollout_temperature)

        self.check_ids(samples)
        return compute_in_rows(samples, self.config, logprobs)

    def check_ids(self, samples: Sequence[TrainingSample]) -> None:
        """Raise SilvaError for a sample with ids that the model does not have."""
        check_ids(samples, vocab_size_of(self.model), f"the {self._role} {self.hf_dir}")


def row_tensors(row: PackedRow, config: ComputeConfig) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The row's `token_ids_T`, `predict_N` and `targets_N` on the device."""
    token_ids_T, predict_N, targets_N = (
        torch.from_numpy(values).to(config.torch_device) for values in (row.token_ids_T, row.predict_N, row.targets_N)
    )
    return token_ids_T, predict_N, targets_N


def compute_in_rows(
    samples: Sequence[TrainingSample], config: ComputeConfig, compute: Callable[[PackedRow], torch.Tensor]
) -> list[NDArray[np.float32]]:
    """Numbers [N] of each row's trainable tokens, as one array [T] per sample, 0.0 elsewhere. No gradient."""
    config.enter_thread()
    packed = pack_batch(samples, micro_batch_size=config.micro_batch_size, max_tokens=config.max_tokens_per_gpu)
    out = [np.zeros(len(sample.token_ids), dtype=np.float32) for sample in samples]
    with torch.no_grad():
        for row in packed.rows:
            row.scatter(compute(row).float().cpu().numpy(), out)
    return out


def vocab_size_of(model: PreTrainedModel) -> int:
    """How many ids the model has."""
    return model.config.get_text_config().vocab_size


def check_ids(samples: Sequence[TrainingSample], vocab_size: int, model: str) -> None:
    """Raise SilvaError for a sample with ids that `model` does not have."""
    for sample in samples:
        low, high = min(sample.token_ids), max(sample.token_ids)
        if low < 0 or high >= vocab_size:
            raise SilvaError(
                f"sample {sample.session_id}/{sample.name} holds token id {low if low < 0 else high}; "
                f"{model} has ids 0 to {vocab_size - 1}"
            )


def load_packed(hf_dir: Path, config: ComputeConfig) -> PreTrainedModel:
    """The model on the device, after proof that it computes packed rows. Raises ConfigError."""
    config.enter_thread()
    model = load_model(hf_dir)
    torch.nn.Module.to(model, config.torch_device)
    check_packed_attention(model)
    return model


def load_model(hf_dir: Path) -> PreTrainedModel:
    """The model in float32 with packed attention, all weights from the directory."""
    register_packed_attention()
    if not (hf_dir / "config.json").is_file():
        raise ConfigError(f"{hf_dir} is not a Hugging Face model directory: it holds no config.json")
    # the run has a progress display of its own
    transformers_logging.disable_progress_bar()
    auto: Any = AutoModelForCausalLM
    try:
        model, info = auto.from_pretrained(
            hf_dir,
            dtype=torch.float32,
            attn_implementation=PACKED_ATTENTION,
            local_files_only=True,
            output_loading_info=True,
        )
    except (OSError, ValueError, RuntimeError, KeyError) as error:
        raise ConfigError(f"the model in {hf_dir} cannot be loaded: {type(error).__name__}: {error}") from error
    missing = sorted(info["missing_keys"])
    if missing:
        raise ConfigError(f"the model in {hf_dir} lacks the weights {', '.join(missing[:5])} ({len(missing)} in all)")
    # no dropout: rollout and training must see the same policy
    return model.eval()
