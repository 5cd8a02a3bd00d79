"""Searched variants beside the linear mix of uniform ones at the same size, and predicted beside measured KL.

python benchmarks/search.py
python benchmarks/search.py --model FOLDER --formats gptq:2,gptq:3,gptq:4,gptq:8 --group_size channel

The demo, and `demo-tools`, are searched on one half of the demo's corpus (every other paragraph) and evaluated on the
other. For another model the texts are written by the model itself: samples at temperature 1, of which a third
calibrates, a third is searched on, and a third is evaluated on. Bits are counted from stored tensors, over the linear
layers. The aims:

- at no budget a KL that is significantly higher than that of the linear mix, and a significantly lower one at two or
  more (paired by window, 95 % interval);
- predicted and measured KL within 10 % of each other.
"""

import argparse
import os
from pathlib import Path

import mlflow_compress as mc
from mlflow_compress import demo


def halves(folder: Path) -> dict[str, str]:
    """Write the demo's corpus as two texts, and return the parameters that name them."""
    paragraphs = (demo.DATA_DIR / "corpus.txt").read_text().split("\n\n")
    return written(folder, {"search_text": paragraphs[::2], "tasks": paragraphs[1::2]})


def samples(folder: Path, model: str, n: int, length: int) -> dict[str, str]:
    """Let a model write three texts, and return the parameters that name them."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    if not all((folder / f"{name}.txt").exists() for name in ("calibration", "search_text", "tasks")):
        torch.manual_seed(0)
        loaded, tokenizer = AutoModelForCausalLM.from_pretrained(model), AutoTokenizer.from_pretrained(model)
        start = torch.full((n, 1), tokenizer.bos_token_id)
        ids = loaded.generate(start, do_sample=True, temperature=1.0, top_k=0, max_new_tokens=length, pad_token_id=0)
        texts = [" ".join(tokenizer.decode(row, skip_special_tokens=True).split()) for row in ids]
        third = n // 3
        parts = {"calibration": texts[:third], "search_text": texts[third : 2 * third], "tasks": texts[2 * third :]}
        return written(folder, parts)
    return {name: str(folder / f"{name}.txt") for name in ("calibration", "search_text", "tasks")}


def written(folder: Path, parts: dict[str, list[str]]) -> dict[str, str]:
    """Write each part as a text file, and return the files."""
    for name, texts in parts.items():
        (folder / f"{name}.txt").write_text("\n\n".join(texts))
    return {name: str(folder / f"{name}.txt") for name in parts}


def main() -> None:
    """Search within each budget, and print what was found and whether the aims are reached."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--formats", default="gptq:3,gptq:4,gptq:8")
    parser.add_argument("--bits_per_weight", default="3.25,3.5,4.0,4.5")
    parser.add_argument("--group_size", default="auto")
    parser.add_argument("--search_windows", type=int, default=56)
    parser.add_argument(
        "--store", default="search-benchmark", help="folder of the runs, in which finished work is found"
    )
    parser.add_argument("--samples", type=int, default=480, help="texts that another model than the demo writes")
    given = parser.parse_args()
    folder = Path(given.store).resolve()
    folder.mkdir(parents=True, exist_ok=True)
    os.environ["MLFLOW_TRACKING_URI"] = f"sqlite:///{folder / 'mlflow.db'}"
    texts = (
        halves(folder) if given.model in ("demo", "demo-tools") else samples(folder, given.model, given.samples, 256)
    )
    how = {"text": texts.pop("search_text"), "windows": given.search_windows}
    own = ("formats", "bits_per_weight", "group_size", "model")
    found = mc.search(
        **{name: getattr(given, name) for name in own},
        **texts,
        search_args=how,
        task_args={"noise_items": 2},
        progress=print,
    )

    print(found.as_text(), "\n")
    against = [one.against_mix for one in found.searched]
    print(f"closer at {against.count('closer')} of {len(against)} budgets (aim: 3 of 4), ", end="")
    print(f"farther at {against.count('farther')} (aim: 0)")
    for one in found.searched:
        print(
            f"{one.limit}: predicted {one.predicted_kl:.4g}, measured {one.search_kl:.4g} on the search's text ", end=""
        )
        print(
            f"({one.prediction_error:+.1%}), {one.kl:.4g} on held-out text ({one.predicted_kl / one.kl - 1:+.1%})",
            end="",
        )
        print()
    print(f"{len(found.costs)} swaps measured")


if __name__ == "__main__":
    main()
