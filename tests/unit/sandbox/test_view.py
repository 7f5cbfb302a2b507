"""What is masked of the host."""

from deepswe.sandbox.view import packages_below


def test_packages_are_masked_where_they_stand_and_never_what_a_system_shares(tmp_path):
    for path in (
        "lib/python3/dist-packages/one/__init__.py",
        "lib/python3.11/json/__init__.py",
        "lib/python3.11/site-packages/two/__init__.py",
        "lib/engine/lib/three/three/__init__.py",
        "lib/engine/lib/four/__init__.py",
        "lib/five/__init__.py",
        "lib/x86_64-linux-gnu/six/__init__.py",
        "local/lib/seven/__init__.py",
        "share/tool/third_party/eight.py",
        "share/tool/data.txt",
    ):
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).touch()
    found = {path.removeprefix(f"{tmp_path}/") for path in packages_below(str(tmp_path))}
    assert found == {
        "lib/python3/dist-packages",
        "lib/python3.11/site-packages",
        "lib/engine/lib",
        "lib/engine/lib/three",
        "lib/five",
        "lib/x86_64-linux-gnu/six",
        "local/lib/seven",
        "share/tool/third_party",
    }
