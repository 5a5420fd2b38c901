"""lm-eval's `hf` back-end on a folder, and `tools/evaluate.py` on the same text."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from boost_layers.config import LowRankConfig
from megatron.boost.conversion.exporting import plan_export, write_export
from megatron.boost.evaluation.evaluate import Request, evaluate
from tests.evaluation.test_hugging_face import TEXT, save_small_llama
from tests.support.checkpoints import description, save_checkpoint
from tests.support.small_tokenizer import VOCABULARY_SIZE, save_small_tokenizer

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

manager = TaskManager(include_path=sys.argv[1], include_defaults=False)
for folder in sys.argv[2:]:
    result = lm_eval.simple_evaluate(
        model="hf",
        model_args={
            "pretrained": folder,
            "dtype": "float32",
            "max_length": 24,
            # Else a tokenizer that puts BOS before a text has two, one of them lm-eval's prefix.
            "add_bos_token": False,
            "trust_remote_code": True,
        },
        tasks=["local_text"],
        task_manager=manager,
        device="cpu",
        batch_size=2,
        bootstrap_iters=0,
    )
    print("RESULT", result["results"]["local_text"]["bits_per_byte,none"])
"""


def bits_per_byte_of_lm_eval(folders: list[Path], text: Path, work: Path) -> list[float]:
    """What lm-eval finds, in a process of its own, which has no network."""
    tasks = work / "tasks"
    tasks.mkdir()
    (tasks / "local_text.yaml").write_text(TASK.format(file=text))
    offline = dict.fromkeys(("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE", "HF_EVALUATE_OFFLINE"), "1")
    process = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(tasks), *map(str, folders)],
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
    lines = process.stdout.splitlines()
    return [float(line.split()[1]) for line in lines if line.startswith("RESULT")]


@pytest.mark.slow
def test_both_find_the_same(tmp_path: Path) -> None:
    """Of dense folders whose tokenizers put BOS before a text and do not, and of a low-rank export,
    which brings its own modelling code."""
    pytest.importorskip("lm_eval", reason="lm_eval is not installed (pip install lm_eval)")
    folders = [tmp_path / name for name in ("begun", "plain", "low-rank")]
    save_small_llama(folders[0], save_small_tokenizer(folders[0], begins_with="<s>"))
    save_small_llama(folders[1], save_small_tokenizer(folders[1]))
    small = description(LowRankConfig(arch="cola", rank=8), vocab_size=VOCABULARY_SIZE)
    save_checkpoint(tmp_path / "checkpoint", small)
    save_small_tokenizer(tmp_path / "tokenizer")
    export = plan_export(tmp_path / "checkpoint", tokenizer=tmp_path / "tokenizer")
    write_export(export, folders[2], max_shard_size=1 << 30)

    text = tmp_path / "text.txt"
    # datasets strips the ends of a document.
    text.write_text(TEXT.strip(), encoding="utf-8")
    ours = [
        evaluate(
            Request(hf=folder, text=(text,), device="cpu", window=24, trust_remote_code=True),
            lambda read, total: None,
        ).bits_per_byte
        for folder in folders
    ]
    theirs = bits_per_byte_of_lm_eval(folders, text, tmp_path)
    assert len(theirs) == 3
    assert ours == pytest.approx(theirs, rel=1e-5)
