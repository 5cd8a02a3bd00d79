"""Single-answer grading with MT-Bench's prompts, by a model behind an OpenAI-compatible endpoint."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mlflow_compress.errors import AlignmentError, ConfigError, DataError
from mlflow_compress.judges.endpoint import Endpoint, EndpointConfig
from mlflow_compress.judges.judge_registry import AskedInstruction
from mlflow_compress.judges.judgment_cache import JudgmentCache, content_key
from mlflow_compress.judges.parsing import parse_rating
from mlflow_compress.judges.prompts import Prompt, grading_prompt, needs_reference
from mlflow_compress.records import Generations, Judgments


@dataclass(frozen=True, kw_only=True)
class MtBenchConfig:
    """How answers are graded. Temperature 0, as in MT-Bench.

    Attributes
    ----------
    endpoint : EndpointConfig
        Address and key of the judge.
    model : str
        Name of the judge model.
    repeats : int
        Number of times each answer is graded, because judges are not deterministic even at temperature 0.
    attempts : int
        Number of requests per grading until a rating can be read. After that, the answer counts as unscored.
    max_tokens : int
        Longest judgment, in tokens.
    concurrency : int
        Number of requests at the same time.
    """

    endpoint: EndpointConfig
    model: str = "gpt-4"
    repeats: int = 1
    attempts: int = 3
    max_tokens: int = 2048
    concurrency: int = 4

    def __post_init__(self) -> None:
        for name in ("repeats", "attempts", "max_tokens", "concurrency"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be at least 1", got=getattr(self, name))
        if not self.model.strip():
            raise ConfigError("No judge model named", fix="Set judge_model, for example to gpt-4")


@dataclass(frozen=True)
class _Work:
    """One grading to obtain."""

    item: AskedInstruction
    turn: int
    repeat: int
    prompt: Prompt
    key: str


class MtBenchJudge:
    """Grades answers. A grading with the same content as an earlier one is read from the cache.

    Parameters
    ----------
    config : MtBenchConfig
    cache : pathlib.Path, optional
        JSONL file that stores every judgment at once, so that an interrupted run loses at most the requests in flight.
        Judgments without a readable rating are not stored, and a later run asks again.
    """

    def __init__(self, config: MtBenchConfig, *, cache: Path | None = None) -> None:
        self.config = config
        self._cache = JudgmentCache(cache)

    def judge(
        self,
        instructions: Sequence[AskedInstruction],
        answers: Generations,
        *,
        task: str = "mt_bench",
        label: str = "judge",
    ) -> Judgments:
        """Return judgments of sample 0 of every turn of every instruction.

        Parameters
        ----------
        instructions : sequence of AskedInstruction
            Math, reasoning and coding need reference answers.
        answers : Generations
            All turns of every instruction.
        task : str
            Task name of the records.
        label : str
            Name of the progress bar.

        Returns
        -------
        Judgments
            One row per instruction, turn and repeat; `score` is null if no rating could be read.

        Raises
        ------
        DataError
            A reference answer is missing.
        AlignmentError
            An answer is missing.
        JudgeError
            The endpoint fails. Judgments until then are in the cache.
        """
        work = self._plan(instructions, answers)
        graded = self._run(work, label)
        rows = [
            {
                "task": task,
                "item_id": unit.item.item_id,
                "turn": unit.turn,
                "repeat": unit.repeat,
                "category": unit.item.category,
                **graded[unit.key],
            }
            for unit in work
        ]
        return Judgments.from_rows(rows)

    def _plan(self, instructions: Sequence[AskedInstruction], answers: Generations) -> list[_Work]:
        texts = _first_samples(answers)
        work = []
        for item in instructions:
            turns = range(len(item.turns))
            if missing := [turn for turn in turns if (item.item_id, turn) not in texts]:
                raise AlignmentError("An instruction lacks an answer", got=f"{item.item_id}, turn {missing[0]}")
            if needs_reference(item.category) and len(item.reference) < len(turns):
                raise DataError(
                    f"Instruction {item.item_id} has no reference answers, and MT-Bench needs them for {item.category}",
                    fix="Add 'reference' (a text per turn) to the instruction file",
                )
            said = [texts[item.item_id, turn] for turn in turns]
            for turn in turns:
                prompt = grading_prompt(item.category, turn, item.turns, said, item.reference)
                for repeat in range(self.config.repeats):
                    work.append(_Work(item, turn, repeat, prompt, self._key(prompt, item.item_id, repeat)))
        return work

    def _key(self, prompt: Prompt, item_id: str, repeat: int) -> str:
        return content_key(
            base_url=self.config.endpoint.shown_url,
            model=self.config.model,
            messages=prompt.messages,
            max_tokens=self.config.max_tokens,
            item_id=item_id,
            repeat=repeat,
        )

    def _run(self, work: Sequence[_Work], label: str) -> dict[str, dict[str, Any]]:
        """Return a score and judgment per key. The endpoint is asked for those that are not in the cache."""
        from tqdm import tqdm

        graded = {unit.key: cached for unit in work if (cached := self._cache.get(unit.key)) is not None}
        missing = {unit.key: unit for unit in work if unit.key not in graded}
        if not missing:
            return graded
        with (
            Endpoint(self.config.endpoint) as endpoint,
            tqdm(total=len(missing), desc=label, unit="grade", disable=None, leave=False) as bar,
            ThreadPoolExecutor(self.config.concurrency, thread_name_prefix="judge") as pool,
        ):
            futures: dict[Future[dict[str, Any]], str] = {}
            for key, unit in missing.items():
                future = pool.submit(self._grade, endpoint, unit)
                future.add_done_callback(lambda _: bar.update())
                futures[future] = key
            try:
                done, _ = wait(futures, return_when=FIRST_EXCEPTION)
                for future in done:
                    graded[futures[future]] = future.result()
            except BaseException:  # an error or Ctrl-C: no further requests
                pool.shutdown(wait=False, cancel_futures=True)
                raise
        return graded

    def _grade(self, endpoint: Endpoint, unit: _Work) -> dict[str, Any]:
        """Return score and judgment, after at most `attempts` requests until a rating can be read."""
        for _ in range(self.config.attempts):
            answer = endpoint.complete(unit.prompt.messages, model=self.config.model, max_tokens=self.config.max_tokens)
            score = parse_rating(answer.text)
            found = {"score": score, "judgment": answer.text, "judge": f"{answer.model} {unit.prompt.name}"}
            if score is not None:
                self._cache.put(unit.key, found)
                break
        return found


def _first_samples(answers: Generations) -> dict[tuple[str, int], str]:
    first = answers.where(sample=0)
    columns = (first.column(name).tolist() for name in ("item_id", "turn", "text"))
    return {(item_id, int(turn)): text for item_id, turn, text in zip(*columns, strict=True)}
