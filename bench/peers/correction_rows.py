"""Off-policy corrections, and how token losses become one number."""

from __future__ import annotations

import functools
from typing import Any

from peers import ours, reasons
from peers.row import Other, Ours, Row, Same

F = functools.partial

ALL = ("even", "wide", "far")
HIGH, BAND = {"high": 2.0}, {"low": 0.5, "high": 2.0}
TOKEN_MASK = {"token_mask_is_threshold_low": 0.5, "token_mask_is_threshold_high": 2.0}
PRODUCT = {"sequence_mask_metric": "product", "product_mask_low": 0.5, "product_mask_high": 2.0}
SEQUENCE = {"tis_ratio_type": "sequence", "sequence_tis_ratio_clip_high": 2.0}
TOKEN = {"tis_ratio_type": "token", "token_tis_ratio_clip_high": 2.0}
GEOMETRIC = {"sequence_mask_metric": "geometric", "geo_mask_low": 0.5, "geo_mask_high": 2.0}
BEHIND = {"sequence_mask_metric": "geometric", "geo_mask_low": 0.9999, "geo_mask_high": 1e12}
WEIGHTS = "importance_weights"
CORRECTIONS = [
    Row(
        "TIS",
        "token, truncate",
        ALL,
        F(ours.weights, level="token", mode="truncate", **HIGH),
        Same(WEIGHTS, {"level": "token", "threshold": 2.0}),
        Same(WEIGHTS, TOKEN, ("weights",)),
        Same(WEIGHTS, {"mode": "token_truncate", **HIGH}),
    ),
    Row(
        "TIS",
        "token, mask",
        ALL,
        F(ours.weights, level="token", mode="mask", **BAND),
        Same(WEIGHTS, {"level": "token", "threshold": "0.5_2.0"}),
        Same(WEIGHTS, TOKEN | TOKEN_MASK),
        Same(WEIGHTS, {"mode": "token_mask", **BAND}),
    ),
    Row(
        "TIS",
        "sequence, truncate",
        ALL,
        F(ours.weights, level="sequence", mode="truncate", **HIGH),
        Same(WEIGHTS, {"level": "sequence", "threshold": 2.0}),
        Same(WEIGHTS, SEQUENCE, ("weights",)),
        Same(WEIGHTS, {"mode": "sequence_truncate", **HIGH}),
    ),
    Row(
        "TIS",
        "sequence, mask",
        ALL,
        F(ours.weights, level="sequence", mode="mask", **BAND),
        Same(WEIGHTS, {"level": "sequence", "threshold": "0.5_2.0"}),
        Same(WEIGHTS, SEQUENCE | PRODUCT),
        Same(WEIGHTS, {"mode": "sequence_mask", **BAND}),
    ),
    Row("TIS", "geometric, truncate", ALL, F(ours.weights, level="geometric", mode="truncate", **HIGH)),
    Row(
        "TIS",
        "geometric, mask: who stays",
        (*ALL, "off"),
        F(ours.weights, level="geometric", mode="mask", **BAND),
        Same("rejection", {"mode": "seq_mean_k1", "threshold": "0.5_2.0"}),
        Same(WEIGHTS, GEOMETRIC, ("kept",)),
    ),
    Row(
        "TIS",
        "geometric, mask: weights of who stays",
        ("even",),
        F(ours.weights, level="geometric", mode="mask", **BAND),
        skyrl=Other(WEIGHTS, GEOMETRIC, "mask_only", F(reasons.geometric_kept, **BAND), ("weights",)),
    ),
    Row(
        "TIS",
        "geometric, mask, band 0.5 to 3: who stays",
        ("off",),
        F(ours.weights, level="geometric", mode="mask", low=0.5, high=3.0),
        Other(
            "rejection",
            {"mode": "seq_mean_k1", "threshold": "0.5_3.0"},
            "k1_direction",
            F(ours.weights, level="geometric", mode="mask", low=1 / 3, high=2.0),
            ("kept",),
        ),
        Same(WEIGHTS, GEOMETRIC | {"geo_mask_high": 3.0}, ("kept",)),
    ),
    Row(
        "OPSM",
        "who stays",
        ("even", "wide", "off"),
        F(ours.opsm, delta=1e-4),
        trl=Same("off_policy_mask", {"delta": 1e-4}),
    ),
    Row(
        "OPSM",
        "nearest kin",
        ("off",),
        F(ours.opsm, delta=1e-4),
        Other(
            "rejection",
            {"mode": "seq_mean_k1", "threshold": "1e-9_1.0001", "policy": "lp"},
            "no_sign",
            F(reasons.drifted_dropped, delta=1e-4),
        ),
        Other(WEIGHTS, BEHIND, "no_sign", F(reasons.drifted_dropped, delta=1e-4), ("kept",)),
    ),
]


