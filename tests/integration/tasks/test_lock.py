"""A lock builds the same layers in another cache, or says what differs. pip works over a directory; no network."""

from __future__ import annotations

import json
import shutil
import subprocess
import tarfile
from pathlib import Path

import pytest

from deepswe.errors import BuildError, TaskError
from deepswe.progress import Silent
from deepswe.tasks.bundled import Catalogue
from deepswe.tasks.distributions import Pip
from deepswe.tasks.environments import Environment, Package, build_environment, hash_layer, resolve
from deepswe.tasks.layers import LayerCache
from deepswe.tasks.lock import Lock, LockedArchive, make_lock, read_lock, restore, write_lock
from deepswe.tasks.synth import project
from deepswe.tasks.synth.commits_history import History
from deepswe.tasks.synth.commits_tasks import build_tree
from deepswe.tasks.synth.project import open_project
from deepswe.tasks.task import HiddenTests, Repository, Task, TaskSet
from tests.integration.tasks.test_history import Maker

NONE = Catalogue(repositories=())


@pytest.fixture(scope="module")
def locked(tmp_path_factory: pytest.TempPathFactory, offline_pip: Pip) -> tuple[Lock, LayerCache, Path]:
    """A lock of one environment and one git tree, the cache that it was made in, and the repository."""
    tmp_path = tmp_path_factory.mktemp("locked")
    make = Maker(tmp_path / "calc")
    cache = LayerCache(tmp_path / "cache")
    packages = resolve(["tiny<2"], cache, offline_pip)
    environment = Environment(packages, "calc", "1.0")
    build_environment(environment, cache, offline_pip)
    with History(make.root) as history:
        tree = build_tree(history, history.tree(history.resolve("HEAD")), "calc", cache)
    tasks = tuple(
        Task(name, "calc", "", Repository(base=tree, environment=environment.key), "test", "train") for name in "ab"
    )
    hidden = {task.id: HiddenTests(task.id, {}, ("a",), ()) for task in tasks}
    return make_lock(TaskSet(tasks, hidden), cache, Silent(), catalogue=NONE), cache, make.root


def test_lock_rebuilds_the_same_layers_in_another_cache(
    locked: tuple[Lock, LayerCache, Path], tmp_path: Path, offline_pip: Pip
) -> None:
    lock, cache, repository = locked
    write_lock(lock, tmp_path / "set.lock.json")
    lock = read_lock(tmp_path / "set.lock.json")
    [environment], [tree] = lock.environments, lock.trees
    assert [package.name for package in environment.packages] == ["tiny"]
    assert all(len(digest) == 64 for package in environment.packages for digest in package.sha256)
    other = LayerCache(tmp_path / "elsewhere" / "another cache")
    with pytest.raises(BuildError, match="--repository calc=PATH"):
        restore(lock, other, Silent(), pip=offline_pip)
    assert set(restore(lock, other, Silent(), pip=offline_pip, repositories={"calc": str(repository)})) == {tree.key}
    for key in (environment.key, tree.key):
        assert hash_layer(other.path(key)) == hash_layer(cache.path(key))
    assert restore(lock, other, Silent(), pip=offline_pip) == ()


def test_archive_with_another_hash_is_refused_and_nothing_is_left(
    locked: tuple[Lock, LayerCache, Path], tmp_path: Path, offline_pip: Pip
) -> None:
    lock, _, _ = locked
    [row] = lock.environments
    wrong = row.model_copy(update={"packages": (Package("tiny", "1.0", ("0" * 64,)),)})
    other = LayerCache(tmp_path / "other")
    with pytest.raises(BuildError, match="tiny"):
        restore(lock.model_copy(update={"environments": (wrong,)}), other, Silent(), pip=offline_pip)
    assert row.key not in other


def test_layer_that_is_not_the_locked_one_is_one_clear_error(
    locked: tuple[Lock, LayerCache, Path], tmp_path: Path, offline_pip: Pip
) -> None:
    lock, cache, _ = locked
    [row] = lock.environments
    other = LayerCache(tmp_path / "other")
    wrong = lock.model_copy(update={"environments": (row.model_copy(update={"hash": "f" * 64}),), "trees": ()})
    with pytest.raises(BuildError, match=f"layer {row.key} has the content .* the lock says ffff"):
        restore(wrong, other, Silent(), pip=offline_pip)
    assert row.key not in other
    changed = LayerCache(tmp_path / "changed")
    changed.build(row.key, lambda place: shutil.copytree(cache.path(row.key), place, symlinks=True, dirs_exist_ok=True))
    site = next(changed.path(row.key).glob("lib/python*/site-packages"))
    (site / "tiny.py").write_text("VERSION = 'changed'\n")
    with pytest.raises(BuildError, match="build it again"):
        restore(lock.model_copy(update={"trees": ()}), changed, Silent(), pip=offline_pip)


