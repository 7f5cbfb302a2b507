"""Values that no run could carry out are refused when the recipe is read."""

from __future__ import annotations

from pathlib import Path

import pytest

from deepswe.config import Recipe, build_recipe, load_recipe, load_sandbox
from deepswe.errors import ConfigError

RECIPE = '[run]\nname = "r"\n[tasks]\nkind = "frozenlake"\n'


def written(tmp_path: Path, text: str | bytes) -> Path:
    path = tmp_path / "r.toml"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("training.betas=[2, 3]", "training.betas.0: Input should be less than 1"),
        ("training.betas=[0.9, 1.0]", "training.betas.1: Input should be less than 1"),
        ("training.betas=[0.9, -0.1]", "training.betas.1: Input should be greater than or equal to 0"),
        ("training.betas=[true, 0.9]", "training: betas takes no true or false"),
        ("training.steps=true", "training: steps takes no true or false"),
        ("training.learning_rate=true", "training: learning_rate takes no true or false"),
        ("evaluation.splits=[true]", "evaluation: splits takes no true or false"),
        ("run.seed=9223372036854775808", "run.seed: Input should be less than"),
        ("run.seed=-9223372036854775809", "run.seed: Input should be greater than"),
        ("tasks.seed=9223372036854775808", "tasks.frozenlake.seed: Input should be less than"),
        ("run.threads=100000000", "run.threads: Input should be less than or equal to 4096"),
        ("model.scratch.hidden_size=1000000000000", "model.scratch.hidden_size: Input should be less than or equal"),
        ("training.steps=1000000000001", "training.steps: Input should be less than or equal to 1000000000000"),
        ("training.checkpoint_every=1000000000001", "Input should be less than or equal to 1000000000000"),
        (f"training.steps={'9' * 400}", "training.steps: Input should be less than or equal to 1000000000000"),
        (f"training.steps={'9' * 5000}", "training.steps: "),
        (f"training.steps=0x{'f' * 5000}", "training.steps: "),
        (f"training.steps={'[' * 100_000}", "training.steps: "),
        ('run.directory="a\\u0000b"', "run: directory has a NUL character"),
        ('run.name="a\\u0000b"', "run: name has a NUL character"),
        ('model.path="a\\u0000b"', "model: path has a NUL character"),
        ('imitation.runs=["a", "a\\u0000b"]', "imitation: runs has a NUL character"),
        ('engine.vllm.arguments=["a\\u0000b"]', "engine.vllm: arguments has a NUL character"),
    ],
    ids=lambda text: text[:40],
)
def test_a_value_that_would_fail_later_is_refused_with_its_key(tmp_path: Path, override: str, words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_recipe(written(tmp_path, RECIPE), [override])
    assert words in str(caught.value)
    assert len(str(caught.value)) < 600


def test_the_extremes_themselves_are_taken(tmp_path: Path) -> None:
    overrides = ["training.betas=[0, 0.999]", f"run.seed={2**63 - 1}", "run.threads=4096", f"training.steps={10**12}"]
    recipe = load_recipe(written(tmp_path, RECIPE), [*overrides, "run.deterministic=true"])
    assert (recipe.training.betas, recipe.training.steps) == ((0.0, 0.999), 10**12)
    assert (recipe.run.seed, recipe.run.threads, recipe.run.deterministic) == (2**63 - 1, 4096, True)
    assert build_recipe(recipe.model_dump(mode="json"), origin="again") == recipe
    assert Recipe.model_validate(recipe) is recipe


def test_options_of_a_users_own_suite_may_be_true_or_false(tmp_path: Path) -> None:
    recipe = load_recipe(
        written(tmp_path, '[run]\nname = "r"\n[tasks]\nkind = "custom"\nsuite = "a:b"\noptions.on = true\n')
    )
    assert recipe.tasks.model_dump()["options"] == {"on": True}


@pytest.mark.parametrize("value", ["9" * 5000, "[" * 100_000], ids=["digits", "nesting"])
def test_a_file_that_python_cannot_read_as_toml_is_one_error(tmp_path: Path, value: str) -> None:
    with pytest.raises(ConfigError, match="is not valid TOML"):
        load_recipe(written(tmp_path, f"{RECIPE}[training]\nsteps = {value}\n"))


def test_a_byte_order_mark_and_line_ends_of_windows_are_taken(tmp_path: Path) -> None:
    plain = load_recipe(written(tmp_path, RECIPE))
    assert load_recipe(written(tmp_path, b"\xef\xbb\xbf" + RECIPE.replace("\n", "\r\n").encode())) == plain


def test_the_sandbox_alone_has_the_same_bounds() -> None:
    with pytest.raises(ConfigError, match="memory_mib takes no true or false"):
        load_sandbox(["sandbox.memory_mib=true"])
    with pytest.raises(ConfigError, match="less than or equal to 1000000000000"):
        load_sandbox([f"sandbox.pids={'9' * 30}"])
    with pytest.raises(ConfigError, match="'pids' is a value, not a section"):
        load_sandbox(["sandbox.pids=3", "sandbox.pids.more=3"])
