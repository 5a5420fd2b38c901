"""lm-eval's `hf` back-end on a folder, and `tools/evaluate.py` on the same text."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.evaluation.test_hugging_face import TEXT, save_small_llama
from tests.support.small_tokenizer import save_small_tokenizer

REPOSITORY = Path(__file__).parents[2]
TASK = """
task: local_text
dataset_path: text
dataset_kwargs:
  data_files:
    test: {file}
  sample_by: document
test_split: test
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{{{text}}}}"
metric_list:
  - metric: word_perplexity
  - metric: byte_perplexity
  - metric: bits_per_byte
"""
SCRIPT = """
import json, sys
import lm_eval
from lm_eval.tasks import TaskManager

folder, tasks, trust = sys.argv[1:4]
result = lm_eval.simple_evaluate(
    model="hf",
    model_args={
        "pretrained": folder,
        "dtype": "float32",
        "max_length": 24,
        "trust_remote_code": trust == "1",
    },
    tasks=["local_text"],
    task_manager=TaskManager(include_path=tasks, include_defaults=False),
    device="cpu",
    batch_size=2,
    bootstrap_iters=0,
)
print("RESULT", json.dumps(result["results"]["local_text"]))
"""


def bits_per_byte_of_lm_eval(folder: Path, text: Path, work: Path, trust: bool = False) -> float:
    """What lm-eval finds, in a process of its own and without a network."""
    tasks = work / "tasks"
    tasks.mkdir()
    (tasks / "local_text.yaml").write_text(TASK.format(file=text))
    offline = dict.fromkeys(("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE", "HF_EVALUATE_OFFLINE"), "1")
    process = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(folder), str(tasks), str(int(trust))],
        env={
            **offline,
            "PATH": "/usr/bin:/bin",
            "HOME": str(work),
            "HF_HOME": str(work / "hf"),
            "OMP_NUM_THREADS": "1",
            "CUDA_VISIBLE_DEVICES": "",
        },
        cwd=work,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert process.returncode == 0, process.stderr[-4000:]
    (line,) = [line for line in process.stdout.splitlines() if line.startswith("RESULT")]
    found: float = json.loads(line.removeprefix("RESULT"))["bits_per_byte,none"]
    return found


@pytest.mark.slow
@pytest.mark.parametrize("begins_with", ["<s>", None])
def test_both_find_the_same(tmp_path: Path, begins_with: str | None) -> None:
    pytest.importorskip("lm_eval", reason="lm_eval is not installed (pip install lm_eval)")
    from megatron.boost.evaluation.evaluate import Request, evaluate

    folder = tmp_path / "llama"
    tokenizer = save_small_tokenizer(folder, begins_with=begins_with)
    save_small_llama(folder, tokenizer)
    text = tmp_path / "text.txt"
    # datasets strips the ends of a document.
    text.write_text(TEXT.strip(), encoding="utf-8")

    ours = evaluate(
        Request(hf=folder, text=(text,), device="cpu", window=24), lambda read, total: None
    )
    theirs = bits_per_byte_of_lm_eval(folder, text, tmp_path)
    assert ours.bits_per_byte == pytest.approx(theirs, rel=1e-5)
