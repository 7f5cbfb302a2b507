import asyncio
import random
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from deepswe.errors import PolicyError
from deepswe.policy.base import Completion, Policy, Sampling
from deepswe.policy.embedded import EmbeddedPolicy
from deepswe.policy.products import Product

STOP = 63
NEVER = frozenset({-1})


def tiny(seed: int = 0, **changes: object) -> PreTrainedModel:
    torch.manual_seed(seed)
    settings = {
        "vocab_size": 64,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "max_position_embeddings": 512,
        "initializer_range": 0.3,
    }
    return Qwen3ForCausalLM(Qwen3Config(**{**settings, **changes})).eval()


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


def sampling(
    max_tokens: int = 8, seed: int = 0, temperature: float = 1.0, stop: frozenset[int] = frozenset({STOP})
) -> Sampling:
    return Sampling(max_tokens=max_tokens, temperature=temperature, stop_tokens=stop, seed=seed)


def prompt(seed: int, length: int) -> list[int]:
    return random.Random(seed).choices(range(60), k=length)


def reference(
    model: PreTrainedModel, stream: Sequence[int], completion: Completion, temperature: float = 1.0
) -> list[float]:
    ids = torch.tensor([[*stream, *completion.tokens]])
    with torch.no_grad():
        logp = torch.log_softmax(model(input_ids=ids).logits[0].float() / temperature, -1)
    return [float(logp[len(stream) + i - 1, token]) for i, token in enumerate(completion.tokens)]


def assert_close(left: Sequence[float], right: Sequence[float], tolerance: float = 1e-4) -> None:
    assert len(left) == len(right)
    assert max((abs(a - b) for a, b in zip(left, right, strict=True)), default=0.0) < tolerance


async def play(
    policy: Policy, name: str, seed: int, turns: int = 3, delay: Callable[[], float] = lambda: 0.0
) -> list[tuple[list[int], Completion]]:
    """Several turns of a trajectory whose prompt, observations and lengths come from the seed."""
    numbers = random.Random(seed)
    stream = prompt(seed, numbers.randint(1, 40))
    record = []
    for turn in range(turns):
        await asyncio.sleep(delay())
        asked = sampling(max_tokens=numbers.randint(1, 20), seed=seed)
        completion = await policy.generate(name, stream, asked, timeout_s=60)
        record.append((list(stream), completion))
        stream = [*stream, *completion.tokens, *prompt(seed * 31 + turn, numbers.randint(0, 30))]
    return record


async def play_all(policy: Policy, count: int, **options: object) -> list[list[tuple[list[int], Completion]]]:
    plays = [play(policy, f"t{i}", seed=i, **options) for i in range(count)]  # type: ignore[arg-type]
    return list(await asyncio.gather(*plays))


@pytest.mark.parametrize(
    "model",
    [
        pytest.param(lambda: tiny(), id="full attention"),
        pytest.param(
            lambda: tiny(use_sliding_window=True, sliding_window=16, max_window_layers=1), id="sliding layers"
        ),
        pytest.param(
            lambda: MistralForCausalLM(
                MistralConfig(
                    vocab_size=64,
                    hidden_size=32,
                    intermediate_size=64,
                    num_hidden_layers=2,
                    num_attention_heads=4,
                    num_key_value_heads=2,
                    sliding_window=12,
                    max_position_embeddings=512,
                    initializer_range=0.3,
                )
            ).eval(),
            id="mistral window",
        ),
        pytest.param(lambda: tiny(attn_implementation="eager"), id="eager"),
    ],
)
def test_logprobs_equal_a_plain_forward_over_turns_of_a_ragged_batch(model: Callable[[], PreTrainedModel]) -> None:
    lm = model()
    with EmbeddedPolicy(lm) as policy:
        records = asyncio.run(play_all(policy, 12))
    for record in records:
        for stream, completion in record:
            assert_close(completion.logprobs, reference(lm, stream, completion))


