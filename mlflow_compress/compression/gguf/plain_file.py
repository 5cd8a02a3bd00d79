"""A model as a GGUF file in its own dtype: the baseline of llama.cpp's speed."""

from __future__ import annotations

from pathlib import Path

from mlflow_compress.compression.gguf import gguf_model, llama_like
from mlflow_compress.models import gguf_file
from mlflow_compress.models.source_model import SourceModel


def write_plain(source: SourceModel, path: Path) -> None:
    """Write the model as GGUF; matrices keep their dtype, vectors are float32.

    Raises
    ------
    UnsupportedError
        GGUF files of this architecture are not written here.
    """
    import gguf

    gguf_model.require_known(source, block=1)
    model, name = source.load("cpu"), gguf_model.ARCHITECTURES[source.architecture]
    model = llama_like.as_llama(model) if name == "llama" else model
    plain = gguf_model.plain_kind(source.dtype)
    tensors = gguf_model.tensors_of(model, lambda _, parameter: plain(parameter))
    kind = {"float32": "ALL_F32", "float16": "MOSTLY_F16", "bfloat16": "MOSTLY_BF16"}[source.dtype]
    gguf_file.write(path, model.config, name, gguf.LlamaFileType[kind], tensors, source.tokenizer())
