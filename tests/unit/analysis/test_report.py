"""The report is one harmless offline file, and says what the records say."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path

import pytest
from run_records import write_metrics, write_trajectories
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from deepswe.analysis.live import Watcher
from deepswe.analysis.report import flatten, make_counts, make_groupings, make_headlines, write_report
from deepswe.analysis.samples import choose_samples, note_attempts
from deepswe.analysis.viewer.page import write_viewer
from deepswe.errors import RunError, StoreError
from deepswe.rollout.store import TrajectoryStore
from deepswe.types import Ending, Graded, Step, TokenSpan, ToolCall, Trajectory

NewAttempt = Callable[..., Trajectory]
HOSTILE = (
    "</pre></details><script>alert(1)</script><img src=x onerror=alert(1)>\" onmouseover='x' {{ 7*7 }} {% raw %}"
    "\x1b[31mred\x1b[0m\x1b]0;title\x07 \x00 \x9b2J \u202egnp.exe\u202c \u2066x\u2069 \u200b\ufeff \ud800 \udfff \r\n"
    "\U000e0041 \u2028 https://example.invalid/x.js"
)
VOID = {"meta", "line", "polygon", "polyline", "circle", "br", "img"}


class Page(HTMLParser):
    """Collects elements and checks that they nest."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text: list[str] = []
        self._open: list[str] = []
        self.feed(html)
        self.close()
        assert self._open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self._open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text.append(data)


def read(path: Path) -> tuple[Page, str]:
    html = path.read_text(encoding="utf-8")
    page = Page(html)
    return page, " ".join("".join(page.text).split())


def test_report_is_one_file_without_scripts_and_outside_references(learned_run: Path) -> None:
    page, _ = read(write_report(learned_run))
    assert not {tag for tag, _ in page.tags} & {"script", "link", "iframe", "object", "embed", "form", "base"}
    for tag, attributes in page.tags:
        assert not {"src", "href", "xlink:href", "action", "srcset"} & attributes.keys(), tag
        assert not any(name.startswith("on") for name in attributes), tag
    style = "".join(page.text)
    assert "url(" not in style
    assert "@import" not in style
    policies = [a["content"] for tag, a in page.tags if tag == "meta" and a.get("http-equiv")]
    assert policies == ["default-src 'none'; style-src 'unsafe-inline'; img-src data:"]


def test_headline_is_computed_from_the_trajectories(learned_run: Path) -> None:
    _, text = read(write_report(learned_run))
    notes = note_attempts(TrajectoryStore(learned_run))
    (headline,) = make_headlines(notes)
    assert headline.after is not None
    assert headline.difference is not None
    solved = [note.reward for note in notes if note.name == "after" and note.task_id == "cart-0"]
    assert len(solved) == 4
    assert f"{headline.before.mean:.1%}" in text
    assert f"{headline.after.mean:.1%}" in text
    assert f"{100 * headline.difference.mean:+.1f} points" in text
    assert headline.difference.tasks == 12


def test_ungraded_attempts_are_counted_and_not_failures(tmp_path: Path, new_attempt: NewAttempt) -> None:
    write_trajectories(
        tmp_path,
        [new_attempt("cart-0", 0, "before_heldout", 0, True), new_attempt("cart-0", 1, "before_heldout", 0, None)],
    )
    notes = note_attempts(TrajectoryStore(tmp_path))
    (headline,) = make_headlines(notes)
    assert (headline.before.mean, headline.before.attempts) == (1.0, 1)
    (line,) = make_counts(notes)
    assert line.counts["ungraded"] == line.counts["error"] == 1
    assert line.counts["graded below 1"] == 0


def test_tables_by_kind_and_counts_are_in_the_page(learned_run: Path) -> None:
    _, text = read(write_report(learned_run))
    assert "By kind" in text
    assert "swapped arguments" in text
    assert "5,400 test runs in a sandbox gave the verdicts in training; 2,280 more verdicts were reused" in text
    notes = note_attempts(TrajectoryStore(learned_run))
    (lines,) = make_groupings(notes).values()  # the repository is the same everywhere, so it makes no table
    assert [line.value for line in lines] == ["off by one", "swapped arguments", "wrong operator"]
    assert sum(line.before.tasks for line in lines if line.before) == 12
    assert [line.label for line in make_counts(notes)] == ["before, heldout", "train", "after, heldout", "all"]


