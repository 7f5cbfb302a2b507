"""The conformance suite on bubblewrap: as the user who runs the tests, and as a plain one."""

import json
import subprocess
import sys

import pytest

from deepswe.config import SandboxConfig
from deepswe.progress import Silent
from deepswe.sandbox.conformance import check_backend

GROUPS = ("exec", "files", "state", "isolation", "concurrency", "death")
PLAIN = """
import json, os, sys
from deepswe.config import SandboxConfig
from deepswe.progress import Silent
from deepswe.sandbox.conformance import check_backend
verdicts = check_backend(SandboxConfig(), Silent(), quick=True, names=sys.argv[1:])
print(json.dumps({"uid": os.getuid(), "verdicts": [(v.check, v.outcome, v.reason) for v in verdicts]}))
"""


def test_bubblewrap_passes_the_checks():
    verdicts = check_backend(SandboxConfig(), Silent(), quick=True, names=GROUPS)
    assert not [verdict for verdict in verdicts if verdict.outcome == "failed"]
    assert sum(verdict.outcome == "passed" for verdict in verdicts) >= 25


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("walls", ["auto", "bubblewrap"])
def test_bubblewrap_passes_every_check(walls):
    verdicts = check_backend(SandboxConfig(walls=walls), Silent())
    assert not [verdict for verdict in verdicts if verdict.outcome != "passed"]


def run_as_plain_user(plain_user, *names):
    command, _ = plain_user
    done = subprocess.run([*command, "-c", PLAIN, *names], capture_output=True, text=True, timeout=1700, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    row = json.loads(done.stdout.splitlines()[-1])
    assert row["uid"] != 0
    assert not [verdict for verdict in row["verdicts"] if verdict[1] == "failed"]
    return {check: reason for check, outcome, reason in row["verdicts"] if outcome == "refused"}


def test_bubblewrap_passes_checks_as_a_plain_user(plain_user):
    assert run_as_plain_user(plain_user, "files", "isolation") == {}


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_bubblewrap_passes_every_quick_check_as_a_plain_user_or_says_which_limit_is_missing(plain_user):
    refused = run_as_plain_user(plain_user)
    assert all("is not enforced" in reason for reason in refused.values())
    assert sys.platform == "linux"
