"""`rlx.load_llm`: from the files of a language model to one that runs.

`rlx.models.source` reads the files, `rlx.models.decoder` makes the graph of them, and `Session.load` compiles it.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Unpack

from rlx.boundary import bounded
from rlx.disk import path_of
from rlx.errors import CompileError, MemoryDeficit, ModelFormatError, OptionError
from rlx.llm.adapters import Chosen, Lora
from rlx.llm.model import LanguageModel
from rlx.models.sizes import CONTEXT, KV_DTYPES, WANTED
from rlx.options import CompileOptions
from rlx.records import names_of, replace
from rlx.runtime.session import LoadKeywords, Session, kind_of
from rlx.units import with_ints

__all__ = ["KV_DTYPES", "load_llm"]

LANGUAGE_WAYS_OUT = "Lower context= or prefill=, take a narrower kv_dtype=, raise budget=, or pass over_budget='allow'"


@bounded("load_llm", CompileError)
def load_llm(
    path: str | os.PathLike[str],
    *,
    context: int | None = None,
    kv_dtype: str = "f32",
    prefill: int | None = None,
    slots: int = 1,
    draft: str | os.PathLike[str] | None = None,
    lora: Lora | None = None,
    **options: Unpack[LoadKeywords],
) -> LanguageModel:
    """Loads a language model: a GGUF file (of several the first), or a folder with safetensors and a config.json.

    `context`: tokens that the cache has room for (None: what the model was made for, 4,096 at most). `kv_dtype`: what
    the cache is stored in, "f32", "f16", "bf16", or blocks, "q8_0" or "q4_0". `prefill`: tokens of a prompt that go
    through at once (512). `slots`: texts that the cache has room for at the same time, of `context` tokens each.
    `draft`: a smaller model with the same tokens, which guesses ahead for `generate(speculate=...)`. `lora`: an
    adapter, a folder of PEFT or a GGUF file, or several: paths, or paths by name, each also with a scale, (path, 0.5).
    Further keywords are those of `rlx.load`: `threads`, `budget`, `precision` and others. Raises `ModelFormatError` for
    files that are damaged or of a kind that is not known, `MemoryDeficit` before weights are read where it does not
    fit, and `OptionError`.
    """
    if "dims" in options:
        raise OptionError("load_llm: dims= is for other models; give context= and prefill=")
    name, kind = kind_of(path_of(path, "load_llm"))
    if kind not in (".gguf", ".safetensors"):
        raise ModelFormatError(
            f"{name}: load_llm takes a GGUF file, or a folder with safetensors and a config.json; rlx.load takes others"
        )
    slots, context, prefill = with_ints((slots, context, prefill))
    if type(slots) is not int or not 1 <= slots <= WANTED:
        raise OptionError(f"slots={slots!r}: expected 1 to {WANTED}")
    dims: dict[str, Any] = {"kv_dtype": kv_dtype, "sampling": 1, "rings": 1, "batch": slots}
    dims |= {name: value for name, value in (("context", context), ("prefill", prefill)) if value is not None}
    chosen = None if lora is None else Chosen.of(lora, path)
    if chosen is not None:
        dims["lora"] = chosen.room
    options["dims"] = dims
    try:
        model = Session().load(path, **options)
    except MemoryDeficit as error:
        raise _with_largest(error, path, dims, options) from None
    except OptionError:
        from rlx.models.families import family_of
        from rlx.models.source import open_source

        family_of(open_source(path))  # raises where it is no decoder, which has other options
        raise
    made = LanguageModel(model, Path(path_of(path, "load_llm")), _room_of(path, context))
    if chosen is not None:
        chosen.put(model)
    if draft is not None:
        del options["dims"]
        made.with_draft(
            load_llm(draft, context=made.context, kv_dtype=kv_dtype, prefill=prefill, slots=slots, **options)
        )
    return made


def _room_of(path: str | os.PathLike[str], context: int | None) -> Callable[[], int]:
    """How long a context was asked for, which the caches don't tell where all are of windows."""

    def asked() -> int:
        from rlx.models.source import open_source

        return min(open_source(path).facts.number("context"), CONTEXT) if context is None else context

    return asked


def _with_largest(
    error: MemoryDeficit, path: str | os.PathLike[str], dims: Mapping[str, Any], options: Mapping[str, Any]
) -> MemoryDeficit:
    """The error in terms of what load_llm takes, with the largest context that fits."""
    from rlx.estimate.admit import WAYS_OUT  # slow to import
    from rlx.estimate.decoder import largest_context
    from rlx.estimate.language import read_gguf_model, read_hf_model, shape_of
    from rlx.estimate.memory import remedy_lines

    _, kind = kind_of(path_of(path, "load_llm"))
    file = read_gguf_model(path) if kind == ".gguf" else read_hf_model(path)
    shape = shape_of(file, **{name: size for name, size in dims.items() if name not in ("sampling", "lora", "rings")})
    own = {name: value for name, value in options.items() if name in names_of(CompileOptions) and name != "dims"}
    largest, found = largest_context(error, path, shape, CompileOptions().with_options(own), dims.get("lora", ""))
    hint = f"context={largest} is the largest that fits" if largest > 0 else "It fits with no context, however short"
    head, _, parts = str(error).replace(WAYS_OUT, LANGUAGE_WAYS_OUT).partition("\nremedies")
    named = [replace(r, action=r.action.replace("tokens ", "prefill ")) for r in found]
    remedies = [r for r in named if not r.action.startswith("rows ")]  # not for the caller to choose
    return MemoryDeficit(
        "\n".join([head, *(remedy_lines(remedies) if parts else ()), hint]),
        budget_bytes=error.budget_bytes,
        peak_bytes=error.peak_bytes,
        parts=error.parts,
        remedies=remedies,
        estimate=error.estimate,
    )
