"""Written by tools/write_stub.py from the registry of commands: what type checkers and editors read."""

from collections.abc import Callable, Mapping, Sequence
from os import PathLike
from typing import Literal, overload

from mlflow_compress.commands.command import PathOrText, PolicyLike, ResultOfRun, Say, StoreLike
from mlflow_compress.commands.in_memory import ModelInMemory, TaskRows
from mlflow_compress.commands.sweep.result import SweepProgress
from mlflow_compress.commands.promote.result import AliasHistory as AliasHistory
from mlflow_compress.commands.evaluate.result import AnswerEvaluation as AnswerEvaluation
from mlflow_compress.commands.promote.result import Approval as Approval
from mlflow_compress.commands.shared.tabular import Catalog as Catalog
from mlflow_compress.commands.compare.run import Comparison as Comparison
from mlflow_compress.commands.quantize.run import CompressedModel as CompressedModel
from mlflow_compress.commands.plan.run import CostPlan as CostPlan
from mlflow_compress.commands.diagnose.result import Diagnosis as Diagnosis
from mlflow_compress.commands.evaluate.result import Evaluation as Evaluation
from mlflow_compress.commands.compare.run import Forecast as Forecast
from mlflow_compress.commands.gate.run import GateVerdict as GateVerdict
from mlflow_compress.records import MetricResult as MetricResult
from mlflow_compress.errors import MlflowCompressError as MlflowCompressError
from mlflow_compress.config.policy import Policy as Policy
from mlflow_compress.commands.promote.result import Promotion as Promotion
from mlflow_compress.commands.receipt.result import Receipt as Receipt
from mlflow_compress.commands.receipt.result import ReceiptComparison as ReceiptComparison
from mlflow_compress.commands.search.result import Repair as Repair
from mlflow_compress.commands.resume.run import Resumed as Resumed
from mlflow_compress.commands.gc.result import Retention as Retention
from mlflow_compress.commands.promote.result import Rollback as Rollback
from mlflow_compress.commands.search.result import Search as Search
from mlflow_compress.commands.speed.run import SpeedMeasurement as SpeedMeasurement
from mlflow_compress.commands.sweep.result import Sweep as Sweep
from mlflow_compress.commands.sweep.result import SweepPlan as SweepPlan
from mlflow_compress.commands.main.stages import VariantRun as VariantRun
from mlflow_compress.commands.report.run import VariantsReport as VariantsReport
from mlflow_compress.version import __version__ as __version__

__all__ = [
    "AliasHistory",
    "AnswerEvaluation",
    "Approval",
    "Catalog",
    "Comparison",
    "CompressedModel",
    "CostPlan",
    "Diagnosis",
    "Evaluation",
    "Forecast",
    "GateVerdict",
    "MetricResult",
    "MlflowCompressError",
    "Policy",
    "Promotion",
    "Receipt",
    "ReceiptComparison",
    "Repair",
    "Resumed",
    "Retention",
    "Rollback",
    "Search",
    "SpeedMeasurement",
    "Sweep",
    "SweepPlan",
    "VariantRun",
    "VariantsReport",
    "__version__",
    "approve",
    "card",
    "compare",
    "compare_receipts",
    "compress",
    "diagnose",
    "evaluate",
    "export",
    "forecast",
    "gate",
    "gc",
    "history",
    "hub_folder",
    "judge",
    "load",
    "methods",
    "plan",
    "policy",
    "promote",
    "report",
    "resume",
    "rollback",
    "run",
    "search",
    "serve_webhook",
    "speed",
    "sweep",
    "tasks",
    "verify",
]

def approve(
    version: int | str | None = None,
    *,
    by: str | None = None,
    model: str | PathLike[str] | ModelInMemory = "demo",
    reason: str | None = None,
    policy: PolicyLike | None = None,
    experiment: str = "auto",
) -> Approval:
    """Return who has the alias now, after a reviewer's approval has moved it.

    Parameters
    ----------
    version : int or str
        The version that waits.
    by
        who approves [none]
    model
        baseline: 'demo', a folder, or a name that runs show [demo]
    reason
        why, in your words; kept with the run [none]
    policy
        YAML file of the policy that must have decided; none: the one that the decision's run holds [none]
    experiment
        MLflow experiment of the runs; 'auto' is MLFLOW_EXPERIMENT_NAME, or else 'mlflow-compress' [auto]
    """

def card(
    receipt: PathOrText,
    *,
    output: PathOrText = "card",
    key: PathOrText | None = None,
) -> Receipt:
    """Return a receipt, checked as `verify` does, after writing card.md, pull-request.md and badge.svg into a folder.

    `card.md` is a section of a model card whose front matter has the figures as `model-index`, which the Hub shows.
    """

def compare(
    baseline: Evaluation | PathOrText,
    variant: Evaluation | PathOrText,
    *,
    store: StoreLike = None,
) -> Comparison:
    """Return accuracy, flips and McNemar's test of two evaluations, from what they left on disk: no model is loaded.

    Parameters
    ----------
    baseline, variant : Evaluation, str or path
        What `evaluate` or `load` returned, a run id, a folder of Parquet records, a sample log of
        lm-evaluation-harness, or a JSONL file with ``{"id", "pred", "gold"}`` per line.
    store : path, optional
        The folder in which run ids are looked up in place of MLflow's tracking store.
    """

def compare_receipts(
    first: PathOrText,
    second: PathOrText,
    *,
    key: PathOrText | None = None,
    other_key: PathOrText | None = None,
) -> ReceiptComparison:
    """Return two receipts side by side, after checking both as `verify` does, and recomputing those with records.

    They must have one evaluation id; otherwise an `AlignmentError` says in what their evaluations differ.
    """

def compress(
    model: str | ModelInMemory = "demo",
    method: str = "awq",
    *,
    store: StoreLike = None,
    model_args: str | Mapping[str, object] = {},
    device: Literal["auto", "cpu", "cuda", "balanced"] = "auto",
    max_memory: str | Mapping[str, object] = {},
    seed: int = 42,
    data_dir: str | PathLike[str] | None = None,
    bits: int | str = "auto",
    group_size: str | int | float = "auto",
    calibration: str | PathLike[str] = "auto",
    calibration_args: str | Mapping[str, object] = {},
    method_args: str | Mapping[str, object] = {},
    checkpoint: str | PathLike[str] | ModelInMemory | None = None,
    target: Literal["any", "vllm", "vllm-cpu", "llama.cpp", "transformers"] = "any",
    output_dir: str | PathLike[str] = "auto",
    experiment: str = "auto",
) -> CompressedModel:
    """Return a compressed checkpoint, which was loaded again in a fresh process and computes what it should.

    Parameters
    ----------
    model : str, or (model, tokenizer)
        The baseline: "demo", a folder, a Hugging Face hub id, or a loaded transformers model with its tokenizer, which
        is saved in the folder of state first.
    method : str
        A name from `methods()`.
    store : path, optional
        A folder that keeps runs in place of MLflow's tracking store.
    model_args
        further settings of the baseline: name=value,name=value
        - other_baseline: compare a checkpoint with a baseline that it was not made from (off: refused) [false]
        - offload_dir: device=balanced: folder for weights on the disk; none: that of temporary files [none]
        - trust_remote_code: run code that a checkpoint brings along (off: such models are refused) [false]
    device
        where models run; 'balanced' spreads a model over all GPUs, then memory, then the disk (auto | cpu | cuda
        | balanced) [auto]
    max_memory
        device=balanced: most memory for models by device: cpu=2GiB,0=70GiB; none: what is free [none]
    seed
        seed of shuffles, splits, samples, calibration and bootstrap; a verdict names any other than the default
        [42]
    data_dir
        folder of data sets in hub layout, looked in before the hub [none]
    bits
        bits per weight; 'auto' takes the method's default [auto]
    group_size
        weights that share one scale; 'auto' takes the method's default [auto]
    calibration
        wikitext2, c4, pile, ultrachat, demo, or a file (.txt, .jsonl); 'auto' is the demo's, for the demo [auto]
    calibration_args
        how much text calibrates: name=value,name=value
        - samples: calibration samples; 'auto' takes the method's default [auto]
        - length: tokens per calibration sample [256]
    method_args
        the method's further settings: name=value,name=value (sparsity=0.5,pattern=2:4) [none]
    checkpoint
        for method=checkpoint: folder, hub id or GGUF file of what others compressed; or
        endpoint:http://host:port/v1 of a served model, which `main` evaluates as it is [none]
    target
        server that must take the checkpoint; what its kernels do not take is refused before compressing (any |
        vllm | vllm-cpu | llama.cpp | transformers) [any]
    output_dir
        folder that receives one sub-folder per variant; 'auto' is checkpoints/ in the folder that keeps state
        (beside the database, or MLFLOW_COMPRESS_HOME) [auto]
    experiment
        MLflow experiment of the runs; 'auto' is MLFLOW_EXPERIMENT_NAME, or else 'mlflow-compress' [auto]
    """

def diagnose(
    checkpoint: CompressedModel | ModelInMemory | PathOrText | None = None,
    *,
    store: StoreLike = None,
    progress: Say | None = None,
    model: str | PathLike[str] | ModelInMemory = "demo",
    model_args: str | Mapping[str, object] = {},
    device: Literal["auto", "cpu", "cuda", "balanced"] = "auto",
    max_memory: str | Mapping[str, object] = {},
    seed: int = 42,
    data_dir: str | PathLike[str] | None = None,
    method: str = "awq",
    bits: int | str = "auto",
    group_size: str | int | float = "auto",
    calibration: str | PathLike[str] = "auto",
    calibration_args: str | Mapping[str, object] = {},
    method_args: str | Mapping[str, object] = {},
    target: Literal["any", "vllm", "vllm-cpu", "llama.cpp", "transformers"] = "any",
    output_dir: str | PathLike[str] = "auto",
    tasks: str | PathLike[str] | Sequence[object] | TaskRows = "auto",
    num_fewshot: int = 5,
    num_shuffles: int = 2,
    task_args: str | Mapping[str, object] = {},
    prompt_style: str | Sequence[object] = "auto",
    limit: int = 0,
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto",
    system_prompt: str | None = None,
    redact: str | PathLike[str] | None = None,
    diagnosis_args: str | Mapping[str, object] = {},
    experiment: str = "auto",
) -> Diagnosis:
    """Return how far each group of a variant's weights moves its baseline, and on which text the variant moves.

    One group at a time (q/k/v, o, gate/up, down, ...) replaces the baseline's, and the KL of the final distributions is
    measured at every token of the tasks' corpora.

    Parameters
    ----------
    checkpoint : CompressedModel, path, or (model, tokenizer)
        What `compress` returned, its folder, what others have compressed, or a loaded transformers model with its
        tokenizer. Without it, the variant is made now, with ``method``, ``bits`` and the other parameters of
        `compress`.
    store : path, optional
        A folder that keeps runs in place of MLflow's tracking store.
    progress : callable (line), optional
        Is told what is measured.
    model
        baseline model: 'demo', 'demo-tools' or 'demo-thinks' (embedded), a folder, or a Hugging Face hub id; what
        a given checkpoint was made from, where this is left out [demo]
    model_args
        further settings of the baseline: name=value,name=value
        - other_baseline: compare a checkpoint with a baseline that it was not made from (off: refused) [false]
        - offload_dir: device=balanced: folder for weights on the disk; none: that of temporary files [none]
        - trust_remote_code: run code that a checkpoint brings along (off: such models are refused) [false]
    device
        where models run; 'balanced' spreads a model over all GPUs, then memory, then the disk (auto | cpu | cuda
        | balanced) [auto]
    max_memory
        device=balanced: most memory for models by device: cpu=2GiB,0=70GiB; none: what is free [none]
    seed
        seed of shuffles, splits, samples, calibration and bootstrap; a verdict names any other than the default
        [42]
    data_dir
        folder of data sets in hub layout, looked in before the hub [none]
    method
        compression method (mlflow-compress list methods lists them) [awq]
    bits
        bits per weight; 'auto' takes the method's default [auto]
    group_size
        weights that share one scale; 'auto' takes the method's default [auto]
    calibration
        wikitext2, c4, pile, ultrachat, demo, or a file (.txt, .jsonl); 'auto' is the demo's, for the demo [auto]
    calibration_args
        how much text calibrates: name=value,name=value
        - samples: calibration samples; 'auto' takes the method's default [auto]
        - length: tokens per calibration sample [256]
    method_args
        the method's further settings: name=value,name=value (sparsity=0.5,pattern=2:4) [none]
    target
        server that must take the checkpoint; what its kernels do not take is refused before compressing (any |
        vllm | vllm-cpu | llama.cpp | transformers) [any]
    output_dir
        folder that receives one sub-folder per variant; 'auto' is checkpoints/ in the folder that keeps state
        (beside the database, or MLFLOW_COMPRESS_HOME) [auto]
    tasks
        comma-separated task names and files (.jsonl, .txt); 'auto' is 'demo' for the demo [auto]
    num_fewshot
        few-shot examples in lettered multiple choice [5]
    num_shuffles
        answer shuffles for the order-robustness metric; 0 turns it off [2]
    task_args
        further settings of tasks: name=value,name=value
        - shuffle_fewshot: shuffle the answers of the few-shot examples too (off: they stay, as in the published
          metric) [false]
        - all_orders: items per lettered task that are also scored in all orders of up to 4 answers; 0 turns it
          off [0]
        - apply_chat_template: show lettered tasks and those of lm-evaluation-harness in the model's chat template
          [false]
        - fewshot_as_multiturn: few-shot examples of lm-evaluation-harness's tasks are turns of their own there
          (off: one turn) [true]
        - enable_thinking: tasks of thinking: what the chat template reads as enable_thinking; false asks for the
          answer at once [true]
        - thinking_samples: tasks of thinking: answers per question that each model draws, at the baseline's own
          temperature [8]
        - thinking_max_new_tokens: tasks of thinking: longest answer in tokens, thought included; 'auto' is 256
          for the embedded problems, 8192 for your own [auto]
        - noise_items: items per task, and windows per corpus, scored twice: by the baseline, and by a served
          variant; 0 takes all [200]
    prompt_style
        prompt styles of lettered tasks, comma-separated: the first asks, all of them ask with options E and F
        [auto]
    limit
        items per category and task after a seeded shuffle; 0 takes all [0]
    dtype
        dtype in which both models are evaluated and answer; auto: the baseline's own on GPUs, float32 on CPUs
        (auto | float32 | bfloat16 | float16) [auto]
    system_prompt
        system prompt of judged answers and of tasks in the chat template; none: none [none]
    redact
        cleaned from logged conversations before anything is stored: email, url, ip, iban, phone, and files with a
        regular expression per line; comma-separated [none]
    diagnosis_args
        how closely groups of weights are measured: name=value,name=value
        - corpus_tokens: tokens of each corpus on which every group of weights is measured; 0 takes all [16384]
        - corpus_window: tokens of one text: the corpus is cut into texts of this length [512]
        - noise_control: also measure Gaussian noise of the same size on each group (doubles the time): size or
          direction? [true]
        - state_memory: GiB of memory for the baseline's states, so that only the layers behind a swap are
          computed [1.0]
    experiment
        MLflow experiment of the runs; 'auto' is MLFLOW_EXPERIMENT_NAME, or else 'mlflow-compress' [auto]
    """

