"""Credit of sessions, and advantages of tokens."""

from __future__ import annotations

import functools

from peers import ours, reasons
from peers.row import Other, Refuses, Row, Same

F = functools.partial

GROUPS, EVEN = ("even", "uneven"), {"group_size": 4}
SINGLE = Same("advantages", {"group_size": 1}, case="single")
NO_STD = {"norm_adv_by_std_in_grpo": False}
CREDITS = [
    Row(
        "grpo",
        "credit",
        GROUPS,
        F(ours.credits, function="grpo"),
        Same("advantage/grpo"),
        Same("advantage/grpo"),
        Other("advantages", EVEN, "std_epsilon", reasons.grpo_epsilon(1e-4), case="even"),
    ),
    Row(
        "grpo",
        "credit, group of one",
        ("alone",),
        F(ours.credits, function="grpo"),
        Other("advantage/grpo", {}, "group_of_one", reasons.grpo_alone),
        Other("advantage/grpo", {}, "group_of_one", reasons.grpo_alone),
        SINGLE,
    ),
    Row(
        "grpo",
        "credit, equal rewards",
        ("equal",),
        F(ours.credits, function="grpo"),
        Same("advantage/grpo"),
        Same("advantage/grpo"),
        Same("advantages", {"group_size": 8}),
    ),
    Row(
        "grpo",
        "credit, equal rewards, peers in float32",
        ("equal",),
        F(ours.credits, function="grpo"),
        Other("advantage/grpo", {"dtype": "float32"}, "float32", F(reasons.grpo_float32, epsilon=1e-6)),
        Other("advantage/grpo", {"dtype": "float32"}, "float32", F(reasons.grpo_float32, epsilon=1e-6)),
        Other("advantages", {"group_size": 8, "dtype": "float32"}, "float32", F(reasons.grpo_float32, epsilon=1e-4)),
    ),
    Row(
        "dr.grpo",
        "credit",
        GROUPS,
        F(ours.credits, function="reinforce_plus_plus_baseline"),
        Same("advantage/grpo", NO_STD),
        Same("advantage/grpo", {"grpo_norm_by_std": False}),
        Same("advantages", EVEN | {"scale": "none"}, case="even"),
    ),
    Row(
        "rloo",
        "credit",
        GROUPS,
        F(ours.credits, function="rloo"),
        Same("advantage/rloo"),
        Same("advantage/rloo"),
        Same("advantages_rloo", EVEN, case="even"),
    ),
    Row(
        "rloo",
        "credit, vectorised",
        GROUPS,
        F(ours.credits, function="rloo"),
        Same("advantage/rloo_vectorized"),
    ),
    Row(
        "rloo",
        "credit, group of one",
        ("alone",),
        F(ours.credits, function="rloo"),
        Other("advantage/rloo", {}, "group_of_one", reasons.rloo_alone),
        Same("advantage/rloo"),
        Same("advantages_rloo", {"group_size": 1}, case="single"),
    ),
    Row(
        "rloo",
        "credit, vectorised, group of one",
        ("alone",),
        F(ours.credits, function="rloo"),
        Same("advantage/rloo_vectorized"),
    ),
    Row(
        "rloo",
        "credit, whitened",
        ("even",),
        F(ours.whitened_credits, function="rloo"),
        trl=Other("advantages_rloo", EVEN | {"normalize": True}, "whitens_sequences", reasons.rloo_normalised),
    ),
    Row(
        "reinforce_plus_plus_baseline",
        "credit, whitened",
        GROUPS,
        F(ours.whitened_credits, function="reinforce_plus_plus_baseline"),
        Same("advantage/reinforce_plus_plus_baseline"),
    ),
    Row(
        "reinforce_plus_plus_baseline",
        "credit, group of one",
        ("alone",),
        F(ours.whitened_credits, function="reinforce_plus_plus_baseline"),
        Other("advantage/reinforce_plus_plus_baseline", {}, "group_of_one", reasons.baseline_alone),
    ),
    Row(
        "maxrl",
        "credit",
        ("binary",),
        F(ours.credits, function="maxrl"),
        skyrl=Other("advantage/maxrl", {}, "mean_epsilon", reasons.maxrl_epsilon),
    ),
    Row(
        "maxrl",
        "credit, mean of the group below 0",
        ("below 0",),
        F(ours.credits, function="maxrl"),
        skyrl=Other("advantage/maxrl", {}, "mean_below_0", reasons.maxrl_epsilon),
    ),
    Row(
        "maxrl",
        "credit, mean of the group 0",
        ("mean 0",),
        F(ours.credits, function="maxrl"),
        skyrl=Other("advantage/maxrl", {}, "mean_below_0", reasons.maxrl_epsilon),
    ),
    Row(
        "maxrl",
        "credit, group of one",
        ("alone",),
        F(ours.credits, function="maxrl"),
        skyrl=Other("advantage/maxrl", {}, "group_of_one", reasons.maxrl_alone),
    ),
]

