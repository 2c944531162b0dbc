"""A run of the trainer as a model of transformers.

`tools.convert export` puts this file beside the weights, with model.py and what that imports: nothing
of the network is written here a second time. Weights stay float32; `dtype` is the dtype of the
activations.
"""

import numpy as np
import torch
import torch.nn.functional as F
from transformers import DynamicCache, GenerationMixin, PreTrainedConfig, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast
from transformers.utils.generic import can_return_tuple

from looped.depth import MAX_DEPTH, training_plan
from looped.ops import hash_keys
from looped.randomness import FOR_SAMPLE
from model import Model, config_of


class LoopedConfig(PreTrainedConfig):
    model_type = "looped"
    model: dict | None = None  # the fields of a ModelConfig
    residual_dtype: str = "auto"  # of the residual stream; auto: as the activations
    depth: int | None = None  # loops, where a call names no other number; None: mu_rec


class Slots:
    """What model.py asks of a cache, kept in a cache of transformers.

    A pass visits the layers in one order, a core layer once in each loop; visit number i has slot i.
    """

    def __init__(self, cache, tokens: int, depth: int, device):
        if getattr(cache, "depth", depth) != depth:
            raise ValueError(f"the cache was filled at depth {cache.depth}, not {depth}")
        cache.depth = depth
        self.cache = cache
        self.visit = 0
        past = cache.get_seq_length()
        self.positions = torch.arange(past, past + tokens, device=device)

    def begin_loop(self, loop, live):
        pass  # the visit's number says which loop it is

    def extend(self, layer, k, v):
        self.visit += 1
        return self.cache.update(k, v, self.visit - 1)


class LoopedForCausalLM(PreTrainedModel, GenerationMixin):
    config_class = LoopedConfig
    base_model_prefix = "model"
    _keep_in_fp32_modules_strict = ["model"]  # the network casts weights where it uses them

    def __init__(self, config: LoopedConfig):
        super().__init__(config)
        residual = config.residual_dtype
        residual = None if residual == "auto" else getattr(torch, residual)
        self.model = Model(config_of(config.model), torch.get_default_dtype(), residual)
        self.tables = dict(self.named_non_persistent_buffers())
        self.post_init()

    @property
    def dtype(self):
        """Of the activations: save_pretrained writes it to config.json."""
        return self.model.dtype

    def _init_weights(self, module):
        """Fills in what the file of weights lacks: from_pretrained empties the tables of angles."""
        if module is self.model:
            for name, table in self.tables.items():
                self.get_buffer(name).copy_(table)
        for p in module.parameters(recurse=False):
            if not getattr(p, "_is_hf_initialized", False):
                p.copy_(p.init(p.shape, None))

    def get_input_embeddings(self):
        return self.model.wte

    @classmethod
    def _supports_default_dynamic_cache(cls) -> bool:
        return False  # forward makes one, with a slot for each loop

    def prepare_inputs_for_generation(self, input_ids, next_sequence_length=None, **kwargs):
        if kwargs.get("cache") is None:  # the whole text is read again
            next_sequence_length = None
        return super().prepare_inputs_for_generation(input_ids, next_sequence_length, **kwargs)

    @can_return_tuple
    def forward(  # noqa: PLR0913
        self, input_ids, attention_mask=None, cache=None, labels=None, use_cache=False,
        logits_to_keep=0, depth=None,
    ):  # fmt: skip
        """Logits (B, T, V) in float32, and with labels their mean cross-entropy.

        Rows may be padded on either side; padded rows are read whole, without a cache. The last mu_bwd
        loops carry gradient, as in training.
        """
        depth = self.loops(depth)
        if attention_mask is None or attention_mask.all():
            if use_cache and cache is None:
                cache = DynamicCache()
            x = self.read(input_ids, depth, cache)
        else:
            if cache is not None:
                raise ValueError("padded rows cannot use a cache; leave it out")
            first = F.pad(attention_mask.long(), (1, 0)).diff(dim=1) > 0  # after padding
            if first.sum(1).max() > 1:
                raise ValueError("attention_mask has padding between tokens")
            x = self.read_padded(input_ids, attention_mask, depth)
            if labels is not None:
                labels = labels.masked_fill(first | (attention_mask == 0), -100)
        logits = self.model.head(x[:, -logits_to_keep:].float())
        loss = None
        if labels is not None:
            loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
        return CausalLMOutputWithPast(loss=loss, logits=logits, cache=cache)

    def loops(self, depth: int | None) -> int:
        """The loops to take: those of the call, else the configuration's, else mu_rec."""
        if depth is None:
            depth = self.config.depth
        if depth is None:
            return self.model.cfg.mu_rec
        if not self.model.cfg.n_core:
            raise ValueError("the model has no loop; leave depth out")
        if not 1 <= depth <= MAX_DEPTH:
            raise ValueError(f"depth {depth} must lie between 1 and {MAX_DEPTH}")
        return depth

    def read_padded(self, ids, mask, depth: int):
        """Reads rows with their padding moved to the end, where it is inert; moves x back."""
        order = mask.long().argsort(dim=1, descending=True, stable=True)
        x = self.read(ids.gather(1, order), depth)
        back = order.argsort(dim=1).unsqueeze(-1)
        return x.gather(1, back.expand_as(x))

    def read(self, ids, depth: int, cache=None):
        """ids (B, T), a whole text or the cache's next tokens -> x (B, T, D), which the head reads."""
        net = self.model
        B, tokens = ids.shape
        slots = None
        if cache is not None:
            slots = Slots(cache, tokens, depth, ids.device)
            tokens += cache.get_seq_length()
        if tokens > net.cfg.seq_len:
            raise ValueError(f"{tokens} tokens; the model takes {net.cfg.seq_len} at most")
        keys = hash_keys(0, FOR_SAMPLE, each=[0] * B, device=ids.device)  # tools.sample's first
        h, inputs = net.enter_loop(ids, keys, slots)
        if inputs is not None:
            k = min(depth, net.cfg.mu_bwd)  # loops with gradient
            plan = training_plan(np.full(B, depth - k), np.full(B, k), ids.device)
            for state in net.unroll(h, inputs, plan, slots):
                h = net.mechanism.read(state)
        return net.coda(h, ids, inputs, slots)
