"""The scoreboard as text: for a terminal, as Markdown for notes and pull requests, and as CSV."""

import textwrap
from collections.abc import Sequence

from mlflow_compress.decide import scoreboard
from mlflow_compress.decide.gates import CACHE, DECODE_SPEEDUP, DELTA, FLIPS, KL, MEMORY_RATIO, PREFILL_SPEEDUP, SIZE
from mlflow_compress.metrics.chains import CHAIN_KL
from mlflow_compress.metrics.conscompf import ModelSimilarity
from mlflow_compress.metrics.kl_tail import ABOVE_CLIP, CLIP, CLIPPED_KL
from mlflow_compress.metrics.thinking import PASS, PASS_DELTA
from mlflow_compress.metrics.thought_length import COST_RATIO, LENGTH
from mlflow_compress.records import MetricResult
from mlflow_compress.reporting.numbers import number_text
from mlflow_compress.reporting.tables import Column, Table, Words, csv_text, escape_markdown, filled, result_text

# Columns that have intervals in the narrow tables; the others show their value alone
_WITH_INTERVAL = (DELTA, FLIPS, KL, PASS_DELTA.name, DECODE_SPEEDUP)
_TERMINAL = 120  # characters of its lines
_RUNTIME = "runtime"
# In the column of a difference stands the baseline's own value, with its name
_OWN = {DELTA: ("quality/accuracy", "accuracy "), PASS_DELTA.name: (PASS.name, "right ")}
# Columns that a terminal leaves out where it is too narrow, the least important first
_LEFT_OUT = (
    "uncertainty/uacc",
    "robustness/shuffle_drop_pct",
    "distance/top1_agreement",
    "distance/all_flips_pct",
    LENGTH.name,
    PREFILL_SPEEDUP,
    _RUNTIME,
    scoreboard.BITS,
    scoreboard.SIMILARITY,
    scoreboard.MT_BENCH,
    MEMORY_RATIO,
    scoreboard.SECONDS,
    CHAIN_KL.name,
    DECODE_SPEEDUP,
    COST_RATIO.name,
    PASS_DELTA.name,
    CACHE,
    SIZE,
)
_CLIPPED = "c"
_CLIPPED_MEANS = f"KL clipped at {CLIP:g} nat per item, as some are above it; their share"
_FEWEST_RANKED = 6  # variants whose order is worth a sentence: of fewer, chance alone orders them alike too often
_PAPERS = (
    (FLIPS, KL),
    (FLIPS, scoreboard.MT_BENCH),
    (KL, scoreboard.MT_BENCH),
    (FLIPS, scoreboard.SIMILARITY),
    (KL, scoreboard.SIMILARITY),
    (DELTA, KL),
)


def score_cell(row: scoreboard.ScoreRow, column: scoreboard.ScoreColumn, *, interval: bool) -> Words | None:
    """Return a value of a variant, with a sign if its accuracy differs, or its KL is clipped; None without a value."""
    cell = row.cells.get(column.key)
    if cell is None:
        return None
    moved = column.key == DELTA and row.accuracy_moved
    clipped = column.key == KL and CLIPPED_KL.name in row.cells
    text = score_text(row, column, interval=interval)
    return Words(text, sign="!" if moved else _CLIPPED if clipped else "", value=cell.value)


def score_text(row: scoreboard.ScoreRow, column: scoreboard.ScoreColumn, *, interval: bool) -> str:
    """Return one value as text, with its interval if wanted: the clipped KL where the mean has none."""
    cell = row.cells[CLIPPED_KL.name if column.key == KL and CLIPPED_KL.name in row.cells else column.key]
    result = MetricResult(column.key, cell.value, cell.low, cell.high)
    return number_text(result, column.unit, difference=column.is_difference, interval=interval)


def scoreboard_table(board: scoreboard.Scoreboard) -> Table:
    """Return the main columns of the baseline and the variants that were made; the Pareto front has a star."""
    main = [column for column in board.columns if column.main]
    made = [row for row in board.rows if row.status != "unsupported"]
    told = len(board.finished) < len(made)
    level = f" [{100 * board.level:g}\u00a0%]"
    heads = [Column(column.label + (level if column.key in _WITH_INTERVAL else ""), key=column.key) for column in main]
    heads += [Column("timed in", key=_RUNTIME)] if _is_timed(board) else []
    heads += [Column("status", key="status")] if told else []
    rows, front = [baseline_row(board, heads)] if board.baseline_cells else [], shown_front(board)
    for row in made:
        cells: list[str | Words | None] = [Words(row.name, sign="*" if row.name in front else "")]
        cells += [score_cell(row, column, interval=column.key in _WITH_INTERVAL) for column in main]
        cells += [row.runtime or None] if _is_timed(board) else []
        rows.append([*cells, *(["" if row.status == "finished" else row.status] if told else [])])
    return Table(columns=[Column("variant", left=True, key="variant"), *heads], rows=rows)


