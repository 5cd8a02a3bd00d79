"""Embedded demonstration: a tiny trained causal LM, its evaluation files and the generator behind them.

The model knows one small invented world. Everything in this package can be rebuilt from a seed with
``python -m tools.train_demo`` and ``python -m tools.train_demo_tools``; the files below are what that command wrote.
"""

from pathlib import Path

MODEL_DIR = Path(__file__).parent / "model"
"""Folder with the model, its tokenizer and its model card."""

TOOLS_MODEL_DIR = Path(__file__).parent / "tools_model"
"""The same of a smaller model that calls tools."""

MODELS = {"demo": MODEL_DIR, "demo-tools": TOOLS_MODEL_DIR}
"""Folders of the embedded models, by the names that the parameter `model` takes."""

DATA_DIR = Path(__file__).parent / "data"
"""Folder with the evaluation items, the corpus, the calibration text and the instructions."""

__all__ = ["DATA_DIR", "MODELS", "MODEL_DIR", "TOOLS_MODEL_DIR"]
