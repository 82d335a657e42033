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

    rollout_temperature: float = opt("rollout", 1.0, "Sampling temperature; 0 is argmax.", low=0)
    rollout_top_p: float = opt(
        "rollout", 1.0, "Sampling keeps the most likely tokens up to this probability mass.", above=0, high=1
    )
    rollout_top_k: int = opt("rollout", -1, "Sampling keeps this many tokens; -1 is off.", low=-1)
    rollout_max_response_len: int | None = opt(
        "rollout", None, "Limit of one model turn, in tokens (default: what the context leaves).", low=1
    )
    rollout_max_context_len: int | None = opt(
        "rollout", None, "Limit of a whole session context, in tokens (default: the model's own limit).", low=2
    )
    rollout_stop: list[str] = opt("rollout", [], "Stop strings of every turn.", metavar="TEXT")
    rollout_stop_token_ids: list[int] = opt(
        "rollout", [], "Stop token ids of every turn, in addition to the model's own.", metavar="ID"
    )
    eval_temperature: float | None = opt(
        "eval", None, "Sampling temperature in eval (default: --rollout-temperature).", low=0
    )
    eval_top_p: float | None = opt("eval", None, "Top-p in eval (default: --rollout-top-p).", above=0, high=1)
    eval_max_response_len: int | None = opt(
        "eval", None, "Limit of one model turn in eval, in tokens (default: --rollout-max-response-len).", low=1
    )
    seed: int = opt("run", 1234, "Seed of everything random except the data order.", low=0)

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
