import asyncio
import subprocess
import sys
from collections.abc import Generator, Iterator

import pytest

from deepswe.errors import PolicyError
from deepswe.policy.base import Completion, Policy, Renderer, Sampling
from deepswe.policy.scripted import ByteRenderer, ScriptedPolicy
from deepswe.types import Message


def sampling(max_tokens: int = 100) -> Sampling:
    return Sampling(max_tokens=max_tokens, temperature=1.0, stop_tokens=ByteRenderer.stop_tokens, seed=0)


def ask(policy: Policy, name: str, stream: list[int], max_tokens: int = 100) -> Completion:
    return asyncio.run(policy.generate(name, stream, sampling(max_tokens), timeout_s=1.0))


def test_generator_is_sent_each_observation() -> None:
    seen: list[str] = []

    def script(name: str) -> Generator[str, str, None]:
        seen.append((yield f"first of {name}"))
        seen.append((yield "second"))
        yield "third"

    renderer: Renderer = ByteRenderer()
    policy = ScriptedPolicy(renderer, script)
    stream = list(renderer.opening([Message("user", "go")]))
    said = []
    for observation in ("one é", "two\n", ""):
        completion = ask(policy, "t", stream)
        assert completion.finish == "stop"
        assert completion.logprobs == (0.0,) * len(completion.tokens)
        said.append(renderer.decode(completion.tokens))
        stream += [*completion.tokens, *renderer.observation(observation)]
    assert said == ["first of t", "second", "third"]
    assert seen == ["one é", "two\n"]


def test_turn_longer_than_allowed_is_cut_and_the_observation_still_arrives() -> None:
    seen: list[str] = []

    def script(name: str) -> Generator[str, str, None]:
        seen.append((yield "0123456789"))
        yield "end"

    renderer = ByteRenderer()
    policy = ScriptedPolicy(renderer, script)
    stream = list(renderer.opening([]))
    completion = ask(policy, "t", stream, max_tokens=4)
    assert (renderer.decode(completion.tokens), completion.finish) == ("0123", "length")
    ask(policy, "t", [*stream, *completion.tokens, *renderer.observation("late", truncated=True)])
    assert seen == ["late"]


def test_plain_iterator_is_read_on() -> None:
    renderer = ByteRenderer()
    policy = ScriptedPolicy(renderer, lambda name: iter(["a", "b"]))
    first = ask(policy, "t", [1])
    second = ask(policy, "t", [1, *first.tokens, 7, 7])
    assert renderer.decode(first.tokens) + renderer.decode(second.tokens) == "ab"


def test_trajectories_have_scripts_of_their_own_and_a_retry_starts_anew() -> None:
    renderer = ByteRenderer()
    policy = ScriptedPolicy(renderer, lambda name: iter([f"{name}1", f"{name}2"]))
    texts = [renderer.decode(ask(policy, name, [1, 2]).tokens) for name in ("a", "b", "a")]
    assert texts == ["a1", "b1", "a1"]
    asyncio.run(policy.release("b"))
    assert renderer.decode(ask(policy, "b", [1] * 50).tokens) == "b1"


def test_script_that_ends_too_early_is_an_error_that_says_so() -> None:
    policy = ScriptedPolicy(ByteRenderer(), lambda name: iter(["only"]))
    ask(policy, "t", [1])
    with pytest.raises(PolicyError, match="'t' ended after 1 turns"):
        ask(policy, "t", [1] * 20)


def test_failure_in_a_script_is_a_policy_error() -> None:
    def script(name: str) -> Iterator[str]:
        raise KeyError(name)
        yield ""

    with pytest.raises(PolicyError, match="KeyError: 't'"):
        ask(ScriptedPolicy(ByteRenderer(), script), "t", [1])


@pytest.mark.parametrize("text", ["", "x", "\x00\n", "é𝄞", "\udc80"])
def test_byte_renderer_gives_back_every_text(text: str) -> None:
    renderer = ByteRenderer()
    assert renderer.decode(renderer.completion(text)) == text
    assert renderer.read_observation(renderer.observation(text)) == text
    assert renderer.read_observation(renderer.observation(text, role="tool", truncated=True)) == text
    assert max(renderer.opening([Message("system", text)])) < ByteRenderer.vocabulary


def test_byte_renderer_refuses_what_is_no_observation() -> None:
    with pytest.raises(PolicyError, match="no observation"):
        ByteRenderer().read_observation((1, 2, 3))


def test_scripted_runs_need_no_torch() -> None:
    code = (
        "import sys, deepswe.policy.scripted\n"
        "assert not {'torch', 'transformers', 'numpy'} & set(sys.modules), 'heavy import'"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
