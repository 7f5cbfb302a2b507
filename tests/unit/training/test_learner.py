import copy
import math
from dataclasses import replace

import pytest
import torch
from torch.nn.functional import cross_entropy

from deepswe.algorithms.filters import select_groups
from deepswe.config import PRESETS, AlgorithmConfig, TrainingConfig
from deepswe.errors import TrainingError
from deepswe.training.learner import Learner
from deepswe.types import Ending, TokenSpan

ROW = {
    *("loss", "grad_norm", "learning_rate", "entropy", "ratio", "clip_low", "clip_high", "kl_sampler", "updates"),
    *("tokens", "trained_tokens", "padding_share", "groups", "groups_uniform", "groups_informative", "seconds"),
    *("ratio_max", "age_mean", "age_max", "advantage_mean", "advantage_std", "advantage_min", "advantage_max"),
    *(
        f"trajectories_{name}"
        for name in ("total", "trained", "masked", "ungraded", "stale", "canary", "uniform", "lonely")
    ),
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


VARIANTS = {
    **{name: {"preset": name} for name in PRESETS},
    "sequence": {"ratio": "sequence", "clip_high": 1e3, "clip_low": 0.99},
    "corrected": {"importance": "sequence_truncated", "old_logprobs": "learner", "importance_cap": 1.5},
    "steps": {"advantage_level": "step", "discount": 0.9},
    "ppo by turn": {"preset": "ppo", "advantage_level": "step", "gae_lambda": 0.9},
    "penalties": {"kl": "k2", "kl_coefficient": 0.3, "entropy_coefficient": 0.1},
}


QUICK = ("gspo", "ppo by turn", "penalties")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in sorted(VARIANTS)]
)
def test_neither_micro_batches_nor_padding_nor_packing_change_an_update(make_model, make_group, name):
    groups = [make_group([1, 0, 0, 1], seed=1), make_group([0, 1, 0], seed=2)]
    moves, rows = [], []
    for budget, packing in ((10_000, "padded"), (40, "padded"), (60, "packed")):
        training = {"tokens_per_microbatch": budget, "packing": packing, "epochs": 2, "updates_per_step": 2}
        moved, row = step_of(make_model, groups, training=training, **VARIANTS[name])
        moves.append(moved)
        rows.append(row)
    assert float(moves[0].abs().max()) > 1e-4
    for moved, row in zip(moves[1:], rows[1:], strict=True):
        assert float((moved - moves[0]).abs().max()) < 1e-6
        for key in row.keys() - {"seconds", "padding_share"}:
            assert row[key] == pytest.approx(rows[0][key], abs=1e-6), key
    assert rows[2]["padding_share"] == 0


def test_epochs_and_mini_batches_make_that_many_updates_and_the_upper_bound_acts_in_them(make_model, make_group):
    groups = [make_group([1, 0, 0], seed=s) for s in range(2)]
    options = {"old_logprobs": "learner", "normalisation": "token_mean", "clip_high": 0.001, "clip_low": 0.001}
    _, row = step_of(make_model, groups, training={"epochs": 3, "updates_per_step": 2}, **options)
    assert row["updates"] == 6
    assert row["clip_high"] > 0.05
    assert row["clip_low"] > 0.05
    assert row["ratio_max"] > 1.001
    _, once = step_of(make_model, groups, **options)
    assert (once["updates"], once["clip_high"], once["clip_low"], once["ratio_max"]) == (1, 0, 0, 1)


def test_a_shortened_history_trains_each_turn_in_the_context_that_it_was_sampled_in(make_model, make_group):
    """One trajectory of two sequences has the gradient of two one-turn trajectories with its advantage."""
    whole = make_group([1, 0, 0])
    cut = [
        replace(t, spans=(*t.spans[:2], TokenSpan((1, 2, *t.spans[2].tokens), False), t.spans[3]), starts=(2,))
        for t in whole
    ]
    parts = [
        replace(t, attempt=2 * t.attempt + half, spans=spans, starts=())
        for t in cut
        for half, spans in enumerate(t.sequences)
    ]
    together = gradient_of(make_model, [cut], advantage="group_mean", normalisation="token_mean")
    apart = gradient_of(make_model, [parts], advantage="group_mean", normalisation="token_mean")
    assert float((together - apart).abs().max()) < 1e-9
    assert float(together.abs().max()) > 1e-4


