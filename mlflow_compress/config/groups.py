"""The groups of parameters: the baseline, the compression, what is evaluated, what is answered, how models run."""

import math
import os
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal

from pydantic import Field

from mlflow_compress.config.declarations import (
    EMBEDDED,
    Group,
    Names,
    OptionalReason,
    OptionalText,
    Pairs,
    Parameters,
    Target,
    Together,
    option,
)
from mlflow_compress.config.policy import Policy, read_policy
from mlflow_compress.errors import ConfigError

Dtype = Literal["auto", "float32", "bfloat16", "float16"]
Device = Literal["auto", "cpu", "cuda", "balanced"]
AutoOrCount = Annotated[int, Field(ge=1)] | Literal["auto"]

SEED = 42
"""The seed that nobody has chosen. Another one is said in the verdict: whoever tries many finds one that passes."""


_MODEL_ARGS = Together("model_args", "further settings of the baseline: name=value,name=value")
_CALIBRATION_ARGS = Together("calibration_args", "how much calibration text is used: name=value,name=value")
_TASK_ARGS = Together("task_args", "further settings of tasks: name=value,name=value")
_ANSWER_ARGS = Together("answer_args", "further settings of the answers that are compared: name=value,name=value")
_JUDGE_ARGS = Together("judge_args", "how judges are called, and what that may cost: name=value,name=value")
_ENGINE_ARGS = Together("engine_args", "further settings of engine=ray and engine=vllm: name=value,name=value")
_ENDPOINT_ARGS = Together("endpoint_args", "how served models are called: name=value,name=value")
_SPEED_ARGS = Together("speed_args", "what is generated to measure speed: name=value,name=value")


class SourceConfig(Group):
    """Which baseline, where it runs, and the seed of everything random."""

    model: str = option(
        EMBEDDED,
        "baseline model: 'demo', 'demo-tools' or 'demo-thinks' (embedded), a folder, or a Hugging Face hub id; "
        "default with a checkpoint: the model that it was made from",
        path="folder",
    )
    other_baseline: OptionalReason = option(
        None,
        "why a checkpoint is compared with a baseline that it was not made from, in words that the run shows; none: "
        "that is refused",
        within=_MODEL_ARGS,
    )
    device: Device = option(
        "auto", "where models run; 'balanced' spreads a model over all GPUs, then memory, then the disk"
    )
    max_memory: Pairs = option(
        {}, "device=balanced: memory limit for models per device: cpu=2GiB,0=70GiB; none: all free memory"
    )
    offload_dir: OptionalText = option(
        None,
        "device=balanced: folder for weights on the disk; none: the system's temporary folder",
        path="folder",
        within=_MODEL_ARGS,
    )
    seed: int = option(
        SEED,
        "seed of shuffles, splits, samples, calibration and bootstrap; a verdict names any seed but the default",
        ge=0,
    )
    trust_remote_code: bool = option(
        False, "run code that comes with a checkpoint (off: such models are refused)", within=_MODEL_ARGS
    )
    data_dir: OptionalText = option(None, "folder of data sets in hub layout, searched before the hub", path="folder")

    @property
    def reason(self) -> dict[str, str]:
        """Why a checkpoint is compared with another baseline than its own, as runs log it; empty without a reason."""
        return {} if self.other_baseline is None else {"other_baseline": self.other_baseline}


