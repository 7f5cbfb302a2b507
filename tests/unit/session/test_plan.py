import json
import subprocess
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from deepswe.cli.app import build_app
from deepswe.config import ModelConfig, build_recipe, load_recipe
from deepswe.errors import ConfigError
from deepswe.memory import available_memory_mib
from deepswe.session import plan
from deepswe.session.plan import FAMILY, check_plan, model_configuration, plan_recipe
from deepswe.session.sharded import check_team
from deepswe.training.plan import learner_tokens_per_s
from deepswe.training.plan_trace import StepMemory, model_facts

RECIPES = Path(__file__).parents[3] / "recipes"
AT_SCALE = ("deepswe-32b", "deepswe-32b-eval", "eight-gpu-qwen3-14b", "one-gpu-qwen3-1.7b", "one-gpu-qwen3-8b-lora")


def recipe(**sections):
    tree = {
        "run": {"name": "r"},
        "tasks": {"kind": "frozenlake"},
        "model": {
            "scratch": {"hidden_size": 32, "layers": 2, "heads": 2, "key_value_heads": 1, "intermediate_size": 64}
        },
        "rollout": {"max_tokens": 256, "max_turn_tokens": 64},
        **sections,
    }
    return build_recipe(tree, origin="test")


@pytest.mark.parametrize("path", sorted(RECIPES.glob("*-*.toml")), ids=lambda path: path.stem)
def test_every_recipe_at_scale_loads(path):
    assert path.stem in AT_SCALE
    made = load_recipe(path)
    assert made.model.path in FAMILY
    if made.cluster.learner_gpus > 1:
        check_team(made)


def test_the_published_numbers_are_in_the_recipe():
    made = load_recipe(RECIPES / "deepswe-32b.toml")
    rollout, algorithm, training = made.rollout, made.algorithm, made.training
    assert (rollout.tasks_per_step, rollout.group_size, rollout.max_steps, rollout.temperature) == (64, 8, 50, 1.0)
    assert rollout.max_tokens == 4096 + 32_768
    assert (rollout.trajectory_timeout_s, rollout.generation_timeout_s, rollout.grading_timeout_s) == (5400, 1200, 300)
    assert (algorithm.clip_low, algorithm.clip_high, algorithm.kl_coefficient) == (0.2, 0.28, 0)
    assert (algorithm.advantage, algorithm.normalisation, algorithm.entropy_coefficient) == (
        "leave_one_out",
        "constant",
        0,
    )
    assert not any(row.train for name, row in algorithm.endings if name != "submitted")
    assert (training.steps, training.learning_rate, training.decay) == (200, 1e-6, "constant")
    assert (training.weight_decay, training.grad_clip, training.updates_per_step) == (0.01, 1.0, 1)
    assert made.agent.step_timeout_s == 90
    assert made.cluster.learner_gpus + made.cluster.engine_gpus == 64
    judged = load_recipe(RECIPES / "deepswe-32b-eval.toml")
    assert (judged.rollout.max_steps, judged.rollout.max_tokens, judged.evaluation.attempts) == (100, 65_536, 16)


@pytest.mark.slow
@pytest.mark.parametrize("name", AT_SCALE)
def test_every_recipe_at_scale_fits(name):
    check_plan(load_recipe(RECIPES / f"{name}.toml"))


def test_a_recipe_that_cannot_fit_is_refused_with_the_setting_that_mends_it():
    tight = recipe(
        cluster={"memory_gib": 0.05},
        training={"tokens_per_microbatch": 16_384},
        algorithm={"kl_start_every": 0},
        engine={"backend": "embedded"},
        rollout={"max_tokens": 256, "max_turn_tokens": 64, "tasks_per_step": 1, "group_size": 2},
    )
    with pytest.raises(ConfigError, match=r"r does not fit: the learner needs .* GiB") as failure:
        check_plan(tight)
    assert "training.tokens_per_microbatch=256" in str(failure.value)
    mended = tight.model_copy(update={"training": tight.training.model_copy(update={"tokens_per_microbatch": 256})})
    assert plan_recipe(mended).problems == ()


