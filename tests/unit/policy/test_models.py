"""The model from scratch and its tokenizer, and loading from a path."""

import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import torch
from huggingface_hub import constants
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer

from deepswe.config import ModelConfig, ScratchModel
from deepswe.errors import ConfigError
from deepswe.policy.model_path import check_model, check_model_path
from deepswe.policy.models import GRAMMAR, SPECIAL, TURN_END, load_policy_model, train_tokenizer
from deepswe.policy.render import Renderer
from deepswe.types import Message

CORPUS = (
    "In `amber_river.py`, `plum_pond(1, 27)` returns `3`, expected `4`.",
    'def plum_pond(amber, river):\n    """Sum of amber and river."""\n',
    "    if amber >= river:\n        return amber + 27\n        return river\n",
) * 4
SMALL = ScratchModel(hidden_size=32, layers=2, heads=2, key_value_heads=1, intermediate_size=64, vocabulary=420)


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer(CORPUS, vocabulary=420)


def pieces(tokenizer, text: str) -> list[str]:
    return [tokenizer.decode([token]) for token in tokenizer.encode(text, add_special_tokens=False)]


@settings(max_examples=150, deadline=None)
@given(text=st.text() | st.text(alphabet=" \n\tab_.(<>/=\"'1é漢"))
def test_any_text_comes_back_exactly(tokenizer, text: str):
    tokens = tokenizer.encode(text, add_special_tokens=False, split_special_tokens=True)
    assert tokenizer.decode(tokens, clean_up_tokenization_spaces=False) == text


@pytest.mark.parametrize("text", [*GRAMMAR, *SPECIAL])
def test_grammar_and_special_strings_are_one_token(tokenizer, text: str):
    assert pieces(tokenizer, text) == [text]


def test_a_line_has_the_same_tokens_at_any_indentation_and_in_a_call(tokenizer):
    line = "return amber + 27"
    bare = pieces(tokenizer, line)
    assert pieces(tokenizer, f"\n        {line}\n") == ["\n        ", *bare, "\n"]
    assert pieces(tokenizer, f"4\t        {line}\n")[2:-1] == bare
    assert pieces(tokenizer, f"<parameter=old_str>{line}</parameter>\n<parameter=new_str>")[1:-1] == bare
    assert bare == ["return", " amber", " +", " 2", "7"]


def test_a_name_is_its_words_and_an_operator_is_one_token(tokenizer):
    assert pieces(tokenizer, "`amber_river.py`") == ["`", "amber_river.py", "`"]
    assert pieces(tokenizer, "amber_river") == ["amber", "_river"]
    assert pieces(tokenizer, "amber >= river:") == ["amber", " >=", " river", ":"]


def test_the_same_corpus_and_seed_give_the_same_tokenizer_and_weights():
    one, two = (load_policy_model(ModelConfig(scratch=SMALL), corpus=iter(CORPUS), seed=5) for _ in range(2))
    assert one.tokenizer.backend_tokenizer.to_str() == two.tokenizer.backend_tokenizer.to_str()
    assert all(torch.equal(a, b) for a, b in zip(one.model.parameters(), two.model.parameters(), strict=True))
    other = load_policy_model(ModelConfig(scratch=SMALL), corpus=CORPUS, seed=6)
    assert not all(torch.equal(a, b) for a, b in zip(one.model.parameters(), other.model.parameters(), strict=True))


def test_building_a_model_leaves_the_global_generator_alone():
    torch.manual_seed(1)
    expected = torch.rand(3)
    torch.manual_seed(1)
    load_policy_model(ModelConfig(scratch=SMALL), corpus=CORPUS, seed=5)
    assert torch.equal(torch.rand(3), expected)


def test_a_saved_model_loads_again_by_its_directory(tmp_path: Path):
    made = load_policy_model(ModelConfig(scratch=SMALL), corpus=CORPUS, seed=5)
    made.model.save_pretrained(tmp_path)
    made.tokenizer.save_pretrained(tmp_path)
    loaded = load_policy_model(ModelConfig(path=str(tmp_path)), corpus=(), seed=0)
    tokens = torch.tensor([made.tokenizer.encode(CORPUS[0])])
    assert loaded.tokenizer.encode(CORPUS[0]) == tokens[0].tolist()
    assert loaded.tokenizer.chat_template == made.tokenizer.chat_template
    assert AutoTokenizer.from_pretrained(tmp_path).eos_token == TURN_END
    with torch.no_grad():
        assert torch.equal(loaded.model(tokens).logits, made.model(tokens).logits)


