import pytest

from deepswe.config import AlgorithmConfig, ClusterConfig, TrainingConfig
from deepswe.training.health import clip_warning, device_warning, findings

FINE = {
    **{"step": 1, "reward_mean": 0.5, "entropy": 0.6, "updates": 1.0, "grad_norm": 1.0, "kl_sampler": 0.001},
    **{"ratio_max": 1.0, "clip_low": 0.0, "clip_high": 0.0, "graded": 8, "ending/submitted": 8, "ending/error": 0},
    **{"ending/max_context": 0, "groups": 4.0, "groups_informative": 2.0},
}


def names(*rows):
    return {finding.name for finding in findings(rows)}


def test_a_healthy_row_and_no_rows_say_nothing():
    assert names(FINE) == names() == set()


def test_each_number_outside_of_its_range_is_named_once_and_plainly():
    for change, name in (
        ({"entropy": 0.1}, "entropy_low"),
        ({"entropy": 1.5}, "entropy_high"),
        ({"kl_sampler": 0.2}, "kl_sampler"),
        ({"ratio_max": 11.0}, "ratio"),
        ({"clip_low": 0.2, "clip_high": 0.2}, "clipped"),
        ({"ending/max_context": 9, "graded": 17}, "truncated"),
        ({"graded": 6}, "ungraded"),
        ({"groups_informative": 0.0}, "uninformative"),
    ):
        assert names({**FINE, **change}) == {name}
    assert "the policy explores little" in findings([{**FINE, "entropy": 0.1}])[0].text


@pytest.mark.parametrize(("updates", "advised"), [(1, False), (4, True)])
def test_the_clip_is_advised_only_where_it_acts(updates: int, advised: bool) -> None:
    text = findings([{**FINE, "entropy": 0.1, "updates": updates}])[0].text
    assert ("algorithm.clip_high" in text) == advised


def test_a_gradient_is_measured_against_its_own_recent_past():
    calm = [FINE] * 6
    assert names(*calm, {**FINE, "grad_norm": 9.0}) == set()
    assert names(*calm, {**FINE, "grad_norm": 11.0}) == {"gradient"}
    assert names({**FINE, "grad_norm": 99.0}) == set()


def test_a_reward_below_half_of_its_best_mean_is_a_collapse():
    good, bad = [FINE] * 10, {**FINE, "reward_mean": 0.1}
    assert names(*good, bad) == set()
    assert names(*good, *[bad] * 5) == {"collapse"}
    assert names(*[{**FINE, "reward_mean": 0.05}] * 12) == set()


def test_a_step_without_an_update_says_nothing_of_the_learner():
    assert names({**FINE, "updates": 0.0, "entropy": 0.0}) == set()


def test_a_clip_that_cannot_act_is_told():
    one, four = TrainingConfig(), TrainingConfig(updates_per_step=2, epochs=2)
    assert "have no effect" in clip_warning(one, AlgorithmConfig())
    assert clip_warning(four, AlgorithmConfig()) == ""
    assert "nothing to clip" in clip_warning(four, AlgorithmConfig(preset="rloo"))


def test_a_recipe_for_a_gpu_says_that_there_is_none():
    meant = ClusterConfig(gpu="h100")
    assert "no GPU is seen, but cluster.gpu is h100" in device_warning(meant, seen=False)
    assert device_warning(meant, seen=True) == device_warning(ClusterConfig(), seen=False) == ""