def of(reduction: str, **options: Any) -> Ours:
    return F(ours.reduced, reduction=reduction, **options)


MICRO = {"micro_batch_size": 4}
ONE = {"micro_batch_size": 1}
VERL = {"global_info": True, **MICRO}
LOCAL = {"global_info": False}
TOGETHER = ["s", "s"]
JOB = "reduction"
REDUCTIONS = [
    Row(
        "reduction",
        "per_token",
        ("even", "wide"),
        of("per_token"),
        Same(JOB, {"mode": "token-mean", **VERL}),
        Same(JOB, {"mode": "token_mean"}),
        Same(JOB, {"mode": "dapo", **MICRO}),
    ),
    Row(
        "reduction",
        "session_mean, one context a session",
        ("even", "wide"),
        of("session_mean"),
        Same(JOB, {"mode": "seq-mean-token-mean", **VERL}),
        Same(JOB, {"mode": "sequence_mean"}),
        Same(JOB, {"mode": "grpo", **MICRO}),
    ),
    Row(
        "reduction",
        "seq_mean_token_sum_norm, 32",
        ("even", "wide"),
        of("seq_mean_token_sum_norm", max_response_len=32),
        Same(JOB, {"mode": "seq-mean-token-sum-norm", "loss_scale_factor": 32, **VERL}),
        Same(JOB, {"mode": "seq_mean_token_sum_norm", "max_seq_len": 32}),
        Same(JOB, {"mode": "dr_grpo", "max_completion_length": 32, **MICRO}),
    ),
    Row(
        "reduction",
        "per_token over micro-batches of 9 and 1 tokens",
        ("two lengths",),
        of("per_token"),
        Other(JOB, {"mode": "token-mean", **LOCAL, **ONE}, "micro_batch_mean", reasons.micro_batch_mean),
        Other(JOB, {"mode": "token_mean_legacy", **ONE}, "micro_batch_mean", reasons.micro_batch_mean),
        Other(JOB, {"mode": "bnpo", **ONE}, "micro_batch_mean", reasons.micro_batch_mean),
    ),
    Row(
        "reduction",
        "KL term beside per_token, 9 and 1 tokens",
        ("two lengths",),
        of("per_token"),
        skyrl=Other("side_term", {"term": "kl", **ONE}, "side_terms", reasons.micro_batch_mean),
    ),
    Row(
        "reduction",
        "entropy term beside session_mean, 9 and 1 tokens, one micro-batch",
        ("two lengths",),
        of("session_mean"),
        skyrl=Other("side_term", {"term": "entropy", "micro_batch_size": 2}, "side_terms", of("per_token")),
    ),
    Row(
        "reduction",
        "session_mean, a session without a trainable token",
        ("no token",),
        of("session_mean"),
        Same(JOB, {"mode": "seq-mean-token-mean", "global_info": True}),
        Same(JOB, {"mode": "sequence_mean"}),
        Same(JOB, {"mode": "grpo"}),
    ),
    Row(
        "reduction",
        "the same without numbers of the global batch",
        ("no token",),
        of("session_mean"),
        Other(JOB, {"mode": "seq-mean-token-mean", **LOCAL}, "empty_not_counted", reasons.only_trainable),
    ),
    Row(
        "reduction",
        "session_mean, two contexts of one session",
        ("two lengths",),
        of("session_mean", sessions=TOGETHER),
        Other(JOB, {"mode": "seq-mean-token-mean", **LOCAL}, "no_sessions", of("session_mean")),
        Other(JOB, {"mode": "sequence_mean"}, "no_sessions", of("session_mean")),
        Other(JOB, {"mode": "grpo"}, "no_sessions", of("session_mean")),
    ),
    Row(
        "reduction",
        "NaN at a token that is not trained",
        ("hole",),
        of("per_token"),
        Same(JOB, {"mode": "token-mean", **LOCAL}),
        Other(JOB, {"mode": "token_mean"}, "mask_multiplies", None),
        Other(JOB, {"mode": "dapo"}, "mask_multiplies", None),
    ),
    Row(
        "reduction",
        "NaN at a token that is not trained, session_mean",
        ("hole",),
        of("session_mean"),
        Other(JOB, {"mode": "seq-mean-token-mean", **LOCAL}, "mask_multiplies", None),
    ),
]
