"""A text that a language model writes, with its part of the cache, as bytes: to go on elsewhere, or later.

    magic, length of the header (8 bytes), header (JSON), the stored rows of each state, SHA-256 of all of that

The header says of which model it is, what the generation was told and has chosen, and shape and type of the rows.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from rlx.disk import open_regular
from rlx.errors import BusyError, ModelFormatError, OptionError
from rlx.ir.graph import Array
from rlx.llm.choosing import Chooser
from rlx.llm.generation import Generation, Limits
from rlx.llm.options import DRAWN
from rlx.models.constraint import Constraint
from rlx.models.sampling import Sampling
from rlx.records import replace

if TYPE_CHECKING:
    from rlx.llm.model import LanguageModel

__all__ = ["restored", "snapshot_of"]

NAME, FORMAT = b"RLXTEXT", 2
MAGIC = NAME + b"%d" % FORMAT
DIGEST = 32  # bytes
ENDS = 1 << 20  # bytes at the beginning and end of a model's file by which it is known


def snapshot_of(llm: LanguageModel, made: Generation) -> bytes:
    """What `LanguageModel.snapshot` gives."""
    if made.slot < 0:
        raise OptionError("snapshot: the generation has not begun: take its first piece, or store its prompt")
    if llm.slots.held_by(made.slot) is not made:
        raise BusyError("snapshot: the model has begun another generation since, in the same slot")
    filled, rows = llm.slots.filled[made.slot], llm.slots.rows_of(made.slot)
    limits, sampling = made.limits, made.choose.sampling
    biases = list(sampling.logit_bias.items())
    header = {
        "model": _identity(llm.path),
        "precision": llm.model.precision,
        "adapter": made.adapter,
        "adapters": _adapters(llm, made.adapter),
        "filled": filled,
        "held": llm.slots.held(made.slot),
        "prompt": made.prompt,
        "ids": made.ids,
        "logprobs": made.logprobs,
        "pending": made.pending,
        "finish_reason": made.finish_reason,
        "limits": {**vars(limits), "ends": sorted(limits.ends), "stops": list(limits.stops)},
        "sampling": {name: getattr(sampling, name) for name in (*DRAWN, "seed")} | {"logit_bias": biases},
        "constraint": made.choose.constraint is not None,
        "states": [{"name": n, "shape": list(a.shape), "dtype": str(a.dtype)} for n, a in rows.items()],
    }
    text = json.dumps(header).encode()
    data = b"".join([MAGIC, len(text).to_bytes(8, "little"), text, *(a.tobytes() for a in rows.values())])
    return data + hashlib.sha256(data).digest()


def restored(llm: LanguageModel, data: bytes, constraint: Constraint | None) -> Generation:
    """What `LanguageModel.restore` gives; the cache is changed after all checks."""
    header, body = _opened(data)
    if header.get("model") != _identity(llm.path):
        raise OptionError(f"restore: it is of another model than {llm.path}")
    if header.get("precision") != llm.model.precision:
        raise OptionError(
            f"restore: it was written with precision={header.get('precision')!r}, and this model computes in "
            f"{llm.model.precision!r}: load it with the same"
        )
    adapter = _adapter(header)
    if header.get("adapters") != _adapters(llm, adapter):
        raise OptionError("restore: it was written with other adapters, or other scales of these")
    if bool(header.get("constraint")) != (constraint is not None):
        raise OptionError("restore: give constraint= where the text had one, and only there")
    filled, prompt, ids, pending = (_tokens(llm, header, name) for name in ("filled", "prompt", "ids", "pending"))
    if not prompt or not pending:
        raise ModelFormatError("restore: the snapshot has no prompt, or no token to go on from")
    if len(filled) + len(pending) > llm.context + bool(ids):  # the last token that is written is not read
        raise OptionError(f"restore: {len(filled):,} tokens have no room in a context of {llm.context:,}")
    rows, logprobs = _rows(llm, header, body, len(filled)), _logprobs(header, len(ids))
    try:
        made = _generation(llm, header, prompt, constraint, adapter)
        room = llm.context - len(filled) - len(pending) + 1
        if not made.limits.shifts:
            made.limits = replace(made.limits, most=min(made.limits.most, len(ids) + room))
    except (KeyError, TypeError, ValueError) as error:
        raise ModelFormatError(f"restore: the header is not of this format: {error}") from None
    shifts = made.limits.shifts
    if made.limits.fixed > 1 or (not shifts and filled + pending != prompt + ids):
        raise ModelFormatError("restore: what is in the cache is not the text")
    if shifts and llm.context <= 2 + made.limits.fixed:
        raise OptionError(f"restore: a context of {llm.context:,} is too short for a text that goes on when it is full")
    made.replay(ids, header.get("finish_reason"))
    made.logprobs = logprobs
    slot, _ = llm.slots.seat(made, [], adapter=adapter)
    llm.slots.put_rows(slot, filled, rows)
    made.slot, made.pending = slot, pending
    return made


def _opened(data: bytes) -> tuple[dict[str, Any], memoryview]:
    """Header and rows. Raises `ModelFormatError`."""
    view, start = memoryview(data), len(MAGIC) + 8
    if len(view) < start + DIGEST or view[: len(NAME)] != NAME:
        raise ModelFormatError("restore: these bytes are no snapshot, as LanguageModel.snapshot gives")
    if view[: len(MAGIC)] != MAGIC:
        other = bytes(view[len(NAME) : len(MAGIC)]).decode("ascii", "replace")
        raise ModelFormatError(
            f"restore: this is a snapshot of format {other!r}, and this rlx reads format {FORMAT}: go on with the rlx "
            "that wrote it, or give the text so far as a prompt"
        )
    size = int.from_bytes(view[len(MAGIC) : start], "little")
    if hashlib.sha256(view[:-DIGEST]).digest() != view[-DIGEST:] or size > len(view) - start - DIGEST:
        raise ModelFormatError("restore: the snapshot is damaged")
    try:
        header = json.loads(bytes(view[start : start + size]))
    except (ValueError, RecursionError) as error:
        raise ModelFormatError(f"restore: the header is no JSON: {error}") from None
    if not isinstance(header, dict):
        raise ModelFormatError("restore: the header is no object")
    return header, view[start + size : -DIGEST]


def _tokens(llm: LanguageModel, header: dict[str, Any], name: str) -> list[int]:
    found = header.get(name)
    if not isinstance(found, list) or not all(type(i) is int and 0 <= i < llm.vocab for i in found):
        raise ModelFormatError(f"restore: {name}: expected tokens of 0 to {llm.vocab - 1}")
    return found


def _rows(llm: LanguageModel, header: dict[str, Any], body: memoryview, length: int) -> dict[str, Array]:
    """The rows of each state, for which they must be made."""
    held = header.get("held")
    if type(held) is not int or not llm.slots.is_enough(held, length):
        raise OptionError("restore: its cache has another form: load the model with the context= and prefill= of then")
    wanted = llm.slots.row_types(length, held)
    given = [{"name": n, "shape": list(shape), "dtype": str(dtype)} for n, (shape, dtype) in wanted.items()]
    if header.get("states") != given:
        raise OptionError("restore: its cache has another form: load the model with the kv_dtype= that it had then")
    found, at = dict[str, Array](), 0
    for name, (shape, dtype) in wanted.items():
        size = math.prod(shape) * dtype.itemsize
        if at + size > len(body):
            raise ModelFormatError("restore: the snapshot is too short")
        found[name] = np.frombuffer(body[at : at + size], dtype).reshape(shape)
        at += size
    if at != len(body):
        raise ModelFormatError("restore: the snapshot is too long")
    return found


def _generation(
    llm: LanguageModel,
    header: dict[str, Any],
    prompt: Sequence[int],
    constraint: Constraint | None,
    adapter: Sequence[str] | None,
) -> Generation:
    told, drawn = header["limits"], dict(header["sampling"])
    drawn["logit_bias"] = dict(drawn["logit_bias"])
    numbers, stops = (told["most"], told["fixed"], told["guesses"], *told["ends"]), told["stops"]
    if not all(type(n) is int and n >= 0 for n in numbers) or not all(isinstance(s, str) and s for s in stops):
        raise ValueError("limits")
    ends = frozenset(told["ends"])
    shifts = told["shifts"] is True
    most = told["most"] if shifts else min(told["most"], llm.context - len(prompt) + 1)  # of this context
    limits = Limits(most, ends, tuple(stops), shifts, told["fixed"], told["guesses"])
    form, told_more = None if constraint is None else constraint.copy(), header.get("logprobs") is not None
    return Generation(
        llm, prompt, limits, Chooser(Sampling(**drawn), form, told=told_more), llm.drafter, adapter, told_more
    )


def _logprobs(header: dict[str, Any], count: int) -> list[float] | None:
    """Those of the text's tokens, where it was asked for them."""
    given = header.get("logprobs")
    if given is not None and not (isinstance(given, list) and len(given) == count and set(map(type, given)) <= {float}):
        raise ModelFormatError("restore: the header is not of this format: logprobs")
    return given


