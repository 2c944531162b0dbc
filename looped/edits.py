"""What an edit of the network can do unseen: draws of its own, parameters that nothing trains."""

from dataclasses import dataclass

import torch

from looped.console import note


@dataclass
class Marks:
    """What is compared after some steps."""

    generators: list[
        torch.Tensor
    ]  # states of torch's own, which nothing here draws from in training
    bits: dict[str, int]  # the sum of each parameter's bits


def marks(model: torch.nn.Module, device: torch.device) -> Marks:
    """As they are now."""
    states = [torch.get_rng_state()]
    if device.type == "cuda":
        states.append(torch.cuda.get_rng_state(device))
    if device.type == "mps":
        states.append(torch.mps.get_rng_state())
    names = [name for name, p in model.named_parameters() if p.numel()]
    sums = [model.get_parameter(name).detach().view(torch.int32).sum() for name in names]
    return Marks(states, dict(zip(names, torch.stack(sums).tolist(), strict=True)))


def note_oddities(before: Marks, model: torch.nn.Module, device: torch.device) -> None:
    """Says so where training has drawn from torch's generators, or has left a parameter as it was."""
    now = marks(model, device)
    if not all(map(torch.equal, before.generators, now.generators)):
        note(
            "the network draws from torch's generator, so micro-batches, ranks and --resume change "
            "its numbers; make them of keys, as Model.initial_state does"
        )
    still = [name for name, bits in before.bits.items() if now.bits[name] == bits]
    if still:
        more = f" and {len(still) - 1} more" if still[1:] else ""
        note(
            f"unchanged since training began: {still[0]}{more}; no gradient reaches what the loss "
            "does not read, and a learning rate may be 0"
        )
