"""Rebuild the embedded demonstration from a seed: data files, tokenizer, model and its measurements.

Example
-------
python -m tools.train_demo --seed 17 --out rebuilt

On a machine shared with other work, set ``OMP_WAIT_POLICY=PASSIVE`` in the environment: it is much faster there.
"""

import argparse
import json
from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer, LlamaForCausalLM

from tools.demo_generator.checks import compare, letter_logits, prompts, rounded
from tools.demo_generator.files import SEED, write_data_files
from tools.demo_generator.stages import STAGES
from tools.demo_generator.training import Trainer


def measure(model_folder: Path, data_folder: Path) -> dict[str, Any]:
    """Return the accuracy of the saved model and what rounding its weights changes."""
    rows = [json.loads(line) for line in (data_folder / "choice.jsonl").read_text(encoding="utf-8").splitlines()]
    asked = prompts(rows)
    tokenizer = AutoTokenizer.from_pretrained(model_folder)
    model = LlamaForCausalLM.from_pretrained(model_folder, dtype=torch.float32).eval()
    texts, gold = [text for text, _ in asked], torch.tensor([answer for _, answer in asked])
    baseline = letter_logits(model, tokenizer, texts)
    measured = {"baseline": compare(baseline, baseline, gold)}
    for bits in (8, 4, 3):
        measured[f"{bits} bits"] = compare(baseline, letter_logits(rounded(model, bits), tokenizer, texts), gold)
    return measured


def main() -> None:
    """Parse the arguments and rebuild."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=SEED, help="seed of world and training (default: %(default)s)")
    parser.add_argument("--threads", type=int, default=2, help="processor threads to use (default: %(default)s)")
    parser.add_argument(
        "--from",
        dest="first",
        choices=[stage.name for stage in STAGES],
        default=STAGES[0].name,
        help="stage to begin with, after those that an earlier run into the same folder has finished",
    )
    parser.add_argument("--data-only", action="store_true", help="write the data files and train nothing")
    parser.add_argument("--out", type=Path, required=True, help="folder to write model/ and data/ into")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    write_data_files(arguments.out / "data", arguments.seed)
    if arguments.data_only:
        return
    trainer = Trainer(arguments.seed, arguments.out)
    first = [stage.name for stage in STAGES].index(arguments.first)
    if first:
        trainer.resume(STAGES[first - 1])
    for stage in STAGES[first:]:
        trainer.run(stage)
    measured = measure(arguments.out / "model", arguments.out / "data")
    report = json.dumps({"training": trainer.log[-1], "measured": measured}, indent=2)
    (arguments.out / "measured.json").write_text(report + "\n", encoding="utf-8", newline="\n")
    print(report)


if __name__ == "__main__":
    main()
