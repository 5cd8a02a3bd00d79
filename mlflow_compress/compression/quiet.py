"""Suppresses the output of libraries."""

from __future__ import annotations

import contextlib
import io
import logging
import os
import warnings
from collections.abc import Iterator


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Within this block, suppress output, progress bars, warnings, and log messages below ERROR.

    Exceptions are not affected. The libraries write several hundred lines for each compression. torch.fx logs through a
    handler that a redirection of the output does not reach, so logging itself is disabled. The environment variable
    TOKENIZERS_PARALLELISM is set within the block; llm-compressor would set it too, with a warning.
    """
    parallelism = os.environ.get("TOKENIZERS_PARALLELISM")
    logging_before = logging.root.manager.disable
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    logging.disable(logging.WARNING)
    try:
        with (
            contextlib.redirect_stdout(io.StringIO()),
            contextlib.redirect_stderr(io.StringIO()),
            warnings.catch_warnings(),
        ):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(logging_before)
        if parallelism is None:
            os.environ.pop("TOKENIZERS_PARALLELISM", None)
        else:
            os.environ["TOKENIZERS_PARALLELISM"] = parallelism