def test_the_renderer_takes_the_template_and_a_turn_starts_and_ends_in_one_token(tokenizer):
    renderer = Renderer(tokenizer, strict=True)
    end = tokenizer.convert_tokens_to_ids(TURN_END)
    assert renderer.stop_tokens == {end}
    opening = renderer.opening([Message("user", "amber")])
    assert [tokenizer.decode([t]) for t in opening] == ["<|user|>", "amber", "<|end|>", "<|assistant|>"]
    assert [tokenizer.decode([t]) for t in renderer.observation("amber")] == [
        "<|user|>",
        "amber",
        "<|end|>",
        "<|assistant|>",
    ]


def test_a_template_of_the_recipe_replaces_the_tokenizers_own():
    template = "{% for m in messages %}{{ m.content }}<|end|>{% endfor %}"
    loaded = load_policy_model(ModelConfig(scratch=SMALL, chat_template=template), corpus=CORPUS, seed=5)
    assert loaded.tokenizer.chat_template == template


@pytest.mark.parametrize(
    ("config", "said"),
    [
        (ModelConfig(path="/no/such/model"), r"model.path '/no/such/model' is no directory here"),
        (ModelConfig(scratch=SMALL.model_copy(update={"vocabulary": 300})), r"vocabulary is 300; .* need at least"),
        (ModelConfig(scratch=SMALL.model_copy(update={"heads": 3})), r"hidden_size 32 must be a multiple of heads 3"),
    ],
)
def test_what_cannot_be_built_is_one_line(config: ModelConfig, said: str):
    with pytest.raises(ConfigError, match=said) as caught:
        load_policy_model(config, corpus=CORPUS, seed=0)
    assert "\n" not in str(caught.value)


def test_a_directory_without_a_model_and_a_missing_gguf_file_are_refused(tmp_path: Path):
    with pytest.raises(ConfigError, match="cannot be loaded as a causal LM"):
        load_policy_model(ModelConfig(path=str(tmp_path)), corpus=(), seed=0)
    with pytest.raises(ConfigError, match=r"gguf_file 'a.gguf' is not in"):
        load_policy_model(ModelConfig(path=str(tmp_path), gguf_file="a.gguf"), corpus=(), seed=0)


def test_no_corpus_is_refused_for_a_model_from_scratch():
    with pytest.raises(ConfigError, match="no training texts"):
        load_policy_model(ModelConfig(scratch=SMALL), corpus=(), seed=0)


@pytest.mark.parametrize("path", ["nodir", "./nodir", "~/nodir", "a/b/c", "nodir/", "folder/nodir", "file", "a b/c"])
def test_a_path_that_can_only_be_here_is_refused_without_asking_the_hub(
    path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"model\.path .* (no directory here|is not in the folder|is a file)"):
        check_model_path(path)


def test_directories_and_names_of_the_hub_pass(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder").mkdir()
    for path in ("", "folder", str(tmp_path), "Qwen/Qwen3-0.6B", "openai-community/gpt2"):
        check_model_path(path)


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """A hub on this machine that has the model "here/it" alone, and an empty cache; what it was asked about models."""
    asked: list[str] = []

    class Hub(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.extend([self.path] if self.path.startswith("/api/models") else [])  # not of its own start
            found = self.path.startswith("/api/models/here/it")
            self.send_response(200 if found else 404 if "missing" in self.path else 503)
            self.end_headers()
            self.wfile.write(b'{"id": "here/it"}' if found else b"{}")

        def log_message(self, *args: object) -> None:
            pass

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    with ThreadingHTTPServer(("127.0.0.1", 0), Hub) as server:
        monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{server.server_port}")
        threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
        yield asked
        server.shutdown()


@pytest.mark.parametrize("name", ["owner/missing", "owner/busy"])
def test_a_model_that_the_hub_does_not_give_is_told_after_one_question(
    name: str, hub: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(ConfigError, match=rf"model\.path '{name}' is no directory here .* the hub does not give it"):
        load_policy_model(ModelConfig(path=name), corpus=(), seed=0)
    assert len(hub) == 1
    assert not caplog.records


def test_without_a_network_a_missing_model_is_told_at_once(hub: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    begun = time.monotonic()
    with pytest.raises(ConfigError, match="make the hub reachable") as failure:
        check_model("owner/missing")
    assert time.monotonic() - begun < 5
    assert "\n" not in str(failure.value)


def test_a_model_of_the_hub_passes_and_one_in_its_cache_asks_nobody(hub: list[str], tmp_path: Path) -> None:
    check_model("here/it")
    assert len(hub) == 1
    snapshot = tmp_path / "cache" / "models--owner--kept" / "snapshots" / "0123"
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text("{}")
    check_model("owner/kept")
    assert len(hub) == 1
