"""What the stages of one variant have found, as publishing takes it."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from mlflow_compress.compression.checkpoint_manifest import CheckpointManifest
from mlflow_compress.records import MetricResult
from mlflow_compress.reporting.verdict import verdict
from mlflow_compress.stages.main_run.served_variant import ServedFacts
from mlflow_compress.stages.model_names import SERVED_METHOD
from mlflow_compress.stages.quantize import size_values


@dataclass(frozen=True, kw_only=True)
class StageOutputs:
    """Results of all stages of one variant.

    Attributes
    ----------
    label, variant : str
        The baseline's and the variant's short names.
    checkpoint : str
        The compressed checkpoint's folder, or the address of a served one.
    manifest : CheckpointManifest or None
        The checkpoint's manifest; None of a served one.
    served : ServedFacts or None
        What is served; None of a checkpoint.
    base_weights : str
        SHA-256 of the baseline's weight files; of a served baseline, the digest of what is known of it.
    pooled, results : mapping, sequence
        The headline results by name, and all results.
    children : mapping of str to str
        Run id of every stage.
    dtype : str
        Dtype in which both models were evaluated.
    seed : int
        Seed of bootstrap and splits.
    log_weights : str
        Whether the checkpoint is stored with the registered model: see `VariantEntry`.
    n_truncated : int
        Prompts that were too long for the variant and lost their beginning.
    failed : mapping of str to str
        Error message of every stage that failed.
    """

    label: str
    variant: str
    checkpoint: str
    manifest: CheckpointManifest | None
    served: ServedFacts | None
    base_weights: str
    pooled: Mapping[str, MetricResult]
    results: Sequence[MetricResult]
    children: Mapping[str, str]
    dtype: str
    seed: int
    n_truncated: int
    log_weights: str = "auto"
    failed: Mapping[str, str] = field(default_factory=dict)

    @property
    def method(self) -> str:
        """The method that has made the variant."""
        return self.manifest.method if self.manifest is not None else SERVED_METHOD

    @property
    def settings(self) -> Mapping[str, object]:
        """The method's settings; of a served variant, who serves what."""
        if self.manifest is not None:
            return self.manifest.settings
        return self.served.settings() if self.served is not None else {}

    @property
    def sizes(self) -> dict[str, float]:
        """Size and cost as metrics; nothing is known of a served variant."""
        return {} if self.manifest is None else size_values(self.manifest)

    @property
    def checkpoint_sha256(self) -> str:
        """SHA-256 of the method, its settings, and the hash of every weight file; of a served one see `ServedFacts`."""
        if self.manifest is None:
            assert self.served is not None
            return self.served.weights
        made = [self.manifest.method, self.manifest.settings, self.manifest.weight_files]
        return hashlib.sha256(json.dumps(made, sort_keys=True).encode()).hexdigest()

    @property
    def verdict(self) -> str:
        """The verdict, as a sentence."""
        made = self.manifest
        ratio, sparsity = (None, None) if made is None else (made.size_ratio, made.sparsity)
        return verdict(self.variant, self.pooled, size_ratio=ratio, sparsity=sparsity)
