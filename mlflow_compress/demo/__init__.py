"""Embedded demonstration: a tiny trained causal LM, its evaluation files and the generator behind them.

The model knows one small invented world. Everything in this package can be rebuilt from a seed with
``python -m tools.train_demo``; the files below are what that command wrote.
"""

from pathlib import Path

MODEL_DIR = Path(__file__).parent / "model"
"""Folder with the model, its tokenizer and its model card."""

DATA_DIR = Path(__file__).parent / "data"
"""Folder with the evaluation items, the corpus, the calibration text and the instructions."""

__all__ = ["DATA_DIR", "MODEL_DIR"]
