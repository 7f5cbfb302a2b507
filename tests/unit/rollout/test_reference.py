from collections.abc import Iterator
from typing import Literal

import pytest

from deepswe.config import AgentConfig
from deepswe.policy.scripted import ByteRenderer
from deepswe.rollout.reference import noop_policy
from deepswe.tools.calls import parse_call


@pytest.mark.parametrize("call_format", ["xml", "native"])
def test_doing_nothing_is_one_submission_in_the_format_of_the_recipe(call_format: Literal["xml", "native"]) -> None:
    turns: Iterator[str] = iter(noop_policy(ByteRenderer(), AgentConfig(format=call_format))._script("any"))
    call = parse_call(next(turns), call_format).call
    assert call is not None
    assert (call.name, dict(call.arguments)) == ("finish", {"command": "submit"})
    assert next(turns, None) is None
