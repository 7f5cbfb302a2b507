import contextlib
from dataclasses import replace

import pytest
import torch
from torch import nn
from transformers import Qwen3Config, Qwen3ForCausalLM

from deepswe.config import LoraAdapters, build_recipe
from deepswe.training import plan_trace
from deepswe.training.forward import TokenScorer
from deepswe.training.forward_family import FamilyForward
from deepswe.training.plan import (
    CONTEXT_GIB,
    CPU_CORE,
    GIB,
    EngineReckoning,
    flops_per_token,
    learner_memory,
    learner_tokens_per_s,
    make_plan,
    reckon_engine,
    step_times,
)
from deepswe.training.plan_trace import StepMemory, model_facts, step_memory


def small(layers=4, **changes):
    options = {
        "vocab_size": 64,
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 8,
        "tie_word_embeddings": True,
    }
    return Qwen3Config(num_hidden_layers=layers, **{**options, **changes})


def recipe(**sections):
    tree = {"run": {"name": "r"}, "tasks": {"kind": "frozenlake"}, **sections}
    return build_recipe(tree, origin="test")


def test_facts_are_those_of_the_real_model():
    for tied in (True, False):
        config = small(tie_word_embeddings=tied)
        facts, model = model_facts(config), Qwen3ForCausalLM(config)
        assert facts.parameters == sum(p.numel() for p in model.parameters())
        assert facts.layer == sum(p.numel() for p in model.model.layers[0].parameters())
        assert facts.outer == facts.parameters - 4 * facts.layer
        assert facts.active == 4 * facts.layer + 64 * 16
        assert facts.cache_values == 2 * 4 * 1 * 8
        assert facts.prepared == sum(m.weight.numel() for m in model.modules() if isinstance(m, nn.Linear))
    # q, k, v, o, gate, up, down of each layer, rank x (inputs + outputs)
    assert facts.lora(2) == 4 * 2 * ((16 + 16) + 2 * (16 + 8) + (16 + 16) + 3 * (16 + 32))


def test_a_deep_model_is_reckoned_from_two_shallow_ones(monkeypatch):
    config = small(layers=5)
    reckoned = step_memory(config, rows=2, length=24, recompute=False, autocast=False)
    monkeypatch.setattr(plan_trace, "MORE", 5)
    assert step_memory(config, rows=2, length=24, recompute=False, autocast=False) == reckoned


@pytest.mark.parametrize(("again", "modules"), [(False, False), (False, True), (True, True)])
def test_tensors_without_data_take_what_real_ones_take(monkeypatch, again, modules):
    """Also the masks: of 512 tokens one of bytes has 256 KiB, which these layers would show."""
    options = {"rows": 2, "length": 512, "recompute": again, "autocast": False, "modules": modules}
    traced = step_memory(small(layers=2), **options)
    monkeypatch.setattr(plan_trace, "FakeTensorMode", contextlib.nullcontext)
    assert step_memory(small(layers=2), **options) == traced


def kept_and_top(model, batch):
    """(bytes that a scorer leaves for its backward pass, most that it ever takes)."""
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    scorer = TokenScorer(model)
    with plan_trace._counted() as live:
        logp_N = scorer(batch).logp_N
        kept = live.bytes
        logp_N.sum().backward()
    return kept, live.top


@pytest.mark.parametrize("layers", [1, 3, 6])
@pytest.mark.parametrize("rows", [1, 3])
def test_the_plan_of_a_model_with_an_own_pass_is_that_of_this_pass(rows, layers):
    config, length = small(layers), 400
    step = step_memory(config, rows=rows, length=length, recompute=False, autocast=False)
    batch = plan_trace._whole(rows, length, 64)
    batch = replace(batch, tokens_BT=torch.randint(0, 64, (rows, length)))
    kept, top = kept_and_top(Qwen3ForCausalLM(config).eval(), batch)
    assert kept > step.activations
    assert step.activations + step.rest == pytest.approx(top, rel=0.02)
    fewer = replace(batch, mask_BT=batch.mask_BT & (torch.arange(length) % 60 < 15))
    assert kept_and_top(Qwen3ForCausalLM(config).eval(), fewer)[1] < top


