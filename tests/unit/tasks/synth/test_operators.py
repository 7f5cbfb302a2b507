"""Each kind of mutation alone, with a text before and after."""

from __future__ import annotations

import ast
import random

import pytest

from deepswe.errors import TaskError
from deepswe.tasks.synth.mutation import Mutation, Site, edited, is_sound
from deepswe.tasks.synth.operators.catalog import CROSS_FUNCTION_KINDS, KINDS, MULTI_SITE_KINDS, mutations

BODIES = {
    "flip_comparison": ("return a < b", "return a <= b"),
    "swap_arithmetic": ("return a + b", "return a - b"),
    "swap_augmented": ("a += 2", "a -= 2"),
    "swap_boolean": ("return a and b", "return a or b"),
    "drop_term": ("return a and b", "return a"),
    "off_by_one": ("return a[1]", "return a[2]"),
    "flip_flag": ("return True", "return False"),
    "negate_condition": ("if a:\n        b = 1", "if not a:\n        b = 1"),
    "drop_not": ("return not a", "return a"),
    "drop_guard": ("if a:\n        return b\n    return a", "return a"),
    "drop_branch": ("if a:\n        b = 1\n    else:\n        b = 2", "if a:\n        b = 1"),
    "drop_statement": ("a.append(b)\n    return a", "return a"),
    "swap_statements": ("a += 1\n    b.append(a)", "b.append(a)\n    a += 1"),
    "swap_arguments": ("return f(a, b)", "return f(b, a)"),
    "drop_argument": ("return f(a, key=b)", "return f(a)"),
    "wrong_variable": ("return f(a)", "return f(b)"),
    "shift_slice": ("return a[b:]", "return a[b + 1:]"),
    "shift_range": ("return range(len(a))", "return range(len(a) - 1)"),
    "swap_jump": ("for i in a:\n        break", "for i in a:\n        continue"),
    "narrow_except": (
        "try:\n        f()\n    except KeyError:\n        a = b",
        "try:\n        f()\n    except IndexError:\n        a = b",
    ),
    "swap_call": ("return min(a, b)", "return max(a, b)"),
    "drop_call": ("return a.strip()", "return a"),
    "swap_ternary": ("return 1 if a else 2", "return 2 if a else 1"),
    "drop_minus": ("return -a", "return a"),
    "wrong_return": ("return a, b", "return b, a"),
    "drop_result": ("a = f(a)\n    return a", "f(a)\n    return a"),
    "shift_constant": ("return a[2:] + b[:2]", "return a[3:] + b[:3]"),
    "swap_targets": ("x = f(a)\n    y = f(b)\n    return x, y", "y = f(a)\n    x = f(b)\n    return x, y"),
    "swap_uses": ("return a - 2 * b", "return b - 2 * a"),
    "two_bugs": (
        "if a < 1:\n        b = 1\n        b = f(b)\n    return b[2]",
        "if a <= 1:\n        b = 1\n        b = f(b)\n    return b[3]",
    ),
}
FILES = {
    "change_default": ("def g(a, n=2):\n    return a[n]\n", "def g(a, n=3):\n    return a[n]\n"),
    "swap_callee": (
        "def one(a):\n    return a\n\n\ndef two(a):\n    return -a\n\n\ndef g(a):\n    return one(a)\n",
        "def one(a):\n    return a\n\n\ndef two(a):\n    return -a\n\n\ndef g(a):\n    return two(a)\n",
    ),
    "partial_refactoring": (
        "def h(a, b):\n    return a - b\n\n\ndef f(x):\n    return h(x, 1)\n\n\ndef g(x):\n    return h(x, 2)\n",
        "def h(b, a):\n    return a - b\n\n\ndef f(x):\n    return h(x, 1)\n\n\ndef g(x):\n    return h(2, x)\n",
    ),
    "two_functions": (
        "def h(a):\n    return a[1]\n\n\ndef g(a, b):\n    return h(a) < b\n",
        "def h(a):\n    return a[2]\n\n\ndef g(a, b):\n    return h(a) <= b\n",
    ),
}
EXAMPLES = {
    **{kind: (f"def g(a, b):\n    {x}\n", f"def g(a, b):\n    {y}\n") for kind, (x, y) in BODIES.items()},
    **FILES,
}


