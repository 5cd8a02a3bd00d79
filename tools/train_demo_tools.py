"""Rebuild the embedded model that calls tools, and its test prompts, from a seed.

The task: a system turn offers two or three of eight tools; a user asks for something, or only talks. The model calls
the tool that fits, answers in words where there is nothing to do, and says so where the tool is not offered. On "soft"
requests ("I wonder ...") the training text is of two minds, so that the trained model is unsure there, as models are.

Example
-------
python -m tools.train_demo_tools --out rebuilt
"""

import json
import random
import re
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from tools.demo_generator.small_models import Batch, fit, rebuild, save

SEED, STEPS, ROWS, PEAK_RATE, THREADS = 29, 1_000, 16, 1.5e-3, 1
VOCABULARY, CONTEXT = 512, 1024
TEST_PROMPTS = 300
SOFT_SHARES = (0.35, 0.5, 0.65, 0.8)  # Of the soft phrasings' training rows, how many call
TEMPLATE = (
    "{%- if tools %}<|system|>{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}<|end|>\n{% endif %}"
    "{%- for message in messages %}{{ '<|' + message['role'] + '|>' }}{{ message['content'] or '' }}"
    "{%- for call in message['tool_calls'] or [] %}{% set arguments = call.function.arguments %}"
    '{{ \'<tool_call>{"name": "\' + call.function.name + \'", "arguments": \' }}'
    "{{- arguments if arguments is string else arguments | tojson }}{{ '}</tool_call>' }}{% endfor %}"
    "{{- '<|end|>\n' }}{% endfor %}"
    "{%- if add_generation_prompt %}<|assistant|>{% endif %}"
)
TURNS = ("<|system|>", "<|user|>", "<|assistant|>", "<|tool|>", "<|end|>")
CALL_MARKS = ("<tool_call>", "</tool_call>")  # Not special: they stay in decoded text

LAYOUT = (  # What JSON repeats is one token each, so that prompts are short
    '{"type": "function", "function": {"name": "',
    '", "parameters": {"type": "object", "properties": {"',
    '": {"type": "',
    '", "enum": ["',
    '"}, "',
    '"]}, "',
    '"}}, "required": ["',
    '"]}}, "required": ["',
    '"]}}}\n',
    '{"name": "',
    '", "arguments": {"',
)

NAMES = re.findall(
    r"\w+",
    "Alba Bero Cora Dain Elin Faro Gil Hana Ivo Jora Kato Lira Milo Nara Oda Pavo Quin Rosa Sano Tara "
    "Ulan Vera Wim Xenia Yara Zeno Arlo Bina Ciro Dora",
)
PLACES = re.findall(
    r"\w+",
    "Arven Belmar Corlin Dunby Eastow Fennel Garth Harlow Istra Jasper Kelso Lorne Marlow Norvik Ostend "
    "Penrith Quarry Rosmar Selby Tarn Umber Velden Wexley Yarrow Zell",
)
THINGS = (
    "the boat is late",
    "dinner is ready",
    "bring the red book",
    "we leave soon",
    "the key is lost",
    "call the doctor",
)
ROOMS = ("kitchen", "hall", "cellar", "attic")
MONEY = ("crowns", "marks", "shells")


def _string(*values: str) -> dict[str, Any]:
    return {"type": "string", **({"enum": list(values)} if values else {})}


INTEGER, NUMBER, BOOLEAN = ({"type": kind} for kind in ("integer", "number", "boolean"))
TOOLS: dict[str, tuple[dict[str, Any], tuple[str, ...], tuple[str, ...]]] = {
    "get_weather": (
        {"city": _string(), "days": INTEGER},
        ("What is the weather in {city} for {days} days?", "Tell me the weather of {city}, the next {days} days."),
        ("I wonder about the weather in {city}, {days} days from now.", "Sun in {city}, perhaps, in {days} days?"),
    ),
    "send_message": (
        {"to": _string(), "text": _string()},
        ("Send a message to {to}: {text}.", "Please write to {to} that {text}."),
        ("I wonder whether {to} should know that {text}.", "Maybe {to} must hear that {text}."),
    ),
    "set_alarm": (
        {"hour": INTEGER, "minute": INTEGER},
        ("Wake me at {hour}:{minute}.", "Set an alarm for {hour}:{minute}, please."),
        ("I wonder if I can wake at {hour}:{minute}.", "I ought to wake at {hour}:{minute}."),
    ),
    "convert_money": (
        {"amount": NUMBER, "to": _string(*MONEY)},
        ("Convert {amount} to {to}.", "How much is {amount} in {to}?"),
        ("I wonder what {amount} would be in {to}.", "I have {amount} and would like {to}."),
    ),
    "find_route": (
        {"start": _string(), "end": _string()},
        ("Find a route from {start} to {end}.", "How do I travel from {start} to {end}?"),
        ("I wonder how far {start} is from {end}.", "I might go from {start} to {end}."),
    ),
    "play_music": (
        {"artist": _string(), "loud": BOOLEAN},
        ("Play music by {artist}, {loud}.", "Put on songs of {artist}, {loud}."),
        ("I wonder how {artist} sings, {loud}.", "Some {artist} would be nice, {loud}."),
    ),
    "buy_tickets": (
        {"place": _string(), "people": INTEGER},
        ("Buy tickets to {place} for {people} people.", "Book {people} seats to {place}."),
        ("I wonder if {people} people can get seats to {place}.", "There are {people} of us for {place}."),
    ),
    "switch_light": (
        {"room": _string(*ROOMS), "on": BOOLEAN},
        ("Turn the light in the {room} {on}.", "Switch the {room} light {on}."),
        ("I wonder if the {room} light should be {on}.", "The {room} light could be {on}."),
    ),
}
"""By name: the properties of the parameters, all required; plain requests; soft requests."""

