import copy
import math

import pytest
import torch
from torch.nn.functional import cross_entropy

from deepswe.config import AlgorithmConfig, TrainingConfig
from deepswe.errors import TrainingError
from deepswe.training.learner import Learner
from deepswe.types import Ending

ROW = {
    *("loss", "grad_norm", "learning_rate", "entropy", "ratio", "clip_low", "clip_high", "kl_sampler", "updates"),
    *("tokens", "trained_tokens", "padding_share", "groups", "groups_uniform", "seconds"),
    *(f"trajectories_{name}" for name in ("total", "trained", "masked", "ungraded", "uniform", "lonely")),
}


def learner(model, *, training=None, **algorithm) -> Learner:
    config = TrainingConfig(**{"learning_rate": 1e-3, "grad_clip": 1e9, **(training or {})})
    return Learner(model, config, AlgorithmConfig(**algorithm), max_tokens=100)


def weights(model):
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


def step_of(make_model, groups, **options):
    """The change of the weights and the metrics of one update from the same start."""
    model = make_model()
    before = weights(model)
    metrics = learner(model, **options).update(groups)
    return weights(model) - before, metrics


def gradient_of(make_model, groups, **algorithm):
    """The gradient of one update: plain gradient descent would be nicer, but AdamW's first moment holds it exactly."""
    model = make_model()
    subject = learner(model, **algorithm)
    subject.update(groups)
    state = subject.state_dict()["optimiser"]["adamw"]["state"]
    return torch.cat([state[key]["exp_avg"].flatten() for key in sorted(state)]) / (1 - 0.9)


@pytest.mark.parametrize("normalisation", ["constant", "token_mean", "sequence_mean"])
def test_microbatched_update_equals_full_batch(make_model, make_group, normalisation):
    groups = [make_group([1, 0, 0, 1], seed=1), make_group([0, 1, 0], seed=2)]
    full, full_row = step_of(make_model, groups, normalisation=normalisation)
    small, small_row = step_of(make_model, groups, normalisation=normalisation, training={"tokens_per_microbatch": 40})
    assert float((full - small).abs().max()) < 1e-9
    for name in ROW - {"seconds", "padding_share"}:
        assert small_row[name] == pytest.approx(full_row[name], abs=1e-6)
    assert small_row["padding_share"] < full_row["padding_share"]


def test_gradient_is_the_hand_written_policy_gradient(make_model, make_group):
    group = make_group([1, 0, 0])
    model = make_model()
    for trajectory, advantage in zip(group, (1.0, -0.5, -0.5), strict=True):
        tokens = torch.tensor([t for span in trajectory.spans for t in span.tokens])
        sampled = torch.tensor([span.sampled for span in trajectory.spans for _ in span.tokens])
        logits = model(input_ids=tokens[None]).logits[0, :-1]
        logp = -cross_entropy(logits, tokens[1:], reduction="none")[sampled[1:]]
        (-(logp.exp() / math.exp(-3.4)) * advantage / (3 * 100)).sum().backward()
    expected = torch.cat([p.grad.flatten() for p in model.parameters() if p.ndim >= 2])
    got = gradient_of(make_model, [group], clip_low=0.99, clip_high=1e9)[: len(expected)]
    assert float((got - expected).abs().max()) < 1e-8
    assert float(expected.abs().max()) > 1e-4


@pytest.mark.parametrize("normalisation", ["token_mean", "sequence_mean"])
def test_filtered_trajectories_do_not_move_their_siblings(make_model, make_group, normalisation):
    group = make_group([1, 0, 0])
    masked = make_group([0, 1], ending=Ending.MAX_CONTEXT, seed=5)
    ungraded = make_group([None, None], seed=6)
    alone, _ = step_of(make_model, [group], normalisation=normalisation)
    together, row = step_of(make_model, [[*group, *masked, *ungraded]], normalisation=normalisation)
    assert torch.equal(alone, together)
    assert (row["trajectories_masked"], row["trajectories_ungraded"], row["trajectories_trained"]) == (2, 2, 3)


def test_constant_denominator_counts_trajectories_as_sampled(make_model, make_group):
    group = make_group([1, 0, 0])
    alone = gradient_of(make_model, [group])
    beside = gradient_of(make_model, [group, make_group([1, 1, 1], seed=3)])
    assert float((alone - 2 * beside).abs().max()) < 1e-12


def test_padding_does_not_change_a_gradient(make_model, make_group):
    group = make_group([1, 0, 0])
    one_row_each = {"training": {"tokens_per_microbatch": 1}}
    padded, row = step_of(make_model, [group])
    bare, bare_row = step_of(make_model, [group], **one_row_each)
    assert row["padding_share"] > 0.1
    assert bare_row["padding_share"] == pytest.approx(0)
    assert float((padded - bare).abs().max()) < 1e-9


def test_a_batch_in_which_nothing_trains_changes_nothing(make_model, make_group):
    moved, row = step_of(make_model, [make_group([1, 1]), make_group([None, 0.0])])
    assert float(moved.abs().max()) == 0
    assert set(row) == ROW
    assert row["updates"] == row["loss"] == row["tokens"] == 0
    assert row["groups_uniform"] == 2


