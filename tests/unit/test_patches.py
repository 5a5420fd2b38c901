"""Each patch against the upstream that it mends, run first without it.

A test that fails because upstream no longer does wrong says that its patch can go. What concerns
checkpoints of the distributed optimizer is in tests/distributed/test_patches_of_optimizer.py, what
concerns logged FLOP/s and memory in tests/training/test_accounting_of_runs.py.
"""

import logging
from typing import Any

import pytest
import torch

from megatron.boost.cuda_stand_ins import cuda_on_cpu
from megatron.boost.patches import (
    Patch,
    all_patches,
    check_megatron_core_release,
    installed_megatron_core,
)
from tests.support.distributed import run_ranks


def _patch(name: str) -> Patch:
    return next(patch for patch in all_patches() if patch.name == name)


def _on_a_fresh_rank(check: Any) -> None:
    """Runs `check` where no other test's import has met a patch."""
    run_ranks(check, 1, init_process_group=False)


def _check_allow_no_cuda() -> None:
    from megatron.training.initialize import initialize_megatron

    with cuda_on_cpu():
        with pytest.raises(AssertionError, match="Megatron requires CUDA"):
            initialize_megatron()
        with (
            _patch("allow_no_cuda").apply(),
            pytest.raises(AssertionError, match="args is not initialized"),
        ):
            initialize_megatron()


def test_allow_no_cuda() -> None:
    _on_a_fresh_rank(_check_allow_no_cuda)