class CompressionConfig(Group):
    """Which method, with which settings, calibrated on what."""

    method: str = option("awq", "compression method (mlflow-compress list methods lists them)")
    bits: AutoOrCount = option("auto", "bits per weight; 'auto' takes the method's default")
    group_size: str = option("auto", "weights that share one scale; 'auto' takes the method's default")
    calibration: str = option(
        "auto",
        "wikitext2, c4, pile, ultrachat, demo, or a file (.txt, .jsonl); 'auto' is 'demo' for the demo",
        path="file",
    )
    calibration_samples: AutoOrCount = option(
        "auto", "calibration samples; 'auto' takes the method's default", within=_CALIBRATION_ARGS
    )
    calibration_length: int = option(256, "tokens per calibration sample", ge=8, within=_CALIBRATION_ARGS)
    method_args: Pairs = option({}, "the method's further settings: name=value,name=value (sparsity=0.5,pattern=2:4)")
    checkpoint: OptionalText = option(
        None,
        "for method=checkpoint: folder, hub id or GGUF file of a model that others compressed; or "
        "endpoint:http://host:port/v1 of a served model, which `main` evaluates without compressing it",
        path="either",
    )
    target: Target = option(
        "any", "server that must load the checkpoint; formats that its kernels lack are refused before compressing"
    )
    output_dir: str = option(
        "auto",
        "folder that receives one sub-folder per variant; 'auto' is checkpoints/ in the state folder (next to "
        "the database, or MLFLOW_COMPRESS_HOME)",
    )


class EvaluationConfig(Group):
    """What is evaluated and how, the same for every variant."""

    tasks: Names = option(
        "auto", "comma-separated task names and files (.jsonl, .txt); 'auto' is 'demo' for the demo", path="files"
    )
    num_fewshot: int = option(5, "few-shot examples in lettered multiple choice", ge=0)
    num_shuffles: int = option(2, "answer shuffles for the order-robustness metric; 0 turns it off", ge=0)
    shuffle_fewshot: bool = option(
        False,
        "shuffle the answers of the few-shot examples too (off: their order stays, as in the published metric)",
        within=_TASK_ARGS,
    )
    all_orders: int = option(
        0,
        "items per lettered task that are also scored under every permutation of their (at most 4) options; 0: none",
        ge=0,
        within=_TASK_ARGS,
    )
    prompt_style: Names = option(
        "auto",
        "prompt styles of lettered tasks, comma-separated; all are also asked with options E and F, the first without",
    )
    limit: int = option(0, "items per category and task after a seeded shuffle; 0 takes all", ge=0)

    apply_chat_template: bool = option(
        False, "show lettered tasks and those of lm-evaluation-harness in the model's chat template", within=_TASK_ARGS
    )
    fewshot_as_multiturn: bool = option(
        True,
        "in a chat template, few-shot examples of lm-evaluation-harness's tasks are separate turns (off: one turn)",
        within=_TASK_ARGS,
    )

    enable_thinking: bool = option(
        True,
        "reasoning tasks: enable_thinking of the chat template; false asks for the answer without reasoning",
        within=_TASK_ARGS,
    )
    thinking_samples: int = option(
        8,
        "reasoning tasks: sampled answers per question and model, at the baseline's own temperature",
        ge=2,
        within=_TASK_ARGS,
    )
    thinking_max_new_tokens: AutoOrCount = option(
        "auto",
        "reasoning tasks: longest answer in tokens, reasoning included; 'auto' is 256 for the embedded problems, 8192 "
        "for your own",
        within=_TASK_ARGS,
    )

    noise_items: int = option(
        200,
        "items per task and windows per corpus that the baseline (and a served variant) scores twice; 0 takes all",
        ge=0,
        within=_TASK_ARGS,
    )


@dataclass(frozen=True)
class SampleSize:
    """How many items are drawn: a number, or as many as give an interval of this width, or decide this policy."""

    count: int | None = None
    width: float | None = None  # From the value to the farther end of its interval, in points
    policy: Policy | None = None
    more: tuple[int, ...] = ()  # Then further rounds, up to these numbers of items


