"""`deepswe plan`: a recipe's plan, and where it does not fit, the settings that would mend it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

from transformers import AutoConfig, Qwen3Config

from deepswe.config import CustomTasks, FrozenLakeTasks, ModelConfig, Recipe, build_recipe
from deepswe.cores import usable_cores
from deepswe.errors import ConfigError
from deepswe.memory import available_memory_mib, usable_memory_mib
from deepswe.policy.model_path import model_directory
from deepswe.policy.models import scratch_config
from deepswe.sandbox.admission import choose_concurrency
from deepswe.training.plan import Plan, make_plan, micro_shape
from deepswe.training.plan_trace import ModelFacts, StepMemory, model_facts, step_memory

FAMILY: Mapping[str, Mapping[str, Any]] = {
    "Qwen/Qwen3-0.6B": {"hidden": 1024, "layers": 28, "heads": 16, "inner": 3072, "tied": True},
    "Qwen/Qwen3-1.7B": {"hidden": 2048, "layers": 28, "heads": 16, "inner": 6144, "tied": True},
    "Qwen/Qwen3-4B": {"hidden": 2560, "layers": 36, "heads": 32, "inner": 9728, "tied": True},
    "Qwen/Qwen3-8B": {"hidden": 4096, "layers": 36, "heads": 32, "inner": 12288, "tied": False},
    "Qwen/Qwen3-14B": {"hidden": 5120, "layers": 40, "heads": 40, "inner": 17408, "tied": False},
    "Qwen/Qwen3-32B": {"hidden": 5120, "layers": 64, "heads": 64, "inner": 25600, "tied": False},
}
"""Shapes of the dense Qwen3 models, from their own config.json, so that they can be planned without the hub."""
VOCABULARY, KEY_VALUE_HEADS, HEAD_WIDTH = 151_936, 8, 128
"""The same in all of them."""

MOST_GPUS = 512
SMALL_CACHES = (4.0, 1.0)
"""GiB of keys and values with which an embedded engine still goes."""


def plan_recipe(recipe: Recipe) -> Plan:
    """The plan of a recipe; nothing of the model is allocated or downloaded, except its configuration.

    Raises:
        ConfigError: the model's configuration cannot be had, or activation offload or LoRA do not go with it.
    """
    config = model_configuration(recipe.model)
    facts = _facts(_Key(config))
    rows, length = micro_shape(recipe)
    narrow = recipe.model.dtype == "bfloat16"
    sharded = recipe.cluster.learner_gpus > 1 or recipe.training.cpu_offload
    step = _step(
        _Key(config),
        rows=rows,
        length=length,
        recompute=recipe.training.activation_checkpointing,
        autocast=narrow and not sharded,
        narrow=narrow and (sharded or bool(recipe.model.lora.rank)),
        lora=recipe.model.lora if recipe.model.lora.rank else None,
        modules=sharded or recipe.cluster.gpu != "cpu",
    )
    memory_gib = usable_memory_mib() / 1024
    return make_plan(recipe, facts, step, machine_gib=memory_gib, cores=usable_cores(), places=_places(recipe))


def _places(recipe: Recipe) -> int:
    """Sandboxes that may be alive at once: what the recipe says, or on this machine its pool; 0 is no limit."""
    if isinstance(recipe.tasks, FrozenLakeTasks | CustomTasks):  # which open none
        return 0
    if recipe.cluster.gpu != "cpu":
        return recipe.sandbox.concurrency
    return choose_concurrency(recipe.sandbox, usable_cores(), available_memory_mib())


def remedies(recipe: Recipe) -> list[str]:
    """Settings each of which makes the recipe fit, in the order in which they cost the least; empty where none does."""
    found: list[str] = []
    tree = recipe.model_dump(mode="json")
    tried: list[dict[str, Any]] = []
    for offered in _changes(recipe):
        changes = {key: value for key, value in offered.items() if _value(tree, key) != value}
        if not changes or changes in tried:
            continue
        tried.append(changes)
        try:
            changed = _with(recipe, changes)
        except ConfigError:
            continue
        if not plan_recipe(changed).problems:
            found.append(" ".join(f"{key}={_shown(value)}" for key, value in changes.items()))
    return found


def check_plan(recipe: Recipe) -> Plan:
    """The plan of a recipe that fits.

    Raises:
        ConfigError: it does not; the message names what is too large and the settings that mend it.
    """
    plan = plan_recipe(recipe)
    if not plan.problems:
        return plan
    mended = remedies(recipe)
    advice = f"set {', or '.join(mended[:3])}" if mended else "use a smaller model or larger GPUs (cluster.gpu)"
    raise ConfigError(f"{recipe.run.name} does not fit: {'; '.join(plan.problems)}; {advice}")


def model_configuration(model: ModelConfig) -> Any:
    """The configuration of a recipe's model: of `model.scratch`, of a known name, of a directory or of the hub.

    Raises:
        ConfigError: it cannot be had.
    """
    if not model.path:
        return scratch_config(model.scratch, vocabulary=model.scratch.vocabulary)
    if model.path in FAMILY and not Path(model.path).exists():
        shape = FAMILY[model.path]
        return Qwen3Config(
            vocab_size=VOCABULARY,
            hidden_size=shape["hidden"],
            intermediate_size=shape["inner"],
            num_hidden_layers=shape["layers"],
            num_attention_heads=shape["heads"],
            num_key_value_heads=KEY_VALUE_HEADS,
            head_dim=HEAD_WIDTH,
            tie_word_embeddings=shape["tied"],
        )
    path = model_directory(model.path)
    try:
        return AutoConfig.from_pretrained(path)
    except (OSError, ValueError) as error:
        first = str(error).strip().splitlines()[0]
        raise ConfigError(
            f"the configuration of model.path {model.path!r} cannot be read ({first}); give a directory that holds "
            f"config.json, or one of {', '.join(FAMILY)}"
        ) from error


class _Key:
    """A configuration as a key: by its contents."""

    def __init__(self, config: Any) -> None:
        self.config = config
        self._text = config.to_json_string()

    def __hash__(self) -> int:
        return hash(self._text)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Key) and other._text == self._text


@lru_cache(maxsize=32)
def _facts(key: _Key) -> ModelFacts:
    return model_facts(key.config)


@lru_cache(maxsize=128)
def _step(key: _Key, **options: Any) -> StepMemory:
    return step_memory(key.config, **options)


def _changes(recipe: Recipe) -> Iterator[dict[str, Any]]:
    """Changes to try, the cheap ones first: of the learner's memory, then of the engine's."""
    training, cluster, rollout = recipe.training, recipe.cluster, recipe.rollout
    if not training.activation_checkpointing:
        yield {"training.activation_checkpointing": True}
    smaller = max(rollout.max_tokens, training.tokens_per_microbatch // 2)
    if smaller < training.tokens_per_microbatch:
        yield {"training.tokens_per_microbatch": rollout.max_tokens}
        yield {"training.activation_checkpointing": True, "training.tokens_per_microbatch": rollout.max_tokens}
    if recipe.engine.backend == "embedded":
        yield from ({"engine.cache_gib": size} for size in SMALL_CACHES)
    if recipe.engine.backend == "vllm" and cluster.tensor_parallel < 8:
        engine = max(cluster.engine_gpus, 2 * cluster.tensor_parallel)
        yield {"cluster.tensor_parallel": 2 * cluster.tensor_parallel, "cluster.engine_gpus": engine}
    if cluster.gpu != "cpu":
        count = 2 * cluster.learner_gpus
        while count <= min(MOST_GPUS, 16 * cluster.learner_gpus):
            yield {"cluster.learner_gpus": count}
            yield {"cluster.learner_gpus": count, "training.activation_checkpointing": True}
            count *= 2
        if not training.cpu_offload:
            yield {"training.cpu_offload": True, "training.activation_checkpointing": True}
    if not recipe.model.lora.rank:
        yield {"model.lora.rank": 32, "training.activation_checkpointing": True}
    half = rollout.max_tokens // 2
    yield {
        "rollout.max_tokens": half,
        "rollout.max_turn_tokens": min(half, rollout.max_turn_tokens),
        "training.tokens_per_microbatch": min(half, training.tokens_per_microbatch),
    }


def _value(tree: Mapping[str, Any], key: str) -> Any:
    """What a setting is now."""
    node: Any = tree
    for part in key.split("."):
        node = node[part]
    return node


def _with(recipe: Recipe, changes: Mapping[str, Any]) -> Recipe:
    tree = recipe.model_dump(mode="json")
    for key, value in changes.items():
        *path, last = key.split(".")
        node = tree
        for part in path:
            node = node[part]
        node[last] = value
    return build_recipe(tree, origin="changed recipe")


def _shown(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
