"""Options of algorithm and training. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from silva.train.algorithms import ALGORITHMS
from silva.types import opt

KlType = Literal["k1", "k2", "k3", "low_var_kl"]
TisLevel = Literal["token", "sequence", "geometric"]
TisMode = Literal["truncate", "mask"]
Reduction = Literal["session_mean", "per_token", "seq_mean_token_sum_norm"]
"""How token losses become one number.

session_mean: mean over a session's trainable tokens (all its samples together), then over sessions. per_token: mean
over all trainable tokens. seq_mean_token_sum_norm: sum over a session's trainable tokens divided by the maximum
response length, then mean over sessions (Dr. GRPO).
"""
ScheduleKind = Literal["constant", "cosine"]


@dataclass(frozen=True, kw_only=True)
class AlgorithmOptions:
    """Which algorithm, and its settings that are no numbers."""

    advantage_estimator: str = opt("algorithm", "grpo", choices=tuple(ALGORITHMS))
    """The algorithm: how rewards become credit and advantages, and its policy loss (docs/algorithms.md)."""
    disable_grpo_std_normalization: bool = opt("algorithm", False)
    """Centre rewards in their group without dividing by their spread."""
    normalize_advantages: bool = opt("algorithm", False)
    """Whiten the advantages over all trainable tokens of the global batch."""


@dataclass(frozen=True, kw_only=True)
class ClipOptions:
    """The clip range of the policy ratio: [1 - eps_clip, 1 + eps_clip_high]."""

    eps_clip: float = opt("algorithm", 0.2, above=0, high=1)
    """Lower clip distance of the policy ratio."""
    eps_clip_high: float | None = opt("algorithm", None, above=0)
    """Upper clip distance (default: --eps-clip)."""
    eps_clip_c: float | None = opt("algorithm", None, above=1)
    """Dual clip bound for negative advantages, above 1 (default: off)."""


@dataclass(frozen=True, kw_only=True)
class ReturnOptions:
    """From credit to the advantages of tokens."""

    gamma: float = opt("algorithm", 1.0, low=0, high=1)
    """Discount from one trainable token to the next in returns and GAE."""
    lambd: float = opt("algorithm", 1.0, low=0, high=1)
    """Lambda of GAE: 1 trusts the outcome, 0 the critic."""
    kl_coef: float = opt("algorithm", 0.0, low=0)
    """Weight of the KL to the reference model in the reward of each token."""


@dataclass(frozen=True, kw_only=True)
class KlOptions:
    """The KL to the reference model as a term of the loss."""

    use_kl_loss: bool = opt("algorithm", False)
    """Add the KL to the reference model to the loss; with --kl-loss-coef 0 it is only measured."""
    kl_loss_coef: float = opt("algorithm", 0.0, low=0)
    """Weight of the KL to the reference model in the loss."""
    kl_loss_type: KlType = opt("algorithm", "k1")
    """Per-token estimator of the KL in the loss."""
    use_unbiased_kl: bool = opt("algorithm", False)
    """Multiply the KL in the loss by the policy ratio, with its gradient."""


@dataclass(frozen=True, kw_only=True)
class TisOptions:
    """Truncated importance sampling: weights for tokens that trainer and engine find unequally likely."""

    use_tis: bool = opt("algorithm", False)
    """Weight tokens by their probability under the trainer over that under the engine."""
    tis_clip: float = opt("algorithm", 2.0, above=0)
    """Upper end of the band of TIS weights."""
    tis_clip_low: float = opt("algorithm", 0.0, low=0)
    """Lower end of the band of TIS weights."""
    tis_level: TisLevel = opt("algorithm", "token")
    """What a TIS weight is taken of: the token, its sequence, or the sequence as a geometric mean."""
    tis_mode: TisMode = opt("algorithm", "truncate")
    """A TIS weight outside the band becomes the end of the band, or 0."""
    custom_tis_function_path: str | None = opt("algorithm", None, metavar="PATH")
    """Function f(args, old_logprobs, rollout_logprobs) that gives the TIS weights of a sequence."""


@dataclass(frozen=True, kw_only=True)
class OpsmOptions:
    """Which sequences leave the policy loss, and what counts as the old policy."""

    use_opsm: bool = opt("algorithm", False)
    """Mask sequences with negative credit in the policy loss where the policy has moved far away."""
    opsm_delta: float = opt("algorithm", 0.0001, low=0)
    """How far: mean over the sequence of recorded minus current log-prob."""
    use_rollout_logprobs: bool = opt("algorithm", False)
    """Use the engine's recorded log-probs as those of the old policy."""