def baseline_row(board: scoreboard.Scoreboard, heads: Sequence[Column]) -> list[str | Words | None]:
    """Return the baseline's own values; in the columns of differences, what they are of."""
    by_key = {column.key: column for column in board.columns}
    cells: list[str | Words | None] = [Words(f"{board.baseline} (baseline)")]
    for head in heads:
        key, prefix = _OWN.get(head.key, (head.key, ""))
        cell, column = board.baseline_cells.get(key), by_key.get(key)
        if cell is None or column is None:
            cells.append(None)
        else:
            text = number_text(MetricResult(key, cell.value), column.unit, difference=False, interval=False)
            cells.append(Words(prefix + text, value=cell.value))
    return cells


def _narrowed(table: Table) -> tuple[Table, list[str]]:
    """Return the table without the columns for which a terminal is too narrow, and their labels."""
    left_out: list[str] = []
    labels = {column.key: column.label for column in table.columns}
    for key in _LEFT_OUT:
        if max(map(len, table.lines(wrapped=True))) <= _TERMINAL:
            break
        if key in labels:
            table = table.only(*(column.key for column in table.columns if column.key != key))
            left_out.append(labels[key])
    return table, left_out


def wrapped(text: str) -> list[str]:
    """Return a text as lines of a terminal."""
    return textwrap.wrap(text, _TERMINAL, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False)


def _is_timed(board: scoreboard.Scoreboard) -> bool:
    return any(row.runtime for row in board.rows)


def finding(board: scoreboard.Scoreboard) -> str:
    """Return what was found, in one sentence: how many variants, which is closest, and which are on the front."""
    n, done = sum(1 for row in board.rows if row.status != "unsupported"), board.finished
    if not done:
        return f"None of {n} variants has results"
    counted = f"{len(done)} of {n} variants" if len(done) < n else f"{n} {'variant' if n == 1 else 'variants'}"
    some = f"up to {board.n_items:,} items, drawn from {board.drawn_from:,}" if board.drawn_from else None
    on = some or (f"{board.n_items:,} items" if board.n_items else "")
    parts = [f"{counted} against {board.baseline}{on and f' on {on}'}"]
    lacking = [warning for warning in board.warnings if warning.kind == "no_verdict"]
    parts = [*(warning.text for warning in lacking), *parts]
    judged = [row for row in done if all(row.name not in warning.variants for warning in lacking)]
    column = next((one for one in board.columns if one.key == board.distance), None)
    if column is not None and judged and board.distance in judged[0].cells:
        clipped = "clipped " if CLIPPED_KL.name in judged[0].cells else ""
        closest = score_text(judged[0], column, interval=True)
        on = "" if board.distance == KL else " on the baseline's own thoughts"
        parts.append(f"closest is {judged[0].name} with a {clipped}KL of {closest}{on}")
    if front := shown_front(board):
        parts.append(f"on the Pareto front of size and KL: {', '.join(front)}")
    return "; ".join(parts)


def shown_front(board: scoreboard.Scoreboard) -> tuple[str, ...]:
    """Return who is on the Pareto front; nobody where all are, which tells none apart."""
    return board.pareto if len(board.pareto) < len(board.finished) else ()


def legend(board: scoreboard.Scoreboard) -> list[str]:
    """Return what the signs of the table mean."""
    small = "small in weights and cache" if any(column.key == CACHE for column in board.columns) else "small"
    lines = [f"* no other variant is both as {small} and as close to the baseline"] if shown_front(board) else []
    if any(row.accuracy_moved for row in board.rows):
        lines.append("! accuracy differs from the baseline's (McNemar's mid-p test, Holm's correction over variants)")
    clipped = [row for row in board.rows if CLIPPED_KL.name in row.cells]
    if clipped:
        lines.append(f"{_CLIPPED} {_CLIPPED_MEANS}: {', '.join(f'{row.name} {_above(row)}' for row in clipped)}")
    words = {
        DECODE_SPEEDUP: "decode speed",
        MEMORY_RATIO: "peak memory",
        COST_RATIO.name: "tokens to a right answer",
    }
    # Of one variant there is no front to tell.
    fronts = {
        cost: names
        for cost, names in board.serving_fronts.items()
        if sum(cost in row.cells for row in board.finished) > 1
    }
    return [
        *lines,
        *_items(board),
        *_harm(board),
        *_luck(board),
        *(f"Pareto front of {words[cost]} and KL: {', '.join(names)}" for cost, names in fronts.items()),
        *_not_timed(board),
    ]


