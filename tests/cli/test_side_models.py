"""The reference model and the teacher as the options name them: which are refused, which are loaded, and how often."""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import Callable
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from sglang_stub import Answer, SglangStub
from train_tiny import make_sample

from silva.codec import TurnCodec
from silva.config.options import RunConfig
from silva.config.training_checks import check_algorithm
from silva.run.build_learner import open_learner
from silva.run.side_models import look_at_side_models
from silva.run.user_code import UserCode
from silva.train.step_result import StepResult
from silva.types.errors import ConfigError

SAMPLES = [make_sample(f"s{i}", [3, 4 + i, 5, 6], [0, 1, 0, 1], credit=1.0 - 2 * i) for i in range(2)]


def options(model: Path, **more: Any) -> RunConfig:
    return RunConfig(**({"hf_checkpoint": str(model), "use_kl_loss": True, "lr": 0.01} | more))


def copy_of(model: Path, folder: Path) -> Path:
    return shutil.copytree(model, folder)


def edit(path: Path, change: Callable[[Any], Any]) -> None:
    document = json.loads(path.read_text())
    change(document)
    path.write_text(json.dumps(document))


def swap_two_ids(tokenizer: Any) -> None:
    vocab = tokenizer["model"]["vocab"]
    vocab["!"], vocab["&"] = vocab["&"], vocab["!"]


REFUSED: list[tuple[str, Callable[[Any], Any], str]] = [
    ("config.json", lambda c: c.update(vocab_size=300), "has 300 ids, that of --hf-checkpoint .* 324"),
    ("config.json", lambda c: c.update(max_position_embeddings=64), "64 positions, and a context may have 512"),
    ("tokenizer.json", swap_two_ids, "another tokenizer than .*: id 0 is '&' there and '!' here"),
    ("tokenizer.json", lambda t: t["added_tokens"].pop(), "another tokenizer than .*: id 323 is missing there"),
    ("tokenizer.json", lambda t: t["model"]["merges"].reverse(), r"its model\.merges is another one"),
    ("tokenizer.json", lambda t: t.update(pre_tokenizer=None), "its pre_tokenizer is another one"),
]


@pytest.mark.parametrize(("file", "change", "said"), REFUSED)
async def test_a_model_that_reads_ids_otherwise_is_refused(
    model_dir: Path, tmp_path: Path, file: str, change: Callable[[Any], Any], said: str
) -> None:
    other = copy_of(model_dir, tmp_path / "other")
    edit(other / file, change)
    with pytest.raises(ConfigError, match=f"--ref-load .*other.*{said}"):
        await look_at_side_models(options(model_dir, ref_load=str(other)))


async def test_what_will_be_used_is_told(model_dir: Path, tmp_path: Path) -> None:
    other = copy_of(model_dir, tmp_path / "other")
    # written in another form, with more ids and one more control token: the same all the same
    edit(other / "config.json", lambda c: c.update(vocab_size=400))
    edit(other / "tokenizer.json", lambda t: t["added_tokens"].append({"id": 324, "content": "<|more|>"}))
    edit(other / "tokenizer.json", lambda t: t["model"].update(merges=[" ".join(m) for m in t["model"]["merges"]]))
    assert await look_at_side_models(options(model_dir, opd_teacher=str(other), opd_coef=0.1)) == [
        f"reference {model_dir} (the start model), loaded beside the policy",
        f"teacher {other}, loaded beside the policy",
    ]
    weights = other / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    with pytest.raises(ConfigError, match=r"--opd-teacher .*model\.safetensors cannot be read as safetensors"):
        await look_at_side_models(options(model_dir, opd_teacher=str(other), opd_coef=0.1))
    with pytest.raises(ConfigError, match="--ref-load nowhere cannot be used: nowhere is not a directory"):
        await look_at_side_models(options(model_dir, ref_load="nowhere"))


