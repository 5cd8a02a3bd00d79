"""One command on prompts with tools: embedded ones that are graded, and own ones, of which no report has a text."""

import json
from pathlib import Path

import pytest

import mlflow_compress as mc
from mlflow_compress import demo

pytestmark = [pytest.mark.slow, pytest.mark.ci, pytest.mark.filterwarnings("ignore")]

TEXT = "Xylophone"


@pytest.mark.usefixtures("workdir")
def test_tools_of_the_embedded_model_and_of_own_logs(tmp_path: Path) -> None:
    rows = [json.loads(line) for line in (demo.DATA_DIR / "tools.jsonl").read_text().splitlines()[:24]]
    for row in rows:
        row["messages"][0]["content"] += f" {TEXT}"
    Path("logs.jsonl").write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    found = mc.run(
        model="demo-tools",
        tasks="tools,openai:logs.jsonl",
        limit=24,
        method="rtn",
        bits=2,
        judge=False,
        speed=False,
        noise_items=8,
    )
    pooled, n = found.pooled, 4 * (24 * 3 + 24)  # three categories of the embedded prompts, all in one of the own
    assert pooled["tools/called_delta_pct"].n == pooled["tools/right_pct"].n == n
    # Two bits change the decisions; the floors are those of an unchanged model.
    floor = pooled["tools/right_floor_pct"]
    assert floor.low is not None and floor.high is not None and floor.low <= 0 <= floor.high
    assert pooled["tools/decision_kl_floor"].value < 1e-6 < 1e-3 < pooled["tools/decision_kl"].value
    assert pooled["tools/decision_margin_delta"].value < 0
    assert pooled["distance/flips_pct"].n == 72  # own answers are neither right nor wrong
    texts = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file() and path.name != "logs.jsonl"}
    shown = {path.name for path, content in texts.items() if TEXT.encode() in content}
    assert shown <= {"items.parquet", "generations.parquet"}
    [report] = [content.decode() for path, content in texts.items() if path.name == "report.html"]
    assert "Same decision to call (F1)" in report and "Right calls" in report
