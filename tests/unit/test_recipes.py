"""The recipes' scripts and table, without building a model."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from boost_layers.config import LowRankConfig
from megatron.boost.accounting.parameters import model_parameters
from megatron.boost.accounting.sizes import Model
from megatron.boost.recipes.commands import (
    ARCHITECTURES,
    Command,
    Recipe,
    all_recipes,
    command_of,
    parsed_command,
    table_rows,
)
from tests.support.programs import ROOT

PUBLISHED_MILLIONS = {
    # CoLA's table: dense, CoLA; its 1B has an FFN width of 5461.
    "60M": (58.1, 42.8),
    "130M": (134.1, 94.0),
    "350M": (368.0, 185.2),
    "1B": (1339.1, 609.3),
    "7B": (6738.4, 2820.9),
}

PATH = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
LAYOUT_FLAGS = {
    "--tensor-model-parallel-size",
    "--pipeline-model-parallel-size",
    "--num-virtual-stages-per-pipeline-rank",
    "--micro-batch-size",
    "--sequence-parallel",
}


def copied(folder: Path) -> Path:
    """The folder, with the scripts and their table in it."""
    for name in ("examples/train.sh", "megatron/boost/recipes/recipes.txt"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text((ROOT / name).read_text(encoding="utf-8"))
    return folder


def script(
    *words: str, name: str = "train.sh", folder: Path = ROOT, **environment: str
) -> subprocess.CompletedProcess[str]:
    """One of the scripts, dry; a variable given as "" is unset."""
    return subprocess.run(
        ["bash", f"examples/{name}", *words],
        cwd=folder,
        env={"PATH": PATH, "DRY_RUN": "command", **environment},
        capture_output=True,
        text=True,
    )


def values(command: Command) -> dict[str, str]:
    """The command's flags and their values, "" for those without one."""
    found: dict[str, str] = {}
    for word in command.flags:
        if word.startswith("--"):
            found[flag := word] = ""
        else:
            found[flag] = word
    return found


def flags_of(training: str, size: str, strategy: str, arch: str | None = None) -> dict[str, str]:
    return values(command_of(Recipe(training, size, strategy, arch)))


def model_of(size: str, low_rank: LowRankConfig) -> Model:
    numbers = next(row[1:6] for row in table_rows("model") if row[0] == size)
    hidden, ffn, heads, layers, _ = (int(number) for number in numbers)
    return Model(
        hidden_size=hidden,
        ffn_hidden_size=ffn if (size, ffn) != ("1B", 5472) else 5461,
        num_attention_heads=heads,
        num_query_groups=heads,
        kv_channels=hidden // heads,
        num_layers=layers,
        vocab_size=32000,
        padded_vocab_size=32000,
        tied=False,
        low_rank=low_rank,
    )


def test_every_size_has_every_strategy_and_architecture() -> None:
    found = Counter((r.training, r.size) for r in all_recipes())
    llama = dict.fromkeys([("llama2", s) for s in ("1B", "3B", "7B", "13B", "30B", "40B")], 10)
    cola = dict.fromkeys([("cola", size) for size in PUBLISHED_MILLIONS], 2)
    assert found == llama | cola
    assert len(set(all_recipes())) == sum(found.values())


@pytest.mark.parametrize("size", PUBLISHED_MILLIONS)
def test_colas_sizes_have_the_parameters_of_its_paper(size: str) -> None:
    rank = next(int(row[5]) for row in table_rows("model") if row[0] == size)
    dense = model_parameters(model_of(size, LowRankConfig(arch="dense")))
    cola = model_parameters(model_of(size, LowRankConfig(arch="cola", rank=rank)))
    assert (round(dense / 1e6, 1), round(cola / 1e6, 1)) == PUBLISHED_MILLIONS[size]


def test_boosts_sizes_keep_a_quarter_of_hidden_as_rank() -> None:
    for size, hidden, _, _, _, rank, _ in table_rows("model"):
        if size.endswith("B"):
            assert int(hidden) == 4 * int(rank), size


def test_colas_training_is_that_of_its_paper() -> None:
    found = flags_of("cola", "130M", "no-tp", "cola")
    assert (
        found.items()
        >= {
            "--seq-length": "256",
            "--global-batch-size": "512",
            "--train-iters": "20000",
            "--lr": "3e-3",
            "--min-lr": "3e-4",
            "--lr-warmup-iters": "2000",
            "--adam-beta1": "0.9",
            "--adam-beta2": "0.999",
            "--weight-decay": "0.01",
            "--clip-grad": "0.5",
            "--norm-epsilon": "1e-6",
            "--low-rank-mlp": "swiglu",
            "--low-rank-rank": "256",
        }.items()
    )
    assert flags_of("cola", "350M", "no-tp", "cola")["--low-rank-mlp"] == "product"


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_the_strategies_of_a_size_train_alike(arch: str) -> None:
    """They may differ in how they are laid out, and in nothing else."""
    full = flags_of("llama2", "7B", "full-rank")
    vanilla, btp, alone = (flags_of("llama2", "7B", s, arch) for s in ("vanilla", "btp", "no-tp"))

    def others(found: dict[str, str]) -> dict[str, str]:
        return {k: v for k, v in found.items() if k not in LAYOUT_FLAGS and "low-rank" not in k}

    assert others(full) == others(vanilla) == others(btp) == others(alone)
    assert "--low-rank-vanilla-attention" not in vanilla
    low_rank = [k for k in btp if "low-rank" in k]
    assert [k for k in full if "low-rank" in k] == ["--low-rank-arch"]
    assert full["--low-rank-arch"] == "dense"
    for other, tp in ((vanilla, "vanilla"), (alone, "btp")):
        assert {k: v for k, v in other.items() if "low-rank" in k} == {
            **{k: btp[k] for k in low_rank},
            "--low-rank-tp": tp,
        }
    assert alone["--tensor-model-parallel-size"] == "1"


