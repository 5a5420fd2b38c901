"""What upstream lets pass in silence, or notices too late: each guard against it is taken away
here, to show the fault that it keeps out.

A guard is taken away on the ranks, by a context that `train` enters before the run.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from torch import distributed

from tests.support.distributed import RankFailure, run_ranks
from tests.support.runs import (
    DATA,
    MODEL,
    TRAINING,
    losses,
    relative_difference,
    train,
    weight_differences,
    whole_weights,
)

COLA = "--low-rank-arch cola"
TP2 = "--tensor-model-parallel-size 2"
PP2 = "--pipeline-model-parallel-size 2"
SHORT = "--train-iters 2 --adam-eps 1e-5"


@cache
def one_rank() -> list[dict[str, Any]]:
    return train(f"{COLA} {SHORT}")


def norms(results: list[dict[str, Any]]) -> list[float]:
    known: list[float] = results[0]["exact_grad_norm"]
    return known


def has_full_rank_layers(flags: str, before: Any) -> bool:
    """Whether a run on one rank trained Megatron's own layers."""
    (result,) = train(flags, before=before)
    return any("linear_qkv" in name for name in result["weights"])


# A layer spec that does not import.

BROKEN_SPEC = "--spec tests.support.broken_spec gpt_spec --train-iters 1"


def without_spec_check() -> AbstractContextManager[Any]:
    return mock.patch("megatron.boost.arguments._check_spec")


def test_a_spec_that_fails_to_import_stops_the_run() -> None:
    with pytest.raises(RankFailure, match="ValueError: --spec .* cannot be imported: .*no_such"):
        train(BROKEN_SPEC)


@pytest.mark.slow
def test_upstream_trains_its_full_rank_model_instead() -> None:
    assert has_full_rank_layers(BROKEN_SPEC, without_spec_check)


# A model that is not made of our layers.


@contextmanager
def foreign_layers() -> Iterator[None]:
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec

    def stock(_: Any, config: Any, vp_stage: int | None = None) -> Any:
        return get_gpt_decoder_block_spec(
            config.transformer, use_transformer_engine=False, vp_stage=vp_stage
        )

    with mock.patch("megatron.boost.builder._block_spec", stock):
        yield


@contextmanager
def foreign_layers_without_check() -> Iterator[None]:
    with foreign_layers(), mock.patch("megatron.boost.builder.LowRankLayer", object):
        yield


def test_a_model_of_other_layers_stops_the_run() -> None:
    with pytest.raises(RankFailure, match="Megatron built a TransformerLayer"):
        train(f"{COLA} --train-iters 1", before=foreign_layers)


@pytest.mark.slow
def test_other_layers_would_train_unnoticed() -> None:
    assert has_full_rank_layers(f"{COLA} --train-iters 1", foreign_layers_without_check)


# Checkpoints of sharded weights.


def without_sharded_state_dict() -> AbstractContextManager[Any]:
    from megatron.core.transformer.module import MegatronModule

    from boost_layers.parameters import ShardedWeights

    return mock.patch.object(
        ShardedWeights, "sharded_state_dict", MegatronModule.sharded_state_dict
    )


def lost_by_a_checkpoint(folder: Path, before: Any) -> set[str]:
    """The weights that are others after saving and loading."""
    flags = f"{COLA} {TP2} --train-iters 2 --ckpt-format torch_dist --no-save-optim --no-load-optim"
    saved = train(f"{flags} --save {folder} --save-interval 2", 2, before)
    # At its last iteration already: the run loads and ends.
    loaded = train(f"{flags} --load {folder}", 2, before)
    return {
        name
        for rank_saved, rank_loaded in zip(saved, loaded, strict=True)
        for name, shard in rank_saved["weights"].items()
        if not shard.tensor.equal(rank_loaded["weights"][name].tensor)
    }


@pytest.mark.slow
def test_weights_survive_a_checkpoint_by_their_own_sharding(tmp_path: Path) -> None:
    assert lost_by_a_checkpoint(tmp_path / "ours", nullcontext) == set()
    lost = lost_by_a_checkpoint(tmp_path / "default", without_sharded_state_dict)
    assert {"decoder.layers.0.self_attention.q_proj.A", "decoder.layers.1.mlp.up_proj.B"} <= lost


