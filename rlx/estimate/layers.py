"""A few layers of a decoder that stand for the others, which are like them: planning these takes far less time.

Layers are of one kind if their weights have the same shapes, formats and alignment, and they see equally far back. The
weights of a kind, and what is packed of them, take the same bytes in each layer; what a run needs at once lies within
a layer, and from one layer to the next only x lives.
"""

from __future__ import annotations

import re
from collections.abc import Hashable, Mapping

from rlx.ir.literal import equal_arrays
from rlx.ir.mapped import read_in_place
from rlx.models.decoder import Decoder

__all__ = ["layer_of", "stand_ins"]

OF_A_KIND = 2  # layers of each kind that are kept, so that one follows another
SHARED = 64 << 10  # bytes of a weight from which on it matters that layers share it
_NUMBER = re.compile(r"(?:^|\.)(?:blk|layers|h)\.(\d+)\.")


def layer_of(name: str) -> int | None:
    """The layer that a tensor of a file belongs to."""
    found = _NUMBER.search(name)
    return None if found is None else int(found[1])


def stand_ins(decoder: Decoder) -> dict[int, int]:
    """The layers to plan, with how many each stands for; all of them where that would save little, or be inexact."""
    count = decoder.config.layers
    every = dict.fromkeys(range(count), 1)
    if decoder.config.experts or _shared(decoder):
        return every
    kinds = _kinds(decoder)
    kept: dict[Hashable, list[int]] = {}
    for layer, kind in enumerate(kinds):
        own = kept.setdefault(kind, [])
        if len(own) < OF_A_KIND or layer == count - 1:
            own.append(layer)
    if 3 * sum(map(len, kept.values())) > 2 * count:
        return every
    found: dict[int, int] = {}
    for kind, own in kept.items():
        each, more = divmod(kinds.count(kind), len(own))
        found |= {layer: each + (n < more) for n, layer in enumerate(own)}
    return dict(sorted(found.items()))


def _kinds(decoder: Decoder) -> list[Hashable]:
    weights: dict[int, list[Hashable]] = {layer: [] for layer in range(decoder.config.layers)}
    for param in decoder.graph.params:
        layer = layer_of(param.name)
        if layer in weights:
            aligned = param.data is not None and read_in_place(param.data)
            weights[layer].append((_NUMBER.sub("", param.name), str(param.type), aligned))
    return [(decoder.config.windows[layer], *own) for layer, own in weights.items()]


def _shared(decoder: Decoder) -> Mapping[str, str]:
    """The weights of some size that have the bytes of another one: memory has these once."""
    big = (p for p in decoder.graph.params if (p.type.nbytes() or 0) >= SHARED)
    return equal_arrays({p.name: (p.type.encoding, p.data) for p in big if p.data is not None})
