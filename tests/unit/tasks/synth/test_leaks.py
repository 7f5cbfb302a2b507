from __future__ import annotations

from deepswe.tasks.synth.leaks import leaks, secret_lines, secret_names

PATCH = """diff --git a/calc.py b/calc.py
--- a/calc.py
+++ b/calc.py
@@ -1,3 +1,3 @@
 def clamp(value, low, high):
-    return min(low, max(high, value))
+    return max(low, min(high, value))
+    x = 1
"""
FAILING = ("tests/test_calc.py::TestClamp::test_moves_values[3-5]",)


def found(text: str) -> tuple[str, ...]:
    return leaks(text, FAILING, ("tests/test_calc.py", "tests/test_more.py"), PATCH)


def test_names_of_tests_classes_and_files_are_leaks() -> None:
    assert found("see test_moves_values") == ("test_moves_values",)
    assert found("TestClamp fails") == ("TestClamp",)
    assert "tests/test_more.py" in found("run tests/test_more.py")
    assert found("clamp(1, 2, 3) gives 3") == ()


def test_a_line_of_the_patch_is_a_leak_whatever_its_blanks() -> None:
    assert found("it should be return  max(low,\n min(high, value))") == ("return max(low, min(high, value))",)
    assert found("now: return min(low, max(high, value))") == ("return min(low, max(high, value))",)


def test_short_lines_and_parts_of_words_are_none() -> None:
    assert secret_lines(PATCH) == ("return min(low, max(high, value))", "return max(low, min(high, value))")
    assert found("x = 1") == ()
    assert found("my_test_moves_values_too") == ()
    assert "test_calc" in secret_names(FAILING, ())