def _items(board: scoreboard.Scoreboard) -> list[str]:
    """Return how many items each variant was scored on, where they were drawn."""
    if board.drawn_from is None:
        return []
    counts = {row.name: row.cells[FLIPS].n for row in board.finished if FLIPS in row.cells}
    more = {row.name: " (more, to tell it apart)" if "+" in row.drawn else "" for row in board.finished}
    told = ", ".join(f"{name} {n:,}{more[name]}" for name, n in counts.items())
    return [f"Items scored, of {board.drawn_from:,}: {told}"]


def _luck(board: scoreboard.Scoreboard) -> list[str]:
    """Return how much makes with other calibration samples differ, and who is closer to the baseline in a fresh one."""
    lines = []
    for row in board.rows:
        if row.luck is not None:
            spreads = ((label, one) for label, one in (("KL", row.luck.kl), ("flips in %", row.luck.flips)) if one)
            parts = [
                f"{label} {one.mean:.3g}, standard deviation between replicates {one.between:.2g} "
                f"[{one.low:.2g}, {one.high:.2g}] and over items {one.items:.2g}"
                for label, one in spreads
            ]
            lines.append(f"{1 + len(row.luck.runs)} replicates of {row.name}: {'; '.join(parts) or 'too few items'}")
    once = [row.name for row in board.finished if row.made_once]
    if lines and once:
        lines.append(f"One replicate, because no calibration text is read: {', '.join(once)}")
    names = [row.name for row in board.rows]
    for pair in board.closer:
        known = [f"{p:.2f} by {by}" for by, p in (("KL", pair.kl), ("flips", pair.flips)) if p is not None]
        if known and names.index(pair.second) == names.index(pair.first) + 1:
            lines.append(f"A new {pair.first} is closer than a new {pair.second} with probability {', '.join(known)}")
    return lines


def _above(row: scoreboard.ScoreRow) -> str:
    cell = row.cells[ABOVE_CLIP.name]
    return result_text(MetricResult(ABOVE_CLIP.name, cell.value, cell.low, cell.high))


def _harm(board: scoreboard.Scoreboard) -> list[str]:
    """Return who is worse than the baseline, no worse than the margin, or open, with the items that would settle it."""
    by_text: dict[str, list[str]] = {}
    for row in board.rows:
        if row.harm is not None:
            open_ = row.harm.word == "open"
            items = "no number" if row.harm.items is None else f"{row.harm.items:,}"
            text = "open (items that would settle it)" if open_ else row.harm.text
            by_text.setdefault(text, []).append(f"{row.name} ({items})" if open_ else row.name)
    return [f"Accuracy {text}: {', '.join(names)}" for text, names in sorted(by_text.items())]


def _not_timed(board: scoreboard.Scoreboard) -> list[str]:
    """Return which variants have no speed and no memory, by the reason; nothing where no speed was asked for."""
    by_reason: dict[str, list[str]] = {}
    for row in board.finished:
        if row.not_timed:
            by_reason.setdefault(row.not_timed, []).append(row.name)
    if not _is_timed(board) and len(by_reason) == 1 and scoreboard.NO_SPEED_STAGE in by_reason:
        return []
    all_names = [row.name for row in board.finished]
    return [
        f"Not timed: {'every variant' if names == all_names else ', '.join(names)}; {reason.rstrip('.')}"
        for reason, names in by_reason.items()
    ]


def _correlation_text(board: scoreboard.Scoreboard, rank: scoreboard.VariantCorrelation) -> str:
    """Return one correlation as a sentence."""
    labels = {column.key: column.label for column in board.columns}
    what = f"{labels[rank.first]} and {labels[rank.second]}"
    if rank.value is None:
        return f"{what}: no rank correlation, {rank.reason}"
    interval = "" if rank.low is None or rank.high is None else f" [{rank.low:.2f}, {rank.high:.2f}]"
    return f"{what}: rank correlation {rank.value:+.2f}{interval}, p = {rank.p:.2g}, {rank.n} variants"