def test_tables_are_by_tags_that_join_tasks_and_name_values_as_they_are(
    tmp_path: Path, new_attempt: NewAttempt
) -> None:
    write_trajectories(
        tmp_path,
        [
            new_attempt(
                f"shop-{task}",
                0,
                "before_heldout",
                0,
                bool(task % 2),
                tags={
                    "kind": "swap_arguments" if task < 2 else "drop_guard",
                    "issue": f"Wrong {task // 2}",
                    "n": str(task),
                },
            )
            for task in range(4)
        ],
    )
    write_metrics(tmp_path, [])
    (tmp_path / "recipe.json").write_text("{}", encoding="utf-8")
    groups = make_groupings(note_attempts(TrajectoryStore(tmp_path)))
    assert {key: [line.value for line in lines] for key, lines in groups.items()} == {
        "kind": ["drop_guard", "swap_arguments"]
    }
    _, text = read(write_report(tmp_path))
    assert "swap_arguments" in text
    assert "swap arguments" not in text


def test_hostile_text_is_shown_as_text(tmp_path: Path, new_attempt: NewAttempt) -> None:
    hostile_call = ToolCall(HOSTILE, {HOSTILE: HOSTILE})
    attempt = new_attempt(
        f"cart-{HOSTILE}-1",
        0,
        "before_heldout",
        0,
        False,
        steps=(Step(HOSTILE, hostile_call, HOSTILE, HOSTILE), Step("x" * 1_000_000, None, "y\n" * 500_000)),
        grade=Graded(0.0, {HOSTILE: HOSTILE, "long": "z" * 100_000}, HOSTILE),
        artifact=f"+{HOSTILE}\n-{HOSTILE}",
        tags={"kind": HOSTILE[:70], "issue": HOSTILE, HOSTILE: "a"},
    )
    write_trajectories(tmp_path, [attempt])
    write_metrics(tmp_path, [{"kind": "evaluation", "step": 0, "split": HOSTILE, "name": HOSTILE, "pass_at_1": 0.5}])
    (tmp_path / "recipe.json").write_text(json.dumps({"run": {"name": HOSTILE}, HOSTILE: HOSTILE}), encoding="utf-8")
    page, text = read(write_report(tmp_path))
    html = (tmp_path / "report.html").read_bytes()
    assert len(html) < 200_000
    assert not {tag for tag, _ in page.tags} & {"script", "img"}
    assert not any(name.startswith("on") for _, attributes in page.tags for name in attributes)
    assert b"<script" not in html
    assert "<script>alert(1)</script>" in text
    assert "{{ 7*7 }}" in text
    for shown in (
        "⟨U+001B⟩[31mred",
        "⟨U+0000⟩",
        "⟨U+009B⟩2J",
        "⟨U+202E⟩gnp.exe",
        "⟨U+D800⟩",
        "⟨U+200B⟩",
        "⟨U+E0041⟩",
        "⟨U+000D⟩",
    ):
        assert shown in text
    assert "characters left out" in text
    assert not re.search("[\x00-\x08\x0b-\x1f\x7f-\x9f\u200b-\u200f\u2028-\u202e\u2066-\u2069]", html.decode())


def test_report_of_a_run_in_progress_says_so(tmp_path: Path, new_attempt: NewAttempt) -> None:
    write_metrics(tmp_path, [{"kind": "train", "step": 1, "reward_mean": 0.25, "time_s": 1.0}])
    with (tmp_path / "metrics.jsonl").open("a", encoding="utf-8") as file:
        file.write('{"kind": "train", "st')
    write_trajectories(tmp_path, [new_attempt("cart-1", 0, "train", 0, True)])
    _, text = read(write_report(tmp_path))
    assert "This run has no summary" in text
    assert "No evaluation is recorded yet" in text
    assert "Last training step: solved" in text


