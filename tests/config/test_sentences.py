"""Sentences that refuse options: what stands at the places of options, and that texts of users stay as they are."""

from __future__ import annotations

import pytest

from silva.config.checks import validate
from silva.config.options import RunConfig
from silva.config.parse import from_values
from silva.config.sentences import filled, is_set, refuse
from silva.types.errors import ConfigError


def test_a_place_is_the_option_as_on_the_command_line() -> None:
    config = RunConfig(lr=0.5, use_tis=True, tis_clip=3.0)
    (sentence,) = filled(config, ["{lr}, {use_tis}, {tis_clip} or {tis_clip:g}, {lr.value}"])
    assert sentence == "--lr 0.5, --use-tis, --tis-clip 3.0 or --tis-clip 3, 0.5"


def test_the_first_sentence_is_raised_and_none_is_fine() -> None:
    with pytest.raises(ConfigError, match=r"^--lr 1e-06 first$"):
        refuse(RunConfig(), iter(["{lr} first", "second"]))
    refuse(RunConfig(), [])


def test_an_option_is_set_where_it_is_not_its_default() -> None:
    config = RunConfig(reward_failure_score=0.0, lr=1e-6)
    assert is_set(config, "reward_failure_score") and not is_set(config, "lr") and not is_set(config, "engine_url")


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ({"ref_load": "a{b}"}, "--ref-load a{b} does nothing"),
        ({"save_hf": "{lr}", "ref_load": "{lr}", "use_kl_loss": True}, "--save-hf {lr} is the folder of --ref-load"),
        ({"min_lr": 0.1, "ref_load": "{0.value}", "use_kl_loss": True}, "--min-lr 0.1 does nothing"),
    ],
)
def test_braces_of_a_user_are_no_places(values: dict[str, object], text: str) -> None:
    records = {"hf_checkpoint": "m", "load_debug_rollout_data": "{rollout_id}.jsonl"}
    with pytest.raises(ConfigError) as caught:
        validate(from_values({**records, **values}), "train")
    assert text in str(caught.value)