@dataclass(frozen=True, kw_only=True)
class TermOptions:
    """Terms of the loss beside the policy loss."""

    entropy_coef: float = opt("algorithm", 0.0, low=0)
    """Weight of the entropy of each token, which is kept high."""
    opd_coef: float = opt("algorithm", 0.0, low=0)
    """Weight of on-policy distillation from --opd-teacher."""


@dataclass(frozen=True, kw_only=True)
class SideModelOptions:
    """The models beside the policy."""

    opd_teacher: str | None = opt("algorithm", None, metavar="FOLDER|URL")
    """Teacher with the same tokenizer: a Hugging Face folder, or the address of an SGLang server."""
    ref_load: str | None = opt("model", None, metavar="FOLDER")
    """Hugging Face folder of the reference model (default: the start model)."""


@dataclass(frozen=True, kw_only=True)
class CriticOptions:
    """How the critic is trained, where that differs from the policy."""

    critic_lr: float | None = opt("algorithm", None, low=0)
    """Learning rate of the critic (default: --lr)."""
    value_clip: float = opt("algorithm", 0.2, low=0)
    """How far a value may move from that before the update and still count; 0 is no limit."""


@dataclass(frozen=True, kw_only=True)
class UpdateOptions:
    """One optimizer step."""

    lr: float = opt("training", 1e-06, low=0)
    """Learning rate of AdamW."""
    weight_decay: float = opt("training", 0.0, low=0)
    """Weight decay of AdamW."""
    clip_grad: float = opt("training", 1.0, above=0)
    """Largest 2-norm of the gradient."""
    calculate_per_token_loss: bool = opt("algorithm", False)
    """Give every trainable token the same weight; same as --loss-reduction per_token."""
    loss_reduction: Reduction | None = opt("algorithm", None)
    """How token losses are averaged (default: session_mean)."""


@dataclass(frozen=True, kw_only=True)
class RowOptions:
    """How samples are packed into rows, each one forward and backward pass."""

    micro_batch_size: int = opt("training", 1, low=1)
    """Samples per packed row, which is one forward and backward pass."""
    use_dynamic_batch_size: bool = opt("training", False)
    """Pack rows up to --max-tokens-per-gpu instead of --micro-batch-size."""
    max_tokens_per_gpu: int | None = opt("training", None, low=1)
    """Tokens per packed row with --use-dynamic-batch-size; no sample may have more."""


@dataclass(frozen=True, kw_only=True)
class StepOptions:
    """What a rollout step trains, and how fast."""

    global_batch_size: int | None = opt("rollout", None, low=1)
    """Sessions per optimizer step (default: --rollout-batch-size times --n-samples-per-prompt)."""
    num_steps_per_rollout: int | None = opt("training", None, low=1)
    """Optimizer steps per rollout step (default: by --global-batch-size)."""
    lr_schedule: ScheduleKind = opt("training", "constant")
    """Course of the learning rate after the warm-up; cosine falls to --min-lr at the end of the run."""
    warmup: int = opt("training", 0, low=0)
    """Rollout steps in which the learning rate rises to --lr."""
    min_lr: float = opt("training", 0.0, low=0)
    """Learning rate that --lr-schedule cosine ends with."""
    max_token_staleness: int | None = opt("async", None, low=0)
    """Train steps that the weights behind a trained token may be old (default: any)."""
    num_critic_only_steps: int = opt("algorithm", 0, low=0)
    """Rollout steps at the start that train only the critic."""


@dataclass(frozen=True, kw_only=True)
class TrainingOptions(
    AlgorithmOptions,
    ClipOptions,
    ReturnOptions,
    KlOptions,
    TermOptions,
    TisOptions,
    OpsmOptions,
    SideModelOptions,
    CriticOptions,
    UpdateOptions,
    RowOptions,
    StepOptions,
):
    """All options of algorithm and training."""
