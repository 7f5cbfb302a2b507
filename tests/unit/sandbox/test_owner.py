import os
import subprocess
import sys

from deepswe.sandbox.owner import FORGOTTEN_S, Owner, is_abandoned, judge, read_owner, this_host, this_process


def dead_owner():
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    return Owner(process.pid, 1, this_host())


def test_a_tag_tells_its_owner():
    owner = this_process()
    assert read_owner(owner.tag) == owner
    assert read_owner(f"deepswe-{owner.tag}-7") == owner
    assert read_owner("deepswe-a-b") is None
    assert len(owner.tag) <= 63
    assert owner.tag.replace("-", "").isalnum()


def test_an_owner_is_alive_dead_or_unknown():
    assert this_process().state() == "alive"
    assert dead_owner().state() == "dead"
    assert Owner(os.getpid(), 1, this_host()).state() == "dead"  # the id was used again
    assert Owner(os.getpid(), 1, "elsewhere").state() == "unknown"


def test_only_what_nobody_owns_is_abandoned():
    elsewhere = Owner(1, 1, "elsewhere").tag
    assert is_abandoned(f"deepswe-{dead_owner().tag}-1")
    assert not is_abandoned(f"deepswe-{this_process().tag}-1", 2 * FORGOTTEN_S)
    assert not is_abandoned(f"deepswe-{elsewhere}-1", FORGOTTEN_S / 2)
    assert is_abandoned(f"deepswe-{elsewhere}-1", 2 * FORGOTTEN_S)
    assert not is_abandoned(f"other-{dead_owner().tag}-1")


def test_a_reaper_judges_by_owner_then_by_expiry():
    elsewhere = Owner(1, 1, "elsewhere").tag
    assert judge(this_process().tag, expires=100, now=50) == "live"
    assert judge(this_process().tag, expires=100, now=100) == "expired"
    assert judge(dead_owner().tag, expires=100, now=50) == "orphaned"
    assert judge(elsewhere, expires=100, now=50) == "live"
    assert judge("no tag", expires=100, now=50) == "live"
