"""How tokens are sampled: options that the turn service and the trainer share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeVar

from silva.types.generation import SamplingParams
from silva.types.option import opt
from silva.types.rollout import Mode

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class SamplingOptions:
    """How turns are sampled in training, and in eval where that differs."""

    rollout_temperature: float = opt("rollout", 1.0, low=0)
    """Sampling temperature; 0 is argmax."""
    rollout_top_p: float = opt("rollout", 1.0, above=0, high=1)
    """Sampling keeps the most likely tokens up to this probability mass."""
    rollout_top_k: int = opt("rollout", -1, low=-1)
    """Sampling keeps this many tokens; -1 is off."""
    rollout_max_response_len: int | None = opt("rollout", None, low=1)
    """Limit of one model turn, in tokens (default: what the context leaves)."""
    rollout_max_context_len: int | None = opt("rollout", None, low=2)
    """Limit of a whole session context, in tokens (default: the model's own limit)."""
    rollout_stop: list[str] = opt("rollout", [], metavar="TEXT")
    """Stop strings of every turn."""
    rollout_stop_token_ids: list[int] = opt("rollout", [], metavar="ID")
    """Stop token ids of every turn, in addition to the model's own."""
    eval_temperature: float | None = opt("eval", None, low=0)
    """Sampling temperature in eval (default: --rollout-temperature)."""
    eval_top_p: float | None = opt("eval", None, above=0, high=1)
    """Top-p in eval (default: --rollout-top-p)."""
    eval_max_response_len: int | None = opt("eval", None, low=1)
    """Limit of one model turn in eval, in tokens (default: --rollout-max-response-len)."""
    seed: int = opt("run", 1234, low=0)
    """Seed of everything random except the data order."""

    def sampling(self, mode: Mode, *, room: int) -> SamplingParams:
        """How a turn samples that may have `room` tokens, before its request adds to that."""

        def chosen(rollout: T, held_out: T | None) -> T:
            return rollout if mode != "eval" or held_out is None else held_out

        return SamplingParams(
            max_new_tokens=min(room, chosen(self.rollout_max_response_len, self.eval_max_response_len) or room),
            temperature=chosen(self.rollout_temperature, self.eval_temperature),
            top_p=chosen(self.rollout_top_p, self.eval_top_p),
            top_k=self.rollout_top_k,
            stop=tuple(self.rollout_stop),
            stop_token_ids=tuple(self.rollout_stop_token_ids),
        )
