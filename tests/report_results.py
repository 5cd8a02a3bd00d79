"""Results by hand and a parsed page, for the tests of the report."""

from html.parser import HTMLParser
from types import SimpleNamespace

from mlflow_compress.metrics import MetricSettings
from mlflow_compress.records import MetricResult
from mlflow_compress.reporting.headline import headline_rows

VOID = {"meta", "img", "br", "input"}
SIZES = SimpleNamespace(
    base_size_bytes=15_700_000,
    size_bytes=4_400_000,
    size_ratio=15.7 / 4.4,
    bits_per_weight=4.16,
    sparsity=None,
    base_cache_bytes_per_token=2048.0,
    cache_bytes_per_token=2048.0,
)
FAST = MetricSettings(resamples=100, method="percentile")


def rows_of(*results):
    return {row.label: row for row in headline_rows(by_name(*results))}


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
