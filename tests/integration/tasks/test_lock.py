"""A lock builds the same layers in another cache, or says what differs. pip works over a directory; no network."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from deepswe.errors import BuildError, TaskError
from deepswe.progress import Silent
from deepswe.tasks.bundled import Catalogue
from deepswe.tasks.distributions import Pip
from deepswe.tasks.environments import Environment, Package, build_environment, hash_layer, resolve
from deepswe.tasks.layers import LayerCache
from deepswe.tasks.lock import Lock, make_lock, read_lock, restore, write_lock
from deepswe.tasks.synth.commits_history import History
from deepswe.tasks.synth.commits_tasks import build_tree
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
