"""ConSCompF (Karev and Xu 2025): similarity of generative models."""

import numpy as np

from mlflow_compress.metrics.conscompf import Similarity, principal_components
from mlflow_compress.metrics.stats.correlation import Correlation, pearson
from paper_tables.source import Check, Claim, Row, agrees, broken, read

FAMILIES = (
    ("gemma2-2b", "gemma2-9b"),
    ("qwen2.5-3b", "qwen2.5-7b"),
    ("llama2-7b", "llama2-13b"),
    ("mistral", "openhermes2.5"),
)


def _matrix(rows: list[Row], value: str) -> tuple[list[str], np.ndarray]:
    names = list(dict.fromkeys(r["model_a"] for r in rows))
    return names, np.array([float(r[value]) for r in rows]).reshape(len(names), len(names))


def model_pair_correlation(matrix: np.ndarray, scores: list[float]) -> Correlation | None:
    """Return Pearson's r of ``s_ij`` and ``|R_i - R_j|`` for i < j: negative where similar models score alike.

    There is no interval: pairs that share a model are not independent.
    """
    i, j = np.triu_indices(len(scores), k=1)
    return pearson(matrix[i, j], np.abs(np.subtract.outer(scores, scores)[i, j]), interval=False)


def equation_4_of_means(row: Row, baseline_consistency: float) -> float:
    """Return equation 4 at a row's printed mean similarity and consistency."""
    return Similarity(
        cosine=np.array([float(row["similarity"])]),
        consistency_a=np.array([baseline_consistency]),
        consistency_b=np.array([float(row["consistency"])]),
    ).mean("equation4")


def checks() -> list[Check]:
    """Return the identities of tables 3 and 6 to 8."""
    third, rouge = read("conscompf/table3_tinyllama_quantization"), read("conscompf/table1_model_performance")
    original = float(third[0]["consistency"])
    score = {r["model"]: float(r["rouge_l"]) for r in rouge}
    seventh = read("conscompf/table7_inverted_rouge_l_difference")
    names, similarity = _matrix(read("conscompf/table8_weighted_similarity"), "weighted_similarity")
    nearest = {
        a: names[int(np.argmax(np.where(np.eye(len(names))[i] == 1, -1, similarity[i])))] for i, a in enumerate(names)
    }
    sixth = read("conscompf/table6_consistency_correlation")
    half = [(r, s) for r in sixth for s in sixth if _weighted_of(r, s)]
    return [
        Check(
            "3",
            "The weighted similarity lies between the plain one and 1.",
            "arithmetic",
            *broken((r["variant"], float(r["similarity"]) <= float(r["weighted_similarity"]) <= 1) for r in third),
        ),
        Check(
            "3",
            "The weighted similarity is equation 4 at the printed mean similarity and consistency.",
            "`Similarity.mean`",
            *broken(
                (
                    f"{r['variant']}: {r['weighted_similarity']}, equation 4 gives {found:.4f}",
                    agrees(found, r["weighted_similarity"]),
                )
                for r in third
                for found in [equation_4_of_means(r, original)]
            ),
        ),
        Check(
            "6",
            "Weighting lowers the correlation with consistency in absolute value.",
            "arithmetic",
            *broken(
                (
                    f"set of consistency {r['label_consistency']}, {r['variant']}: {r['pearson']} to {s['pearson']}",
                    abs(float(s["pearson"])) < abs(float(r["pearson"])),
                )
                for r, s in half
            ),
        ),
        Check(
            "7",
            "Each value is 1 minus the difference of two models' ROUGE-L in table 1.",
            "arithmetic",
            *broken(
                (
                    f"{r['model_a']}, {r['model_b']}",
                    agrees(1 - abs(score[r["model_a"]] - score[r["model_b"]]), r["inverted_rouge_l_difference"]),
                )
                for r in seventh
            ),
        ),
        Check(
            "8",
            "Models of one family are each other's nearest neighbours.",
            "arithmetic",
            *broken(
                (f"{a} and {b}: nearest are {nearest[a]} and {nearest[b]}", nearest[a] == b and nearest[b] == a)
                for a, b in FAMILIES
            ),
        ),
    ]


def _weighted_of(plain: Row, weighted: Row) -> bool:
    same = all(plain[name] == weighted[name] for name in ("dataset", "samples", "label_consistency", "variant"))
    return same and (plain["score"], weighted["score"]) == ("similarity", "weighted_similarity")


def claims() -> list[Claim]:
    """Return the correlation of similarity and ROUGE-L, and the share of the two components of the plot."""
    names, similarity = _matrix(read("conscompf/table8_weighted_similarity"), "weighted_similarity")
    _, rouge = _matrix(read("conscompf/table7_inverted_rouge_l_difference"), "inverted_rouge_l_difference")
    score = {r["model"]: float(r["rouge_l"]) for r in read("conscompf/table1_model_performance")}
    whole = pearson(similarity.ravel(), rouge.ravel(), interval=False)
    pairs = model_pair_correlation(similarity, [score[name] for name in names])
    parts = (principal_components(similarity, len(names)) ** 2).sum(axis=0)
    share = 100 * parts / parts.sum()
    return [
        Claim(
            "5, 7, 8",
            "Pearson of similarity and 1 - difference of ROUGE-L, all 121 cells with the diagonal of ones",
            "0.1827",
            f"{whole.value:.4f}",
        ),
        # Ours takes the difference, the paper 1 minus it: the sign turns.
        Claim("5, 7, 8", "The same over the 55 pairs of different models", "no number", f"{-pairs.value:.3f}"),
        Claim("8", "Variance in the two components of the plot", "no number", f"{share[0]:.1f} % and {share[1]:.1f} %"),
    ]