class SamplingConfig(Group):
    """On which items the variant is scored; the baseline is scored on all of them."""

    items: str = option(
        "all",
        "items on which the variant is scored: 'all', or a sample with more items where answers can flip: a number; "
        "'width:0.5': until flips and accuracy change are known to 0.5 points; 'auto': until the default policy is "
        "decided; 'auto:FILE': until that policy is",
    )

    def model_post_init(self, context: Any, /) -> None:
        _ = self.size

    @property
    def logged(self) -> dict[str, str]:
        """What a run logs of it; nothing where all items are scored. A policy counts by what it says."""
        size = self.size
        if size is None:
            return {}
        first = str(size.count) if size.width is None else f"width:{size.width:g}"
        if size.policy is not None:
            first = "auto" if size.policy == Policy() else f"auto:{size.policy.sha256[:8]}"
        return {"items": "+".join([first, *map(str, size.more)])}

    @property
    def before_last(self) -> "SamplingConfig | None":
        """The same without the last of its further rounds; None where there is none."""
        first, plus, last = self.items.rpartition("+")
        return SamplingConfig(items=first) if plus and last.isdigit() else None

    @property
    def size(self) -> SampleSize | None:
        """How many items are drawn; None where all are scored."""
        if self.items == "all":
            return None
        if (first := self.before_last) is not None and first.size is not None:
            return replace(first.size, more=(*first.size.more, int(self.items.rpartition("+")[2])))
        name, colon, number = self.items.partition(":")
        if name == "auto" and (number or not colon):
            return SampleSize(policy=read_policy(number or None))
        with suppress(ValueError):
            if not colon and int(name) > 0:
                return SampleSize(count=int(name))
            if name == "width" and 0 < float(number) < math.inf:
                return SampleSize(width=float(number))
        allowed = "all, auto, auto:POLICY.yaml, a number of items, or width:POINTS such as width:0.5"
        raise ConfigError("Parameter 'items' cannot be read", allowed=allowed, got=self.items)


class TracesConfig(Group):
    """The task `traces`: text that the baseline writes before it is evaluated."""

    trace_instructions: str = option(
        "auto",
        "tasks=traces: instructions for the baseline: mt_bench, vicuna_bench, alpaca, demo, or a JSONL file; 'auto' is "
        "'demo' for the demo. The baseline writes prompts x samples x tokens once, before it is evaluated",
        path="file",
        within=_TASK_ARGS,
    )
    trace_prompts: int = option(100, "tasks=traces: prompts, drawn with the seed; 0 takes all", ge=0, within=_TASK_ARGS)
    trace_samples: int = option(1, "tasks=traces: sampled answers per prompt", ge=1, within=_TASK_ARGS)
    trace_max_new_tokens: AutoOrCount = option(
        "auto",
        "tasks=traces: longest answer in tokens; 'auto' is 512, or a quarter of a shorter context",
        within=_TASK_ARGS,
    )
    trace_temperature: float = option(
        1.0, "tasks=traces: temperature; 1 samples the model's unmodified distribution", gt=0, within=_TASK_ARGS
    )


class InferenceConfig(Group):
    """How both models run, for scoring and for answers."""

    dtype: Dtype = option(
        "auto", "dtype of both models, for scoring and for answers; auto: the baseline's own on GPUs, float32 on CPUs"
    )
    system_prompt: OptionalText = option(
        None, "system prompt for judged answers and for tasks in the chat template; none: no system prompt"
    )
    redact: OptionalText = option(
        None,
        "what is removed from logged conversations before anything is stored, comma-separated: email, url, ip, iban, "
        "phone, or files with one regular expression per line",
        path="files",
    )


VLLM_PYTHON = "MLFLOW_COMPRESS_VLLM_PYTHON"


def named_python(python: str | None) -> str | None:
    """Return the Python with vLLM that is given, or that the environment names; None where there is neither."""
    return python or os.environ.get(VLLM_PYTHON) or None


class EngineConfig(Group):
    """What runs the models, for scoring and for answers."""

    engine: str = option(
        "local",
        "what runs models: 'local' is transformers in this process, 'ray' the same on the workers of a Ray cluster "
        "(experimental), 'vllm' is vLLM with its own kernels; or the name of an engine that an installed package adds",
    )
    workers: AutoOrCount = option(
        "auto",
        "workers of engine=ray, each with a copy of the model; 'auto' is one per GPU, or as many as cores allow",
        within=_ENGINE_ARGS,
    )
    cpus_per_worker: int = option(1, "cores of a worker, and on CPUs its threads", ge=1, within=_ENGINE_ARGS)
    ray_address: OptionalText = option(
        None,
        "running Ray cluster: 'auto' (found on this machine) or host:port; none: one is started on this machine",
        within=_ENGINE_ARGS,
    )
    vllm_python: OptionalText = option(
        None,
        "engine=vllm and speed: file of the Python that has vLLM; none: that of MLFLOW_COMPRESS_VLLM_PYTHON",
        path="program",
        within=_ENGINE_ARGS,
    )
    vllm_args: Pairs = option({}, "engine=vllm: further arguments of vLLM: tensor_parallel_size=2,block_size=32")


