"""Rows as the public sources write them, made up for the tests."""

from __future__ import annotations

import json
from typing import Any

PATCH = """diff --git a/pkg/core.py b/pkg/core.py
--- a/pkg/core.py
+++ b/pkg/core.py
@@ -1,3 +1,3 @@
 def add(a, b):
-    return a - b
+    return a + b

"""
TEST_PATCH = """diff --git a/tests/test_core.py b/tests/test_core.py
--- a/tests/test_core.py
+++ b/tests/test_core.py
@@ -1,2 +1,5 @@
 from pkg.core import add

+def test_add():
+    assert add(1, 2) == 3
+
"""
F2P = ["tests/test_core.py::test_add"]
P2P = ["tests/test_core.py::test_ids[a b: [c]]", "tests/test_core.py::test_zero"]


def swebench_row(**more: Any) -> dict[str, Any]:
    return {
        "repo": "acme/tool",
        "instance_id": "acme__tool-12",
        "base_commit": "c" * 40,
        "patch": PATCH,
        "test_patch": TEST_PATCH,
        "problem_statement": "add(1, 2) is -1.",
        "hints_text": "use plus",
        "created_at": "2024-01-01",
        "version": "1.0",
        "FAIL_TO_PASS": json.dumps(F2P),
        "PASS_TO_PASS": json.dumps(P2P),
        "environment_setup_commit": "d" * 40,
        **more,
    }


def swebench5_row(**more: Any) -> dict[str, Any]:
    script = "#!/bin/bash\nset -uxo pipefail\n: '>>>>> Start Test Output'\npytest -rA\n: '>>>>> End Test Output'\n"
    return swebench_row(
        image="registry/acme:1", eval_script=script, log_parser="parse_log_pytest", eval_type="pass_and_fail", **more
    )


def swegym_row(**more: Any) -> dict[str, Any]:
    return swebench_row(**{"FAIL_TO_PASS": F2P, "PASS_TO_PASS": P2P, **more})


def swerebench_row(**more: Any) -> dict[str, Any]:
    config = {"test_cmd": "pytest --no-header -rA", "log_parser": "parse_log_pytest", "python": "3.9"}
    row = {"install_config": config, "docker_image": "registry/reb:1", "meta": {}, "license_name": "MIT License"}
    return swegym_row(**{**row, **more})


def swesmith_row(**more: Any) -> dict[str, Any]:
    return {
        "repo": "swesmith/acme__tool.0123abcd",
        "instance_id": "acme__tool.0123abcd.func_basic__x1y2",
        "image_name": "registry/smith:1",
        "patch": PATCH,
        "problem_statement": "add is wrong.",
        "FAIL_TO_PASS": F2P,
        "PASS_TO_PASS": P2P,
        **more,
    }


def r2e_row(**more: Any) -> dict[str, Any]:
    commit = {
        "file_diffs": [
            {"header": {"file": {"path": "pkg/core.py"}}, "old_file_content": "a\n", "new_file_content": "b\n"},
            {"header": {"file": {"path": "tests/test_core.py"}}, "old_file_content": "", "new_file_content": "t\n"},
        ]
    }
    expected = {"TestA.test_one": "PASSED", "test_two[a - b]": "FAILED", "\x1b[1mtest_three\x1b[0m": "ERROR"}
    return {
        "repo_name": "acme",
        "docker_image": "registry/r2e:1",
        "commit_hash": "e" * 40,
        "parsed_commit_content": json.dumps(commit),
        "execution_result_content": "{}",
        "expected_output_json": json.dumps(expected),
        "prompt": "the answer is b",
        "problem_statement": "intro [ISSUE]\nIt gives a.\n[/ISSUE]",
        **more,
    }