def test_a_tenth_of_the_learning_rate_is_the_least() -> None:
    for training, size, *_ in table_rows("course"):
        found = flags_of(training, size, "full-rank")
        assert float(found["--min-lr"]) == pytest.approx(float(found["--lr"]) / 10, rel=1e-12)


def test_flags_of_the_user_come_last_and_data_checkpoints_and_logs_are_asked_for() -> None:
    printed = script(
        *("30B", "btp", "lax", "--train-iters", "5", "--save", "an odd 'name'"),
        DATA_PATH="0.3 a 0.7 b",
        TOKENIZER_MODEL="folder",
        CHECKPOINT_PATH="kept",
        TENSORBOARD_PATH="logs",
    )
    assert printed.returncode == 0, printed.stderr
    command = parsed_command(printed.stdout)
    assert command.flags[-4:] == ("--train-iters", "5", "--save", "an odd 'name'")
    assert command.world_size == 16
    text = " ".join(command.flags)
    assert "--mock-data" not in text
    assert "--data-path 0.3 a 0.7 b --tokenizer-type HuggingFaceTokenizer" in text
    assert "--save kept --load kept --save-interval 1000 --tensorboard-dir logs" in text


def test_every_kind_of_layout_becomes_flags(tmp_path: Path) -> None:
    table = copied(tmp_path) / "megatron" / "boost" / "recipes" / "recipes.txt"
    rows = [line for line in table.read_text().splitlines() if not line.startswith("layout")]
    rows += [
        "layout llama2 7B full-rank 24 4 3 2 5 yes full",
        "layout llama2 7B btp 4 2 2 1 3 yes latents",
    ]
    table.write_text("\n".join(rows))

    def printed(*words: str) -> dict[str, str]:
        done = script(*words, folder=tmp_path)
        assert done.returncode == 0, done.stderr
        return values(parsed_command(done.stdout)) | {"ranks": str(world_size(done.stdout))}

    full = printed("7B", "full-rank")
    assert (
        full.items()
        >= {
            "ranks": "24",
            "--tensor-model-parallel-size": "4",
            "--pipeline-model-parallel-size": "3",
            "--num-virtual-stages-per-pipeline-rank": "2",
            "--micro-batch-size": "5",
            "--sequence-parallel": "",
            "--recompute-granularity": "full",
            "--recompute-method": "uniform",
            "--recompute-num-layers": "1",
        }.items()
    )
    btp = printed("7B", "btp", "cola")
    assert btp.items() >= {"ranks": "8", "--low-rank-recompute": ""}.items()
    assert not btp.keys() & {"--recompute-granularity", "--num-virtual-stages-per-pipeline-rank"}
    assert script("7B", "vanilla", "cola", folder=tmp_path).returncode == 2


def world_size(printed: str) -> int:
    return parsed_command(printed).world_size


def test_what_is_printed_is_a_command_for_a_shell() -> None:
    """With `torchrun` a function that shows its arguments, it gives them back."""
    printed = script("7B", "btp", "cola", "--save", "a b$c", GPUS_PER_NODE="4").stdout
    # A path, which the script prints where the project has its environment, is never a function's.
    printed = re.sub(r"^\S*/torchrun ", "torchrun ", printed, flags=re.MULTILINE)
    shown = subprocess.run(
        ["bash", "-c", f'torchrun() {{ printf "%s\\n" "$@"; }}\n{printed}\nenv'],
        capture_output=True,
        text=True,
    ).stdout.splitlines()
    flags = list(parsed_command(printed).flags)
    place = shown.index(str(ROOT / "pretrain_gpt.py"))
    assert shown[place + 1 : place + 1 + len(flags)] == flags and flags[-1] == "a b$c"
    assert "CUDA_DEVICE_MAX_CONNECTIONS=1" in shown


