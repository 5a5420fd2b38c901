"""`tools/plan.py --calibrate`: this machine as a cluster's file."""

from __future__ import annotations

from pathlib import Path

import torch

from megatron.boost.planner.calibration import calibrate
from megatron.boost.planner.cluster import load_cluster
from megatron.boost.planner.cluster_file import write_cluster
from megatron.boost.planner.reports.report import Report


def calibration_report(
    path: Path, base: str | None, ranks: int | None, dtype: str | None
) -> Report:
    """Measure, and write the file.

    Args:
        path: the file to write.
        base: the cluster that says what one machine cannot show, such as the network.
        ranks: GPUs, or CPU ranks; None: all.
        dtype: of the products; None: bf16 on CUDA, fp32 on a CPU.

    Raises:
        ValueError: for more ranks than the machine has, and an unknown base.
    """
    on_gpu = torch.cuda.is_available()
    found = calibrate(
        device="cuda" if on_gpu else "cpu",
        ranks=ranks,
        dtypes=(dtype or ("bf16" if on_gpu else "fp32"),),
        base=None if base is None else load_cluster(base),
    )
    write_cluster(found.cluster, path, found.notes)
    report = Report()
    cluster, (name, compute) = found.cluster, next(iter(found.cluster.compute.items()))
    reached = compute.peak_tflops * compute.gemm_efficiency
    report.table(
        f"{cluster.name}",
        ["", "measured"],
        [
            [
                f"products in {name}, TFLOP/s",
                f"{reached:.3f}",
            ],
            ["attention forward, of the peak", f"{compute.attention_forward_efficiency:.2f}"],
            ["attention backward, of the peak", f"{compute.attention_backward_efficiency:.2f}"],
            ["small kernels, GB/s", f"{cluster.elementwise_bytes_per_s / 1e9:.1f}"],
            ["a collective's latency, us", f"{cluster.node.latency_us:.0f}"],
            *[
                [f"ring of {ranks} ranks, GB/s", f"{rate:.2f}"]
                for ranks, rate in cluster.node.bus_gb_per_s.items()
            ],
            ["host, us an operation", f"{cluster.host_us_per_operation:.1f}"],
        ],
    )
    report.say(f"Written: {path}. Plan with it: tools/plan.py --gpu {path}")
    report.flat = {
        "file": str(path),
        "gemm_tflops": reached,
        "elementwise_gb_per_s": cluster.elementwise_bytes_per_s / 1e9,
        "host_us_per_operation": cluster.host_us_per_operation,
    }
    return report