class AnswerConfig(Group):
    """What is answered, compared and graded, the same for every variant."""

    instructions: str = option(
        "auto",
        "mt_bench, vicuna_bench, alpaca, xstest, jbb, or_bench, do_not_answer, demo, a JSONL file, openai:FILE or "
        "mlflow-traces:EXPERIMENT; 'auto' is "
        "'demo' for the demo",
        path="file",
    )
    instruction_limit: int = option(
        0, "instructions per category after a seeded shuffle; 0 takes all", ge=0, within=_ANSWER_ARGS
    )
    show_logged: bool = option(
        False, "show answers to logged conversations, and their questions, in reports and pages", within=_ANSWER_ARGS
    )
    num_samples: int = option(5, "sampled answers per instruction for ConSCompF", ge=2, within=_ANSWER_ARGS)
    max_new_tokens: int = option(128, "longest sampled answer in tokens", ge=1, within=_ANSWER_ARGS)
    encoder: str = option(
        "embedded",
        "sentence encoder: 'embedded' (all-MiniLM-L6-v2), a folder or a hub id; with encoder_base_url its name there",
        path="folder",
        within=_ANSWER_ARGS,
    )
    encoder_base_url: OptionalText = option(
        None,
        "OpenAI-compatible endpoint that embeds the answers (needs ENCODER_API_KEY); none: this machine does",
        within=_ANSWER_ARGS,
    )
    bertscore_model: OptionalText = option(
        None,
        "model of BERTScore: 'embedded', a folder or a hub id such as roberta-large; none: no BERTScore",
        path="folder",
        within=_ANSWER_ARGS,
    )
    judges: Names = option("all", "judges of the answers, comma-separated; 'all' is every installed one but pairwise")
    judge_max_tokens: AutoOrCount = option(
        "auto",
        "longest graded and longest greedy answer (divergent_tokens) in tokens; 'auto' is 1024, or a quarter of a "
        "shorter context",
        within=_ANSWER_ARGS,
    )


class JudgeModelConfig(Group):
    """Which models judge, how they are called, and what that may cost."""

    judge_model: Names = option(
        "gpt-4", "models asked for grades, comma-separated (needs OPENAI_API_KEY); several are reported separately"
    )
    judge_base_url: str = option(
        "auto", "OpenAI-compatible endpoint; 'auto' is OPENAI_BASE_URL or the client's default", within=_JUDGE_ARGS
    )
    judge_repeats: int = option(
        1, "times each answer is graded; 2 or more also measure the judge's own noise", ge=1, within=_JUDGE_ARGS
    )
    judge_attempts: int = option(
        3,
        "most replies per judgment, until one is readable; replies are saved, so a larger number continues from there",
        ge=1,
        within=_JUDGE_ARGS,
    )
    judge_max_unscored: float = option(
        0.05,
        "largest share of judgments without a rating; above it the stage fails, and all replies stay on disk",
        ge=0,
        within=_JUDGE_ARGS,
    )

    judge_concurrency: int = option(16, "simultaneous calls to the judge", ge=1, within=_JUDGE_ARGS)
    judge_timeout: float = option(120.0, "seconds for one call to the judge", gt=0, within=_JUDGE_ARGS)
    judge_max_retries: int = option(
        5, "retries of a call after a failure that may be temporary", ge=0, within=_JUDGE_ARGS
    )
    judge_requests_per_minute: int = option(0, "calls to the judge per minute; 0: no limit", ge=0, within=_JUDGE_ARGS)
    judge_tokens_per_minute: int = option(
        0, "tokens of prompts and longest replies per minute; 0: no limit", ge=0, within=_JUDGE_ARGS
    )

    judge_prices: OptionalText = option(
        None,
        "YAML file of prices per million tokens: 'model: {prompt: 2.5, completion: 10}'; none: cost is not computed",
        path="file",
        within=_JUDGE_ARGS,
    )
    judge_max_cost: float = option(
        0.0,
        "most that one command may spend on judges, by judge_prices (a sweep: for all variants); 0: no limit",
        ge=0,
        within=_JUDGE_ARGS,
    )
    judge_traces: bool = option(
        True, "show each judged answer in MLflow as a trace, with an assessment per judgment", within=_JUDGE_ARGS
    )
    judge_prompts: OptionalText = option(
        None,
        "FastChat's file judge_prompts.jsonl, for judges=pairwise; none: our own pair prompts",
        path="file",
        within=_JUDGE_ARGS,
    )


