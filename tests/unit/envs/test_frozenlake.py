import asyncio
import random
from collections import Counter

import pytest

from deepswe.config import FrozenLakeTasks
from deepswe.envs import frozenlake
from deepswe.envs.frozenlake import (
    FrozenLakeEnv,
    FrozenLakeSuite,
    LakeTask,
    draw_map,
    grid,
    is_heldout,
    read_move,
    relational,
    shortest_path,
)
from deepswe.errors import EnvironmentFault, TaskError

LAKE = LakeTask("lake", "train", ("SFH", "HFF", "FFG"), 4)


def play(task, *completions, seed=0, **settings):
    """Outcomes of the turns, and the verdict."""

    async def attempt():
        env = FrozenLakeEnv(task, FrozenLakeTasks(**settings), seed=seed)
        opening = await env.start()
        outcomes = [await env.act(completion, timeout_s=1) for completion in completions]
        verdict = await env.finish()
        await env.close()
        return opening, outcomes, verdict

    return asyncio.run(attempt())


def test_the_goal_ends_the_attempt_with_reward_1():
    _, outcomes, verdict = play(LAKE, "Right", "Down", "Right", "Down")
    assert [outcome.done for outcome in outcomes] == [False, False, False, True]
    assert verdict.grade.reward == 1.0
    assert verdict.artifact == "Right Down Right Down"
    assert outcomes[0].call.arguments == {"direction": "Right"}


def test_a_hole_ends_the_attempt_with_reward_0():
    _, outcomes, verdict = play(LAKE, "Down")
    assert outcomes[0].done
    assert verdict.grade.reward == 0.0
    assert verdict.grade.reason == "fell into a hole"


def test_an_attempt_that_is_cut_short_has_reward_0():
    _, _, verdict = play(LAKE, "Right")
    assert (verdict.grade.reward, verdict.grade.reason) == (0.0, "did not reach the goal")


def test_the_edge_stops_a_move():
    _, outcomes, _ = play(LAKE, "Up", "Left")
    assert [outcome.observation for outcome in outcomes] == ["P _ O\nO _ _\n_ _ G"] * 2


def test_the_grid_shows_player_ice_holes_and_goal():
    opening, outcomes, _ = play(LAKE, "Right")
    assert opening[0].content.endswith("\nP _ O\nO _ _\n_ _ G")
    assert "Left, Down, Right or Up" in opening[0].content
    assert outcomes[0].observation == "_ P O\nO _ _\n_ _ G" == grid(LAKE, (0, 1))


def test_relational_says_what_lies_in_each_direction_and_the_way_to_the_goal():
    assert relational(LAKE, (0, 0)) == "wall hole 1 wall Down 2 Right 2"
    assert relational(LAKE, (0, 1)) == "1 2 hole wall Down 2 Right 1"
    assert relational(LAKE, (2, 0)) == "wall wall goal hole Down 0 Right 2"
    assert relational(LakeTask("t", "train", ("GF", "FS"), 2), (1, 1)) == "1 wall wall 1 Up 1 Left 1"
    opening, outcomes, _ = play(LAKE, "Right", "jump", observation="relational")
    assert opening[0].content == "wall hole 1 wall Down 2 Right 2"
    assert [outcome.observation for outcome in outcomes] == ["1 2 hole wall Down 2 Right 1"] * 2


def test_no_move_costs_a_turn_and_says_what_to_answer():
    _, outcomes, verdict = play(LAKE, "I think I shall swim")
    assert outcomes[0].error == "no_move"
    assert outcomes[0].observation.startswith("Answer with one move: Left, Down, Right or Up.\nP")
    assert verdict.artifact == ""


def test_no_move_may_end_the_attempt_with_reward_0():
    _, outcomes, verdict = play(LAKE, "Right", "swim", no_move="end")
    assert [outcome.done for outcome in outcomes] == [False, True]
    assert (outcomes[1].error, verdict.grade.reward, verdict.grade.reason) == ("no_move", 0.0, "named no move")
    with pytest.raises(EnvironmentFault, match="lake is over"):
        play(LAKE, "swim", "Right", no_move="end")