def test_report_of_an_empty_directory_is_a_page(tmp_path: Path) -> None:
    _, text = read(write_report(tmp_path))
    assert "No evaluation is recorded yet" in text


def test_a_puzzle_without_diff_and_tests_has_no_empty_sections(tmp_path: Path, new_attempt: NewAttempt) -> None:
    def puzzle(phase: str, solved: bool) -> Trajectory:
        grade = Graded(1.0 if solved else 0.0, reason="" if solved else "fell into a hole")
        steps = (Step("Right", ToolCall("move", {"direction": "Right"}), "_ P\nO G"), Step("Down", None, ""))
        return new_attempt(
            "lake-7", 0, phase, 0, solved, grade=grade, steps=steps, artifact="", tags={}, ending=Ending.SUBMITTED
        )

    write_trajectories(tmp_path, [puzzle("before_heldout", False), puzzle("after_heldout", True)])
    _, text = read(write_report(tmp_path))
    assert "fell into a hole" in text
    for absent in ("Hidden tests", "What was graded", "What the agent was told", "By kind", "test runs"):
        assert absent not in text


def test_opening_tokens_are_decoded_where_no_issue_is_tagged(tmp_path: Path, new_attempt: NewAttempt) -> None:
    spans = (TokenSpan((72, 105), False), TokenSpan((33,), True, (-0.1,)))
    write_trajectories(tmp_path, [new_attempt("cart-1", 0, "before_heldout", 0, True, tags={}, spans=spans)])
    page = write_report(tmp_path, opening=lambda tokens: "".join(map(chr, tokens))).read_text(encoding="utf-8")
    assert '<pre tabindex="0">Hi</pre>' in page


def test_opening_tokens_are_decoded_with_the_tokenizer_of_the_newest_checkpoint(
    tmp_path: Path, new_attempt: NewAttempt
) -> None:
    for step, word in (("step-00000005", "old"), ("step-00000010", "new")):
        model = tmp_path / "checkpoints" / "training" / step / "model"
        model.mkdir(parents=True)
        Tokenizer(WordLevel({f"<{word} issue>": 0}, unk_token="?")).save(str(model / "tokenizer.json"))
    spans = (TokenSpan((0,), False),)
    write_trajectories(tmp_path, [new_attempt("cart-1", 0, "before_heldout", 0, True, tags={}, spans=spans)])
    _, text = read(write_report(tmp_path))
    assert "<new issue>" in text
    (model / "tokenizer.json").write_text("{", encoding="utf-8")
    with pytest.raises(RunError, match=r"model.tokenizer\.json is no tokenizer"):
        write_report(tmp_path)


def test_reference_trajectories_are_no_ungraded_attempts(tmp_path: Path, new_attempt: NewAttempt) -> None:
    reference = new_attempt("cart-1", 0, "imitation", 0, None, ending=Ending.SUBMITTED)
    write_trajectories(tmp_path, [reference, new_attempt("cart-1", 0, "before_heldout", 0, True)])
    (line,) = make_counts(note_attempts(TrajectoryStore(tmp_path)))
    assert (line.attempts, line.counts["ungraded"]) == (1, 0)


def test_samples_show_the_same_tasks_unsolved_before_and_solved_after(tmp_path: Path, new_attempt: NewAttempt) -> None:
    attempts = [new_attempt(f"cart-{task}", 0, "before_heldout", 0, task == 0) for task in range(8)]
    attempts += [new_attempt(f"cart-{task}", 0, "after_heldout", 5, task in (0, 3, 4, 5)) for task in range(8)]
    write_trajectories(tmp_path, attempts)
    chosen = choose_samples(note_attempts(TrajectoryStore(tmp_path)))
    by_title: dict[str, list[str]] = {}
    for key, title in chosen.items():
        by_title.setdefault(title, []).append(key[2])
    assert by_title == {
        "Before training: unsolved": ["cart-3", "cart-4", "cart-5"],
        "Before training: solved": ["cart-0"],
        "After training: solved": ["cart-3", "cart-4", "cart-5"],
        "After training: unsolved": ["cart-1", "cart-2", "cart-6"],
    }


