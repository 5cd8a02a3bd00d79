"""What the stages of one variant have found, as publishing takes it."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from mlflow_compress.compression.checkpoint_manifest import CheckpointManifest
from mlflow_compress.records import MetricResult
from mlflow_compress.reporting.verdict import verdict


@dataclass(frozen=True, kw_only=True)
class StageOutputs:
    """Results of all stages of one variant.

    Attributes
    ----------
    label, variant : str
        The baseline's and the variant's short names.
    checkpoint : str
        The compressed checkpoint's folder.
    manifest : CheckpointManifest
        The checkpoint's manifest.
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
    manifest: CheckpointManifest
    pooled: Mapping[str, MetricResult]
    results: Sequence[MetricResult]
    children: Mapping[str, str]
    dtype: str
    seed: int
    n_truncated: int
    log_weights: str = "auto"
    failed: Mapping[str, str] = field(default_factory=dict)

    @property
    def checkpoint_sha256(self) -> str:
        """SHA-256 of the method, its settings, and the hash of every weight file."""
        made = [self.manifest.method, self.manifest.settings, self.manifest.weight_files]
        return hashlib.sha256(json.dumps(made, sort_keys=True).encode()).hexdigest()

    @property
    def verdict(self) -> str:
        """The verdict, as a sentence."""
        manifest = self.manifest
        return verdict(self.variant, self.pooled, size_ratio=manifest.size_ratio, sparsity=manifest.sparsity)