@pytest.mark.parametrize(
    ("text", "move"),
    [
        ("Left", "Left"),
        (" down\n", "Down"),
        ("Not left, not up; so RIGHT.", "Right"),
        ("u", "Up"),
        ("upper", None),
        ("I'd say d", None),
        ("", None),
    ],
)
def test_the_last_named_move_or_a_single_letter_is_read(text, move):
    assert read_move(text) == move


def test_an_attempt_cannot_go_on_after_its_end():
    with pytest.raises(EnvironmentFault, match="lake is over"):
        play(LAKE, "Down", "Up")


def test_slippery_ice_moves_to_either_side_one_time_in_three_each():
    task = LakeTask("wide", "train", ("FFFFG", "FFFFF", "FFSFF", "FFFFF", "FFFFF"), 4)
    suite = FrozenLakeSuite(FrozenLakeTasks(slippery=True, train=1, heldout=1))

    async def slips():
        return [(await suite.open(task, seed=seed).act("Right", timeout_s=1)).observation for seed in range(600)]

    cells = Counter(text.split().index("P") for text in asyncio.run(slips()))
    assert set(cells) == {7, 13, 17}  # above, right of and below cell 12
    assert all(150 < count < 250 for count in cells.values())
    assert suite.reference(task, seed=0) is None


def test_maps_keep_the_promises_of_the_config():
    config = FrozenLakeTasks(min_size=3, max_size=6, min_frozen=0.6, max_frozen=0.7, solvable_within=5)
    rng = random.Random(0)
    maps = [draw_map(rng, config) for _ in range(300)]
    assert {len(rows) for rows, _ in maps} == {3, 4, 5, 6}
    for rows, distance in maps:
        text = "".join(rows)
        assert all(len(row) == len(rows) for row in rows)
        assert (text.count("S"), text.count("G")) == (1, 1)
        assert 1 <= distance <= 5
    frozen = sum("".join(rows).count("F") + 2 for rows, _ in maps) / sum(len(rows) ** 2 for rows, _ in maps)
    assert 0.6 < frozen < 0.8


def test_the_same_seed_gives_the_same_maps_and_another_gives_others():
    def first(seed):
        suite = FrozenLakeSuite(FrozenLakeTasks(seed=seed, heldout=5))
        return [task.rows for task in [*suite.split("train")[:5], *suite.split("heldout")]]

    assert first(1) == first(1)
    assert first(1) != first(2)


def test_held_out_maps_are_distinct_and_never_in_training():
    suite = FrozenLakeSuite(FrozenLakeTasks(train=3000, heldout=100))
    heldout = [task.rows for task in suite.split("heldout")]
    assert len(set(heldout)) == 100
    assert not set(heldout) & {task.rows for task in suite.split("train")}
    assert all(map(is_heldout, heldout))
    assert len({task.id for task in suite.split("train")}) == 3000
    assert suite.split("unseen") == ()


def test_reference_solves_every_map_within_its_distance():
    suite = FrozenLakeSuite(FrozenLakeTasks(heldout=1))
    for task in suite.split("train")[:100]:
        moves = list(suite.reference(task, seed=0))
        assert len(moves) == task.distance <= 8
        _, outcomes, verdict = play(task, *moves)
        assert verdict.grade.reward == 1.0
        assert [outcome.done for outcome in outcomes] == [False] * (len(moves) - 1) + [True]


def test_shortest_path_is_none_behind_holes():
    assert shortest_path(("SH", "HG"), (0, 0)) is None


def test_settings_that_leave_no_map_are_an_error(monkeypatch):
    monkeypatch.setattr(frozenlake, "_TRIES", 500)
    config = FrozenLakeTasks(min_size=2, max_size=2, heldout=100)
    with pytest.raises(TaskError, match=r"different heldout maps of sizes 2 to 2 .* raise tasks.max_size"):
        FrozenLakeSuite(config)


def test_corpus_and_description_cover_what_is_said():
    suite = FrozenLakeSuite(FrozenLakeTasks(heldout=1))
    texts = "\n".join(suite.corpus())
    assert all(word in texts for word in ("Left", "Down", "Right", "Up", "P", "_", "O", "G", "Answer"))
    assert suite.describe(LAKE) == {"repo": "size 3", "kind": "distance 4"}
