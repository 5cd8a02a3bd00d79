"""An engine runs models. Commands ask what it can, as data, and never which class they hold.

A new engine is one file in this package, or one module of another distribution that an entry point of the group
``mlflow_compress.engines`` names. It registers an `Engine` with the `engine` decorator; `file_model.FileModel` is what
a model in a folder needs, apart from how its passes run.
"""

from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, TypeVar

from mlflow_compress import records
from mlflow_compress.config import EngineConfig, InferenceConfig, ServedConfig, SourceConfig
from mlflow_compress.errors import ConfigError
from mlflow_compress.models.identity import IdentifiedModel
from mlflow_compress.registry import Registry
from mlflow_compress.scoring.engine import PassReport
from mlflow_compress.scoring.generation.decoding import AnyCausalLM
from mlflow_compress.scoring.plan.encoding import Encoder


@dataclass(frozen=True, kw_only=True)
class Abilities:
    """What an engine can; by default what transformers can in this process."""

    # Has the head's inputs, and so all probabilities; if not, the most probable tokens alone
    whole_distributions: bool = True
    served: bool = False  # Reaches models by an address; the others read a folder or a hub id
    places_itself: bool = False  # Chooses devices itself, so that device=balanced means nothing
    in_this_process: bool = True  # Computes in this process
    own_kernels: bool = False  # A baseline is also scored under transformers: the engine's own distance
    repeats: bool = True  # Gives the same numbers twice; a variant of an engine that does not is asked twice


Loaded = TypeVar("Loaded", bound=AnyCausalLM)
Writer = TypeVar("Writer")
Stored = TypeVar("Stored")
WriterOfScorer = TypeVar("WriterOfScorer", contravariant=True)
StoredOfScorer = TypeVar("StoredOfScorer", contravariant=True)


class ModelScorer(Protocol[WriterOfScorer, StoredOfScorer]):
    """Scores requests and corpora with one model.

    `capture` is what the model's `capture` has returned, and `baseline` what its `comparable_with` has.
    """

    @property
    def loaded(self) -> AnyCausalLM:
        """The model that generates: what `EngineModel.load` has returned."""

    @property
    def encoder(self) -> Encoder:
        """How requests become tokens."""

    @property
    def report(self) -> PassReport | None:
        """Report on the last pass; None before the first."""

    def score(
        self,
        requests: Sequence[records.Request],
        *,
        capture: WriterOfScorer | None = None,
        baseline: StoredOfScorer | None = None,
        resume: Path | None = None,
    ) -> tuple[records.OptionScores, records.OptionDistances | records.OptionBounds | None]:
        """Return one row per request, in order, and the distances from a baseline: exact, or bounds on them.

        An interrupted call resumes from the folder `resume`, and gives the same records.
        """

    def score_corpus(
        self,
        task: str,
        text: str | Sequence[str] | records.TokenAnswers,
        *,
        window: int = 512,
        max_tokens: int | None = None,
        starts: Sequence[int] = (),
        capture: WriterOfScorer | None = None,
        baseline: StoredOfScorer | None = None,
        resume: Path | None = None,
    ) -> tuple[records.TokenScores, records.TokenDistances | None]:
        """Return one row per scored token, and the distances where the engine has whole distributions.

        `starts` has the characters at which the documents of a running text begin; they name its windows.
        """


class EngineModel(IdentifiedModel, Protocol[Loaded, Writer, Stored]):
    """A model as its engine knows it. Its weights are loaded by `load`, and not before.

    - `Loaded`: The model ready to generate and to score.
    - `Writer`: What a pass is written to, so that others can be compared with it.
    - `Stored`: What such a pass is read from: a `StateStore`, or `TopLists`.
    """

    @property
    def abilities(self) -> Abilities:
        """What its engine can."""

    @property
    def rounding(self) -> dict[str, str]:
        """What decides the last bits of its numbers."""

    @property
    def identity(self) -> dict[str, object]:
        """What its numbers depend on, besides the tasks: weights, tokenizer, dtype, device and software."""

    @property
    def answer_identity(self) -> dict[str, object]:
        """What its answers depend on besides."""

    @property
    def at_server(self) -> "ModelAtServer[Loaded, Writer, Stored] | None":
        """The model with what only a server's has; None where its weights have a hash."""

    @property
    def own_kernels(self) -> "OwnKernels | None":
        """What there is besides where its engine computes otherwise than transformers; None elsewhere."""

    def load(self) -> Loaded:
        """Return the model ready to generate and to score, for `generate_answers` and for `scorer`."""

    def scorer(self, loaded: Loaded, *, after: Stored | None = None) -> ModelScorer[Writer, Stored]:
        """Return what scores with the loaded model.

        With `after`, the stored pass of the same model, it scores a second time under other conditions (other batches,
        or the server is asked again). The distance between the two is the noise floor.
        """

    def capture(self, folder: Path, loaded: Loaded) -> AbstractContextManager[Writer]:
        """Return what stores a pass, so that others can be compared with it. What an interrupted one left goes."""

    def stored(self, folder: Path) -> Stored:
        """Return the pass that `capture` has stored."""

    def comparable_with(self, stored: object) -> Stored | None:
        """Return the stored pass of any engine's baseline as this model is compared with it.

        None where only answers compare.
        """

    def notice(self) -> str:
        """Return what a person should know before numbers come; empty where there is nothing."""


