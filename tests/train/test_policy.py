from __future__ import annotations

import asyncio
import json
import math
import threading
from contextlib import closing
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from train_steps import Gradients, defined_step, make_trainer, old_policy, step_with_gradients
from train_tiny import VOCAB, make_sample, random_samples, write_model, write_tokenizer
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from silva.run.run_loop import RunLoopSettings
from silva.train.checkpoint import checkpoint_dir, is_complete, latest_checkpoint
from silva.train.learner import Learner, TorchThread
from silva.train.objective import ObjectiveConfig
from silva.train.options import ClipOptions, TisOptions
from silva.train.policy import PolicyTrainer
from silva.train.signals import Signals
from silva.train.step_result import StepResult
from silva.types.errors import ConfigError, SilvaError


@pytest.fixture(scope="session")
def hf_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = write_model(tmp_path_factory.mktemp("model"), "qwen2", tie_word_embeddings=True)
    write_tokenizer(folder)
    return folder


def weights_of(trainer: PolicyTrainer) -> dict[str, torch.Tensor]:
    return {name: value.detach().clone() for name, value in trainer.model.state_dict().items()}


def assert_same_weights(mine: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor], atol: float = 0.0) -> None:
    assert mine.keys() == theirs.keys()
    for name, value in mine.items():
        torch.testing.assert_close(value, theirs[name], rtol=0, atol=atol, msg=name)


@pytest.mark.parametrize(
    "settings",
    [
        {"loss_reduction": "session_mean", "rollout_temperature": 1.0},
        {
            "loss_reduction": "per_token",
            "rollout_temperature": 0.7,
            "objective": ObjectiveConfig(clip=ClipOptions(eps_clip=0.2, eps_clip_high=0.28)),
        },
        {"loss_reduction": "seq_mean_token_sum_norm", "rollout_max_response_len": 9, "rollout_temperature": 0.0},
    ],
)
def test_a_step_equals_its_float64_definition(hf_dir: Path, settings: dict[str, Any]) -> None:
    samples = random_samples(1, 6)
    trainer = make_trainer(hf_dir, micro_batch_size=3, **settings)
    old = old_policy(samples, trainer)
    result = trainer.train_step(samples, signals=Signals(old=old))
    assert not result.skipped and trainer.num_updates == 1
    expected = defined_step(hf_dir, samples, old, trainer.config).metrics
    assert 0 < expected["pg_clipfrac"] < 1
    for name, value in expected.items():
        assert result.metrics[f"train/{name}"] == pytest.approx(value, rel=2e-5, abs=2e-5), name
    assert result.num_sessions == 6 and result.num_samples == len(samples)
    assert result.num_trainable == sum(s.num_trainable for s in samples)
    assert result.num_tokens == sum(len(s.token_ids) for s in samples)


@pytest.mark.parametrize("reduction", ["session_mean", "per_token", "seq_mean_token_sum_norm"])
def test_loss_and_gradient_do_not_depend_on_packing_or_order(hf_dir: Path, reduction: str) -> None:
    samples = random_samples(2, 6)
    reference: tuple[StepResult, Gradients] | None = None
    trainer = make_trainer(hf_dir, loss_reduction=reduction, rollout_max_response_len=16)
    old = old_policy(samples, trainer)
    packings = (
        {},
        {"micro_batch_size": 2},
        {"micro_batch_size": 100},
        {"max_tokens_per_gpu": 20},
        {"max_tokens_per_gpu": 64},
    )
    for order_seed, packing in enumerate(packings):
        trainer.config = replace(trainer.config, **({"micro_batch_size": 1, "max_tokens_per_gpu": None} | packing))
        order = list(range(len(samples)))
        if reference is not None:
            np.random.default_rng(order_seed).shuffle(order)
        result, gradients = step_with_gradients(
            trainer, [samples[i] for i in order], signals=Signals(old=[old[i] for i in order])
        )
        if reference is None:
            reference = result, gradients
            continue
        assert result.metrics == pytest.approx(reference[0].metrics, rel=1e-5, abs=1e-5)
        for mine, theirs in zip(gradients, reference[1], strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-5)


def test_samples_too_long_for_a_row_are_named_in_the_log_and_not_trained(
    hf_dir: Path, caplog: pytest.LogCaptureFixture
) -> None:
    samples = [make_sample("short", [1, 2, 3], [0, 1, 1]), make_sample("long", [1] * 9, [0] + [1] * 8, name="ctx")]
    with closing(TorchThread()) as thread:
        assert Learner(make_trainer(hf_dir), thread).leave_out_too_long(samples) == (samples, 0)
        learner = Learner(make_trainer(hf_dir, max_tokens_per_gpu=8), thread)
        fit, num_too_long = learner.leave_out_too_long(samples)
    assert (fit, num_too_long) == (samples[:1], 1)
    assert "session long: its sample ctx" in caplog.text and "9 tokens, a packed row takes 8" in caplog.text


