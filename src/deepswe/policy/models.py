"""The model and its tokenizer: a Hugging Face causal LM by name or path, or a small one built from scratch.

From scratch means the Qwen3 architecture with random weights and a byte-level BPE tokenizer trained on the suite's
own training texts. That tokenizer is made for a small model that copies code in few tokens: a line of code has the
same tokens wherever it stands, whatever its indentation or line number; a line break or a tab and the blanks after it
are one token; a word never joins another, except in the name of a Python file, which may be one token; digits stay
single, operators such as `>=` are one token; each string of the tool-call grammar that stands between two values is
one token, and so is the start of a turn. Any text comes back exactly, since every byte is in the vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GgufConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from deepswe.config import ModelConfig, ScratchModel
from deepswe.errors import ConfigError
from deepswe.policy.model_path import model_directory

END_OF_TEXT = "<|endoftext|>"
TURN_END = "<|end|>"
ROLES = ("system", "user", "assistant", "tool")
SPECIAL = (END_OF_TEXT, TURN_END, *(f"<|{role}|>" for role in ROLES))

CHAT_TEMPLATE = (
    "{% for message in messages %}<|{{ message.role }}|>{{ message.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
"""ChatML in spirit; the start of a turn is one token, and its end another."""

_TOOLS = ("execute_bash", "search", "file_editor", "finish")
_PARAMETERS = (
    *("cmd", "search_term", "command", "path", "file_text", "old_str", "new_str", "insert_line", "view_range"),
    *("concise", "result"),
)
GRAMMAR = (
    *(f"<function={tool}>\n" for tool in _TOOLS),
    *(f"<function={tool}>" for tool in _TOOLS),
    *(f"{lead}<parameter={name}>" for name in _PARAMETERS for lead in ("", "</parameter>\n")),
    *("</parameter>", "</parameter>\n</function>", "</function>"),
    *("view", "create", "str_replace", "insert", "undo_edit", "submit", "true", "false"),
)
"""Strings of the tool-call grammar that are one token each, the longest that fits first."""

_PIECES = r'[\n\t] *|[A-Za-z_]+\.py\b|[ _.]?[A-Za-z]+| ?[0-9]| {2,}| ?(?:"""|\):|//|[<>=!+\-*/%]=|[^\sA-Za-z0-9])|\s'
_POSITIONS = 4096
INITIAL_DEVIATION = 0.06
"""Standard deviation of the weights of a model from scratch; the usual 0.02 is meant for much wider models."""


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A causal LM with float32 weights, and its tokenizer.

    Attributes:
        model: a `transformers` causal LM in evaluation mode, on the CPU.
        tokenizer: a `PreTrainedTokenizerFast` with a chat template, unless a loaded one has none.
    """

    model: PreTrainedModel
    tokenizer: Any


def load_policy_model(config: ModelConfig, *, corpus: Iterable[str], seed: int) -> LoadedModel:
    """Load `config.path`, or build `config.scratch` when the path is empty.

    Args:
        config: the recipe's section.
        corpus: texts on which the tokenizer of a model from scratch is trained; unused for a loaded one.
        seed: seeds the weights of a model from scratch. The global generator of torch is left as it was.

    Raises:
        ConfigError: the path cannot be loaded, the corpus is empty, or sizes of the scratch model do not fit.
    """
    if config.path:
        loaded = _load(config)
    else:
        tokenizer = train_tokenizer(corpus, vocabulary=config.scratch.vocabulary)
        loaded = LoadedModel(build_model(config.scratch, tokenizer, seed=seed), tokenizer)
    if config.chat_template:
        loaded.tokenizer.chat_template = config.chat_template
    loaded.model.train(False)
    return loaded


def untie(model: Any) -> None:
    """Give the output matrix weights of its own, equal to the embedding's that it was tied to; in place."""
    text = model.config.get_text_config()
    if text.tie_word_embeddings:
        text.tie_word_embeddings = model.config.tie_word_embeddings = False
        model.get_output_embeddings().weight = torch.nn.Parameter(model.get_input_embeddings().weight.detach().clone())


