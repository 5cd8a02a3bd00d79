"""Every command as a user's script calls it. Type checkers read it, nobody runs it."""

import os
from pathlib import Path

import mlflow_compress as mc

store = Path("results")
width: str = os.environ.get("BITS", "auto")
policy = mc.Policy()
limits: dict[str, object] = {"gates": [{"metric": "distance/flips_pct", "max": 5}]}
rows = [{"id": "1", "category": "sums", "question": "1 + 1?", "choices": ["2", "3"], "answer": 0}]

made: mc.CompressedModel = mc.compress("demo", "rtn", bits=width, output_dir=store / "made", store=store)
found: mc.Evaluation = mc.evaluate(made, tasks={"sums": rows}, limit=2, store=store)
flips: mc.MetricResult = found["distance/flips_pct"]
share: float = flips.value
bound: float | None = flips.high
columns: int = len(found.items().columns)
frame_rows: int = len(found.to_pandas())
passed: bool = found.check(max_flips_pct=5.0).passed
answers: mc.AnswerEvaluation = mc.judge(made, answer_args={"instruction_limit": 2}, store=store, progress=print)
speed: mc.SpeedMeasurement = mc.speed(made, store=str(store))
diagnosis: mc.Diagnosis = mc.diagnose(made, tasks=["demo"], store=store)
variant: mc.VariantRun = mc.run(model=Path("llama"), method="rtn", bits=4, output_dir=store)
failed: list[str] = list(variant.failed)
swept: mc.Sweep = mc.sweep(methods=["rtn", "gptq"], bits=[8, 4], policy=limits)
names: list[str] = list(swept.failed)
planned: mc.SweepPlan = mc.sweep(methods="rtn,gptq", bits="8,4", dry_run=True)
seconds: float | None = planned.seconds
searched: mc.Search = mc.search(bits_per_weight=4.5)
repaired: mc.Repair = mc.search(repair="0123abcd", policy=policy)
report: mc.VariantsReport = mc.report(swept, output=store / "report.html", policy=policy)
table: mc.VariantsReport = mc.report([variant, "0123abcd"], format="md", store=store)
promoted: mc.Promotion = mc.promote(model=Path("llama"), store=store, policy=limits, max_flips_pct=5, dry_run=True)
champion: str | None = promoted.champion
approval: mc.Approval = mc.approve(1, by="Ada", policy=Path("policy.yaml"))
back: mc.Rollback = mc.rollback(alias="champion")
tenures: mc.AliasHistory = mc.history(model="llama")
gated: mc.GateVerdict = mc.gate(made, policy=policy, store=store, output=store / "gate")
compared: mc.Comparison = mc.compare(store / "a.jsonl", found, store=store)
expected: mc.Forecast = mc.forecast(found, "0123abcd", store=store)
loaded: mc.Evaluation = mc.load(store, store=store)
receipt: mc.Receipt = mc.export(found, output=store / "receipt.zip", policy=limits, store=store)
checked: mc.Receipt = mc.verify(store / "receipt.zip", recompute=True)
card: mc.Receipt = mc.card("receipt.zip", output=store / "card")
folder: mc.Receipt = mc.hub_folder(variant, policy=policy, output=store / "hub")
both: mc.ReceiptComparison = mc.compare_receipts("a.zip", store / "b.zip")
cost: mc.CostPlan = mc.plan(model="demo", bits=4, variants=2)
kept: mc.Retention = mc.gc(older_than=30)
resumed: mc.Resumed = mc.resume(dry_run=True)
text: str = mc.policy()
methods: list[str] = [*mc.methods(), *mc.tasks()]
serve = mc.serve_webhook
try:
    mc.promote(alias="latest")
except mc.MlflowCompressError as error:
    fix: str = error.fix
