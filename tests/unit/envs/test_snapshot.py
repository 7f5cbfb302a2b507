"""The commit of a small tree."""

from deepswe.envs.snapshot import build_snapshot, snapshot_of


def test_attempts_at_the_same_tree_share_its_commit_and_others_do_not():
    files = {"a.py": "x = 1\n", "b/c.py": "y = 2\n"}
    first = snapshot_of(tuple(files.items()))
    assert first is snapshot_of(tuple(dict(files).items()))
    assert first == build_snapshot({path: text.encode() for path, text in files.items()})
    assert first.commit != snapshot_of((("a.py", "x = 2\n"),)).commit