def test_failed_sessions_make_steps_smaller_and_prompts_say_how_many_there_are() -> None:
    settings = RunLoopSettings(
        run_dir=Path(),
        first_rollout=0,
        num_rollout=1,
        global_batch_size=4,
        eval_interval=None,
        save_interval=None,
        save_hf=None,
    )
    of_rollout = ((16, 16), (16, 13), (16, 7), (16, 3), (16, 0), (8, 7), (3, 3))  # slots of the prompts, sessions left
    assert [settings.steps_of(*numbers) for numbers in of_rollout] == [4, 4, 4, 3, 1, 2, 1]
    told = replace(settings, num_steps=4)
    assert [told.steps_of(*numbers) for numbers in of_rollout] == [4, 4, 4, 3, 1, 4, 3]


def test_gradient_equals_finite_differences(tmp_path: Path) -> None:
    samples = random_samples(3, 4)
    # an architecture whose norms stay in float64 (RMS norms of transformers go through float32)
    trainer = make_trainer(
        write_model(tmp_path, "gpt_neox"),
        micro_batch_size=2,
        rollout_temperature=0.8,
        objective=ObjectiveConfig(entropy_coef=0.3),
    )
    trainer.model.double()
    old = old_policy(samples, trainer, spread=0.05)
    _, gradients = step_with_gradients(trainer, samples, signals=Signals(old=old))
    parameters = [p for group in trainer.optimizer.param_groups for p in group["params"]]
    generator = torch.Generator().manual_seed(4)
    direction = [torch.randn(p.shape, generator=generator, dtype=torch.float64) for p in parameters]
    slope = sum(float((g * d).sum()) for g, d in zip(gradients, direction, strict=True))

    def loss_at(distance: float) -> float:
        with torch.no_grad():
            for p, d in zip(parameters, direction, strict=True):
                p.add_(d, alpha=distance)
        value = trainer.train_step(samples, signals=Signals(old=old)).metrics["train/loss"]
        with torch.no_grad():
            for p, d in zip(parameters, direction, strict=True):
                p.sub_(d, alpha=distance)
        return value

    h = 1e-6
    assert abs(slope) > 1e-3
    assert (loss_at(h) - loss_at(-h)) / (2 * h) == pytest.approx(slope, rel=1e-4)


def test_the_first_step_is_on_policy(hf_dir: Path) -> None:
    samples = random_samples(5, 4)
    trainer = make_trainer(hf_dir, rollout_temperature=0.7)
    recorded = trainer.compute_logprobs(samples)
    samples = [replace(s, logprobs=[float(x) for x in lp]) for s, lp in zip(samples, recorded, strict=True)]
    metrics = trainer.train_step(samples).metrics
    assert metrics["train/ppo_kl"] == 0 and metrics["train/pg_clipfrac"] == 0
    assert metrics["train/rollout_logprob_abs_diff"] < 1e-5
    moved = [replace(s, logprobs=[x - 0.25 * m for x, m in zip(s.logprobs, s.loss_mask, strict=True)]) for s in samples]
    assert trainer.train_step(moved).metrics["train/rollout_logprob_abs_diff"] == pytest.approx(0.25, abs=1e-5)


def test_with_several_steps_the_old_policy_is_that_before_the_first(hf_dir: Path) -> None:
    samples = random_samples(6, 6)
    settings = {"lr": 5e-3, "micro_batch_size": 2}
    trainer = make_trainer(hf_dir, **settings)
    with closing(TorchThread()) as thread:
        learner = Learner(trainer, thread)
        first, second = asyncio.run(learner.train_rollout(samples, rollout_step=0, num_steps=2))
    assert first.metrics["train/ppo_kl"] == pytest.approx(0, abs=1e-6)
    assert abs(second.metrics["train/ppo_kl"]) > 1e-3
    assert trainer.num_updates == 2

    by_hand = make_trainer(hf_dir, **settings)
    old = by_hand.compute_logprobs(samples)
    halves = [[i for i, s in enumerate(samples) if (int(s.session_id[1:]) >= 3) == late] for late in (False, True)]
    for half in halves:
        by_hand.train_step([samples[i] for i in half], signals=Signals(old=[old[i] for i in half]))
    assert_same_weights(weights_of(trainer), weights_of(by_hand))