async def test_a_teacher_server_is_known_by_how_it_reads_ids(model_dir: Path, codec: TurnCodec) -> None:
    async with SglangStub(Answer(), decode=codec.decode) as stub:
        config = options(model_dir, opd_teacher=stub.url, opd_coef=0.1, use_kl_loss=False)
        assert await look_at_side_models(config) == [f"teacher {stub.url}: stub, context 32768 tokens"]
        assert len(set(stub.calls[0]["input_ids"])) > 20
    async with SglangStub(Answer(), decode=lambda ids: codec.decode([ids[0] + 1])) as stub:
        with pytest.raises(ConfigError, match=r"\(model stub\) has another tokenizer than --hf-checkpoint: it reads"):
            await look_at_side_models(replace(config, opd_teacher=stub.url))


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"opd_teacher": "http://me:secret@host:1"}, "is not an address of a server"),
        ({"opd_teacher": "ftp://host"}, "is not an address of a server"),
        ({"opd_teacher": "http://host:1", "rollout_temperature": 0.7}, "at temperature 1 only"),
    ],
)
def test_addresses_that_cannot_work_are_refused(more: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        check_algorithm(RunConfig(opd_coef=0.1, **more))
    check_algorithm(RunConfig(opd_coef=0.1, opd_teacher="https://host", rollout_temperature=0.0))


def test_the_reference_stays_the_start_model_in_a_resumed_run(model_dir: Path, tmp_path: Path) -> None:
    start = copy_of(model_dir, tmp_path / "start")
    config = options(start, kl_loss_coef=0.1, opd_coef=0.1, opd_teacher=str(tmp_path / "link"))
    (tmp_path / "link").symlink_to(start)

    async def life(folder: Path | None) -> tuple[dict[str, float], int]:
        async with AsyncExitStack() as stack:
            learner = await open_learner(config, stack, UserCode(), num_rollout=None)
            if folder is not None:
                await learner.load(folder)
            (result,) = await learner.train_rollout(SAMPLES, rollout_step=0)
            if folder is None:
                await learner.save(tmp_path / "step_000001", step=0, extra={})
            beside = {id(learner.reference), id(learner.teacher)}
            return result.metrics, len(beside)

    metrics, num_models = asyncio.run(life(None))
    assert metrics["train/kl_loss"] == metrics["train/opd_kl"] == 0 and num_models == 1
    metrics, _ = asyncio.run(life(tmp_path / "step_000001"))
    assert abs(metrics["train/kl_loss"]) > 1e-4
    # other weights in that folder would be another reference, without a sign
    shutil.copy(tmp_path / "step_000001" / "model.safetensors", start)
    with pytest.raises(ConfigError, match=f"{start} holds another model than when .*step_000001 was written"):
        asyncio.run(life(tmp_path / "step_000001"))
    # in another folder it is what was asked for
    start = copy_of(start, tmp_path / "start2")
    config = replace(config, ref_load=str(start), opd_teacher=str(start))
    metrics, _ = asyncio.run(life(tmp_path / "step_000001"))
    assert metrics["train/kl_loss"] == 0


def test_the_learner_and_what_stands_beside_the_policy_heed_their_options(model_dir: Path) -> None:
    values = {"critic_lr": 0.02, "value_clip": 0.5, "num_critic_only_steps": 1, "max_token_staleness": 2, "warmup": 4}
    config = options(model_dir, advantage_estimator="ppo", rollout_temperature=0.7, clip_grad=0.5, **values)

    async def steps(*rollout_ids: int) -> tuple[list[StepResult], Any]:
        async with AsyncExitStack() as stack:
            learner = await open_learner(config, stack, UserCode(), num_rollout=9)
            done = [(await learner.train_rollout(SAMPLES, rollout_step=at))[0] for at in rollout_ids]
            return done, learner.critic

    (alone, both, _, stale), critic = asyncio.run(steps(0, 1, 2, 3))
    assert (alone.reason, both.reason, stale.reason) == ("critic_only", None, "no_trainable_tokens")
    assert alone.metrics["train/kl_loss"] == 0  # the reference has the weights, the temperature and the rows
    assert both.metrics["train/lr"] == pytest.approx(0.01 * 2 / 4)
    assert both.metrics["train/critic_lr"] == pytest.approx(0.02 * 2 / 4)
    assert stale.metrics["train/stale_tokens"] == 4  # sampled by version 0, three steps ago
    assert (critic.config.lr, critic.config.value_clip, critic.config.clip_grad) == (0.02, 0.5, 0.5)
    assert (critic.config.rollout_temperature, critic.config.reduction) == (0.7, "session_mean")
