"""Items about a long text: what stands at which depth, and what follows there.

- `long_needle`: a line "garden: C" stands somewhere in the text; its letter is chosen among four. Or a chain of such
  lines, "bridge = garden", whose letter is that of its first one.
- `long_copy`: words that stand somewhere in the text are begun again at its end; correct if greedy decoding goes on.
- `long_text`: the next words at some depth, neither right nor wrong. The item's id ends in the number of tokens before
  them ("3 text@512"), see `tokens_before`.
"""

from mlflow_compress.item_families import ITEM_FAMILIES, ItemFamily

ITEM_FAMILIES.register("long_needle")(ItemFamily(chooses=True, graded=True, headline=True, by_category=True))
ITEM_FAMILIES.register("long_copy")(ItemFamily(graded=True, by_category=True))
ITEM_FAMILIES.register("long_text")(ItemFamily(by_category=True))