TOLD = {"recompute": False, "autocast": False, "narrow": False, "lora": None, "modules": False}
BY_MODULES = {
    "modules asked for": ({}, {"modules": True}),
    "layers computed again": ({}, {"recompute": True}),
    "autocast": ({}, {"autocast": True}),
    "narrow weights": ({}, {"narrow": True}),
    "adapters": ({}, {"lora": LoraAdapters(rank=2)}),
    "a window": ({"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1}, {}),
}


@pytest.mark.parametrize("what", BY_MODULES)
def test_the_plan_of_what_the_modules_train_is_that_of_the_modules(monkeypatch, what):
    taken = []
    along = FamilyForward.along
    monkeypatch.setattr(FamilyForward, "along", lambda self, course: taken.append(1) or along(self, course))
    changes, told = BY_MODULES[what]
    step_memory(small(layers=2), rows=1, length=8, **TOLD)
    assert taken == [1]
    found = step_memory(small(layers=2, **changes), rows=1, length=8, **TOLD | told)
    assert taken == [1]
    assert found == step_memory(small(layers=2, **changes), rows=1, length=8, **TOLD | told | {"modules": True})


def test_rows_of_one_token_of_which_none_trains_have_a_plan():
    assert step_memory(small(layers=1), rows=2, length=1, **TOLD).activations > 0


def test_recomputed_layers_keep_their_inputs_alone():
    config = small(layers=3)
    kept = step_memory(config, rows=2, length=24, recompute=False, autocast=False).activations
    few = step_memory(config, rows=2, length=24, recompute=True, autocast=False).activations
    inputs = 3 * 2 * 24 * 16 * 4
    assert inputs <= few < kept / 3


def test_adapters_are_traced_with_what_they_keep():
    pytest.importorskip("peft")
    whole = step_memory(small(layers=2), rows=1, length=8, **TOLD | {"modules": True})
    lora = step_memory(small(layers=2), rows=1, length=8, **TOLD | {"lora": LoraAdapters(rank=2)})
    assert 0.5 * whole.activations < lora.activations < 1.5 * whole.activations


def test_operations_of_a_token_by_hand():
    facts = model_facts(small())
    assert flops_per_token(facts, 100) == 6 * facts.active + 6 * 4 * 16 * 100


def test_memory_of_the_learner_by_hand():
    facts, step = model_facts(small()), StepMemory(1000, 500)
    plain = learner_memory(recipe(algorithm={"kl_start_every": 0}), facts, step)
    assert plain["weights"] == plain["gradients"] == 4 * facts.parameters
    assert plain["optimiser"] == 8 * facts.parameters
    assert (plain["activations"], plain["logits and products"], plain["start of RL"]) == (1000, 500, 0)
    assert learner_memory(recipe(), facts, step)["start of RL"] == 4 * facts.parameters
    shared = learner_memory(recipe(cluster={"learner_gpus": 4}), facts, step)
    assert shared["optimiser"] == 2 * facts.parameters
    assert shared["gathered weights"] == 4 * (facts.outer + 2 * facts.layer) + 8 * (facts.outer + facts.layer)
    lora = learner_memory(recipe(model={"lora": {"rank": 2}, "dtype": "bfloat16"}), facts, step)
    assert lora["weights"] == 2 * facts.parameters + 4 * facts.lora(2)
    offloaded = learner_memory(recipe(training={"cpu_offload": True}), facts, step)
    assert offloaded["weights"] == offloaded["optimiser"] == 0


def test_an_asynchronous_step_takes_the_slower_part_and_a_synchronous_one_both():
    engine = EngineReckoning(0, 0, room=0, wanted=0, fits=True, width=64, tokens_per_s=1, trajectory_s=100)
    rollout = {"tasks_per_step": 16, "group_size": 8}
    together = step_times(recipe(rollout=rollout), engine, learner_s=30)
    assert together == {"learner": 30, "rollout": 200, "step": 230}
    apart = step_times(recipe(rollout=rollout, asynchrony={"max_age": 2}), engine, learner_s=30)
    assert apart == {"learner": 30, "rollout": 200, "step": 200}


def test_what_does_not_fit_is_named_with_its_largest_part():
    facts = model_facts(small())
    made = make_plan(recipe(), facts, StepMemory(int(3 * GIB), 0), machine_gib=2.0, cores=2)
    assert len(made.problems) == 1
    assert "the learner needs" in made.problems[0]
    assert "3.0 of them for activations" in made.problems[0]
    assert make_plan(recipe(), facts, StepMemory(1, 0), machine_gib=64.0, cores=2).problems == ()


def test_more_cores_train_more_tokens():
    facts = model_facts(small())
    one, two = (learner_tokens_per_s(recipe(), facts, 10, cores=cores) for cores in (1, 2))
    assert two == pytest.approx(2 * one)
    assert one < CPU_CORE.tflops * 1e12 / flops_per_token(facts, 10)
    assert torch.get_num_threads() == 1


def test_the_chunks_that_are_left_out_change_no_figure(monkeypatch):
    assert plan_trace.unlike_chunks(10, 3) == [0, 3, 9]
    wide = small(layers=1, vocab_size=1 << 18)
    few = step_memory(wide, rows=1, length=900, recompute=False, autocast=False)
    monkeypatch.setattr(plan_trace, "unlike_chunks", lambda count, rows: range(0, count, rows))
    assert step_memory(wide, rows=1, length=900, recompute=False, autocast=False) == few


def test_the_cache_of_the_recipe_is_that_of_the_plan_and_an_automatic_one_is_half_of_what_is_left():
    facts, step = model_facts(small()), StepMemory(0, 0)

    def room(limit_gib=80.0, held=0.0, **sections):
        return reckon_engine(recipe(**sections), facts, limit_gib=limit_gib, held=held, cores=1).room

    assert room() == 4 * GIB
    assert room(engine={"cache_gib": 1.5}) == 1.5 * GIB
    on_gpu = {"cluster": {"gpu": "h100"}}
    assert room(held=10 * GIB, **on_gpu) == pytest.approx((80.0 - CONTEXT_GIB - 10.0) / 2 * GIB)
    assert room(**on_gpu, run={"name": "r", "deterministic": True}) == 4 * GIB
    made = make_plan(recipe(engine={"cache_gib": 1e-6}), facts, step, machine_gib=64.0, cores=2)
    assert made.learner_gib["engine: keys and values"] == pytest.approx(1e-6, rel=1e-3)


@pytest.mark.parametrize(
    ("model", "engine", "size"), [("float32", "", 4), ("bfloat16", "", 2), ("bfloat16", "float32", 4)]
)
def test_keys_and_values_are_of_the_engine_s_type(model, engine, size):
    facts = model_facts(small())
    given = recipe(model={"dtype": model}, engine={"dtype": engine})
    made = make_plan(given, facts, StepMemory(0, 0), machine_gib=64.0, cores=2)
    assert made.model["cache bytes a token"] == size * facts.cache_values
    wanted = reckon_engine(given, facts, limit_gib=64.0, held=0, cores=2).wanted
    assert wanted == 16 * 8 * 18_432 * size * facts.cache_values  # 128 attempts of half of max_tokens


def test_a_cache_that_holds_up_the_rollout_is_told_with_the_key_and_the_size_that_holds_all():
    facts, step = model_facts(small()), StepMemory(0, 0)
    rollout = {"tasks_per_step": 2, "group_size": 4, "max_tokens": 2048, "max_turn_tokens": 64}

    def plan(cache_gib, **changes):
        tree = {"engine": {"cache_gib": cache_gib}, "rollout": rollout, **changes}
        return make_plan(recipe(**tree), facts, step, machine_gib=64.0, cores=2)

    # 8 attempts of 1024 tokens of 64 keys and values of 4 bytes are 2 MiB; a quarter of it holds 2
    tight, whole = plan(1 / 2048), plan(0)
    assert len(tight.notes) == 1
    assert "holds only 2 of its attempts: engine.cache_gib=0.00195 would make it" in tight.notes[0]
    assert f"{whole.step_s['rollout']:,.0f} s" in tight.notes[0]
    assert whole.step_s["rollout"] < tight.step_s["rollout"]
    assert whole.notes == ()
    # where the slowest attempt alone takes as long, more at once bring nothing
    assert plan(1 / 2048, cluster={"longest": 9.0}).notes == ()


def test_sandboxes_of_this_machine_share_its_cores_and_are_no_more_than_its_pool_allows():
    facts, step = model_facts(small()), StepMemory(0, 0)
    wanted = recipe(sandbox={"memory_mib": 1024})
    here = make_plan(wanted, facts, step, machine_gib=16.0, cores=2, places=24).sandboxes
    assert (here["alive"], here["cores"], here["memory_gib"]) == (24, 2, 16)
    there = recipe(sandbox={"memory_mib": 1024}, cluster={"gpu": "h100"})
    elsewhere = make_plan(there, facts, step, machine_gib=16.0, cores=2).sandboxes
    assert (elsewhere["alive"], elsewhere["cores"], elsewhere["memory_gib"]) == (128, 128, 128)


def test_on_a_gpu_the_engine_has_half_of_what_is_left_beside_all_that_the_learner_keeps():
    facts, limit = model_facts(small()), CONTEXT_GIB + 1 / 1024
    rollout = {"max_tokens": 65_536, "max_turn_tokens": 64}  # which fill any cache
    tree = {"cluster": {"gpu": "h100", "memory_gib": limit}, "algorithm": {"kl_start_every": 0}, "rollout": rollout}
    made = make_plan(recipe(**tree), facts, StepMemory(0, 0), machine_gib=64.0, cores=2)
    # of 1 MiB; weights, gradients and two moments in float32
    left = (1 << 20) - 16 * facts.parameters
    assert left > 0
    assert made.learner_gib["engine: keys and values"] * GIB == pytest.approx(left / 2)


def test_an_engine_on_a_cpu_is_reckoned_with_its_copies_of_the_weights():
    facts = model_facts(small())
    size = {"float32": 4, "bfloat16": 2}
    for kind, lora, gpu, expected in (
        ("float32", 0, "cpu", facts.prepared),
        ("bfloat16", 0, "cpu", facts.prepared),
        ("bfloat16", 0, "h100", 0),  # there it has none in bfloat16
        ("float32", 4, "cpu", 0),  # nor beside adapters
    ):
        asked = recipe(engine={"dtype": kind}, model={"lora": {"rank": lora}}, cluster={"gpu": gpu})
        made = reckon_engine(asked, facts, limit_gib=10.0, held=0.0, cores=2)
        assert made.weights == expected * size[kind]