def test_batched_turns_equal_turns_one_by_one() -> None:
    lm = tiny()
    with EmbeddedPolicy(lm) as policy:
        batched = asyncio.run(play_all(policy, 10))
    with EmbeddedPolicy(lm) as policy:
        for i, record in enumerate(batched):
            alone = asyncio.run(play(policy, f"t{i}", seed=i))
            assert [c.tokens for _, c in alone] == [c.tokens for _, c in record]
            for (_, one), (_, other) in zip(alone, record, strict=True):
                assert_close(one.logprobs, other.logprobs)


def test_whoever_watches_sees_each_pass_begin_and_end_in_the_thread_that_computes_it() -> None:
    seen: list[str] = []

    @contextmanager
    def watched() -> Iterator[None]:
        seen.append(f"begins in {threading.current_thread().name}")
        yield
        seen.append("ends")

    with EmbeddedPolicy(tiny()) as policy:
        policy.computing = watched
        asyncio.run(play_all(policy, 2))
    assert len(seen) > 2
    assert seen == ["begins in deepswe-engine", "ends"] * (len(seen) // 2)


def test_kept_cache_gives_the_same_as_none() -> None:
    async def run(policy: EmbeddedPolicy, forget: bool) -> list[Completion]:
        stream, completions = prompt(5, 20), []
        for turn in range(4):
            completion = await policy.generate("t", stream, sampling(seed=turn, stop=NEVER), timeout_s=60)
            completions.append(completion)
            stream = [*stream, *completion.tokens, *prompt(turn, 9)]
            if forget:
                await policy.release("t")
        return completions

    with EmbeddedPolicy(tiny()) as policy:
        kept, anew = asyncio.run(run(policy, False)), asyncio.run(run(policy, True))
    assert [c.tokens for c in kept] == [c.tokens for c in anew]
    for one, other in zip(kept, anew, strict=True):
        assert_close(one.logprobs, other.logprobs)


def test_stream_that_differs_from_the_cached_one_is_computed_from_where_it_differs() -> None:
    lm = tiny()

    async def run(policy: EmbeddedPolicy) -> tuple[list[int], Completion]:
        stream = prompt(1, 30)
        await policy.generate("t", stream, sampling(), timeout_s=60)
        changed = [*stream[:10], 59, *stream[11:25]]
        return changed, await policy.generate("t", changed, sampling(), timeout_s=60)

    with EmbeddedPolicy(lm) as policy:
        stream, completion = asyncio.run(run(policy))
    assert_close(completion.logprobs, reference(lm, stream, completion))


def test_attempts_with_a_common_prompt_compute_it_once() -> None:
    lm = tiny()
    widths: list[int] = []
    lm.model.register_forward_pre_hook(
        lambda module, args, kwargs: widths.append(kwargs["input_ids"].numel()), with_kwargs=True
    )
    head = prompt(0, 100)
    streams = {f"{task}{i}": [*head, *prompt(task, 40)] for task in (1, 2) for i in range(4)}
    streams["short"] = head[:50]
    streams["other"] = prompt(9, 30)

    async def run(policy: EmbeddedPolicy) -> dict[str, Completion]:
        calls = {n: policy.generate(n, s, sampling(1, seed=3), timeout_s=60) for n, s in streams.items()}
        return dict(zip(calls, await asyncio.gather(*calls.values()), strict=True))

    async def together(policy: EmbeddedPolicy) -> dict[str, Completion]:
        async with policy.cohort(list(streams)):
            return await run(policy)

    with EmbeddedPolicy(lm, deterministic=True) as policy:
        widths.clear()
        completions = asyncio.run(together(policy))
    # 30 and 50 of their own, 90 and 40 for the first attempts at the tasks, 1 for each other; not 8 * 140 + 80.
    assert sum(widths) == 30 + 50 + 90 + 40 + 6
    for name, completion in completions.items():
        assert_close(completion.logprobs, reference(lm, streams[name], completion))


def test_late_attempt_starts_from_what_another_has_in_flight() -> None:
    lm = tiny()
    widths: list[int] = []
    lm.model.register_forward_pre_hook(
        lambda module, args, kwargs: widths.append(kwargs["input_ids"].shape[1]), with_kwargs=True
    )
    head = prompt(0, 90)

    async def run(policy: EmbeddedPolicy) -> Completion:
        first = asyncio.ensure_future(policy.generate("a", head, sampling(200, stop=NEVER), timeout_s=60))
        while len(widths) < 10:  # noqa: ASYNC110
            await asyncio.sleep(0.001)
        late = await policy.generate("b", [*head[:80], 1, 2, 3], sampling(4, stop=NEVER), timeout_s=60)
        await first
        return late

    with EmbeddedPolicy(lm) as policy:
        widths.clear()
        late = asyncio.run(run(policy))
    # Its last three tokens, beside one of the other.
    assert sorted(widths)[-2:] == [4, 90]
    assert_close(late.logprobs, reference(lm, [*head[:80], 1, 2, 3], late))


def test_seed_decides_and_the_batch_does_not() -> None:
    async def ask(policy: EmbeddedPolicy, seeds: Sequence[int]) -> list[tuple[int, ...]]:
        calls = [
            policy.generate(f"t{i}", prompt(0, 10), sampling(30, seed, stop=NEVER), timeout_s=60)
            for i, seed in enumerate(seeds)
        ]
        return [completion.tokens for completion in await asyncio.gather(*calls)]

    with EmbeddedPolicy(tiny()) as policy:
        first = asyncio.run(ask(policy, [1, 2, 3, 1]))
        (alone,) = asyncio.run(ask(policy, [2]))
    assert first[0] == first[3]
    assert len(set(first)) == 3
    assert first[1] == alone


def test_same_seed_draws_other_numbers_later_in_the_stream() -> None:
    flat = tiny(initializer_range=0.0)

    async def ask(policy: EmbeddedPolicy) -> list[tuple[int, ...]]:
        streams = [prompt(0, 10), prompt(0, 10) + prompt(1, 20)]
        return [
            (await policy.generate("t", stream, sampling(20, 7, stop=NEVER), timeout_s=60)).tokens for stream in streams
        ]

    with EmbeddedPolicy(flat) as policy:
        first, second = asyncio.run(ask(policy))
    assert first != second


def test_frequencies_follow_the_softmax_at_the_temperature_asked() -> None:
    lm, count, temperature = tiny(initializer_range=0.15), 2000, 0.7
    stream = prompt(3, 12)

    async def run(policy: EmbeddedPolicy) -> list[Completion]:
        calls = [
            policy.generate(f"t{i}", stream, sampling(1, seed=i, temperature=temperature), timeout_s=60)
            for i in range(count)
        ]
        return list(await asyncio.gather(*calls))

    with EmbeddedPolicy(lm) as policy:
        completions = asyncio.run(run(policy))
    with torch.no_grad():
        expected = torch.softmax(lm(input_ids=torch.tensor([stream])).logits[0, -1] / temperature, -1) * count
    seen = torch.bincount(torch.tensor([c.tokens[0] for c in completions]), minlength=64)
    common = expected >= 5
    observed = torch.cat([seen[common], seen[~common].sum()[None]])
    wanted = torch.cat([expected[common], expected[~common].sum()[None]])
    chi_square = float(((observed - wanted) ** 2 / wanted.clamp(min=1e-9)).sum())
    freedom = len(wanted) - 1
    assert chi_square < freedom + 4 * (2 * freedom) ** 0.5
    assert_close(completions[0].logprobs, reference(lm, stream, completions[0], temperature))


def test_temperature_zero_takes_the_most_likely_token() -> None:
    lm = tiny()
    stream = prompt(2, 9)
    with EmbeddedPolicy(lm) as policy:
        asked = sampling(12, temperature=0.0, stop=NEVER)
        completion = asyncio.run(policy.generate("t", stream, asked, timeout_s=60))
    with torch.no_grad():
        logits = lm(input_ids=torch.tensor([[*stream, *completion.tokens]])).logits[0]
    assert completion.tokens == tuple(logits[len(stream) - 1 : -1].argmax(-1).tolist())
    assert_close(completion.logprobs, reference(lm, stream, completion))


def test_turn_ends_at_a_stop_token_which_belongs_to_it_or_at_its_length() -> None:
    async def run(policy: EmbeddedPolicy) -> tuple[Completion, Completion]:
        long = await policy.generate("a", prompt(0, 5), sampling(40, seed=3, stop=NEVER), timeout_s=60)
        stop = frozenset({long.tokens[6]})
        return long, await policy.generate("b", prompt(0, 5), sampling(40, seed=3, stop=stop), timeout_s=60)

    with EmbeddedPolicy(tiny()) as policy:
        long, stopped = asyncio.run(run(policy))
    assert (long.finish, len(long.tokens)) == ("length", 40)
    assert stopped.finish == "stop"
    end = long.tokens.index(long.tokens[6]) + 1
    assert stopped.tokens == long.tokens[:end]
    assert stopped.logprobs == pytest.approx(long.logprobs[:end], abs=1e-5)


def test_deadline_gives_the_tokens_so_far() -> None:
    lm = tiny(max_position_embeddings=100_000)

    async def run(policy: EmbeddedPolicy) -> tuple[Completion, Completion]:
        some = await policy.generate("t", prompt(0, 5), sampling(90_000, stop=NEVER), timeout_s=0.3)
        return some, await policy.generate("u", prompt(0, 5), sampling(5), timeout_s=-1.0)

    with EmbeddedPolicy(lm) as policy:
        some, none = asyncio.run(run(policy))
    assert some.finish == none.finish == "timeout"
    assert 0 < len(some.tokens) < 90_000
    assert none.tokens == ()


def test_context_of_the_model_ends_a_turn() -> None:
    lm = tiny(max_position_embeddings=32)

    async def run(policy: EmbeddedPolicy) -> Completion:
        completion = await policy.generate("t", prompt(0, 30), sampling(20, stop=NEVER), timeout_s=60)
        with pytest.raises(PolicyError, match="32 tokens of a context of 32"):
            await policy.generate("t", [*prompt(0, 30), *completion.tokens], sampling(1), timeout_s=60)
        return completion

    with EmbeddedPolicy(lm) as policy:
        assert asyncio.run(run(policy)).finish == "length"


@pytest.mark.parametrize("stream", [[], [64], [-1]])
def test_unusable_stream_is_refused_alone(stream: list[int]) -> None:
    async def run(policy: EmbeddedPolicy) -> Completion:
        good = asyncio.ensure_future(policy.generate("good", [1, 2], sampling(), timeout_s=60))
        with pytest.raises(PolicyError, match="'bad'"):
            await policy.generate("bad", stream, sampling(), timeout_s=60)
        return await good

    with EmbeddedPolicy(tiny()) as policy:
        assert asyncio.run(run(policy)).tokens


@pytest.mark.parametrize("place", [1, -1], ids=["of what was seen", "of what is new"])
def test_a_stream_is_refused_in_a_later_turn_for_any_of_its_tokens(place: int) -> None:
    async def run(policy: EmbeddedPolicy) -> None:
        completion = await policy.generate("bad", [1, 2, 3], sampling(), timeout_s=60)
        stream = [1, 2, 3, *completion.tokens, 4]
        stream[place] = 64
        with pytest.raises(PolicyError, match="'bad'"):
            await policy.generate("bad", stream, sampling(), timeout_s=60)

    with EmbeddedPolicy(tiny()) as policy:
        asyncio.run(run(policy))


def test_cancelled_call_frees_its_place_and_disturbs_nobody() -> None:
    lm = tiny(max_position_embeddings=100_000)

    async def run(policy: EmbeddedPolicy) -> tuple[Completion, int]:
        long = asyncio.ensure_future(policy.generate("long", prompt(0, 5), sampling(90_000, stop=NEVER), timeout_s=60))
        other = asyncio.ensure_future(policy.generate("other", prompt(1, 5), sampling(60, stop=NEVER), timeout_s=60))
        await asyncio.sleep(0.05)
        long.cancel()
        with pytest.raises(asyncio.CancelledError):
            await long
        completion = await other
        await policy.release("long")
        await asyncio.sleep(0.05)
        return completion, len(policy._engine.active)

    with EmbeddedPolicy(lm) as policy:
        completion, active = asyncio.run(run(policy))
        assert active == 0
    assert_close(completion.logprobs, reference(lm, prompt(1, 5), completion))


def test_failure_of_the_model_reaches_every_waiting_call_and_the_engine_recovers() -> None:
    lm = tiny(max_position_embeddings=100_000)
    broken = {"now": False}

    def hook(*_: object) -> None:
        if broken["now"]:
            raise RuntimeError("no memory left")

    lm.register_forward_pre_hook(hook)

    async def run(policy: EmbeddedPolicy) -> Completion:
        calls = [
            asyncio.ensure_future(policy.generate(f"t{i}", [1, 2], sampling(90_000, stop=NEVER), timeout_s=60))
            for i in range(5)
        ]
        await asyncio.sleep(0.05)
        broken["now"] = True
        results = await asyncio.gather(*calls, return_exceptions=True)
        assert all(isinstance(r, PolicyError) and "RuntimeError: no memory left" in str(r) for r in results)
        broken["now"] = False
        return await policy.generate("t0", [1, 2], sampling(), timeout_s=60)

    with EmbeddedPolicy(lm) as policy:
        completion = asyncio.run(run(policy))
    assert_close(completion.logprobs, reference(lm, [1, 2], completion))


def test_weights_that_are_not_numbers_are_an_error() -> None:
    lm = tiny()
    with EmbeddedPolicy(lm) as policy:
        with torch.no_grad():
            lm.get_input_embeddings().weight.fill_(float("nan"))
        with pytest.raises(PolicyError, match="diverged"):
            asyncio.run(policy.generate("t", [1], sampling(), timeout_s=60))


def test_close_answers_calls_in_flight_and_refuses_later_ones() -> None:
    lm = tiny(max_position_embeddings=100_000)

    async def run(policy: EmbeddedPolicy) -> None:
        call = asyncio.ensure_future(policy.generate("t", [1], sampling(90_000, stop=NEVER), timeout_s=60))
        await asyncio.sleep(0.05)
        policy.close()
        with pytest.raises(PolicyError, match="closed"):
            await call
        with pytest.raises(PolicyError, match="closed"):
            await policy.generate("t", [1], sampling(), timeout_s=60)

    policy = EmbeddedPolicy(lm)
    asyncio.run(run(policy))
    policy.close()
    assert not policy._worker.is_alive()


def change_weights(lm: PreTrainedModel) -> None:
    with torch.no_grad():
        for parameter in lm.parameters():
            parameter.mul_(0.9)


def test_new_version_makes_kept_caches_stale() -> None:
    lm = tiny()

    async def run(policy: EmbeddedPolicy) -> tuple[list[int], Completion]:
        stream = prompt(0, 30)
        first = await policy.generate("t", stream, sampling(), timeout_s=60)
        async with policy.updating():
            change_weights(lm)
            policy.version += 1
        stream = [*stream, *first.tokens, 5, 6]
        return stream, await policy.generate("t", stream, sampling(), timeout_s=60)

    with EmbeddedPolicy(lm) as policy:
        stream, completion = asyncio.run(run(policy))
    assert completion.version == 1
    assert_close(completion.logprobs, reference(lm, stream, completion))


def test_turn_in_flight_goes_on_under_the_new_weights_with_its_cache_computed_anew() -> None:
    lm = tiny()
    length = 200
    passes = []
    lm.register_forward_pre_hook(lambda *_: passes.append(None))

    async def run(policy: EmbeddedPolicy) -> list[Completion]:
        calls = [
            asyncio.ensure_future(policy.generate(f"t{i}", prompt(i, 5), sampling(length, stop=NEVER), timeout_s=60))
            for i in range(3)
        ]
        while len(passes) < 20:  # noqa: ASYNC110
            await asyncio.sleep(0.001)
        async with policy.updating():
            change_weights(lm)
            policy.version = 7
            lm.train()
            torch.set_grad_enabled(True)
        return list(await asyncio.gather(*calls))

    with EmbeddedPolicy(lm) as policy:
        completions = asyncio.run(run(policy))
    assert not lm.training
    for i, completion in enumerate(completions):
        assert completion.version == 0
        assert len(completion.tokens) == length
        expected = reference(lm, prompt(i, 5), completion)
        assert_close(completion.logprobs[-50:], expected[-50:])


def test_no_pass_runs_while_updating() -> None:
    lm = tiny(max_position_embeddings=100_000)
    passes = []
    lm.register_forward_pre_hook(lambda *_: passes.append(time.monotonic()))

    async def run(policy: EmbeddedPolicy) -> int:
        call = asyncio.ensure_future(policy.generate("t", [1], sampling(90_000, stop=NEVER), timeout_s=0.4))
        await asyncio.sleep(0.05)
        async with policy.updating():
            before = len(passes)
            await asyncio.sleep(0.1)
            during = len(passes) - before
        with policy.paused():
            before = len(passes)
            time.sleep(0.05)  # noqa: ASYNC251
            during += len(passes) - before
        await call
        return during

    with EmbeddedPolicy(lm) as policy:
        assert asyncio.run(run(policy)) == 0
    assert passes


def test_no_pass_runs_in_a_pause_that_began_while_requests_were_gathered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("deepswe.policy.embedded.GATHER_S", 0.2)
    passes: list[int] = []

    async def run() -> None:
        asked = asyncio.create_task(policy.generate("a", [1, 2, 3], sampling(), timeout_s=60))
        await asyncio.sleep(0.05)  # the engine waits for more requests now
        async with policy.updating():
            await asyncio.sleep(0.4)
            assert not passes
        await asked
        assert passes

    with EmbeddedPolicy(tiny()) as policy:
        step = policy._engine.step
        monkeypatch.setattr(policy._engine, "step", lambda: (passes.append(1), step()))
        asyncio.run(run())


def test_weights_that_could_not_be_prepared_whole_are_prepared_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    lm, made = tiny(), [0]

    def failing(*arguments: Any) -> Any:
        made[0] += 1
        if made[0] == 4:
            raise MemoryError
        return Product(*arguments)

    async def run() -> Completion:
        with policy.paused(), torch.no_grad():
            for parameter in lm.parameters():
                parameter.data = 0.5 * parameter.data  # other storage, too
        monkeypatch.setattr("deepswe.policy.decoder.Product", failing)
        with pytest.raises(PolicyError):
            await policy.generate("a", [1, 2, 3], sampling(), timeout_s=60)
        return await policy.generate("a", [1, 2, 3], sampling(), timeout_s=60)

    with EmbeddedPolicy(lm) as policy:
        completion = asyncio.run(run())
    assert_close(completion.logprobs, reference(lm, [1, 2, 3], completion))


def test_engine_leaves_the_weights_trainable() -> None:
    lm = tiny()
    with EmbeddedPolicy(lm) as policy:
        asyncio.run(play_all(policy, 2))
        with policy.paused():
            lm.train()
            lm(input_ids=torch.tensor([[1, 2, 3]]), labels=torch.tensor([[1, 2, 3]])).loss.backward()
    assert all(p.grad is not None and bool(torch.isfinite(p.grad).all()) for p in lm.parameters())


@pytest.mark.parametrize("how", ["weights", "autocast", "autocast, no family"])
def test_bfloat16_models_work(how: str) -> None:
    lm = tiny(initializer_range=0.1)
    lm = lm.to(torch.bfloat16) if how == "weights" else lm
    if "no family" in how:
        lm.model.register_forward_hook(lambda *_: None)
    with EmbeddedPolicy(lm, autocast=torch.bfloat16 if "autocast" in how else None) as policy:
        records = asyncio.run(play_all(policy, 6))
    for record in records:
        for stream, completion in record:
            assert_close(completion.logprobs, reference(lm, stream, completion), 0.1)


@pytest.mark.parametrize("kind", [None, torch.bfloat16])
@pytest.mark.parametrize("width", [32, 640])  # the second has matrices that are laid out anew
def test_updates_of_the_weights_reach_the_engine_however_they_are_made(kind: torch.dtype | None, width: int) -> None:
    lm = tiny(hidden_size=width, intermediate_size=2 * width, initializer_range=0.1)
    optimiser = torch.optim.AdamW(lm.parameters(), lr=0.05, fused=True)  # writes without a trace that torch keeps
    tolerance = 1e-4 if kind is None else 0.2

    async def turns() -> None:
        for version in range(1, 4):
            completion = await policy.generate("a", [1, 2, 3], sampling(), timeout_s=60)
            assert_close(completion.logprobs, reference(lm, [1, 2, 3], completion), tolerance)
            async with policy.updating():
                lm(input_ids=torch.tensor([[1, 2, 3]]), labels=torch.tensor([[1, 2, 3]])).loss.backward()
                optimiser.step()
                await policy.publish(version)
        with policy.paused(), torch.no_grad():  # without a new version
            for parameter in lm.parameters():
                parameter.data.mul_(0.5)
        completion = await policy.generate("b", [1, 2, 3], sampling(), timeout_s=60)
        assert_close(completion.logprobs, reference(lm, [1, 2, 3], completion), tolerance)
        with torch.no_grad():
            for parameter in lm.parameters():
                parameter.mul_(2.0)
        completion = await policy.generate("c", [1, 2, 3], sampling(), timeout_s=60)
        assert_close(completion.logprobs, reference(lm, [1, 2, 3], completion), tolerance)

    with EmbeddedPolicy(lm, autocast=kind) as policy:
        asyncio.run(turns())


@pytest.mark.parametrize("rope", ["default", "linear", "dynamic", "yarn", "llama3"])
def test_positions_are_turned_as_the_model_turns_them(rope: str) -> None:
    more = {"low_freq_factor": 1.0, "high_freq_factor": 4.0} if rope == "llama3" else {}
    scaled = {"rope_type": rope, "rope_theta": 1e4, "factor": 2.0, "original_max_position_embeddings": 32, **more}
    lm = tiny(rope_parameters=scaled, max_position_embeddings=128 if rope == "dynamic" else 64)

    async def turns() -> list[tuple[list[int], Completion]]:
        made = []
        for length in (5, 30, 50):
            stream = prompt(length, length)
            made.append((stream, await policy.generate(f"t{length}", stream, sampling(stop=NEVER), timeout_s=60)))
        return made

    with EmbeddedPolicy(lm) as policy:
        records = asyncio.run(turns())
    for stream, completion in records:
        assert_close(completion.logprobs, reference(lm, stream, completion))


def test_cache_beyond_its_limit_is_given_up_and_computed_anew() -> None:
    lm = tiny()
    with EmbeddedPolicy(lm, cache_bytes=1) as policy:
        records = asyncio.run(play_all(policy, 8, delay=lambda: 0.002))
    for record in records:
        for stream, completion in record:
            assert_close(completion.logprobs, reference(lm, stream, completion))


def deterministic_run(lm: PreTrainedModel, noise: int, count: int = 9) -> list[list[tuple[list[int], Completion]]]:
    numbers = random.Random(noise)

    async def one(policy: EmbeddedPolicy, i: int) -> list[tuple[list[int], Completion]]:
        try:
            return await play(policy, f"t{i}", i, turns=1 + i % 4, delay=lambda: numbers.uniform(0, 0.01))
        finally:
            await asyncio.sleep(numbers.uniform(0, 0.01))
            await policy.release(f"t{i}")

    async def run(policy: EmbeddedPolicy) -> list[list[tuple[list[int], Completion]]]:
        async with policy.cohort([f"t{i}" for i in range(count)]):
            order = list(range(count))
            numbers.shuffle(order)
            found = await asyncio.gather(*[one(policy, i) for i in order])
        return [found[order.index(i)] for i in range(count)]

    with EmbeddedPolicy(lm, deterministic=True) as policy:
        return [*asyncio.run(run(policy)), *asyncio.run(run(policy))]


def test_deterministic_results_are_the_same_to_the_last_bit_whoever_asks_first() -> None:
    lm = tiny()
    first, second = deterministic_run(lm, 1), deterministic_run(lm, 2)
    assert first == second
    half = len(first) // 2
    assert first[:half] == first[half:]
    for record in first:
        for stream, completion in record:
            assert_close(completion.logprobs, reference(lm, stream, completion))


def test_deterministic_engine_refuses_a_trajectory_without_a_cohort() -> None:
    with EmbeddedPolicy(tiny(), deterministic=True) as policy, pytest.raises(PolicyError, match="no cohort"):
        asyncio.run(policy.generate("t", [1], sampling(), timeout_s=60))


def test_deterministic_call_that_waits_for_others_keeps_its_deadline() -> None:
    async def run(policy: EmbeddedPolicy) -> Completion:
        async with policy.cohort(["here", "absent"]):
            return await policy.generate("here", [1], sampling(), timeout_s=0.1)

    with EmbeddedPolicy(tiny(), deterministic=True) as policy:
        assert asyncio.run(run(policy)).finish == "timeout"


def test_trajectory_that_was_released_may_come_back_for_a_retry() -> None:
    async def run(policy: EmbeddedPolicy) -> tuple[Completion, Completion]:
        async with policy.cohort(["t"]):
            first = await policy.generate("t", [1, 2], sampling(), timeout_s=60)
            await policy.release("t")
            return first, await policy.generate("t", [1, 2], sampling(), timeout_s=60)

    with EmbeddedPolicy(tiny(), deterministic=True) as policy:
        first, again = asyncio.run(run(policy))
    assert first == again


def test_unsupported_architecture_is_refused_when_opened() -> None:
    lm = tiny()
    lm.config.layer_types = ["linear_attention", "full_attention"]
    with pytest.raises(PolicyError, match="linear_attention"):
        EmbeddedPolicy(lm)


def test_prompt_longer_than_a_pass_is_computed_beside_turns_in_flight() -> None:
    lm = tiny(max_position_embeddings=4096)
    streams = {"long": prompt(1, 2300), "short": prompt(2, 20)}

    async def run(policy: EmbeddedPolicy) -> list[Completion]:
        calls = [
            policy.generate(name, stream, sampling(6, stop=NEVER), timeout_s=60) for name, stream in streams.items()
        ]
        return await asyncio.gather(*calls)

    with EmbeddedPolicy(lm) as policy:
        completions = asyncio.run(run(policy))
    for stream, completion in zip(streams.values(), completions, strict=True):
        assert_close(completion.logprobs, reference(lm, stream, completion), 1e-3)


def test_attempt_goes_on_when_the_one_whose_prompt_it_was_to_share_is_cancelled() -> None:
    lm = tiny(max_position_embeddings=4096)
    widths: list[int] = []
    lm.model.register_forward_pre_hook(
        lambda module, args, kwargs: widths.append(kwargs["input_ids"].numel()), with_kwargs=True
    )
    head = prompt(1, 2300)

    async def run(policy: EmbeddedPolicy) -> Completion:
        first = asyncio.ensure_future(policy.generate("a", [*head, 1], sampling(8), timeout_s=60))
        second = asyncio.ensure_future(policy.generate("b", [*head, 2], sampling(4, stop=NEVER), timeout_s=60))
        while not widths:  # noqa: ASYNC110
            await asyncio.sleep(0.001)
        first.cancel()
        return await second

    with EmbeddedPolicy(lm) as policy:
        widths.clear()
        completion = asyncio.run(run(policy))
    assert_close(completion.logprobs, reference(lm, [*head, 2], completion), 1e-3)


def test_models_of_the_llama_family_run_without_their_own_forward_pass() -> None:
    torch.manual_seed(0)
    sizes = {"vocab_size": 64, "hidden_size": 36, "intermediate_size": 64, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 3, "num_key_value_heads": 1, "head_dim": 12, "initializer_range": 0.3}
    lm = LlamaForCausalLM(LlamaConfig(**sizes, **heads)).eval()
    with EmbeddedPolicy(lm) as policy:
        lm.model.register_forward_pre_hook(lambda *_: pytest.fail("the model's own forward ran"))
        records = asyncio.run(play_all(policy, 6))
    lm.model._forward_pre_hooks.clear()
    for record in records:
        for stream, completion in record:
            assert_close(completion.logprobs, reference(lm, stream, completion))