def evaluate(
    checkpoint: CompressedModel | ModelInMemory | PathOrText | None = None,
    *,
    store: StoreLike = None,
    progress: Say | None = None,
    model: str | PathLike[str] | ModelInMemory = "demo",
    model_args: str | Mapping[str, object] = {},
    device: Literal["auto", "cpu", "cuda", "balanced"] = "auto",
    max_memory: str | Mapping[str, object] = {},
    seed: int = 42,
    data_dir: str | PathLike[str] | None = None,
    tasks: str | PathLike[str] | Sequence[object] | TaskRows = "auto",
    num_fewshot: int = 5,
    num_shuffles: int = 2,
    task_args: str | Mapping[str, object] = {},
    prompt_style: str | Sequence[object] = "auto",
    limit: int = 0,
    items: str = "all",
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto",
    system_prompt: str | None = None,
    redact: str | PathLike[str] | None = None,
    engine: str = "local",
    engine_args: str | Mapping[str, object] = {},
    vllm_args: str | Mapping[str, object] = {},
    endpoint_args: str | Mapping[str, object] = {},
    experiment: str = "auto",
) -> Evaluation:
    """Return every metric of a compressed checkpoint against its baseline, on the same items, with intervals.

    The baseline is evaluated once per store and found again; so is a checkpoint that was evaluated before.

    Parameters
    ----------
    checkpoint : CompressedModel, path, or (model, tokenizer)
        What `compress` returned, or its folder; a loaded transformers model with its tokenizer; or
        "endpoint:http://host:port/v1" of a served model, whose name there is `served_model`.
    store : path, optional
        A folder that keeps runs in place of MLflow's tracking store.
    progress : callable (line), optional
        Is told, before anything is asked, what the server of a served model can.
    model
        baseline model: 'demo', 'demo-tools' or 'demo-thinks' (embedded), a folder, or a Hugging Face hub id; what
        a given checkpoint was made from, where this is left out [demo]
    model_args
        further settings of the baseline: name=value,name=value
        - other_baseline: compare a checkpoint with a baseline that it was not made from (off: refused) [false]
        - offload_dir: device=balanced: folder for weights on the disk; none: that of temporary files [none]
        - trust_remote_code: run code that a checkpoint brings along (off: such models are refused) [false]
    device
        where models run; 'balanced' spreads a model over all GPUs, then memory, then the disk (auto | cpu | cuda
        | balanced) [auto]
    max_memory
        device=balanced: most memory for models by device: cpu=2GiB,0=70GiB; none: what is free [none]
    seed
        seed of shuffles, splits, samples, calibration and bootstrap; a verdict names any other than the default
        [42]
    data_dir
        folder of data sets in hub layout, looked in before the hub [none]
    tasks
        comma-separated task names and files (.jsonl, .txt); 'auto' is 'demo' for the demo [auto]
    num_fewshot
        few-shot examples in lettered multiple choice [5]
    num_shuffles
        answer shuffles for the order-robustness metric; 0 turns it off [2]
    task_args
        further settings of tasks: name=value,name=value
        - shuffle_fewshot: shuffle the answers of the few-shot examples too (off: they stay, as in the published
          metric) [false]
        - all_orders: items per lettered task that are also scored in all orders of up to 4 answers; 0 turns it
          off [0]
        - apply_chat_template: show lettered tasks and those of lm-evaluation-harness in the model's chat template
          [false]
        - fewshot_as_multiturn: few-shot examples of lm-evaluation-harness's tasks are turns of their own there
          (off: one turn) [true]
        - enable_thinking: tasks of thinking: what the chat template reads as enable_thinking; false asks for the
          answer at once [true]
        - thinking_samples: tasks of thinking: answers per question that each model draws, at the baseline's own
          temperature [8]
        - thinking_max_new_tokens: tasks of thinking: longest answer in tokens, thought included; 'auto' is 256
          for the embedded problems, 8192 for your own [auto]
        - noise_items: items per task, and windows per corpus, scored twice: by the baseline, and by a served
          variant; 0 takes all [200]
        - trace_instructions: tasks=traces: what the baseline answers: mt_bench, vicuna_bench, alpaca, demo, or a
          JSONL file; 'auto' is the demo's, for the demo. The baseline writes prompts x samples x tokens once,
          before it is evaluated [auto]
        - trace_prompts: tasks=traces: prompts, drawn with the seed; 0 takes all [100]
        - trace_samples: tasks=traces: sampled answers per prompt [1]
        - trace_max_new_tokens: tasks=traces: longest answer in tokens; 'auto' is 512, or a quarter of a shorter
          context [auto]
        - trace_temperature: tasks=traces: temperature; 1 samples the model's unmodified distribution [1.0]
    prompt_style
        prompt styles of lettered tasks, comma-separated: the first asks, all of them ask with options E and F
        [auto]
    limit
        items per category and task after a seeded shuffle; 0 takes all [0]
    items
        items that the variant is scored on: 'all'; or drawn by the baseline's lead, more where answers can flip:
        a number, 'width:0.5' until flips and accuracy change are known to 0.5 points, or 'auto' until the default
        policy is decided, 'auto:FILE' another policy [all]
    dtype
        dtype in which both models are evaluated and answer; auto: the baseline's own on GPUs, float32 on CPUs
        (auto | float32 | bfloat16 | float16) [auto]
    system_prompt
        system prompt of judged answers and of tasks in the chat template; none: none [none]
    redact
        cleaned from logged conversations before anything is stored: email, url, ip, iban, phone, and files with a
        regular expression per line; comma-separated [none]
    engine
        what runs models: 'local' is transformers in this process, 'ray' the same on the workers of a Ray cluster,
        'vllm' is vLLM with its own kernels; or the name of an engine that an installed package adds [local]
    engine_args
        further settings of engine=ray and engine=vllm: name=value,name=value
        - workers: workers of engine=ray, each with a copy of the model; 'auto' is one per GPU, or as many as
          cores allow [auto]
        - cpus_per_worker: cores of a worker, and on CPUs its threads [1]
        - ray_address: running Ray cluster: 'auto' (found on this machine) or host:port; none: one is started on
          this machine [none]
        - vllm_python: engine=vllm and speed: file of the Python that has vLLM; none: that of
          MLFLOW_COMPRESS_VLLM_PYTHON [none]
    vllm_args
        engine=vllm: further arguments of vLLM: tensor_parallel_size=2,block_size=32 [none]
    endpoint_args
        how served models are asked: name=value,name=value
        - served_model: with checkpoint=endpoint:http://host:port/v1: the model's name at that server [none]
        - baseline_served_model: with model=endpoint:URL: the baseline's name at that server [none]
        - tokenizer: tokenizer of served models: a folder or a hub id; none: the baseline's [none]
        - chat: send conversations as chat completions; 'auto' does where the server's chat template reads as the
          baseline's (auto | true | false) [auto]
        - concurrency: requests to a server of models at the same time [16]
        - timeout: seconds for one such request [120.0]
        - max_retries: retries of such a request after a failure that may be temporary [5]
    experiment
        MLflow experiment of the runs; 'auto' is MLFLOW_EXPERIMENT_NAME, or else 'mlflow-compress' [auto]
    """

def export(
    run: ResultOfRun | str,
    *,
    output: PathOrText = "receipt.zip",
    policy: PolicyLike | None = None,
    key: PathOrText | None = None,
    records: bool = True,
    store: StoreLike = None,
) -> Receipt:
    """Return the receipt of the evaluation of a main run or an evaluate run, after writing it to `output`.

    `policy` is a file, a dictionary, a `Policy`, or None for the default policy. `key` is the PEM file of an Ed25519
    private key; without it the environment variable MLFLOW_COMPRESS_SIGNING_KEY names the file, or the receipt is
    unsigned. `records=False` leaves out the records, which hold the questions: their digests stay. `store` is the
    folder in which the run is looked up in place of MLflow's tracking store.
    """

def forecast(
    variant: Evaluation | str,
    other: Evaluation | str,
    *,
    store: StoreLike = None,
) -> Forecast:
    """Return the flips to expect on items that a variant was not run on, by task, with intervals.

    They follow from how sure the baseline is of these items, and from how sure it was of those that the variant
    flipped. Nothing is loaded: the baseline has been scored on the items, beside another variant.

    Parameters
    ----------
    variant : Evaluation or str
        The variant's evaluation, or the id of its run.
    other : Evaluation or str
        An evaluation of the same baseline on other tasks: of another variant, or a run of the baseline.
    store : path, optional
        The folder in which run ids are looked up in place of MLflow's tracking store.
    """

