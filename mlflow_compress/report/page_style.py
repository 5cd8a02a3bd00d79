"""The report page's style sheet: light and dark, phone and print, no fonts or files from elsewhere."""

from __future__ import annotations

CSS = """
:root { color-scheme: light dark; --ink: #1f2933; --muted: #5c6773; --line: #dfe3e8; --page: #ffffff; --soft: #f4f6f8;
  --accent: #0072b2; --worse: #b84f00; --better: #007a59; }
@media (prefers-color-scheme: dark) { :root { --ink: #e6e9ed; --muted: #a3adb8; --line: #353c45; --page: #15191e;
  --soft: #1f252c; --accent: #5bb0e6; --worse: #ff9a57; --better: #4fd0a5; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--page); color: var(--ink); overflow-wrap: anywhere;
  font: 16px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", Arial, sans-serif; }
main { max-width: 1040px; margin: 0 auto; padding: 28px 20px 64px; }
h1 { font-size: 1.05rem; font-weight: 600; color: var(--muted); margin: 0 0 .4rem; }
h2 { font-size: 1.2rem; margin: 2.6rem 0 .7rem; }
.verdict { font-size: 1.45rem; line-height: 1.35; font-weight: 650; margin: 0; padding-left: 16px;
  border-left: 5px solid var(--accent); }
.failed { margin: .8rem 0 0; padding-left: 16px; border-left: 5px solid var(--worse); color: var(--worse); }
p.note { color: var(--muted); font-size: .9rem; margin: .3rem 0 .8rem; }
.scroll { overflow-x: auto; -webkit-overflow-scrolling: touch; }
table { border-collapse: collapse; width: 100%; font-size: .92rem; }
th, td { text-align: left; vertical-align: top; padding: 7px 14px 7px 0; border-bottom: 1px solid var(--line); }
th { font-weight: 600; } thead th { color: var(--muted); font-size: .82rem; border-bottom-width: 2px; }
thead th { white-space: nowrap; overflow-wrap: normal; }
td.n, th.n { text-align: right; white-space: nowrap; font-variant-numeric: tabular-nums; }
td.d { white-space: nowrap; font-variant-numeric: tabular-nums; }
td.count { text-align: right; min-width: 4.2rem; overflow-wrap: normal; font-variant-numeric: tabular-nums; }
table.headline tbody th { min-width: 11rem; overflow-wrap: break-word; }
table.headline td.d { white-space: normal; min-width: 8.5rem; overflow-wrap: normal; }
table.parts { font-size: .84rem; } table.parts th, table.parts td { padding-right: 10px; }
table.parts tbody th { padding-left: 18px; font-weight: 400; }
table.parts tr.whole > * { background: var(--soft); } table.parts tr.whole th { font-weight: 600; padding-left: 8px; }
small { display: block; color: var(--muted); font-weight: 400; font-size: .82rem; line-height: 1.35; }
.worse { color: var(--worse); } .better { color: var(--better); } .same { color: var(--muted); }
.nobreak { white-space: nowrap; }
table.wide { min-width: 720px; } td.long { min-width: 11rem; white-space: pre-line; overflow-wrap: anywhere; }
figure { margin: 0 0 26px; } figure img { display: block; width: 100%; max-width: 820px; height: auto; background: #fff;
  border: 1px solid var(--line); border-radius: 8px; }
figcaption { color: var(--muted); font-size: .88rem; margin-top: 6px; max-width: 820px; }
summary { cursor: pointer; color: var(--accent); } details > table, details > .scroll { margin-top: 10px; }
td summary { color: inherit; }
table.pairs th { width: 15rem; font-weight: 500; color: var(--muted); }
code { font: .88em ui-monospace, SFMono-Regular, Menlo, Consolas, monospace; }
@media (max-width: 600px) { body { font-size: 15px; } main { padding: 18px 14px 48px; } .verdict { font-size: 1.2rem; }
  table.pairs th { width: 8.5rem; }
  /* A row of the headline table becomes a block: its name, then one line per filled cell. */
  table.headline, table.headline tbody, table.headline tr, table.headline th { display: block; }
  table.headline thead, table.headline td.empty { display: none; }
  table.headline tr { padding: 8px 0; border-bottom: 1px solid var(--line); }
  table.headline tbody th { border: 0; padding: 0 0 2px; }
  table.headline td { display: flex; border: 0; padding: 1px 0; text-align: left; min-width: 0; }
  table.headline td::before { content: attr(data-column); flex: 0 0 8rem; color: var(--muted); font-size: .85em; } }
@media print { body { font-size: 10.5pt; } table { font-size: 8.5pt; } table.parts { font-size: 7.5pt; }
  main { max-width: none; padding: 0; } .scroll { overflow: visible; }
  table.wide { min-width: 0; } figure, tr { break-inside: avoid; } h2 { break-after: avoid; } }
"""
