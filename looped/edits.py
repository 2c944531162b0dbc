"""What an edit of the network can do unseen: draws of its own, parameters that no gradient reaches."""

from functools import partial

import torch

from looped.console import note


def generator_states(device: torch.device) -> list[torch.Tensor]:
    """The states of torch's own generators, which nothing here draws from once training begins."""
    states = [torch.get_rng_state()]
    if device.type == "cuda":
        states.append(torch.cuda.get_rng_state(device))
    if device.type == "mps":
        states.append(torch.mps.get_rng_state())
    return states


class Watch:
    """Looks on while a network is trained; `note_oddities` ends it."""

    def __init__(self, model: torch.nn.Module, device: torch.device):
        self.device = device
        self.generators = generator_states(device)
        # Whether a gradient other than 0 has come. Whether the parameter has changed would not tell:
        # Muon's weight decay shrinks matrices that have none.
        self.reached: dict[str, torch.Tensor] = {}
        self.hooks = []
        for name, p in model.named_parameters():
            if p.requires_grad and p.numel():
                self.reached[name] = torch.zeros((), dtype=torch.bool, device=p.device)
                look = partial(self._look, name)
                self.hooks.append(p.register_post_accumulate_grad_hook(look))

    def _look(self, name: str, p: torch.Tensor) -> None:
        self.reached[name] |= p.grad.any()

    def note_oddities(self) -> None:
        """Says so where training has drawn from torch's generators, or has left parameters out."""
        for hook in self.hooks:
            hook.remove()
        if not all(map(torch.equal, self.generators, generator_states(self.device))):
            note(
                "the network draws from torch's generator, so micro-batches, ranks and --resume "
                "change its numbers, and validation draws too; make them of keys, as "
                "Model.initial_state does"
            )
        left_out = [name for name, reached in self.reached.items() if not reached]
        if left_out:
            more = f" and {len(left_out) - 1} more" if left_out[1:] else ""
            note(
                f"no gradient has reached {left_out[0]}{more} so far, so nothing trains it; "
                "does the loss read what is made of it?"
            )
