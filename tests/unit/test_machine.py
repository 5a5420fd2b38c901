"""What a measurement is labelled with."""

import os
import platform
import subprocess

import torch

from megatron.boost.machine import describe_machine


def git(folder, *arguments):
    identity = ["-c", "user.name=T", "-c", "user.email=t@example.org"]
    command = ["git", *identity, *arguments]
    return subprocess.run(
        command, cwd=folder, check=True, capture_output=True, text=True
    ).stdout.strip()


def test_commit_is_named_and_marked_when_files_differ_from_it(tmp_path):
    assert describe_machine(tmp_path)["commit"] == "unknown"
    git(tmp_path, "init", "--quiet")
    assert describe_machine(tmp_path)["commit"] == "unknown"
    (tmp_path / "file").write_text("one")
    git(tmp_path, "add", "file")
    git(tmp_path, "commit", "--quiet", "--message", "first")
    git(tmp_path, "tag", "v1")

    commit = describe_machine(tmp_path)["commit"]
    assert len(commit) >= 7
    assert git(tmp_path, "rev-parse", "HEAD").startswith(commit)
    (tmp_path / "file").write_text("two")
    assert describe_machine(tmp_path)["commit"] == f"{commit}-dirty"


def test_hardware_and_versions_are_those_of_this_process(tmp_path):
    description = describe_machine(tmp_path)

    assert description["python"] == platform.python_version()
    assert torch.__version__.startswith(description["torch"])
    assert int(description["cores"]) == len(os.sched_getaffinity(0))
    assert description["processor"]
    assert description["memory"].endswith(" GiB")
    assert float(description["memory"].split()[0]) > 0.5
