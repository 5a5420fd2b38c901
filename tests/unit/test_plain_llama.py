"""The plain reference model against transformers' LLaMA and against formulas written out."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, modeling_rope_utils
from transformers.models.llama import modeling_llama

from tests.support.plain_llama import (
    MLP,
    Block,
    Llama3RopeScaling,
    LowRankProjection,
    PlainConfig,
    PlainLlama,
    adamw_steps,
    random_canonical,
    rope_tables,
)

# head_dim is not hidden / heads, and no two widths are equal, so that a mixed-up size cannot pass.
DENSE = PlainConfig(
    vocab_size=37,
    hidden=24,
    ffn=40,
    heads=4,
    kv_heads=2,
    head_dim=16,
    layers=2,
    arch="dense",
)
COLA = replace(DENSE, arch="cola", rank=9, mlp_rank=11, ranks={"v_proj": 7, "down_proj": 13})
# With head_dim 16 the wavelengths 6, 20, 63, 199, ... fall into all three bands of this scaling.
LLAMA3 = Llama3RopeScaling(factor=8.0, original_max_position=64)
VARIANTS = {
    "mha": replace(DENSE, kv_heads=4),
    "gqa": DENSE,
    "mqa": replace(DENSE, kv_heads=1),
    "llama3": replace(DENSE, rope_scaling=LLAMA3),
    "tied": replace(DENSE, tied=True),
    "eps-and-base": replace(DENSE, norm_eps=1e-2, rope_base=500.0),
}
HF_NAMES = (
    ("decoder.layers.", "model.layers."),
    (".self_attention.", ".self_attn."),
    (".pre_mlp_layernorm.", ".post_attention_layernorm."),
    ("embedding.word_embeddings.", "model.embed_tokens."),
    ("decoder.final_layernorm.", "model.norm."),
    ("output_layer.", "lm_head."),
)


class _TorchWithoutFp32:
    """`torch` with float64 in the place of float32."""

    float = float32 = torch.float64

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


@contextmanager
def transformers_in_fp64(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Run transformers' own code with its float32 islands (norm, RoPE angles) in float64."""
    with monkeypatch.context() as patch:
        for module in (modeling_llama, modeling_rope_utils):
            patch.setattr(module, "torch", _TorchWithoutFp32())
        yield


def hf_name(name: str) -> str:
    """Transformers' name of a canonical tensor."""
    for ours, theirs in HF_NAMES:
        name = name.replace(ours, theirs)
    return name


def hf_config(config: PlainConfig) -> LlamaConfig:
    """The same sizes for transformers."""
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": config.rope_base}
    if (scaling := config.rope_scaling) is not None:
        rope |= {
            "rope_type": "llama3",
            "factor": scaling.factor,
            "low_freq_factor": scaling.low_freq_factor,
            "high_freq_factor": scaling.high_freq_factor,
            "original_max_position_embeddings": scaling.original_max_position,
        }
    return LlamaConfig(
        vocab_size=config.vocab_size,
        hidden_size=config.hidden,
        intermediate_size=config.ffn,
        num_hidden_layers=config.layers,
        num_attention_heads=config.heads,
        num_key_value_heads=config.kv_heads,
        head_dim=config.head_dim,
        rms_norm_eps=config.norm_eps,
        rope_parameters=rope,
        tie_word_embeddings=config.tied,
    )


def hf_model(config: PlainConfig, dense: dict[str, Tensor], dtype: torch.dtype) -> LlamaForCausalLM:
    """Transformers' model holding the dense canonical tensors."""
    model = LlamaForCausalLM(hf_config(config)).type(dtype)
    result = model.load_state_dict({hf_name(n): t for n, t in dense.items()}, strict=False)
    assert not result.unexpected_keys
    assert result.missing_keys == (["lm_head.weight"] if config.tied else [])
    return model


