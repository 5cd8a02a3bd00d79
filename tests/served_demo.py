"""A real local HTTP server that computes a model's log-probabilities with transformers, as vLLM and others serve them."""

import json
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any

import torch

from mlflow_compress.models.loading import LoadedModel
from tests.judge_server import Raw, RawHandler, listening

NAME = "demo-served"
Fault = Callable[[int, dict[str, Any]], Raw | None]
"""From a request's number (0, 1, ...) and body to a faulty response, or None for the true answer."""


@lru_cache(maxsize=512)  # tests ask for the same texts again and again
@torch.no_grad()
def _logprobs(model: Any, weights: tuple[float, ...], ids: tuple[int, ...]) -> torch.Tensor:
    return torch.log_softmax(model(torch.tensor([ids])).logits[0].double(), dim=-1)


@dataclass
class ServedDemo:
    """What the server saw, how it behaves, and where it is.

    Kinds: "vllm" (ids, echo, names by ids), "text" (text prompts and names, echo), "shifted" (as "text", and lists of the
    position after: llama-cpp-python without a BOS token), "no_echo" (ignores echo), "llama.cpp" (its own route), "sharp"
    (vllm with another temperature where it writes).
    """

    base_url: str
    loaded: LoadedModel
    kind: str = "vllm"
    max_logprobs: int = 20
    lists: bool = True  # takes lists of prompts, where it takes ids
    by_position: bool = True  # knows prompt_logprobs, as a vLLM does
    max_length: int = 1024  # tokens that it says it reads
    chat: str | None = None  # written before every conversation: "" for the model's own template; None: it has no chat
    adapters: dict[str, LoadedModel] = field(default_factory=dict)  # further names at this server, as a vLLM has them
    before_token: Callable[[], object] = lambda: None  # called before each token of a stream
    fault: Fault = lambda number, body: None
    bodies: list[dict[str, Any]] = field(default_factory=list)
    answered: Counter[str] = field(default_factory=Counter)

    def logprobs(self, ids: list[int]) -> torch.Tensor:
        """Return the log-probabilities of the next token after each of `ids`."""
        model = self.loaded.model
        first = tuple(weight.flatten()[0].item() for weight in model.parameters())  # tests change weights in place
        return _logprobs(model, first, tuple(ids))

    def name(self, token: int, *, ids: bool) -> str:
        return f"token_id:{token}" if ids else self.loaded.tokenizer.decode([token])

    def completion(self, body: dict[str, Any]) -> dict[str, Any] | tuple[int, str]:
        """Return the completion that this server gives, or a status and why."""
        as_text = self.kind in ("text", "shifted")
        prompt = body["prompt"]
        if self.lists and not as_text and isinstance(prompt, list) and isinstance(prompt[0], list):
            replies = [self.completion({**body, "prompt": one}) for one in prompt]
            parts = [reply for reply in replies if isinstance(reply, dict)]
            if len(parts) < len(replies):
                return replies[0]
            choices = [{**part["choices"][0], "index": index} for index, part in enumerate(parts)]
            usage = {name: sum(part["usage"][name] for part in parts) for name in parts[0]["usage"]}
            return {**parts[0], "choices": choices[::-1], "usage": usage}  # clients go by the index
        if not isinstance(prompt, str) and (as_text or not isinstance(prompt[0], int)):
            return 422, "prompt: Input should be a valid string"
        k, asked = body.get("logprobs"), body.get("prompt_logprobs")
        if asked is not None:
            if not self.by_position:
                return 400, "prompt_logprobs: Extra inputs are not permitted"
            found = self.completion({**body, "logprobs": asked, "prompt_logprobs": None})
            return found if isinstance(found, tuple) else told_by_position(found)
        if k is not None and k > self.max_logprobs:
            return 400, f"Requested sample logprobs of {k}, which is greater than max allowed: {self.max_logprobs}"
        tokenizer = self.loaded.tokenizer
        ids = tokenizer(prompt)["input_ids"] if isinstance(prompt, str) else list(prompt)
        n_prompt, most = len(ids), body.get("max_tokens", 16)
        by_ids = not as_text and bool(body.get("return_tokens_as_token_ids"))
        bias = {int(token): value for token, value in (body.get("logit_bias") or {}).items()}
        echo = bool(body.get("echo")) and self.kind != "no_echo"
        rows = self.logprobs(ids)
        written: list[int] = []
        shown: list[torch.Tensor] = list(rows)
        while len(written) < most:
            last = self.logprobs([*ids, *written])[-1] if written else rows[-1]
            biased = last.clone()
            for token, value in bias.items():
                biased[token] += value
            token = int(biased.argmax())
            written.append(token)
            if len(written) > 1:
                shown.append(last)
            text = tokenizer.decode(written)
            if (token == tokenizer.eos_token_id and not body.get("ignore_eos")) or any(
                stop in text for stop in body.get("stop") or []
            ):
                break
        every = [*ids, *written]
        after = self.kind == "shifted" and echo  # the distribution after the token itself
        sources = [*shown, self.logprobs(every)[-1]] if after else [None, *shown]
        if self.kind == "sharp" and not echo:
            sources = [row if row is None else torch.log_softmax(row * 2, dim=-1) for row in sources]
        begin = 0 if echo else n_prompt
        entries = []
        for place in range(begin, len(every)):
            row, token = sources[place], every[place]
            if row is None or place == 0:
                entries.append((self.name(token, ids=by_ids), None, None))
                continue
            values, best = row.topk(k or 1)
            top = {self.name(int(i), ids=by_ids): float(v) for i, v in zip(best, values, strict=True)}
            top[self.name(token, ids=by_ids)] = float(row[token])
            entries.append((self.name(token, ids=by_ids), float(row[token]), top))
        texts = tokenizer.decode(every if echo else written, skip_special_tokens=True)
        for stop in body.get("stop") or []:
            texts = texts.split(stop)[0]
        logprobs = {
            "tokens": [e[0] for e in entries],
            "token_logprobs": [e[1] for e in entries],
            "top_logprobs": [e[2] for e in entries],
        }
        return {
            "object": "text_completion",
            "model": NAME,
            "choices": [{"index": 0, "text": texts, "logprobs": logprobs if k is not None else None}],
            "usage": {"prompt_tokens": n_prompt, "completion_tokens": len(written)},
        }

    def chat_completion(self, body: dict[str, Any]) -> dict[str, Any] | tuple[int, str]:
        """Return the chat completion: the conversation in the template, answered up to the token that ends it."""
        tokenizer = self.loaded.tokenizer
        text = tokenizer.apply_chat_template(body["messages"], tokenize=False, add_generation_prompt=True)
        prompt = tokenizer(f"{self.chat}{text}", add_special_tokens=False)["input_ids"]
        settings = {name: body[name] for name in ("max_tokens", "temperature")}
        found = self.completion({"prompt": prompt, "stop": ["<|end|>"], **settings})
        if isinstance(found, tuple):
            return found
        message = {"role": "assistant", "content": found["choices"][0]["text"]}
        return {"model": NAME, "choices": [{"index": 0, "message": message}], "usage": found["usage"]}

    def native(self, body: dict[str, Any]) -> dict[str, Any]:
        """Return what llama.cpp's /completion gives for one token."""
        row = self.logprobs(body["prompt"])[-1]
        biased = row.clone()
        for token, value in body.get("logit_bias") or []:
            biased[token] += value
        token = int(biased.argmax())
        values, best = row.topk(body["n_probs"])
        top = [{"id": int(i), "logprob": float(v)} for i, v in zip(best, values, strict=True)]
        written = {"id": token, "logprob": float(row[token]), "top_logprobs": top}
        read = {"model": NAME, "tokens_evaluated": len(body["prompt"]), "truncated": False}
        return {"completion_probabilities": [written], **read}

    def page(self, path: str) -> dict[str, Any] | None:
        """Return what a GET of this path gives; None for nothing."""
        vllm = self.kind in ("vllm", "sharp")
        base = {"id": NAME, **({"max_model_len": self.max_length, "root": "demo"} if vllm else {})}
        adapters = [{"id": name, "root": f"/adapters/{name}", "parent": NAME} for name in self.adapters]
        unnamed = {"id": ["no text"], "parent": ["none"]}  # what no server should list
        pages: dict[str, dict[str, Any]] = {"/v1/models": {"data": [unnamed, base, *adapters]}}
        if vllm:
            pages["/version"] = {"version": "0.0.1"}
        if self.kind == "llama.cpp":
            pages["/props"] = {"build_info": "b1-test", "default_generation_settings": {"n_ctx": 1024}}
        return pages.get(path)

    def answer(self, path: str, body: dict[str, Any]) -> dict[str, Any] | tuple[int, str]:
        """Return the answer to a POST."""
        if (adapted := self.adapters.get(body.get("model", NAME))) is not None:
            found = replace(self, loaded=adapted, adapters={}).answer(path, body)
            return found if isinstance(found, tuple) else {**found, "model": body["model"]}
        if path == "/v1/completions":
            if self.kind == "llama.cpp":
                return self.completion({**body, "echo": False})
            return self.completion(body)
        if path == "/v1/chat/completions" and self.chat is not None:
            return self.chat_completion(body)
        if path == "/completion" and self.kind == "llama.cpp":
            return self.native(body)
        if path == "/tokenize" and self.kind == "llama.cpp":
            return {"tokens": self.loaded.tokenizer(body["content"])["input_ids"]}
        return 404, "no such page"


