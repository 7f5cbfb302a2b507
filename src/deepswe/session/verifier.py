"""Train a verifier on judged attempts, and let one score candidates."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from transformers.utils import logging as transformers_logging

from deepswe.config import ImitationConfig, ModelConfig, TrainingConfig
from deepswe.cores import usable_cores
from deepswe.errors import ConfigError
from deepswe.own_thread import OwnThread
from deepswe.policy.checkpoints import EXPORT, damage
from deepswe.policy.model_path import with_model_directory
from deepswe.policy.models import LoadedModel, load_policy_model
from deepswe.policy.render import Renderer as ChatRenderer
from deepswe.progress import Progress
from deepswe.scaling.calibration import Calibration, calibrate
from deepswe.scaling.candidates import Candidate, load_candidates
from deepswe.scaling.scores import ScoreBook
from deepswe.scaling.verifier import Judge, ModelJudge, Prompter
from deepswe.scaling.verifier_data import DataSet, Example, make_data_set
from deepswe.scaling.verifier_prompt import read_candidate
from deepswe.scaling.verifier_recipe import VerifierPrompt, VerifierRecipe
from deepswe.session.interrupt import run_to_end
from deepswe.training.checkpoint import save_checkpoint, to_resume
from deepswe.training.imitation import Imitation
from deepswe.training.lora import add_lora
from deepswe.training.run import RunDirectory, own_run, read_json, write_json

CARD = "verifier.json"
"""Beside a verifier's weights: how it is to be asked, and what it was worth."""
CHUNK = 64
"""Candidates that are scored between two looks at the clock."""
SAVES = 5
"""Checkpoints of a training."""


def train_verifier(recipe: VerifierRecipe, *, resume: bool, progress: Progress) -> dict[str, Any]:
    """Train a verifier, measure it on groups that it never saw, and leave it in the run directory.

    Args:
        recipe: what and how.
        resume: go on with it if it was begun; a finished one is only read.
        progress: told of each update.

    Returns:
        Counts of examples, the loss, the calibration on held-out groups, and the directory to score with.

    Raises:
        DeepsweError: with what to do; what was recorded stays.
    """
    recipe = recipe.model_copy(update={"model": with_model_directory(recipe.model)})
    with own_run(recipe, resume=resume) as run:
        if not run.summary.exists():
            run_to_end(_Trainer(recipe, run, progress).train())
        return read_json(run.summary)


def read_runs(recipe: VerifierRecipe) -> list[Candidate]:
    """The judged attempts of the recipe's runs, the names of different runs apart.

    Raises:
        ConfigError: a run has none of the phases.
    """
    found: list[Candidate] = []
    for number, run in enumerate(recipe.data.runs):
        loaded, _ = load_candidates(run)
        kept = [c for c in loaded if c.name.startswith(tuple(recipe.data.phases))]
        if not kept:
            known = sorted({c.name.rsplit("-", 2)[0] for c in loaded})
            raise ConfigError(f"data.phases names {recipe.data.phases}, but {run} has the phases {', '.join(known)}")
        found += [replace(candidate, name=f"{number}/{candidate.name}") for candidate in kept]
    return found