def batch(config: PlainConfig, seed: int = 1, length: int = 21) -> tuple[Tensor, Tensor]:
    """Random tokens [3, s] and labels [3, s]."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(config.vocab_size, (3, length + 1), generator=generator)
    return ids[:, :-1], ids[:, 1:]


def relative_error(actual: Tensor, expected: Tensor) -> float:
    """Norm of the difference over the norm of the expected tensor."""
    return ((actual - expected).norm() / expected.norm()).item()


@pytest.mark.parametrize("variant", VARIANTS)
def test_dense_equals_transformers_in_fp64(variant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    config = VARIANTS[variant]
    weights = random_canonical(config, seed=0)
    tokens, labels = batch(config)
    model = PlainLlama(config).load_canonical(weights)
    logits, loss = model(tokens, labels)
    with transformers_in_fp64(monkeypatch):
        reference = hf_model(config, weights, torch.float64)
        expected = reference(tokens).logits
        expected_loss = -expected.log_softmax(-1).gather(-1, labels[..., None])[..., 0]
        expected_loss.mean().backward()
    assert loss is not None
    loss.mean().backward()

    assert logits.dtype == loss.dtype == torch.float64
    assert relative_error(logits, expected) < 1e-12
    assert relative_error(loss, expected_loss) < 1e-12
    for name, parameter in model.named_parameters():
        expected_grad = reference.get_parameter(hf_name(name)).grad
        assert parameter.grad is not None and expected_grad is not None
        assert relative_error(parameter.grad, expected_grad) < 1e-12, name


@pytest.mark.parametrize("variant", VARIANTS)
def test_dense_equals_transformers_in_fp32(variant: str) -> None:
    config = VARIANTS[variant]
    weights = random_canonical(config, seed=0, dtype=torch.float32)
    tokens, _ = batch(config)
    logits, loss = PlainLlama(config, torch.float32).load_canonical(weights)(tokens)
    assert loss is None
    assert logits.dtype == torch.float32
    assert relative_error(logits, hf_model(config, weights, torch.float32)(tokens).logits) < 1e-5


@pytest.mark.parametrize("scaling", [None, LLAMA3], ids=["default", "llama3"])
def test_fp32_rope_tables_equal_transformers(scaling: Llama3RopeScaling | None) -> None:
    config = replace(DENSE, rope_scaling=scaling, rope_dtype=torch.float32)
    rotary = modeling_llama.LlamaRotaryEmbedding(hf_config(config))
    expected = rotary(torch.empty(0), torch.arange(500)[None])
    for table, reference in zip(rope_tables(config, 500), expected, strict=True):
        torch.testing.assert_close(table, reference[0, :, :8], rtol=0, atol=0)


@pytest.mark.parametrize("tied", [False, True])
def test_linear_low_rank_model_equals_transformers_with_merged_weights(
    tied: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = replace(COLA, act="identity", mlp="swiglu", tied=tied)
    weights = random_canonical(config, seed=0)
    dense = {}
    for name, tensor in weights.items():
        if name.endswith(".B"):
            dense[name[:-1] + "weight"] = tensor @ weights[name[:-1] + "A"]
        elif not name.endswith(".A"):
            dense[name] = tensor
    tokens, _ = batch(config)
    logits, _ = PlainLlama(config).load_canonical(weights)(tokens)
    with transformers_in_fp64(monkeypatch):
        expected = hf_model(config, dense, torch.float64)(tokens).logits
    assert relative_error(logits, expected) < 1e-12


def scalar_silu(z: float) -> float:
    """SiLU of one number, written out."""
    return z / (1 + math.exp(-z))


@pytest.mark.parametrize(
    ("act", "phi"),
    [
        ("silu", scalar_silu),
        ("gelu", lambda z: z * (1 + math.erf(z / math.sqrt(2))) / 2),
        ("identity", lambda z: z),
    ],
)
def test_low_rank_projection_by_hand(act: str, phi: Any) -> None:
    projection = LowRankProjection(out_features=2, in_features=3, rank=2, act=act).double()
    a = [[0.5, -1.0, 2.0], [1.5, 0.25, -0.75]]
    b = [[2.0, -3.0], [0.5, 4.0]]
    x = [0.3, -0.7, 1.1]
    projection.load_state_dict({"A": torch.tensor(a), "B": torch.tensor(b)})
    z = [phi(sum(weight * value for weight, value in zip(row, x, strict=True))) for row in a]
    expected = [sum(weight * value for weight, value in zip(row, z, strict=True)) for row in b]
    actual = projection(torch.tensor(x, dtype=torch.float64)).tolist()
    assert actual == pytest.approx(expected, rel=1e-14)


@pytest.mark.parametrize("mlp", ["product", "swiglu"])
def test_mlp_by_hand(mlp: Any) -> None:
    """With widths and ranks of 1 the whole MLP is arithmetic on scalars."""
    config = replace(COLA, hidden=1, ffn=1, rank=1, mlp_rank=1, ranks=None, mlp=mlp)
    factors = {"gate": (0.7, 1.9), "up": (-1.3, 0.6), "down": (2.1, -0.8)}
    module = MLP(config).double()
    module.load_state_dict(
        {
            f"{name}_proj.{factor}": torch.tensor([[value]], dtype=torch.float64)
            for name, pair in factors.items()
            for factor, value in zip("AB", pair, strict=True)
        }
    )

    def project(name: str, value: float) -> float:
        a, b = factors[name]
        return b * scalar_silu(a * value)

    x = 0.9
    gate = project("gate", x)
    if mlp == "swiglu":
        gate = scalar_silu(gate)
    expected = project("down", gate * project("up", x))
    actual = module(torch.tensor([x], dtype=torch.float64)).item()
    assert actual == pytest.approx(expected, rel=1e-14)


def test_every_choice_of_activation_and_mlp_is_another_function() -> None:
    weights = random_canonical(COLA, seed=0)
    tokens, _ = batch(COLA)
    outputs = [
        PlainLlama(replace(COLA, act=act, mlp=mlp)).load_canonical(weights)(tokens)[0]
        for act in ("silu", "gelu", "identity")
        for mlp in ("product", "swiglu")
    ]
    for i, one in enumerate(outputs):
        for other in outputs[:i]:
            assert relative_error(one, other) > 0.05


@pytest.mark.parametrize("config", [DENSE, COLA], ids=["dense", "cola"])
def test_no_position_sees_the_future(config: PlainConfig) -> None:
    model = PlainLlama(config).load_canonical(random_canonical(config, seed=0))
    tokens, _ = batch(config)
    changed = tokens.clone()
    changed[:, 8] = (changed[:, 8] + 1) % config.vocab_size
    before, after = model(tokens)[0], model(changed)[0]
    assert torch.equal(before[:, :8], after[:, :8])
    assert ((before - after)[:, 8:].abs().amax(dim=-1) > 1e-4).all()


@pytest.mark.parametrize("mlp", ["product", "swiglu"])
def test_block_gradcheck(mlp: Any) -> None:
    config = replace(
        COLA,
        hidden=4,
        ffn=5,
        kv_heads=1,
        heads=2,
        head_dim=2,
        layers=1,
        rank=2,
        mlp_rank=3,
        ranks=None,
        mlp=mlp,
    )
    prefix = "decoder.layers.0."
    weights = {
        name.removeprefix(prefix): tensor.requires_grad_()
        for name, tensor in random_canonical(config, seed=0).items()
        if name.startswith(prefix)
    }
    block = Block(config).double()
    x = torch.randn(1, 3, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(2))

    def run(x: Tensor, *values: Tensor) -> Tensor:
        named = dict(zip(weights, values, strict=True))
        return torch.func.functional_call(block, named, (x,), strict=True)

    assert torch.autograd.gradcheck(run, (x.requires_grad_(), *weights.values()))


def test_canonical_names_and_shapes() -> None:
    shapes = {n: tuple(t.shape) for n, t in random_canonical(replace(COLA, layers=1), 0).items()}
    layer = "decoder.layers.0."
    assert shapes == {
        "embedding.word_embeddings.weight": (37, 24),
        layer + "input_layernorm.weight": (24,),
        layer + "self_attention.q_proj.A": (9, 24),
        layer + "self_attention.q_proj.B": (64, 9),
        layer + "self_attention.k_proj.A": (9, 24),
        layer + "self_attention.k_proj.B": (32, 9),
        layer + "self_attention.v_proj.A": (7, 24),
        layer + "self_attention.v_proj.B": (32, 7),
        layer + "self_attention.o_proj.A": (9, 64),
        layer + "self_attention.o_proj.B": (24, 9),
        layer + "pre_mlp_layernorm.weight": (24,),
        layer + "mlp.gate_proj.A": (11, 24),
        layer + "mlp.gate_proj.B": (40, 11),
        layer + "mlp.up_proj.A": (11, 24),
        layer + "mlp.up_proj.B": (40, 11),
        layer + "mlp.down_proj.A": (13, 40),
        layer + "mlp.down_proj.B": (24, 13),
        "decoder.final_layernorm.weight": (24,),
        "output_layer.weight": (37, 24),
    }
    tied = random_canonical(replace(DENSE, layers=1, tied=True), 0)
    assert "output_layer.weight" not in tied
    assert tied[layer + "self_attention.o_proj.weight"].shape == (24, 64)


def test_load_canonical_refuses_other_names_and_shapes() -> None:
    weights = random_canonical(DENSE, seed=0)
    model = PlainLlama(DENSE)
    head = weights.pop("output_layer.weight")
    with pytest.raises(RuntimeError, match=r"Missing key.*output_layer"):
        model.load_canonical(weights)
    with pytest.raises(RuntimeError, match=r"size mismatch for output_layer"):
        model.load_canonical(weights | {"output_layer.weight": head[1:]})
    with pytest.raises(RuntimeError, match=r"Unexpected key.*output_layer"):
        PlainLlama(replace(DENSE, tied=True)).load_canonical(
            weights | {"output_layer.weight": head}
        )


def test_a_tensor_that_was_not_loaded_shows() -> None:
    assert PlainLlama(DENSE)(batch(DENSE)[0])[0].isnan().all()


def test_random_canonical_scales() -> None:
    wide = replace(COLA, vocab_size=512, hidden=256, ffn=384, rank=64, mlp_rank=64, ranks=None)
    up = "decoder.layers.1.mlp.up_proj."
    fan_in = random_canonical(wide, seed=0)
    assert fan_in[up + "A"].std().item() == pytest.approx(256**-0.5, rel=0.03)
    assert fan_in[up + "B"].std().item() == pytest.approx(64**-0.5, rel=0.03)
    assert fan_in["decoder.final_layernorm.weight"].std().item() == pytest.approx(0.1, rel=0.2)
    published = random_canonical(wide, seed=0, fan_in=False)
    product = published[up + "B"] @ published[up + "A"]
    assert product.std().item() == pytest.approx((256 + 384) ** -0.5, rel=0.03)
    assert published["output_layer.weight"].std().item() == pytest.approx(0.02, rel=0.03)
    single = random_canonical(wide, seed=0, dtype=torch.float32)
    assert all(torch.equal(single[name], fan_in[name].float()) for name in fan_in)


@pytest.mark.parametrize("decay_norms", [False, True])
@pytest.mark.parametrize("clip_grad", [0.0, 0.3])
def test_adamw_steps_by_formula(decay_norms: bool, clip_grad: float) -> None:
    """Two steps against the update written out; a large eps makes the gradient's scale matter."""
    lr, (beta1, beta2), eps, decay = 0.05, (0.8, 0.95), 0.1, 0.2
    weights = random_canonical(COLA, seed=0)
    batches = [batch(COLA, seed) for seed in (1, 2)]
    trained = PlainLlama(COLA).load_canonical(weights)
    history = adamw_steps(
        trained,
        batches,
        lr,
        betas=(beta1, beta2),
        eps=eps,
        weight_decay=decay,
        clip_grad=clip_grad,
        decay_norms=decay_norms,
    )

    model = PlainLlama(COLA).load_canonical(weights)
    names = [name for name, _ in model.named_parameters()]
    first = {name: torch.zeros_like(weights[name]) for name in names}
    second = {name: torch.zeros_like(weights[name]) for name in names}
    for step, (tokens, labels) in enumerate(batches, start=1):
        loss = model(tokens, labels)[1].mean()
        gradients = torch.autograd.grad(loss, list(model.parameters()))
        norm = torch.cat([g.flatten() for g in gradients]).norm().item()
        assert history[step - 1] == pytest.approx((loss.item(), norm), rel=1e-12)
        if clip_grad:
            assert norm > 2 * clip_grad
            gradients = tuple(g * clip_grad / (norm + 1e-6) for g in gradients)
        updated = {}
        for name, gradient in zip(names, gradients, strict=True):
            first[name] = beta1 * first[name] + (1 - beta1) * gradient
            second[name] = beta2 * second[name] + (1 - beta2) * gradient**2
            mean = first[name] / (1 - beta1**step)
            spread = (second[name] / (1 - beta2**step)).sqrt()
            value = model.state_dict()[name]
            decayed = decay if decay_norms or value.ndim > 1 else 0.0
            updated[name] = value - lr * (mean / (spread + eps) + decayed * value)
        model.load_canonical(updated)
    for name, value in trained.state_dict().items():
        assert relative_error(value, updated[name]) < 1e-12, name


def test_bf16_stays_bf16_and_near_fp64() -> None:
    weights = random_canonical(COLA, seed=0, dtype=torch.bfloat16)
    tokens, labels = batch(COLA)
    exact, _ = PlainLlama(COLA).load_canonical(weights)(tokens)
    logits, loss = PlainLlama(COLA, torch.bfloat16).load_canonical(weights)(tokens, labels)
    assert logits.dtype == torch.bfloat16
    assert loss is not None
    assert loss.dtype == torch.float32
    assert relative_error(logits.double(), exact) < 0.02


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"arch": "svd"}, "arch must be one of"),
        ({"heads": 5}, "heads 5 is no multiple of kv_heads 2"),
        ({"head_dim": 5}, "head_dim 5 is odd"),
        ({"ranks": {"qkv": 4}}, r"ranks names \['qkv'\]"),
        ({"rank": 0}, "rank of at least 1"),
        ({"arch": "dense", "mlp": "product"}, "belongs to arch 'cola'"),
    ],
)
def test_impossible_configurations_are_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        replace(COLA, **change)