def told_by_position(reply: dict[str, Any]) -> dict[str, Any]:
    """Return an echo as vLLM gives it for prompt_logprobs, with return_token_ids."""
    for choice in reply["choices"]:
        told = choice["logprobs"]
        ids = [int(name.removeprefix("token_id:")) for name in told["tokens"]]
        shown = [
            top and {name.removeprefix("token_id:"): {"logprob": value} for name, value in top.items()}
            for top in told["top_logprobs"]
        ]
        choice |= {"logprobs": None, "prompt_token_ids": ids, "prompt_logprobs": shown}
    return reply


@contextmanager
def served_demo(loaded: LoadedModel, *, kind: str = "vllm", **behaviour: Any) -> Iterator[ServedDemo]:
    """Serve a loaded model on 127.0.0.1 until the block ends."""
    state = ServedDemo("", loaded, kind, **behaviour)
    lock, computing = threading.Lock(), threading.Lock()

    class Handler(RawHandler):
        def do_GET(self) -> None:
            found = state.page(self.path)
            self.send_raw(Raw(json.dumps(found or {}).encode(), 200 if found is not None else 404))

        def send_stream(self, found: dict[str, Any]) -> None:
            """Send a completion as a stream, a token an event."""
            self.send_response(200)
            self.send_header("Content-Type", "text/event-stream")
            self.end_headers()
            for token in found["choices"][0]["logprobs"]["tokens"]:
                state.before_token()
                event = {"choices": [{"text": "", "logprobs": {"tokens": [token]}}]}
                self.wfile.write(f"data: {json.dumps(event)}\n\n".encode())
                self.wfile.flush()
            self.wfile.write(b"data: [DONE]\n\n")

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            with lock:
                number = len(state.bodies)
                state.bodies.append({"path": self.path, **body})
            faulty = state.fault(number, body)
            if faulty is not None:
                self.send_raw(faulty)
                return
            with computing:
                found = state.answer(self.path, body)
            if body.get("stream") and not isinstance(found, tuple):
                self.send_stream(found)
                return
            if isinstance(found, tuple):
                self.send_raw(Raw(json.dumps({"error": {"message": found[1]}}).encode(), found[0]))
                return
            with lock:
                state.answered[json.dumps(body, sort_keys=True)] += 1
            self.send_raw(Raw(json.dumps(found).encode()))

    with listening(Handler) as state.base_url:
        yield state