def gate(
    checkpoint: CompressedModel | ModelInMemory | PathOrText | None = None,
    *,
    store: StoreLike = None,
    progress: Say | None = None,
    model: str | PathLike[str] | ModelInMemory = "demo",
    model_args: str | Mapping[str, object] = {},
    device: Literal["auto", "cpu", "cuda", "balanced"] = "auto",
    max_memory: str | Mapping[str, object] = {},
    seed: int = 42,
    data_dir: str | PathLike[str] | None = None,
    tasks: str | PathLike[str] | Sequence[object] | TaskRows = "auto",
    num_fewshot: int = 5,
    num_shuffles: int = 2,
    task_args: str | Mapping[str, object] = {},
    prompt_style: str | Sequence[object] = "auto",
    limit: int = 0,
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto",
    system_prompt: str | None = None,
    redact: str | PathLike[str] | None = None,
    endpoint_args: str | Mapping[str, object] = {},
    speed_args: str | Mapping[str, object] = {},
    instructions: str | PathLike[str] = "auto",
    answer_args: str | Mapping[str, object] = {},
    judges: str | Sequence[object] = "all",
    engine_args: str | Mapping[str, object] = {},
    policy: PolicyLike | None = None,
    min_decode_speedup: float | None = None,
    max_memory_ratio: float | None = None,
    error: float = 0.05,
    block: int = 20,
    output: str | PathLike[str] | None = None,
    experiment: str = "auto",
) -> GateVerdict:
    """Return whether a checkpoint passes a policy, after no more items than that takes.

    Items are scored in random blocks, until every gate is decided or one has failed.

    Parameters
    ----------
    checkpoint : CompressedModel, path, or (model, tokenizer)
        What `compress` returned, or its folder; a loaded transformers model with its tokenizer; or
        "endpoint:http://host:port/v1" of a served model.
    store : path, optional
        A folder that keeps runs in place of MLflow's tracking store.
    progress : callable (line), optional
        Is told after each block how far the gate is.
    model
        baseline model: 'demo', 'demo-tools' or 'demo-thinks' (embedded), a folder, or a Hugging Face hub id; what
        a given checkpoint was made from, where this is left out [demo]
    model_args
        further settings of the baseline: name=value,name=value
        - other_baseline: compare a checkpoint with a baseline that it was not made from (off: refused) [false]
        - offload_dir: device=balanced: folder for weights on the disk; none: that of temporary files [none]
        - trust_remote_code: run code that a checkpoint brings along (off: such models are refused) [false]
    device
        where models run; 'balanced' spreads a model over all GPUs, then memory, then the disk (auto | cpu | cuda
        | balanced) [auto]
    max_memory
        device=balanced: most memory for models by device: cpu=2GiB,0=70GiB; none: what is free [none]
    seed
        seed of shuffles, splits, samples, calibration and bootstrap; a verdict names any other than the default
        [42]
    data_dir
        folder of data sets in hub layout, looked in before the hub [none]
    tasks
        comma-separated task names and files (.jsonl, .txt); 'auto' is 'demo' for the demo [auto]
    num_fewshot
        few-shot examples in lettered multiple choice [5]
    num_shuffles
        answer shuffles for the order-robustness metric; 0 turns it off [2]
    task_args
        further settings of tasks: name=value,name=value
        - shuffle_fewshot: shuffle the answers of the few-shot examples too (off: they stay, as in the published
          metric) [false]
        - all_orders: items per lettered task that are also scored in all orders of up to 4 answers; 0 turns it
          off [0]
        - apply_chat_template: show lettered tasks and those of lm-evaluation-harness in the model's chat template
          [false]
        - fewshot_as_multiturn: few-shot examples of lm-evaluation-harness's tasks are turns of their own there
          (off: one turn) [true]
        - enable_thinking: tasks of thinking: what the chat template reads as enable_thinking; false asks for the
          answer at once [true]
        - thinking_samples: tasks of thinking: answers per question that each model draws, at the baseline's own
          temperature [8]
        - thinking_max_new_tokens: tasks of thinking: longest answer in tokens, thought included; 'auto' is 256
          for the embedded problems, 8192 for your own [auto]
        - noise_items: items per task, and windows per corpus, scored twice: by the baseline, and by a served
          variant; 0 takes all [200]
        - trace_instructions: tasks=traces: what the baseline answers: mt_bench, vicuna_bench, alpaca, demo, or a
          JSONL file; 'auto' is the demo's, for the demo. The baseline writes prompts x samples x tokens once,
          before it is evaluated [auto]
        - trace_prompts: tasks=traces: prompts, drawn with the seed; 0 takes all [100]
        - trace_samples: tasks=traces: sampled answers per prompt [1]
        - trace_max_new_tokens: tasks=traces: longest answer in tokens; 'auto' is 512, or a quarter of a shorter
          context [auto]
        - trace_temperature: tasks=traces: temperature; 1 samples the model's unmodified distribution [1.0]
    prompt_style
        prompt styles of lettered tasks, comma-separated: the first asks, all of them ask with options E and F
        [auto]
    limit
        items per category and task after a seeded shuffle; 0 takes all [0]
    dtype
        dtype in which both models are evaluated and answer; auto: the baseline's own on GPUs, float32 on CPUs
        (auto | float32 | bfloat16 | float16) [auto]
    system_prompt
        system prompt of judged answers and of tasks in the chat template; none: none [none]
    redact
        cleaned from logged conversations before anything is stored: email, url, ip, iban, phone, and files with a
        regular expression per line; comma-separated [none]
    endpoint_args
        how served models are asked: name=value,name=value
        - served_model: with checkpoint=endpoint:http://host:port/v1: the model's name at that server [none]
        - baseline_served_model: with model=endpoint:URL: the baseline's name at that server [none]
        - tokenizer: tokenizer of served models: a folder or a hub id; none: the baseline's [none]
        - chat: send conversations as chat completions; 'auto' does where the server's chat template reads as the
          baseline's (auto | true | false) [auto]
        - concurrency: requests to a server of models at the same time [16]
        - timeout: seconds for one such request [120.0]
        - max_retries: retries of such a request after a failure that may be temporary [5]
    speed_args
        what is generated to measure speed: name=value,name=value
        - prompt_tokens: tokens of each prompt that is read; 'auto' is 256, or half of a shorter context [auto]
        - new_tokens: tokens that are written after each prompt; 'auto' is 32, or a quarter of a shorter context
          [auto]
        - repeats: rounds that count, after one to warm up; baseline and variant take turns in each. Up to four
          times as many follow while the interval of a ratio is wider than 10 % [5]
        - threads: threads on a CPU; 'auto' is OMP_NUM_THREADS where it is set, else one per core that this
          process may use [auto]
    instructions
        mt_bench, vicuna_bench, alpaca, xstest, jbb, or_bench, do_not_answer, demo, a JSONL file, openai:FILE or
        mlflow-traces:EXPERIMENT; 'auto' is the demo's, for the demo [auto]
    answer_args
        further settings of the answers that are compared: name=value,name=value
        - instruction_limit: instructions per category after a seeded shuffle; 0 takes all [0]
        - show_logged: show answers to logged conversations, and their questions, in reports and pages [false]
        - num_samples: sampled answers per instruction for ConSCompF [5]
        - max_new_tokens: tokens per sampled answer [128]
        - encoder: sentence encoder: 'embedded' (all-MiniLM-L6-v2), a folder or a hub id; with encoder_base_url a
          model there [embedded]
        - encoder_base_url: OpenAI-compatible endpoint that embeds the answers (needs ENCODER_API_KEY); none: on
          this machine [none]
        - bertscore_model: model of BERTScore: 'embedded', a folder or a hub id such as roberta-large; none: no
          BERTScore [none]
        - judge_max_tokens: tokens per answer to be graded, and per greedy answer (divergent_tokens); 'auto' is
          1024, or a quarter of a shorter context [auto]
    judges
        judges of the answers, comma-separated; 'all' is every installed one but pairwise [all]
    engine_args
        further settings of engine=ray and engine=vllm: name=value,name=value
        - vllm_python: engine=vllm and speed: file of the Python that has vLLM; none: that of
          MLFLOW_COMPRESS_VLLM_PYTHON [none]
    policy
        YAML file that decides; none: the default policy, which `mlflow-compress promote policy` prints [none]
    min_decode_speedup
        smallest accepted decode speed over the baseline's, one sequence at a time (1.2 is a fifth faster): lower
        end of its 95 % interval; none: the policy's (no such gate) [none]
    max_memory_ratio
        largest accepted peak memory while serving over the baseline's (0.5 is half): upper end of its 95 %
        interval; none: the policy's (no such gate) [none]
    error
        probability that any early verdict is wrong, at most [0.05]
    block
        items per block: the gate looks after each [20]
    output
        folder that receives verdict.json and verdict.md; none: the run alone has them [none]
    experiment
        MLflow experiment of the runs; 'auto' is MLFLOW_EXPERIMENT_NAME, or else 'mlflow-compress' [auto]
    """

def gc(
    *,
    older_than: int = 90,
    base_model: str | None = None,
    delete: bool = False,
    experiment: str = "auto",
) -> Retention:
    """Return which runs of MLflow's store may be deleted, what that frees, and why the others stay.

    A run stays with a registered version, a receipt or a decision, and with every run that such a run needs.

    Parameters
    ----------
    older_than
        days since a run ended, before which it stays [90]
    base_model
        name of the baseline whose runs are looked at; none: of all [none]
    delete
        true deletes; otherwise it is a dry run [false]
    experiment
        MLflow experiment of the runs; 'auto' is MLFLOW_EXPERIMENT_NAME, or else 'mlflow-compress' [auto]
    """

def history(
    *,
    model: str | PathLike[str] | ModelInMemory = "demo",
    alias: str = "champion",
    experiment: str = "auto",
) -> AliasHistory:
    """Return who had an alias when, by which decision and policy, newest first.

    Parameters
    ----------
    model
        baseline: 'demo', a folder, or a name that runs show [demo]
    alias
        registry alias [champion]
    experiment
        MLflow experiment of the runs; 'auto' is MLFLOW_EXPERIMENT_NAME, or else 'mlflow-compress' [auto]
    """

def hub_folder(
    run: ResultOfRun | str,
    *,
    output: PathOrText = "hub",
    base_model: str | None = None,
    policy: PolicyLike | None = None,
    key: PathOrText | None = None,
    store: StoreLike = None,
) -> Receipt:
    """Return the receipt of a run's evaluation, after writing its checkpoint into a folder that can be uploaded.

    The folder has the checkpoint's files, the base's licence as far as its folder says one, ``README.md``, a model
    card with the measured distances, and ``receipt.zip`` without records. The checkpoint itself is not changed.
    `base_model` is the base's name at the Hub; without it a base that was a folder is not named there.
    """

def judge(
    checkpoint: CompressedModel | ModelInMemory | PathOrText | None = None,
    *,
    store: StoreLike = None,
    progress: Say | None = None,
    model: str | PathLike[str] | ModelInMemory = "demo",
    model_args: str | Mapping[str, object] = {},
    device: Literal["auto", "cpu", "cuda", "balanced"] = "auto",
    max_memory: str | Mapping[str, object] = {},
    seed: int = 42,
    data_dir: str | PathLike[str] | None = None,
    instructions: str | PathLike[str] = "auto",
    answer_args: str | Mapping[str, object] = {},
    judges: str | Sequence[object] = "all",
    judge_model: str | Sequence[object] = "gpt-4",
    judge_args: str | Mapping[str, object] = {},
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto",
    system_prompt: str | None = None,
    redact: str | PathLike[str] | None = None,
    engine: str = "local",
    engine_args: str | Mapping[str, object] = {},
    vllm_args: str | Mapping[str, object] = {},
    endpoint_args: str | Mapping[str, object] = {},
    experiment: str = "auto",
) -> AnswerEvaluation:
    """Return how similar, and how good, the answers of a checkpoint and its baseline to the same instructions are.

    Parameters
    ----------
    checkpoint : CompressedModel, path, or (model, tokenizer)
        What `compress` returned, or its folder; a loaded transformers model with its tokenizer; or
        "endpoint:http://host:port/v1" of a served model.
    store : path, optional
        A folder that keeps runs in place of MLflow's tracking store.
    progress : callable (line), optional
        Is told, before the first call, how many calls a judge model will take, and what they may cost.
    model
        baseline model: 'demo', 'demo-tools' or 'demo-thinks' (embedded), a folder, or a Hugging Face hub id; what
        a given checkpoint was made from, where this is left out [demo]
    model_args
        further settings of the baseline: name=value,name=value
        - other_baseline: compare a checkpoint with a baseline that it was not made from (off: refused) [false]
        - offload_dir: device=balanced: folder for weights on the disk; none: that of temporary files [none]
        - trust_remote_code: run code that a checkpoint brings along (off: such models are refused) [false]
    device
        where models run; 'balanced' spreads a model over all GPUs, then memory, then the disk (auto | cpu | cuda
        | balanced) [auto]
    max_memory
        device=balanced: most memory for models by device: cpu=2GiB,0=70GiB; none: what is free [none]
    seed
        seed of shuffles, splits, samples, calibration and bootstrap; a verdict names any other than the default
        [42]
    data_dir
        folder of data sets in hub layout, looked in before the hub [none]
    instructions
        mt_bench, vicuna_bench, alpaca, xstest, jbb, or_bench, do_not_answer, demo, a JSONL file, openai:FILE or
        mlflow-traces:EXPERIMENT; 'auto' is the demo's, for the demo [auto]
    answer_args
        further settings of the answers that are compared: name=value,name=value
        - instruction_limit: instructions per category after a seeded shuffle; 0 takes all [0]
        - show_logged: show answers to logged conversations, and their questions, in reports and pages [false]
        - num_samples: sampled answers per instruction for ConSCompF [5]
        - max_new_tokens: tokens per sampled answer [128]
        - encoder: sentence encoder: 'embedded' (all-MiniLM-L6-v2), a folder or a hub id; with encoder_base_url a
          model there [embedded]
        - encoder_base_url: OpenAI-compatible endpoint that embeds the answers (needs ENCODER_API_KEY); none: on
          this machine [none]
        - bertscore_model: model of BERTScore: 'embedded', a folder or a hub id such as roberta-large; none: no
          BERTScore [none]
        - judge_max_tokens: tokens per answer to be graded, and per greedy answer (divergent_tokens); 'auto' is
          1024, or a quarter of a shorter context [auto]
    judges
        judges of the answers, comma-separated; 'all' is every installed one but pairwise [all]
    judge_model
        models asked for grades, comma-separated (needs OPENAI_API_KEY); several are reported one by one [gpt-4]
    judge_args
        how judges are asked, and what that may cost: name=value,name=value
        - base_url: OpenAI-compatible endpoint; 'auto' is OPENAI_BASE_URL or the client's default [auto]
        - repeats: times each answer is graded; 2 or more also measure the judge's own noise [1]
        - attempts: replies per judgment until one can be read; replies are kept, so a larger number goes on from
          there [3]
        - max_unscored: largest share of judgments without a rating; above it the stage fails, and all replies
          stay on disk [0.05]
        - concurrency: calls to the judge at the same time [16]
        - timeout: seconds for one call to the judge [120.0]
        - max_retries: retries of a call after a failure that may be temporary [5]
        - requests_per_minute: calls to the judge in a minute; 0 is no limit [0]
        - tokens_per_minute: tokens of prompts and longest replies in a minute; 0 is no limit [0]
        - prices: YAML file 'model: {prompt: 2.5, completion: 10}' per million tokens; none: no cost [none]
        - max_cost: most that one command may spend on judges, by judge_prices: a sweep on all variants; 0 is no
          limit [0.0]
        - traces: show each judged answer in MLflow as a trace, with an assessment per judgment [true]
        - prompts: FastChat's file judge_prompts.jsonl, for judges=pairwise; none: our own pair prompts [none]
    dtype
        dtype in which both models are evaluated and answer; auto: the baseline's own on GPUs, float32 on CPUs
        (auto | float32 | bfloat16 | float16) [auto]
    system_prompt
        system prompt of judged answers and of tasks in the chat template; none: none [none]
    redact
        cleaned from logged conversations before anything is stored: email, url, ip, iban, phone, and files with a
        regular expression per line; comma-separated [none]
    engine
        what runs models: 'local' is transformers in this process, 'ray' the same on the workers of a Ray cluster,
        'vllm' is vLLM with its own kernels; or the name of an engine that an installed package adds [local]
    engine_args
        further settings of engine=ray and engine=vllm: name=value,name=value
        - workers: workers of engine=ray, each with a copy of the model; 'auto' is one per GPU, or as many as
          cores allow [auto]
        - cpus_per_worker: cores of a worker, and on CPUs its threads [1]
        - ray_address: running Ray cluster: 'auto' (found on this machine) or host:port; none: one is started on
          this machine [none]
        - vllm_python: engine=vllm and speed: file of the Python that has vLLM; none: that of
          MLFLOW_COMPRESS_VLLM_PYTHON [none]
    vllm_args
        engine=vllm: further arguments of vLLM: tensor_parallel_size=2,block_size=32 [none]
    endpoint_args
        how served models are asked: name=value,name=value
        - served_model: with checkpoint=endpoint:http://host:port/v1: the model's name at that server [none]
        - baseline_served_model: with model=endpoint:URL: the baseline's name at that server [none]
        - tokenizer: tokenizer of served models: a folder or a hub id; none: the baseline's [none]
        - chat: send conversations as chat completions; 'auto' does where the server's chat template reads as the
          baseline's (auto | true | false) [auto]
        - concurrency: requests to a server of models at the same time [16]
        - timeout: seconds for one such request [120.0]
        - max_retries: retries of such a request after a failure that may be temporary [5]
    experiment
        MLflow experiment of the runs; 'auto' is MLFLOW_EXPERIMENT_NAME, or else 'mlflow-compress' [auto]
    """