def train_tokenizer(corpus: Iterable[str], *, vocabulary: int) -> PreTrainedTokenizerFast:
    """Train the tokenizer described at the top of this module; the same corpus gives the same tokenizer.

    Args:
        corpus: training texts.
        vocabulary: upper bound on its size, at least the 256 bytes and the special and grammar tokens.

    Raises:
        ConfigError: there is no text, or the bound is too low.
    """
    texts = [form for text in corpus for form in ((text, _numbered(text)) if "\n" in text else (text,))]
    added = len(GRAMMAR) + len(SPECIAL)
    if not any(texts):
        raise ConfigError("the suite has no training texts for a tokenizer; set model.path to a pre-trained model")
    if vocabulary < 256 + added:
        raise ConfigError(f"model.scratch.vocabulary is {vocabulary}; bytes and grammar need at least {256 + added}")
    raw = Tokenizer(models.BPE())
    raw.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_PIECES), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    raw.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary - added,
        min_frequency=2,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    raw.train_from_iterator(texts, trainer)
    raw.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in SPECIAL])
    raw.add_tokens([AddedToken(text, special=False, normalized=False) for text in GRAMMAR])
    return PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=raw,
        eos_token=TURN_END,
        pad_token=END_OF_TEXT,
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
        model_max_length=_POSITIONS,
    )


def _numbered(text: str) -> str:
    """A text as an editor shows it, so that a tab and the blanks after it become one token."""
    return "".join(f"{number}\t{line}" for number, line in enumerate(text.splitlines(keepends=True), 1))


def scratch_config(config: ScratchModel, *, vocabulary: int) -> Qwen3Config:
    """The architecture of a model from scratch.

    Raises:
        ConfigError: the hidden size is no multiple of the heads, or these are none of the key-value heads.
    """
    if config.hidden_size % config.heads or config.heads % config.key_value_heads:
        raise ConfigError(
            f"model.scratch: hidden_size {config.hidden_size} must be a multiple of heads {config.heads}, and heads "
            f"one of key_value_heads {config.key_value_heads}"
        )
    return Qwen3Config(
        vocab_size=vocabulary,
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_hidden_layers=config.layers,
        num_attention_heads=config.heads,
        num_key_value_heads=config.key_value_heads,
        head_dim=config.hidden_size // config.heads,
        max_position_embeddings=_POSITIONS,
        tie_word_embeddings=True,
        use_cache=True,
        bos_token_id=None,
        initializer_range=INITIAL_DEVIATION,
    )


def build_model(config: ScratchModel, tokenizer: Any, *, seed: int) -> Qwen3ForCausalLM:
    """A Qwen3 model with tied embeddings and weights drawn from `seed`.

    Raises:
        ConfigError: the hidden size is no multiple of the heads, or these are none of the key-value heads.
    """
    settings = scratch_config(config, vocabulary=len(tokenizer))
    settings.eos_token_id, settings.pad_token_id = tokenizer.eos_token_id, tokenizer.pad_token_id
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return Qwen3ForCausalLM(settings)


def _load(config: ModelConfig) -> LoadedModel:
    path = model_directory(config.path)
    options: dict[str, Any] = {}
    if config.gguf_file:
        from_file = Path(path, config.gguf_file)
        if Path(path).is_dir() and not from_file.is_file():
            raise ConfigError(f"model.gguf_file {config.gguf_file!r} is not in {path!r}; name a .gguf file there")
        options["gguf_file"] = config.gguf_file
    dequantize = {"quantization_config": GgufConfig(dequantize=True)} if config.gguf_file else {}
    try:
        tokenizer = AutoTokenizer.from_pretrained(path, **options)
        model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, **options, **dequantize)
    except (OSError, ValueError, KeyError, ImportError) as error:
        first = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise ConfigError(
            f"model.path {path!r} cannot be loaded as a causal LM ({first}); give a directory that save_pretrained "
            "wrote, a hub name that this machine can reach, or leave it empty for a model from scratch"
        ) from error
    return LoadedModel(model, tokenizer)
