"""Find speech in a stream of sound, 32 ms at a time, with Silero VAD: its memory lies in the compiled graph.

usage: python examples/speech_stream.py [FILE.wav]

After `rlx fetch silero-vad`. The file is mono, 16 bits, 16,000 samples a second; without one it hums a vowel,
with pauses.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator

import numpy as np
from numpy.typing import NDArray
from wake_word import RATE, Floats, read_wav

import rlx

CHUNK, BEFORE = 512, 64  # samples of a step, and those of the step before that it looks at again
SPEECH = 0.5  # from this probability on


def probabilities(chunks: Iterable[Floats]) -> Iterator[float]:
    """How probable speech is in each chunk, as the chunks come."""
    model = rlx.load(rlx.demo.path("silero-vad"), dims={"batch": 1, "sequence": BEFORE + CHUNK}, device="cpu")
    model.states.bind("state", np.zeros((2, 1, 128), np.float32))  # from now on it is kept between runs ...
    model.states["state"].feed("stateN")  # ... and each run writes what the next one reads
    model.states.bind("sr", np.int64(RATE))
    sound = np.zeros((1, BEFORE + CHUNK), np.float32)
    for chunk in chunks:
        sound[0, :BEFORE] = sound[0, CHUNK:]
        sound[0, BEFORE:] = chunk
        yield float(model.run({"input": sound}, outputs=["output"])[0][0, 0])


def stretches(marks: Iterable[float]) -> Iterator[tuple[float, float]]:
    """Start and end of speech in seconds."""
    began = None
    step = -1
    for step, probability in enumerate(marks):
        if probability >= SPEECH and began is None:
            began = step
        elif probability < SPEECH and began is not None:
            yield began * CHUNK / RATE, step * CHUNK / RATE
            began = None
    if began is not None:
        yield began * CHUNK / RATE, (step + 1) * CHUNK / RATE


def hummed() -> NDArray[np.float32]:
    """Four seconds: a voice of 120 Hz through the resonances of an "a", at 1 to 2 s and 3 to 3.5 s."""
    time = np.arange(4 * RATE) / RATE
    pitch = 120 + 10 * np.sin(2 * np.pi * 3 * time)
    phase = 2 * np.pi * np.cumsum(pitch) / RATE
    voice = np.zeros_like(time)
    for n in range(1, 30):
        loud = sum(1 / (1 + ((n * 120 - at) / width) ** 2) for at, width in ((700, 80), (1200, 90), (2600, 120)))
        voice += loud / n**0.5 * np.sin(n * phase)
    spoken = ((time > 1) & (time < 2)) | ((time > 3) & (time < 3.5))
    noise = 0.001 * np.random.default_rng(0).standard_normal(len(time))
    sound = 0.2 * voice / np.abs(voice).max() * spoken * (1 + np.sin(2 * np.pi * 4 * time)) + noise
    return np.asarray(sound, np.float32)


def main() -> None:
    sound: Floats = read_wav(sys.argv[1]) / np.float32(32768) if len(sys.argv) > 1 else hummed()
    chunks = (sound[i : i + CHUNK] for i in range(0, len(sound) - CHUNK + 1, CHUNK))
    for start, end in stretches(probabilities(chunks)):
        print(f"speech from {start:.1f} to {end:.1f} s")


if __name__ == "__main__":
    try:
        main()
    except rlx.errors.NameNotFound as missing:  # a model is not there yet
        sys.exit(str(missing))
