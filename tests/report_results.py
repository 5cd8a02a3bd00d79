"""Results by hand and a parsed page, for the tests of the report."""

from __future__ import annotations

from html.parser import HTMLParser

from mlflow_compress.records import MetricResult

VOID = {"meta", "img", "br", "input"}


class Page(HTMLParser):
    """Collects tags, attributes and text, and fails on tags that are not closed in order."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str]] = []
        self.text = ""
        self._open: list[str] = []
        self.feed(page)
        assert self._open == []

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += [(name, value or "") for name, value in attrs]
        if tag not in VOID:
            self._open.append(tag)

    def handle_endtag(self, tag):
        assert self._open.pop() == tag

    def handle_data(self, data):
        if not {"style", "script"} & set(self._open):
            self.text += data + "\n"


def result(name, value, low=None, high=None, **more):
    return MetricResult(name, value, low, high, **{"n": 100, **more})


def by_name(*results):
    return {r.name: r for r in results}