@pytest.mark.parametrize(
    ("num_steps", "objective", "passes"),
    [
        (1, ObjectiveConfig(), 1),
        (1, ObjectiveConfig(tis=TisOptions(), opsm_delta=0.1), 1),  # both go by the log-probs of that very pass
        (3, ObjectiveConfig(), 6),
        (3, ObjectiveConfig(rollout_as_old=True), 3),
    ],
)
def test_a_lone_step_passes_the_model_once(
    hf_dir: Path, num_steps: int, objective: ObjectiveConfig, passes: int
) -> None:
    trainer = make_trainer(hf_dir, micro_batch_size=100, objective=objective)
    seen: list[int] = []
    handle = trainer.model.register_forward_pre_hook(lambda *_: seen.append(1))
    with closing(TorchThread()) as thread:
        asyncio.run(Learner(trainer, thread).train_rollout(random_samples(6, 6), rollout_step=0, num_steps=num_steps))
    handle.remove()
    assert len(seen) == passes


def test_credit_moves_probability_to_what_was_good(hf_dir: Path) -> None:
    good = make_sample("good", [3, 4, 5, 6], [0, 0, 1, 1], credit=1.0)
    bad = make_sample("bad", [3, 4, 7, 8], [0, 0, 1, 1], credit=-1.0)
    trainer = make_trainer(hf_dir, lr=3e-3, clip_grad=1.0)
    before = [values.sum() for values in trainer.compute_logprobs([good, bad])]
    for _ in range(5):
        trainer.train_step([good, bad])
    after = [values.sum() for values in trainer.compute_logprobs([good, bad])]
    assert after[0] > before[0] + 0.1 and after[1] < before[1] - 0.1


def test_the_gradient_is_clipped_to_its_limit(hf_dir: Path) -> None:
    samples = random_samples(7, 4)
    free, free_gradients = step_with_gradients(make_trainer(hf_dir), samples)
    norm = free.metrics["train/grad_norm"]
    assert norm == pytest.approx(math.sqrt(sum(float((g.double() ** 2).sum()) for g in free_gradients)), rel=1e-5)
    bound, gradients = step_with_gradients(make_trainer(hf_dir, clip_grad=norm / 4), samples)
    assert bound.metrics["train/grad_norm"] == pytest.approx(norm)
    for mine, theirs in zip(gradients, free_gradients, strict=True):
        torch.testing.assert_close(mine, theirs / 4, rtol=1e-4, atol=1e-7)


def test_all_credits_zero_is_a_step_that_changes_nothing(hf_dir: Path) -> None:
    trainer = make_trainer(hf_dir, lr=1e-2)
    before = weights_of(trainer)
    result = trainer.train_step([replace(s, credit=0.0) for s in random_samples(8)])
    assert not result.skipped and result.metrics["train/loss"] == 0 and result.metrics["train/grad_norm"] == 0
    assert_same_weights(weights_of(trainer), before)


def test_weight_decay_acts_on_matrices_only(hf_dir: Path) -> None:
    trainer = make_trainer(hf_dir, lr=0.1, weight_decay=0.5)
    before = weights_of(trainer)
    trainer.train_step([replace(s, credit=0.0) for s in random_samples(8)])
    for name, value in weights_of(trainer).items():
        factor = 0.95 if value.ndim >= 2 else 1.0
        torch.testing.assert_close(value, before[name] * factor, rtol=1e-6, atol=1e-7, msg=name)


def test_a_loss_that_is_not_finite_never_reaches_the_weights(hf_dir: Path) -> None:
    trainer = make_trainer(hf_dir, lr=1e-2)
    trainer.train_step(random_samples(1))
    with torch.no_grad():
        trainer.model.get_input_embeddings().weight[5, 0] = math.inf
    before, state = weights_of(trainer), json.dumps(trainer.optimizer.state_dict(), default=torch.Tensor.tolist)
    result = trainer.train_step([make_sample("s0", [5, 6, 7], [0, 1, 1])])
    assert result.skipped and result.reason == "nonfinite_loss"
    assert result.metrics["train/skipped_nonfinite_loss"] == 1
    assert all(math.isfinite(value) for value in result.metrics.values())
    assert trainer.num_updates == 1 and trainer.skipped_steps == {"nonfinite_loss": 1}
    assert_same_weights(weights_of(trainer), before)
    assert json.dumps(trainer.optimizer.state_dict(), default=torch.Tensor.tolist) == state