def load(
    source: PathOrText,
    *,
    store: StoreLike = None,
) -> Evaluation:
    """Return an evaluation that was made before.

    Parameters
    ----------
    source : str or path
        The id of an evaluate run, a baseline run or a main run; or a folder of Parquet records, whose metrics are
        computed now.
    store : path, optional
        The folder in which run ids are looked up in place of MLflow's tracking store.
    """

def methods(
) -> Catalog:
    """Return the compression methods that are installed, and what each supports."""

def plan(
    *,
    model: str | PathLike[str] | ModelInMemory = "demo",
    model_args: str | Mapping[str, object] = {},
    device: Literal["auto", "cpu", "cuda", "balanced"] = "auto",
    max_memory: str | Mapping[str, object] = {},
    seed: int = 42,
    data_dir: str | PathLike[str] | None = None,
    tokenizer: str | PathLike[str] | None = None,
    method: str = "awq",
    bits: int | str = 4,
    calibration_args: str | Mapping[str, object] = {},
    variants: int = 1,
    tasks: str | PathLike[str] | Sequence[object] | TaskRows = "auto",
    num_fewshot: int = 5,
    num_shuffles: int = 2,
    task_args: str | Mapping[str, object] = {},
    prompt_style: str | Sequence[object] = "auto",
    limit: int = 0,
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto",
    system_prompt: str | None = None,
    redact: str | PathLike[str] | None = None,
    instructions: str | PathLike[str] = "auto",
    answer_args: str | Mapping[str, object] = {},
    judges: str | Sequence[object] = "all",
    judge: bool = True,
    save: Literal["all", "passing", "winner"] = "all",
    devices: int = 1,
    machine_args: str | Mapping[str, object] = {},
    experiment: str = "auto",
) -> CostPlan:
    """Return what every stage would cost: tokens, operations, bytes, memory, seconds, dollars. Nothing is run.

    Only the model's configuration and tokenizer are read, so that the plan of a model of any size takes the time that
    it takes to tokenize the tasks.

    Parameters
    ----------
    model
        baseline model: 'demo', 'demo-tools' or 'demo-thinks' (embedded), a folder, or a Hugging Face hub id; what
        a given checkpoint was made from, where this is left out [demo]
    model_args
        further settings of the baseline: name=value,name=value
        - other_baseline: compare a checkpoint with a baseline that it was not made from (off: refused) [false]
        - offload_dir: device=balanced: folder for weights on the disk; none: that of temporary files [none]
        - trust_remote_code: run code that a checkpoint brings along (off: such models are refused) [false]
    device
        where models run; 'balanced' spreads a model over all GPUs, then memory, then the disk (auto | cpu | cuda
        | balanced) [auto]
    max_memory
        device=balanced: most memory for models by device: cpu=2GiB,0=70GiB; none: what is free [none]
    seed
        seed of shuffles, splits, samples, calibration and bootstrap; a verdict names any other than the default
        [42]
    data_dir
        folder of data sets in hub layout, looked in before the hub [none]
    tokenizer
        folder or hub id of the tokenizer; none: the model's own [none]
    method
        compression method (mlflow-compress list methods lists them) [awq]
    bits
        bits per weight of the compressed linear layers [4]
    calibration_args
        how much text calibrates: name=value,name=value
        - samples: calibration samples; 'auto' takes the method's default [auto]
        - length: tokens per calibration sample [256]
    variants
        variants of this baseline [1]
    tasks
        comma-separated task names and files (.jsonl, .txt); 'auto' is 'demo' for the demo [auto]
    num_fewshot
        few-shot examples in lettered multiple choice [5]
    num_shuffles
        answer shuffles for the order-robustness metric; 0 turns it off [2]
    task_args
        further settings of tasks: name=value,name=value
        - shuffle_fewshot: shuffle the answers of the few-shot examples too (off: they stay, as in the published
          metric) [false]
        - all_orders: items per lettered task that are also scored in all orders of up to 4 answers; 0 turns it
          off [0]
        - apply_chat_template: show lettered tasks and those of lm-evaluation-harness in the model's chat template
          [false]
        - fewshot_as_multiturn: few-shot examples of lm-evaluation-harness's tasks are turns of their own there
          (off: one turn) [true]
        - enable_thinking: tasks of thinking: what the chat template reads as enable_thinking; false asks for the
          answer at once [true]
        - thinking_samples: tasks of thinking: answers per question that each model draws, at the baseline's own
          temperature [8]
        - thinking_max_new_tokens: tasks of thinking: longest answer in tokens, thought included; 'auto' is 256
          for the embedded problems, 8192 for your own [auto]
        - noise_items: items per task, and windows per corpus, scored twice: by the baseline, and by a served
          variant; 0 takes all [200]
    prompt_style
        prompt styles of lettered tasks, comma-separated: the first asks, all of them ask with options E and F
        [auto]
    limit
        items per category and task after a seeded shuffle; 0 takes all [0]
    dtype
        dtype in which both models are evaluated and answer; auto: the baseline's own on GPUs, float32 on CPUs
        (auto | float32 | bfloat16 | float16) [auto]
    system_prompt
        system prompt of judged answers and of tasks in the chat template; none: none [none]
    redact
        cleaned from logged conversations before anything is stored: email, url, ip, iban, phone, and files with a
        regular expression per line; comma-separated [none]
    instructions
        mt_bench, vicuna_bench, alpaca, xstest, jbb, or_bench, do_not_answer, demo, a JSONL file, openai:FILE or
        mlflow-traces:EXPERIMENT; 'auto' is the demo's, for the demo [auto]
    answer_args
        further settings of the answers that are compared: name=value,name=value
        - instruction_limit: instructions per category after a seeded shuffle; 0 takes all [0]
        - show_logged: show answers to logged conversations, and their questions, in reports and pages [false]
        - num_samples: sampled answers per instruction for ConSCompF [5]
        - max_new_tokens: tokens per sampled answer [128]
        - encoder: sentence encoder: 'embedded' (all-MiniLM-L6-v2), a folder or a hub id; with encoder_base_url a
          model there [embedded]
        - encoder_base_url: OpenAI-compatible endpoint that embeds the answers (needs ENCODER_API_KEY); none: on
          this machine [none]
        - bertscore_model: model of BERTScore: 'embedded', a folder or a hub id such as roberta-large; none: no
          BERTScore [none]
        - judge_max_tokens: tokens per answer to be graded, and per greedy answer (divergent_tokens); 'auto' is
          1024, or a quarter of a shorter context [auto]
    judges
        judges of the answers, comma-separated; 'all' is every installed one but pairwise [all]
    judge
        run the judge stage [true]
    save
        device=balanced: which variants are made; but for 'all', those whose method reads no calibration text are
        scored first, in one read of the baseline's weights: 'passing' makes what the policy does not fail,
        'winner' of these only the smallest that passes (all | passing | winner) [all]
    devices
        GPUs, or machines without one [1]
    machine_args
        what the work would run on, and how long answers are: name=value,name=value
        - device_memory: GiB of one device; auto: 80, and with device=cpu the memory of this machine [auto]
        - device_tflops: 10^12 operations a second that one device sustains in the dtype; auto: 400, as an H100 in
          bfloat16, and with device=cpu what this machine is measured to do in float32 [auto]
        - device_bandwidth: TB a second that one device reads of its own memory; auto: 2.5, as an H100, and with
          device=cpu what this machine is measured to do [auto]
        - answer_tokens: tokens of an answer on average, thought included, as a run has measured them; auto: the
          most it may have [auto]
        - disk_bandwidth: GB a second of the storage, for all devices together [2.0]
        - price: dollars of one device for an hour; none: no dollars [none]
    experiment
        MLflow experiment of the runs; 'auto' is MLFLOW_EXPERIMENT_NAME, or else 'mlflow-compress' [auto]
    """

def policy(
    file: PathOrText | None = None,
) -> str:
    """Return a policy as YAML with comments, and its hash as the last line. What cannot be used is refused.

    Parameters
    ----------
    file : path, optional
        A policy; without it, the default one.
    """

def promote(
    *,
    store: StoreLike = None,
    model: str | PathLike[str] | ModelInMemory = "demo",
    evaluation: str = "auto",
    policy: PolicyLike | None = None,
    max_kl: float | None = None,
    max_kl_outliers_pct: float | None = None,
    max_flips_pct: float | None = None,
    max_accuracy_drop_pct: float | None = None,
    min_decode_speedup: float | None = None,
    max_memory_ratio: float | None = None,
    alias: str = "champion",
    needs: Literal["none", "approval"] = "none",
    waiver: str | PathLike[str] | None = None,
    dry_run: bool = False,
    experiment: str = "auto",
) -> Promotion:
    """Return the decision on all variants of one evaluation, after moving the alias in MLflow's model registry.

    With ``dry_run=True`` the decision is returned, and nothing is written.

    Parameters
    ----------
    store : path, optional
        A folder that keeps runs in place of MLflow's tracking store, which it is until the decision is made.
    model
        baseline whose variants compete: 'demo', a folder, or a name that runs show [demo]
    evaluation
        evaluation id whose variants compete (6 or more digits of it); 'auto' is the one with the most items
        [auto]
    policy
        YAML file that decides; none: the default policy, which `mlflow-compress promote policy` prints [none]
    max_kl
        largest KL (nats), clipped at 1 per item: upper end; none: the policy's (0.05) [none]
    max_kl_outliers_pct
        largest share of items above the KL clip limit in percent: upper end; none: the policy's (1) [none]
    max_flips_pct
        largest share of flipped answers in percent: upper end of its interval; none: the policy's (5) [none]
    max_accuracy_drop_pct
        largest accuracy drop in points: upper end of its interval; none: the policy's (2) [none]
    min_decode_speedup
        smallest accepted decode speed over the baseline's, one sequence at a time (1.2 is a fifth faster): lower
        end of its 95 % interval; none: the policy's (no such gate) [none]
    max_memory_ratio
        largest accepted peak memory while serving over the baseline's (0.5 is half): upper end of its 95 %
        interval; none: the policy's (no such gate) [none]
    alias
        registry alias that moves to the winner [champion]
    needs
        'approval': the alias stays, and the winner waits until `mlflow-compress promote approve` moves it (none |
        approval) [none]
    waiver
        YAML file that waives one requirement: {requirement, reason, person, until: 2027-01-31} [none]
    dry_run
        decide and say what would happen; nothing is registered, logged or moved [false]
    experiment
        MLflow experiment of the runs; 'auto' is MLFLOW_EXPERIMENT_NAME, or else 'mlflow-compress' [auto]
    """

