"""Pages on which servers tell their name and version, their models, and their tokens."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import requests

from mlflow_compress.errors import EndpointError
from mlflow_compress.transport.endpoint import EndpointConfig

_SECONDS = 10.0


@dataclass(frozen=True)
class ServerPages:
    """What a server tells of itself.

    Attributes
    ----------
    endpoint : EndpointConfig
    card : mapping
        What it tells of the model; empty where it tells nothing.
    pages : mapping of str to mapping
        By name: "version" (vLLM), "get_server_info" (SGLang), "props" (llama.cpp).
    """

    endpoint: EndpointConfig
    card: Mapping[str, Any]
    pages: Mapping[str, Mapping[str, Any]]

    @classmethod
    def read(cls, endpoint: EndpointConfig, model: str) -> ServerPages:
        """Read the pages that are there."""
        names = ("version", "get_server_info", "props")
        found = {name: _page(endpoint, f"{endpoint.root}/{name}") for name in names}
        listed = (_page(endpoint, f"{endpoint.called_url.rstrip('/')}/models") or {}).get("data")
        cards = [card for card in listed if isinstance(card, dict)] if isinstance(listed, list) else []
        card = next((card for card in cards if card.get("id") == model), {})
        return cls(endpoint, card, {name: page for name, page in found.items() if page is not None})

    @property
    def server(self) -> str:
        """Name and version of the server, as far as it tells them."""
        names = {"props": ("llama.cpp", "build_info"), "get_server_info": ("SGLang", "version")}
        for page, (name, version) in {**names, "version": ("vLLM", "version")}.items():
            if page in self.pages:
                return f"{name} {self.pages[page].get(version, '')}".strip()
        return "a server that does not tell its name"

    @property
    def is_llama_cpp(self) -> bool:
        """Whether it is llama.cpp's own server."""
        return "props" in self.pages

    @property
    def root(self) -> str | None:
        """What the server says it has loaded under the model's name."""
        told = self.card.get("root") or self.pages.get("props", {}).get("model_path")
        return str(told) if told else None

    @property
    def max_length(self) -> int | None:
        """The server's context length, where it tells it."""
        settings = self.pages.get("props", {}).get("default_generation_settings")
        told = self.card.get("max_model_len") or (settings.get("n_ctx") if isinstance(settings, dict) else None)
        return int(told) if isinstance(told, int) and told > 0 else None

    def tokens_of(self, text: str) -> list[str]:
        """Return llama.cpp's tokens of a text, as servers name them.

        Raises
        ------
        EndpointError
            It does not tell them.
        """
        body: dict[str, str | bool] = {"content": text, "add_special": True}
        try:
            url, headers = f"{self.endpoint.root}/tokenize", _headers(self.endpoint)
            answer = requests.post(url, json=body, headers=headers, timeout=_SECONDS)
            found = answer.json()["tokens"] if answer.ok else None
        except (requests.RequestException, ValueError, KeyError, TypeError):
            found = None
        if not isinstance(found, list):
            raise EndpointError(f"{self.endpoint.where} does not tell its tokens", allowed="an answer of /tokenize")
        return [f"token_id:{token}" for token in found]


def _headers(endpoint: EndpointConfig) -> dict[str, str]:
    return {"Authorization": f"Bearer {endpoint.key}", **endpoint.headers}


def _page(endpoint: EndpointConfig, url: str) -> dict[str, Any] | None:
    """Return a page that a server may have; None where it has not."""
    try:
        answer = requests.get(url, headers=_headers(endpoint), timeout=_SECONDS)
        found = answer.json() if answer.ok else None
    except (requests.RequestException, ValueError):
        return None
    return found if isinstance(found, dict) else None
