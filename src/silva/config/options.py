"""All options of a run in one object: the flat union of the options classes of the rooms.

Each option is declared in the room that uses it (`GatewayOptions` in gateway/, `AgentOptions` in agent/ ...), so a part
that takes, say, AgentOptions can be given the whole RunConfig. This module adds no option. What is not built yet is
listed too: whole options in `LATER`, single values in an option's `later_choices`. Both are refused with a sentence,
never accepted and ignored.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from silva.agent import AgentOptions
from silva.config.run_options import EvalOptions, RunOptions
from silva.data import DataOptions
from silva.export import ExportOptions
from silva.gateway import GatewayOptions
from silva.judge import RewardOptions
from silva.model import ModelOptions
from silva.parsers import ParserOptions
from silva.rollout import RolloutOptions
from silva.train import TrainingOptions
from silva.turns import TurnServiceOptions
from silva.types import flag_of

GROUPS = (
    *("run", "model", "gateway", "agent", "parsers", "capacity", "matching", "rollout", "async", "data", "eval"),
    *("reward", "engines", "records", "algorithm", "training"),
)
"""The headings of the help page, in their order."""


@dataclass(frozen=True, kw_only=True)
class RunConfig(
    RunOptions,
    ModelOptions,
    GatewayOptions,
    AgentOptions,
    ParserOptions,
    RolloutOptions,
    EvalOptions,
    TurnServiceOptions,
    RewardOptions,
    ExportOptions,
    DataOptions,
    TrainingOptions,
):
    """All options, resolved. `silva train --help` prints them; a class's place in the list is its place in the help."""


LATER: Mapping[str, tuple[str, str]] = {
    # name: (argparse nargs, what it belongs to)
    "agentic_prelaunch": ("0", "prelaunch"),
    "external_slots": ("1", "the capacity check"),
    "agentic_session_lifecycle": ("0", "KV scheduling"),
    "agentic_program_admission": ("0", "KV scheduling"),
    "agentic_admission_headroom": ("1", "KV scheduling"),
    "agentic_admission_pressure_threshold": ("1", "KV scheduling"),
    "agentic_admission_expected_decode_cap": ("1", "KV scheduling"),
    "agentic_admission_max_wait_s": ("1", "KV scheduling"),
    "agentic_admission_scope": ("1", "KV scheduling"),
    "dynamic_sampling_filter_path": ("1", "group filters"),
    "partial_rollout": ("0", "partial rollout"),
    "partial_rollout_max_aborted_count": ("1", "partial rollout"),
    "fully_async": ("0", "fully async training"),
    "max_sample_staleness": ("1", "asynchronous rollout"),
    "mask_offpolicy_in_partial_rollout": ("0", "partial rollout"),
    "tool_key": ("1", "dataset tools"),
    "multimodal_keys": ("1", "images"),
    "tensorboard": ("0", "metric writers"),
    "wandb_project": ("1", "metric writers"),
    "ray": ("0", "clusters"),
    "num_gateway_shards": ("1", "clusters"),
    "num_train_workers": ("1", "clusters"),
}
"""Options whose part is not built: how many values the flag takes, and what it belongs to."""


def later_sentence(name: str) -> str:
    """Why an option of `LATER` is refused."""
    return f"{flag_of(name)} belongs to {LATER[name][1]}, which this version of Silva does not have yet; leave it out"
