"""The control: the base model itself, saved again."""

from mlflow_compress.compression.method import CompressionJob, Logits, Method, MethodConfig, register


@register
class Uncompressed(Method[MethodConfig]):
    """Saves the base in its own dtype. KL and flips must be 0; otherwise the measurement is wrong."""

    name = "none"
    description = "The base model itself: the control that must show no distance at all"
    reference = "control"
    format = "safetensors"
    Config = MethodConfig
    runs_in = ("vLLM", "llama.cpp")
    compresses = False
    linear_only = False

    def compress(self, job: CompressionJob[MethodConfig]) -> Logits:
        """Load the model in its stored dtype, save it, and return its logits, computed in float32."""
        model = job.source.load(job.device, dtype=job.source.torch_dtype)
        model.save_pretrained(job.folder)
        job.source.save_others(job.folder)
        return job.probe.logits(model.float())
