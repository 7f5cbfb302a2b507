from hypothesis import given, settings
from hypothesis import strategies as st

from deepswe.scaling.candidates import Candidate
from deepswe.scaling.verifier_prompt import (
    MARK,
    ApproximateTokens,
    Reading,
    condense,
    messages_of,
    read_candidate,
)
from deepswe.types import Message

CALL = "<function=finish>\n</function>"


class Characters:
    """One token a character; counts what it was asked."""

    def __init__(self) -> None:
        self.asked = 0
        self.characters = 0

    def encode(self, text: str) -> str:
        self.asked += 1
        self.characters += len(text)
        return text

    def decode(self, tokens: str) -> str:
        return tokens


def size(reading: Reading) -> int:
    return len(reading.issue) + len(reading.patch) + sum(len(turn.content) for turn in reading.turns)


def agent(thought: str, action: str = CALL) -> Message:
    return Message("assistant", thought + action)


def test_what_fits_is_left_as_it_is() -> None:
    reading = Reading("issue", (agent("hm "), Message("user", "o" * 50)), "patch")
    assert condense(reading, Characters(), size(reading)) is reading


def test_the_longest_thoughts_go_first_and_to_a_common_length() -> None:
    reading = Reading("i", (agent("a" * 100), Message("user", "o" * 40), agent("b" * 60), agent("c" * 10)), "p")
    short = condense(reading, Characters(), size(reading) - 90)
    thoughts = [turn.content.removesuffix(CALL) for turn in short.turns if turn.role == "assistant"]
    assert [len(thought) for thought in thoughts] == [35, 35, 10]
    assert thoughts[0] == "a" * 15 + MARK + "a" * 15
    assert short.turns[1] == reading.turns[1]
    assert (short.issue, short.patch) == ("i", "p")


def test_then_observations_go_from_the_middle() -> None:
    turns = tuple(Message("user", letter * 50) for letter in "vwxyz")
    short = condense(Reading("i", turns, "p"), Characters(), 50 * 5 + 2 - 100)
    lengths = [len(turn.content) for turn in short.turns]
    assert lengths[2] == len(MARK)
    assert lengths[0] == lengths[4] == 50
    assert sum(lengths) == 150


def test_actions_patch_and_issue_are_the_last_to_go() -> None:
    reading = Reading("i" * 100, (agent("t" * 50, "<function=x>" + "y" * 88), Message("user", "o" * 50)), "p" * 100)
    short = condense(reading, Characters(), 100)
    assert [len(turn.content) for turn in short.turns] == [2 * len(MARK), len(MARK)]
    assert short.patch.startswith("ppp")
    assert short.issue.endswith("iii")
    assert size(short) <= 100


@settings(max_examples=40)
@given(st.lists(st.tuples(st.booleans(), st.integers(0, 200)), max_size=8), st.integers(0, 300), st.integers(60, 400))
def test_the_budget_holds_wherever_marks_leave_room_for_it(
    turns: list[tuple[bool, int]], patch: int, budget: int
) -> None:
    made = tuple(agent("t" * n) if ours else Message("user", "o" * n) for ours, n in turns)
    reading = Reading("i" * 30, made, "p" * patch)
    floor = 2 * len(MARK) + sum(2 * len(MARK) if ours else len(MARK) for ours, _ in turns)
    assert size(condense(reading, Characters(), budget)) <= max(budget, floor)


def test_the_work_is_linear_in_the_text() -> None:
    """Each text is split once, however much has to go."""
    for count in (10, 1000):
        tokens = Characters()
        turns = tuple(agent("t" * 100) if i % 2 else Message("user", "o" * 100) for i in range(count))
        condense(Reading("i", turns, "p"), tokens, count * 10)
        assert tokens.asked == 3 + count + count // 2
        assert tokens.characters <= 2 + len(MARK) + sum(len(turn.content) for turn in turns)


def test_blob_hashes_are_not_read_and_an_edit_that_looks_like_one_is() -> None:
    patch = "diff --git a/m b/m\nindex 0123..4567 100644\n--- a/m\n+++ b/m\n@@ -1,1 +1,1 @@\n-index a\n+index b\n"
    read = read_candidate(Candidate("t", "c", patch, issue="broken"))
    assert "0123" not in read.patch
    assert "+index b" in read.patch
    assert read.issue == "broken"


def test_the_full_question_has_every_part_and_the_brief_one_only_texts() -> None:
    reading = Reading("the issue", (agent("thought "), Message("user", "seen")), "the patch")
    system, user = messages_of(reading, "full")
    assert system.role == "system"
    order = [user.content.index(part) for part in ("the issue", "thought", "seen", "the patch", "YES or NO")]
    assert order == sorted(order)
    (brief,) = messages_of(reading, "brief")
    assert brief.content == f"the issue\n\nthought {CALL}\nseen\n\nthe patch"
    assert "nothing was changed" in messages_of(Reading("i", (), ""), "full")[1].content


@given(st.text())
def test_approximate_tokens_lose_nothing(text: str) -> None:
    tokens = ApproximateTokens()
    assert tokens.decode(tokens.encode(text)) == text