SHAPED = {"gamma": 0.9, "kl_coef": 0.1}
CRITIC = SHAPED | {"lambd": 0.95}
RETURNS = F(ours.token_advantages, kind="returns", **SHAPED)
GAE = F(ours.token_advantages, kind="gae", **CRITIC)
TOKEN_ADVANTAGES = [
    Row(
        "reinforce_plus_plus",
        "returns and whitening, no tool tokens",
        ("no tools",),
        RETURNS,
        Same("advantage/reinforce_plus_plus", SHAPED),
        Same("advantage/reinforce++", SHAPED),
    ),
    Row(
        "reinforce_plus_plus",
        "returns and whitening, tool tokens",
        GROUPS,
        RETURNS,
        Same("advantage/reinforce_plus_plus", SHAPED),
        Other("advantage/reinforce++", SHAPED, "tool_tokens", F(reasons.returns_over_response, **SHAPED)),
    ),
    Row(
        "reinforce_plus_plus",
        "returns, 2 + 2 (tool) + 2 tokens, reward 1, gamma 0.9",
        ("tool",),
        F(ours.token_advantages, kind="returns", gamma=0.9),
        Same("advantage/reinforce_plus_plus", {"gamma": 0.9, "kl_coef": 0.0}),
        Other(
            "advantage/reinforce++",
            {"gamma": 0.9},
            "tool_tokens",
            F(reasons.returns_over_response, gamma=0.9, kl_coef=0.0),
        ),
    ),
    Row(
        "ppo",
        "GAE, returns and whitening, no tool tokens",
        ("no tools",),
        GAE,
        Same("advantage/gae", CRITIC),
        Same("advantage/gae", CRITIC),
    ),
    Row(
        "ppo",
        "GAE, returns and whitening, tool tokens",
        GROUPS,
        GAE,
        Same("advantage/gae", CRITIC),
        Other("advantage/gae", CRITIC, "tool_values", F(reasons.gae_over_all, **CRITIC)),
    ),
    Row(
        "ppo",
        "GAE, padding behind the response",
        ("padded",),
        GAE,
        Same("advantage/gae", CRITIC),
        Other("advantage/gae", CRITIC, "padding_values", F(reasons.gae_over_all, **CRITIC)),
    ),
    Row("whitening", "token advantages", GROUPS, ours.whitened, Same("whiten"), Same("whiten")),
    Row(
        "whitening",
        "all equal",
        ("constant",),
        ours.whitened,
        Other("whiten", {}, "equal_values", reasons.whitened_equal),
        Same("whiten"),
    ),
    Row(
        "whitening",
        "one token",
        ("one token",),
        ours.whitened,
        Refuses("whiten", {}, "one_token"),
        Refuses("whiten", {}, "one_token"),
    ),
    Row(
        "whitening",
        "in SkyRL's trainer",
        ("even",),
        ours.whitened,
        skyrl=Other("batch_normalize", {}, "mean_with_padding", reasons.batch_normalised),
    ),
]