class TimingConfig(Group):
    """What is generated to measure speed."""

    speed_prompt_tokens: AutoOrCount = option(
        "auto", "tokens of each prompt; 'auto' is 256, or half of a shorter context", within=_SPEED_ARGS
    )
    speed_new_tokens: Annotated[int, Field(ge=2)] | Literal["auto"] = option(
        "auto",
        "tokens generated after each prompt; 'auto' is 32, or a quarter of a shorter context",
        within=_SPEED_ARGS,
    )
    speed_repeats: int = option(
        5,
        "timed rounds, after one to warm up; each times baseline and variant. Up to four times as many are run while "
        "the interval of a ratio is wider than 10 %",
        ge=2,
        within=_SPEED_ARGS,
    )
    speed_threads: AutoOrCount = option(
        "auto",
        "threads on a CPU; 'auto' is OMP_NUM_THREADS if it is set, else one per core that this process may use",
        within=_SPEED_ARGS,
    )


ENDPOINT = "endpoint:"
"""The beginning of a served model's address, which stands in place of a folder."""


class ServedConfig(Group):
    """Served models (checkpoint=endpoint:URL, model=endpoint:URL), and how their server is called."""

    served_model: OptionalText = option(
        None, "with checkpoint=endpoint:http://host:port/v1: the model's name at that server", within=_ENDPOINT_ARGS
    )
    baseline_served_model: OptionalText = option(
        None, "with model=endpoint:URL: the baseline's name at that server", within=_ENDPOINT_ARGS
    )
    tokenizer: OptionalText = option(
        None,
        "tokenizer of served models: a folder or a hub id; none: the baseline's",
        path="folder",
        within=_ENDPOINT_ARGS,
    )
    endpoint_chat: Literal["auto", "true", "false"] = option(
        "auto",
        "send conversations as chat completions; 'auto': if the server's chat template reads as the baseline's",
        within=_ENDPOINT_ARGS,
    )
    endpoint_concurrency: int = option(16, "simultaneous requests to a model server", ge=1, within=_ENDPOINT_ARGS)
    endpoint_timeout: float = option(120.0, "seconds for one request to that server", gt=0, within=_ENDPOINT_ARGS)
    endpoint_max_retries: int = option(
        5, "retries of a request to that server after a failure that may be temporary", ge=0, within=_ENDPOINT_ARGS
    )


def is_endpoint(model: str | None) -> bool:
    """Return whether a model is named by the address of the server that computes it."""
    return model is not None and model.startswith(ENDPOINT)


class JudgeSettings(Parameters):
    """What judges read of the parameters of a command."""

    source: SourceConfig = SourceConfig()
    answers: AnswerConfig = AnswerConfig()
    judging: JudgeModelConfig = JudgeModelConfig()
    inference: InferenceConfig = InferenceConfig()


CHECKPOINT_OR_SERVED = (
    "folder of the compressed checkpoint (what quantize wrote), or endpoint:http://host:port/v1 of a served model"
)