def correlation_texts(board: scoreboard.Scoreboard) -> list[str]:
    """Return the correlations that the papers report, where there are enough variants: of flips, KL and the judges."""
    by_pair = {frozenset((c.first, c.second)): c for c in board.correlations}
    told = [by_pair[frozenset(pair)] for pair in _PAPERS if frozenset(pair) in by_pair]
    return [_correlation_text(board, one) for one in told if one.n >= _FEWEST_RANKED]


def scoreboard_text(board: scoreboard.Scoreboard) -> str:
    """Return the table with aligned columns, as many as fit, its legend, the correlations and the warnings."""
    table, left_out = _narrowed(scoreboard_table(board))
    more = ["", f"Not shown here, but on the page: {'; '.join(left_out)}"] if left_out else []
    below = [line for text in [*_below(board), *more] for line in wrapped(text) or [""]]
    return "\n".join([*table.lines(wrapped=True), *below])


def _below(board: scoreboard.Scoreboard) -> list[str]:
    told = legend(board)
    warnings = [f"Warning: {one.text.rstrip('.')}." for one in board.warnings]
    return [line for block in (told, correlation_texts(board), warnings) if block for line in ("", *block)]


def scoreboard_markdown(board: scoreboard.Scoreboard) -> str:
    """Return the finding, the narrow table, its legend, the correlations and the warnings, as Markdown."""
    below = [f"- {escape_markdown(line)}" if line else "" for line in _below(board)]
    return "\n".join([escape_markdown(f"{finding(board)}."), "", scoreboard_table(board).markdown(), *below, ""])


def scoreboard_csv(board: scoreboard.Scoreboard) -> str:
    """Return every value as CSV, one line per variant: each with the ends of its interval and its number of items."""
    texts = ("name", "method", "bits", "status", "reason", "run_id", "runtime", "not_timed")
    fixed = (*texts, "on_front", "accuracy_p", "accuracy_p_holm")
    renamed = {"name": "variant", "runtime": "timed_in"}
    parts = [f"{column.key}{part}" for column in board.columns for part in ("", ":low", ":high", ":n")]
    rows: list[list[object]] = []
    for row in board.rows:
        rows.append([getattr(row, name) for name in fixed])
        for column in board.columns:
            cell = row.cells.get(column.key)
            rows[-1] += [None] * 4 if cell is None else [cell.value, cell.low, cell.high, cell.n]
    return csv_text([*(renamed.get(name, name) for name in fixed), *parts], rows)


def similarity_csv(similarity: ModelSimilarity) -> str:
    """Return the similarity of every pair of models as CSV, and each model's place on the principal components."""
    rows = zip(similarity.names, similarity.values.tolist(), similarity.coordinates.tolist(), strict=True)
    return csv_text(
        ["model", *similarity.names, "component_1", "component_2"], ([name, *row, *place] for name, row, place in rows)
    )


_UNITS = {"bytes": "bytes", "percent": "%", "share": "share of 1"}  # Labels name the other units


def scoreboard_columns(board: scoreboard.Scoreboard, *, every: bool = False) -> dict[str, list[object]]:
    """Return the main columns, or every one, with plain numbers under their label and unit, as MLflow shows a table."""
    values_by_label: dict[str, list[object]] = {"variant": [row.name for row in board.rows]}
    for column in board.columns:
        if column.main or every:
            label = f"{column.label} ({_UNITS[column.unit]})" if column.unit in _UNITS else column.label
            ends = ("value", "low", "high") if every or column.key in _WITH_INTERVAL else ("value",)
            for end in ends:
                values = [getattr(row.cells.get(column.key), end, None) for row in board.rows]
                values_by_label[label if end == "value" else f"{label}, {end}"] = values
    values_by_label["accuracy p (Holm)"] = [row.accuracy_p_holm for row in board.rows]
    values_by_label["Pareto front"] = [row.on_front for row in board.rows]
    if _is_timed(board):
        values_by_label["timed in"] = [row.runtime or None for row in board.rows]
        values_by_label["not timed"] = [row.not_timed or None for row in board.rows]
    values_by_label["status"] = [row.status if not row.reason else f"{row.status}: {row.reason}" for row in board.rows]
    values_by_label["run_id"] = [row.run_id for row in board.rows]
    return values_by_label


def scoreboard_frame(board: scoreboard.Scoreboard) -> list[dict[str, object]]:
    """Return one row per variant with every column that is not always empty."""
    columns = scoreboard_columns(board, every=True)
    rows = [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]
    names = filled(rows)
    return [{name: row[name] for name in names} for row in rows]
