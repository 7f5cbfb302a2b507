"""The recipe: one frozen, strict tree of settings, read from TOML and `key=value` overrides. Imports no torch."""

from __future__ import annotations

import difflib
import sys
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, Self, TypeVar, get_args

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from deepswe.errors import ConfigError
from deepswe.regular import read_regular
from deepswe.types import Ending

MOST = 10**12
"""No count in a recipe is larger."""
Count = Annotated[int, Field(ge=0, le=MOST)]
PositiveInt = Annotated[int, Field(gt=0, le=MOST)]
Width = Annotated[int, Field(gt=0, le=1 << 16)]
Seed = Annotated[int, Field(ge=-(1 << 63), lt=1 << 63)]
Decay = Annotated[float, Field(ge=0, lt=1)]
PositiveFloat = Annotated[float, Field(gt=0)]
Fraction = Annotated[float, Field(ge=0, le=1)]
Dtype = Literal["float32", "bfloat16"]


class Section(BaseModel):
    """Base of every section: frozen, unknown keys refused, each field documented by the string under it."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _of_its_kind(cls, given: Any) -> Any:
        """Refuse what Python would take for something else: true for the number 1, and a text that ends at a NUL."""
        for name, value in given.items() if isinstance(given, Mapping) else ():
            if name in cls.model_fields and (wrong := _misuse(value, cls.model_fields[name].annotation)):
                raise ValueError(f"{name} {wrong}")
        return given


def _misuse(value: Any, annotation: Any) -> str:
    leaves = value if isinstance(value, list | tuple) else (value,)
    if any(isinstance(leaf, str) and "\0" in leaf for leaf in leaves):
        return "has a NUL character in it, which no name and no path can have"
    if any(isinstance(leaf, bool) for leaf in leaves) and not {bool, Any} & {annotation, *get_args(annotation)}:
        return "takes no true or false"
    return ""


class RunConfig(Section):
    """Which run this is."""

    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")
    """Name of the run; its records go to `directory`/`name`."""
    directory: Path = Path("runs")
    """Where runs live."""
    seed: Seed = 0
    """Seeds the weights, the order of the tasks and all sampling."""
    deterministic: bool = False
    """Batch in a fixed order so that the same seed gives the same metrics to the last digit; somewhat slower."""
    threads: int = Field(default=0, ge=0, le=4096)
    """Threads of the learner and the engine; 0 takes the cores that the process may use by affinity and control groups,
    shared among the processes that train on this machine, and one for an engine over a model with small layers."""
    writers: tuple[Literal["tensorboard", "wandb", "trackio"], ...] = ()
    """Where the rows of metrics.jsonl go besides; each needs the extra of its name."""


class ScratchModel(Section):
    """A Qwen3-architecture model with random weights and a tokenizer trained on the suite's own text."""

    hidden_size: Width = 128
    """Width of the hidden states; a multiple of `heads`."""
    layers: Width = 4
    """Number of layers."""
    heads: Width = 4
    """Attention heads; a multiple of `key_value_heads`."""
    key_value_heads: Width = 2
    """Heads of keys and values, which groups of attention heads share."""
    intermediate_size: Width = 384
    """Width inside each layer's feed-forward part."""
    vocabulary: int = Field(default=512, gt=0, le=1 << 20)
    """Upper bound on the vocabulary of the trained tokenizer."""


class LoraAdapters(Section):
    """Train small matrices beside frozen ones (LoRA); needs the `lora` extra."""

    rank: Count = 0
    """Rank of the matrices; 0 trains all weights instead."""
    alpha: PositiveFloat = 32.0
    """Their product is scaled by alpha / rank."""
    targets: tuple[str, ...] = ()
    """Last names of the layers that get them, such as q_proj; empty takes every linear layer but the head."""


class ModelConfig(Section):
    """Which model acts and learns."""

    path: str = ""
    """A Hugging Face causal LM: a directory, a hub name, or a run of ours (RUN for its newest checkpoint, or RUN@STEP);
    empty builds `scratch`."""
    scratch: ScratchModel = ScratchModel()
    """The model to build when `path` is empty."""
    gguf_file: str = ""
    """File inside `path` to load instead of safetensors weights; needs the `gguf` extra."""
    dtype: Dtype = "float32"
    """Type of the forward pass, of the engine's too unless `engine.dtype` says. Master weights stay float32, but frozen
    ones (`lora`) are held in this type."""
    lora: LoraAdapters = LoraAdapters()
    """Adapters to train in place of all weights."""
    chat_template: str = ""
    """Jinja template for the messages; empty keeps the tokenizer's own."""


class MicroTasks(Section):
    """Generated micro repositories with one bug each."""

    kind: Literal["micro"] = "micro"
    """Says that the tasks are of this kind."""
    train: PositiveInt = 2000
    """Training tasks."""
    heldout: Count = 120
    """Held-out tasks: names, constants and structures that training never saw."""
    unseen: Count = 60
    """Held-out tasks whose kinds of bug training never saw."""
    seed: Seed = 0
    """Chooses the set: another seed gives other tasks."""


class BundledTasks(Section):
    """Known bugs in real repositories, built from source distributions into a cache."""

    kind: Literal["bundled"] = "bundled"
    """Says that the tasks are of this kind."""
    repositories: tuple[str, ...] = ()
    """Only these; empty takes all."""
    limit: Count = 0
    """At most this many tasks; 0 takes all."""


class SamplerConfig(Section):
    """Which training tasks are drawn, and how often, by the pass rates that `deepswe tasks rate` measured."""

    scheme: Literal["uniform", "band", "inverse", "uncertain"] = "uniform"
    """`uniform` and `band` treat all tasks within the bounds alike; `inverse` draws hard ones more often, and
    `uncertain` those that are solved about half of the time."""
    low: Fraction = 0.0
    """Least pass rate of a task that is drawn."""
    high: Fraction = 1.0
    """Greatest pass rate of a task that is drawn."""
    unrated: bool = True
    """Draw tasks that were never attempted, as if half of their attempts had solved them."""

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        if self.low > self.high:
            raise ValueError(f"low {self.low} is larger than high {self.high}")
        return self


