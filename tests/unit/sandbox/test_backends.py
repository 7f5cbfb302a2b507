import sys
from pathlib import Path

import pytest

from deepswe.config import SandboxConfig, load_sandbox
from deepswe.errors import ConfigError, SandboxUnavailable
from deepswe.sandbox import backends


def test_a_missing_client_names_the_extra_that_brings_it(monkeypatch):
    monkeypatch.delitem(sys.modules, "deepswe.sandbox.container", raising=False)
    monkeypatch.setitem(sys.modules, "aiodocker", None)
    with pytest.raises(SandboxUnavailable, match=r"needs the package aiodocker.*pip install 'deepswe\[docker\]'"):
        backends.open_backend(SandboxConfig(backend="docker"), "run", Path("/nowhere"))


def test_what_a_backend_cannot_honour_is_refused_at_load():
    with pytest.raises(ConfigError, match="bubblewrap has no images"):
        load_sandbox(["sandbox.image=x:1"])
    assert load_sandbox(["sandbox.image=x:1", "sandbox.backend=docker"]).image == "x:1"


def test_settings_of_a_sandbox_need_no_recipe():
    config = load_sandbox(["sandbox.memory_mib=64", "sandbox.kubernetes.namespace=x"])
    assert (config.memory_mib, config.kubernetes.namespace) == (64, "x")
    for text, words in [("run.name=x", "no setting of a sandbox"), ("sandbox.mem=1", "mem is not a known key")]:
        with pytest.raises(ConfigError, match=words):
            load_sandbox([text])
