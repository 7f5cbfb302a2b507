"""The execution-free verifier behind any endpoint that speaks OpenAI's chat completions with log-probs, such as vLLM.

The answer is looked for in what the model wrote: the first whole word YES or NO after its thinking. The probability is
that of the alternatives at this place. A completion without such a word, or without log-probs there, is no answer.
"""

from __future__ import annotations

import asyncio
import json
import math
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from deepswe.errors import PolicyError
from deepswe.optional import optional_module
from deepswe.scaling.verifier_prompt import (
    ANSWERS,
    ApproximateTokens,
    Reading,
    Style,
    condense,
    messages_of,
)

_WORD = re.compile(r"\b(YES|NO)\b", re.IGNORECASE)
_RETRIED = (408, 409, 425, 429, 500, 502, 503, 504)


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Where the verifier is.

    Attributes:
        url: base of the interface, such as "http://localhost:8000/v1".
        model: its name there.
        key_variable: environment variable that holds the key; the key itself is never written anywhere.
        style, budget: of the prompt; the budget is in pieces of at most four letters.
        max_tokens: of the completion, thinking included.
        alternatives: log-probs asked for at each place.
        concurrency: requests at once.
        timeout_s: for one request.
        retries: new tries of a request that failed for the moment.
        pause_s: before the first new try; doubled with each.
    """

    url: str
    model: str
    key_variable: str = "OPENAI_API_KEY"
    style: Style = "full"
    budget: int = 24_000
    max_tokens: int = 16
    alternatives: int = 20
    concurrency: int = 8
    timeout_s: float = 300.0
    retries: int = 4
    pause_s: float = 1.0


class ApiJudge:
    """A verifier behind an endpoint. See `deepswe.scaling.verifier.Judge`."""

    def __init__(self, endpoint: Endpoint) -> None:
        """Name it; nothing is asked yet.

        Raises:
            ConfigError: aiohttp is not installed.
        """
        self._http = optional_module("aiohttp", "synth", "ask a verifier behind an endpoint")
        self.endpoint = endpoint

    async def judge(self, readings: Sequence[Reading]) -> list[float | None]:
        """That each is right; None where the completion holds no answer with log-probs.

        Raises:
            PolicyError: the endpoint cannot be asked, or answers with something else than chat completions.
        """
        gate = asyncio.Semaphore(self.endpoint.concurrency)
        limit = self._http.ClientTimeout(total=self.endpoint.timeout_s)
        async with self._http.ClientSession(timeout=limit) as session:

            async def one(reading: Reading) -> float | None:
                async with gate:
                    return _read(await self._ask(session, reading))

            asked = [asyncio.create_task(one(reading)) for reading in readings]
            try:
                return list(await asyncio.gather(*asked))
            finally:
                for task in asked:
                    task.cancel()
                await asyncio.gather(*asked, return_exceptions=True)

    async def _ask(self, session: Any, reading: Reading) -> Mapping[str, Any]:
        endpoint = self.endpoint
        short = condense(reading, ApproximateTokens(), endpoint.budget)
        messages = [{"role": m.role, "content": m.content} for m in messages_of(short, endpoint.style)]
        body = {
            "model": endpoint.model,
            "messages": messages,
            "max_tokens": endpoint.max_tokens,
            "temperature": 0.0,
            "logprobs": True,
            "top_logprobs": endpoint.alternatives,
        }
        key = os.environ.get(endpoint.key_variable, "")
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        url = endpoint.url.rstrip("/") + "/chat/completions"
        for attempt in range(endpoint.retries + 1):
            status, text = await self._post(session, url, body, headers)
            if status == 200:
                return _choice(text, url)
            if status and status not in _RETRIED:
                break
            if attempt < endpoint.retries:
                await asyncio.sleep(endpoint.pause_s * 2**attempt)
        what = f"answered {status}: {text[:200]}" if status else f"cannot be asked: {text}"
        raise PolicyError(f"verifier {url} {what}; what was scored is kept, start again to go on")

    async def _post(self, session: Any, url: str, body: Any, headers: Mapping[str, str]) -> tuple[int, str]:
        """Status and text; status 0 where no answer came."""
        try:
            async with session.post(url, json=body, headers=headers, allow_redirects=False) as response:
                if 300 <= response.status < 400:
                    place = response.headers.get("Location", "")[:120]
                    return int(response.status), f"a redirect to {place!r}, which is not followed; give its address"
                return int(response.status), str(await response.text(errors="replace"))
        except (self._http.ClientError, OSError, TimeoutError) as error:
            return 0, f"{type(error).__name__} {error}"


def _choice(text: str, url: str) -> Mapping[str, Any]:
    try:
        choice = json.loads(text)["choices"][0]
    except (ValueError, KeyError, IndexError, TypeError, RecursionError) as error:
        raise PolicyError(f"verifier {url} answered with no chat completion: {text[:200]}") from error
    if not isinstance(choice, Mapping):
        raise PolicyError(f"verifier {url} answered with a choice that is no object: {text[:200]}")
    return choice


def _read(choice: Mapping[str, Any]) -> float | None:
    try:
        return read_answer(choice)
    except (AttributeError, TypeError, ValueError) as error:
        raise PolicyError(f"the verifier's log-probs cannot be read ({error}): {str(choice)[:200]}") from error


def read_answer(choice: Mapping[str, Any]) -> float | None:
    """P(YES) / (P(YES) + P(NO)) at the place of the answer, or None where there is no answer or no log-prob.

    A token stands for an answer if its letters begin it: "Y", " YES" and "yes" do, "NOT" and "Yesterday" do not. An
    answer that is not among the alternatives has the probability 0.

    Args:
        choice: of a chat completion with log-probs.
    """
    rows = (choice.get("logprobs") or {}).get("content") or []
    texts = [str(row.get("token", "")) for row in rows]
    whole = "".join(texts)
    thought = whole.rfind("</think>")
    found = _WORD.search(whole, thought + 8 if thought >= 0 else 0)
    if found is None:
        return None
    end = 0
    for row, text in zip(rows, texts, strict=True):
        end += len(text)
        if end > found.start():
            return _share(row)
    return None


def _share(row: Mapping[str, Any]) -> float | None:
    alternatives = {str(a.get("token", "")): a.get("logprob") for a in [row, *(row.get("top_logprobs") or [])]}
    masses = dict.fromkeys(ANSWERS, 0.0)
    for text, logprob in alternatives.items():
        word = text.strip("\"'`*<>/:. \n\t_").upper()
        for answer in ANSWERS:
            if word and answer.startswith(word) and isinstance(logprob, int | float) and logprob <= 0.0:
                masses[answer] += math.exp(logprob)
    whole = math.fsum(masses.values())
    return masses[ANSWERS[0]] / whole if whole > 0.0 else None
