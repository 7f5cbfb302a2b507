from deepswe.sandbox import journal
from deepswe.sandbox.owner import Owner, this_host, this_process

LABELS = {"run": "r", "task": "t", "expires": "99999999999"}


def names(directory):
    return [record.name for record in journal.read_records(directory, "bubblewrap")]


def test_what_began_and_has_not_ended_is_alive(tmp_path):
    written = journal.Journal(tmp_path / journal.FILE)
    for name in ("a", "b", "c"):
        written.began(name, LABELS)
    written.ended("b")
    written.ended("never began")
    assert names(tmp_path) == ["a", "c"]
    (record, _) = journal.read_records(tmp_path, "bubblewrap")
    assert (record.run, record.task, record.expires, record.state) == ("r", "t", 99999999999.0, "live")


def test_a_line_that_was_cut_off_is_left_out(tmp_path):
    written = journal.Journal(tmp_path / journal.FILE)
    written.began("a", LABELS)
    with (tmp_path / journal.FILE).open("a") as file:
        file.write('{"name": "b", "crea')
    assert names(tmp_path) == ["a"]
    assert names(tmp_path / "missing") == []


def test_a_long_journal_is_written_anew(tmp_path):
    written = journal.Journal(tmp_path / journal.FILE)
    written.began("kept", LABELS)
    for number in range(journal.COMPACT_AT):
        written.began(f"s{number}", LABELS)
        written.ended(f"s{number}")
    assert len((tmp_path / journal.FILE).read_text().splitlines()) < 1.1 * journal.COMPACT_AT
    assert names(tmp_path) == ["kept"]


def test_directories_of_dead_owners_are_removed_and_no_others(tmp_path):
    dead = tmp_path / f"deepswe-{Owner(999999999, 1, this_host()).tag}-1"
    alive = tmp_path / f"deepswe-{this_process().tag}-1"
    for directory in (dead, alive, tmp_path / "other"):
        directory.mkdir()
    assert journal.reap_directories(tmp_path) == [dead]
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([alive.name, "other"])
    assert journal.pool_directories(tmp_path) == [alive]
