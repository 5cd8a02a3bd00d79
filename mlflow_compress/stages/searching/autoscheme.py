"""AutoRound's AutoScheme beside a search: its choice of bits, made and measured like the search's own."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping, Sequence

import numpy as np

from mlflow_compress.compression.backends.autoscheme_backend import PACKAGE, IntegerFormat, ask_autoscheme
from mlflow_compress.config import SearchConfig
from mlflow_compress.decide.allocation import Allocation
from mlflow_compress.decide.cost_table import CostTable, Limit
from mlflow_compress.errors import MissingDependencyError, UnsupportedError
from mlflow_compress.models.source_model import SourceModel
from mlflow_compress.stages.searching.search_space import CandidateFormat
from mlflow_compress.stages.searching.swap_costs import SwapCosts

METHODS = ("gptq", "rtn")
"""Methods of which AutoScheme's integer formats are a model."""


def integer_formats(found: Sequence[CandidateFormat], may_keep: bool) -> list[IntegerFormat]:
    """Return the formats as AutoScheme knows them.

    Raises
    ------
    MissingDependencyError
        The package is not installed.
    UnsupportedError
        A format is none that it can choose.
    """
    if importlib.util.find_spec(PACKAGE) is None:
        raise MissingDependencyError(f"AutoScheme needs the package {PACKAGE}, which is not installed")
    settings = [one.uniform.own_settings for one in found]
    bits = [own.get("bits") for own in settings]
    if may_keep or any(one.method not in METHODS for one in found) or len(set(bits)) < len(bits):
        raise UnsupportedError(
            "AutoScheme chooses between bits of integer formats only",
            allowed=f"formats of {' or '.join(METHODS)} with different bits",
            got=", ".join([*(one.name for one in found), *(["none"] if may_keep else [])]),
        )
    sizes = [-1 if isinstance(own["group_size"], str) else own["group_size"] for own in settings]
    return [
        IntegerFormat(bits=own["bits"], group_size=size, sym=own["symmetric"])
        for own, size in zip(settings, sizes, strict=True)
    ]


def autoscheme_choices(
    config: SearchConfig,
    source: SourceModel,
    formats: Sequence[IntegerFormat],
    costs: SwapCosts,
    table: CostTable,
    budgets: Mapping[Limit, int],
) -> dict[Limit, Allocation]:
    """Return AutoScheme's choice within each budget of bytes, on the text that the search measures its costs on.

    It counts bits without scales and zero points. So it gets the budget less what those take in the uniform variants.
    A budget that is then below its smallest format has no choice of its.
    """
    sizes = table.sizes
    extra = sizes.bits(sizes.uniform(sizes.formats[0])) - formats[0].bits
    low, high = min(one.bits for one in formats), max(one.bits for one in formats)
    wanted = {limit: min(sizes.bits(n_bytes) - extra, high) for limit, n_bytes in budgets.items()}
    wanted = {limit: bits for limit, bits in wanted.items() if bits > low}
    if not wanted:
        return {}
    tokenizer = source.tokenizer()
    ids = costs.text.windows.ids
    # Two windows in one text: a text that has fewer tokens when it is read again would be left out.
    texts = [tokenizer.decode([*a.tolist(), *b.tolist()]) for a, b in zip(ids[::2], ids[1::2], strict=False)]
    asked = list(dict.fromkeys(wanted.values()))
    found = ask_autoscheme(
        str(source.folder),
        texts,
        formats,
        [group.modules for group in costs.groups],
        asked,
        length=config.space.calibration_length,
        trust_remote_code=source.trust_remote_code,
    )
    number = {one.bits: i for i, one in enumerate(formats)}
    rows = np.arange(len(costs.groups))
    chosen = {}
    for limit, bits in wanted.items():
        by_layer = found[asked.index(bits)]
        choice = tuple(number[by_layer[group.modules[0]]] for group in costs.groups)
        chosen[limit] = Allocation(
            choice=choice,
            n_bytes=int(sizes.layers[rows, choice].sum()),
            cost=float(table.costs[rows, choice].sum()),
            gap=0.0,
        )
    return chosen