def report(
    *runs: ResultOfRun | str | Sequence[ResultOfRun | str],
    store: StoreLike = None,
    output: str | PathLike[str] = "report.html",
    policy: PolicyLike | None = None,
    format: Literal["auto", "html", "md", "csv", "json"] = "auto",
    experiment: str = "auto",
) -> VariantsReport:
    """Return the variants of one evaluation side by side, after writing one page that compares them.

    The page is one HTML file, which opens from disk and in MLflow's artifact view, and loads nothing.

    Parameters
    ----------
    *runs : Sweep, VariantRun, str, or a list of VariantRun and str
        What `sweep` or `run` returned, or the ids of main runs of one evaluation or of a sweep's run.
    store : path, optional
        A folder that keeps runs in place of MLflow's tracking store.
    output
        file to write: .html, .md, .csv or .json [report.html]
    policy
        YAML file that says which variant to ship; none: the default policy of promote [none]
    format
        what is written; 'auto' goes by the file name (auto | html | md | csv | json) [auto]
    experiment
        MLflow experiment of the runs; 'auto' is MLFLOW_EXPERIMENT_NAME, or else 'mlflow-compress' [auto]
    """

def resume(
    *,
    progress: Say | None = None,
    dry_run: bool = False,
    experiment: str = "auto",
) -> Resumed:
    """Return what became of the commands that had not ended, after doing them again.

    A command that is killed, or that waits for the tracking server in vain, leaves a note on its machine. What it has
    computed is on disk. So doing it again stores what is left, and computes little.

    Parameters
    ----------
    progress : callable (line), optional
        Is told what happens now.
    dry_run
        list the commands that did not end, and do nothing [false]
    experiment
        MLflow experiment of the runs; 'auto' is MLFLOW_EXPERIMENT_NAME, or else 'mlflow-compress' [auto]
    """

def rollback(
    *,
    model: str | PathLike[str] | ModelInMemory = "demo",
    alias: str = "champion",
    reason: str | None = None,
    experiment: str = "auto",
) -> Rollback:
    """Return who has the alias again, after moving it back to the version that had it before.

    A second rollback undoes the first.

    Parameters
    ----------
    model
        baseline: 'demo', a folder, or a name that runs show [demo]
    alias
        registry alias that moves back [champion]
    reason
        why, in your words; kept with the run [none]
    experiment
        MLflow experiment of the runs; 'auto' is MLFLOW_EXPERIMENT_NAME, or else 'mlflow-compress' [auto]
    """

def run(
    *,
    progress: Say | None = None,
    model: str | PathLike[str] | ModelInMemory = "demo",
    model_args: str | Mapping[str, object] = {},
    device: Literal["auto", "cpu", "cuda", "balanced"] = "auto",
    max_memory: str | Mapping[str, object] = {},
    seed: int = 42,
    data_dir: str | PathLike[str] | None = None,
    method: str = "awq",
    bits: int | str = "auto",
    group_size: str | int | float = "auto",
    calibration: str | PathLike[str] = "auto",
    calibration_args: str | Mapping[str, object] = {},
    method_args: str | Mapping[str, object] = {},
    checkpoint: str | PathLike[str] | ModelInMemory | None = None,
    target: Literal["any", "vllm", "vllm-cpu", "llama.cpp", "transformers"] = "any",
    output_dir: str | PathLike[str] = "auto",
    tasks: str | PathLike[str] | Sequence[object] | TaskRows = "auto",
    num_fewshot: int = 5,
    num_shuffles: int = 2,
    task_args: str | Mapping[str, object] = {},
    prompt_style: str | Sequence[object] = "auto",
    limit: int = 0,
    items: str = "all",
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto",
    system_prompt: str | None = None,
    redact: str | PathLike[str] | None = None,
    engine: str = "local",
    engine_args: str | Mapping[str, object] = {},
    vllm_args: str | Mapping[str, object] = {},
    endpoint_args: str | Mapping[str, object] = {},
    instructions: str | PathLike[str] = "auto",
    answer_args: str | Mapping[str, object] = {},
    judges: str | Sequence[object] = "all",
    judge_model: str | Sequence[object] = "gpt-4",
    judge_args: str | Mapping[str, object] = {},
    speed_args: str | Mapping[str, object] = {},
    judge: bool = True,
    speed: bool = True,
    log_weights: Literal["auto", "true", "false"] = "auto",
    resume: str | None = None,
    experiment: str = "auto",
) -> VariantRun:
    """Return what compression, evaluation and judge of one variant found, after logging it as MLflow runs.

    This is ``mlflow-compress main``: the stages are MLflow projects, children of one run with report and figures.

    Parameters
    ----------
    progress : callable (line), optional
        Is told what happens now, and how long it took before.
    model
        baseline model: 'demo', 'demo-tools' or 'demo-thinks' (embedded), a folder, or a Hugging Face hub id; what
        a given checkpoint was made from, where this is left out [demo]
    model_args
        further settings of the baseline: name=value,name=value
        - other_baseline: compare a checkpoint with a baseline that it was not made from (off: refused) [false]
        - offload_dir: device=balanced: folder for weights on the disk; none: that of temporary files [none]
        - trust_remote_code: run code that a checkpoint brings along (off: such models are refused) [false]
    device
        where models run; 'balanced' spreads a model over all GPUs, then memory, then the disk (auto | cpu | cuda
        | balanced) [auto]
    max_memory
        device=balanced: most memory for models by device: cpu=2GiB,0=70GiB; none: what is free [none]
    seed
        seed of shuffles, splits, samples, calibration and bootstrap; a verdict names any other than the default
        [42]
    data_dir
        folder of data sets in hub layout, looked in before the hub [none]
    method
        compression method (mlflow-compress list methods lists them) [awq]
    bits
        bits per weight; 'auto' takes the method's default [auto]
    group_size
        weights that share one scale; 'auto' takes the method's default [auto]
    calibration
        wikitext2, c4, pile, ultrachat, demo, or a file (.txt, .jsonl); 'auto' is the demo's, for the demo [auto]
    calibration_args
        how much text calibrates: name=value,name=value
        - samples: calibration samples; 'auto' takes the method's default [auto]
        - length: tokens per calibration sample [256]
    method_args
        the method's further settings: name=value,name=value (sparsity=0.5,pattern=2:4) [none]
    checkpoint
        for method=checkpoint: folder, hub id or GGUF file of what others compressed; or
        endpoint:http://host:port/v1 of a served model, which `main` evaluates as it is [none]
    target
        server that must take the checkpoint; what its kernels do not take is refused before compressing (any |
        vllm | vllm-cpu | llama.cpp | transformers) [any]
    output_dir
        folder that receives one sub-folder per variant; 'auto' is checkpoints/ in the folder that keeps state
        (beside the database, or MLFLOW_COMPRESS_HOME) [auto]
    tasks
        comma-separated task names and files (.jsonl, .txt); 'auto' is 'demo' for the demo [auto]
    num_fewshot
        few-shot examples in lettered multiple choice [5]
    num_shuffles
        answer shuffles for the order-robustness metric; 0 turns it off [2]
    task_args
        further settings of tasks: name=value,name=value
        - shuffle_fewshot: shuffle the answers of the few-shot examples too (off: they stay, as in the published
          metric) [false]
        - all_orders: items per lettered task that are also scored in all orders of up to 4 answers; 0 turns it
          off [0]
        - apply_chat_template: show lettered tasks and those of lm-evaluation-harness in the model's chat template
          [false]
        - fewshot_as_multiturn: few-shot examples of lm-evaluation-harness's tasks are turns of their own there
          (off: one turn) [true]
        - enable_thinking: tasks of thinking: what the chat template reads as enable_thinking; false asks for the
          answer at once [true]
        - thinking_samples: tasks of thinking: answers per question that each model draws, at the baseline's own
          temperature [8]
        - thinking_max_new_tokens: tasks of thinking: longest answer in tokens, thought included; 'auto' is 256
          for the embedded problems, 8192 for your own [auto]
        - noise_items: items per task, and windows per corpus, scored twice: by the baseline, and by a served
          variant; 0 takes all [200]
        - trace_instructions: tasks=traces: what the baseline answers: mt_bench, vicuna_bench, alpaca, demo, or a
          JSONL file; 'auto' is the demo's, for the demo. The baseline writes prompts x samples x tokens once,
          before it is evaluated [auto]
        - trace_prompts: tasks=traces: prompts, drawn with the seed; 0 takes all [100]
        - trace_samples: tasks=traces: sampled answers per prompt [1]
        - trace_max_new_tokens: tasks=traces: longest answer in tokens; 'auto' is 512, or a quarter of a shorter
          context [auto]
        - trace_temperature: tasks=traces: temperature; 1 samples the model's unmodified distribution [1.0]
    prompt_style
        prompt styles of lettered tasks, comma-separated: the first asks, all of them ask with options E and F
        [auto]
    limit
        items per category and task after a seeded shuffle; 0 takes all [0]
    items
        items that the variant is scored on: 'all'; or drawn by the baseline's lead, more where answers can flip:
        a number, 'width:0.5' until flips and accuracy change are known to 0.5 points, or 'auto' until the default
        policy is decided, 'auto:FILE' another policy [all]
    dtype
        dtype in which both models are evaluated and answer; auto: the baseline's own on GPUs, float32 on CPUs
        (auto | float32 | bfloat16 | float16) [auto]
    system_prompt
        system prompt of judged answers and of tasks in the chat template; none: none [none]
    redact
        cleaned from logged conversations before anything is stored: email, url, ip, iban, phone, and files with a
        regular expression per line; comma-separated [none]
    engine
        what runs models: 'local' is transformers in this process, 'ray' the same on the workers of a Ray cluster,
        'vllm' is vLLM with its own kernels; or the name of an engine that an installed package adds [local]
    engine_args
        further settings of engine=ray and engine=vllm: name=value,name=value
        - workers: workers of engine=ray, each with a copy of the model; 'auto' is one per GPU, or as many as
          cores allow [auto]
        - cpus_per_worker: cores of a worker, and on CPUs its threads [1]
        - ray_address: running Ray cluster: 'auto' (found on this machine) or host:port; none: one is started on
          this machine [none]
        - vllm_python: engine=vllm and speed: file of the Python that has vLLM; none: that of
          MLFLOW_COMPRESS_VLLM_PYTHON [none]
    vllm_args
        engine=vllm: further arguments of vLLM: tensor_parallel_size=2,block_size=32 [none]
    endpoint_args
        how served models are asked: name=value,name=value
        - served_model: with checkpoint=endpoint:http://host:port/v1: the model's name at that server [none]
        - baseline_served_model: with model=endpoint:URL: the baseline's name at that server [none]
        - tokenizer: tokenizer of served models: a folder or a hub id; none: the baseline's [none]
        - chat: send conversations as chat completions; 'auto' does where the server's chat template reads as the
          baseline's (auto | true | false) [auto]
        - concurrency: requests to a server of models at the same time [16]
        - timeout: seconds for one such request [120.0]
        - max_retries: retries of such a request after a failure that may be temporary [5]
    instructions
        mt_bench, vicuna_bench, alpaca, xstest, jbb, or_bench, do_not_answer, demo, a JSONL file, openai:FILE or
        mlflow-traces:EXPERIMENT; 'auto' is the demo's, for the demo [auto]
    answer_args
        further settings of the answers that are compared: name=value,name=value
        - instruction_limit: instructions per category after a seeded shuffle; 0 takes all [0]
        - show_logged: show answers to logged conversations, and their questions, in reports and pages [false]
        - num_samples: sampled answers per instruction for ConSCompF [5]
        - max_new_tokens: tokens per sampled answer [128]
        - encoder: sentence encoder: 'embedded' (all-MiniLM-L6-v2), a folder or a hub id; with encoder_base_url a
          model there [embedded]
        - encoder_base_url: OpenAI-compatible endpoint that embeds the answers (needs ENCODER_API_KEY); none: on
          this machine [none]
        - bertscore_model: model of BERTScore: 'embedded', a folder or a hub id such as roberta-large; none: no
          BERTScore [none]
        - judge_max_tokens: tokens per answer to be graded, and per greedy answer (divergent_tokens); 'auto' is
          1024, or a quarter of a shorter context [auto]
    judges
        judges of the answers, comma-separated; 'all' is every installed one but pairwise [all]
    judge_model
        models asked for grades, comma-separated (needs OPENAI_API_KEY); several are reported one by one [gpt-4]
    judge_args
        how judges are asked, and what that may cost: name=value,name=value
        - base_url: OpenAI-compatible endpoint; 'auto' is OPENAI_BASE_URL or the client's default [auto]
        - repeats: times each answer is graded; 2 or more also measure the judge's own noise [1]
        - attempts: replies per judgment until one can be read; replies are kept, so a larger number goes on from
          there [3]
        - max_unscored: largest share of judgments without a rating; above it the stage fails, and all replies
          stay on disk [0.05]
        - concurrency: calls to the judge at the same time [16]
        - timeout: seconds for one call to the judge [120.0]
        - max_retries: retries of a call after a failure that may be temporary [5]
        - requests_per_minute: calls to the judge in a minute; 0 is no limit [0]
        - tokens_per_minute: tokens of prompts and longest replies in a minute; 0 is no limit [0]
        - prices: YAML file 'model: {prompt: 2.5, completion: 10}' per million tokens; none: no cost [none]
        - max_cost: most that one command may spend on judges, by judge_prices: a sweep on all variants; 0 is no
          limit [0.0]
        - traces: show each judged answer in MLflow as a trace, with an assessment per judgment [true]
        - prompts: FastChat's file judge_prompts.jsonl, for judges=pairwise; none: our own pair prompts [none]
    speed_args
        what is generated to measure speed: name=value,name=value
        - prompt_tokens: tokens of each prompt that is read; 'auto' is 256, or half of a shorter context [auto]
        - new_tokens: tokens that are written after each prompt; 'auto' is 32, or a quarter of a shorter context
          [auto]
        - repeats: rounds that count, after one to warm up; baseline and variant take turns in each. Up to four
          times as many follow while the interval of a ratio is wider than 10 % [5]
        - threads: threads on a CPU; 'auto' is OMP_NUM_THREADS where it is set, else one per core that this
          process may use [auto]
    judge
        run the judge stage [true]
    speed
        run the speed stage [true]
    log_weights
        store the checkpoint with the registered model; 'auto' does up to 2 GiB, larger ones are referred to by
        path (auto | true | false) [auto]
    resume
        id of a main run that failed: run only the stages that it lacks, then publish [none]
    experiment
        MLflow experiment of the runs; 'auto' is MLFLOW_EXPERIMENT_NAME, or else 'mlflow-compress' [auto]
    """

