"""The line between training text and evaluation items.

Both sides are drawn from the same generators. A checksum of the rendered text decides on which side it falls: the
training generators redraw whatever falls on the evaluation side and the item generators redraw the rest, so that no
evaluation item can stand in the training text, whatever the seed or the number of tokens.
"""

import zlib

HELD_OUT_ONE_IN = 8
"""One rendering in this many is kept for evaluation."""


def held_out(*parts: str) -> bool:
    """Return whether the rendering made of ``parts`` belongs to the evaluation side.

    >>> held_out("The city of", "Orvan") == held_out("The city of|Orvan")
    True
    """
    return zlib.crc32("|".join(parts).encode("utf-8")) % HELD_OUT_ONE_IN == 0
