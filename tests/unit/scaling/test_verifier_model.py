import asyncio
import math
from dataclasses import replace

import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from deepswe.config import ImitationConfig, TrainingConfig
from deepswe.errors import ConfigError
from deepswe.policy.scripted import ByteRenderer
from deepswe.scaling.candidates import Candidate
from deepswe.scaling.verifier import Answer, ModelJudge, Prompter, RendererTokens
from deepswe.scaling.verifier_data import Example
from deepswe.scaling.verifier_prompt import Reading, read_candidate
from deepswe.training.imitation import Imitation


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


def make_model(seed: int = 0) -> Qwen3ForCausalLM:
    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=ByteRenderer.vocabulary,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=16,
        tie_word_embeddings=True,
    )
    return Qwen3ForCausalLM(config).eval()


class Prefixed(ByteRenderer):
    """A tokenizer that puts a mark in front of each answer."""

    def completion(self, text: str) -> tuple[int, ...]:
        return (7, *super().completion(text))


class Deaf(ByteRenderer):
    """A tokenizer that knows no letters."""

    def completion(self, text: str) -> tuple[int, ...]:
        return super().completion("")


def readings() -> list[Reading]:
    return [Reading("issue", (), "+" + word * n) for word, n in (("good", 1), ("bad", 9), ("", 0), ("good", 30))]


def test_the_place_of_the_answer_is_found_by_comparing_the_answers() -> None:
    assert Answer.of(ByteRenderer()) == Answer((), ord("Y"), ord("N"))
    assert Answer.of(Prefixed()) == Answer((7,), ord("Y"), ord("N"))
    with pytest.raises(ConfigError, match="do not differ"):
        Answer.of(Deaf())


def test_a_probability_is_the_share_of_the_model_s_own_probabilities() -> None:
    model, prompter = make_model(), Prompter(Prefixed(), style="brief", budget=100)
    found = ModelJudge(model, prompter, tokens_per_microbatch=120).judge_now(readings())
    for reading, probability in zip(readings(), found, strict=True):
        prompt = prompter.prompt(reading)
        assert prompt is not None
        assert prompt[-1] == 7
        with torch.no_grad():
            logits = model(input_ids=torch.tensor([prompt])).logits[0, -1].double()
        pair = logits[[ord("Y"), ord("N")]].softmax(-1)
        assert probability == pytest.approx(float(pair[0]), abs=1e-5)


def test_the_batch_and_its_order_change_no_score() -> None:
    prompter = Prompter(ByteRenderer(), style="brief", budget=200)
    judge = ModelJudge(make_model(), prompter)
    whole = judge.judge_now(readings())
    assert judge.judge_now(readings()[::-1])[::-1] == pytest.approx(whole, abs=1e-6)
    assert [judge.judge_now([reading])[0] for reading in readings()] == pytest.approx(whole, abs=1e-6)
    assert asyncio.run(judge.judge(readings())) == pytest.approx(whole, abs=1e-6)


def test_a_model_that_gives_no_number_has_no_answer() -> None:
    model = make_model()
    with torch.no_grad():
        model.get_input_embeddings().weight.fill_(math.nan)
    assert ModelJudge(model, Prompter(ByteRenderer(), style="brief", budget=100)).judge_now(readings()) == [None] * 4


def test_the_prior_of_the_pool_moves_every_probability_and_keeps_their_order() -> None:
    prompter = Prompter(ByteRenderer(), style="brief", budget=100)
    even, rare = (ModelJudge(make_model(), prompter, prior=prior).judge_now(readings()) for prior in (0.5, 0.1))
    assert all(r < e for r, e in zip(rare, even, strict=True) if r is not None and e is not None)
    ranked = [sorted(range(4), key=lambda i: found[i] or 0.0) for found in (even, rare)]
    assert ranked[0] == ranked[1]


def test_prompts_keep_the_budget_and_a_budget_without_room_is_refused() -> None:
    prompter = Prompter(ByteRenderer(), style="full", budget=2000)
    prompt = prompter.prompt(Reading("i" * 5000, (), "p" * 5000))
    assert prompt is not None
    assert len(prompt) <= 2000
    with pytest.raises(ConfigError, match="of which the frame alone takes"):
        Prompter(ByteRenderer(), style="full", budget=100)


def test_a_special_word_in_a_patch_is_only_text() -> None:
    tokens = RendererTokens(ByteRenderer())
    assert tokens.decode(tokens.encode("YES <|im_end|> ü")) == "YES <|im_end|> ü"


def test_training_through_the_learner_tells_right_from_wrong() -> None:
    """The patch says "good" or "bad"; after a few updates on the answer token alone the model has it."""
    words = {True: "+good", False: "+bad"}
    examples = [
        Example(Candidate(f"t{i}", "c", f"@@ -0,0 +1,1 @@\n{words[i % 2 == 0]}", issue="i"), i % 2 == 0, "g")
        for i in range(16)
    ]
    model, prompter = make_model(), Prompter(ByteRenderer(), style="brief", budget=100)
    lessons = prompter.lessons(examples)
    rows: list[dict[str, float]] = []
    config = ImitationConfig(batch_size=16, learning_rate=1e-2, warmup_steps=2).model_copy(update={"steps": 60})
    Imitation(model, config, TrainingConfig(), seed=0).run(lessons, rows.append)
    assert all(row["trained_tokens"] == 16 for row in rows)
    found = ModelJudge(model, prompter).judge_now([read_candidate(e.candidate) for e in examples[:2]])
    assert found[0] is not None
    assert found[1] is not None
    assert found[0] > 0.9 > 0.1 > found[1]


def test_an_example_that_cannot_be_cut_to_the_budget_is_left_out() -> None:
    class Growing(ByteRenderer):
        def opening(self, messages):  # type: ignore[no-untyped-def]
            text = "".join(message.content for message in messages)
            return super().opening([replace(messages[0], content=text * (1 + (len(text) > 12) * 50))])

    prompter = Prompter(Growing(), style="brief", budget=60)
    assert prompter.prompt(Reading("i", (), "short")) is not None
    assert prompter.prompt(Reading("i" * 50, (), "p" * 50)) is None
