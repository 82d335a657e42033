"""Field cases of corrections for tokens that another policy sampled."""

from __future__ import annotations

import asyncio
import math
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gateway_serve import serving
from near_samples import make_trainer, samples_near, with_credit
from tiny_model import build_tiny_model
from train_tiny import write_least_model

from silva.codec import TurnCodec
from silva.config.parse import from_values
from silva.config.training_checks import training_warnings
from silva.inference.torch_engine import TorchEngine
from silva.train.corrections import opsm_dropped
from silva.train.objective import ObjectiveConfig
from silva.train.options import KlOptions, TisOptions
from silva.train.signals import Signals
from silva.types.generation import GenerateRequest, GenerateResult


@pytest.fixture(scope="module")
def hf_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_least_model(tmp_path_factory.mktemp("model"))


@pytest.mark.parametrize(
    "objective",
    [
        ObjectiveConfig(tis=TisOptions(tis_mode="mask", tis_clip_low=0.5)),
        ObjectiveConfig(opsm_delta=0.1),
        ObjectiveConfig(opsm_delta=0.1, tis=TisOptions(tis_level="sequence"), rollout_as_old=False),
    ],
)
def test_loss_01_all_rejected_is_a_skipped_counted_step(hf_dir: Path, objective: ObjectiveConfig) -> None:
    trainer = make_trainer(hf_dir, objective, weight_decay=0.1)
    trainer.train_step(with_credit(samples_near(trainer, [0.0]), 1.0))  # so that the optimizer has moments
    samples = with_credit(samples_near(trainer, [-1.0, -2.0]), -1.0, -2.0)
    weights = {name: value.clone() for name, value in trainer.model.state_dict().items()}
    moments = [{k: v.clone() for k, v in one.items()} for one in trainer.optimizer.state_dict()["state"].values()]
    result = trainer.train_step(samples)
    assert (result.reason, trainer.num_updates, trainer.skipped_steps) == ("all_rejected", 1, {"all_rejected": 1})
    assert all(math.isfinite(value) for value in result.metrics.values())
    assert (result.metrics["train/loss"], result.metrics["train/grad_norm"]) == (0.0, 0.0)
    assert result.metrics["train/skipped_all_rejected"] == 1 and result.num_trainable == 6
    assert all(torch.equal(value, weights[name]) for name, value in trainer.model.state_dict().items())
    for one, before in zip(trainer.optimizer.state_dict()["state"].values(), moments, strict=True):
        assert all(torch.equal(one[name], before[name]) for name in before)
    # another term of the loss keeps the step, one that is only measured does not
    signals = Signals(reference=[np.full(len(one.token_ids), -1.0) for one in samples])
    for more, reason in (
        ({"kl": KlOptions(kl_loss_coef=0.0)}, "all_rejected"),
        ({"kl": KlOptions(kl_loss_coef=0.1)}, None),
        ({"entropy_coef": 0.1}, None),
    ):
        trainer.config = replace(trainer.config, objective=replace(objective, **more))
        step = trainer.train_step(samples, signals=signals)
        assert step.reason == reason and step.metrics["train/pg_loss"] == 0
        assert (step.metrics["train/grad_norm"] > 0) == (reason is None)


def test_loss_07_a_sequence_is_dropped_as_a_whole_by_its_credit() -> None:
    recorded_N, current_N, one_N = torch.ones(3), torch.zeros(3), torch.zeros(3, dtype=torch.int64)
    for credit, dropped in ((-0.1667, True), (0.1667, False), (0.0, False)):
        assert opsm_dropped(current_N, recorded_N, torch.full((3,), credit), one_N, 0.1).tolist() == [dropped] * 3
    # one far token among near ones: the mean decides, for all of them alike
    recorded_N = torch.tensor([0.9, 0.0, 0.0, 0.3, 0.0, 0.0])
    two_N = torch.tensor([0, 0, 0, 1, 1, 1])
    dropped_N = opsm_dropped(torch.zeros(6), recorded_N, torch.full((6,), -1.0), two_N, 0.2)
    assert dropped_N.tolist() == [True] * 3 + [False] * 3
    # what is no further than allowed stays
    assert not opsm_dropped(torch.zeros(3), torch.full((3,), 0.5), torch.full((3,), -1.0), one_N, 0.5).any()