class _Trainer:
    """One process's share of a training."""

    def __init__(self, recipe: VerifierRecipe, run: RunDirectory, progress: Progress) -> None:
        self._recipe, self._run, self._progress = recipe, run, progress
        _settle(recipe.run.threads)

    async def train(self) -> None:
        recipe, data = self._recipe, self._recipe.data
        examples = make_data_set(
            read_runs(recipe),
            split_by=data.split_by,
            heldout_share=data.heldout_share,
            seed=recipe.run.seed,
            most=data.most,
        )
        loaded = _load(recipe.model, _texts(examples), recipe.run.seed)
        prompter = _prompter(loaded, recipe.prompt)
        lessons = prompter.lessons(examples.train)
        imitation, loss = await self._learn(loaded, lessons)
        judge = ModelJudge(
            loaded.model,
            prompter,
            prior=examples.prior,
            tokens_per_microbatch=recipe.training.tokens_per_microbatch,
            bfloat16=recipe.model.dtype == "bfloat16",
        )
        measured = await self._measure(judge, examples.heldout)
        answer = {
            "train": len(lessons),
            "too_long": len(examples.train) - len(lessons),
            "heldout": len(examples.heldout),
            "ungraded": examples.ungraded,
            "prior": examples.prior,
            "updates": imitation.updates,
            "loss": loss,
            "calibration": None if measured is None else asdict(measured),
        }
        directory = self._save(loaded, imitation, answer)
        write_json(self._run.summary, {**answer, "verifier": str(directory)})

    async def _learn(self, loaded: LoadedModel, lessons: Sequence[Any]) -> tuple[Imitation, float]:
        """The loss is the mean over the last tenth of the updates made here, in nats; 0 if there were none."""
        training = self._recipe.training
        steps = max(1, math.ceil(training.epochs * len(lessons) / training.batch_size))
        imitation = Imitation(
            loaded.model,
            ImitationConfig(
                steps=0,
                batch_size=min(training.batch_size, len(lessons)),
                learning_rate=training.learning_rate,
                warmup_steps=training.warmup_steps,
            ).model_copy(update={"steps": steps}),
            TrainingConfig(
                weight_decay=training.weight_decay,
                grad_clip=training.grad_clip,
                tokens_per_microbatch=training.tokens_per_microbatch,
            ),
            seed=self._recipe.run.seed,
            bfloat16=self._recipe.model.dtype == "bfloat16",
        )
        if checkpoint := to_resume(self._run.checkpoints):
            imitation.load_state_dict(checkpoint.learner_state())
        self._progress.begin("verifier", steps)
        self._progress.advance(imitation.updates)
        losses: list[float] = []

        def record(row: dict[str, float]) -> None:
            losses.append(row["loss"])

        with OwnThread("learner") as thread:
            while imitation.updates < steps:
                # One update at a time in a thread, so that an interrupt does not wait for all of them.
                await thread(imitation.run, lessons, record, until=imitation.updates + 1)
                self._progress.advance(1, note=f"loss {losses[-1]:.3f}")
                if imitation.updates % max(1, steps // SAVES) == 0:
                    self._save(loaded, imitation, {})
        last = losses[-max(1, steps // 10) :]
        return imitation, math.fsum(last) / len(last) if last else 0.0

    async def _measure(self, judge: Judge, heldout: Sequence[Example]) -> Calibration | None:
        self._progress.begin("held-out groups", len(heldout))
        pairs: list[tuple[float | None, float]] = []
        for start in range(0, len(heldout), CHUNK):
            chunk = heldout[start : start + CHUNK]
            found = await judge.judge([read_candidate(example.candidate) for example in chunk])
            pairs += zip(found, (float(example.answer) for example in chunk), strict=True)
            self._progress.advance(len(chunk))
        return calibrate(pairs)

    def _save(self, loaded: LoadedModel, imitation: Imitation, measured: Mapping[str, Any]) -> Path:
        saved = save_checkpoint(
            self._run.checkpoints,
            imitation.updates,
            learner_state=imitation.state_dict(),
            state={"updates": imitation.updates},
            keep=1,
            model=loaded.model,
            tokenizer=loaded.tokenizer,
        )
        card = {"prompt": self._recipe.prompt.model_dump(), "dtype": self._recipe.model.dtype, **measured}
        write_json(self._run.path / CARD, {**card, "model": str(saved.export.relative_to(self._run.path))})
        return self._run.path


def load_verifier(directory: Path, *, threads: int = 0) -> ModelJudge:
    """A verifier that `train_verifier` left.

    Args:
        directory: its run directory.
        threads: of torch; 0 takes all cores.

    Raises:
        ConfigError: there is none, or its training has not ended.
    """
    card = directory / CARD
    try:
        said = json.loads(card.read_text(encoding="utf-8"))
        prompt, prior = VerifierPrompt.model_validate(said["prompt"]), float(said["prior"])
        model = ModelConfig(path=str(directory / said["model"]), dtype=said["dtype"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"{directory} holds no trained verifier ({card.name}: {error}); give the run directory of "
            "`deepswe verifier train`, and end that with --resume if it was interrupted"
        ) from error
    if wrong := damage(Path(model.path).parent, EXPORT):
        raise ConfigError(f"the model of {directory} is damaged: {wrong}; restore it, or train the verifier again")
    _settle(threads)
    loaded = _load(model, (), 0)
    return ModelJudge(loaded.model, _prompter(loaded, prompt), prior=prior, bfloat16=said["dtype"] == "bfloat16")


def score_candidates(
    candidates: Sequence[Candidate], judge: Judge, book: ScoreBook, progress: Progress
) -> dict[str, Any]:
    """Let a verifier score the candidates that have no score yet; equal candidates are asked about once.

    Args:
        candidates: with issues.
        judge: gives probabilities.
        book: gets them, chunk by chunk; a missing answer is recorded as none, and asked about again next time.
        progress: told of each chunk.

    Returns:
        candidates, scored (now), known (before), missing (answers), and the calibration over those with outcomes.
    """
    todo = [c for c in candidates if not book.has(c, "verifier")]
    progress.begin("verifier", len(todo))

    async def score() -> int:
        missing = 0
        for start in range(0, len(todo), CHUNK):
            chunk = todo[start : start + CHUNK]
            readings = {candidate.key: read_candidate(candidate) for candidate in chunk}
            distinct = list(dict.fromkeys(readings.values()))
            found = dict(zip(distinct, await judge.judge(distinct), strict=True))
            for candidate in chunk:
                probability = found[readings[candidate.key]]
                missing += probability is None
                if probability is not None:
                    book.append(candidate, verifier=probability)
            progress.advance(len(chunk))
        return missing

    missing = run_to_end(score())
    known = [(book.scores([c])[0].verifier, c.outcome) for c in candidates]
    measured = calibrate((p, outcome) for p, outcome in known if outcome is not None)
    return {
        "candidates": len(candidates),
        "scored": len(todo) - missing,
        "known": len(candidates) - len(todo),
        "missing": missing,
        "calibration": None if measured is None else asdict(measured),
    }


def with_issues(candidates: Sequence[Candidate], issues: Mapping[str, str]) -> list[Candidate]:
    """The candidates with their tasks' issues, where they have none of their own.

    Raises:
        ConfigError: a candidate has neither an issue nor an interaction that would hold it.
    """
    made = [c if c.issue else replace(c, issue=issues.get(c.task_id, "")) for c in candidates]
    blind = next((c for c in made if not c.issue and not c.turns), None)
    if blind is not None:
        raise ConfigError(
            f"candidate {blind.name} of task {blind.task_id!r} comes without an issue; name its task set with --tasks"
        )
    return made


def _load(model: ModelConfig, corpus: Iterable[str], seed: int) -> LoadedModel:
    """A model, with adapters where it has them, on the GPU if there is one."""
    loaded = load_policy_model(model, corpus=iter(corpus), seed=seed)
    if model.lora.rank:
        add_lora(loaded.model, model.lora, seed=seed, narrow=model.dtype == "bfloat16")
    if torch.cuda.is_available():
        loaded.model.to("cuda")  # type: ignore[arg-type]
    return loaded


def _settle(threads: int) -> None:
    transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    torch.set_num_threads(threads or usable_cores())


def _prompter(loaded: LoadedModel, prompt: VerifierPrompt) -> Prompter:
    template = str(loaded.tokenizer.chat_template or "")
    thinking = prompt.thinking or "enable_thinking" not in template
    context = int(getattr(loaded.model.config.get_text_config(), "max_position_embeddings", 0) or prompt.budget + 1)
    renderer = ChatRenderer(loaded.tokenizer, thinking=thinking)
    return Prompter(renderer, style=prompt.style, budget=min(prompt.budget, context - 1))


def _texts(data: DataSet) -> list[str]:
    """For the tokenizer of a model from scratch: what the training side's candidates are made of."""
    texts = []
    for example in data.train:
        candidate = example.candidate
        texts += [candidate.issue, candidate.patch, *(turn.content for turn in candidate.turns)]
    return texts