def test_an_update_raises_the_odds_of_what_was_rewarded(make_model, make_group):
    group = make_group([1, 0])
    model = make_model()
    subject = learner(model, old_logprobs="learner", normalisation="token_mean", training={"grad_clip": 1.0})

    def logp(trajectory):
        tokens = torch.tensor([t for span in trajectory.spans for t in span.tokens])
        sampled = torch.tensor([span.sampled for span in trajectory.spans for _ in span.tokens])
        with torch.no_grad():
            logits = model(input_ids=tokens[None]).logits[0, :-1]
        return float(-cross_entropy(logits, tokens[1:], reduction="none")[sampled[1:]].sum())

    before = [logp(t) for t in group]
    for _ in range(5):
        subject.update([group])
    after = [logp(t) for t in group]
    assert after[0] > before[0] + 0.1
    assert after[1] < before[1] - 0.1


def test_mini_batches_are_whole_groups_and_the_clip_acts_in_the_second(make_model, make_group):
    groups = [make_group([1, 0, 0], seed=s) for s in range(4)]
    options = {"old_logprobs": "learner", "clip_low": 0.0, "clip_high": 0.0}
    _, one = step_of(make_model, groups, **options)
    _, four = step_of(make_model, groups, training={"updates_per_step": 4}, **options)
    assert (one["updates"], one["clip_low"], one["clip_high"], one["ratio"]) == (1, 0, 0, 1)
    assert four["updates"] == 4
    assert four["clip_low"] + four["clip_high"] > 0.1
    assert four["trained_tokens"] == one["trained_tokens"]


def test_log_probs_are_at_the_sampling_temperature(make_model, make_group):
    group = make_group([1, 0])
    model = make_model()
    rows = []
    for temperature in (1.0, 100.0):
        subject = Learner(
            copy.deepcopy(model), TrainingConfig(), AlgorithmConfig(), max_tokens=100, temperature=temperature
        )
        rows.append(subject.update([group]))
    assert rows[1]["entropy"] == pytest.approx(math.log(32), abs=1e-3)
    assert rows[0]["entropy"] < rows[1]["entropy"] - 0.05


def test_resumed_learner_makes_the_same_next_update(make_model, make_group):
    groups = [[make_group([1, 0, 0], seed=2 * n), make_group([0, 1], seed=2 * n + 1)] for n in range(6)]
    options = {"training": {"warmup_steps": 4}}
    straight = learner(make_model(torch.float32), **options)
    rows = [straight.update(group) for group in groups]
    first = learner(make_model(torch.float32), **options)
    for group in groups[:3]:
        first.update(group)
    resumed = learner(make_model(torch.float32, seed=9), **options)
    resumed.load_state_dict(copy.deepcopy(first.state_dict()))
    assert resumed.version == 3
    again = [resumed.update(group) for group in groups[3:]]
    assert torch.equal(weights(straight.model), weights(resumed.model))
    for row, other in zip(rows[3:], again, strict=True):
        assert {**row, "seconds": 0} == {**other, "seconds": 0}


def test_non_finite_loss_is_an_error_and_leaves_the_weights(make_model, make_group):
    model = make_model()
    group = make_group([1, 0])
    bad = list(group)
    span = bad[0].spans[1]
    nan = type(span)(span.tokens, True, (math.nan,) * len(span.tokens))
    bad[0] = type(bad[0])("task", 0, "train", 0, (bad[0].spans[0], nan), (), Ending.SUBMITTED, bad[0].grade)
    before = weights(model)
    subject = learner(model)
    with pytest.raises(TrainingError, match="loss of update 1 is nan; the weights are unchanged"):
        subject.update([bad])
    assert torch.equal(weights(model), before)
    assert all(parameter.grad is None for parameter in model.parameters())
    subject.update([group])
    assert subject.version == 1


def test_non_finite_gradient_is_an_error_and_leaves_the_weights(make_model, make_group):
    model = make_model()
    subject = learner(model)
    handle = model.lm_head.weight.register_hook(lambda gradient: gradient * math.inf)
    before = weights(model)
    with pytest.raises(TrainingError, match=r"gradient norm of update 1 is (nan|inf)"):
        subject.update([make_group([1, 0])])
    handle.remove()
    assert torch.equal(weights(model), before)


def test_narrow_master_weights_are_refused(make_model):
    with pytest.raises(TrainingError, match=r"is torch.bfloat16; load the model in float32"):
        learner(make_model(torch.bfloat16))


def test_bfloat16_forward_stays_close_to_float32(make_model, make_group):
    group = make_group([1, 0, 0])
    rows = []
    for bfloat16 in (False, True):
        model = make_model(torch.float32)
        subject = Learner(model, TrainingConfig(), AlgorithmConfig(), max_tokens=100, bfloat16=bfloat16)
        rows.append(subject.update([group]))
    assert rows[1]["entropy"] == pytest.approx(rows[0]["entropy"], rel=0.02)
    assert rows[1]["entropy"] != rows[0]["entropy"]


def test_decay_ends_with_the_last_step(make_model, make_group):
    subject = learner(make_model(), training={"steps": 4, "decay": "linear"})
    rates = [subject.update([make_group([1, 0, 0])])["learning_rate"] for _ in range(5)]
    assert rates == pytest.approx([1e-3, 0.75e-3, 0.5e-3, 0.25e-3, 0.0])