def test_every_trajectory_weighs_the_same_however_many_sequences_it_has(make_model, make_group):
    whole = make_group([1, 0])
    cut = [replace(t, spans=(*t.spans[:2], TokenSpan((1, 2), False), t.spans[3]), starts=(2,)) for t in whole]
    subject = learner(make_model(), normalisation="sequence_mean")
    mini = subject._mini_batch(select_groups([cut], subject.algorithm))
    sums = {}
    for batch, denominators in zip(mini.batches, mini.denominators, strict=True):
        for row, value in zip(batch.row_N.tolist(), denominators.tolist(), strict=True):
            sums[row] = sums.get(row, 0.0) + 1 / value
    assert sum(sums.values()) == pytest.approx(1.0)


def test_the_divergence_from_the_start_is_zero_at_first_and_pulls_back_later(make_model, make_group):
    group = make_group([1, 0, 0])
    model = make_model(torch.float32)
    subject = learner(model, normalisation="token_mean")
    first = subject.update([group], measure_start=True)
    assert first["kl_start"] == pytest.approx(0, abs=1e-7)
    for _ in range(5):
        assert "kl_start" not in subject.update([group])
    assert subject.update([group], measure_start=True)["kl_start"] > 1e-4
    held = learner(make_model(torch.float32), normalisation="token_mean", kl_coefficient=50.0)
    for _ in range(6):
        row = held.update([group])
    assert row["kl_start"] < 0.5 * subject.update([group], measure_start=True)["kl_start"]


def test_the_start_is_that_before_the_first_update_even_if_it_is_measured_later(make_model, make_group):
    group = make_group([1, 0, 0])
    subject = learner(make_model(torch.float32), normalisation="token_mean", kl_start_every=3)
    for _ in range(2):
        assert "kl_start" not in subject.update([group])
    assert subject.update([group], measure_start=True)["kl_start"] > 1e-5


def test_the_start_can_be_given_and_then_survives_a_resume(make_model, make_group):
    group, start = make_group([1, 0, 0]), make_model(torch.float32, seed=3)
    rows = []
    for _ in range(2):
        subject = learner(make_model(torch.float32), kl_coefficient=1.0)
        subject.set_start(start.state_dict())
        rows.append(subject.update([group]))
    assert rows[0]["kl_start"] == rows[1]["kl_start"] > 0.01


def test_an_entropy_bonus_raises_the_entropy(make_model, make_group):
    entropies = []
    for coefficient in (0.0, 5.0):
        subject = learner(make_model(torch.float32), normalisation="token_mean", entropy_coefficient=coefficient)
        for _ in range(5):
            row = subject.update([make_group([1, 0, 0])])
        entropies.append(row["entropy"])
    assert entropies[1] > entropies[0] + 0.01


@pytest.mark.parametrize("level", ["trajectory", "step"])
def test_a_value_head_learns_the_mean_reward_and_is_part_of_the_state(make_model, make_group, level):
    group = make_group([1, 0, 1, 0])
    training = {"learning_rate": 3e-2, "grad_clip": 1.0}
    options = {"preset": "ppo", "advantage_level": level, "training": training, "whiten": False}
    subject = learner(make_model(torch.float32), **options)
    rows = [subject.update([group]) for _ in range(8)]
    # values of 0, so half the squared rewards: a mean over tokens, 12 of 26 in a success, or over turns
    assert rows[0]["value_loss"] == pytest.approx(6 / 26 if level == "trajectory" else 0.25)
    assert rows[0]["value_explained"] == pytest.approx(0)
    assert rows[-1]["value_loss"] < 0.15
    resumed = learner(make_model(torch.float32, seed=9), **options)
    resumed.load_state_dict(copy.deepcopy(subject.state_dict()))
    assert {**resumed.update([group]), "seconds": 0} == {**subject.update([group]), "seconds": 0}


def test_a_disagreeing_sampler_is_corrected_by_bounded_weights(make_model, make_group):
    group = make_group([1, 0, 0])
    options = {"old_logprobs": "learner", "importance": "token_truncated", "importance_cap": 1.0}
    _, row = step_of(make_model, [group], **options)
    assert 0 < row["importance_mean"] < 1
    assert 0 < row["importance_bound"] < 1
    _, plain = step_of(make_model, [group], old_logprobs="learner")
    assert "importance_mean" not in plain


def test_the_row_says_how_old_the_samples_were_and_how_the_advantages_were_spread(make_model, make_group):
    model, group = make_model(), make_group([1, 0])
    subject = learner(model)
    first, second = subject.update([group]), subject.update([group])
    assert (first["age_mean"], second["age_mean"], second["age_max"]) == (0, 1, 1)
    assert (first["advantage_min"], first["advantage_max"]) == (-1, 1)


def test_stale_trajectories_train_nothing(make_model, make_group):
    subject = learner(make_model(), max_age=1)
    group = make_group([1, 0])
    rows = [subject.update([group]) for _ in range(3)]
    assert [row["updates"] for row in rows] == [1, 1, 0]
    assert rows[2]["trajectories_stale"] == 2
