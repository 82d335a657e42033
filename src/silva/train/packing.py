"""From samples to packed rows, with every denominator fixed before the batch is cut into micro-batches.

A packed row contains the tokens of several samples one after the other; per-token quantities exist only for its N
trainable tokens. Each of these carries its loss weight, so the loss of the global batch is the plain sum of
`weight * token loss` over all rows, however the samples were dealt out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import get_args

import numpy as np
from numpy.typing import NDArray

from silva.train.balance import plan
from silva.train.options import Reduction
from silva.train.signals import Masks, PerSample
from silva.types import ConfigError, SilvaError, TrainingSample


@dataclass(frozen=True, kw_only=True, slots=True)
class PackedRow:
    """Documents that go through the model in one forward pass.

    `_T` runs over all tokens of the row, `_N` over its trainable tokens in row order.

    Example: two samples of 3 and 4 tokens whose last two tokens are trained

        token_ids_T       7 8 9 | 7 8 9 5       document_lengths (3, 4)
        predict_N           0 1     4 5         the logits there predict
        targets_N           8 9     9 5
        owners_N            0 0     1 1         places_N  1 2  2 3
    """

    token_ids_T: NDArray[np.int64]
    """The ids of all documents, one after the other."""
    document_lengths: tuple[int, ...]
    """Tokens of each document."""
    predict_N: NDArray[np.int64]
    """The position in the row whose logits predict the token."""
    targets_N: NDArray[np.int64]
    """The id of the token."""
    owners_N: NDArray[np.int64]
    """The index of its sample in the batch."""
    places_N: NDArray[np.int64]
    """Its position in that sample."""
    rollout_logprobs_N: NDArray[np.float64]
    """Its log-prob as the engine recorded it."""
    advantages_N: NDArray[np.float64]
    """Its advantage."""
    credits_N: NDArray[np.float64]
    """The credit of its sample."""
    weights_N: NDArray[np.float64]
    """Its share in the loss of the global batch."""

    def __post_init__(self) -> None:
        num_tokens = len(self.token_ids_T)
        if sum(self.document_lengths) != num_tokens:
            raise ValueError(
                f"a packed row holds {num_tokens} tokens and documents of {sum(self.document_lengths)} tokens"
            )
        per_token = (self.targets_N, self.owners_N, self.places_N, self.rollout_logprobs_N, self.advantages_N)
        lengths = [len(values_N) for values_N in (self.predict_N, *per_token, self.credits_N, self.weights_N)]
        if len(set(lengths)) != 1:
            raise ValueError(f"the trainable tokens of a packed row do not line up: lengths {lengths}")
        if lengths[0] and not (self.token_ids_T[self.predict_N + 1] == self.targets_N).all():
            raise ValueError("a packed row would train tokens that do not follow the position that predicts them")

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids_T)

    @property
    def num_trainable(self) -> int:
        return len(self.targets_N)

    @property
    def sequence_N(self) -> NDArray[np.int64]:
        """The sample of each token, numbered within the row."""
        return np.unique(self.owners_N, return_inverse=True)[1].astype(np.int64)

    def gather(self, values: PerSample) -> NDArray[np.float64]:
        """What per-sample arrays (one [T] per sample of the batch) contain for the trainable tokens: [N]."""
        out_N = np.empty(self.num_trainable, dtype=np.float64)
        for owner in np.unique(self.owners_N):
            mine_N = self.owners_N == owner
            out_N[mine_N] = values[owner][self.places_N[mine_N]]
        return out_N

    def scatter(self, values_N: NDArray[np.floating], into: PerSample) -> None:
        """Write the values of the trainable tokens into per-sample arrays, as `gather` reads them."""
        for owner in np.unique(self.owners_N):
            mine_N = self.owners_N == owner
            into[owner][self.places_N[mine_N]] = values_N[mine_N]


@dataclass(frozen=True, kw_only=True, slots=True)
class PackedBatch:
    """The rows of one optimizer step. Samples without a trainable token are in no row."""

    rows: tuple[PackedRow, ...]
    """One forward pass each."""
    num_samples: int
    """Samples with a trainable token."""
    num_sessions: int
    """All logical sessions."""
    num_empty_sessions: int
    """Sessions among them without a trainable token."""
    num_trainable: int
    """Trainable tokens."""


def pack_batch(
    samples: Sequence[TrainingSample],
    *,
    micro_batch_size: int = 1,
    max_tokens: int | None = None,
    reduction: Reduction = "session_mean",
    max_response_len: int | None = None,
    loss_masks: Masks | None = None,
    advantages: PerSample | None = None,
) -> PackedBatch:
    """Pack one global batch: in rows of `micro_batch_size` samples, in the order given, or with `max_tokens` in rows of
    as many samples as fit into that many tokens.

    `loss_masks` (one [T] per sample) replaces the samples' own masks where tokens are to be left out, and
    `advantages` for the credits of their responses.
    `max_response_len` (tokens) is needed by the reduction seq_mean_token_sum_norm. Raises ConfigError for an impossible
    setting and SilvaError for a sample that cannot be trained, naming its session; one above `max_tokens` is such
    (`leave_out_too_long` goes before).
    """
    check_reduction(reduction, max_response_len)
    check_row_size(micro_batch_size, max_tokens)
    masks = trainable_masks(samples, loss_masks)
    if advantages is None:
        advantages = [credits_of(sample) for sample in samples]
    tokens_of_session: dict[str, int] = {}
    for sample, mask_T in zip(samples, masks, strict=True):
        tokens_of_session[sample.session_id] = tokens_of_session.get(sample.session_id, 0) + int(mask_T.sum())
    num_trainable = sum(tokens_of_session.values())
    weight_of_session = {
        session_id: _token_weight(reduction, num, len(tokens_of_session), num_trainable, max_response_len)
        for session_id, num in tokens_of_session.items()
    }
    used = [i for i, mask_T in enumerate(masks) if mask_T.any()]
    if max_tokens is None:
        shares = [used[at : at + micro_batch_size] for at in range(0, len(used), micro_batch_size)]
    else:
        shares = _shares_by_tokens(samples, used, max_tokens)
    return PackedBatch(
        rows=tuple(_pack_row(samples, masks, advantages, weight_of_session, share) for share in shares),
        num_samples=len(used),
        num_sessions=len(tokens_of_session),
        num_empty_sessions=sum(num == 0 for num in tokens_of_session.values()),
        num_trainable=num_trainable,
    )


def split_sessions(samples: Sequence[TrainingSample], num_steps: int) -> list[list[int]]:
    """Indices of the samples of each of `num_steps` global batches.

    Sessions stay whole and in order of first appearance; the batches differ by at most one session. With fewer sessions
    than steps, some batches are empty.
    """
    if num_steps < 1:
        raise ConfigError(f"the number of optimizer steps per rollout is {num_steps}; it must be at least 1")
    rank: dict[str, int] = {}
    for sample in samples:
        rank.setdefault(sample.session_id, len(rank))
    batches: list[list[int]] = [[] for _ in range(num_steps)]
    for i, sample in enumerate(samples):
        batches[rank[sample.session_id] * num_steps // len(rank)].append(i)
    return batches


def leave_out_too_long(
    samples: Sequence[TrainingSample], max_tokens: int
) -> tuple[list[TrainingSample], list[TrainingSample]]:
    """The samples that rows of `max_tokens` tokens can hold, and those left out, which no denominator counts.

    A context without a trainable token needs no row, so it stays whatever its length; but where nothing else is left of
    a session that lost a sample, the whole session is left out.
    """
    too_long = [sample for sample in samples if len(sample.token_ids) > max_tokens and any(sample.loss_mask)]
    if not too_long:
        return list(samples), []
    gone = {id(sample) for sample in too_long}
    rest = [sample for sample in samples if id(sample) not in gone]
    lost = {sample.session_id for sample in too_long} - {s.session_id for s in rest if any(s.loss_mask)}
    return [sample for sample in rest if sample.session_id not in lost], too_long


def check_row_size(micro_batch_size: int, max_tokens: int | None) -> None:
    """Raise ConfigError for rows that could hold nothing."""
    if micro_batch_size < 1:
        raise ConfigError(f"micro_batch_size is {micro_batch_size} samples; it must be at least 1")
    if max_tokens is not None and max_tokens < 1:
        raise ConfigError(f"max_tokens is {max_tokens} tokens; it must be at least 1")


def check_reduction(reduction: str, max_response_len: int | None) -> None:
    """Raise ConfigError for a reduction that does not exist or lacks its divisor."""
    if reduction not in get_args(Reduction):
        raise ConfigError(
            f"loss reduction {reduction!r} does not exist; choose one of {', '.join(get_args(Reduction))}"
        )
    if reduction == "seq_mean_token_sum_norm" and (max_response_len is None or max_response_len < 1):
        raise ConfigError(
            f"loss reduction seq_mean_token_sum_norm divides by max_response_len, which is {max_response_len}"
        )


def _token_weight(
    reduction: Reduction, num_tokens: int, num_sessions: int, num_trainable: int, max_response_len: int | None
) -> float:
    """Loss weight of each trainable token of a session with `num_tokens` of them."""
    if num_tokens == 0:
        return 0.0
    if reduction == "per_token":
        return 1.0 / num_trainable
    if reduction == "session_mean":
        return 1.0 / (num_tokens * num_sessions)
    assert max_response_len is not None
    return 1.0 / (max_response_len * num_sessions)


def trainable_masks(samples: Sequence[TrainingSample], loss_masks: Masks | None) -> list[NDArray[np.bool_]]:
    """The mask of each sample as bools [T], after the checks that its training relies on.

    `loss_masks` replaces the samples' own. Raises SilvaError for a sample that cannot be trained.
    """
    if loss_masks is None:
        loss_masks = [sample.loss_mask for sample in samples]
    return [_trainable(sample, mask) for sample, mask in zip(samples, loss_masks, strict=True)]


def _trainable(sample: TrainingSample, loss_mask: Sequence[int]) -> NDArray[np.bool_]:
    name = f"sample {sample.session_id}/{sample.name}"
    mask_T = np.asarray(loss_mask) != 0
    if len(mask_T) != len(sample.token_ids):
        raise ValueError(f"{name}: a loss mask of {len(mask_T)} entries for {len(sample.token_ids)} tokens")
    if mask_T[0]:
        raise SilvaError(f"{name}: its first token is trainable, but no token comes before it to predict it from")
    if sample.credit is None:
        raise SilvaError(f"{name} has no credit; assign credit before training")
    if not np.isfinite(np.asarray(sample.logprobs, dtype=np.float64)[mask_T]).all():
        raise SilvaError(f"{name}: a recorded log-prob of a trainable token is not finite")
    return mask_T


def credits_of(sample: TrainingSample) -> NDArray[np.float64]:
    """The credit of each token of a sample [T]: that of its response, where responses have their own."""
    credits_T = np.full(len(sample.token_ids), sample.credit, dtype=np.float64)
    if sample.response_credits is not None:
        for span, credit in zip(sample.responses, sample.response_credits, strict=True):
            credits_T[span.start : span.start + span.length] = credit
    return credits_T


def _shares_by_tokens(samples: Sequence[TrainingSample], used: Sequence[int], max_tokens: int) -> list[list[int]]:
    """The samples of each row under a budget of tokens."""
    lengths = [len(samples[i].token_ids) for i in used]
    planned = plan(lengths, max_tokens)
    for at in planned.too_long:
        sample = samples[used[at]]
        raise SilvaError(
            f"sample {sample.session_id}/{sample.name} has {lengths[at]} tokens, a row holds {max_tokens}: leave it out"
        )
    return [[used[at] for at in row] for row in planned.ranks[0]]


def _pack_row(
    samples: Sequence[TrainingSample],
    masks: Sequence[NDArray[np.bool_]],
    advantages: PerSample,
    weight_of_session: dict[str, float],
    indices: Sequence[int],
) -> PackedRow:
    chosen = [samples[i] for i in indices]
    lengths = [len(sample.token_ids) for sample in chosen]
    starts = np.cumsum([0, *lengths[:-1]])
    places = [np.flatnonzero(masks[i]) for i in indices]
    counts = [len(place_N) for place_N in places]
    token_ids_T = np.concatenate([np.asarray(sample.token_ids, dtype=np.int64) for sample in chosen])
    at_N = np.concatenate([start + place_N for start, place_N in zip(starts, places, strict=True)])
    logprobs_T = np.concatenate([np.asarray(sample.logprobs, dtype=np.float64) for sample in chosen])
    return PackedRow(
        token_ids_T=token_ids_T,
        document_lengths=tuple(lengths),
        predict_N=at_N - 1,
        targets_N=token_ids_T[at_N],
        owners_N=np.repeat(np.asarray(indices, dtype=np.int64), counts),
        places_N=np.concatenate(places),
        rollout_logprobs_N=logprobs_T[at_N],
        advantages_N=np.concatenate(
            [np.asarray(advantages[i], dtype=np.float64)[p_N] for i, p_N in zip(indices, places, strict=True)]
        ),
        credits_N=np.repeat(np.asarray([sample.credit for sample in chosen], dtype=np.float64), counts),
        weights_N=np.repeat([weight_of_session[sample.session_id] for sample in chosen], counts),
    )