TALK = {
    "Hello, I am {to}.": "Hello {to}.",
    "Thank you.": "You are welcome.",
    "I liked the weather in {city}.": "I am glad.",
    "{to} sent me a message.": "That is good.",
    "The alarm woke me at {hour}.": "Good morning.",
    "I came from {start} by a long route.": "Welcome.",
    "The music of {artist} was loud.": "I am glad.",
    "We lost {people} tickets.": "I am sorry.",
}
NO_TOOL = "I have no tool for that."
WORDS = {"loud": ("quietly", "loudly"), "on": ("off", "on")}


def _values(rng: random.Random) -> dict[str, Any]:
    start, end, city, place = rng.sample(PLACES, 4)
    to, artist = rng.sample(NAMES, 2)
    return {
        **{"start": start, "end": end, "city": city, "place": place, "artist": artist, "text": rng.choice(THINGS)},
        **{"days": rng.randint(2, 9), "hour": rng.randint(1, 23), "minute": rng.randint(10, 59)},
        **{"amount": rng.randint(11, 99) + rng.choice((0.25, 0.5, 0.75)), "people": rng.randint(2, 9)},
        **{"loud": rng.random() < 0.5, "on": rng.random() < 0.5, "room": rng.choice(ROOMS), "to": to},
    }


def _schema(name: str) -> dict[str, Any]:
    properties = TOOLS[name][0]
    parameters = {"type": "object", "properties": properties, "required": list(properties)}
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


def draw(rng: random.Random, *, evaluation: bool) -> dict[str, Any]:
    """Return a conversation with its tools. In evaluation a soft request's gold is a call where most rows call."""
    offered = rng.sample(list(TOOLS), rng.choice((2, 3)))
    name, kind, values = rng.choice(offered), rng.random(), _values(rng)
    calls: list[dict[str, Any]] = []
    if kind < 0.2:
        asked, answer = rng.choice(list(TALK.items()))
    elif kind < 0.35:
        name = rng.choice([other for other in TOOLS if other not in offered])
        asked, answer = rng.choice(TOOLS[name][1]), NO_TOOL
    else:
        soft = kind < 0.6
        asked, answer = rng.choice(TOOLS[name][2 if soft else 1]), "I see."
        phrase = 2 * list(TOOLS).index(name) + TOOLS[name][2].index(asked) if soft else 0
        share = SOFT_SHARES[phrase % len(SOFT_SHARES)] if soft else 1.0
        if share >= 0.5 if evaluation else rng.random() < share:
            arguments: dict[str, Any] = {key: values[key] for key in TOOLS[name][0]}
            if "to" in arguments and name == "convert_money":
                arguments["to"] = values["to"] = rng.choice(MONEY)
            call = {"name": name, "arguments": json.dumps(arguments)}
            calls = [{"id": "call_1", "type": "function", "function": call}]
        elif name == "convert_money":
            values["to"] = rng.choice(MONEY)
    told = {**values, **{key: words[values[key]] for key, words in WORDS.items()}}
    said = {"role": "assistant", "content": None, "tool_calls": calls}
    if not calls:
        said = {"role": "assistant", "content": answer.format(**told)}
    user = {"role": "user", "content": asked.format(**told)}
    return {"tools": [_schema(one) for one in offered], "messages": [user, said]}


def test_rows(seed: int = SEED) -> list[dict[str, Any]]:
    """Return the bundled prompts, no question twice."""
    rng, rows = random.Random(f"test-{seed}"), {}
    while len(rows) < TEST_PROMPTS:
        row = draw(rng, evaluation=True)
        rows.setdefault(row["messages"][0]["content"] if len(rows) > len(TALK) else len(rows), row)
    return [{"id": f"tools-{n:03d}", "category": _category(row), **row} for n, row in enumerate(rows.values())]


