"""Batched sampling whose randomness is a pure function of (seed, absolute position, token id).

A row's token is the argmax of log-prob plus Gumbel noise (Gumbel-max, Maddison et al. 2014). It comes from a hash
of the row's key and the token id, not from a stream, so that batch mates, aborts and resumes cannot shift it: the same
seed at the same position of the same history samples the same id, unless two candidates tie within the rounding
of the logits (matrix kernels may round differently for other batch shapes).
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

_MASK64 = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15
_MIX1 = 0xBF58476D1CE4E5B9
_MIX2 = 0x94D049BB133111EB
_BLOCK_ELEMENTS = 1 << 18  # Rows are handled in blocks that stay in the cache of one core.


def seed_base(*parts: object) -> int:
    """A 64-bit base of the noise from any values, such as a request's seed."""
    text = "\x1f".join(str(part) for part in parts)
    return int.from_bytes(hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).digest(), "big")


def position_key(base: int, position: int) -> int:
    """The noise key of one position, as a signed 64-bit number (splitmix64, Steele et al. 2014)."""
    z = (base + (position + 1) * _GOLDEN) & _MASK64
    z = ((z ^ (z >> 30)) * _MIX1) & _MASK64
    z = ((z ^ (z >> 27)) * _MIX2) & _MASK64
    return _signed(z ^ (z >> 31))


@dataclass(frozen=True, slots=True)
class RowSampling:
    """How one row samples."""

    key: int
    """The noise key of its position, a signed 64-bit number."""
    temperature: float
    """0 is argmax."""
    top_p: float
    """1 is off."""
    top_k: int
    """-1 is off."""


@dataclass(frozen=True, slots=True)
class Sampled:
    """One entry per row. A row whose logits are not finite has a log-prob that is not finite."""

    ids: list[int]
    """The sampled ids."""
    logprobs: list[float]
    """Their log-probs under softmax(logits / T) before the filters (T = 1 for temperature 0)."""
    kept_mass: list[float]
    """The probability under the same softmax that the filters kept."""


def sample(logits: Tensor, rows: Sequence[RowSampling]) -> Sampled:
    """Sample one id for each row of float32 `logits` [rows, vocabulary].

    Filters apply after the temperature: top_k first, then the smallest set of the most likely remaining ids whose share
    of the remaining mass reaches top_p. Temperature 0 takes the most likely id; filters do not concern it.
    """
    size = max(1, _BLOCK_ELEMENTS // logits.shape[1]) if logits.device.type == "cpu" else len(rows)
    ids: list[int] = []
    logprobs: list[float] = []
    kept: list[float] = []
    for at in range(0, len(rows), size):
        block = _sample_block(logits[at : at + size], rows[at : at + size])
        ids += block.ids
        logprobs += block.logprobs
        kept += block.kept_mass
    return Sampled(ids, logprobs, kept)


def _sample_block(logits: Tensor, rows: Sequence[RowSampling]) -> Sampled:
    device, vocab = logits.device, logits.shape[1]
    temperatures = [row.temperature or 1.0 for row in rows]
    if any(t != 1.0 for t in temperatures):
        logits = logits / torch.tensor(temperatures, device=device)[:, None]
    logprobs = torch.log_softmax(logits, -1)
    scores = logprobs
    kept = [1.0] * len(rows)
    filtered = [i for i, r in enumerate(rows) if r.temperature > 0 and (r.top_p < 1.0 or 0 < r.top_k < vocab)]
    if filtered:
        index = torch.tensor(filtered, device=device)
        left, mass = _filter(logprobs[index], [rows[i] for i in filtered])
        scores = scores.clone().index_copy_(0, index, left)
        for i, value in zip(filtered, mass, strict=True):
            kept[i] = value
    noisy = [i for i, r in enumerate(rows) if r.temperature > 0]
    if len(noisy) == len(rows):
        scores = scores - log_exponential_noise([r.key for r in rows], vocab, device)
    elif noisy:
        index = torch.tensor(noisy, device=device)
        noise = log_exponential_noise([rows[i].key for i in noisy], vocab, device)
        scores = scores.index_copy(0, index, scores[index] - noise)
    chosen = scores.argmax(-1, keepdim=True)
    # Rounding may leave a log-prob a hair above 0; this order of arguments keeps a NaN.
    chosen_logprobs = [min(value, 0.0) for value in logprobs.gather(-1, chosen)[:, 0].tolist()]
    return Sampled(chosen[:, 0].tolist(), chosen_logprobs, kept)


def _filter(logprobs: Tensor, rows: Sequence[RowSampling]) -> tuple[Tensor, list[float]]:
    """`logprobs` with -inf where top_k and top_p exclude an id, and the mass that stays per row."""
    device, vocab = logprobs.device, logprobs.shape[1]
    ordered, order = torch.sort(logprobs, dim=-1, descending=True, stable=True)
    mass = ordered.double().exp()
    top_k = torch.tensor([min(r.top_k, vocab) if r.top_k > 0 else vocab for r in rows], device=device)
    mass.masked_fill_(torch.arange(vocab, device=device) >= top_k[:, None], 0.0)
    before = mass.cumsum(-1) - mass
    top_p = torch.tensor([r.top_p for r in rows], dtype=torch.float64, device=device)
    # top_p 1 keeps all that top_k kept, whatever the sums round to.
    limit = torch.where(top_p < 1.0, top_p * mass.sum(-1), math.inf)
    drop = (before >= limit[:, None]) | (mass == 0.0)
    drop[:, 0] = False
    kept = mass.masked_fill(drop, 0.0).sum(-1).clamp(max=1.0)
    ordered = ordered.masked_fill(drop, -math.inf)
    return torch.empty_like(logprobs).scatter_(-1, order, ordered), kept.tolist()


def log_exponential_noise(keys: Sequence[int], vocab: int, device: torch.device) -> Tensor:
    """Log of standard exponential variates [keys, vocab], float32; its negative is standard Gumbel noise.

    Variate i of a key is -log(1 - u) with u from the upper 32 bits of splitmix64 at counter i.
    """
    counters = torch.arange(1, vocab + 1, device=device) * _signed(_GOLDEN)
    z = torch.tensor(list(keys), dtype=torch.int64, device=device)[:, None] + counters
    z = _xor_shift(z, 30).mul_(_signed(_MIX1))
    z = _xor_shift(z, 27).mul_(_signed(_MIX2))
    # The last xor-shift of splitmix64 leaves the upper 32 bits as they are, except for the lowest one.
    u = (z >> 32).bitwise_and_(0xFFFFFFFF).to(torch.float32)
    # float32 may round u up to 1; its noise would be infinite and exclude an id that is the only one left.
    return u.add_(0.5).mul_(-(2.0**-32)).clamp_(min=-1 + 2.0**-24).log1p_().neg_().log_()


def _xor_shift(z: Tensor, bits: int) -> Tensor:
    """z ^ (z >>> bits), in place. torch shifts copy the sign, so the copied bits are cut off."""
    return z.bitwise_xor_((z >> bits).bitwise_and_((1 << (64 - bits)) - 1))


def _signed(value: int) -> int:
    return value - (1 << 64) if value >= 1 << 63 else value
