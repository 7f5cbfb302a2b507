"""What a run would take, reckoned before it starts: memory of each GPU by part, time of a step, machines, cost, days.

Memory of the learner is counted, not guessed: see `plan_trace`. Times are a roofline: the larger of what the arithmetic
and what the memory's bandwidth allow, times a utilisation that others have published or we have measured.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial

from deepswe.config import ClusterConfig, Recipe
from deepswe.policy.embedded import cache_limit
from deepswe.training.plan_trace import ModelFacts, StepMemory

GIB = float(1 << 30)


@dataclass(frozen=True, slots=True)
class Gpu:
    """Figures of the makers' data sheets: dense bfloat16, no sparsity.

    Attributes:
        memory_gib: usable.
        tflops: bfloat16 products.
        tb_per_s: bandwidth of its memory.
    """

    memory_gib: float
    tflops: float
    tb_per_s: float


GPUS = {
    "rtx4090": Gpu(23.5, 165.0, 1.008),
    "l40s": Gpu(44.5, 362.0, 0.864),
    "a100": Gpu(79.2, 312.0, 2.039),
    "h100": Gpu(79.6, 989.0, 3.35),
    "h200": Gpu(139.8, 989.0, 4.8),
    "b200": Gpu(178.4, 2250.0, 8.0),
}
CPU_CORE = Gpu(0.0, 0.06, 0.008)
"""One core of a server, in float32; memory is the machine's."""

LEARNER_USE = 0.31
"""Share of the peak that a learner with activation checkpointing turns into the model's own operations, with causal
attention counted once. Published figures give it: Qwen3-4B at 65,536 tokens on 8 H200, 29.5k tokens/s, 0.306;
Qwen3-0.6B on one H100, 11.9k tokens/s, 0.314 (prime-rl; the second taken at the same length, which was not said)."""
RECOMPUTED = 4.0 / 3.0
"""Work with activation checkpointing over work without."""
PREFILL_USE, DECODE_USE = 0.5, 0.6
"""Shares of the peak arithmetic in prefill, and of the bandwidth in decoding."""
PASS_S = 3e-3
"""Time of an engine's pass beside its arithmetic: scheduling, sampling, launches."""
ENGINE_SHARE = 0.9
"""Of a GPU's memory that an engine uses; vLLM's own default."""
WORTH = 0.95
"""A setting is named where it brings the time below this share."""
CONTEXT_GIB, SLACK = 0.8, 0.05
"""On a GPU: the driver's context and libraries, and what an allocator loses to fragments."""


@dataclass(frozen=True, slots=True)
class Plan:
    """What a run would take.

    Attributes:
        model: parameters, trained ones, and bytes of the keys and values of a token.
        learner_gib: memory of each learner GPU (or of the process, on a CPU) by part.
        engine_gib: of each engine GPU; empty where the engine is in the learner's.
        limit_gib: memory that there is on each.
        host_gib: of the CPU's memory for each learner GPU, with `training.cpu_offload`.
        tokens_per_s: of the learner, and of the engine's sampling.
        step_s: learner, rollout, and the whole step as the two overlap or not.
        sandboxes: how many at once, and the cores, GiB of memory and GiB of disk for them.
        run: steps, days, GPU-hours and US dollars.
        problems: what does not fit; empty where all does.
        notes: settings that would make it faster.
    """

    model: dict[str, float]
    learner_gib: dict[str, float]
    engine_gib: dict[str, float]
    limit_gib: float
    host_gib: float
    tokens_per_s: dict[str, float]
    step_s: dict[str, float]
    sandboxes: dict[str, float]
    run: dict[str, float]
    problems: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def learner_total_gib(self) -> float:
        """Memory of each learner GPU in all."""
        return sum(self.learner_gib.values())

    @property
    def engine_total_gib(self) -> float:
        """Memory of each engine GPU in all."""
        return sum(self.engine_gib.values())


