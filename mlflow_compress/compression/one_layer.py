"""One decoder layer of a model in a compressed form, made by the method's own code while the layer is in memory.

The layer is written as a model of one layer with a few random words. That is compressed and loaded as any model is, so
the layer has the bits that it has in a checkpoint of the whole model, where a method makes a layer from that layer
alone.
"""

import copy
import gc
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from mlflow_compress.compression.method import METHODS, CompressionJob, MethodConfig
from mlflow_compress.compression.pipeline import quiet, require_supported, write_compressed
from mlflow_compress.compression.probe import Probe
from mlflow_compress.errors import UnsupportedError
from mlflow_compress.models.loading import LoadConfig, LoadedModel, load_model
from mlflow_compress.models.model_files import without_weights
from mlflow_compress.models.source_model import SourceModel, resolve
from mlflow_compress.models.weight_groups import decoder_layers

_WORDS = 64


class LayerMaker:
    """Makes compressed forms of a loaded model's layers, each while the weights of that layer are in memory.

    `source` describes the same model; in `scratch` a layer is written, once as it is and once compressed.
    """

    def __init__(self, loaded: LoadedModel, source: SourceModel, scratch: Path) -> None:
        if loaded.dtype not in (torch.float32, source.torch_dtype):
            raise UnsupportedError(
                "Layers must be compressed from their stored weights, and this dtype would round them",
                allowed=f"float32, {source.dtype}",
                got=str(loaded.dtype).removeprefix("torch."),
                fix="Use one of these as dtype",
            )
        self.loaded, self.source, self.scratch = loaded, source, scratch
        self._name, self._layers = _layers(loaded.model)  # while it is scored, others stand there

    def forms(self, method: str, config: MethodConfig) -> Callable[[int], torch.nn.Module]:
        """Return what makes a method's form of the layer with a number, whose weights are in memory now."""
        chosen = METHODS.get(method)
        if chosen.needs_calibration or not chosen.linear_only:
            raise UnsupportedError(f"Method {method!r} needs more than one layer at a time")
        require_supported(chosen, config, self.source)

        def form(number: int) -> torch.nn.Module:
            gc.collect()  # modules have reference cycles: without this, several layers' models are in memory
            with tempfile.TemporaryDirectory(dir=self.scratch) as folder:
                before, after = Path(folder) / "plain", Path(folder) / "compressed"
                after.mkdir()
                self._write(number, before)
                one = resolve(str(before), trust_remote_code=self.source.trust_remote_code)
                job = CompressionJob(
                    source=one,
                    config=config,
                    calibration=None,
                    probe=Probe.for_model(one),
                    device=self.loaded.device.type,
                    folder=after,
                )
                write_compressed(chosen, job)
                placed = LoadConfig(
                    path=str(after),
                    dtype=str(self.loaded.dtype).removeprefix("torch."),
                    device=str(self.loaded.device),
                    trust_remote_code=one.trust_remote_code,
                )
                made = load_model(placed)
            return self._in_place(_layers(made.model)[1][0], number)

        return form

    def _write(self, number: int, folder: Path) -> None:
        """Write a model of this layer alone."""
        config = copy.deepcopy(self.loaded.model.config)
        text = config.get_text_config(decoder=True)
        for name, value in vars(text).items():
            if isinstance(value, list | tuple) and len(value) == text.num_hidden_layers:  # of layers, such as types
                setattr(text, name, [value[number]])
        text.num_hidden_layers, text.vocab_size = 1, _WORDS
        for part in (config, text):
            part.pad_token_id = part.bos_token_id = part.eos_token_id = None
        config.dtype = text.dtype = self.source.torch_dtype
        config.name_or_path = str(folder)
        model = without_weights(config, self.source.folder, trust_remote_code=self.source.trust_remote_code)
        layer = self._layers[number]
        stored = {f"{self._name}.0.{own}": tensor for own, tensor in layer.state_dict().items()}
        shapes = {own: tensor.shape for own, tensor in model.state_dict().items()}
        with torch.random.fork_rng():
            torch.manual_seed(0)
            others = {own: torch.randn(shape) for own, shape in shapes.items() if own not in stored}
        dtype = self.source.torch_dtype
        model.load_state_dict({own: t.to("cpu", dtype) for own, t in (stored | others).items()}, assign=True)
        model.tie_weights()
        with quiet():
            model.save_pretrained(folder)
        _tokenizer().save_pretrained(folder)

    def _in_place(self, made: torch.nn.Module, number: int) -> torch.nn.Module:
        """Return the made layer with the number of the one that it stands for, from which nothing else may differ."""
        parts = dict(made.named_modules())
        for name, module in self._layers[number].named_modules():
            other = parts.get(name)
            if type(other) is not type(module):  # what the method has replaced
                continue
            for attribute, value in vars(module).items():
                if attribute.startswith("_") or not isinstance(value, bool | int | float | str | None):
                    continue
                if attribute == "layer_idx":
                    vars(other)[attribute] = value
                elif vars(other).get(attribute) != value:
                    raise UnsupportedError(
                        f"Layer {number} differs when it is alone in a model: {name}.{attribute}",
                        allowed=str(value),
                        got=vars(other).get(attribute),
                    )
        return made


def seconds_of_a_form(method: str, config: MethodConfig) -> tuple[float, float]:
    """Return the seconds that this machine takes to make a form of a layer: of any layer, and of each of its weights.

    Measured with two layers of a random Llama, each the second time. That is processor time where it is less than the
    clock's: what else the machine does meanwhile does not count.
    """
    from transformers import LlamaConfig, LlamaForCausalLM

    found = []
    for hidden in (256, 1024):
        sizes = {"hidden_size": hidden, "intermediate_size": 4 * hidden, "num_attention_heads": hidden // 64}
        model = LlamaForCausalLM._from_config(LlamaConfig(vocab_size=_WORDS, num_hidden_layers=1, **sizes))
        with tempfile.TemporaryDirectory() as folder, quiet():
            model.to(torch.bfloat16).save_pretrained(folder)
            _tokenizer().save_pretrained(folder)
            loaded = load_model(LoadConfig(path=folder, device="cpu"))
            form = LayerMaker(loaded, resolve(folder), Path(folder)).forms(method, config)
            for _ in range(2):
                began, processor = time.perf_counter(), time.process_time()
                form(0)
                seconds = min(time.perf_counter() - began, time.process_time() - processor)
        found.append((seconds, sum(weight.numel() for weight in loaded.model.model.layers.parameters())))
    (less, few), (more, many) = found
    each = max(0.0, more - less) / (many - few)
    return less - each * few, each


def _layers(model: Any) -> tuple[str, list[torch.nn.Module]]:
    found = decoder_layers(model)
    if found is None:
        raise UnsupportedError("The model's decoder layers are not found", got=type(model).__name__)
    return found[0], list(found[1])


def _tokenizer() -> Any:
    """Return a tokenizer of a few words, which a model's folder needs."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from transformers import PreTrainedTokenizerFast

    words = {str(number): number for number in range(_WORDS)}
    return PreTrainedTokenizerFast(tokenizer_object=Tokenizer(WordLevel(words, unk_token="0")), unk_token="0")