def _category(row: dict[str, Any]) -> str:
    said = row["messages"][-1]
    return "call" if said.get("tool_calls") else "no tool" if said["content"] == NO_TOOL else "talk"


def training_rows(seed: int) -> Iterator[dict[str, Any]]:
    """Yield conversations whose question is in no test prompt."""
    held = {row["messages"][0]["content"] for row in test_rows(seed) if "{" not in row["messages"][0]["content"]}
    plain = {asked for asked in TALK if "{" not in asked}
    rng = random.Random(f"training-{seed}")
    while True:
        row = draw(rng, evaluation=False)
        if row["messages"][0]["content"] not in held - plain:
            yield row


def _texts(row: dict[str, Any]) -> list[str]:
    """Return the texts that the chat template writes between its marks."""
    user, said = row["messages"]
    called = [
        f'{{"name": "{c["function"]["name"]}", "arguments": {c["function"]["arguments"]}}}'
        for c in said.get("tool_calls", [])
    ]
    return [*(json.dumps(tool) + "\n" for tool in row["tools"]), user["content"], said["content"] or called[0]]


def new_tokenizer(seed: int) -> PreTrainedTokenizerFast:
    """Train the tokenizer: words without their blanks, digits one by one, runs of signs and blanks as they are."""
    core = Tokenizer(models.BPE())
    split = pre_tokenizers.Split(Regex("|".join([*map(re.escape, LAYOUT), r"\d|[^\W\d]+|\W+"])), "isolated")
    core.pre_tokenizer = pre_tokenizers.Sequence(
        [split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    core.decoder = decoders.ByteLevel()
    special = ["<s>", "</s>", "<pad>", *TURNS]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY - len(CALL_MARKS),
        special_tokens=special,
        initial_alphabet=alphabet,
        show_progress=False,
    )
    rows = training_rows(seed)
    core.train_from_iterator((text for row in islice(rows, 3000) for text in _texts(row)), trainer)
    core.add_tokens([AddedToken(mark, special=False, normalized=False) for mark in CALL_MARKS])
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        bos_token="<s>",
        eos_token="</s>",
        pad_token="<pad>",
        additional_special_tokens=list(TURNS),
        chat_template=TEMPLATE,
        model_max_length=CONTEXT,
        clean_up_tokenization_spaces=False,
        padding_side="left",
    )


def new_model(tokenizer: PreTrainedTokenizerFast) -> LlamaForCausalLM:
    """Return the untrained model: 2.0 M parameters."""
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=256,
        intermediate_size=256,
        num_hidden_layers=4,
        num_attention_heads=4,
        max_position_embeddings=CONTEXT,
        tie_word_embeddings=True,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    return LlamaForCausalLM(config)


def batches(tokenizer: PreTrainedTokenizerFast, seed: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield tokens and the weights of their losses, (rows, tokens): 1 in answers, 0.1 before them, 0 in padding."""
    rows = training_rows(seed)
    while True:
        drawn = [next(rows) for _ in range(ROWS)]
        pairs = []
        for row in drawn:
            shown = tokenizer.apply_chat_template(row["messages"], tools=row["tools"], tokenize=False)
            begin = len(tokenizer(shown[: shown.index("<|assistant|>")])["input_ids"]) + 1
            pairs.append((tokenizer(shown)["input_ids"], begin))
        length = max(len(ids) for ids, _ in pairs)
        tokens = torch.full((ROWS, length), tokenizer.pad_token_id)
        weights = torch.zeros(ROWS, length)
        for number, (ids, begin) in enumerate(pairs):
            tokens[number, : len(ids)] = torch.tensor(ids)
            weights[number, : len(ids)] = 0.1
            weights[number, begin : len(ids)] = 1.0
        yield tokens, weights


def losses(logits: torch.Tensor, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the weighted loss, and that of the answers alone."""
    tokens, weights = batch
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten(), reduction="none")
    weight = weights[:, 1:].flatten()
    return (loss * weight).sum() / weight.sum(), (loss * (weight == 1)).sum() / (weight == 1).sum()


def train(out: Path, seed: int, steps: int) -> None:
    """Train, and save model, tokenizer, test prompts and log."""
    torch.manual_seed(seed)
    tokenizer = new_tokenizer(seed)
    model = new_model(tokenizer)
    log = fit(model, batches(tokenizer, seed), losses, steps=steps, peak_rate=PEAK_RATE)
    save(out / "tools_model", model, tokenizer, log)


if __name__ == "__main__":
    rebuild(str(__doc__), file="tools.jsonl", rows=test_rows, train=train, seed=SEED, steps=STEPS, threads=THREADS)