class TaskSetTasks(Section):
    """A task set in a file: imported from a public source, or made from a repository."""

    kind: Literal["taskset"] = "taskset"
    """Says that the tasks are of this kind."""
    path: Path
    """A file that `deepswe.tasks.taskset` reads: .parquet, .jsonl.zst or .jsonl."""
    repositories: tuple[str, ...] = ()
    """Only these; empty takes all."""
    difficulties: tuple[str, ...] = ()
    """Only tasks whose tag "difficulty" is one of these; empty takes all."""
    max_runtime_s: float = Field(default=0.0, ge=0)
    """Only tasks one grading of which was measured to take no longer; 0 is no limit."""
    unvalidated: bool = False
    """Take tasks, too, that were never validated. Flaky and unsound ones are never taken."""
    heldout: tuple[str, ...] = ()
    """Repositories of the split "heldout"."""
    heldout_share: Fraction = 0.0
    """Share of the repositories that is held out, chosen by a hash of their names. With neither this nor `heldout` the
    splits are those of the file."""
    allow_contaminated: bool = False
    """Train on tasks of evaluation benchmarks. What is then measured on those benchmarks means nothing."""
    limit: Count = 0
    """At most this many tasks; 0 takes all."""
    seed: Seed = 0
    """Chooses the held-out repositories."""
    sampler: SamplerConfig = SamplerConfig()


class FrozenLakeTasks(Section):
    """Seeded maps of the FrozenLake puzzle."""

    kind: Literal["frozenlake"] = "frozenlake"
    """Says that the tasks are of this kind."""
    train: PositiveInt = 10_000
    """Training maps."""
    heldout: PositiveInt = 100
    """Held-out maps; no training map has the layout of one."""
    min_size: int = Field(default=2, ge=2, le=9)
    """Least side of a map, in cells."""
    max_size: int = Field(default=9, ge=2, le=9)
    """Greatest side of a map, in cells."""
    min_frozen: Fraction = 0.6
    """Least share of cells that are safe; the others are holes."""
    max_frozen: Fraction = 0.85
    """Greatest share of cells that are safe."""
    solvable_within: PositiveInt = 8
    """Longest shortest path to the goal, in moves."""
    slippery: bool = False
    """One move in three goes where it should, the others to either side of it."""
    observation: Literal["relational", "grid"] = "grid"
    """`grid` is the map as text; `relational` says what lies in each direction and where the goal is."""
    no_move: Literal["explain", "end"] = "explain"
    """An answer that names no move: say how to answer, at the cost of a step, or end the attempt there."""
    seed: Seed = 0
    """Chooses the maps."""

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        if self.min_size > self.max_size:
            raise ValueError(f"min_size {self.min_size} is larger than max_size {self.max_size}")
        if self.min_frozen > self.max_frozen:
            raise ValueError(f"min_frozen {self.min_frozen} is larger than max_frozen {self.max_frozen}")
        return self


class CustomTasks(Section):
    """A suite of your own, as docs/environments.md explains."""

    kind: Literal["custom"] = "custom"
    """Says that the tasks are of this kind."""
    suite: str
    """`module:attribute` of a class or function that makes the suite, or the name of an entry point of
    `deepswe.suites`."""
    options: dict[str, Any] = Field(default={})
    """Its arguments, by name."""
    capacity: Count = 0
    """Attempts that it can have in flight at once; 0 is no limit."""


TasksConfig = Annotated[
    CustomTasks | MicroTasks | BundledTasks | TaskSetTasks | FrozenLakeTasks, Field(discriminator="kind")
]


class ContainerConfig(Section):
    """Docker or Podman, through the Engine API."""

    host: str = ""
    """Address of the engine, such as unix:///run/docker.sock; empty takes the engine's own environment and default."""
    runtime: str = ""
    """OCI runtime, such as runsc for gVisor; empty takes the engine's default."""
    starts: PositiveInt = 4
    """Containers that are being started at once."""
    layout: Literal["plain", "r2e", "swebench", "swesmith"] = "plain"
    """Conventions of the tasks' own images: which environment commands use, and which files hold tests."""
    user: str = Field(default="", pattern=r"^(\d+:\d+)?$")
    """UID:GID of all processes; empty is 1000:1000 in the default image, and in a task's own image root, who owns its
    files, with no other rights than over these."""
    python: str = "python3"
    """Interpreter (3.10 or newer) of the images, which runs the resident server."""
    interpreter: str = ""
    """Directory on this machine of a relocatable Python (`bin/python3`) that runs the server instead, for images that
    have none."""
    read_only: bool = True
    """Nothing but private directories can be written; a task's own image always can."""
    disk_quota: bool = False
    """Bound what is written to a task's own image by `disk_mib`, with the engine's storage-opt; needs overlay2 on xfs
    with project quotas, btrfs or zfs."""
    layers: Literal["auto", "mount", "copy"] = "auto"
    """How directories of this machine get into containers: mounted, or copied into volumes. `auto` mounts them where
    the engine listens on a socket of this Linux machine."""
    pull: Literal["missing", "always", "never"] = "missing"
    """When an image is pulled, at most once a run."""
    pull_retries: Count = 5
    """New tries of a pull, after growing pauses, when the registry is busy or out of reach."""


class Toleration(Section):
    """A taint of nodes that pods accept; the fields of a Kubernetes toleration."""

    key: str = ""
    """Key of the taint; empty, with `Exists`, is every taint."""
    operator: Literal["Exists", "Equal"] = "Exists"
    """Whether the key must be there, or have the `value`."""
    value: str = ""
    """Value of the taint, with `Equal`."""
    effect: Literal["", "NoSchedule", "PreferNoSchedule", "NoExecute"] = ""
    """Effect of the taint; empty is every effect."""