@overload
def search(
    *,
    progress: Say | None = None,
    model: str | PathLike[str] | ModelInMemory = "demo",
    model_args: str | Mapping[str, object] = {},
    device: Literal["auto", "cpu", "cuda", "balanced"] = "auto",
    max_memory: str | Mapping[str, object] = {},
    seed: int = 42,
    data_dir: str | PathLike[str] | None = None,
    formats: str | Sequence[object] = "gptq:3,gptq:4,gptq:8",
    cache_formats: str | Sequence[object] | None = None,
    search_args: str | Mapping[str, object] = {},
    bits_per_weight: str | Sequence[object] | int | float | None = None,
    max_bytes: str | Sequence[object] | int | float | None = None,
    max_kl: str | Sequence[object] | int | float | None = None,
    repair: None = None,
    policy: PolicyLike | None = None,
    group_size: str | int | float = "auto",
    calibration: str | PathLike[str] = "auto",
    calibration_args: str | Mapping[str, object] = {},
    method_args: str | Mapping[str, object] = {},
    target: Literal["any", "vllm", "vllm-cpu", "llama.cpp", "transformers"] = "any",
    output_dir: str | PathLike[str] = "auto",
    tasks: str | PathLike[str] | Sequence[object] | TaskRows = "auto",
    num_fewshot: int = 5,
    num_shuffles: int = 2,
    task_args: str | Mapping[str, object] = {},
    prompt_style: str | Sequence[object] = "auto",
    limit: int = 0,
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto",
    system_prompt: str | None = None,
    redact: str | PathLike[str] | None = None,
    engine: str = "local",
    engine_args: str | Mapping[str, object] = {},
    vllm_args: str | Mapping[str, object] = {},
    log_weights: Literal["auto", "true", "false"] = "auto",
    experiment: str = "auto",
) -> Search:
    """Return variants of mixed precision: the closest within a budget of bits, or the smallest within a KL.

    This is ``mlflow-compress search``. Each format's cost in each group of layers is the measured KL of the baseline
    with that group alone compressed. An integer programme chooses, the recipe becomes one checkpoint, and that is
    evaluated beside the uniform variants. What an earlier run of the store holds is found.

    With ``repair=RUN`` the variant of a main run that a policy refuses gets more bits where they help most, until it
    passes.

    Parameters
    ----------
    progress : callable (line), optional
        Is told what happens now.
    model
        baseline model: 'demo', 'demo-tools' or 'demo-thinks' (embedded), a folder, or a Hugging Face hub id; what
        a given checkpoint was made from, where this is left out [demo]
    model_args
        further settings of the baseline: name=value,name=value
        - other_baseline: compare a checkpoint with a baseline that it was not made from (off: refused) [false]
        - offload_dir: device=balanced: folder for weights on the disk; none: that of temporary files [none]
        - trust_remote_code: run code that a checkpoint brings along (off: such models are refused) [false]
    device
        where models run; 'balanced' spreads a model over all GPUs, then memory, then the disk (auto | cpu | cuda
        | balanced) [auto]
    max_memory
        device=balanced: most memory for models by device: cpu=2GiB,0=70GiB; none: what is free [none]
    seed
        seed of shuffles, splits, samples, calibration and bootstrap; a verdict names any other than the default
        [42]
    data_dir
        folder of data sets in hub layout, looked in before the hub [none]
    formats
        formats to choose from, METHOD:BITS, comma-separated; 'none' is a layer that stays as it is
        [gptq:3,gptq:4,gptq:8]
    cache_formats
        formats of each layer's cache of keys and values, comma-separated: BITS, or KEYS:VALUES, of 8, 4, 3, 2 and
        fp8; 16 is a cache that stays as it is [none]
    search_args
        how candidates are measured: name=value,name=value
        - cache_tokens: tokens in the cache whose bytes count with the weights'; 'auto': the model's context
          [auto]
        - text: text that the costs are measured on: as 'calibration'; none: the calibration text, behind the part
          that calibrates [none]
        - windows: windows of calibration_length tokens of that text [64]
        - rounds: with max_kl or repair: how many more checkpoints are tried, until one keeps to the limit [2]
    bits_per_weight
        most stored bits per weight of the linear layers; several, comma-separated, give a front [none]
    max_bytes
        in place of bits_per_weight: most bytes of all stored tensors, and of the cache with cache_formats [none]
    max_kl
        in place of both: find the smallest variant within this KL (nats, upper end) [none]
    repair
        in place of all: id of a main run whose variant a policy refuses; find the fewest extra bytes with which
        it passes [none]
    policy
        YAML file that decides; none: the default policy, which `mlflow-compress promote policy` prints [none]
    group_size
        weights that share one scale; 'auto' takes the method's default [auto]
    calibration
        wikitext2, c4, pile, ultrachat, demo, or a file (.txt, .jsonl); 'auto' is the demo's, for the demo [auto]
    calibration_args
        how much text calibrates: name=value,name=value
        - samples: calibration samples; 'auto' takes the method's default [auto]
        - length: tokens per calibration sample [256]
    method_args
        the method's further settings: name=value,name=value (sparsity=0.5,pattern=2:4) [none]
    target
        server that must take the checkpoint; what its kernels do not take is refused before compressing (any |
        vllm | vllm-cpu | llama.cpp | transformers) [any]
    output_dir
        folder that receives one sub-folder per variant; 'auto' is checkpoints/ in the folder that keeps state
        (beside the database, or MLFLOW_COMPRESS_HOME) [auto]
    tasks
        comma-separated task names and files (.jsonl, .txt); 'auto' is 'demo' for the demo [auto]
    num_fewshot
        few-shot examples in lettered multiple choice [5]
    num_shuffles
        answer shuffles for the order-robustness metric; 0 turns it off [2]
    task_args
        further settings of tasks: name=value,name=value
        - shuffle_fewshot: shuffle the answers of the few-shot examples too (off: they stay, as in the published
          metric) [false]
        - all_orders: items per lettered task that are also scored in all orders of up to 4 answers; 0 turns it
          off [0]
        - apply_chat_template: show lettered tasks and those of lm-evaluation-harness in the model's chat template
          [false]
        - fewshot_as_multiturn: few-shot examples of lm-evaluation-harness's tasks are turns of their own there
          (off: one turn) [true]
        - enable_thinking: tasks of thinking: what the chat template reads as enable_thinking; false asks for the
          answer at once [true]
        - thinking_samples: tasks of thinking: answers per question that each model draws, at the baseline's own
          temperature [8]
        - thinking_max_new_tokens: tasks of thinking: longest answer in tokens, thought included; 'auto' is 256
          for the embedded problems, 8192 for your own [auto]
        - noise_items: items per task, and windows per corpus, scored twice: by the baseline, and by a served
          variant; 0 takes all [200]
        - trace_instructions: tasks=traces: what the baseline answers: mt_bench, vicuna_bench, alpaca, demo, or a
          JSONL file; 'auto' is the demo's, for the demo. The baseline writes prompts x samples x tokens once,
          before it is evaluated [auto]
        - trace_prompts: tasks=traces: prompts, drawn with the seed; 0 takes all [100]
        - trace_samples: tasks=traces: sampled answers per prompt [1]
        - trace_max_new_tokens: tasks=traces: longest answer in tokens; 'auto' is 512, or a quarter of a shorter
          context [auto]
        - trace_temperature: tasks=traces: temperature; 1 samples the model's unmodified distribution [1.0]
    prompt_style
        prompt styles of lettered tasks, comma-separated: the first asks, all of them ask with options E and F
        [auto]
    limit
        items per category and task after a seeded shuffle; 0 takes all [0]
    dtype
        dtype in which both models are evaluated and answer; auto: the baseline's own on GPUs, float32 on CPUs
        (auto | float32 | bfloat16 | float16) [auto]
    system_prompt
        system prompt of judged answers and of tasks in the chat template; none: none [none]
    redact
        cleaned from logged conversations before anything is stored: email, url, ip, iban, phone, and files with a
        regular expression per line; comma-separated [none]
    engine
        what runs models: 'local' is transformers in this process, 'ray' the same on the workers of a Ray cluster,
        'vllm' is vLLM with its own kernels; or the name of an engine that an installed package adds [local]
    engine_args
        further settings of engine=ray and engine=vllm: name=value,name=value
        - workers: workers of engine=ray, each with a copy of the model; 'auto' is one per GPU, or as many as
          cores allow [auto]
        - cpus_per_worker: cores of a worker, and on CPUs its threads [1]
        - ray_address: running Ray cluster: 'auto' (found on this machine) or host:port; none: one is started on
          this machine [none]
        - vllm_python: engine=vllm and speed: file of the Python that has vLLM; none: that of
          MLFLOW_COMPRESS_VLLM_PYTHON [none]
    vllm_args
        engine=vllm: further arguments of vLLM: tensor_parallel_size=2,block_size=32 [none]
    log_weights
        store the checkpoint with the registered model; 'auto' does up to 2 GiB, larger ones are referred to by
        path (auto | true | false) [auto]
    experiment
        MLflow experiment of the runs; 'auto' is MLFLOW_EXPERIMENT_NAME, or else 'mlflow-compress' [auto]
    """

@overload
def search(
    *,
    progress: Say | None = None,
    model: str | PathLike[str] | ModelInMemory = "demo",
    model_args: str | Mapping[str, object] = {},
    device: Literal["auto", "cpu", "cuda", "balanced"] = "auto",
    max_memory: str | Mapping[str, object] = {},
    seed: int = 42,
    data_dir: str | PathLike[str] | None = None,
    formats: str | Sequence[object] = "gptq:3,gptq:4,gptq:8",
    cache_formats: str | Sequence[object] | None = None,
    search_args: str | Mapping[str, object] = {},
    bits_per_weight: str | Sequence[object] | int | float | None = None,
    max_bytes: str | Sequence[object] | int | float | None = None,
    max_kl: str | Sequence[object] | int | float | None = None,
    repair: str,
    policy: PolicyLike | None = None,
    group_size: str | int | float = "auto",
    calibration: str | PathLike[str] = "auto",
    calibration_args: str | Mapping[str, object] = {},
    method_args: str | Mapping[str, object] = {},
    target: Literal["any", "vllm", "vllm-cpu", "llama.cpp", "transformers"] = "any",
    output_dir: str | PathLike[str] = "auto",
    tasks: str | PathLike[str] | Sequence[object] | TaskRows = "auto",
    num_fewshot: int = 5,
    num_shuffles: int = 2,
    task_args: str | Mapping[str, object] = {},
    prompt_style: str | Sequence[object] = "auto",
    limit: int = 0,
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto",
    system_prompt: str | None = None,
    redact: str | PathLike[str] | None = None,
    engine: str = "local",
    engine_args: str | Mapping[str, object] = {},
    vllm_args: str | Mapping[str, object] = {},
    log_weights: Literal["auto", "true", "false"] = "auto",
    experiment: str = "auto",
) -> Repair: ...

