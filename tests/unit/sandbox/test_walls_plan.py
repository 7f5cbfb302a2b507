"""Bubblewrap's arguments are understood exactly, or refused."""

import pytest

from deepswe.sandbox import seccomp, syscalls, view, walls
from deepswe.sandbox.base import Layer, SandboxSpec


def arguments(tmp_path, spec=None):
    host = view.prepare_host(tmp_path)
    return host, view.view(host, spec or SandboxSpec()).argv


def test_the_arguments_of_every_sandbox_are_understood(tmp_path):
    host, own = arguments(tmp_path, SandboxSpec(layers=(Layer(tmp_path, "/opt/x"), Layer(tmp_path, "/y", True))))
    plan = walls.read_plan(host.head)
    assert (plan.uid, plan.gid, plan.hostname) == (1000, 1000, "sandbox")
    said = [word for option, values in (*plan.steps, *walls.read_steps(own)) for word in (option, *values)]
    left = [word for word in (*host.head, *own) if word in walls._MOUNTS or word.startswith("/")]
    assert [word for word in said if word in left] == left
    assert [option for option, _ in walls.read_steps(own)] == ["--ro-bind", "--overlay-src", "--overlay", "--bind"]


@pytest.mark.parametrize("lost", ["--unshare-net", "--unshare-user", "--as-pid-1", "--die-with-parent", "--clearenv"])
def test_arguments_without_a_wall_are_refused(tmp_path, lost):
    host, _ = arguments(tmp_path)
    with pytest.raises(walls.NotKnown, match=lost):
        walls.read_plan([word for word in host.head if word != lost])


@pytest.mark.parametrize(
    "change",
    [
        ("--share-net",),
        ("--cap-add", "ALL"),
        ("--dev-bind", "/", "/"),
        ("--cap-drop", "CAP_KILL"),
        ("--seccomp", "9"),
        ("--tmpfs", "/x"),
    ],
)
def test_options_that_are_not_known_are_refused(tmp_path, change):
    host, _ = arguments(tmp_path)
    with pytest.raises(walls.NotKnown, match=change[0]):
        walls.read_plan([*host.head, *change])


def test_a_sandboxs_own_arguments_are_directories_alone():
    for words in (["--unshare-net"], ["--uid", "0"], ["/x"], ["--cap-add", "ALL"]):
        with pytest.raises(walls.NotKnown):
            walls.read_steps(words)


def test_system_call_numbers_agree_with_the_filters():
    assert set(syscalls.NUMBERS) == set(seccomp.ARCHITECTURES)
    for machine, table in seccomp.ARCHITECTURES.items():
        assert syscalls.NUMBERS[machine] == {"clone": table.clone, "pivot_root": table.denied["pivot_root"]}
        new = (syscalls._OPEN_TREE, syscalls._MOVE_MOUNT, syscalls._MOUNT_SETATTR)
        assert new == tuple(table.denied[name] for name in ("open_tree", "move_mount", "mount_setattr"))


def test_a_path_is_below_a_directory_by_whole_names():
    assert walls.is_below("/usr/lib", "/usr")
    assert walls.is_below("/usr/lib", "/")
    assert not walls.is_below("/usr", "/usr")
    assert not walls.is_below("/usrx/lib", "/usr")