class KubernetesConfig(Section):
    """Pods of a Kubernetes cluster."""

    kubeconfig: str = ""
    """File with the cluster's address and credentials; empty takes the environment, or the pod's own account."""
    context: str = ""
    """Context of that file; empty takes its current one."""
    namespace: str = "deepswe"
    """Where the pods are made."""
    python: str = "python3"
    """Interpreter (3.10 or newer) of the image that runs the resident server."""
    user: int = Field(default=1000, ge=-1)
    """User and group id of the processes; 0 is root, -1 leaves the image's own user."""
    pull_policy: Literal["IfNotPresent", "Always", "Never"] = "IfNotPresent"
    """When nodes pull the image."""
    pull_secrets: tuple[str, ...] = ()
    """Names of secrets with credentials of image registries."""
    node_selector: dict[str, str] = Field(default_factory=dict)
    """Labels that nodes must have."""
    tolerations: tuple[Toleration, ...] = ()
    """Taints of nodes that pods accept."""
    runtime_class: str = ""
    """Runtime class, such as gvisor; empty takes the cluster's default."""
    priority_class: str = ""
    """Priority class; empty takes the cluster's default."""
    requests: Annotated[float, Field(gt=0, le=1)] = 0.25
    """Share of the limits of CPU and memory that a pod reserves on its node."""
    scratch: Literal["memory", "disk"] = "memory"
    """Where /tmp, the home and an empty working directory live: in memory, where `disk_mib` is a hard bound, or on the
    node's disk, where the pod is evicted some time after passing it."""
    unschedulable_s: PositiveFloat = 600.0
    """How long a pod may find no node (a new one may be coming) before its start fails."""
    writes_per_s: PositiveFloat = 50.0
    """Objects created and deleted per second at most; twice as many at once after a pause."""
    reads_per_s: PositiveFloat = 50.0
    """Other requests per second at most, sessions opened in pods included."""
    writes_per_sandbox: Annotated[int, Field(ge=2)] = 5
    """Writes that one sandbox may cost, retries included; deleting what then is left is the reaper's."""
    connecting: PositiveInt = 64
    """Sessions being opened at once."""
    retries: Count = 6
    """New tries of a request that the API server refused for the moment (409, 429, 5xx) or that was cut off."""
    request_timeout_s: PositiveFloat = 30.0
    """One request to the API server."""
    heartbeat_s: PositiveFloat = 30.0
    """Pause between pings on an open session; without an answer it is opened anew."""
    lease_s: Annotated[int, Field(ge=15)] = 120
    """An owner that has not renewed its lease for this long counts as dead for reapers on other machines."""
    warm_pool: str = ""
    """Name of a SandboxWarmPool of agent-sandbox to claim sandboxes from; empty makes pods."""


class SandboxConfig(Section):
    """Where code runs, and what it may use there."""

    backend: Literal["bubblewrap", "docker", "podman", "kubernetes"] = (
        "bubblewrap" if sys.platform == "linux" else "docker"
    )
    """Which backend runs the code. The default is bubblewrap on Linux, and docker elsewhere."""
    image: str = ""
    """Container image for tasks that name none; `bubblewrap` has no images."""
    walls: Literal["auto", "bubblewrap"] = "auto"
    """Of the backend `bubblewrap`: who makes the namespaces and mounts of a sandbox. `auto` is a clone of a process of
    ours where the machine allows it, which starts in a third of the time; `bubblewrap` is always the program itself."""
    memory_mib: PositiveInt = 1024
    """Memory of one sandbox, in MiB."""
    disk_mib: PositiveInt = 256
    """What one sandbox may write, in MiB."""
    pids: PositiveInt = 128
    """Processes and threads alive at once in one sandbox."""
    cpus: PositiveFloat = 1.0
    """Cores of one sandbox."""
    output_bytes: PositiveInt = 1 << 20
    """Of standard output and of standard error, each, kept of one command; the rest is dropped and counted."""
    concurrency: Count = 0
    """Sandboxes alive at once; 0 lets the program choose from cores and memory."""
    start_timeout_s: PositiveFloat = 30.0
    """Seconds for the start of one sandbox."""
    starts_per_s: float = Field(default=0.0, ge=0)
    """Sandboxes started per second at most; 0 is no limit."""
    warm: Count = 0
    """Sandboxes kept started ahead for each kind that was asked for lately."""
    lifetime_s: PositiveFloat = 14_400.0
    """A sandbox older than this is ended, whoever holds it; a reaper ends one whose owner is gone at once."""
    docker: ContainerConfig = ContainerConfig()
    """Used where `backend` is `docker`."""
    podman: ContainerConfig = ContainerConfig()
    """Used where `backend` is `podman`."""
    kubernetes: KubernetesConfig = KubernetesConfig()
    """Used where `backend` is `kubernetes`."""

    @model_validator(mode="after")
    def _honoured(self) -> Self:
        if self.backend == "bubblewrap" and self.image:
            raise ValueError(f"image is {self.image!r}, but bubblewrap has no images; choose backend docker or another")
        return self


class AgentConfig(Section):
    """What the agent is told and how it calls tools; the same in training and evaluation."""

    history: Literal["keep", "strip_thinking"] = "keep"
    """What later turns see of the thinking (`<think>...</think>`) of earlier ones: all, or nothing. Nothing makes
    several token sequences of one trajectory, one for each turn that has thought."""
    thinking: bool = True
    """False asks the chat template for its non-thinking mode (`enable_thinking`)."""
    prompt: Literal["full", "brief"] = "full"
    """`full` documents every tool; `brief` is the issue alone, for a model that learned the tools by imitation."""
    format: Literal["xml", "native"] = "xml"
    """How calls are written: XML in the text, or the model family's own tool-call format."""
    steps_remaining: bool = False
    """Append "Steps Remaining: N" to each observation."""
    step_timeout_s: PositiveFloat = 90.0
    """One tool call."""


class RolloutConfig(Section):
    """How many attempts a step makes, and the limits of one attempt."""

    tasks_per_step: PositiveInt = 16
    """Tasks that each step draws; each gets a group of attempts."""
    group_size: PositiveInt = 8
    """Attempts per task and step."""
    max_steps: PositiveInt = 50
    """Turns of one trajectory."""
    max_tokens: PositiveInt = 36_864
    """Tokens of one trajectory, prompt included."""
    max_turn_tokens: PositiveInt = 4096
    """Tokens of one turn."""
    temperature: PositiveFloat = 1.0
    """Of sampling in training."""
    trajectory_timeout_s: PositiveFloat = 5400.0
    """Wall time of one trajectory from its first turn, without the start of its environment and its grading."""
    generation_timeout_s: PositiveFloat = 1200.0
    """Model time of one trajectory."""
    start_timeout_s: PositiveFloat = 300.0
    """Start of an environment, the wait for a free sandbox included."""
    grading_timeout_s: PositiveFloat = 1800.0
    """Grading of one attempt, the wait for a free sandbox included."""
    concurrency: Count = 0
    """Trajectories in flight; 0 means all of a step."""
    max_retries: Count = 2
    """New tries of an attempt that the infrastructure ended."""


