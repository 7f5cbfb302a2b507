"""Messages to tokens through a model's own chat template, each text tokenised exactly once.

The stream of a trajectory is: the opening (the templated conversation with the generation prompt), a sampled turn, an
observation, a sampled turn, ... An observation is what the template puts between the end of one assistant turn and the
start of the next. It is found by rendering a dummy conversation whose assistant turn is a marker and taking the text
after the marker, so that a template which rewrites earlier turns (Qwen3 drops their thinking) still gives it: the
stream keeps every sampled token as it was sampled.

A special token that is spelled out in a message or an observation ("<|im_end|>" in a file that the agent reads) is
tokenised as plain text: nothing but the template can end a turn or start one.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping, Sequence
from typing import Any

from deepswe.errors import PolicyError, boundary
from deepswe.policy.base import ObservationRole
from deepswe.tools.calls import parse_call
from deepswe.types import Message, ToolCall

OPENINGS, OBSERVATIONS, COMPLETIONS = 64, 256, 64
"""Of so many texts, those used last, the tokens are kept."""
_MARKER = "\ue0f1turn\ue0f2"
_PROBE = "\ue0f1text\ue0f2"
_PROBES = ("", " \n a\t\n\n ", "{{ a }}{% b %}", "<think>\na\n</think>\n\nb", "<tool_response>\na\n</tool_response>")
_THOUGHT = "\ue0f1thought\ue0f2"


class Renderer:
    """Renders for one tokenizer with a chat template.

    Args:
        tokenizer: a `transformers.PreTrainedTokenizerFast` whose `chat_template` is set.
        strict: refuse a template that rewrites earlier turns, such as one that drops their thinking. Otherwise the
            stream keeps what the template would have dropped (see `rewrites_history`).
        tools: declarations (`Tool.schema()`) that the template itself puts before the model, for native calls.
            Observations then have the role "tool".
        thinking: False asks the template for its non-thinking mode (`enable_thinking=False`).

    Raises:
        PolicyError: there is no template, it refuses a conversation of system, user and assistant turns, it changes
            the text of a turn, or its turns do not end in a single special token; or tools are given and it does not
            declare them, or writes calls in another way than `deepswe.tools.calls` reads; or it has no non-thinking
            mode and is asked for it.
    """

    def __init__(
        self,
        tokenizer: Any,
        *,
        strict: bool = False,
        tools: Sequence[Mapping[str, Any]] = (),
        thinking: bool = True,
    ) -> None:
        if not getattr(tokenizer, "chat_template", None):
            raise PolicyError("the tokenizer has no chat template; set model.chat_template in the recipe")
        self._tokenizer = tokenizer
        # The encoder itself: the same ids and texts as the tokenizer's, at a quarter of its cost on short ones.
        self._encoder = tokenizer.backend_tokenizer
        # The attempts of a group begin alike, and often see the same; scripts end alike.
        self._opened = functools.lru_cache(maxsize=OPENINGS)(self._open)
        self._observed = functools.lru_cache(maxsize=OBSERVATIONS)(self._observe)
        self._completed = functools.lru_cache(maxsize=COMPLETIONS)(self._complete)
        self._tools = [dict(declaration) for declaration in tools]
        if not thinking and "enable_thinking" not in str(tokenizer.chat_template):
            raise PolicyError(
                "agent.thinking is false, but the chat template knows no enable_thinking; leave it true, or use a "
                "template with a non-thinking mode"
            )
        self._options = {} if thinking else {"enable_thinking": False}
        self._role: ObservationRole = "tool" if tools else "user"
        self._special: dict[str, int] = {
            str(token): int(token_id)
            for token_id, token in tokenizer.added_tokens_decoder.items()
            if token.special and str(token)
        }
        longest_first = sorted(self._special, key=len, reverse=True)
        self._special_pattern = re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")
        self._turn_end, self._stop = self._find_turn_end()
        eos = tokenizer.eos_token_id
        self.stop_tokens = frozenset({self._stop} if eos is None else {self._stop, int(eos)})
        """The id with which the template ends an assistant turn, and the tokenizer's end-of-sequence id if any."""
        self._frames: dict[ObservationRole, tuple[str, str]] = {self._role: self._frame(self._role)}
        self._verbatim: dict[ObservationRole, bool] = {}
        self.rewrites_history = not self._keeps_thinking()
        """Whether the template itself would drop the thinking of earlier turns; the stream never does."""
        if strict and self.rewrites_history:
            raise PolicyError(
                "the chat template drops the thinking (<think>...</think>) of earlier assistant turns, so no "
                "append-only stream equals it; use a template that keeps it, or allow it with strict=False"
            )
        if tools:
            self._check_native()

    def opening(self, messages: Sequence[Message]) -> tuple[int, ...]:
        """The templated conversation with the generation prompt.

        Raises:
            PolicyError: the template refuses the conversation or drops the text of a message.
        """
        return self._opened(tuple(messages))

    def _open(self, messages: tuple[Message, ...]) -> tuple[int, ...]:
        masked, hidden = self._mask_all([message.content for message in messages])
        rendered = self._render([(message.role, text) for message, text in zip(messages, masked, strict=True)])
        return self._encode_masked(rendered, hidden)

    def observation(
        self, text: str, *, role: ObservationRole | None = None, truncated: bool = False
    ) -> tuple[int, ...]:
        """What the template puts between the end of a turn and the start of the next, around `text`.

        Args:
            text: what the environment answered.
            role: "tool" needs a template that knows it; None is "tool" where tools are declared, else "user".
            truncated: the sampled turn did not end in a stop token; the tokens then begin with the end of that turn.

        Raises:
            PolicyError: the template refuses the role.
        """
        return (self._turn_end if truncated else ()) + self._observed(text, role or self._role)

    def _observe(self, text: str, role: ObservationRole) -> tuple[int, ...]:
        (masked,), hidden = self._mask_all([text])
        return self._encode_masked(self._after_turn(role, masked), hidden)

    def completion(self, text: str) -> tuple[int, ...]:
        """The tokens of a scripted turn: its text, no special token read out of it, and the end of the turn."""
        return self._completed(text)

    def _complete(self, text: str) -> tuple[int, ...]:
        return (*self._encode_plain(text), *self._turn_end)

    def decode(self, tokens: Sequence[int]) -> str:
        """The text of a sampled turn, without the stop token that ended it."""
        kept = tokens[:-1] if tokens and tokens[-1] in self.stop_tokens else tokens
        return self._text(kept)

    def read_observation(self, tokens: Sequence[int]) -> str:
        """The text of an observation, found between what the template puts around it.

        Raises:
            PolicyError: the tokens are none of an observation.
        """
        count = len(self._turn_end)
        whole = self._text(tokens[count:] if tuple(tokens[:count]) == self._turn_end else tokens)
        for role in ("tool", "user"):
            before, after = self._frames.get(role) or self._frames.setdefault(role, self._frame(role))
            if len(whole) >= len(before) + len(after) and whole.startswith(before) and whole.endswith(after):
                return whole[len(before) : len(whole) - len(after)]
        raise PolicyError(f"{whole[:80]!r} is no observation of this template; pass what observation() made")

    def _find_turn_end(self) -> tuple[tuple[int, ...], int]:
        lead, _ = self._split_after_turn(self._render([("user", "."), ("assistant", _MARKER), ("user", ".")]))
        tokens = self._encode(lead)
        return tokens, tokens[-1]

    def _split_after_turn(self, rendered: str) -> tuple[str, str]:
        """Split the text after the marked turn: up to and with its stop token, and the rest."""
        _, found, after = rendered.partition(_MARKER)
        if not found:
            raise PolicyError("the chat template drops or changes the text of an assistant turn; use another template")
        end = self._special_pattern.search(after)
        if end is None:
            raise PolicyError(
                f"the chat template ends a turn with {after[:20]!r}, which holds no special token; a turn must end in "
                "a single special token (known: " + ", ".join(sorted(self._special)) + ")"
            )
        return after[: end.end()], after[end.end() :]

    def _after_turn(self, role: ObservationRole, text: str) -> str:
        """What stands after the end of a turn. A template that puts every probe in as it is, is not asked again."""
        if role not in self._frames:
            self._frames[role] = self._frame(role)
        before, rest = self._frames[role]
        if role not in self._verbatim:
            self._verbatim[role] = all(self._render_after(role, p) == before + p + rest for p in _PROBES)
        return before + text + rest if self._verbatim[role] else self._render_after(role, text)

    def _render_after(self, role: ObservationRole, text: str) -> str:
        return self._split_after_turn(self._render([("user", "."), ("assistant", _MARKER), (role, text)]))[1]

    def _frame(self, role: ObservationRole) -> tuple[str, str]:
        _, after = self._split_after_turn(self._render([("user", "."), ("assistant", _MARKER), (role, _PROBE)]))
        before, found, rest = after.partition(_PROBE)
        if not found:
            raise PolicyError(f"the chat template drops the text of a {role!r} message; use another role or template")
        return before, rest

    def _keeps_thinking(self) -> bool:
        turn = f"<think>\n{_THOUGHT}\n</think>\n\n{_MARKER}"
        return _THOUGHT in self._render([("user", "."), ("assistant", turn), ("user", ".")])

    def _check_native(self) -> None:
        names = [str(declaration["function"]["name"]) for declaration in self._tools]
        declared = self._render([("system", "."), ("user", ".")])
        if missing := [name for name in names if name not in declared]:
            raise PolicyError(
                f"the chat template does not declare the tools {', '.join(missing)}; set agent.format to 'xml', or "
                "model.chat_template to one that takes tools"
            )
        call = ToolCall(names[0], {"cmd": _PROBE})
        function = {"name": call.name, "arguments": dict(call.arguments)}
        turn = {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": function}]}
        whole = self._apply([{"role": "user", "content": "."}, turn])
        if parse_call(whole[whole.rfind("<tool_call>") :], "native").call != call:
            raise PolicyError(
                "the chat template writes calls in a format of its own that is not read here (JSON between <tool_call> "
                "and </tool_call> is); set agent.format to 'xml'"
            )

    def _render(self, messages: Sequence[tuple[str, str]]) -> str:
        return self._apply([{"role": role, "content": content} for role, content in messages])

    def _apply(self, messages: Sequence[Mapping[str, Any]]) -> str:
        roles = ", ".join(str(message["role"]) for message in messages)
        with boundary(f"policy.render: the chat template refuses the roles {roles}", PolicyError):
            rendered = self._tokenizer.apply_chat_template(
                messages, tools=self._tools or None, tokenize=False, add_generation_prompt=True, **self._options
            )
        return str(rendered)

    def _mask_all(self, texts: Sequence[str]) -> tuple[list[str], list[str]]:
        """Put a placeholder for each special token that a text spells out; return the texts and what was replaced."""
        hidden: list[str] = []

        def mask(found: re.Match[str]) -> str:
            hidden.append(found.group())
            return f"\ue0f3{len(hidden) - 1}\ue0f4"

        return [self._special_pattern.sub(mask, text) for text in texts], hidden

    def _encode_masked(self, rendered: str, hidden: Sequence[str]) -> tuple[int, ...]:
        if not hidden:
            return self._encode(rendered)
        tokens: tuple[int, ...] = ()
        for index, piece in enumerate(re.split("\ue0f3([0-9]+)\ue0f4", rendered)):
            if index % 2 and int(piece) < len(hidden):
                tokens += self._encode_plain(hidden[int(piece)])
            else:
                tokens += self._encode(piece)
        return tokens

    def _encode(self, text: str, *, plain: bool = False) -> tuple[int, ...]:
        with boundary("policy.render", PolicyError):
            self._encoder.encode_special_tokens = plain
            return tuple(self._encoder.encode(text, add_special_tokens=False).ids)

    def _encode_plain(self, text: str) -> tuple[int, ...]:
        """No special token is read out of the text."""
        return self._encode(text, plain=True)

    def _text(self, tokens: Sequence[int]) -> str:
        with boundary("policy.render", PolicyError):
            return str(self._encoder.decode(list(tokens), skip_special_tokens=False))
