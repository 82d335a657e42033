"""Losses of policy and critic, KL estimates, and what is computed from logits."""

from __future__ import annotations

import functools

from peers import ours, reasons
from peers.row import ABSENT, Other, Row, Same

F = functools.partial

USUAL, ALL = ("even", "wide"), ("even", "wide", "far")
DUAL = {"dual_clip": 3.0}
WIDE_CLIP = {"eps": 0.2, "eps_high": 0.28}
SEQUENCE = {"importance_sampling_level": "sequence"}
LOSSES = [
    Row(
        "ppo_clip",
        "loss, gradient, clipfrac",
        USUAL,
        F(ours.policy_loss, loss="grpo", **WIDE_CLIP),
        Same("loss/vanilla", WIDE_CLIP),
        Same("loss/regular", WIDE_CLIP),
        Same("loss/dapo", WIDE_CLIP),
    ),
    Row(
        "ppo_clip",
        "log-differences beyond 20",
        ("far",),
        F(ours.policy_loss, loss="grpo"),
        Same("loss/vanilla", parts=("loss", "grad", "clipfrac")),
        Same("loss/regular"),
        Other("loss/dapo", {}, "no_clamp", F(reasons.ppo_no_clamp), parts=("loss", "grad")),
    ),
    Row(
        "ppo_clip",
        "dual clip off",
        ("wide",),
        F(ours.policy_loss, loss="grpo"),
        Other("loss/vanilla", DUAL, "always_dual", F(ours.policy_loss, loss="grpo", **DUAL), ("loss", "grad")),
    ),
    Row(
        "ppo_clip",
        "dual clip, c = 3",
        ALL,
        F(ours.policy_loss, loss="grpo", **DUAL),
        Same("loss/vanilla", DUAL, ("loss", "grad")),
        Same("loss/dual_clip", DUAL, ("loss", "grad")),
        Same("loss/dapo", {"delta": 3.0}, ("loss", "grad")),
    ),
    Row(
        "gspo",
        "loss, gradient",
        USUAL,
        F(ours.policy_loss, loss="gspo"),
        Same("loss/gspo"),
        Same("loss/gspo"),
        Same("loss/dapo", SEQUENCE, ("loss", "grad")),
    ),
    Row(
        "gspo",
        "mean log-ratio 12",
        ("drifted",),
        F(ours.policy_loss, loss="gspo"),
        Other("loss/gspo", {}, "clamp_10", reasons.gspo_clamp_10, ("loss", "grad")),
        Other("loss/gspo", {}, "clamp_10", reasons.gspo_clamp_10, ("loss", "grad")),
        Same("loss/dapo", SEQUENCE, ("loss", "grad")),
    ),
    Row(
        "cispo",
        "loss, gradient, clipfrac",
        ALL,
        F(ours.policy_loss, loss="cispo"),
        Same("loss/cispo", parts=("loss", "grad", "clipfrac")),
        Same("loss/cispo"),
        Other("loss/cispo", {"eps_high": 1.2}, "upper_only", reasons.cispo_upper, ("loss", "grad"), "even"),
    ),
    Row(
        "sapo",
        "loss, gradient",
        ALL,
        F(ours.policy_loss, loss="sapo"),
        Same("loss/sapo", parts=("loss", "grad")),
        Same("loss/sapo"),
        Same("loss/sapo"),
    ),
    Row(
        "rloo",
        "REINFORCE loss, gradient",
        ALL,
        F(ours.policy_loss, loss="rloo"),
        Same("loss/gpg"),
    ),
    Row(
        "rloo",
        "gradient on policy",
        ("even",),
        F(ours.policy_loss, loss="rloo"),
        trl=Same("loss/rloo", {"on_policy": True}),
    ),
    Row(
        "rloo",
        "gradient off policy",
        ("even",),
        F(ours.policy_loss, loss="rloo"),
        trl=Other("loss/rloo", {}, "sequence_ratio", reasons.rloo_sequence_ratio),
    ),
    Row(
        "ppo",
        "value loss, gradient",
        USUAL,
        F(ours.critic_loss, clip=0.2),
        Same("value_loss", {"clip": 0.2}, ("loss", "grad")),
        Same("value_loss", {"clip": 0.2}, ("loss", "grad")),
    ),
    Row(
        "ppo_kl",
        "mean of old - new",
        USUAL,
        F(ours.policy_loss, loss="grpo"),
        Same("loss/vanilla", {}, ("ppo_kl",)),
    ),
]

KL = [
    Row(
        "KL",
        f"{kind}, gradient",
        ALL,
        F(ours.kl, kind=kind),
        Same("kl", {"kind": kind}),
        ABSENT if kind == "low_var_kl" else Same("kl", {"kind": kind}),
        Same("kl", case="even") if kind == "k3" else ABSENT,
    )
    for kind in ("k1", "k2", "k3", "low_var_kl")
]

KL += [
    Row(
        "KL",
        "k3 above 10",
        ("wide",),
        F(ours.kl, kind="k3"),
        Same("kl", {"kind": "k3"}),
        Same("kl", {"kind": "k3"}),
        Other("kl", {}, "no_kl_clamp", reasons.k3_no_clamp),
    ),
    Row(
        "KL",
        "k3, unbiased form",
        ("even",),
        F(ours.kl, kind="k3", unbiased=True),
        Other("kl", {"kind": "k3+"}, "k2_gradient", reasons.k3_k2_gradient),
        trl=Same("kl", {"use_bias_correction_kl": True}),
    ),
]
LOGITS = [
    Row(
        "entropy",
        "of logits, gradient",
        ("logits",),
        ours.entropy,
        *(Same("entropy") for _ in range(3)),
    ),
    Row(
        "entropy",
        "ids ruled out (logit -inf)",
        ("ruled out",),
        ours.entropy,
        *(Other("entropy", {}, "inf_times_0", None) for _ in range(3)),
    ),
    Row(
        "log-prob",
        "of logits, gradient",
        ("logits", "ruled out"),
        ours.logprobs,
        *(Same("logprobs") for _ in range(3)),
    ),
]