def of_kind(kind: str, text: str) -> list[Mutation]:
    return [mutation for mutation in mutations("g.py", text) if mutation.kind == kind]


def test_every_kind_has_an_example() -> None:
    assert set(EXAMPLES) == set(KINDS)
    assert len(KINDS) >= 12


@pytest.mark.parametrize("kind", EXAMPLES)
def test_kind_makes_its_bug(kind: str) -> None:
    before, after = EXAMPLES[kind]
    results = {ast.dump(ast.parse(mutation.apply("g.py", before))) for mutation in of_kind(kind, before)}
    assert ast.dump(ast.parse(after)) in results


@pytest.mark.parametrize("kind", MULTI_SITE_KINDS)
def test_multi_site_kinds_have_several_sites(kind: str) -> None:
    assert all(len(mutation.sites) >= 2 for mutation in of_kind(kind, EXAMPLES[kind][0]))


@pytest.mark.parametrize("kind", [kind for kind in CROSS_FUNCTION_KINDS if kind in MULTI_SITE_KINDS])
def test_sites_across_functions_name_each_function(kind: str) -> None:
    assert all(len(mutation.functions) >= 2 for mutation in of_kind(kind, EXAMPLES[kind][0]))


def test_rest_of_the_file_keeps_every_byte() -> None:
    text = 'def g(a):  # ünïcode\n\treturn (a   <   1)   # kept\n\n\nX = "ä"\n'
    [flipped, *_] = of_kind("flip_comparison", text)
    assert flipped.apply("g.py", text) == text.replace("a   <   1", "a   <=   1")
    [site] = flipped.sites
    assert (site.line, site.last_line, site.function) == (2, 2, "g")


def test_strings_annotations_decorators_and_assertions_are_left_alone() -> None:
    text = '@deco(1)\ndef g(a: "int[1]" = None) -> 2:\n    """Doc 3."""\n    assert a < 4\n    return f"{a + 5}"\n'
    assert mutations("g.py", text) == ()


def test_functions_in_classes_have_dotted_names() -> None:
    text = "class A:\n    def m(self):\n        return 1\n"
    assert {site.function for mutation in mutations("a.py", text) for site in mutation.sites} == {"A.m"}


def test_edit_that_changes_nothing_or_does_not_compile_is_unsound() -> None:
    text = "def g(a):\n    return a\n"
    for start, end, new, sound in ((0, 0, "", False), (0, 3, "(", False), (21, 22, "b", True)):
        assert is_sound(Mutation("x", (Site("g.py", start, end, new),)), {"g.py": text}) is sound


def test_jump_out_of_a_loop_is_unsound() -> None:
    text = "def g(a):\n    for i in a:\n        pass\n    return 1\n"
    start = text.index("return 1")
    assert not is_sound(Mutation("x", (Site("g.py", start, start + 8, "break"),)), {"g.py": text})


def test_edit_outside_of_the_text_and_overlapping_edits_are_refused() -> None:
    with pytest.raises(TaskError, match=r"bytes 5\.\.99 lies outside its 4 bytes"):
        edited("abcd", [Site("g.py", 5, 99, "")])
    with pytest.raises(TaskError, match="overlap"):
        edited("abcd", [Site("g.py", 0, 2, ""), Site("g.py", 1, 3, "")])


def test_file_that_is_no_python_is_refused() -> None:
    with pytest.raises(TaskError, match=r"g\.py cannot be mutated"):
        mutations("g.py", "def (")


def test_a_file_gives_the_same_mutations_every_time() -> None:
    text = "".join(before for before, _ in EXAMPLES.values())
    assert mutations("g.py", text) == mutations("g.py", text)
    sample = random.Random(0).sample(mutations("g.py", text), 30)
    assert sum(is_sound(mutation, {"g.py": text}) for mutation in sample) >= 28
