"""What one model of an endpoint accepts, found out from its refusals.

OpenAI's reasoning models refuse ``max_tokens`` and every temperature but 1; some templates of vLLM and llama.cpp refuse
a system message. Other endpoints know ``max_tokens`` alone. So the first call is FastChat's, and each refusal that
names a parameter changes it for this and all later calls.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

REASONING_ROOM = 4
"""Models that want ``max_completion_tokens`` reason before they answer: room for the answer, times this."""

_LENGTH = re.compile(r"max_completion_tokens", re.IGNORECASE)
_TEMPERATURE = re.compile(r"temperature", re.IGNORECASE)
_SYSTEM = re.compile(r"system.{0,20}role|role.{0,60}system|system message", re.IGNORECASE | re.DOTALL)


@dataclass
class Dialect:
    """The settings that one model accepts. It starts with FastChat's: temperature 0 and ``max_tokens``.

    Attributes
    ----------
    temperature, system : bool
        Whether temperature 0, and a system message, are sent.
    length : {"max_tokens", "max_completion_tokens"}
        Name of the parameter that limits a reply.
    first : asyncio.Lock
        Held during the first call, so that only one call finds out.
    settled : bool
        Whether the first call is over.
    """

    temperature: bool = True
    length: str = "max_tokens"
    system: bool = True
    settled: bool = False
    first: asyncio.Lock = field(default_factory=asyncio.Lock)

    def settings(self, max_tokens: int) -> dict[str, Any]:
        """Return the settings of a request whose visible reply may have `max_tokens` tokens."""
        room = max_tokens if self.length == "max_tokens" else REASONING_ROOM * max_tokens
        return {**({"temperature": 0} if self.temperature else {}), self.length: room}

    def messages(self, given: Sequence[dict[str, str]]) -> list[dict[str, str]]:
        """Return the messages; where no system message is accepted, its text stands before the user's."""
        if self.system:
            return list(given)
        system = [message["content"] for message in given if message["role"] == "system"]
        others = [message for message in given if message["role"] != "system"]
        return [{**others[0], "content": "\n\n".join([*system, others[0]["content"]])}, *others[1:]]

    def described(self, settings: dict[str, Any]) -> dict[str, Any]:
        """Return what the record of a reply says about its request."""
        return settings if self.system else {**settings, "system": "in the user's message"}

    def learn(self, refusal: str) -> bool:
        """Change what the endpoint's message refuses. Return whether the call should be made again.

        Parameters
        ----------
        refusal : str
            Message and parameter name of an HTTP 400 or 422.
        """
        if self.length == "max_tokens" and _LENGTH.search(refusal):
            self.length = "max_completion_tokens"
        elif self.temperature and _TEMPERATURE.search(refusal):
            self.temperature = False
        elif self.system and _SYSTEM.search(refusal):
            self.system = False
        else:
            return False
        return True
