"""Run as a script by a process that has transformers only: uses exported folders as a stranger
would, and leaves what it found in a file.

    python fresh_process.py FOUND.pt FOLDER...
"""

import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel


def generated(model: PreTrainedModel, prompt: Tensor, use_cache: bool) -> Tensor:
    return model.generate(
        prompt, max_new_tokens=12, min_new_tokens=12, do_sample=False, use_cache=use_cache
    )


def use(folder: Path, tokens: Tensor) -> dict[str, Any]:
    found: dict[str, Any] = {}
    model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)
    found["class"] = type(model).__name__
    found["dtype"] = model.dtype
    found["weights"] = {name: value.clone() for name, value in model.state_dict().items()}
    model = model.float().eval()
    with torch.no_grad():
        found["logits"] = model(tokens).logits
        states = model(tokens, output_hidden_states=True).hidden_states
        found["hidden_widths"] = {state.shape[-1] for state in states}
        padded = torch.cat([torch.zeros_like(tokens[:, :3]), tokens], dim=1)
        mask = torch.ones_like(padded)
        mask[:, :3] = 0
        found["left_padded"] = model(padded, attention_mask=mask).logits[:, 3:]
    prompt = tokens[:, :7]
    found["cached"] = generated(model, prompt, True)
    found["uncached"] = generated(model, prompt, False)

    model.train()
    model.gradient_checkpointing_enable({"use_reentrant": False})
    model(tokens, labels=tokens).loss.backward()
    found["checkpointed_grads"] = gradients(model)
    model.zero_grad()
    model.gradient_checkpointing_disable()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loss = model(tokens, labels=tokens).loss
    loss.backward()
    found["grads"] = gradients(model)
    optimizer.step()
    model.eval()
    with torch.no_grad():
        after = model(tokens, labels=tokens)
    found["losses"] = (float(loss), float(after.loss))

    again = folder.with_name(f"{folder.name}-again")
    model.save_pretrained(again)
    reloaded = AutoModelForCausalLM.from_pretrained(again, trust_remote_code=True).eval()
    with torch.no_grad():
        found["reloaded_equal"] = torch.equal(reloaded(tokens).logits, after.logits)
    return found


def gradients(model: PreTrainedModel) -> dict[str, Tensor | None]:
    return {
        name: None if parameter.grad is None else parameter.grad.clone()
        for name, parameter in model.named_parameters()
    }


def main(target: str, *folders: str) -> None:
    tokens = torch.randint(100, (2, 48), generator=torch.Generator().manual_seed(3))
    found = {folder: use(Path(folder), tokens) for folder in folders}
    found["ours"] = [name for name in sys.modules if name.startswith(("boost", "megatron"))]
    torch.save(found, target)


if __name__ == "__main__":
    main(*sys.argv[1:])