class EndingPolicy(Section):
    """What becomes of a trajectory with a given ending."""

    train: bool
    """Its tokens are in the loss."""
    baseline: bool
    """Its reward is in its siblings' baseline."""
    zero: bool = False
    """Its reward counts as 0, whatever it earned."""
    retry: bool = False
    """In training it is tried again, at most `rollout.max_retries` times."""


_TRAINED = EndingPolicy(train=True, baseline=True)
_MASKED = EndingPolicy(train=False, baseline=False)


class EndingTable(Section):
    """Law 2. The default is DeepSWE's compact filtering with the baseline over the kept ones. An error never trains."""

    submitted: EndingPolicy = _TRAINED
    max_steps: EndingPolicy = _MASKED
    max_context: EndingPolicy = _MASKED
    generation_timeout: EndingPolicy = _MASKED
    env_timeout: EndingPolicy = _MASKED
    max_cost: EndingPolicy = _MASKED
    error: EndingPolicy = EndingPolicy(train=False, baseline=False, retry=True)

    @model_validator(mode="after")
    def _an_error_is_no_reward(self) -> Self:
        if self.error.train or self.error.baseline:
            raise ValueError("error can be retried, but neither train nor stand in a baseline: a failure is no reward")
        return self

    def of(self, ending: Ending) -> EndingPolicy:
        """The row of one ending."""
        row: EndingPolicy = getattr(self, ending.value)
        return row

    @property
    def retried(self) -> frozenset[Ending]:
        """The endings after which an attempt is made again."""
        return frozenset(ending for ending in Ending if self.of(ending).retry)


_ALL_TRAIN = {
    name: {"train": True, "baseline": True}
    for name in ("max_steps", "max_context", "generation_timeout", "env_timeout")
}
_OVERLONG_MASKED = {**_ALL_TRAIN, "max_context": {"train": False, "baseline": True}}

PRESETS: Mapping[str, Mapping[str, Any]] = {
    "grpo_plus_plus": {},
    "grpo": {
        "advantage": "group_mean_std",
        "clip_high": 0.2,
        "normalisation": "sequence_mean",
        "kl_coefficient": 0.04,
        "endings": _ALL_TRAIN,
    },
    "grpo_plus": {"advantage": "group_mean_std", "normalisation": "token_mean", "endings": _OVERLONG_MASKED},
    "dapo": {
        "advantage": "group_mean_std",
        "normalisation": "token_mean",
        "resample_batches": 3,
        "endings": _OVERLONG_MASKED,
    },
    "dr_grpo": {"advantage": "group_mean", "clip_high": 0.2, "endings": _ALL_TRAIN},
    "rloo": {"ratio": "none", "endings": _ALL_TRAIN},
    "gspo": {
        "advantage": "group_mean_std",
        "ratio": "sequence_mean",
        "clip_low": 3e-4,
        "clip_high": 4e-4,
        "normalisation": "sequence_mean",
        "endings": _ALL_TRAIN,
    },
    "reinforce": {"advantage": "none", "ratio": "none", "drop_uniform_groups": False, "endings": _ALL_TRAIN},
    "ppo": {
        "advantage": "gae",
        "clip_high": 0.2,
        "normalisation": "token_mean",
        "drop_uniform_groups": False,
        "whiten": True,
        "old_logprobs": "learner",
        "endings": _ALL_TRAIN,
    },
}
"""`algorithm.preset` -> the keys in which it differs from the defaults. A key that a recipe gives wins over them."""


class AlgorithmConfig(Section):
    """GRPO++ by default: clip high, no KL, no deviation, constant length, leave one out, compact filtering."""

    preset: Literal["grpo_plus_plus", "grpo", "grpo_plus", "dapo", "dr_grpo", "rloo", "gspo", "reinforce", "ppo"] = (
        "grpo_plus_plus"
    )
    """Sets the other keys of this section, except those that the recipe gives itself; docs/algorithms.md lists them."""
    advantage: Literal[
        "leave_one_out", "group_mean", "group_mean_std", "global_mean", "global_mean_std", "none", "gae"
    ] = "leave_one_out"
    """What a reward is compared with: siblings, the whole batch, nothing, or a learnt value (`gae`)."""
    advantage_level: Literal["trajectory", "step"] = "trajectory"
    """One comparison for a whole trajectory, or one for each turn; for `gae`, the token or the turn is the action."""
    discount: float = Field(default=1.0, gt=0, le=1)
    """Of the reward by each later turn (level `step`) or token (`gae` at level `trajectory`)."""
    gae_lambda: Fraction = 1.0
    """Lambda of generalised advantage estimation; 1 is the Monte Carlo return minus the value."""
    value_coefficient: float = Field(default=0.5, ge=0)
    """Weight of the value loss where `advantage` is `gae`."""
    whiten: bool = False
    """Scale the advantages of a batch to mean 0 and deviation 1, over trained tokens."""
    ratio: Literal["token", "sequence_mean", "sequence", "none"] = "token"
    """Importance ratio of each token, of a whole sequence (its geometric mean a token, or its product), or none."""
    clip_low: float = Field(default=0.2, ge=0, lt=1)
    """The ratio is clipped below 1 minus this."""
    clip_high: float = Field(default=0.28, ge=0)
    """The ratio is clipped above 1 plus this."""
    normalisation: Literal["constant", "token_mean", "sequence_mean"] = "constant"
    """Denominator of the loss: a constant (`length`), the number of trained tokens, or each trajectory's own length."""
    length: Count = 0
    """The constant denominator per trajectory; 0 takes `rollout.max_tokens`."""
    old_logprobs: Literal["sampler", "learner"] = "sampler"
    """Denominator of the ratio: the sampler's log-probs, or the learner's own before the first update of a batch."""
    importance: Literal["none", "token_truncated", "token_masked", "sequence_truncated", "sequence_masked"] = "none"
    """Weight by learner / sampler, per token or per sequence, above the cap truncated or masked. Needs
    `old_logprobs` "learner"."""
    importance_cap: PositiveFloat = 2.0
    """Largest importance weight."""
    importance_floor: float = Field(default=0.0, ge=0)
    """Smallest importance weight: a smaller one is raised to it, or masked."""
    kl: Literal["k1", "k2", "k3"] = "k3"
    """Estimator of the divergence from the start of RL that is added to the loss."""
    kl_coefficient: float = Field(default=0.0, ge=0)
    """Weight of that divergence; 0 is off."""
    entropy_coefficient: float = Field(default=0.0, ge=0)
    """Weight of an entropy bonus; 0 is off."""
    drop_uniform_groups: bool = True
    """Leave out groups whose rewards are all equal; they have no gradient under any group advantage."""
    resample_batches: Count = 0
    """Further batches of tasks that a step may attempt until it has `rollout.tasks_per_step` groups with a gradient."""
    max_age: Count = 0
    """Updates between the sampling of a token and its training beyond which a trajectory is left out; 0 is no limit."""
    mask_canaries: bool = False
    """Leave out trajectories that carry the tag `canary`, in the loss and in the baseline."""
    kl_start_every: Count = 10
    """Steps between measurements of the divergence from the start of RL, which cost a forward pass and a second copy
    of the weights; 0 measures it only where `kl_coefficient` needs it."""
    endings: EndingTable = EndingTable()

    @model_validator(mode="before")
    @classmethod
    def _expand(cls, given: Any) -> Any:
        if not isinstance(given, Mapping):
            return given
        preset = PRESETS.get(str(given.get("preset", "grpo_plus_plus")), {})
        table = {name: row.model_dump() for name, row in EndingTable()}
        return _merged(_merged({"endings": table}, preset), given)

    @model_validator(mode="after")
    def _honoured(self) -> Self:
        if self.importance != "none" and self.old_logprobs == "sampler":
            raise ValueError(
                f"importance is {self.importance!r}, but old_logprobs is 'sampler', whose ratio holds that weight "
                "already; set old_logprobs to 'learner'"
            )
        if self.importance_floor > self.importance_cap:
            raise ValueError(f"importance_floor {self.importance_floor} is above importance_cap {self.importance_cap}")
        return self

    @property
    def grouped(self) -> bool:
        """Whether an attempt is compared with its siblings, so that it needs one."""
        return self.advantage in ("leave_one_out", "group_mean", "group_mean_std")


