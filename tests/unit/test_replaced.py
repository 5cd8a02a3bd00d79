"""What is replaced in libraries: for a block only, in the versions that were read, and their text is still the same."""

import hashlib
import importlib
import inspect
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from mlflow_compress.errors import UnsupportedError
from mlflow_compress.replaced import replaced


class Machine:
    factor = 2

    @staticmethod
    def double(n: int) -> int:
        return 2 * n


def test_an_attribute_is_another_one_within_the_block_and_what_it_was_afterwards() -> None:
    machine, stored = Machine(), dict(vars(Machine))
    with replaced(machine, "factor", 3):
        assert machine.factor == 3 and Machine.factor == 2
    assert machine.factor == 2 and vars(machine) == {}
    with pytest.raises(RuntimeError), replaced(Machine, "double", staticmethod(lambda n: 3 * n)):
        assert machine.double(2) == 6
        raise RuntimeError
    assert dict(vars(Machine)) == stored and machine.double(2) == 4
    module = SimpleNamespace(name="a")
    with replaced(module, "name", "b"), replaced(module, "name", "c"):
        assert module.name == "c"
    assert module.name == "a"


def test_a_library_that_was_not_read_is_refused() -> None:
    with pytest.raises(UnsupportedError, match=r"version of numpy is not known.*Allowed: 0\.1\.\*.*pip install"):
        replaced(Machine, "factor", 3, of="numpy 0.1").__enter__()
    with pytest.raises(UnsupportedError, match="nothing, which is replaced in it, may have changed"):
        replaced(
            Machine, "nothing", 3, of=f"numpy {importlib.metadata.version('numpy').rpartition('.')[0]}"
        ).__enter__()
    assert Machine.factor == 2


# What was read of each library, by the place that is replaced: the beginning of the SHA-256 of its text. A module
# stands for a name in it that others give.
READ = {
    "llmcompressor.modifiers.gptq:GPTQModifier._log_rtn_fallback_summary": "e5e5f5313e5e",
    "llmcompressor.modifiers.autoround.base:": "a6e8944e43a9",
    "llmcompressor.modifiers.pruning.sparsegpt.sgpt_sparsify:": "99705eae652f",
    "llmcompressor.pipelines.cache:IntermediatesCache.pin_memory": "12f33ab17f3e",
    "compressed_tensors.compressors.base:replace_direct_state_dict": "a066af0c103b",
    "compressed_tensors.compressors.pack_quantized.base:unpack_from_int32": "4ad9c5eb4a6a",
    "compressed_tensors.quantization.lifecycle.forward_helpers:_dequantize": "41e4b97a454f",
    "compressed_tensors.compressors.nvfp4.base:unpack_fp4_from_uint8": "0aa9fccfc0ac",
    "transformers.modeling_utils:PreTrainedModel.initialize_weights": "f5ae09209770",
    "gptqmodel.looper.loop_processor:": "fa032a51ad18",
    "gptqmodel.utils.threadx:_DeviceWorker._abort_process": "038fd3c7b860",
}


@pytest.mark.parametrize("place", READ)
def test_what_is_replaced_is_what_was_read(place: str) -> None:
    module, _, names = place.partition(":")
    if module.startswith("gptqmodel"):
        pytest.importorskip("gptqmodel")
    found: Any = importlib.import_module(module)
    for name in filter(None, names.split(".")):
        found = getattr(found, name)
    text = Path(inspect.getfile(found)).read_text(encoding="utf-8") if not names else inspect.getsource(found)
    assert hashlib.sha256(text.encode()).hexdigest()[:12] == READ[place], "read it again, then store this hash"
