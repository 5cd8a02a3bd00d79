"""``engine=vllm``: bodies in vLLM, heads in this process."""

from mlflow_compress.engines.vllm import vllm_model as vllm_model