@contextmanager
def without_reshardable_default() -> Iterator[None]:
    from megatron.boost import training

    prepare = training.prepare

    def forgetful(argv: Any) -> Any:
        argv, said = prepare(argv)
        return [a for a in argv if a != "--dist-ckpt-optim-fully-reshardable"], said

    with mock.patch.object(training, "prepare", forgetful):
        yield


@pytest.mark.slow
def test_without_our_default_a_distributed_optimizer_loads_on_its_own_layout_only(
    tmp_path: Path,
) -> None:
    flags = f"{COLA} --train-iters 2 --ckpt-format torch_dist --use-distributed-optimizer"
    train(f"{flags} {TP2} --save {tmp_path} --save-interval 2", 2, without_reshardable_default)
    # Said before anything is built. (Upstream fails later and names --ckpt-fully-parallel-save,
    # which does not help; that our default does is in test_resume.py.)
    with pytest.raises(RankFailure, match="saved without --dist-ckpt-optim-fully-reshardable"):
        train(f"{flags} --load {tmp_path}", 2, without_reshardable_default)


# Attributes by which Megatron sums gradients and norms.


@contextmanager
def final_norm_without_flag() -> Iterator[None]:
    from boost_layers.norm import FinalNorm

    build = FinalNorm.__init__

    def forgetful(norm: Any, *args: Any, **kwargs: Any) -> None:
        build(norm, *args, **kwargs)
        del norm.weight.sequence_parallel

    with mock.patch.object(FinalNorm, "__init__", forgetful):
        yield


@contextmanager
def without_attributes(dimensions: tuple[int, ...]) -> Iterator[None]:
    from boost_layers import parameters

    upstream = parameters.set_tensor_model_parallel_attributes

    def forgetful(tensor: Any, *args: Any) -> None:
        if tensor.dim() not in dimensions:
            upstream(tensor, *args)

    with mock.patch.object(parameters, "set_tensor_model_parallel_attributes", forgetful):
        yield


def matrices_without_attributes() -> AbstractContextManager[None]:
    return without_attributes((2,))


def norms_without_attributes() -> AbstractContextManager[None]:
    return without_attributes((1,))


@contextmanager
def megatrons_own_vocabulary() -> Iterator[None]:
    with mock.patch("boost_layers.specs.initialize_vocabulary"):
        yield


@contextmanager
def padded_tokens_unmasked() -> Iterator[None]:
    with mock.patch("boost_layers.specs.mask_padded_vocabulary"):
        yield


@pytest.mark.slow
def test_two_ranks_train_like_one() -> None:
    results = train(f"{COLA} {TP2} {SHORT}", 2)
    assert relative_difference(losses(results), losses(one_rank())) <= 2e-6
    assert relative_difference(norms(results), norms(one_rank())) <= 2e-6
    differences = weight_differences(whole_weights(results), whole_weights(one_rank()))
    assert max(differences.values()) <= 1e-5


@pytest.mark.slow
def test_without_its_flag_the_final_norm_drifts_apart() -> None:
    results = train(f"{COLA} {TP2} {SHORT}", 2, final_norm_without_flag)
    with pytest.raises(AssertionError, match="ranks differ in decoder.final_layernorm.weight"):
        whole_weights(results)


