"""Mutates the files of language models and tries each: tokenisers, chat templates, weights, configurations.

Tokenizer.json, the metadata of GGUF files and chat templates are loaded, encode, decode and render; of GGUF files,
safetensors, their index, config.json and the files that say how vectors are pooled (mutated_models.py) a graph is made.

`python tools/fuzz_language_models.py --cases 50000`: every case ends in results or in an error of `rlx.errors`. What
else happens is printed with the case's number: another exception, a crash, more than `--seconds` of processor time,
more than `--memory` MiB beyond what the process had at its start. `--only NUMBER` makes that case again and lets its
exception through.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import resource
import signal
import struct
import subprocess
import sys
import tempfile
import warnings
from collections import Counter
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

import mutated_models

from rlx.errors import RlxError
from rlx.models.chat import render
from rlx.models.tokenizer import Tokenizer, load

ROOT = Path(__file__).parents[1]
KINDS = ("byte_level", "sentence_pieces", "unigram", "word_pieces")
TEXTS = ["", "Hello world", "<s>x</s><|im_end|> é 日本 🙂\u0000\n", "aaaa " * 300, "\ud800▁Ġ<0x0A>[CLS]"]
NUMBERS = (-(1 << 63), -(1 << 31), -1, 0, 1, 2, 255, 256, 65536, (1 << 31) - 1, 1 << 32, (1 << 64) - 1, 1e300, -0.5)
STRINGS = ("", " ", "▁", "a", "##", "\x00", "(a+)+b", "x" * 5000, "🙂", "<s>", "no-such", "Sequence", "BPE", "\\")
TEMPLATE = (
    "{{ bos_token }}{% set n = namespace(x=messages[0]) %}{% for m in messages %}"
    "{% if loop.first and m.role == 'user' %}"
    "[{{ m.content | trim }}]{% else %}{{ m.content * 2 }}{{ '%5d' | format(loop.index) }}{% endif %}{% endfor %}"
    "{% if tools %}{{ tools | tojson(indent=2) }}{% endif %}{% macro f(a) %}{{ a }}{% endmacro %}{{ f('x') }}"
    "{{ range(20) | list | join(',') }}{{ 'abc'.replace('b', 'xx').center(30) }}{{ raise_exception('no') if false }}"
)
TOKENS = (
    "{{", "}}", "{%", "%}", "for i in range(99999)", "endfor", "* 999999", "** 99", ".center(10**9)", "| join",
    "f(f(1))", "set n.x = n.x ~ n.x", "'x'", "(", ")", "[0]", "loop", "messages", "{#", "~", "+ 1",
    ".__class__", "| tojson",
)  # fmt: skip
MESSAGES = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yes"}]


@cache
def trained() -> Any:
    """The small tokenisers of the tests."""
    sys.path[:0] = [str(ROOT / "tests" / "models" / "tokenizer")]
    return import_module("trained")


def cut(text: str, rng: random.Random, most: int = 60) -> str:
    return text if len(text) < most else text[: rng.randrange(most)]


def mutate(value: Any, rng: random.Random) -> Any:
    """Changes one place in a tree of JSON."""
    if isinstance(value, dict) and value and rng.random() < 0.92:
        key = rng.choice(list(value))
        if rng.random() < 0.1:
            return {k: v for k, v in value.items() if k != key}
        return {**value, key: mutate(value[key], rng)}
    if isinstance(value, list) and value and rng.random() < 0.92:
        at, kind = rng.randrange(len(value)), rng.random()
        if kind < 0.1:
            return value[:at] + value[at + 1 :]
        if kind < 0.2:
            return value[:at] + [value[at]] * rng.choice((2, 3, 50)) + value[at:]
        return [*value[:at], mutate(value[at], rng), *value[at + 1 :]]
    return like(value, rng) if rng.random() < 0.8 else rng.choice([*NUMBERS, *STRINGS, None, [], {}, [value]])


def like(value: Any, rng: random.Random) -> Any:
    """Another value of the same type."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, int):
        return rng.choice([value + 1, value - 1, 0, 1, 2, 3, 7, 300, *NUMBERS[:-2]])
    if isinstance(value, float):
        return rng.choice([-value, value * 1000, 0.0, 1e300, -1e-300])
    if isinstance(value, str):
        at = rng.randrange(len(value) + 1)
        return rng.choice([value[:at], value[:at] + rng.choice(STRINGS) + value[at:], value * 2, rng.choice(STRINGS)])
    return rng.choice([value, [], {}, None])


def flipped(data: bytes, rng: random.Random) -> bytes:
    changed = bytearray(data)
    for _ in range(rng.randrange(1, 9)):
        changed[rng.randrange(len(changed))] = rng.choice((0, 1, 127, 128, 255, rng.randrange(256)))
    return bytes(changed[: rng.randrange(len(changed))] if rng.random() < 0.1 else changed)


@cache
def library_json(kind: str) -> Any:
    return json.loads(trained().trained(kind).to_str())


