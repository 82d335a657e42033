"""The critic: a value model that learns, beside the policy, the value of the state before each token.

It is the decoder of the start model, with weights of its own, under a linear head to one number. The value of a
trainable token is read where that token is predicted, so it knows what came before it and nothing else. The head starts
at 0, and with it all values.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.torch import load_model as load_weights
from safetensors.torch import save_model as save_weights
from transformers import PreTrainedModel

from silva.train.attention import packed_states
from silva.train.losses.value import value_loss
from silva.train.optimizer import ModelTrainer, UpdateConfig
from silva.train.options import CriticOptions
from silva.train.packed_model import check_ids, compute_in_rows, load_packed, row_tensors, vocab_size_of
from silva.train.packing import PackedBatch, PackedRow
from silva.train.signals import Masks, PerSample
from silva.types import ConfigError, SilvaError, TrainingSample

WEIGHTS_FILE = "model.safetensors"
_LEAST_SPREAD = 1e-9
"""Returns that differ by less, relative to their size, are equal: what is left is rounding."""


@dataclass(frozen=True, kw_only=True)
class CriticConfig(UpdateConfig, CriticOptions):
    """How the critic is trained: as the policy, but for its learning rate and its own clip range."""


class ValueModel(torch.nn.Module):
    """A decoder and its head. Raises ConfigError for a model that does not hand out the states under its own head."""

    def __init__(self, model: PreTrainedModel):
        super().__init__()
        name = type(model).__name__
        decoder = model.base_model
        if not isinstance(decoder, PreTrainedModel) or decoder is model:
            raise ConfigError(f"{name} cannot be made a critic: transformers gives no decoder without its head")
        probe = torch.zeros(1, dtype=torch.int64, device=model.device)
        try:
            with torch.no_grad():
                width = packed_states(decoder, probe, (1,)).shape[-1]
        except AttributeError as error:
            raise ConfigError(f"{name} cannot be made a critic: {error}") from error
        self.decoder = decoder
        self.head = torch.nn.Linear(width, 1, device=model.device)
        torch.nn.init.zeros_(self.head.weight)
        torch.nn.init.zeros_(self.head.bias)

    def states(self, token_ids_T: torch.Tensor, document_lengths: Sequence[int]) -> torch.Tensor:
        """Hidden states [T, width] of a packed row."""
        return packed_states(self.decoder, token_ids_T, document_lengths)

    def values(self, states_NH: torch.Tensor) -> torch.Tensor:
        """Values [N], in the precision of the weights."""
        return self.head(states_NH.to(self.head.weight.dtype)).squeeze(-1)


class ValueTrainer(ModelTrainer[CriticConfig]):
    """Owns the weights of one critic, made from a local Hugging Face directory. Belongs to one thread at a time.

    Raises ConfigError when the directory cannot be loaded, or has a model that cannot compute packed rows or has no
    decoder apart from its language head.
    """

    def __init__(self, hf_dir: str | Path, config: CriticConfig | None = None) -> None:
        config = config or CriticConfig()
        model = load_packed(Path(hf_dir), config)
        self._vocab_size = vocab_size_of(model)
        self.model = ValueModel(model)
        super().__init__(Path(hf_dir), config, self.model)

    def compute_values(self, samples: Sequence[TrainingSample]) -> list[NDArray[np.float32]]:
        """The value of the state before each token, one array [T] per sample; 0.0 where the mask is 0."""
        self._check_ids(samples)
        return compute_in_rows(samples, self.config, self._forward)

    def train_step(
        self,
        samples: Sequence[TrainingSample],
        *,
        old_values: PerSample,
        returns: PerSample,
        loss_masks: Masks | None = None,
        lr_scale: float = 1.0,
    ) -> dict[str, float]:
        """One optimizer step on one global batch, whose tokens weigh what they weigh in the policy's loss.

        `old_values` are those before the first update on this data, `returns` what is to be learned. Returns metrics
        `train/...`, finite numbers only. A batch without a trainable token, or with a loss or gradient that is not
        finite, changes nothing and is counted by reason.
        """
        self._begin(self.config.lr * lr_scale)
        self._check_ids(samples)
        batch = self._pack(samples, loss_masks)
        if batch.num_trainable == 0:
            return self._told({}, "no_trainable_tokens", prefix="critic_")
        loss, num_limited = self._backward(batch, old_values, returns)
        grad_norm = self._clip()
        reason = self._take(loss, grad_norm)
        measured = {
            "value_loss": loss,
            "value_clipfrac": num_limited / batch.num_trainable,
            "critic_grad_norm": grad_norm,
        }
        return self._told(measured | _compared(batch, old_values, returns), reason, prefix="critic_")

    def save(self, folder: Path) -> None:
        """Write weights and optimizer to a new folder inside a checkpoint."""
        folder.mkdir()
        save_weights(self.model, str(folder / WEIGHTS_FILE))
        self._write_optimizer(folder)

    def load(self, folder: Path) -> None:
        """Go on from such a folder; learning rate and weight decay stay those of this config.

        Raises SilvaError where it cannot be read or is of another model; the critic is then not to be used further.
        """
        self.config.enter_thread()
        saved = self._read_optimizer(folder)
        try:
            load_weights(self.model, folder / WEIGHTS_FILE)
            self._restore(saved)
        except (OSError, SafetensorError) as error:
            raise SilvaError(f"checkpoint {folder}: {WEIGHTS_FILE} cannot be read: {error}") from error
        except (RuntimeError, ValueError) as error:
            raise SilvaError(f"checkpoint {folder} does not fit a critic made from {self.hf_dir}: {error}") from error

    def _backward(self, batch: PackedBatch, old_values: PerSample, returns: PerSample) -> tuple[float, int]:
        """Add the batch's gradient; returns its loss, and for how many tokens the limit decided."""
        loss, num_limited = 0.0, 0
        for row in batch.rows:
            values_N = self._forward(row)
            old_N, returns_N, weights_N = (
                torch.from_numpy(numbers).to(values_N.device, values_N.dtype)
                for numbers in (row.gather(old_values), row.gather(returns), row.weights_N)
            )
            losses_N, limited_N = value_loss(values_N, old_N, returns_N, self.config.value_clip or math.inf)
            row_loss = (losses_N * weights_N).sum()
            row_loss.backward()
            loss += float(row_loss.detach().double())
            num_limited += int(limited_N.sum())
        return loss, num_limited

    def _forward(self, row: PackedRow) -> torch.Tensor:
        """Values [N] of the row's trainable tokens."""
        token_ids_T, predict_N, _ = row_tensors(row, self.config)
        with self.config.autocast():
            states_TH = self.model.states(token_ids_T, row.document_lengths)
        # the head stays out of autocast: eight bits of mantissa would round the values to steps
        return self.model.values(states_TH[predict_N])

    def _check_ids(self, samples: Sequence[TrainingSample]) -> None:
        check_ids(samples, self._vocab_size, f"the critic made from {self.hf_dir}")


def _compared(batch: PackedBatch, old_values: PerSample, returns: PerSample) -> dict[str, float]:
    """How well the old values predicted the returns, over all trainable tokens alike."""
    values_N, returns_N = (
        np.concatenate([row.gather(numbers) for row in batch.rows]) for numbers in (old_values, returns)
    )
    with np.errstate(all="ignore"):  # what is not finite is counted by the caller
        measured = {"value_mean": float(values_N.mean()), "return_mean": float(returns_N.mean())}
        if np.ptp(returns_N) > _LEAST_SPREAD * np.abs(returns_N).max():
            measured["value_explained"] = float(1 - (returns_N - values_N).var() / returns_N.var())
    return measured