def _check_eager_jit_fuser() -> None:
    from megatron.core import jit

    assert jit.jit_fuser is torch.compile
    compiled = []

    def backend(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        compiled.append(graph)
        return graph.forward

    fused = torch.compile(lambda x: x + 1, backend=backend)
    with _patch("eager_jit_fuser").apply():
        assert fused(torch.ones(2)).sum() == 4 and not compiled
        assert torch.compile(mode="default")(len) is torch.compile(len) is len
    assert fused(torch.ones(2)).sum() == 4 and compiled


def test_eager_jit_fuser() -> None:
    _on_a_fresh_rank(_check_eager_jit_fuser)


def _check_tensor_type() -> None:
    from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32

    weight = torch.nn.Parameter(torch.ones(4))
    weight.grad = torch.full((4,), 2.0)
    with cuda_on_cpu():
        with pytest.raises(AssertionError):
            clip_grad_by_total_norm_fp32([weight], max_norm=1.0, total_norm=4.0)
        with _patch("tensor_type").apply():
            clip_grad_by_total_norm_fp32([weight], max_norm=1.0, total_norm=4.0)
            assert torch.ones(1, dtype=torch.bfloat16).type() == "torch.cuda.BFloat16Tensor"
            assert torch.ones(1).type(torch.float64).dtype == torch.float64
    torch.testing.assert_close(weight.grad, torch.full((4,), 0.5))


def test_tensor_type() -> None:
    _on_a_fresh_rank(_check_tensor_type)


def _check_compile_helpers() -> None:
    from megatron.core.datasets import helpers_cpp, utils

    assert helpers_cpp
    # Without make on the machine it is the second.
    with pytest.raises((SystemExit, FileNotFoundError)):
        utils.compile_helpers()
    with _patch("compile_helpers").apply():
        utils.compile_helpers()


def test_compile_helpers() -> None:
    _on_a_fresh_rank(_check_compile_helpers)


def _check_sequence_parallel_norm() -> None:
    from megatron.core.transformer import TransformerConfig
    from megatron.core.transformer.torch_norm import WrappedTorchNorm

    def config(sequence_parallel: bool) -> Any:
        return TransformerConfig(
            num_layers=1,
            hidden_size=8,
            num_attention_heads=2,
            normalization="RMSNorm",
            tensor_model_parallel_size=2,
            sequence_parallel=sequence_parallel,
        )

    with pytest.raises(AssertionError, match="sequence parallel not supported"):
        WrappedTorchNorm(config(True), 8)
    stock = WrappedTorchNorm(config(False), 8)
    with _patch("sequence_parallel_norm").apply():
        assert type(WrappedTorchNorm(config(False), 8)) is type(stock)
        assert not hasattr(WrappedTorchNorm(config(False), 8).weight, "sequence_parallel")
        sharded = config(True)
        norm = WrappedTorchNorm(sharded, 8, eps=1e-3)
    assert type(norm) is type(stock) and norm.eps == 1e-3
    assert norm.weight.sequence_parallel and sharded.sequence_parallel


def test_sequence_parallel_norm() -> None:
    _on_a_fresh_rank(_check_sequence_parallel_norm)


def _check_zero_centered_norm() -> None:
    from megatron.core.transformer import TransformerConfig
    from megatron.core.transformer.torch_norm import WrappedTorchNorm

    def config(normalization: str, **more: Any) -> Any:
        return TransformerConfig(
            num_layers=1,
            hidden_size=8,
            num_attention_heads=2,
            normalization=normalization,
            layernorm_zero_centered_gamma=True,
            tensor_model_parallel_size=2,
            **more,
        )

    x = torch.randn(3, 2, 8, generator=torch.Generator().manual_seed(1))
    for kind, stock in (("LayerNorm", torch.nn.LayerNorm), ("RMSNorm", torch.nn.RMSNorm)):
        with pytest.raises(AssertionError, match="zero_centered_gamma not supported"):
            WrappedTorchNorm(config(kind), 8)
        with _patch("sequence_parallel_norm").apply(), _patch("zero_centered_norm").apply():
            norm = WrappedTorchNorm(config(kind), 8, eps=1e-3)
            sharded = WrappedTorchNorm(config(kind, sequence_parallel=True), 8)
        assert sharded.weight.sequence_parallel and not hasattr(norm.weight, "sequence_parallel")
        assert not norm.weight.any()
        plain = stock(8, eps=1e-3)
        torch.testing.assert_close(norm(x), plain(x), rtol=1e-6, atol=1e-6)
        with torch.no_grad():
            # Less than bf16 can add to one.
            norm.weight.fill_(2**-9)
            plain.weight.fill_(1 + 2**-9)
        torch.testing.assert_close(norm(x), plain(x), rtol=1e-6, atol=1e-6)
        low = norm.to(torch.bfloat16)(x.to(torch.bfloat16))
        high = plain(x.to(torch.bfloat16).float()).to(torch.bfloat16)
        assert low.dtype == torch.bfloat16 and torch.equal(low, high)


def test_zero_centered_norm() -> None:
    _on_a_fresh_rank(_check_zero_centered_norm)


def _check_rng_tracker_is_content() -> None:
    """Upstream warns where the CPU's generator stands in for CUDA's: ours does not."""
    from megatron.core.tensor_parallel.random import (
        get_cuda_rng_tracker,
        model_parallel_cuda_manual_seed,
    )

    records: list[logging.LogRecord] = []
    handler = logging.Handler()
    handler.emit = records.append  # type: ignore[method-assign]
    logging.getLogger().addHandler(handler)
    drawn = []
    with cuda_on_cpu():
        for tp_rank in (0, 1):
            model_parallel_cuda_manual_seed(1, tp_rank=tp_rank, ep_rank=0, etp_rank=0)
            with get_cuda_rng_tracker().fork():
                inside = torch.nn.init.normal_(torch.empty(8, device="cuda"))
            drawn.append((inside, torch.empty(8, device="cuda").normal_()))
    assert not torch.equal(drawn[0][0], drawn[1][0])
    assert torch.equal(drawn[0][1], drawn[1][1])
    assert not [record for record in records if "CPU RNG state changed" in record.getMessage()]


def test_ranks_differ_within_the_rng_tracker_and_agree_outside() -> None:
    _on_a_fresh_rank(_check_rng_tracker_is_content)


def test_other_releases_are_refused() -> None:
    check_megatron_core_release(installed_megatron_core())
    check_megatron_core_release((0, 19, 7))
    for unknown in ((0, 18, 2), (0, 20, 0), (1, 19, 0)):
        with pytest.raises(ValueError, match=r"megatron-core \d.\d+.\d: .*nearest .*: 0\.19"):
            check_megatron_core_release(unknown)


def test_the_version_is_that_of_the_megatron_an_import_finds(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    core = tmp_path / "megatron" / "core"
    core.mkdir(parents=True)
    (core / "__init__.py").write_text("raise AssertionError('imported')")
    (core / "package_info.py").write_text("MAJOR, MINOR, PATCH = 0, 21, 3")
    import megatron

    monkeypatch.setattr(megatron, "__path__", [str(core.parent), *megatron.__path__])
    assert installed_megatron_core() == (0, 21, 3)
