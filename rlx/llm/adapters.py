"""The LoRA adapters that `rlx.load_llm` is given."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlx.errors import OptionError
from rlx.records import dataclass

if TYPE_CHECKING:
    from rlx.models.adapters import Adapter
    from rlx.models.config import Config
    from rlx.models.families.base import Family
    from rlx.models.source import Source
    from rlx.runtime.compiled import CompiledGraph

__all__ = ["Chosen", "Lora"]

Place = str | os.PathLike[str]
Lora = Place | tuple[Place, float] | Sequence[Place | tuple[Place, float]] | Mapping[str, Place | tuple[Place, float]]


@dataclass(frozen=True)
class Chosen:
    """Adapters by name, with their scales, for a model of that family."""

    adapters: Mapping[str, Adapter]
    scales: Mapping[str, float]
    source: Source
    family: Family
    config: Config

    @classmethod
    def of(cls, lora: Lora, path: str | os.PathLike[str]) -> Chosen:
        """Reads the adapters. Raises `ModelFormatError` and `OptionError`."""
        from rlx.models.adapters import read_adapter
        from rlx.models.config import read_config
        from rlx.models.decoder import vocabulary_size
        from rlx.models.families import family_of
        from rlx.models.source import open_source

        source = open_source(path)
        family = family_of(source)
        vocab = vocabulary_size(source, family.names["token_embd"])
        config = read_config(source, vocab, every=family.every, epsilon=family.epsilon)
        given = _by_name(lora)
        read = {name: read_adapter(place, family, source.architecture) for name, (place, _) in given.items()}
        return cls(read, {name: scale for name, (_, scale) in given.items()}, source, family, config)

    @property
    def room(self) -> str:
        """What the graph needs for them."""
        from rlx.models.adapters import room_for

        return room_for(self.adapters.values())

    def put(self, model: CompiledGraph) -> None:
        """Puts them into a model that was made with the room."""
        from rlx.models.adapters import weights_of

        targets = model.adapters.targets
        for name, adapter in self.adapters.items():
            weights = weights_of(adapter, targets, self.source, self.family, self.config)
            model.adapters.put(name, weights, self.scales[name])


def _by_name(lora: Any) -> dict[str, tuple[Place, float]]:
    """Path and scale by name; what has no name is called as its file or folder."""
    if isinstance(lora, Mapping):
        named = [(name, _with_scale(place)) for name, place in lora.items()]
    else:
        one = isinstance(lora, str | os.PathLike) or _is_scaled(lora)
        every = [_with_scale(place) for place in ([lora] if one else lora if isinstance(lora, Sequence) else [lora])]
        named = [(_name_of(Path(place)), (place, scale)) for place, scale in every]
    found = dict(named)
    if not found or len(found) < len(named) or not all(isinstance(name, str) and name for name in found):
        raise OptionError(f"lora={lora!r:.80}: expected adapters of different names; give {{name: path}}")
    return found


def _name_of(path: Path) -> str:
    """What comes before the ending of a file; all of a folder's name, which may have points."""
    return path.stem if path.suffix in (".gguf", ".safetensors") else path.name


def _is_scaled(given: Any) -> bool:
    return isinstance(given, tuple) and len(given) == 2 and isinstance(given[1], int | float)


def _with_scale(given: Any) -> tuple[Place, float]:
    place, scale = given if _is_scaled(given) else (given, 1.0)
    if not isinstance(place, str | os.PathLike) or isinstance(scale, bool):
        raise OptionError(f"lora={given!r:.80}: expected a path, or a path with a scale")
    return place, float(scale)
