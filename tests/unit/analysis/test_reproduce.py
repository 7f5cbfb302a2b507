import math

import pytest

from deepswe.analysis.reproduce import Arm, band, compare, final_reward, render_page, steps_to_reward
from deepswe.errors import ConfigError
from deepswe.session.reproduce import find_experiment, load_experiment

PATHS = ("grpo-vs-grpopp", "compact-filtering", "ablation", "sft-then-rl", "datasets")


def rows(*rewards, turns=10):
    return tuple({"step": n + 1, "reward_mean": r, "turns": turns, "steps_mean": 2.0} for n, r in enumerate(rewards))


def test_steps_to_a_reward_are_counted_in_turns_and_from_a_mean_over_five_steps():
    assert steps_to_reward(rows(0, 0, 1, 1, 1, 1), 0.6) == (50, True)
    assert steps_to_reward(rows(1, 1, 0), 0.6) == (30, False)
    assert final_reward(rows(0, 0, 0, 0, 0, 0, 0.4, 0.8)) == pytest.approx(0.6)


def test_an_effect_is_the_geometric_mean_of_the_ratios_with_student_s_interval():
    fast = Arm("fast", "fast", (rows(*[0] * 4, 1, *[1] * 9), rows(*[1] * 14)))
    slow = Arm("slow", "slow", (rows(*[0] * 9, *[1] * 5), rows(*[0] * 9, *[1] * 5)))
    effect = compare(fast, slow, measure="steps_to_reward", threshold=0.6, expect="lower")
    # 7 and 5 training steps against 12 and 12
    logs = [math.log(7 / 12), math.log(5 / 12)]
    assert effect.ratio == pytest.approx(math.exp(sum(logs) / 2))
    reach = 12.706 * abs(logs[0] - logs[1]) / 2
    assert effect.low == pytest.approx(math.exp(sum(logs) / 2 - reach), rel=1e-3)
    assert not effect.holds  # two seeds say little
    assert effect.censored == 0


def test_one_seed_shows_nothing_and_a_run_that_never_gets_there_is_counted():
    lone = Arm("a", "a", (rows(0, 0, 0, 0, 0, 0),))
    effect = compare(lone, lone, measure="steps_to_reward", threshold=0.5, expect="lower")
    assert (effect.ratio, effect.low, effect.high, effect.censored, effect.holds) == (1.0, 0.0, math.inf, 2, False)


def test_a_band_is_student_s_interval_over_seeds():
    drawn = band([rows(0.2), rows(0.4), rows(0.6)], "reward_mean")
    assert drawn.points == ((1.0, pytest.approx(0.4)),)
    assert drawn.band[0][1] == pytest.approx(0.4 - 4.3027 * 0.2 / math.sqrt(3), rel=1e-4)


def test_the_page_is_one_file_that_says_what_was_not_shown():
    arm = Arm("a", "GRPO <b>", (rows(0.1, 0.2), rows(0.2, 0.3)))
    effect = compare(arm, arm, measure="final_reward", threshold=0.5, expect="higher")
    page = render_page("Why?", [arm], [effect], measure="final_reward", threshold=0.5, seeds=[0, 1])
    assert "<script" not in page
    assert "http" not in page.replace("http-equiv", "")
    assert "GRPO &lt;b&gt;" in page
    assert "<td>no</td>" in " ".join(page.split()).replace("<td>no ", "<td>no</td>")


@pytest.mark.parametrize("name", PATHS)
def test_every_experiment_is_well_formed(name):
    experiment = load_experiment(find_experiment(name))
    assert experiment.question.endswith("?")
    assert experiment.seeds >= 3


def test_an_unknown_experiment_names_the_known_ones():
    with pytest.raises(ConfigError, match="one of ablation, compact-filtering"):
        find_experiment("figure-5")