def micro_shape(recipe: Recipe) -> tuple[int, int]:
    """(rows, length) of the largest micro-batch: of the longest trajectories, as many as the budget lets be."""
    length = recipe.rollout.max_tokens
    return max(1, recipe.training.tokens_per_microbatch // length), length


def trained_parameters(recipe: Recipe, facts: ModelFacts) -> int:
    """Parameters with a gradient."""
    return facts.lora(recipe.model.lora.rank) if recipe.model.lora.rank else facts.parameters


def learner_memory(recipe: Recipe, facts: ModelFacts, step: StepMemory, *, micros: int = 2) -> dict[str, float]:
    """Bytes of each learner GPU, by part.

    Args:
        recipe: the run.
        facts: of its model.
        step: of its largest micro-batch, on one GPU.
        micros: micro-batches of an update; with a single one the gradients come to be as the activations go.
    """
    processes, lora = recipe.cluster.learner_gpus, bool(recipe.model.lora.rank)
    trained, narrow = trained_parameters(recipe, facts), recipe.model.dtype == "bfloat16"
    offloaded = recipe.training.cpu_offload
    frozen = facts.parameters * (2 if narrow and processes == 1 else 4) if lora else 0
    held = 0.0 if offloaded else 1.0 / processes
    start = recipe.algorithm.kl_coefficient > 0 or recipe.algorithm.kl_start_every > 0
    return {
        "weights": held * (frozen + 4 * trained),
        "gradients": held * 4 * trained,
        "optimiser": held * 8 * trained,
        "start of RL": held * (4 * trained if processes > 1 else frozen + 4 * trained) if start else 0.0,
        "gathered weights": _gathered(recipe, facts, trained) if processes > 1 or offloaded else 0.0,
        "activations": float(step.activations),
        "logits and products": float(step.rest if micros > 1 else max(0, step.rest - 4 * trained)),
    }


def _gathered(recipe: Recipe, facts: ModelFacts, trained: int) -> float:
    """What FSDP holds whole at once: all outside of the layers, two layers, and the gradients of one of each."""
    size = 2 if recipe.model.dtype == "bfloat16" else 4
    gradients = (facts.outer + facts.layer) * (size + 4) if trained == facts.parameters else 0
    return float((facts.outer + 2 * facts.layer) * size + gradients)


def flops_per_token(facts: ModelFacts, length: float) -> float:
    """Operations of forward and backward of one token in a trajectory of `length`: 6 a parameter, and attention."""
    return 6.0 * facts.active + 6.0 * facts.layers * facts.attention * length


def learner_tokens_per_s(recipe: Recipe, facts: ModelFacts, length: float, *, cores: int) -> float:
    """Tokens that all learner GPUs train on in a second."""
    cluster = recipe.cluster
    peak = GPUS[cluster.gpu].tflops if cluster.gpu != "cpu" else CPU_CORE.tflops * cores
    use = LEARNER_USE * (1.0 if recipe.training.activation_checkpointing else RECOMPUTED)
    return cluster.learner_gpus * peak * 1e12 * use / flops_per_token(facts, length)


@dataclass(frozen=True, slots=True)
class EngineReckoning:
    """What sampling would take.

    Attributes:
        weights, cache: bytes on each GPU; of an embedded engine's weights those that it keeps laid out for itself.
        room: bytes that there are for the cache.
        wanted: bytes of a cache that holds all that the recipe has in flight.
        fits: whether one trajectory of full length does.
        width: trajectories in flight, over all copies.
        tokens_per_s: sampled in all, at that width.
        trajectory_s: mean wall time of one trajectory, tools included.
    """

    weights: float
    cache: float
    room: float
    wanted: float
    fits: bool
    width: float
    tokens_per_s: float
    trajectory_s: float


def reckon_engine(
    recipe: Recipe, facts: ModelFacts, *, limit_gib: float, held: float, cores: int, places: int = 0
) -> EngineReckoning:
    """Width and speed of the engine by a roofline of decoding and prefill.

    Args:
        recipe, facts: the run, and of its model.
        limit_gib: memory of each GPU.
        held: bytes of the learner there beside its activations.
        cores: of this machine, where there is no GPU.
        places: trajectories that the sandboxes allow; 0 is no limit.
    """
    cluster, rollout = recipe.cluster, recipe.rollout
    embedded = recipe.engine.backend == "embedded"
    size = 2 if recipe.engine_dtype == "bfloat16" else 4
    shards = cluster.tensor_parallel
    copies = max(1, (cluster.engine_gpus or cluster.learner_gpus) // shards)
    per_token = facts.cache_values * size
    asked = rollout.concurrency or rollout.tasks_per_step * rollout.group_size
    wanted = float(min(asked, places or asked))
    mean = rollout.max_tokens * cluster.length_share
    prepares = not recipe.model.lora.rank and (cluster.gpu == "cpu" or recipe.engine_dtype == "float32")
    prepared = float(size * facts.prepared) if prepares else 0.0
    weights = prepared if embedded else 2.0 * facts.parameters / shards
    room = _embedded_room(recipe, limit_gib, held) if embedded else max(0.0, ENGINE_SHARE * limit_gib * GIB - weights)
    capacity = room * shards / per_token * copies
    width = max(1.0, min(wanted, capacity / mean))
    gpu = GPUS[cluster.gpu] if cluster.gpu != "cpu" else Gpu(0, CPU_CORE.tflops * cores, CPU_CORE.tb_per_s * cores)
    batch = width / copies
    read = (size * facts.active + batch * mean * per_token) / (shards * gpu.tb_per_s * 1e12 * DECODE_USE)
    computed = 2.0 * facts.active * batch / (shards * gpu.tflops * 1e12 * PREFILL_USE)
    each = max(read, computed) + PASS_S
    new = mean * (1.0 - cluster.sampled_share)
    prefill = 2.0 * facts.active * new * batch / (shards * gpu.tflops * 1e12 * PREFILL_USE)
    turns = max(1.0, rollout.max_steps * cluster.turns_share)
    whole = wanted / copies * mean * per_token / shards
    return EngineReckoning(
        weights=weights,
        cache=min(room, whole),
        room=room,
        wanted=whole,
        fits=embedded or capacity / copies >= rollout.max_tokens,
        width=width,
        tokens_per_s=copies * batch / each,
        trajectory_s=mean * cluster.sampled_share * each + prefill + turns * cluster.tool_s,
    )


def _embedded_room(recipe: Recipe, limit_gib: float, held: float) -> float:
    """The engine's own rule, on the GPU as it will find it."""
    measured = recipe.cluster.gpu != "cpu" and not recipe.run.deterministic
    return cache_limit(recipe.engine.cache_gib, (limit_gib - CONTEXT_GIB) * GIB - held if measured else None)


def step_times(recipe: Recipe, engine: EngineReckoning, *, learner_s: float) -> dict[str, float]:
    """Seconds of a step: synchronous, the slowest attempt and then the update; asynchronous, the slower of the two."""
    rollout = recipe.rollout
    attempts = rollout.tasks_per_step * rollout.group_size
    steady = attempts / engine.width * engine.trajectory_s
    if recipe.asynchrony.max_age:
        return {"learner": learner_s, "rollout": steady, "step": max(learner_s, steady)}
    waited = max(steady, engine.trajectory_s * recipe.cluster.longest)
    return {"learner": learner_s, "rollout": waited, "step": learner_s + waited}


def make_plan(
    recipe: Recipe, facts: ModelFacts, step: StepMemory, *, machine_gib: float, cores: int, places: int = 0
) -> Plan:
    """Everything, from the recipe, its model and the traced step.

    Args:
        recipe: the run.
        facts, step: of its model, and of its largest micro-batch.
        machine_gib, cores: of this machine; used where `cluster.gpu` is "cpu".
        places: sandboxes that may be alive at once; 0 is no limit.
    """
    threads = recipe.run.threads or cores
    cluster = recipe.cluster
    gpu = GPUS.get(cluster.gpu)
    limit = cluster.memory_gib or (gpu.memory_gib if gpu else machine_gib)
    parts = learner_memory(recipe, facts, step)
    learner = {name: size / GIB for name, size in parts.items()}
    held = sum(parts[name] for name in ("weights", "start of RL", "gradients", "optimiser"))
    reckon = partial(reckon_engine, facts=facts, limit_gib=limit, held=held, cores=threads, places=places)
    engine = reckon(recipe)
    engine_gib = {"weights": engine.weights / GIB, "keys and values": engine.cache / GIB}
    if gpu:
        learner |= {"context and fragments": CONTEXT_GIB + SLACK * sum(learner.values())}
    shared = recipe.engine.backend == "embedded" or not cluster.engine_gpus
    if shared:
        learner |= {f"engine: {name}": size for name, size in engine_gib.items() if size}
        engine_gib = {}
    mean = recipe.rollout.max_tokens * cluster.length_share
    batch_tokens = recipe.rollout.tasks_per_step * recipe.rollout.group_size * mean
    learns = learner_tokens_per_s(recipe, facts, mean, cores=threads)
    times = step_times(recipe, engine, learner_s=recipe.training.epochs * batch_tokens / learns)
    sandboxes = _sandboxes(recipe, engine)
    if not gpu and recipe.sandbox.backend != "kubernetes":  # they share this machine
        sandboxes |= {"cores": min(sandboxes["cores"], cores), "memory_gib": min(sandboxes["memory_gib"], machine_gib)}
    made = Plan(
        model={
            "parameters": facts.parameters,
            "trained": trained_parameters(recipe, facts),
            "cache bytes a token": facts.cache_values * (2 if recipe.engine_dtype == "bfloat16" else 4),
        },
        learner_gib=learner,
        engine_gib=engine_gib,
        limit_gib=limit,
        host_gib=_host(recipe, facts) / GIB,
        tokens_per_s={"learner": learns, "engine": engine.tokens_per_s},
        step_s=times,
        sandboxes=sandboxes,
        run=_run(cluster, recipe.training.steps, times["step"], sandboxes["cores"]),
    )
    if recipe.engine.backend == "embedded" and engine.wanted > engine.room and times["rollout"] > times["learner"]:
        size = min(engine.wanted, engine.room + max(0.0, limit - made.learner_total_gib) * GIB)
        larger = reckon(_with_cache(recipe, size))
        rollout_s = step_times(recipe, larger, learner_s=times["learner"])["rollout"]
        made = replace(made, notes=_notes(engine, size, times["rollout"], rollout_s))
    return _judged(made, engine)


def _notes(engine: EngineReckoning, size: float, before_s: float, after_s: float) -> tuple[str, ...]:
    """What a larger cache of the embedded engine would bring, where that is worth a word."""
    if after_s > WORTH * before_s:
        return ()
    return (
        f"the rollout takes most of a step, and the engine's cache of {engine.room / GIB:.3g} GiB holds only "
        f"{engine.width:.0f} of its attempts: engine.cache_gib={size / GIB:.3g} would make it {after_s:,.0f} s",
    )


def _with_cache(recipe: Recipe, size: float) -> Recipe:
    """The same recipe with so many bytes of keys and values."""
    engine = recipe.engine.model_copy(update={"cache_gib": size / GIB})
    return recipe.model_copy(update={"engine": engine})


def _judged(plan: Plan, engine: EngineReckoning) -> Plan:
    problems = []
    if plan.learner_total_gib > plan.limit_gib:
        name, size = max(plan.learner_gib.items(), key=lambda item: item[1])
        problems.append(
            f"the learner needs {plan.learner_total_gib:.1f} GiB of the {plan.limit_gib:.1f} that there are, "
            f"{size:.1f} of them for {name}"
        )
    if not engine.fits:
        left = max(0.0, ENGINE_SHARE * plan.limit_gib - engine.weights / GIB)
        problems.append(
            f"the engine has {left:.1f} GiB a GPU for keys and values beside {engine.weights / GIB:.1f} of weights, "
            "which is less than one trajectory of rollout.max_tokens"
        )
    return replace(plan, problems=tuple(problems))


def _host(recipe: Recipe, facts: ModelFacts) -> float:
    trained, held = trained_parameters(recipe, facts), recipe.cluster.learner_gpus
    frozen = 4 * facts.parameters if recipe.model.lora.rank else 0
    return (16 * trained + frozen) / held if recipe.training.cpu_offload else 0.0


def _sandboxes(recipe: Recipe, engine: EngineReckoning) -> dict[str, float]:
    limits = recipe.sandbox
    alive = min(engine.width, limits.concurrency or engine.width)
    return {
        "alive": alive,
        "cores": alive * limits.cpus,
        "memory_gib": alive * limits.memory_mib / 1024,
        "disk_gib": alive * limits.disk_mib / 1024,
    }


def _run(cluster: ClusterConfig, steps: int, step_s: float, cores: float) -> dict[str, float]:
    hours = steps * step_s / 3600
    gpus = 0 if cluster.gpu == "cpu" else cluster.learner_gpus + cluster.engine_gpus
    usd = hours * (gpus * cluster.usd_per_gpu_hour + cores * cluster.usd_per_core_hour)
    return {"steps": steps, "days": hours / 24, "gpu_hours": hours * gpus, "usd": usd}
