"""Keeping libraries quiet while they work for us."""

from __future__ import annotations

import contextlib
import io
import logging
import os
import warnings
from collections.abc import Iterator


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Hold back what the backends print, log below ERROR, warn and draw; exceptions come through unchanged.

    A method is run a hundred times in a sweep, and its libraries write several hundred lines and progress bars each
    time. torch.fx logs through a handler that no redirection reaches, hence the switch in `logging`.
    """
    parallelism = os.environ.get("TOKENIZERS_PARALLELISM")
    logging_before = logging.root.manager.disable
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # llm-compressor sets it too, with a warning
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
