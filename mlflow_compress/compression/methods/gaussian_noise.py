"""Gaussian noise on the logits: a control whose errors are independent."""

from pydantic import Field

from mlflow_compress.compression.layers import save_and_measure
from mlflow_compress.compression.method import CompressionJob, Logits, Method, MethodConfig, register
from mlflow_compress.errors import UnsupportedError
from mlflow_compress.models.checkpoint_config import NOISY_LOGITS
from mlflow_compress.models.source_model import SourceModel


class _GaussianNoiseConfig(MethodConfig):
    """Settings of `gaussian-noise`."""

    scale: float = Field(0.5, gt=0)  # Standard deviation of the noise on every logit, in nats
    seed: int = Field(0, ge=0)  # Seed of the noise


@register
class GaussianNoise(Method[_GaussianNoiseConfig]):
    """The base model with independent ``N(0, scale^2)`` noise on every logit, in scoring and in generation.

    The control of "Accuracy is Not All You Need", table 19. In the paper the perplexity stays the same while the KL
    grows. That is impossible for a distribution: where tokens follow the baseline, the mean nll rises by the mean KL.
    The paper's perplexity uses the noisy log-probability of the target without renormalisation. Here the noise is added
    before the softmax, so predictions are distributions, and the perplexity rises. The weights are the base's; the
    noise settings are in the checkpoint's configuration.
    """

    name = "gaussian-noise"
    description = "Gaussian noise on the logits at evaluation time: a control, nothing is compressed"
    reference = "Dutta et al. 2024, https://arxiv.org/abs/2407.09141, table 19"
    format = "safetensors (noisy_logits)"
    own_format = True
    Config = _GaussianNoiseConfig
    compresses = False
    linear_only = False

    def label(self, config: _GaussianNoiseConfig) -> str:
        return f"{self.name}-{config.scale:g}"

    def check(self, config: _GaussianNoiseConfig, source: SourceModel) -> None:
        if source.head is None:
            raise UnsupportedError("The model has no language-model head to add noise to", got=source.architecture)

    def compress(self, job: CompressionJob[_GaussianNoiseConfig]) -> Logits:
        from mlflow_compress.models.architectures.own_formats import OwnFormatConfig, add_noise

        model, settings = job.source.load(job.device), job.config.settings()
        model.config.quantization_config = OwnFormatConfig(NOISY_LOGITS, **settings).to_dict()
        add_noise(model, **settings)
        return save_and_measure(job, model)