class ModelAtServer(EngineModel[Loaded, Writer, Stored], Protocol[Loaded, Writer, Stored]):
    """A model whose weights nobody here has: it is recognised by its answers, and its lists of tokens cost money."""

    def with_lists_for(self, items: Collection[records.ItemKey]) -> EngineModel[Loaded, Writer, Stored]:
        """Return the model, asked for lists of most probable tokens of these items alone.

        Whole distributions, which all other engines have, are always there.
        """

    def server_identity(self) -> dict[str, object]:
        """Return what a run logs, so that the model is recognised later."""

    def recognise(self, earlier: object) -> None:
        """Refuse a model that is not the one of these facts."""

    def require_unchanged(self) -> None:
        """Refuse a model that is not the one that was opened; called when it has answered everything."""


AnyEngineModel = EngineModel[Any, Any, Any]
"""A model of any engine, where two engines may meet: what one has stored, the other's `comparable_with` takes."""


class OwnKernels(Protocol):
    """A checkpoint that is computed with other kernels than those of transformers."""

    def try_out(self) -> None:
        """Refuse a model that its engine cannot run on this machine, before hours go into another one."""

    def in_this_process(self) -> AnyEngineModel:
        """Return the same checkpoint under transformers; the engine's own memory is freed."""


@dataclass(frozen=True, kw_only=True)
class ModelRequest:
    """Which model is opened, and how."""

    address: str  # Folder, hub id, or address of a server
    source: SourceConfig = field(default_factory=SourceConfig)
    inference: InferenceConfig = field(default_factory=InferenceConfig)
    running: EngineConfig = field(default_factory=EngineConfig)
    served: ServedConfig = field(default_factory=ServedConfig)
    name: str = ""  # At the server
    reader: IdentifiedModel | None = None  # Whose tokenizer a served model has
    parameter: str = "model"  # Parameters that hold address and name, for messages
    name_parameter: str = "baseline_served_model"


class Engine(Protocol):
    """What an engine registers."""

    @property
    def abilities(self) -> Abilities:
        """What it can."""

    def started(
        self, running: EngineConfig, *, on_gpu: bool | None, workers: Any = None
    ) -> AbstractContextManager[Any]:
        """Return a block within which the engine runs. Blocks within it share it.

        The block yields what hands out work to several processes; None where nothing does. `workers` is the class of
        these processes, None for those that score. `on_gpu` None leaves the choice to the engine.
        """

    def open(self, request: ModelRequest) -> AnyEngineModel:
        """Return a model without loading its weights."""


class StartsNothing:
    """Base of an engine that runs without a block of its own."""

    def started(
        self, running: EngineConfig, *, on_gpu: bool | None, workers: Any = None
    ) -> AbstractContextManager[None]:
        return nullcontext()


ENGINES: Registry[Engine] = Registry("engine", "mlflow_compress.engines", group="mlflow_compress.engines")

C = TypeVar("C", bound=Callable[[], Engine])


def engine(name: str) -> Callable[[C], C]:
    """Class decorator: register one instance of an `Engine` under this name."""

    def decorate(cls: C) -> C:
        ENGINES.register(name)(cls())
        return cls

    return decorate


def engine_of_files(name: str) -> Engine:
    """Return the engine that the parameter `engine` names: one that reads folders."""
    if name in ENGINES.names() and ENGINES.get(name).abilities.served:
        allowed = [known for known, one in ENGINES.items() if not one.abilities.served]
        raise ConfigError(
            "Unknown engine",
            allowed=allowed,
            got=name,
            fix="A served model is named by its address: endpoint:https://...",
        )
    return ENGINES.get(name)