def test_a_gradient_that_is_not_finite_never_reaches_the_weights(hf_dir: Path) -> None:
    trainer = make_trainer(hf_dir, lr=1e-2, clip_grad=1.0)
    before = weights_of(trainer)
    result = trainer.train_step([make_sample("s0", [5, 6, 7], [0, 1, 1], credit=1e30)])
    assert result.reason == "nonfinite_gradient" and "train/grad_norm" not in result.metrics
    assert_same_weights(weights_of(trainer), before)
    assert not trainer.train_step(random_samples(1)).skipped


def test_the_engine_gets_a_copy_under_hugging_face_names(hf_dir: Path) -> None:
    trainer = make_trainer(hf_dir, lr=1e-2)
    published = trainer.state_dict_for_engine()
    frozen = {name: value.clone() for name, value in published.items()}
    assert load_file(hf_dir / "model.safetensors").keys() <= published.keys()
    assert published["lm_head.weight"].data_ptr() == published["model.embed_tokens.weight"].data_ptr()
    assert not any(value.requires_grad for value in published.values())
    trainer.train_step(random_samples(1))
    assert_same_weights(published, frozen)
    moved = trainer.state_dict_for_engine()
    assert any(not torch.equal(moved[name], frozen[name]) for name in frozen)


def test_bfloat16_computes_narrow_and_keeps_wide_weights(hf_dir: Path) -> None:
    samples = random_samples(1)
    trainer = make_trainer(hf_dir, dtype="bfloat16", lr=1e-6)
    wide = make_trainer(hf_dir)
    old = old_policy(samples, wide, spread=0.05)
    narrow_loss = trainer.train_step(samples, signals=Signals(old=old)).metrics["train/loss"]
    assert narrow_loss == pytest.approx(
        wide.train_step(samples, signals=Signals(old=old)).metrics["train/loss"], abs=0.1
    )
    assert {p.dtype for p in trainer.model.parameters()} == {torch.float32}
    assert {t.dtype for t in trainer.state_dict_for_engine().values()} == {torch.bfloat16}
    # a step of this size is far below the spacing of bfloat16 numbers, yet it is not lost
    assert any(not torch.equal(p, q) for p, q in zip(trainer.model.parameters(), wide.model.parameters(), strict=True))


def test_threads_are_limited_where_the_step_runs(hf_dir: Path) -> None:
    trainer = make_trainer(hf_dir, num_threads=1)
    seen: list[int] = []
    handle = trainer.model.register_forward_pre_hook(lambda *_: seen.append(torch.get_num_threads()))

    def work() -> None:
        torch.set_num_threads(2)
        trainer.train_step(random_samples(1))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    handle.remove()
    assert set(seen) == {1}


def test_transformers_loads_the_checkpoint_with_equal_logits(hf_dir: Path, tmp_path: Path) -> None:
    trainer = make_trainer(hf_dir, lr=1e-2)
    trainer.train_step(random_samples(1))
    target = checkpoint_dir(tmp_path, 1)
    trainer.save_checkpoint(target, step=1, extra={"rows_used": 8})
    assert latest_checkpoint(tmp_path) == target and [p.name for p in tmp_path.iterdir()] == ["step_000001"]
    loaded: Any = AutoModelForCausalLM.from_pretrained(target).eval()
    ids = torch.arange(20).unsqueeze(0)
    with torch.no_grad():
        mine, theirs = trainer.model(input_ids=ids).logits, loaded(input_ids=ids).logits
    torch.testing.assert_close(mine, theirs, rtol=1e-6, atol=1e-6)
    assert "silva" not in (target / "config.json").read_text()
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        assert (target / name).read_bytes() == (hf_dir / name).read_bytes()
    assert PreTrainedTokenizerFast.from_pretrained(target).encode("w3 w9") == [3, 9]


def test_the_final_weights_are_a_plain_model_directory(hf_dir: Path, tmp_path: Path) -> None:
    trainer = make_trainer(hf_dir, lr=1e-2)
    trainer.train_step(random_samples(1))
    trainer.save_hf(tmp_path / "final")
    found = sorted(path.name for path in (tmp_path / "final").iterdir())
    assert "model.safetensors" in found and "tokenizer.json" in found and "optimizer.pt" not in found
    assert_same_weights(weights_of(make_trainer(tmp_path / "final")), weights_of(trainer))