def _merged(under: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """Trees of plain values: `over` wins, key by key."""
    tree = dict(under)
    for key, value in over.items():
        below = tree.get(key)
        tree[key] = _merged(below, value) if isinstance(below, Mapping) and isinstance(value, Mapping) else value
    return tree


class TrainingConfig(Section):
    """The optimiser and the length of the run."""

    steps: Count = 100
    """Batches of rollouts."""
    learning_rate: PositiveFloat = 1e-6
    """Of AdamW, after the warm-up."""
    warmup_steps: Count = 0
    """Updates over which the learning rate rises linearly."""
    decay: Literal["constant", "linear", "cosine"] = "constant"
    """How the learning rate falls after the warm-up: not at all, or to zero at the end of `steps`."""
    weight_decay: float = Field(default=0.01, ge=0)
    """Of AdamW."""
    betas: tuple[Decay, Decay] = (0.9, 0.95)
    """Of AdamW: decay of the means of gradients and of their squares."""
    grad_clip: PositiveFloat = 1.0
    """A larger norm of the gradient is scaled down to this."""
    updates_per_step: PositiveInt = 1
    """Optimiser updates per batch and epoch (mini-batches of whole groups)."""
    epochs: PositiveInt = 1
    """Passes over each batch."""
    packing: Literal["padded", "packed", "tree"] = "padded"
    """Micro-batches of like lengths padded to the longest; or of one row that holds many samples end to end, or in
    which every prefix of 16 tokens or more that samples share stands once (`tree`)."""
    tokens_per_microbatch: PositiveInt = 16_384
    """Tokens in one forward and backward pass."""
    activation_checkpointing: bool = False
    """Keep only the input of each layer and compute it again in the backward pass: a third more work, for a small part
    of the memory."""
    cpu_offload: bool = False
    """Keep weights, gradients and moments in the CPU's memory, and update there; needs torchrun, also for one
    process."""
    checkpoint_every: PositiveInt = 10
    """Steps between checkpoints; the last step always has one."""
    keep_checkpoints: PositiveInt = 2
    """The newest so many are kept."""
    time_limit_s: float = Field(default=0.0, ge=0)
    """Stop cleanly after the step in which this many seconds of training have passed; 0 is no limit."""


class ImitationConfig(Section):
    """Supervised updates before RL: on a reference solver's trajectories, or on recorded ones (own or a teacher's)."""

    steps: Count = 0
    """Updates; 0 switches it off."""
    source: Literal["reference", "tokens", "text"] = "reference"
    """The suite's reference solver; or recorded trajectories, with the tokens they have (this model's own, exact), or
    with their turns written anew in this model's tokens (a teacher's)."""
    runs: tuple[Path, ...] = ()
    """Run directories whose trajectories are imitated where `source` is not `reference`."""
    phase: str = ""
    """Only trajectories of this phase, such as `train`; empty takes all."""
    min_reward: float = 1.0
    """Only trajectories with at least this reward (rejection sampling); ungraded ones never."""
    per_task: Count = 0
    """At most this many trajectories of one task, the shortest; 0 takes all."""
    trajectories: PositiveInt = 4000
    """Reference trajectories to record, each on its own training task (repeated if there are fewer tasks); of recorded
    ones, at most this many."""
    batch_size: PositiveInt = 32
    """Trajectories of one update."""
    learning_rate: PositiveFloat = 1e-3
    """After the warm-up; it then falls to zero."""
    warmup_steps: Count = 20
    """Updates over which the learning rate rises linearly."""
    mistakes: Fraction = 0.0
    """Share of reference trajectories in which the solver's edit is a plausible guess instead of the right one.
    Imitation alone has them: where the solver is the policy it makes none."""
    train_on: Literal["sampled", "all"] = "sampled"
    """Loss on the solver's tokens only, or on all tokens (language modelling, for a model without pre-training)."""

    @model_validator(mode="after")
    def _sourced(self) -> Self:
        if self.steps and (self.source == "reference") == bool(self.runs):
            raise ValueError(
                f"source is {self.source!r} and runs names {len(self.runs)} run directories; `tokens` and `text` need "
                "runs, `reference` takes none"
            )
        return self


class EndpointConfig(Section):
    """A model that somebody serves, for `deepswe eval --policy endpoint`."""

    url: str = ""
    """Base of the interface, such as http://localhost:8000/v1."""
    model: str = ""
    """Its name there."""
    style: Literal["openai", "anthropic"] = "openai"
    """Chat completions of OpenAI, which vLLM, llama.cpp and most others speak too, or messages of Anthropic."""
    key_env: str = ""
    """Environment variable that holds the key; empty sends none. The key itself is written nowhere."""
    stream: bool = True
    """Take answers piece by piece, so that a cut one is noticed at once."""
    timeout_s: PositiveFloat = 600.0
    """For one answer."""
    idle_s: PositiveFloat = 120.0
    """Longest silence inside one answer."""
    retries: Count = 6
    """New tries of a request that was refused for the moment (408, 409, 425, 429, 5xx), cut off, late or garbled."""
    backoff_s: PositiveFloat = 1.0
    """Pause before the first new try; it doubles, with jitter, up to a minute. `Retry-After` wins."""
    usage: Literal["estimate", "require"] = "estimate"
    """An answer whose token counts are missing or impossible: count by its bytes and say so, or ask anew."""
    dollars_in: float = Field(default=0.0, ge=0)
    """Price of a million tokens read."""
    dollars_cached: float | None = Field(default=None, ge=0)
    """Price of a million tokens read out of its cache; none is `dollars_in`."""
    dollars_out: float = Field(default=0.0, ge=0)
    """Price of a million tokens sampled."""
    max_dollars: float = Field(default=0.0, ge=0)
    """What one attempt may cost; 0 is no limit."""
    options: dict[str, Any] = Field(default={})
    """Further fields of each request, such as {top_p = 0.95}."""


class EvaluationConfig(Section):
    """What is measured before, during and after training."""

    splits: tuple[str, ...] = ("heldout",)
    """Splits of the tasks that are evaluated."""
    attempts: PositiveInt = 4
    """At each task."""
    tasks: Count = 0
    """At most this many tasks per split; 0 takes all."""
    every: Count = 0
    """Training steps between evaluations; 0 evaluates only before and after."""
    temperature: float = Field(default=1.0, ge=0)
    """Of sampling in evaluation; 0 takes the likeliest token."""


class AsynchronyConfig(Section):
    """Attempts in flight while the learner trains. The defaults are synchronous: a step waits for its own attempts."""

    max_age: Count = 0
    """Steps between the opening of a group and the step that trains it, at most; 0 is synchronous."""
    overprovision: float = Field(default=0.0, ge=0)
    """Share of groups made beyond those that train. The first to be over are taken, which favours short attempts; late
    ones are dropped. With 0 a step waits for every group that it may not pass by."""
    quorum: Fraction = 1.0
    """Share of a group's attempts after which it may go without the others."""
    straggler_s: float = Field(default=0.0, ge=0)
    """Seconds after the quorum at which the other attempts are cut; with 0 they are cut when a step waits for them
    alone."""
    in_flight: Literal["keep", "finish", "abort"] = "keep"
    """Turns that are being sampled when new weights come: go on under the new ones, are finished under the old ones
    first, or begin anew."""

    @property
    def on(self) -> bool:
        """Whether attempts of several steps can be in flight, or a step can go without some of its own."""
        return bool(self.max_age or self.overprovision) or self.quorum < 1.0


class VllmConfig(Section):
    """vLLM servers, and how they get new weights."""

    servers: tuple[str, ...] = ()
    """Addresses such as http://127.0.0.1:8000; `deepswe serve` starts such servers and prints theirs."""
    model: str = ""
    """Name under which they serve the model; empty takes the only one that each has."""
    transfer: Literal["file", "nccl", "ipc"] = "file"
    """How weights get to them: through a directory that they can read, or by their own transfer engines (GPU only)."""
    directory: Path = Path("/dev/shm")
    """Where `file` writes: the memory of this machine, or a disk that all of them share."""
    silence_s: PositiveFloat = 300.0
    """A server that says nothing for so long, while it should sample, counts as dead."""
    retries: Count = 4
    """Other servers that one turn may be taken to after failures; what was sampled so far is kept."""
    update_timeout_s: PositiveFloat = 600.0
    """One change of weights."""
    max_mismatch: float = Field(default=0.5, ge=0)
    """Largest difference between their log-prob of a token and the learner's, after a change of weights; 0 does not
    look."""
    echo: bool = False
    """Ask for the ids that the server read, and compare them with those that were sent; costs time at long contexts."""
    seeded: bool = False
    """Send each turn's seed; slower on a GPU."""
    top_p: float = Field(default=1.0, gt=0, le=1)
    """Nucleus of the sampling; training needs 1."""
    top_k: int = -1
    """Most likely tokens among which is sampled; training needs -1, which is all."""
    untied: bool = False
    """Serve an output matrix apart from the embedding, where the model ties them. vLLM's CPU build needs it: it packs
    that matrix when it starts, and new weights of the embedding do not reach the packed one."""
    python: str = "python3"
    """Interpreter of the environment that vLLM is installed in, for `deepswe serve`."""
    arguments: tuple[str, ...] = ()
    """Further arguments of each server that `deepswe serve` starts, such as --tensor-parallel-size=8."""


class EngineConfig(Section):
    """What samples."""

    backend: Literal["embedded", "vllm"] = "embedded"
    """In this process, over the learner's own weights; or vLLM servers."""
    cache_gib: float = Field(default=0.0, ge=0)
    """Of the embedded engine: keys and values of attempts that are kept between their turns, in GiB; what is beyond is
    computed anew. 0 takes 4 on a CPU and in deterministic mode, and on a GPU half of what is free beside the weights
    and the learner's gradients and moments."""
    dtype: Literal["", "float32", "bfloat16"] = ""
    """Of the embedded engine: type of its forward pass; empty takes `model.dtype`. On a CPU with matrix units
    `bfloat16` samples faster from all but the smallest models, whatever the learner's type is."""
    vllm: VllmConfig = VllmConfig()
    """Used where `backend` is `vllm`."""

    @model_validator(mode="after")
    def _served(self) -> Self:
        if self.vllm.top_k < 1 and self.vllm.top_k != -1:
            raise ValueError(f"vllm.top_k is {self.vllm.top_k}; give -1 for all tokens, or at least 1")
        return self


class ClusterConfig(Section):
    """The machines that `deepswe plan` reckons with, and what a run is expected to be like. Nothing else reads it, but
    a training that is meant for a GPU says so where there is none."""

    gpu: Literal["cpu", "rtx4090", "l40s", "a100", "h100", "h200", "b200"] = "cpu"
    """What learner and engine run on; `deepswe plan` prints the figures of each that it reckons with."""
    learner_gpus: PositiveInt = 1
    """Processes that train together."""
    engine_gpus: Count = 0
    """GPUs that sample and do nothing else; 0 samples on the learner's."""
    tensor_parallel: PositiveInt = 1
    """GPUs of one copy of the engine's model."""
    memory_gib: float = Field(default=0.0, ge=0)
    """Memory of each GPU, or of the machine where `gpu` is `cpu`; 0 takes the usual one of that GPU, and for `cpu`
    what this machine, or the limit of the container, lets the program have."""
    usd_per_gpu_hour: float = Field(default=0.0, ge=0)
    """Price of one GPU for an hour, in US dollars; 0 leaves it out of the cost."""
    usd_per_core_hour: float = Field(default=0.0, ge=0)
    """Of the cores that the sandboxes run on."""
    length_share: Annotated[float, Field(gt=0, le=1)] = 0.5
    """Mean length of a trajectory over `rollout.max_tokens`."""
    sampled_share: Annotated[float, Field(gt=0, le=1)] = 0.4
    """Share of a trajectory's tokens that are sampled; the rest are prompts and observations."""
    turns_share: Annotated[float, Field(gt=0, le=1)] = 0.6
    """Mean number of turns over `rollout.max_steps`."""
    tool_s: float = Field(default=3.0, ge=0)
    """Mean seconds of one tool call."""
    longest: Annotated[float, Field(ge=1)] = 2.0
    """The slowest trajectory of a step over the mean one; a synchronous step waits for it."""


class Recipe(Section):
    """A whole run."""

    version: Literal[1] = 1
    """Of the format of recipes; there is one."""
    run: RunConfig
    model: ModelConfig = ModelConfig()
    tasks: TasksConfig
    sandbox: SandboxConfig = SandboxConfig()
    agent: AgentConfig = AgentConfig()
    rollout: RolloutConfig = RolloutConfig()
    algorithm: AlgorithmConfig = AlgorithmConfig()
    imitation: ImitationConfig = ImitationConfig()
    training: TrainingConfig = TrainingConfig()
    evaluation: EvaluationConfig = EvaluationConfig()
    endpoint: EndpointConfig = EndpointConfig()
    engine: EngineConfig = EngineConfig()
    asynchrony: AsynchronyConfig = AsynchronyConfig()
    cluster: ClusterConfig = ClusterConfig()

    @property
    def engine_dtype(self) -> Dtype:
        """Type of the engine's forward pass, and of its keys and values."""
        return self.engine.dtype or self.model.dtype

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        size = self.rollout.group_size
        if self.algorithm.advantage == "leave_one_out" and size < 2:
            raise ValueError(f"rollout.group_size is {size}; algorithm.advantage leave_one_out needs at least 2")
        if self.training.updates_per_step > self.rollout.tasks_per_step:
            raise ValueError(
                f"training.updates_per_step is {self.training.updates_per_step}, more than the "
                f"{self.rollout.tasks_per_step} groups of a step; groups are never split"
            )
        if self.agent.history == "strip_thinking" and self.algorithm.advantage == "gae":
            raise ValueError(
                "agent.history strip_thinking makes several sequences of a trajectory, over which algorithm.advantage "
                "gae has no values; use history keep, or another advantage"
            )
        if self.rollout.max_turn_tokens > self.rollout.max_tokens:
            raise ValueError(
                f"rollout.max_turn_tokens {self.rollout.max_turn_tokens} exceeds "
                f"rollout.max_tokens {self.rollout.max_tokens}"
            )
        return self

    @model_validator(mode="after")
    def _honoured(self) -> Self:
        vllm, embedded = self.engine.vllm, self.engine.backend == "embedded"
        if self.run.deterministic and (self.asynchrony.on or not embedded):
            raise ValueError(
                "run.deterministic needs engine.backend embedded and synchronous steps (asynchrony.max_age 0, "
                "overprovision 0, quorum 1): what is in flight together decides the last digits"
            )
        if self.asynchrony.on and self.algorithm.resample_batches:
            raise ValueError(
                f"algorithm.resample_batches is {self.algorithm.resample_batches}, but with asynchrony no step has "
                "draws of its own; set it to 0"
            )
        if embedded and self.asynchrony.in_flight != "keep":
            raise ValueError(
                f"asynchrony.in_flight is {self.asynchrony.in_flight!r}, but the embedded engine keeps turns in flight"
            )
        if self.engine.dtype and not embedded:
            raise ValueError(
                f"engine.dtype is {self.engine.dtype!r}, but the vLLM servers have the type that they were started "
                "with; leave it empty (`deepswe serve` starts them with model.dtype)"
            )
        if self.model.lora.rank and self.model.dtype == "bfloat16" and self.engine_dtype == "float32":
            raise ValueError(
                "engine.dtype is 'float32', but model.lora with model.dtype 'bfloat16' holds the frozen weights in "
                "bfloat16; leave engine.dtype empty, or set model.dtype to 'float32'"
            )
        if not embedded and self.training.steps and (vllm.top_p != 1.0 or vllm.top_k != -1):
            raise ValueError(
                f"engine.vllm samples with top_p {vllm.top_p} and top_k {vllm.top_k}; training needs 1 and -1, since "
                "the learner's log-probs are those of the whole distribution"
            )
        return self


def parse_override(text: str) -> tuple[tuple[str, ...], Any]:
    """Split `a.b.c=value`; the value is read as TOML where it is TOML, else as a string.

    Raises:
        ConfigError: there is no `=` or no key.
    """
    key, separator, value = text.partition("=")
    path = tuple(part.strip() for part in key.split("."))
    if not separator or not all(path):
        raise ConfigError(f"override {text!r} is not of the form section.key=value, such as training.steps=50")
    try:
        return path, tomllib.loads(f"value = {value}")["value"]
    except (ValueError, RecursionError):  # a number of thousands of digits is a ValueError, too
        return path, value


def read_tree(path: Path, overrides: Sequence[str] = (), *, what: str = "recipe") -> dict[str, Any]:
    """The plain values of a TOML file, with overrides in their places.

    Args:
        path: a TOML file.
        overrides: `section.key=value` texts, applied in order.
        what: the file is, for messages.

    Raises:
        ConfigError: the file cannot be read or is no TOML, or an override fits nowhere.
    """
    try:
        tree = tomllib.loads(read_regular(path).decode("utf-8-sig"))
    except OSError as error:
        raise ConfigError(f"{what} {path} cannot be read: {error.strerror}; give the path of a .toml file") from error
    except (ValueError, RecursionError) as error:  # a number of thousands of digits is a ValueError, too
        raise ConfigError(f"{what} {path} is not valid TOML: {error}") from error
    _apply(overrides, tree)
    return tree


def _apply(overrides: Sequence[str], tree: dict[str, Any]) -> None:
    for text in overrides:
        keys, value = parse_override(text)
        _put(tree, keys, value, text)


def _put(tree: dict[str, Any], keys: Sequence[str], value: Any, text: str) -> None:
    node = tree
    for key in keys[:-1]:
        node = node.setdefault(key, {})
        if not isinstance(node, dict):
            raise ConfigError(f"override {text!r}: {key!r} is a value, not a section")
    node[keys[-1]] = value


def load_recipe(path: Path, overrides: Sequence[str] = ()) -> Recipe:
    """Read a recipe.

    Args:
        path: a TOML file.
        overrides: `section.key=value` texts, applied in order. One that changes the kind of a section leaves out what
            the file says of the section and the new kind does not have.

    Raises:
        ConfigError: the file cannot be read, is no TOML, has an unknown key or a wrong value; one line per problem.
    """
    tree = read_tree(path)
    for text in overrides:
        keys, value = parse_override(text)
        if keys[1:] == ("kind",) and isinstance(tree.get(keys[0]), dict):
            tree[keys[0]] = _without_other_kind(keys[0], tree[keys[0]], value)
    _apply(overrides, tree)
    return build_recipe(tree, origin=str(path))


def _without_other_kind(name: str, section: Mapping[str, Any], kind: Any) -> dict[str, Any]:
    """A section of a file as far as it can stay where its kind becomes another: keys of the same name and type."""
    kinds = _kinds(name)
    old, new = kinds.get(str(section.get("kind"))), kinds.get(str(kind))
    if old is None or new is None or old is new:
        return dict(section)
    types = [{key: field.annotation for key, field in one.model_fields.items()} for one in (old, new)]
    both = types[0].items() & types[1].items()
    return {key: value for key, value in section.items() if key == "kind" or key in dict(both)}


def _kinds(section: str) -> dict[str, type[Section]]:
    """The kinds of a section of a recipe by name; none where it has no kinds."""
    field = Recipe.model_fields.get(section)
    sections = [one for one in get_args(field.annotation) if issubclass(one, Section)] if field else []
    return {one.model_fields["kind"].default: one for one in sections if "kind" in one.model_fields}


def load_sandbox(overrides: Sequence[str] = ()) -> SandboxConfig:
    """The sandbox section alone, for commands that need no recipe.

    Args:
        overrides: `sandbox.key=value` texts, applied in order.

    Raises:
        ConfigError: another section, an unknown key or a wrong value.
    """
    tree: dict[str, Any] = {}
    for text in overrides:
        keys, value = parse_override(text)
        if keys[0] != "sandbox" or len(keys) == 1:
            raise ConfigError(f"override {text!r} is no setting of a sandbox, such as sandbox.memory_mib=512")
        _put(tree, keys[1:], value, text)
    try:
        return SandboxConfig.model_validate(tree)
    except ValidationError as error:
        raise ConfigError("sandbox: " + "; ".join(_problem(SandboxConfig, item) for item in error.errors())) from error


def build_recipe(tree: Mapping[str, Any], *, origin: str) -> Recipe:
    """Check a tree of plain values. Raises as `build_section` does."""
    return build_section(Recipe, tree, origin=origin)


AnySection = TypeVar("AnySection", bound=Section)


def build_section(kind: type[AnySection], tree: Mapping[str, Any], *, origin: str) -> AnySection:
    """Check a tree of plain values against any section.

    Raises:
        ConfigError: naming `origin`, each wrong key and its value.
    """
    try:
        return kind.model_validate(tree)
    except ValidationError as error:
        lines = [_problem(kind, item) for item in error.errors()]
        raise ConfigError(f"{origin}: " + "; ".join(lines)) from error


def _problem(kind: type[Section], item: Mapping[str, Any]) -> str:
    where = ".".join(str(part) for part in item["loc"])
    if item["type"] == "extra_forbidden":
        meant = _likely_key(kind, [part for part in item["loc"] if isinstance(part, str)])
        advice = f", did you mean {meant}?" if meant else ""
        return f"{where} is not a known key (value {_shown(item['input'])}){advice}"
    if item["type"] == "missing":
        return f"{where} is missing"
    message = str(item["msg"]).removeprefix("Value error, ")
    place = f"{where}: " if where else ""
    return place + message + ("" if isinstance(item["input"], dict) else f" (value {_shown(item['input'])})")


def _shown(value: Any) -> str:
    """A value for a message, at most 200 characters of it."""
    try:
        text = repr(value)
    except ValueError:  # a number of thousands of digits
        return "a number of thousands of digits"
    return text if len(text) <= 200 else f"{text[:200]}..."


class _Key(NamedTuple):
    """A key of a recipe: the section that has it as errors name it, its own name, and the whole as people write it."""

    section: tuple[str, ...]
    name: str
    written: str


def _likely_key(kind: type[Section], path: Sequence[str]) -> str:
    """The key that an unknown one was likely meant for: a similar one of its section, or its namesakes in others."""
    *section, name = path
    keys = list(_keys(kind))
    near = {key.name: key.written for key in keys if key.section == tuple(section)}
    if similar := difflib.get_close_matches(name, near, n=1):
        return near[similar[0]]
    return " or ".join(dict.fromkeys(key.written for key in keys if key.name == name))


def _keys(kind: type[Section], section: tuple[str, ...] = (), written: str = "") -> Iterator[_Key]:
    """All keys of a section and of those in it. Where one of several kinds can stand, errors name its kind, too."""
    for name, field in kind.model_fields.items():
        yield _Key(section, name, written + name)
        inner = list(_sections(field.annotation))
        for one in inner:
            kinds = (str(one.model_fields["kind"].default),) if len(inner) > 1 else ()
            yield from _keys(one, (*section, name, *kinds), f"{written}{name}.")


def _sections(annotation: Any) -> Iterator[type[Section]]:
    """The sections that a field's type can hold."""
    if isinstance(annotation, type) and issubclass(annotation, Section):
        yield annotation
    for part in get_args(annotation):
        yield from _sections(part)