def _adapter(header: dict[str, Any]) -> tuple[str, ...] | None:
    """The LoRA adapters of the text, None for all."""
    given = header.get("adapter")
    if given is None:
        return None
    if not isinstance(given, list) or len(given) > 1 or not all(isinstance(name, str) for name in given):
        raise ModelFormatError("restore: the header is not of this format: adapter")
    return tuple(given)


def _adapters(llm: LanguageModel, chosen: Sequence[str] | None) -> dict[str, list[Any]]:
    """Of each LoRA adapter of a text (None: of all) that is on: its scale, and by what its weights are known."""
    own = llm.model.adapters
    names = own if chosen is None else chosen
    return {name: [scale, own.digest(name)] for name, scale in own.items() if scale and name in names}


def _identity(path: Path) -> str:
    """By which a model is known: sizes, beginnings and ends of its files."""
    files = [path] if os.path.isfile(path) else sorted(path.glob("*.safetensors"))
    sha = hashlib.sha256()
    for file in files:
        size = file.stat().st_size
        sha.update(size.to_bytes(8, "little"))
        with open(open_regular(file), "rb") as opened:
            sha.update(opened.read(ENDS))
            opened.seek(max(size - ENDS, 0))
            sha.update(opened.read(ENDS))
    return sha.hexdigest()