@overload
def search(
    *,
    progress: Say | None = None,
    model: str | PathLike[str] | ModelInMemory = "demo",
    model_args: str | Mapping[str, object] = {},
    device: Literal["auto", "cpu", "cuda", "balanced"] = "auto",
    max_memory: str | Mapping[str, object] = {},
    seed: int = 42,
    data_dir: str | PathLike[str] | None = None,
    formats: str | Sequence[object] = "gptq:3,gptq:4,gptq:8",
    cache_formats: str | Sequence[object] | None = None,
    search_args: str | Mapping[str, object] = {},
    bits_per_weight: str | Sequence[object] | int | float | None = None,
    max_bytes: str | Sequence[object] | int | float | None = None,
    max_kl: str | Sequence[object] | int | float | None = None,
    repair: str | None,
    policy: PolicyLike | None = None,
    group_size: str | int | float = "auto",
    calibration: str | PathLike[str] = "auto",
    calibration_args: str | Mapping[str, object] = {},
    method_args: str | Mapping[str, object] = {},
    target: Literal["any", "vllm", "vllm-cpu", "llama.cpp", "transformers"] = "any",
    output_dir: str | PathLike[str] = "auto",
    tasks: str | PathLike[str] | Sequence[object] | TaskRows = "auto",
    num_fewshot: int = 5,
    num_shuffles: int = 2,
    task_args: str | Mapping[str, object] = {},
    prompt_style: str | Sequence[object] = "auto",
    limit: int = 0,
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto",
    system_prompt: str | None = None,
    redact: str | PathLike[str] | None = None,
    engine: str = "local",
    engine_args: str | Mapping[str, object] = {},
    vllm_args: str | Mapping[str, object] = {},
    log_weights: Literal["auto", "true", "false"] = "auto",
    experiment: str = "auto",
) -> Search | Repair: ...

def serve_webhook(
    *,
    progress: Say | None = None,
    host: str = "127.0.0.1",
    port: int = 8765,
    tag: str = "decide",
    gate: str | PathLike[str] | None = None,
    policy: PolicyLike | None = None,
    needs: Literal["none", "approval"] = "none",
    alias: str = "champion",
    experiment: str = "auto",
) -> None:
    """Take MLflow's webhook deliveries until interrupted, and give each a verdict on its version, as `promote` does.

    Parameters
    ----------
    progress : callable (line), optional
        Is told the address, and every verdict.
    host
        address to listen on; 0.0.0.0 lets other machines in [127.0.0.1]
    port
        port to listen on; 0 takes a free one [8765]
    tag
        tag that asks for a decision when it is set on a version; new versions always do [decide]
    gate
        YAML file of parameters of `gate`, which decides on versions that `main` has not made; none: nothing does
        [none]
    policy
        YAML file that decides; none: the default policy, which `mlflow-compress promote policy` prints [none]
    needs
        'approval': the alias stays, and the winner waits until `mlflow-compress promote approve` moves it (none |
        approval) [none]
    alias
        registry alias that moves to the winner [champion]
    experiment
        MLflow experiment of the runs; 'auto' is MLFLOW_EXPERIMENT_NAME, or else 'mlflow-compress' [auto]
    """

def speed(
    checkpoint: CompressedModel | ModelInMemory | PathOrText | None = None,
    *,
    store: StoreLike = None,
    model: str | PathLike[str] | ModelInMemory = "demo",
    model_args: str | Mapping[str, object] = {},
    device: Literal["auto", "cpu", "cuda", "balanced"] = "auto",
    max_memory: str | Mapping[str, object] = {},
    seed: int = 42,
    data_dir: str | PathLike[str] | None = None,
    speed_args: str | Mapping[str, object] = {},
    engine_args: str | Mapping[str, object] = {},
    endpoint_args: str | Mapping[str, object] = {},
    experiment: str = "auto",
) -> SpeedMeasurement:
    """Return how fast a checkpoint is beside its baseline, in the runtime that computes with its format.

    Both are loaded in that runtime (transformers, vLLM or llama.cpp) and timed in turn. A format that is only simulated
    here is not timed; the result says why. A served model is timed by its stream, with its baseline if that is served.

    Parameters
    ----------
    checkpoint : CompressedModel, path, or (model, tokenizer)
        What `compress` returned, or its folder; a loaded transformers model with its tokenizer; or
        "endpoint:http://host:port/v1" of a served model.
    store : path, optional
        A folder that keeps runs in place of MLflow's tracking store.
    model
        baseline model: 'demo', 'demo-tools' or 'demo-thinks' (embedded), a folder, or a Hugging Face hub id; what
        a given checkpoint was made from, where this is left out [demo]
    model_args
        further settings of the baseline: name=value,name=value
        - other_baseline: compare a checkpoint with a baseline that it was not made from (off: refused) [false]
        - offload_dir: device=balanced: folder for weights on the disk; none: that of temporary files [none]
        - trust_remote_code: run code that a checkpoint brings along (off: such models are refused) [false]
    device
        where models run; 'balanced' spreads a model over all GPUs, then memory, then the disk (auto | cpu | cuda
        | balanced) [auto]
    max_memory
        device=balanced: most memory for models by device: cpu=2GiB,0=70GiB; none: what is free [none]
    seed
        seed of shuffles, splits, samples, calibration and bootstrap; a verdict names any other than the default
        [42]
    data_dir
        folder of data sets in hub layout, looked in before the hub [none]
    speed_args
        what is generated to measure speed: name=value,name=value
        - prompt_tokens: tokens of each prompt that is read; 'auto' is 256, or half of a shorter context [auto]
        - new_tokens: tokens that are written after each prompt; 'auto' is 32, or a quarter of a shorter context
          [auto]
        - repeats: rounds that count, after one to warm up; baseline and variant take turns in each. Up to four
          times as many follow while the interval of a ratio is wider than 10 % [5]
        - threads: threads on a CPU; 'auto' is OMP_NUM_THREADS where it is set, else one per core that this
          process may use [auto]
    engine_args
        further settings of engine=ray and engine=vllm: name=value,name=value
        - vllm_python: engine=vllm and speed: file of the Python that has vLLM; none: that of
          MLFLOW_COMPRESS_VLLM_PYTHON [none]
    endpoint_args
        how served models are asked: name=value,name=value
        - served_model: with checkpoint=endpoint:http://host:port/v1: the model's name at that server [none]
        - baseline_served_model: with model=endpoint:URL: the baseline's name at that server [none]
        - tokenizer: tokenizer of served models: a folder or a hub id; none: the baseline's [none]
        - chat: send conversations as chat completions; 'auto' does where the server's chat template reads as the
          baseline's (auto | true | false) [auto]
        - concurrency: requests to a server of models at the same time [16]
        - timeout: seconds for one such request [120.0]
        - max_retries: retries of such a request after a failure that may be temporary [5]
    experiment
        MLflow experiment of the runs; 'auto' is MLFLOW_EXPERIMENT_NAME, or else 'mlflow-compress' [auto]
    """

