"""One command on logged conversations: KL on what was logged, divergence and health, and no text in any report."""

import json
from pathlib import Path

import pytest

import mlflow_compress as mc
from mlflow_compress import demo

pytestmark = [pytest.mark.ci, pytest.mark.filterwarnings("ignore")]

SECRET, TEXT = "zoe@example.org", "Xylophone"


@pytest.mark.usefixtures("workdir")
def test_kl_divergence_and_health_of_own_traffic_and_no_text_in_a_report(tmp_path: Path) -> None:
    rows = []
    for i in range(24):
        asked = {"role": "user", "content": f"Who has the {TEXT} {i}? Write to {SECRET}."}
        said = {"role": "assistant", "content": f"Kainos has a basket and Hougem has {i} dolls."}
        rows.append({"category": "toys" if i % 2 else "music", "messages": [asked, said]})
    Path("chats.jsonl").write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    found = mc.run(
        method="rtn",
        bits=3,
        tasks="openai:chats.jsonl",
        instructions="openai:chats.jsonl",
        redact="email",
        judges="similarity,divergent_tokens",
        answer_args={"num_samples": 2, "max_new_tokens": 16, "judge_max_tokens": 8},
        log_weights="false",
        speed=False,
        task_args={"noise_items": 4},
    )
    for name in ("distance/kl_mean", "distance/logged_parted_pct"):
        assert found.pooled[name].n == 24
    assert found.pooled["judge/length_ratio"].n == 48 and "judge/share_of_divergent_tokens_pct" in found.pooled
    assert "quality/accuracy" not in found.pooled
    files = [path for path in tmp_path.rglob("*") if path.is_file() and path.name != "chats.jsonl"]
    texts = {path: path.read_bytes() for path in files}
    assert [path for path, content in texts.items() if SECRET.encode() in content] == []
    shown = {path.name for path, content in texts.items() if TEXT.encode() in content}
    assert shown <= {"items.parquet", "generations.parquet", "greedy_answers.parquet"}
    reports = [content.decode() for path, content in texts.items() if path.name == "report.html"]
    assert reports and all("Logged answers parted" in report for report in reports)
    mc.report(found.run.run_id, output="page.json")
    page = Path("page.json").read_text(encoding="utf-8")
    assert TEXT not in page and "logged questions are not shown" in page


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
        task_args={"noise_items": 8},
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
