"""The tools of the agent."""

from __future__ import annotations

from deepswe.tools.editor import file_editor
from deepswe.tools.finish import finish
from deepswe.tools.search import search
from deepswe.tools.shell import execute_bash

TOOLS = (execute_bash, search, file_editor, finish)