def test_headings_descend_without_gaps_and_pictures_have_descriptions(learned_run: Path) -> None:
    page, _ = read(write_report(learned_run))
    levels = [int(tag[1]) for tag, _ in page.tags if re.fullmatch("h[1-6]", tag)]
    assert levels[0] == 1
    assert levels.count(1) == 1
    assert all(below - above <= 1 for above, below in itertools.pairwise(levels))
    pictures = [attributes for tag, attributes in page.tags if tag == "svg"]
    assert len(pictures) >= 13
    assert all(picture["role"] == "img" and picture["aria-label"] for picture in pictures)
    names = [attributes["id"] for _, attributes in page.tags if "id" in attributes]
    assert len(names) == len(set(names))


def contrast(first: str, second: str) -> float:
    """WCAG 2 contrast ratio of two #rrggbb colours."""

    def luminance(colour: str) -> float:
        parts = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
        linear = [p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    light, dark = sorted((luminance(first), luminance(second)), reverse=True)
    return (light + 0.05) / (dark + 0.05)


def test_text_contrast_is_at_least_4_5_in_light_and_dark(tmp_path: Path) -> None:
    html = write_report(tmp_path).read_text(encoding="utf-8")
    schemes = [
        dict(re.findall(r"--([a-z0-9-]+): (#[0-9a-f]{6})", block)) for block in re.findall(r":root {(.*?)}", html, re.S)
    ]
    assert len(schemes) == 2
    for colours in schemes:
        for text in ("ink", "soft", "accent"):
            for ground in ("paper", "card", "code"):
                assert contrast(colours[text], colours[ground]) >= 4.5, (text, ground)
        for kind in ("good", "bad", "warn"):
            assert contrast(colours[kind], colours[f"{kind}-bg"]) >= 4.5, kind
        for curve in range(6):
            assert contrast(colours[f"c{curve}"], colours["card"]) >= 3.0, curve


def test_damaged_records_and_missing_directories_are_one_clear_error(tmp_path: Path, learned_run: Path) -> None:
    with pytest.raises(RunError, match="no directory"):
        write_report(tmp_path / "absent")
    (learned_run / "recipe.json").write_text("{", encoding="utf-8")
    with pytest.raises(RunError, match=r"recipe\.json is damaged"):
        write_report(learned_run)
    (learned_run / "recipe.json").unlink()
    (learned_run / "metrics.jsonl").write_text('{"loss": 1}\n', encoding="utf-8")
    with pytest.raises(RunError, match=r"metrics\.jsonl:1 is no row of a run's metrics: it has no kind"):
        write_report(learned_run)
    (learned_run / "metrics.jsonl").unlink()
    (learned_run / "trajectories" / "train-000999.jsonl").write_text("nothing\n", encoding="utf-8")
    with pytest.raises(StoreError, match="not a trajectory record"):
        write_report(learned_run)


@pytest.mark.parametrize("recipe", ['{"run": 5}', '{"run": {"name": "a"}, "training": [1]}', '{"tasks": "micro"}'])
def test_a_recipe_whose_sections_are_none_is_one_error_of_every_reader(learned_run: Path, recipe: str) -> None:
    (learned_run / "recipe.json").write_text(recipe, encoding="utf-8")
    for read in (write_report, write_viewer, lambda run: Watcher(run).look()):
        with pytest.raises(RunError, match=r"recipe\.json is no recipe: recipe\.json\['\w+'\] is a"):
            read(learned_run)


def test_settings_are_flattened_by_section() -> None:
    tree = {"run": {"name": "a", "deep": {"x": [1, True], "y": {}}}, "version": 1}
    assert flatten(tree) == {"": {"version": "1"}, "run": {"name": "a", "deep.x": "[1, true]", "deep.y": "{}"}}
