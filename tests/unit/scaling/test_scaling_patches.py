from deepswe.scaling.patches import normalise, patch_key

ONE = """diff --git a/pkg/m.py b/pkg/m.py
index 1111111..2222222 100644
--- a/pkg/m.py
+++ b/pkg/m.py
@@ -1,2 +1,2 @@ def f(x):
 def f(x):
-    return x
+    return x + 1
"""
WIDER = """diff --git a/pkg/m.py b/pkg/m.py
index 1111111..9999999 100644
--- a/pkg/m.py
+++ b/pkg/m.py
@@ -10,4 +10,4 @@ class C:

 def f(x):
-    return x
+    return x + 1

"""
OTHER_FILE = ONE.replace("m.py", "a.py")


def test_hashes_line_numbers_and_context_make_no_other_patch() -> None:
    assert normalise(ONE) == normalise(WIDER)
    assert patch_key(ONE) == patch_key(WIDER)


def test_another_edit_or_another_file_is_another_patch() -> None:
    assert patch_key(ONE) != patch_key(ONE.replace("x + 1", "x + 2"))
    assert patch_key(ONE) != patch_key(OTHER_FILE)
    assert patch_key(ONE) != patch_key("")


def test_the_order_of_files_does_not_count() -> None:
    assert patch_key(ONE + OTHER_FILE) == patch_key(OTHER_FILE + ONE)


def test_indentation_counts() -> None:
    assert patch_key(ONE) != patch_key(ONE.replace("+    return", "+  return"))


def test_a_removed_line_that_looks_like_a_header_is_an_edit() -> None:
    text = ONE.replace("-    return x", "--- a/pkg/m.py").replace("+    return x + 1", "+++ b/pkg/m.py")
    assert "--- a/pkg/m.py" in normalise(text)
    assert "+++ b/pkg/m.py" in normalise(text)


def test_a_new_mode_or_a_rename_counts() -> None:
    mode = "diff --git a/m.py b/m.py\nold mode 100644\nnew mode 100755\n"
    assert patch_key(mode) != patch_key("")


def test_a_plain_unified_diff_has_its_file_too() -> None:
    plain = "--- a.py\t2020\n+++ a.py\t2021\n@@ -1 +1 @@\n-x\n+y\n--- b.py\n+++ b.py\n@@ -1 +1 @@\n-x\n+z\n"
    assert normalise(plain) == "a.py\n-x\n+y\nb.py\n-x\n+z"


def test_the_content_of_a_binary_file_counts() -> None:
    head = "diff --git a/x b/x\nindex 1..2 100644\nGIT binary patch\n"
    binary = f"{head}literal 3\nKcmZQzWMXDv00jU500961\n\nliteral 0\nHcmV?d00001\n\n"
    assert patch_key(binary) != patch_key(binary.replace("KcmZQzWMXDv00jU500961", "KcmZQzWMXDv00jU500962"))
    assert patch_key(binary + ONE) == patch_key(ONE + binary)


def test_what_is_no_diff_is_not_the_patch_that_does_nothing() -> None:
    assert patch_key("not a diff") != patch_key("")
    assert patch_key("not a diff") != patch_key("nor this")
    assert patch_key("\n") == patch_key("")
