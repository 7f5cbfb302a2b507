import copy
from dataclasses import replace

import pytest
import torch

from deepswe.config import ImitationConfig, TrainingConfig
from deepswe.errors import TrainingError
from deepswe.policy.scripted import ByteRenderer
from deepswe.training.imitation import Imitation, check_tokens, choose_batch, choose_records, write_anew
from deepswe.types import Message, Step


def imitation(model, seed=0, **options) -> Imitation:
    config = ImitationConfig(**{"steps": 12, "batch_size": 4, "learning_rate": 1e-2, "warmup_steps": 2, **options})
    return Imitation(model, config, TrainingConfig(), seed=seed)


def weights(model):
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


def test_the_loss_falls_to_near_nothing_on_what_is_imitated(make_model, make_group):
    rows = []
    imitation(make_model(torch.float32), steps=80).run(make_group([1.0] * 4), rows.append)
    assert rows[0]["loss"] > 3
    assert rows[-1]["loss"] < 0.3
    assert [row["step"] for row in rows] == list(range(1, 81))
    assert rows[-1]["learning_rate"] < rows[40]["learning_rate"] < 1e-2


def test_first_loss_is_the_mean_over_sampled_or_all_tokens(make_model, make_group):
    group = make_group([1.0] * 4)
    for train_on in ("sampled", "all"):
        model, rows = make_model(), []
        total, count = 0.0, 0
        for trajectory in group:
            tokens = torch.tensor([t for span in trajectory.spans for t in span.tokens])
            sampled = [span.sampled for span in trajectory.spans for _ in span.tokens]
            with torch.no_grad():
                logp = model(input_ids=tokens[None]).logits[0].log_softmax(-1)
            for i in range(1, len(tokens)):
                if sampled[i] or train_on == "all":
                    total, count = total - float(logp[i - 1, tokens[i]]), count + 1
        imitation(model, train_on=train_on).run(group, rows.append, until=1)
        assert rows[0]["trained_tokens"] == count
        assert rows[0]["loss"] == pytest.approx(total / count, abs=1e-9)


def test_micro_batches_do_not_change_the_update(make_model, make_group):
    group, results = make_group([1.0] * 4), []
    for budget in (10_000, 20):
        model = make_model()
        subject = Imitation(
            model,
            ImitationConfig(steps=1, batch_size=4),
            TrainingConfig(tokens_per_microbatch=budget),
            seed=0,
        )
        subject.run(group, lambda row: None)
        results.append(weights(model))
    assert float((results[0] - results[1]).abs().max()) < 1e-9


def test_resumed_imitation_equals_an_uninterrupted_one(make_model, make_group):
    group = make_group([1.0] * 9)
    straight, rows = imitation(make_model(torch.float32)), []
    straight.run(group, rows.append)
    first = imitation(make_model(torch.float32))
    first.run(group, lambda row: None, until=5)
    resumed, again = imitation(make_model(torch.float32, seed=4)), []
    resumed.load_state_dict(copy.deepcopy(first.state_dict()))
    resumed.run(group, again.append)
    assert torch.equal(weights(straight.model), weights(resumed.model))
    assert [{**row, "seconds": 0} for row in again] == [{**row, "seconds": 0} for row in rows[5:]]


def test_too_few_trajectories_are_refused(make_model, make_group):
    with pytest.raises(TrainingError, match=r"3 trajectories to imitate, but imitation.batch_size is 4"):
        imitation(make_model(torch.float32)).run(make_group([1.0] * 3), lambda row: None)


def test_every_epoch_is_a_permutation_in_whole_batches():
    first = [index for update in range(3) for index in choose_batch(10, 3, update=update, seed=1)]
    second = [index for update in range(3, 6) for index in choose_batch(10, 3, update=update, seed=1)]
    assert len(set(first)) == len(set(second)) == 9
    assert first != second


def test_rejection_sampling_keeps_the_shortest_solved_attempts_of_each_task(make_group):
    attempts = [*make_group([1, 1, 0, None], seed=1), *(replace(t, task_id="b") for t in make_group([0, 0.5], seed=2))]
    config = ImitationConfig(per_task=1)
    assert [(t.task_id, t.attempt) for t in choose_records(attempts, config)] == [("task", 0)]
    generous = ImitationConfig(min_reward=0.5, trajectories=2)
    assert [(t.task_id, t.attempt) for t in choose_records(attempts, generous)] == [("task", 0), ("task", 1)]
    assert choose_records(attempts, ImitationConfig(phase="before_heldout")) == ()


def test_a_teacher_s_turns_are_written_in_this_model_s_tokens_with_exact_masks(make_group):
    renderer = ByteRenderer()
    steps = (Step("1", None, "too low"), Step("7", None, ""))
    teacher = replace(make_group([1])[0], steps=steps)
    written = write_anew(teacher, [Message("user", "guess")], renderer)
    sampled = [span.tokens for span in written.spans if span.sampled]
    assert sampled == [renderer.completion("1"), renderer.completion("7")]
    assert written.spans[0].tokens == renderer.opening([Message("user", "guess")])
    assert renderer.read_observation(written.spans[2].tokens) == "too low"
    assert [span.sampled for span in written.spans] == [False, True, False, True]


def test_tokens_of_another_model_are_refused(make_group):
    check_tokens(make_group([1]), 32)
    with pytest.raises(TrainingError, match=r"use imitation\.source = 'text'"):
        check_tokens(make_group([1]), 4)


def test_packed_imitation_equals_padded_imitation(make_model, make_group):
    group, results = make_group([1.0] * 4), []
    for packing in ("padded", "packed"):
        model = make_model()
        training = TrainingConfig(tokens_per_microbatch=40, packing=packing)
        Imitation(model, ImitationConfig(steps=1, batch_size=4), training, seed=0).run(group, lambda row: None)
        results.append(weights(model))
    assert float((results[0] - results[1]).abs().max()) < 1e-9


def test_recorded_trajectories_need_runs_and_a_reference_takes_none():
    with pytest.raises(ValueError, match="need runs"):
        ImitationConfig(steps=1, source="tokens")
    with pytest.raises(ValueError, match="takes none"):
        ImitationConfig(steps=1, runs=("runs/a",))
