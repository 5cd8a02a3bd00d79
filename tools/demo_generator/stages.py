"""The three stages of the demonstration's training, from exercises to whole documents.

A lettered question asks for three things at once: recall the fact, find the option that says it, read off its letter.
Trained on whole questions alone, a model of this size stays at chance for many millions of tokens. So the stages teach
them one after the other, in short rows, where attention has little to choose from; the last stage has the documents,
lengths and disputed facts that the model is measured on.
"""

from dataclasses import dataclass

from .training_text import EXERCISES, KINDS, SHORT, Kinds


@dataclass(frozen=True, kw_only=True)
class Stage:
    """One stage of the training."""

    name: str
    tokens: int
    kinds: Kinds
    lengths: tuple[int, ...]  # of rows, in turns
    step_tokens: int  # of one optimizer step
    disputed: bool = False  # whether the sources disagree on part of the facts
    hint: float = 0.0  # weight of a second loss: before the letter, a middle layer is to predict the option behind it
    decay: float = 0.0  # share of the steps over which the learning rate comes down at the end


STAGES = (
    Stage(name="exercises", tokens=500_000, kinds=EXERCISES, lengths=(128,), step_tokens=2048),
    Stage(name="single questions", tokens=3_000_000, kinds=SHORT, lengths=(64,), step_tokens=2048, hint=1.0),
    Stage(
        name="whole documents",
        tokens=4_000_000,
        kinds=KINDS,
        lengths=(256, 512, 1024),
        step_tokens=4096,
        disputed=True,
        hint=0.3,
        decay=0.5,
    ),
)
