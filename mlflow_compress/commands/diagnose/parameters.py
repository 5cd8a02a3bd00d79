"""The parameters of a diagnosis: a variant, the text on which it is measured, and how closely."""

from typing import Any

from mlflow_compress.commands.evaluate.parameters import EvaluateConfig
from mlflow_compress.commands.quantize.parameters import QuantizeConfig
from mlflow_compress.config.declarations import Group, Parameters, Together, option
from mlflow_compress.config.groups import CompressionConfig, EvaluationConfig, InferenceConfig, SourceConfig
from mlflow_compress.errors import UnsupportedError

_DIAGNOSIS_ARGS = Together("diagnosis_args", "how closely groups of weights are measured: name=value,name=value")


class DiagnosisConfig(Group):
    """On how much text every group of weights is measured, and with which controls."""

    corpus_tokens: int = option(
        16384,
        "tokens of each corpus on which every group of weights is measured; 0 takes all",
        ge=0,
        within=_DIAGNOSIS_ARGS,
    )
    corpus_window: int = option(
        512, "tokens of one text: the corpus is cut into texts of this length", ge=4, within=_DIAGNOSIS_ARGS
    )
    noise_control: bool = option(
        True,
        "also measure Gaussian noise of the same size on each group, as a control (doubles the time)",
        within=_DIAGNOSIS_ARGS,
    )
    state_memory: float = option(
        1.0,
        "GiB of memory for the baseline's states, so that only the layers after a swap are computed",
        gt=0,
        within=_DIAGNOSIS_ARGS,
    )


class DiagnoseConfig(Parameters):
    """Find where a variant's movement comes from: which groups of weights, and on which text."""

    source: SourceConfig = SourceConfig()
    compression: CompressionConfig = CompressionConfig()
    evaluation: EvaluationConfig = EvaluationConfig()
    inference: InferenceConfig = InferenceConfig()
    diagnosis: DiagnosisConfig = DiagnosisConfig()

    def model_post_init(self, context: Any, /) -> None:
        if self.source.device == "balanced":
            raise UnsupportedError(
                "A diagnosis holds both models in memory", got="device=balanced", fix="Use another device"
            )

    @property
    def quantize_config(self) -> QuantizeConfig:
        """The parameters with which the variant is made; a checkpoint that is given is taken as it is."""
        changes = {} if self.compression.checkpoint is None else {"method": "checkpoint"}
        return self.of_stage(QuantizeConfig, **changes)

    @property
    def evaluate_config(self) -> EvaluateConfig:
        """The tasks and corpora, as an evaluation takes them."""
        return self.of_stage(EvaluateConfig, checkpoint=None)
