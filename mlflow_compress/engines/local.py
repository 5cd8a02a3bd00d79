"""``engine=local``: transformers in this process."""

from dataclasses import dataclass

from mlflow_compress.engines.file_model import FileModel, open_request
from mlflow_compress.engines.interface import Abilities, ModelRequest, StartsNothing, engine
from mlflow_compress.models.loading import LoadedModel, load_model


@dataclass(frozen=True)
class LocalModel(FileModel):
    """A model that this process loads."""

    abilities = Abilities()

    def load(self) -> LoadedModel:
        return load_model(self.config)


@engine("local")
class LocalEngine(StartsNothing):
    """Loads models into this process."""

    abilities = LocalModel.abilities

    def open(self, request: ModelRequest) -> LocalModel:
        return LocalModel.of(open_request(request))
