"""`python -m mlflow_compress` is `mlflow-compress`."""

from mlflow_compress.cli import program

program()