@pytest.mark.slow
@pytest.mark.parametrize("guard", [matrices_without_attributes, norms_without_attributes])
def test_without_their_attributes_parameters_are_left_out_of_the_gradient_norm(guard: Any) -> None:
    results = train(f"{COLA} {TP2} {SHORT}", 2, guard)
    # Losses of the first iteration know nothing of it.
    assert relative_difference(losses(results)[:1], losses(one_rank())[:1]) <= 2e-6
    assert norms(results)[0] < norms(one_rank())[0] * (1 - 1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("guard", [megatrons_own_vocabulary, padded_tokens_unmasked])
def test_megatrons_vocabulary_makes_the_loss_depend_on_the_layout(guard: Any) -> None:
    apart = (
        train(f"{COLA} --train-iters 1", 1, guard),
        train(f"{COLA} {TP2} --train-iters 1", 2, guard),
    )
    assert relative_difference(*map(losses, apart)) > 1e-3


# What Megatron assumes of a layer's input and output.


@contextmanager
def views_handed_over() -> Iterator[None]:
    with mock.patch("boost_layers.layer.make_viewless_tensor", lambda x, **_: x):
        yield


@contextmanager
def every_chunk_converts() -> Iterator[None]:
    """The first layer of every pipeline stage changes the residual stream's layout, instead of the
    model's first."""
    from boost_layers.layer import LowRankLayer

    build = LowRankLayer.__init__

    def marking(layer: Any, *args: Any, layer_number: int = 1, **kwargs: Any) -> None:
        build(layer, *args, layer_number=layer_number, **kwargs)
        layer.enters_by_sequence = layer_number == 1

    with mock.patch.object(LowRankLayer, "__init__", marking):
        yield


@contextmanager
def no_context_returned() -> Iterator[None]:
    from boost_layers.layer import LowRankLayer

    forward = LowRankLayer.forward
    with mock.patch.object(LowRankLayer, "forward", lambda *a, **k: forward(*a, **k)[0]):
        yield


@pytest.mark.slow
def test_a_layer_of_another_calling_convention_is_taken_apart() -> None:
    with pytest.raises(RankFailure, match="too many values to unpack"):
        train(f"{COLA} --train-iters 1", before=no_context_returned)


def test_a_stage_that_hands_over_a_view_fails_in_the_schedule() -> None:
    with pytest.raises(RankFailure, match="counter-productive to free a view"):
        train(f"{COLA} {PP2} --train-iters 1", 2, views_handed_over)


@pytest.mark.slow
def test_a_second_conversion_of_the_residual_stream_changes_the_loss() -> None:
    flags = f"{COLA} --num-layers 4 --train-iters 1"
    stages = f"{flags} {TP2} {PP2} --num-layers-per-virtual-pipeline-stage 1"
    reference = losses(train(flags))
    assert relative_difference(losses(train(stages, 4)), reference) <= 2e-6
    assert relative_difference(losses(train(stages, 4, every_chunk_converts)), reference) > 1e-3


@contextmanager
def megatrons_pipeline_tensor() -> Iterator[None]:
    with mock.patch("megatron.boost.training.wide_pipeline_tensor", lambda columns: nullcontext()):
        yield


@pytest.mark.slow
def test_without_the_wider_tensor_latents_do_not_fit_between_stages() -> None:
    """If this trains, Megatron asks for the tensor's width, and `wide_pipeline_tensor` can go."""
    with pytest.raises(RankFailure):
        train(f"--low-rank-arch lax {PP2} --train-iters 1", 2, megatrons_pipeline_tensor)


# The end of a run.


def ended_by_main(flags: list[str], context: Any) -> tuple[str, bool]:
    """How the script ends, and whether it leaves a process group behind."""
    from megatron.boost import launch

    with context():
        try:
            end = str(launch.main([*MODEL, *DATA, *TRAINING, *flags]))
        except RuntimeError as failure:
            end = str(failure)
    return end, distributed.is_initialized()


def nothing_ended() -> AbstractContextManager[Any]:
    return mock.patch("megatron.boost.launch.process_group_ended", nullcontext)


@contextmanager
def failing_step() -> Iterator[None]:
    def fail(*_: Any) -> None:
        raise RuntimeError("a step failed")

    with mock.patch("megatron.boost.training.forward_step", fail):
        yield


@pytest.mark.parametrize(
    ("context", "end", "left_behind"),
    [
        (nullcontext, "0", False),
        pytest.param(failing_step, "a step failed", False, marks=pytest.mark.slow),
        pytest.param(nothing_ended, "0", True, marks=pytest.mark.slow),
    ],
    ids=["good-run", "failed-run", "guard-removed"],
)
def test_no_process_group_outlives_the_run(context: Any, end: str, left_behind: bool) -> None:
    flags = f"{COLA} --train-iters 1".split()
    (result,) = run_ranks(ended_by_main, 1, flags, context, init_process_group=False)
    assert result == (end, left_behind)
