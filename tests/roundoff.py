"""How far computed numbers may lie apart by rounding alone, on any processor and in any order of the terms."""

U32, U64 = 2.0**-24, 2.0**-53  # unit roundoffs of float32 and float64


def of_sum(terms: int, size: float = 1.0) -> float:
    """Return the most by which two float64 sums of the same terms, whose magnitudes sum to `size`, lie apart.

    Each is within (terms - 1) U64 size of the exact sum: Higham, Accuracy and Stability of Numerical Algorithms, 2002,
    (4.4), to first order. An operation that makes the terms, or is done with their sum, counts as one term more.
    """
    return 2 * terms * U64 * size