def test_a_resumed_run_equals_one_that_never_stopped(hf_dir: Path, tmp_path: Path) -> None:
    settings = {"lr": 1e-2, "weight_decay": 0.1, "clip_grad": 1.0, "micro_batch_size": 2}
    batches = [random_samples(seed) for seed in range(4)]
    straight = make_trainer(hf_dir, **settings)
    straight_metrics = [straight.train_step(batch).metrics for batch in batches]

    first = make_trainer(hf_dir, **settings)
    for batch in batches[:2]:
        first.train_step(batch)
    first.train_step([])
    first.save_checkpoint(tmp_path / "step_000002", step=2, extra={"position": 17})
    resumed = make_trainer(hf_dir, **settings)
    state = resumed.load_checkpoint(tmp_path / "step_000002")
    assert (state.step, state.extra) == (2, {"position": 17})
    assert (resumed.num_updates, resumed.skipped_steps) == (2, {"no_trainable_tokens": 1})
    for batch, expected in zip(batches[2:], straight_metrics[2:], strict=True):
        assert resumed.train_step(batch).metrics == pytest.approx(expected, abs=1e-6)
    assert_same_weights(weights_of(resumed), weights_of(straight), atol=1e-6)
    # the optimizer is what makes the difference: without its state the runs part
    fresh = PolicyTrainer(tmp_path / "step_000002", resumed.config)
    for batch in batches[2:]:
        fresh.train_step(batch)
    with pytest.raises(AssertionError):
        assert_same_weights(weights_of(fresh), weights_of(straight), atol=1e-6)


def test_the_command_line_may_change_the_learning_rate_of_a_resumed_run(hf_dir: Path, tmp_path: Path) -> None:
    trainer = make_trainer(hf_dir, lr=1e-3)
    trainer.train_step(random_samples(1))
    trainer.save_checkpoint(tmp_path / "step_000001", step=1, extra={})
    resumed = make_trainer(hf_dir, lr=5e-4)
    resumed.load_checkpoint(tmp_path / "step_000001")
    assert resumed.train_step(random_samples(2)).metrics["train/lr"] == 5e-4


def test_a_checkpoint_of_another_model_is_refused(hf_dir: Path, tmp_path: Path) -> None:
    other = make_trainer(write_model(tmp_path / "other", "qwen2", hidden_size=16))
    other.save_checkpoint(tmp_path / "step_000001", step=1, extra={})
    with pytest.raises(SilvaError, match="does not fit"):
        make_trainer(hf_dir).load_checkpoint(tmp_path / "step_000001")
    with pytest.raises(SilvaError, match="not a whole checkpoint"):
        make_trainer(hf_dir).load_checkpoint(tmp_path)


def test_a_damaged_optimizer_file_is_seen(hf_dir: Path, tmp_path: Path) -> None:
    trainer = make_trainer(hf_dir)
    trainer.train_step(random_samples(1))
    trainer.save_checkpoint(tmp_path / "step_000001", step=1, extra={})
    file = tmp_path / "step_000001" / "optimizer.pt"
    file.write_bytes(file.read_bytes()[:-100])
    assert not is_complete(tmp_path / "step_000001")
    file.write_bytes(file.read_bytes() + b"x" * 100)  # the right size, the wrong bytes
    with pytest.raises(SilvaError, match=r"optimizer\.pt"):
        make_trainer(hf_dir).load_checkpoint(tmp_path / "step_000001")
    for content in ([], {"optimizer": {}}):
        write = partial(torch.save, content)
        trainer.save_checkpoint(
            tmp_path / "odd", step=1, extra={}, write_more=lambda to, put=write: put(to / file.name)
        )
        with pytest.raises(SilvaError, match=r"optimizer\.pt is not of this version"):
            make_trainer(hf_dir).load_checkpoint(tmp_path / "odd")


def _put(name: str, content: object, folder: Path) -> None:
    torch.save(content, folder / name)


def test_a_model_directory_that_cannot_work_is_refused_with_the_reason(hf_dir: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no config\.json"):
        PolicyTrainer(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "qwen2"')
    with pytest.raises(ConfigError, match="cannot be loaded"):
        PolicyTrainer(tmp_path)
    weights = load_file(hf_dir / "model.safetensors")
    weights.pop("model.norm.weight")
    (tmp_path / "config.json").write_text((hf_dir / "config.json").read_text())
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ConfigError, match=r"lacks the weights model\.norm\.weight"):
        PolicyTrainer(tmp_path)


def test_ids_outside_the_vocabulary_name_their_session(hf_dir: Path) -> None:
    trainer = make_trainer(hf_dir)
    for bad in (-1, VOCAB):
        with pytest.raises(SilvaError, match=rf"s9/None holds token id {bad}"):
            trainer.train_step([make_sample("s9", [1, bad, 3], [0, 1, 1])])


@pytest.mark.parametrize("bad", [{"lr": -1.0}, {"lr": math.inf}, {"weight_decay": -0.1}])
def test_impossible_optimizer_settings_are_refused(hf_dir: Path, bad: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(bad))):
        make_trainer(hf_dir, **bad)
