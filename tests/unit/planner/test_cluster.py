"""The clusters' files: complete, and refused by the name of what is wrong."""

import re

import pytest

from megatron.boost.planner.cluster import _PRESETS, load_cluster, presets

A100 = (_PRESETS / "a100-80.toml").read_text()


def _written(tmp_path, text):
    path = tmp_path / "mine.toml"
    path.write_text(text)
    return str(path)


def test_cpu_is_the_preset_of_this_machine_s_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, preset in (
        ("AMD EPYC", "cpu-epyc"),
        ("Intel(R) Xeon(R) Processor", "cpu-xeon"),
        ("aarch64", "cpu-xeon"),
    ):
        monkeypatch.setattr("megatron.boost.planner.cluster.processor", lambda name=name: name)
        assert load_cluster("cpu") == load_cluster(preset)


def test_every_preset_loads_and_says_what_it_is():
    assert {"a100-80", "h100", "h200"} <= set(presets())
    for name in presets():
        cluster = load_cluster(name)
        assert cluster.name and cluster.compute and cluster.gpus_per_node >= 1


def test_a_copy_with_other_numbers_is_another_cluster(tmp_path):
    copy = _written(tmp_path, A100.replace("capacity_gib = 80", "capacity_gib = 40"))
    assert load_cluster(copy).memory.capacity_gib == 40


def test_unknown_hardware_is_refused_with_every_field_that_it_needs():
    with pytest.raises(ValueError, match=r"--gpu b200: neither a file .* nearest") as refusal:
        load_cluster("b200")
    fields = re.findall(r"^([a-z_]+) = ", A100, flags=re.MULTILINE)
    assert len(fields) > 15
    assert all(name in str(refusal.value) for name in fields)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("gpus_per_node = 4\n", "", r"lacks gpus_per_node \(GPUs that the fast link joins\)"),
        (
            "peak_tflops = 312",
            "peak_tflop = 312",
            "compute.bf16.peak_tflop is no field.*peak_tflops",
        ),
        ("capacity_gib = 80", "capacity_gib = -80", "memory.capacity_gib = -80: must be above 0"),
        ("capacity_gib = 80", "capacity_gib = 1", "--gpu .*: memory.reserved_gib = .* less than"),
        ("peak_tflops = 312", "peak_tflops = 0", "compute.bf16.peak_tflops = 0: must be above 0"),
        ("gemm_efficiency = 0.949", "gemm_efficiency = 94.9", "= 94.9: must be .* at most 1"),
        ("collective_overlap = 0.9", "collective_overlap = 9", "at least 0 and at most 1"),
        ("[compute.bf16]", "[compute.bf61]", r"\[compute.bf61\] is no dtype; .* \[compute.bf16\]"),
        ("capacity_gib = 80", 'capacity_gib = "80"', "memory.capacity_gib = '80' is not a number"),
        ("gpus_per_node = 4", "gpus_per_node = 4.5", "gpus_per_node = 4.5 is not a whole number"),
        ("capacity_gib = 80", "capacity_gib = nan", "is not a number"),
        ("{ 2 = 22 }", "{}", "network.bus_gb_per_s is an empty table"),
        ("{ 2 = 22 }", "{ two = 22 }", "network.bus_gb_per_s.two"),
        ("[memory]", "[memory", "is no TOML file"),
    ],
)
def test_a_file_that_is_wrong_is_refused_by_its_field(tmp_path, old, new, message):
    assert old in A100
    with pytest.raises(ValueError, match=message):
        load_cluster(_written(tmp_path, A100.replace(old, new)))


def test_a_dtype_that_the_file_does_not_have_is_refused():
    with pytest.raises(ValueError, match="--dtype fp32: .* nearest legal value: bf16"):
        load_cluster("a100-80").products("fp32")
