"""Embedded demonstration: a tiny trained causal LM, its evaluation files and the generator behind them.

The model knows one small invented world. Everything in this package can be rebuilt from a seed with
``python -m tools.train_demo``, ``train_demo_tools`` and ``train_demo_thinks``; the files below are what these wrote.
"""

from pathlib import Path

MODEL_DIR = Path(__file__).parent / "model"
"""Folder with the model, its tokenizer and its model card."""

TOOLS_MODEL_DIR = Path(__file__).parent / "tools_model"
"""The same of a smaller model that calls tools."""

THINKS_MODEL_DIR = Path(__file__).parent / "thinks_model"
"""The same of the smallest model, which thinks before it answers."""

MODELS = {"demo": MODEL_DIR, "demo-tools": TOOLS_MODEL_DIR, "demo-thinks": THINKS_MODEL_DIR}
"""Folders of the embedded models, by the names that the parameter `model` takes."""

DATA_DIR = Path(__file__).parent / "data"
"""Folder with the evaluation items, the corpus, the calibration text and the instructions."""

__all__ = ["DATA_DIR", "MODELS", "MODEL_DIR", "THINKS_MODEL_DIR", "TOOLS_MODEL_DIR"]