def test_published_speeds_of_two_gpu_trainings_are_reckoned_within_ten_percent():
    for path, gpu, gpus, figure in (("Qwen/Qwen3-4B", "h200", 8, 29_500), ("Qwen/Qwen3-0.6B", "h100", 1, 11_900)):
        made = recipe(
            model={"path": path, "dtype": "bfloat16"},
            cluster={"gpu": gpu, "learner_gpus": gpus},
            training={"activation_checkpointing": True},
        )
        facts = model_facts(model_configuration(made.model))
        assert learner_tokens_per_s(made, facts, 65_536, cores=1) == pytest.approx(figure, rel=0.1)


@pytest.mark.parametrize(
    ("changes", "modules"),
    [
        ({}, False),
        ({"cluster": {"gpu": "h100"}}, True),
        ({"cluster": {"learner_gpus": 2}}, True),
        ({"training": {"cpu_offload": True}}, True),
    ],
    ids=["one process on a CPU", "a GPU", "several processes", "offloaded"],
)
def test_the_pass_that_is_planned_is_the_one_that_will_be_taken(monkeypatch, changes, modules):
    seen = []

    def step_memory(config, **options):
        seen.append(options["modules"])
        return StepMemory(1, 1)

    monkeypatch.setattr(plan, "step_memory", step_memory)
    plan._step.cache_clear()
    plan_recipe(recipe(**changes))
    plan._step.cache_clear()
    assert seen == [modules]


def test_a_model_whose_configuration_cannot_be_had_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"the configuration of model\.path .* cannot be read"):
        model_configuration(ModelConfig(path=str(tmp_path)))


def test_the_command_prints_the_plan(tmp_path):
    path = tmp_path / "r.toml"
    path.write_text(
        '[run]\nname = "r"\n[tasks]\nkind = "frozenlake"\n[model.scratch]\nhidden_size = 32\nlayers = 2\nheads = 2\n'
        "[rollout]\nmax_tokens = 256\nmax_turn_tokens = 64\n"
    )
    shown = CliRunner().invoke(build_app(), ["plan", str(path)])
    assert shown.exit_code == 0, shown.output
    assert "parameters" in shown.output
    assert "sandboxes:" in shown.output
    assert "GPU-hours" not in shown.output
    assert "USD" not in shown.output
    made = json.loads(CliRunner().invoke(build_app(), ["plan", str(path), "--json"]).output)
    assert made["step_s"]["step"] > 0
    assert made["problems"] == []


def test_a_recipe_for_this_machine_plans_the_sandboxes_that_its_pool_would_have():
    tasks = {"kind": "micro"}
    sandbox = {"memory_mib": 2 * available_memory_mib()}  # of which the pool lets four be alive
    assert plan_recipe(recipe(tasks=tasks, sandbox=sandbox)).sandboxes["alive"] == pytest.approx(4, abs=1)
    assert plan_recipe(recipe(tasks=tasks, sandbox={"concurrency": 3})).sandboxes["alive"] == 3
    assert plan_recipe(recipe()).sandboxes["alive"] == 128


def test_what_several_processes_cannot_train_is_refused_with_the_setting():
    with pytest.raises(ConfigError, match=r"engine\.backend embedded .* kl_start_every need the weights"):
        check_team(recipe())


def test_the_files_for_a_cluster_are_whole_and_their_recipe_can_be_trained_by_many():
    place = RECIPES.parent / "deploy" / "training"
    listed = yaml.safe_load((place / "kustomization.yaml").read_text())
    texts = [(place / name).read_text() for name in listed["resources"]]
    objects = [made for text in texts for made in yaml.safe_load_all(text) if made is not None]
    assert {made["kind"] for made in objects} >= {"JobSet", "StatefulSet", "Service", "PersistentVolumeClaim"}
    for generator in listed["configMapGenerator"]:
        for name in generator["files"]:
            check_team(load_recipe(place / name))
    script = RECIPES.parent / "deploy" / "slurm" / "train.sbatch"
    subprocess.run(["bash", "-n", str(script)], check=True)