@pytest.mark.parametrize(
    "words, environment, said",
    [
        (["8B", "btp", "cola"], {}, "course llama2 8B: .* 1B 3B 7B 13B 30B 40B"),
        (["7B", "bpt", "cola"], {}, "STRATEGY 'bpt': .* full-rank, vanilla, btp, no-tp"),
        (["7B", "btp"], {}, "ARCH '': .* cola, svd, lax"),
        (["60M", "btp", "cola"], {}, "course llama2 60M: "),
        (["7B", "btp", "cola"], {"TRAINING": "cloa"}, "training cloa: .* llama2 cola"),
        (["60M", "btp", "cola"], {"TRAINING": "cola"}, "layout cola 60M btp: .* full-rank no-tp"),
        (["7B", "btp", "cola"], {"DATA_PATH": "x"}, "DATA_PATH=x: needs TOKENIZER_MODEL"),
        (["7B", "btp", "cola"], {"TOKENIZER_MODEL": "x"}, "TOKENIZER_MODEL=x: needs DATA_PATH"),
        (["7B", "btp", "cola"], {"DEVICE": "gpu"}, "DEVICE=gpu: legal values: auto, cuda, cpu"),
        (["7B", "btp", "cola"], {"MASTER_PORT": "70000"}, "MASTER_PORT=70000: is above 65535"),
        (["7B", "btp", "cola"], {"MASTER_PORT": "http"}, "MASTER_PORT=http: is no whole"),
        (["30B", "btp", "cola"], {"DRY_RUN": ""}, "NNODES=2: .* NODE_RANK.* MASTER_ADDR"),
        (["7B", "btp", "cola"], {"GPUS_PER_NODE": "0"}, "GPUS_PER_NODE=0: is no whole"),
        (["7B", "btp", "cola"], {"NNODES": "abc"}, "NNODES=abc: is no whole"),
        ([], {}, "STRATEGY ''"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(
    words: list[str], environment: dict[str, str], said: str
) -> None:
    done = script(*words, **environment)
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert re.match(f"error: {said}", line), line


def test_slurms_script_prints_what_the_other_one_does() -> None:
    job = {
        "SLURM_JOB_ID": "70001",
        "SLURM_JOB_NODELIST": "node[3-5]",
        "SLURM_JOB_NUM_NODES": "3",
        "SLURM_GPUS_ON_NODE": "4",
        "SLURM_SUBMIT_DIR": str(ROOT),
    }
    alone = script("13B", "btp", "cola", name="train.sbatch")
    assert alone.stdout == script("13B", "btp", "cola").stdout
    scontrol = {"PATH": f"{ROOT / 'tests' / 'support' / 'slurm'}:{PATH}"}
    in_job = script("13B", "btp", "cola", name="train.sbatch", **job, **scontrol)
    assert in_job.returncode == 0, in_job.stderr
    assert parsed_command(in_job.stdout).world_size == 12
    assert "--master-addr 127.0.0.1" in in_job.stdout
    assert "--master-port 30001" in in_job.stdout
    outside = script("13B", "btp", "cola", name="train.sbatch", DRY_RUN="")
    assert outside.returncode == 2
    assert outside.stderr.startswith("error: no SLURM job: nearest legal value: sbatch ")


def test_a_word_that_is_no_flag_is_refused_after_the_recipes_name() -> None:
    done = script("40B", "full-rank", "cola")
    assert done.returncode == 2
    assert done.stderr == "error: 'cola' after the recipe's name: is no flag; leave it out\n"


def test_tensorboard_and_wandb_are_told_where_to_write() -> None:
    done = script("7B", "btp", "svd", TENSORBOARD_PATH="board", WANDB_PROJECT="low-rank")
    words = done.stdout.split()
    for flag, value in (
        ("--tensorboard-dir", "board"),
        ("--wandb-project", "low-rank"),
        ("--wandb-exp-name", "7B-btp-svd"),
        ("--wandb-save-dir", "wandb"),
    ):
        assert words[words.index(flag) + 1] == value


def test_a_dry_run_calls_the_planner_where_it_is_there(tmp_path: Path) -> None:
    """A stand-in for the planner shows how it is asked."""
    asked = {"folder": copied(tmp_path), "DRY_RUN": "1", "GPU": "h200"}
    without = script("30B", "btp", "svd", **asked)
    assert without.returncode == 0 and "#" not in without.stdout
    (tmp_path / "tools").mkdir()
    (tmp_path / "tools" / "plan.py").write_text("import sys\nprint(*sys.argv[1:])\n")
    found = script("30B", "btp", "svd", **asked)
    assert found.returncode == 0, found.stderr
    assert found.stdout.removeprefix(without.stdout) == (
        "# --model 30B --gpus 16 --gpu h200 --gpus-per-node 8 --arch svd --rank 2048 "
        "--seq-length 4096 --global-batch-size 1024 --strategies btp\n"
        "# The recipe's own layout is TP 2, PP 2, micro-batch 2; flags after its name are not in "
        "this plan\n"
    )
    full = script("1B", "full-rank", TRAINING="cola", **asked)
    assert "--arch cola --rank 512 --seq-length 256 --global-batch-size 512 " in full.stdout


@pytest.mark.slow
def test_the_planner_takes_what_a_dry_run_asks() -> None:
    done = script("7B", "full-rank", DRY_RUN="1")
    assert done.returncode == 0, done.stderr
    plan = done.stdout.partition("# ")[2]
    assert "full-rank │" in plan and "To launch" not in plan
    assert all(line.startswith("#") for line in plan.splitlines()[1:])