@overload
def sweep(
    *,
    progress: Callable[[SweepProgress], None] | None = None,
    model: str | PathLike[str] | ModelInMemory = "demo",
    model_args: str | Mapping[str, object] = {},
    device: Literal["auto", "cpu", "cuda", "balanced"] = "auto",
    max_memory: str | Mapping[str, object] = {},
    seed: int = 42,
    data_dir: str | PathLike[str] | None = None,
    methods: str | Sequence[object] = "rtn,gptq,awq",
    bits: int | str | Sequence[object] = "auto",
    group_size: str | Sequence[object] | int | float = "auto",
    grid: str | PathLike[str] | None = None,
    calibration: str | PathLike[str] = "auto",
    calibration_args: str | Mapping[str, object] = {},
    replicates: int = 1,
    method_args: str | Mapping[str, object] = {},
    target: Literal["any", "vllm", "vllm-cpu", "llama.cpp", "transformers"] = "any",
    output_dir: str | PathLike[str] = "auto",
    tasks: str | PathLike[str] | Sequence[object] | TaskRows = "auto",
    num_fewshot: int = 5,
    num_shuffles: int = 2,
    task_args: str | Mapping[str, object] = {},
    prompt_style: str | Sequence[object] = "auto",
    limit: int = 0,
    items: str = "all",
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto",
    system_prompt: str | None = None,
    redact: str | PathLike[str] | None = None,
    engine: str = "local",
    engine_args: str | Mapping[str, object] = {},
    vllm_args: str | Mapping[str, object] = {},
    endpoint_args: str | Mapping[str, object] = {},
    instructions: str | PathLike[str] = "auto",
    answer_args: str | Mapping[str, object] = {},
    judges: str | Sequence[object] = "all",
    judge_model: str | Sequence[object] = "gpt-4",
    judge_args: str | Mapping[str, object] = {},
    speed_args: str | Mapping[str, object] = {},
    judge: bool = True,
    speed: bool = True,
    log_weights: Literal["auto", "true", "false"] = "auto",
    policy: PolicyLike | None = None,
    save: Literal["all", "passing", "winner"] = "all",
    dry_run: Literal[False] = False,
    experiment: str = "auto",
) -> Sweep:
    """Return the scoreboard of many variants of one baseline, after logging each as a main run of its own.

    This is ``mlflow-compress sweep``: every combination of methods, bits and group sizes that is supported. What an
    earlier run of the store holds is found, so that the same call goes on where an interrupted one ended. With
    ``dry_run=True`` nothing is made, and the plan is returned: what would be made, and what it would cost.

    Parameters
    ----------
    progress : callable (SweepProgress), optional
        Is told what happens: a line, and how far each variant is.
    model
        baseline model: 'demo', 'demo-tools' or 'demo-thinks' (embedded), a folder, or a Hugging Face hub id; what
        a given checkpoint was made from, where this is left out [demo]
    model_args
        further settings of the baseline: name=value,name=value
        - other_baseline: compare a checkpoint with a baseline that it was not made from (off: refused) [false]
        - offload_dir: device=balanced: folder for weights on the disk; none: that of temporary files [none]
        - trust_remote_code: run code that a checkpoint brings along (off: such models are refused) [false]
    device
        where models run; 'balanced' spreads a model over all GPUs, then memory, then the disk (auto | cpu | cuda
        | balanced) [auto]
    max_memory
        device=balanced: most memory for models by device: cpu=2GiB,0=70GiB; none: what is free [none]
    seed
        seed of shuffles, splits, samples, calibration and bootstrap; a verdict names any other than the default
        [42]
    data_dir
        folder of data sets in hub layout, looked in before the hub [none]
    methods
        compression methods, comma-separated (mlflow-compress list methods lists them) [rtn,gptq,awq]
    bits
        bits per weight, comma-separated; 'auto' takes each method's default; every combination is a variant
        [auto]
    group_size
        weights that share one scale, comma-separated; 'auto' takes each method's default [auto]
    grid
        YAML file with a list of combinations, of axes per method, or of served models; in place of methods [none]
    calibration
        wikitext2, c4, pile, ultrachat, demo, or a file (.txt, .jsonl); 'auto' is the demo's, for the demo [auto]
    calibration_args
        how much text calibrates: name=value,name=value
        - samples: calibration samples; 'auto' takes the method's default [auto]
        - length: tokens per calibration sample [256]
    replicates
        makes of each variant, each with other calibration samples, which shows how much is luck; further makes
        are evaluated alone, and methods that read no calibration text are made once [1]
    method_args
        the method's further settings: name=value,name=value (sparsity=0.5,pattern=2:4) [none]
    target
        server that must take the checkpoint; what its kernels do not take is refused before compressing (any |
        vllm | vllm-cpu | llama.cpp | transformers) [any]
    output_dir
        folder that receives one sub-folder per variant; 'auto' is checkpoints/ in the folder that keeps state
        (beside the database, or MLFLOW_COMPRESS_HOME) [auto]
    tasks
        comma-separated task names and files (.jsonl, .txt); 'auto' is 'demo' for the demo [auto]
    num_fewshot
        few-shot examples in lettered multiple choice [5]
    num_shuffles
        answer shuffles for the order-robustness metric; 0 turns it off [2]
    task_args
        further settings of tasks: name=value,name=value
        - shuffle_fewshot: shuffle the answers of the few-shot examples too (off: they stay, as in the published
          metric) [false]
        - all_orders: items per lettered task that are also scored in all orders of up to 4 answers; 0 turns it
          off [0]
        - apply_chat_template: show lettered tasks and those of lm-evaluation-harness in the model's chat template
          [false]
        - fewshot_as_multiturn: few-shot examples of lm-evaluation-harness's tasks are turns of their own there
          (off: one turn) [true]
        - enable_thinking: tasks of thinking: what the chat template reads as enable_thinking; false asks for the
          answer at once [true]
        - thinking_samples: tasks of thinking: answers per question that each model draws, at the baseline's own
          temperature [8]
        - thinking_max_new_tokens: tasks of thinking: longest answer in tokens, thought included; 'auto' is 256
          for the embedded problems, 8192 for your own [auto]
        - noise_items: items per task, and windows per corpus, scored twice: by the baseline, and by a served
          variant; 0 takes all [200]
        - trace_instructions: tasks=traces: what the baseline answers: mt_bench, vicuna_bench, alpaca, demo, or a
          JSONL file; 'auto' is the demo's, for the demo. The baseline writes prompts x samples x tokens once,
          before it is evaluated [auto]
        - trace_prompts: tasks=traces: prompts, drawn with the seed; 0 takes all [100]
        - trace_samples: tasks=traces: sampled answers per prompt [1]
        - trace_max_new_tokens: tasks=traces: longest answer in tokens; 'auto' is 512, or a quarter of a shorter
          context [auto]
        - trace_temperature: tasks=traces: temperature; 1 samples the model's unmodified distribution [1.0]
    prompt_style
        prompt styles of lettered tasks, comma-separated: the first asks, all of them ask with options E and F
        [auto]
    limit
        items per category and task after a seeded shuffle; 0 takes all [0]
    items
        items that the variant is scored on: 'all'; or drawn by the baseline's lead, more where answers can flip:
        a number, 'width:0.5' until flips and accuracy change are known to 0.5 points, or 'auto' until the default
        policy is decided, 'auto:FILE' another policy [all]
    dtype
        dtype in which both models are evaluated and answer; auto: the baseline's own on GPUs, float32 on CPUs
        (auto | float32 | bfloat16 | float16) [auto]
    system_prompt
        system prompt of judged answers and of tasks in the chat template; none: none [none]
    redact
        cleaned from logged conversations before anything is stored: email, url, ip, iban, phone, and files with a
        regular expression per line; comma-separated [none]
    engine
        what runs models: 'local' is transformers in this process, 'ray' the same on the workers of a Ray cluster,
        'vllm' is vLLM with its own kernels; or the name of an engine that an installed package adds [local]
    engine_args
        further settings of engine=ray and engine=vllm: name=value,name=value
        - workers: workers of engine=ray, each with a copy of the model; 'auto' is one per GPU, or as many as
          cores allow [auto]
        - cpus_per_worker: cores of a worker, and on CPUs its threads [1]
        - ray_address: running Ray cluster: 'auto' (found on this machine) or host:port; none: one is started on
          this machine [none]
        - vllm_python: engine=vllm and speed: file of the Python that has vLLM; none: that of
          MLFLOW_COMPRESS_VLLM_PYTHON [none]
    vllm_args
        engine=vllm: further arguments of vLLM: tensor_parallel_size=2,block_size=32 [none]
    endpoint_args
        how served models are asked: name=value,name=value
        - served_model: with checkpoint=endpoint:http://host:port/v1: the model's name at that server [none]
        - baseline_served_model: with model=endpoint:URL: the baseline's name at that server [none]
        - tokenizer: tokenizer of served models: a folder or a hub id; none: the baseline's [none]
        - chat: send conversations as chat completions; 'auto' does where the server's chat template reads as the
          baseline's (auto | true | false) [auto]
        - concurrency: requests to a server of models at the same time [16]
        - timeout: seconds for one such request [120.0]
        - max_retries: retries of such a request after a failure that may be temporary [5]
    instructions
        mt_bench, vicuna_bench, alpaca, xstest, jbb, or_bench, do_not_answer, demo, a JSONL file, openai:FILE or
        mlflow-traces:EXPERIMENT; 'auto' is the demo's, for the demo [auto]
    answer_args
        further settings of the answers that are compared: name=value,name=value
        - instruction_limit: instructions per category after a seeded shuffle; 0 takes all [0]
        - show_logged: show answers to logged conversations, and their questions, in reports and pages [false]
        - num_samples: sampled answers per instruction for ConSCompF [5]
        - max_new_tokens: tokens per sampled answer [128]
        - encoder: sentence encoder: 'embedded' (all-MiniLM-L6-v2), a folder or a hub id; with encoder_base_url a
          model there [embedded]
        - encoder_base_url: OpenAI-compatible endpoint that embeds the answers (needs ENCODER_API_KEY); none: on
          this machine [none]
        - bertscore_model: model of BERTScore: 'embedded', a folder or a hub id such as roberta-large; none: no
          BERTScore [none]
        - judge_max_tokens: tokens per answer to be graded, and per greedy answer (divergent_tokens); 'auto' is
          1024, or a quarter of a shorter context [auto]
    judges
        judges of the answers, comma-separated; 'all' is every installed one but pairwise [all]
    judge_model
        models asked for grades, comma-separated (needs OPENAI_API_KEY); several are reported one by one [gpt-4]
    judge_args
        how judges are asked, and what that may cost: name=value,name=value
        - base_url: OpenAI-compatible endpoint; 'auto' is OPENAI_BASE_URL or the client's default [auto]
        - repeats: times each answer is graded; 2 or more also measure the judge's own noise [1]
        - attempts: replies per judgment until one can be read; replies are kept, so a larger number goes on from
          there [3]
        - max_unscored: largest share of judgments without a rating; above it the stage fails, and all replies
          stay on disk [0.05]
        - concurrency: calls to the judge at the same time [16]
        - timeout: seconds for one call to the judge [120.0]
        - max_retries: retries of a call after a failure that may be temporary [5]
        - requests_per_minute: calls to the judge in a minute; 0 is no limit [0]
        - tokens_per_minute: tokens of prompts and longest replies in a minute; 0 is no limit [0]
        - prices: YAML file 'model: {prompt: 2.5, completion: 10}' per million tokens; none: no cost [none]
        - max_cost: most that one command may spend on judges, by judge_prices: a sweep on all variants; 0 is no
          limit [0.0]
        - traces: show each judged answer in MLflow as a trace, with an assessment per judgment [true]
        - prompts: FastChat's file judge_prompts.jsonl, for judges=pairwise; none: our own pair prompts [none]
    speed_args
        what is generated to measure speed: name=value,name=value
        - prompt_tokens: tokens of each prompt that is read; 'auto' is 256, or half of a shorter context [auto]
        - new_tokens: tokens that are written after each prompt; 'auto' is 32, or a quarter of a shorter context
          [auto]
        - repeats: rounds that count, after one to warm up; baseline and variant take turns in each. Up to four
          times as many follow while the interval of a ratio is wider than 10 % [5]
        - threads: threads on a CPU; 'auto' is OMP_NUM_THREADS where it is set, else one per core that this
          process may use [auto]
    judge
        run the judge stage [true]
    speed
        run the speed stage [true]
    log_weights
        store the checkpoint with the registered model; 'auto' does up to 2 GiB, larger ones are referred to by
        path (auto | true | false) [auto]
    policy
        YAML file that says which variant to ship; none: the default policy of promote [none]
    save
        device=balanced: which variants are made; but for 'all', those whose method reads no calibration text are
        scored first, in one read of the baseline's weights: 'passing' makes what the policy does not fail,
        'winner' of these only the smallest that passes (all | passing | winner) [all]
    dry_run
        show the plan with estimates of time and disk, and do nothing [false]
    experiment
        MLflow experiment of the runs; 'auto' is MLFLOW_EXPERIMENT_NAME, or else 'mlflow-compress' [auto]
    """

@overload
def sweep(
    *,
    progress: Callable[[SweepProgress], None] | None = None,
    model: str | PathLike[str] | ModelInMemory = "demo",
    model_args: str | Mapping[str, object] = {},
    device: Literal["auto", "cpu", "cuda", "balanced"] = "auto",
    max_memory: str | Mapping[str, object] = {},
    seed: int = 42,
    data_dir: str | PathLike[str] | None = None,
    methods: str | Sequence[object] = "rtn,gptq,awq",
    bits: int | str | Sequence[object] = "auto",
    group_size: str | Sequence[object] | int | float = "auto",
    grid: str | PathLike[str] | None = None,
    calibration: str | PathLike[str] = "auto",
    calibration_args: str | Mapping[str, object] = {},
    replicates: int = 1,
    method_args: str | Mapping[str, object] = {},
    target: Literal["any", "vllm", "vllm-cpu", "llama.cpp", "transformers"] = "any",
    output_dir: str | PathLike[str] = "auto",
    tasks: str | PathLike[str] | Sequence[object] | TaskRows = "auto",
    num_fewshot: int = 5,
    num_shuffles: int = 2,
    task_args: str | Mapping[str, object] = {},
    prompt_style: str | Sequence[object] = "auto",
    limit: int = 0,
    items: str = "all",
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto",
    system_prompt: str | None = None,
    redact: str | PathLike[str] | None = None,
    engine: str = "local",
    engine_args: str | Mapping[str, object] = {},
    vllm_args: str | Mapping[str, object] = {},
    endpoint_args: str | Mapping[str, object] = {},
    instructions: str | PathLike[str] = "auto",
    answer_args: str | Mapping[str, object] = {},
    judges: str | Sequence[object] = "all",
    judge_model: str | Sequence[object] = "gpt-4",
    judge_args: str | Mapping[str, object] = {},
    speed_args: str | Mapping[str, object] = {},
    judge: bool = True,
    speed: bool = True,
    log_weights: Literal["auto", "true", "false"] = "auto",
    policy: PolicyLike | None = None,
    save: Literal["all", "passing", "winner"] = "all",
    dry_run: Literal[True],
    experiment: str = "auto",
) -> SweepPlan: ...

@overload
def sweep(
    *,
    progress: Callable[[SweepProgress], None] | None = None,
    model: str | PathLike[str] | ModelInMemory = "demo",
    model_args: str | Mapping[str, object] = {},
    device: Literal["auto", "cpu", "cuda", "balanced"] = "auto",
    max_memory: str | Mapping[str, object] = {},
    seed: int = 42,
    data_dir: str | PathLike[str] | None = None,
    methods: str | Sequence[object] = "rtn,gptq,awq",
    bits: int | str | Sequence[object] = "auto",
    group_size: str | Sequence[object] | int | float = "auto",
    grid: str | PathLike[str] | None = None,
    calibration: str | PathLike[str] = "auto",
    calibration_args: str | Mapping[str, object] = {},
    replicates: int = 1,
    method_args: str | Mapping[str, object] = {},
    target: Literal["any", "vllm", "vllm-cpu", "llama.cpp", "transformers"] = "any",
    output_dir: str | PathLike[str] = "auto",
    tasks: str | PathLike[str] | Sequence[object] | TaskRows = "auto",
    num_fewshot: int = 5,
    num_shuffles: int = 2,
    task_args: str | Mapping[str, object] = {},
    prompt_style: str | Sequence[object] = "auto",
    limit: int = 0,
    items: str = "all",
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto",
    system_prompt: str | None = None,
    redact: str | PathLike[str] | None = None,
    engine: str = "local",
    engine_args: str | Mapping[str, object] = {},
    vllm_args: str | Mapping[str, object] = {},
    endpoint_args: str | Mapping[str, object] = {},
    instructions: str | PathLike[str] = "auto",
    answer_args: str | Mapping[str, object] = {},
    judges: str | Sequence[object] = "all",
    judge_model: str | Sequence[object] = "gpt-4",
    judge_args: str | Mapping[str, object] = {},
    speed_args: str | Mapping[str, object] = {},
    judge: bool = True,
    speed: bool = True,
    log_weights: Literal["auto", "true", "false"] = "auto",
    policy: PolicyLike | None = None,
    save: Literal["all", "passing", "winner"] = "all",
    dry_run: bool,
    experiment: str = "auto",
) -> Sweep | SweepPlan: ...

def tasks(
) -> Catalog:
    """Return the named tasks: source, licence, items, shots, rule, and the hash of the definition."""

def verify(
    receipt: PathOrText,
    *,
    key: PathOrText | None = None,
    recompute: bool = False,
) -> Receipt:
    """Return a receipt whose signature and digests are right; anything else is a `DataError`.

    A signed receipt needs the PEM file of the signer's public key as `key`; an unsigned one fails with a key.
    `recompute` computes every number again from the records.
    """
