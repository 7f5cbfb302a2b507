"""Issue texts by a language model, through any endpoint that speaks OpenAI's chat completions. Optional.

The model is given the draft that was written without it, never the patch, the tests or the code. What it answers is
checked for leaks by the caller, like the draft.
"""

from __future__ import annotations

import asyncio
import json
import os
from dataclasses import dataclass
from typing import Any

from deepswe.errors import TaskError
from deepswe.optional import optional_module

MIN_CHARACTERS, MAX_CHARACTERS = 40, 6000
_PROMPT = """Rewrite this bug report as the user of a library would write it on an issue tracker. Keep every code
block, every value and every error message exactly as it is; invent nothing. Do not guess where the bug is or how to
repair it, and mention no tests. Answer with the report alone, in Markdown."""


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Where a language model is.

    Attributes:
        url: base of the interface, such as "http://localhost:8000/v1".
        model: its name there.
        key_variable: environment variable that holds the key; the key itself is never written anywhere.
        timeout_s: for one answer.
        temperature: of sampling.
    """

    url: str
    model: str
    key_variable: str = "OPENAI_API_KEY"
    timeout_s: float = 60.0
    temperature: float = 0.7


class LanguageWriter:
    """Rewrites issues with a language model. Failures are counted, and the draft is then kept by the caller."""

    def __init__(self, endpoint: Endpoint) -> None:
        """Name it; nothing is asked yet.

        Raises:
            ConfigError: aiohttp is not installed.
        """
        self._http = optional_module("aiohttp", "synth", "ask a language model")
        self.endpoint = endpoint
        self.failures = 0
        self.last_failure = ""

    def rewrite(self, draft: str, documentation: str, seed: int) -> str:
        """The report in other words; all code blocks of the draft must still be in it.

        Args:
            draft: the report.
            documentation: first paragraph of the docstring of what is called; "" if there is none.
            seed: passed on for endpoints that can repeat an answer.

        Raises:
            TaskError: the endpoint does not answer, or with something else than a report.
        """
        try:
            text = asyncio.run(self._ask(draft, documentation, seed))
            self._check(draft, text)
        except TaskError as error:
            self.failures += 1
            self.last_failure = str(error)
            raise
        return text.strip() + "\n"

    def _check(self, draft: str, text: str) -> None:
        if not MIN_CHARACTERS <= len(text) <= MAX_CHARACTERS:
            raise TaskError(f"the language model answered with {len(text)} characters, which is no report")
        lost = [block for block in code_blocks(draft) if block not in text]
        if lost:
            raise TaskError(f"the language model changed or dropped the code block {lost[0][:80]!r}")

    async def _ask(self, draft: str, documentation: str, seed: int) -> str:
        endpoint, http = self.endpoint, self._http
        said = f"\n\nDocumentation of what is called: {documentation}" if documentation else ""
        body: dict[str, Any] = {
            "model": endpoint.model,
            "messages": [{"role": "system", "content": _PROMPT}, {"role": "user", "content": draft + said}],
            "temperature": endpoint.temperature,
            "seed": seed,
        }
        key = os.environ.get(endpoint.key_variable, "")
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        url = endpoint.url.rstrip("/") + "/chat/completions"
        try:
            async with (
                http.ClientSession(timeout=http.ClientTimeout(total=endpoint.timeout_s)) as session,
                session.post(url, json=body, headers=headers, allow_redirects=False) as response,
            ):
                if 300 <= response.status < 400:
                    place = response.headers.get("Location", "")[:300]
                    raise TaskError(f"{url} answered {response.status}, a redirect to {place!r}; give that address")
                answer = await response.text(errors="replace")
                if response.status != 200:
                    raise TaskError(f"{url} answered {response.status}: {answer[:200]}")
        except (http.ClientError, OSError, TimeoutError) as error:
            raise TaskError(f"{url} cannot be asked: {type(error).__name__} {error}") from error
        return _content(answer, url)


def code_blocks(text: str) -> list[str]:
    """The contents of the fenced code blocks of a text."""
    parts = text.split("```")
    return [part.partition("\n")[2].rstrip("\n") for part in parts[1::2]]


def _content(answer: str, url: str) -> str:
    try:
        content = json.loads(answer)["choices"][0]["message"]["content"]
    except (ValueError, KeyError, IndexError, TypeError, RecursionError) as error:
        raise TaskError(f"{url} answered with something else than a chat completion: {answer[:200]}") from error
    if not isinstance(content, str):
        raise TaskError(f"{url} answered without a text")
    return content
