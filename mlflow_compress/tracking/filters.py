"""Searches for runs in MLflow, whose filter syntax cannot escape quotes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mlflow.entities import Run, ViewType


def tags_filter(tags: Mapping[str, str]) -> str:
    """Return the filter "every one of these tags has this value", in MLflow's search syntax.

    A value with one kind of quotes is quoted with the other kind. A value with both kinds, or with a backslash, cannot
    be expressed and is left out. So filter the results of the search with `has_tags`.
    """
    return " and ".join(f"tags.`{key}` = {quoted}" for key, value in tags.items() if (quoted := _quoted(value)))


def has_tags(found: Mapping[str, str], wanted: Mapping[str, str]) -> bool:
    """Return whether a run's tags hold every wanted value exactly (some databases compare without case)."""
    return all(found.get(key) == value for key, value in wanted.items())


def _quoted(value: str) -> str | None:
    quote = next((mark for mark in "'\"" if mark not in value), None)
    return f"{quote}{value}{quote}" if quote and "\\" not in value else None


def search_runs(client: Any, filter_string: str) -> list[Run]:
    """Return the MLflow runs that a filter finds, newest first, over all experiments."""
    experiments = [e.experiment_id for e in client.search_experiments(view_type=ViewType.ACTIVE_ONLY)]
    found: list[Run] = []
    token = None
    while True:
        page = client.search_runs(
            experiments, filter_string=filter_string, order_by=["attributes.start_time DESC"], page_token=token
        )
        found += page
        token = page.token
        if not token:
            return found
