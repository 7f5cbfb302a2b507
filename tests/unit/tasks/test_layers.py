from __future__ import annotations

import errno
import multiprocessing
import os
import signal
import stat
import time
from pathlib import Path

import pytest

from deepswe.errors import BuildError
from deepswe.tasks.layers import LayerCache, default_cache_root, layer_key


def fill(place: Path) -> None:
    (place / "a.txt").write_text("a")


def leftovers(cache: LayerCache) -> list[str]:
    return sorted(item.name for item in (cache.root / "work").iterdir())


def test_layer_is_built_once_and_found_again(tmp_path: Path) -> None:
    cache, calls = LayerCache(tmp_path), list[int]()

    def builder(place: Path) -> None:
        calls.append(1)
        fill(place)

    assert cache.build("k", builder) == cache.build("k", builder) == cache.path("k")
    assert calls == [1]
    assert "k" in cache
    assert (cache.path("k") / "a.txt").read_text() == "a"


def test_path_of_a_layer_that_was_never_built_says_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(BuildError, match=r"layer k is not in the cache .*build its task set again"):
        LayerCache(tmp_path).path("k")


@pytest.mark.parametrize("key", ["", "../k", "a/b", ".hidden", "a b", "x" * 200])
def test_key_that_is_no_plain_name_is_refused(tmp_path: Path, key: str) -> None:
    with pytest.raises(BuildError, match="not a plain name"):
        LayerCache(tmp_path).build(key, fill)


def test_failed_builder_leaves_nothing(tmp_path: Path) -> None:
    cache = LayerCache(tmp_path)

    def builder(place: Path) -> None:
        fill(place)
        raise BuildError("no")

    with pytest.raises(BuildError, match="no"):
        cache.build("k", builder)
    assert "k" not in cache
    assert leftovers(cache) == []
    assert cache.build("k", fill).is_dir()


def test_full_disk_is_one_clear_error_and_leaves_nothing(tmp_path: Path) -> None:
    cache = LayerCache(tmp_path)

    def builder(place: Path) -> None:
        fill(place)
        raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(BuildError, match=r"disk of .* is full; free some space or set DEEPSWE_CACHE"):
        cache.build("k", builder)
    assert "k" not in cache
    assert leftovers(cache) == []


def test_unusable_directory_names_the_variable_to_set(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(BuildError, match="set DEEPSWE_CACHE to a directory you can write"):
        LayerCache(tmp_path / "file" / "cache").build("k", fill)


def half_build(root: Path, started: Path) -> None:
    def builder(place: Path) -> None:
        fill(place)
        started.write_text("")
        time.sleep(60)

    LayerCache(root).build("k", builder)


@pytest.mark.parametrize("key", ["k", "another"])
def test_what_a_killed_builder_left_is_reaped_by_the_next_build_of_any_layer(tmp_path: Path, key: str) -> None:
    started = tmp_path / "started"
    process = multiprocessing.get_context("spawn").Process(target=half_build, args=(tmp_path / "cache", started))
    process.start()
    while not started.exists():
        time.sleep(0.01)
    assert process.pid is not None
    os.kill(process.pid, signal.SIGKILL)
    process.join()
    cache = LayerCache(tmp_path / "cache")
    assert "k" not in cache
    assert leftovers(cache) == ["k"]
    cache.build(key, fill)
    assert leftovers(cache) == []


def build_and_count(root: Path, counts: Path, barrier: str) -> None:
    def builder(place: Path) -> None:
        with counts.open("a") as stream:
            stream.write("x")
        time.sleep(0.2)
        fill(place)

    while not Path(barrier).exists():
        time.sleep(0.005)
    LayerCache(root).build("k", builder)


def test_parallel_builders_of_one_layer_build_it_once(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    counts, barrier = tmp_path / "counts", tmp_path / "go"
    arguments = (tmp_path / "cache", counts, str(barrier))
    processes = [context.Process(target=build_and_count, args=arguments) for _ in range(4)]
    for process in processes:
        process.start()
    barrier.write_text("")
    for process in processes:
        process.join()
    assert [process.exitcode for process in processes] == [0] * 4
    assert counts.read_text() == "x"


def test_builder_waits_no_longer_than_its_limit(tmp_path: Path) -> None:
    cache = LayerCache(tmp_path, lock_timeout_s=0.1)

    def builder(place: Path) -> None:
        with pytest.raises(BuildError, match=r"another process has been building it for 0 s; see who holds"):
            cache.build("k", fill)
        fill(place)

    assert cache.build("k", builder).is_dir()


def test_layer_is_readable_by_all_and_writable_by_its_owner_only(tmp_path: Path) -> None:
    def builder(place: Path) -> None:
        for name, mode in (("private", 0o600), ("script", 0o700), ("open", 0o666)):
            (place / name).write_text("")
            (place / name).chmod(mode)
        (place / "link").symlink_to("open")

    place = LayerCache(tmp_path).build("k", builder)
    modes = {item.name: stat.S_IMODE(item.stat().st_mode) for item in place.iterdir()}
    assert modes == {"private": 0o644, "script": 0o755, "open": 0o644, "link": 0o644}
    assert stat.S_IMODE(place.stat().st_mode) == 0o755


def test_cache_directory_comes_from_the_environment() -> None:
    assert default_cache_root({"DEEPSWE_CACHE": "/d", "XDG_CACHE_HOME": "/x"}) == Path("/d")
    assert default_cache_root({"XDG_CACHE_HOME": "/x", "HOME": "/h"}) == Path("/x/deepswe")
    assert default_cache_root({"HOME": "/h"}) == Path("/h/.cache/deepswe")


def test_key_depends_on_every_part_of_the_recipe_and_not_on_its_order() -> None:
    key = layer_key("n", {"a": 1, "b": ["x"]})
    assert key == layer_key("n", {"b": ["x"], "a": 1})
    assert key != layer_key("n", {"a": 1, "b": ["y"]})
    assert key.startswith("n-")