def test_lock_of_another_python_is_refused_before_anything_is_built(
    locked: tuple[Lock, LayerCache, Path], tmp_path: Path
) -> None:
    lock, _, _ = locked
    row = lock.environments[0].model_copy(update={"python": "2.7.18"})
    with pytest.raises(BuildError, match=r"locked for Python 2\.7\.18"):
        restore(lock.model_copy(update={"environments": (row,)}), LayerCache(tmp_path / "other"), Silent())


def test_layer_of_unknown_origin_and_malformed_lock_are_refused(tmp_path: Path) -> None:
    cache = LayerCache(tmp_path)
    cache.build("mine", lambda place: (place / "a").write_text("a"))
    task = Task("a", "calc", "", Repository(base="mine"), "test", "train")
    with pytest.raises(BuildError, match="nothing says what layer mine was built from"):
        make_lock(TaskSet((task,), {"a": HiddenTests("a", {}, ("a",), ())}), cache, Silent(), catalogue=NONE)
    (tmp_path / "lock.json").write_text(json.dumps({"version": 2}))
    with pytest.raises(TaskError, match="no lock of this version"):
        read_lock(tmp_path / "lock.json")
    with pytest.raises(TaskError, match="cannot be read"):
        read_lock(tmp_path / "none.json")


@pytest.mark.parametrize("form", ["directory", "git", "archive"])
def test_set_made_from_a_project_of_ones_own_is_locked_and_rebuilt_where_that_project_is(
    form: str, tmp_path: Path, offline_pip: Pip, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(project, "resolve_needs", lambda *arguments: ("tiny==1.0",))
    shop = tmp_path / "shop"
    (shop / "tests").mkdir(parents=True)
    (shop / "pyproject.toml").write_text('[project]\nname = "shop"\nversion = "0.1"\n')
    (shop / "shop.py").write_text("def price(n):\n    return 2 * n\n")
    (shop / "tests" / "test_shop.py").write_text("def test_price():\n    assert True\n")
    place = packed(shop, form)
    cache = LayerCache(tmp_path / "cache")
    source = open_project(str(place), cache, offline_pip, Silent())
    repository = Repository(
        base=source.recipe.distribution.base_key, environment=source.recipe.distribution.environment_key
    )
    task = Task("shop-001", "shop", "", repository, "mutation", "train")
    tasks = TaskSet((task,), {task.id: HiddenTests(task.id, {}, ("a",), ())})
    lock = make_lock(tasks, cache, Silent(), pip=offline_pip, catalogue=NONE)
    [archive], [environment] = lock.archives, lock.environments
    assert (archive.spec, archive.half) == (str(place), "base")
    assert [package.name for package in environment.packages] == ["tiny"]
    moved = place.rename(tmp_path / f"moved{place.suffix}")
    other = LayerCache(tmp_path / "other")
    with pytest.raises(BuildError, match=r"not here; say where that project is with --repository shop=PATH"):
        restore(lock, other, Silent(), pip=offline_pip)
    with pytest.raises(BuildError, match="not here"):  # a plain name is never asked for at the package index
        restore(lock, other, Silent(), pip=offline_pip, repositories={"shop": "tiny"})
    built = restore(lock, other, Silent(), pip=offline_pip, repositories={"shop": str(moved)})
    assert archive.key in built
    assert hash_layer(other.path(archive.key)) == hash_layer(source.base)


def packed(tree: Path, form: str) -> Path:
    """A project as a directory, as a git repository or as an archive of it."""
    if form == "archive":
        with tarfile.open(tree.with_suffix(".gz"), "w:gz") as tar:
            tar.add(tree, "shop-0.1")
        return tree.with_suffix(".gz")
    if form == "git":
        for command in (["init", "-q"], ["add", "."], ["-c", "user.name=a", "-c", "user.email=a@b", "commit", "-qma"]):
            subprocess.run(["git", "-C", str(tree), *command], check=True)
    return tree


def test_a_project_that_has_changed_since_is_refused(tmp_path: Path, offline_pip: Pip) -> None:
    (tmp_path / "shop.py").write_text("PRICE = 2\n")
    row = LockedArchive(
        key="base-shop", hash="f" * 64, name="shop", version="0", sha256="", half="base", tests=(), spec=str(tmp_path)
    )
    cache = LayerCache(tmp_path / "cache")
    with pytest.raises(BuildError, match="what it is built from has changed"):
        restore(Lock(archives=(row,)), cache, Silent(), pip=offline_pip)
    assert row.key not in cache


def test_hash_ignores_byte_code_and_sees_content_kind_and_execution_bit(tmp_path: Path) -> None:
    def layer(name: str, text: str = "x", mode: int = 0o644) -> str:
        place = tmp_path / name
        (place / "__pycache__").mkdir(parents=True)
        (place / "__pycache__" / "a.pyc").write_text(name)
        (place / "pyvenv.cfg").write_text(name)
        (place / "a.py").write_text(text)
        (place / "a.py").chmod(mode)
        (place / "python").symlink_to(f"/usr/bin/{name}")
        return hash_layer(place)

    assert layer("one") == layer("two")
    assert len({layer("four"), layer("five", text="y"), layer("six", mode=0o755)}) == 3