@cache
def gguf_bytes(kind: str) -> bytes:
    """A GGUF file of nothing but metadata."""

    def string(text: str) -> bytes:
        return struct.pack("<Q", len(text.encode())) + text.encode()

    def value(x: Any) -> bytes:
        if isinstance(x, bool):
            return struct.pack("<I?", 7, x)
        if isinstance(x, int):
            return struct.pack("<Ii", 5, x)
        if isinstance(x, str):
            return struct.pack("<I", 8) + string(x)
        if isinstance(x[0], str):
            return struct.pack("<IIQ", 9, 8, len(x)) + b"".join(map(string, x))
        code, kind = ("i", 5) if isinstance(x[0], int) else ("f", 6)
        return struct.pack(f"<IIQ{len(x)}{code}", 9, kind, len(x), *x)

    found = {**trained().metadata(kind), "tokenizer.chat_template": TEMPLATE}
    pairs = b"".join(string(k) + value(v) for k, v in found.items())
    return b"GGUF" + struct.pack("<IQQ", 3, 0, len(found)) + pairs


def use(tokenizer: Tokenizer) -> None:
    """Everything that is done with a tokenizer."""
    for text in TEXTS:
        for special in (False, True):
            ids = tokenizer.encode(text, special, ends=True)
            if tokenizer.decode(ids, special=special) != "".join(map(tokenizer.decoder(special=special).push, ids)):
                decoder = tokenizer.decoder(special=special)
                parts = [*map(decoder.push, ids), decoder.finish()]
                assert "".join(parts) == tokenizer.decode(ids, special=special)
    if tokenizer.chat_templates:
        tokenizer.encode_chat(MESSAGES)


def attempt(seed: int, number: int, folder: Path) -> str:
    """What becomes of a case: "ran" or "refused"."""
    rng = random.Random(f"{seed} {number}")
    kind, what = rng.choice(KINDS), rng.randrange(8)
    try:
        if what > 3:
            mutated_models.attempt(rng, folder, mutate, flipped)
        elif what == 0:
            template = TEMPLATE
            for _ in range(rng.randrange(1, 4)):
                at = rng.randrange(len(template))
                template = template[:at] + rng.choice(TOKENS) + template[at + rng.choice((0, 0, 1, 9)) :]
            render(template, {"messages": MESSAGES, "bos_token": "<s>", "tools": [{"name": "f"}]})
        elif what == 1:
            found = library_json(kind)
            for _ in range(rng.randrange(1, 4)):
                found = mutate(found, rng)
            data = json.dumps(found).encode("utf-8", "surrogatepass")
            (folder / "tokenizer.json").write_bytes(flipped(data, rng) if rng.random() < 0.2 else data)
            use(load(folder))
        elif what == 2:
            found = {**trained().metadata(kind), "tokenizer.chat_template": TEMPLATE}
            for _ in range(rng.randrange(1, 4)):
                found = mutate(found, rng)
            use(load(found if isinstance(found, dict) else {}))
        else:
            (folder / "x.gguf").write_bytes(flipped(gguf_bytes(kind), rng))
            use(load(folder / "x.gguf"))
    except RlxError:
        return "refused"
    return "ran"


def work(args: argparse.Namespace) -> None:
    """The process that tries cases: a line with its number before, one with what became of it after."""
    for kind in KINDS:
        library_json(kind), gguf_bytes(kind), trained().metadata(kind)
    for name in (*mutated_models.DECODERS, *mutated_models.ENCODERS):
        for gguf in (False, True):
            mutated_models.files_of(name, gguf)
    with open("/proc/self/statm") as file:
        now = int(file.read().split()[0]) * resource.getpagesize()
    limit = now + (args.memory << 20)
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    warnings.simplefilter("ignore")
    with tempfile.TemporaryDirectory() as folder:
        for number in range(args.first, args.cases):
            print(number, flush=True)
            signal.setitimer(signal.ITIMER_PROF, args.seconds)
            signal.alarm(20 * args.seconds)  # where it waits for something
            try:
                outcome = attempt(args.seed, number, Path(folder))
            except Exception as error:  # noqa: BLE001 - this is what is looked for
                outcome = f"FAULT {type(error).__name__}: {error}"[:300].replace("\n", " ")
            signal.setitimer(signal.ITIMER_PROF, 0)
            signal.alarm(0)
            print(number, outcome, flush=True)


def watch(args: argparse.Namespace) -> Counter[str]:
    """Runs the process again and again, past the cases that end it."""
    counts: Counter[str] = Counter()
    first = args.first
    while first < args.cases:
        command = [
            sys.executable,
            __file__,
            "--work",
            f"--first={first}",
            f"--cases={args.cases}",
            f"--seed={args.seed}",
        ]
        command += [f"--seconds={args.seconds}", f"--memory={args.memory}"]
        child = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
        begun = first - 1
        for line in child.stdout or ():
            number, _, outcome = line.strip().partition(" ")
            begun = int(number)
            if outcome:
                counts[outcome.split()[0]] += 1
                if outcome.startswith("FAULT"):
                    print(number, outcome, flush=True)
        if child.wait() != 0:
            counts["FAULT"] += 1
            print(begun, f"FAULT: the process ended with {child.returncode} (-27: too slow)", flush=True)
            first = begun + 1
        else:
            break
    return counts


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=1000, help="the number of the last case, plus one")
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--seconds", type=int, default=30, help="of processor time that a case may take")
    parser.add_argument("--memory", type=int, default=512, help="MiB that a case may take")
    parser.add_argument("--only", type=int, help="this case alone, in this process")
    parser.add_argument("--work", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.only is not None:
        with tempfile.TemporaryDirectory() as folder:
            print(attempt(args.seed, args.only, Path(folder)))
        return 0
    if args.work:
        work(args)
        return 0
    counts = watch(args)
    print(", ".join(f"{count} {name}" for name, count in sorted(counts.items())))
    return 1 if counts["FAULT"] else 0


if __name__ == "__main__":
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    sys.exit(main())
