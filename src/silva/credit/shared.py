"""Turns that several contexts of a session hold: each is trained once, with the mean of their credits."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Literal

from silva.types import ResponseSpan, SharedPrefix, TrainingSample

CreditShare = Literal["shared", "split"]
"""What each context gets of its session's credit: all of it, or its share of the session's sampled tokens."""
ContextCredit = float | tuple[float, ...]
"""What a context is given: one number, or one for each of its responses."""
ResponseKey = tuple[str, int]
"""A response: its session and its node there."""


def spread_credits(
    samples: Sequence[TrainingSample], credits: Sequence[ContextCredit], *, shared_prefix: SharedPrefix = "once"
) -> tuple[TrainingSample, ...]:
    """The samples with their credits (one a sample, in the same order), down to the responses.

    `samples` are all exported contexts of their sessions. Under `once` a response that several contexts hold gets the
    mean of what each of them gives it, whatever their order and whichever of them trains it; under `each` every
    context trains it with its own. `credit` is the number that the context was given (of one number a response: their
    mean over its sampled tokens); `response_credits` says more only where a response differs from it.
    """
    own = [_each_response(sample, credit) for sample, credit in zip(samples, credits, strict=True)]
    if shared_prefix == "once":
        own = _means(samples, own)
    return tuple(
        _with_credit(sample, _base(sample, credit), each)
        for sample, credit, each in zip(samples, credits, own, strict=True)
    )


def train_shared(samples: Sequence[TrainingSample], shared_prefix: SharedPrefix) -> tuple[TrainingSample, ...]:
    """The same contexts with every turn trained as `shared_prefix` says: by the first that contains it, or by each.

    For samples that were recorded under the other rule. A turn that none of them trains stays untrained.
    """
    source: dict[ResponseKey, tuple[TrainingSample, ResponseSpan]] = {}
    for sample in samples:
        for span in sample.responses:
            if any(sample.loss_mask[span.start : span.start + span.length]):
                source.setdefault((sample.session_id, span.node_id), (sample, span))
    taken: set[ResponseKey] = set()
    shared: list[TrainingSample] = []
    for sample in samples:
        num = len(sample.token_ids)
        mask, logprobs, kept = [0] * num, [0.0] * num, [1.0] * num
        for span in sample.responses:
            key = (sample.session_id, span.node_id)
            if key not in source or (shared_prefix == "once" and key in taken):
                continue
            taken.add(key)
            (other, there), length = source[key], span.length
            own, recorded = slice(span.start, span.start + length), slice(there.start, there.start + length)
            mask[own] = other.loss_mask[recorded]
            logprobs[own] = other.logprobs[recorded]
            kept[own] = other.kept_mass[recorded]
        same = mask == sample.loss_mask
        shared.append(sample if same else replace(sample, loss_mask=mask, logprobs=logprobs, kept_mass=kept))
    return tuple(shared)


def by_session(samples: Iterable[TrainingSample]) -> list[list[TrainingSample]]:
    """The contexts of each session; sessions in the order in which they appear."""
    found: dict[str, list[TrainingSample]] = {}
    for sample in samples:
        found.setdefault(sample.session_id, []).append(sample)
    return list(found.values())


def holders(samples: Iterable[TrainingSample]) -> Counter[ResponseKey]:
    """How many of these contexts hold each response."""
    return Counter((sample.session_id, span.node_id) for sample in samples for span in sample.responses)


def num_shared_responses(samples: Iterable[TrainingSample]) -> int:
    """Responses that more than one of these contexts contains."""
    return sum(count > 1 for count in holders(samples).values())


def _each_response(sample: TrainingSample, credit: ContextCredit) -> tuple[float, ...]:
    if not isinstance(credit, tuple):
        return (credit,) * len(sample.responses)
    assert len(credit) == len(sample.responses), f"{len(credit)} credits for {len(sample.responses)} responses"
    return credit


def _means(samples: Sequence[TrainingSample], own: Sequence[tuple[float, ...]]) -> list[tuple[float, ...]]:
    given: dict[ResponseKey, list[float]] = {}
    for sample, each in zip(samples, own, strict=True):
        for span, credit in zip(sample.responses, each, strict=True):
            given.setdefault((sample.session_id, span.node_id), []).append(credit)
    means = {key: _mean(values) for key, values in given.items()}
    return [tuple(means[sample.session_id, span.node_id] for span in sample.responses) for sample in samples]


def _mean(values: Sequence[float]) -> float:
    # equal credits stay what they are, to the last bit; fsum knows no order
    return values[0] if min(values) == max(values) else math.fsum(values) / len(values)


def _base(sample: TrainingSample, credit: ContextCredit) -> float:
    if not isinstance(credit, tuple):
        return credit
    if min(credit) == max(credit):
        return credit[0]
    lengths = [span.length for span in sample.responses]
    return math.fsum(c * n for c, n in zip(credit, lengths, strict=True)) / sum(lengths)


def _with_credit(sample: TrainingSample, credit: float, each: tuple[float, ...]) -> TrainingSample:
    plain = all(value == credit for value in each)
    return replace(sample, credit=credit, response_credits=None if plain else each)