def test_loss_07_masked_positions_are_neither_in_the_gap_nor_in_its_mean(hf_dir: Path) -> None:
    trainer = make_trainer(hf_dir, ObjectiveConfig(opsm_delta=0.1), lr=0.0)
    # of three trainable tokens out of five: 0.36 / 3 is above delta, 0.36 / 4 and 0.36 / 5 are not
    bad, near, good = samples_near(trainer, [[-0.36, 0.0, 0.0], [-0.27, 0.0, 0.0], [-9.0, -9.0, -9.0]])
    near = replace(
        near, logprobs=[99.0 if not bit else lp for lp, bit in zip(near.logprobs, near.loss_mask, strict=True)]
    )
    result = trainer.train_step(with_credit([bad, near, good], -1.0, -1.0, 1.0))
    assert result.metrics["train/opsm_clipfrac"] == pytest.approx(1 / 3)
    # what is dropped stays in the denominators; ratio 1 in the others: (0 + 1 - 1) / 3
    assert result.metrics["train/loss"] == pytest.approx(0.0, abs=1e-6)
    alone = trainer.train_step(with_credit([bad, near], -1.0, -1.0)).metrics
    assert alone["train/loss"] == pytest.approx(0.5, rel=1e-5)


def test_loss_07_the_present_policy_and_the_credit_of_the_context_decide(hf_dir: Path) -> None:
    trainer = make_trainer(hf_dir, ObjectiveConfig(opsm_delta=0.1), lr=0.0)
    bad, good = with_credit(samples_near(trainer, [-0.5, -0.5]), -1.0, 1.0)
    # the old policy was where the engine is, and a turn of each was credited the other way than its context
    samples = [replace(bad, response_credits=(1.0, -5.0)), replace(good, response_credits=(-1.0, 5.0))]
    signals = Signals(old=[np.asarray(one.logprobs) for one in samples])
    metrics = trainer.train_step(samples, signals=signals).metrics
    # the good one stays whole: ratio exp(-0.5), below the bound only where credit is negative
    assert metrics["train/opsm_clipfrac"] == 0.5
    assert metrics["train/pg_loss"] == pytest.approx((2 * 0.8 - 5 * math.exp(-0.5)) / 3 / 2, rel=1e-5)


class Watched(TorchEngine):
    """The torch engine, and what it was asked for."""

    def __init__(self, *args: Any, **more: Any):
        super().__init__(*args, **more)
        self.asked: list[dict[str, Any]] = []

    async def generate(self, request: GenerateRequest) -> GenerateResult:
        self.asked.append(asdict(replace(request, input_ids=list(request.input_ids))))
        return await super().generate(request)


def test_loss_12_engine_and_trainer_score_alike_whatever_a_request_carries(tmp_path: Path) -> None:
    model = build_tiny_model(tmp_path / "model")
    codec = TurnCodec.load(model)
    sampling = {"rollout_temperature": 0.6, "rollout_top_p": 0.9, "rollout_max_response_len": 12}

    async def converse() -> Any:
        engine = Watched(model, decode_text=codec.decode, stop_ids=codec.stop_ids, max_context_len=256)
        async with serving(codec, [], **sampling, engine=engine, recorded=lambda: engine.asked, seed=3) as serve:
            history: list[dict[str, Any]] = [{"role": "user", "content": "hi"}]
            client = serve.sdk("s")
            for text in ("and", "then"):
                answer = await client.chat.completions.create(
                    model="m", messages=history, temperature=0, top_p=0.5, extra_body={"top_k": 1}
                )
                reply = answer.choices[0].message
                history += [{"role": "assistant", "content": reply.content}, {"role": "user", "content": text}]
            return serve.sample("s"), engine.asked

    sample, asked = asyncio.run(converse())
    assert {(a["sampling"]["temperature"], a["sampling"]["top_p"], a["sampling"]["top_k"]) for a in asked} == {
        (0.6, 0.9, -1)
    }
    assert len(asked) == 2 and sample.num_trainable > 4 and min(sample.kept_mass) < 1
    sample = replace(sample, credit=1.0)
    trainer = make_trainer(model, ObjectiveConfig(tis=TisOptions()), rollout_temperature=0.6, lr=0.0)
    mine = trainer.compute_logprobs([sample])[0].tolist()
    assert mine == pytest.approx(sample.logprobs, abs=1e-4)
    metrics = trainer.train_step([sample]).metrics
    assert metrics["train/rollout_logprob_abs_diff"] < 1e-4 and metrics["train/tis"] == pytest.approx(1, abs=1e-4)
    # at another temperature they would be far apart
    other = make_trainer(model, ObjectiveConfig(), rollout_temperature=1.0, lr=0.0)
    assert other.train_step([sample]).metrics["train/rollout_logprob_abs_diff"] > 0.01


def test_loss_12_filters_beside_tis_are_warned_of() -> None:
    (told,) = training_warnings(from_values({"use_tis": True, "rollout_top_p": 0.9, "rollout_top_k": 8}))
    assert "--rollout-top-p 0.9 and --rollout-top-k 8" in told
    assert training_warnings(from_values({"use_tis": True})) == []
    assert training_warnings(from_values({"rollout_top_p": 0.9})) == []
