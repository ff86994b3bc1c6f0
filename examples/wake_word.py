"""Find a word in a recording, from one example of it: the networks of a wake word engine turn sound into vectors.

usage: python examples/wake_word.py [WORD.wav RECORDING.wav]

After `rlx fetch wakeword-mel wakeword-embedding`. Files are mono, 16 bits, 16,000 samples a second; the word takes a
second or so. Without them it whistles a tune and hides it in noise.
"""

from __future__ import annotations

import sys
import tempfile
import wave
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

import rlx

RATE = 16_000
FRAMES, STEP = 76, 8  # frames of 10 ms that a vector stands for, and from one to the next
ALIKE = 0.6

Floats = NDArray[np.float32]


class Listener:
    """Vectors of sound: samples f32[n] -> f32[vectors, 96], one every 80 ms."""

    def __init__(self) -> None:
        self.mel = rlx.load(rlx.demo.path("wakeword-mel"), dims={"batch_size": 1}, device="cpu")
        self.embed = rlx.load(rlx.demo.path("wakeword-embedding"), device="cpu")

    def __call__(self, samples: Floats) -> Floats:
        (mel,) = self.mel.run([samples[None]])
        mel = mel[0, 0] / 10 + 2  # [frames, 32], as the second network was trained
        starts = range(0, len(mel) - FRAMES + 1, STEP)
        (vectors,) = self.embed.run([np.stack([mel[start : start + FRAMES, :, None] for start in starts])])
        found: Floats = vectors.reshape(len(starts), -1)
        return found


def likeness(word: Floats, recording: Floats) -> Floats:
    """The mean cosine of the word's vectors and the recording's, for each place where the word may begin."""
    usual = recording.mean(axis=0)  # what all of the recording has in common tells nothing
    word, recording = (x / np.linalg.norm(x, axis=1, keepdims=True) for x in (word - usual, recording - usual))
    places = range(len(recording) - len(word) + 1)
    return np.array([(recording[i : i + len(word)] * word).sum(axis=1).mean() for i in places])


def read_wav(path: str | Path) -> Floats:
    with wave.open(str(path), "rb") as file:
        if (file.getnchannels(), file.getsampwidth(), file.getframerate()) != (1, 2, RATE):
            sys.exit(f"{path}: expected mono, 16 bits, {RATE} samples a second")
        return np.frombuffer(file.readframes(file.getnframes()), np.int16).astype(np.float32)


def write_wav(path: Path, samples: NDArray[np.floating]) -> None:
    with wave.open(str(path), "wb") as file:
        file.setparams((1, 2, RATE, 0, "NONE", ""))
        file.writeframes(np.clip(samples * 32767, -32768, 32767).astype(np.int16).tobytes())


def whistled(folder: Path) -> tuple[Path, Path]:
    """A tune of four tones, and five seconds of noise with another tune at 1 s and this one at 3 s."""

    def tune(tones: list[int]) -> NDArray[np.floating]:
        pitch = np.repeat(tones, RATE // 4)
        return 0.3 * np.sin(2 * np.pi * np.cumsum(pitch) / RATE)

    noise = 0.003 * np.random.default_rng(0).standard_normal(5 * RATE)
    noise[RATE : 2 * RATE] += tune([500, 1900, 700, 2600])
    noise[3 * RATE : 4 * RATE] += tune([900, 1200, 1600, 800])
    write_wav(folder / "word.wav", tune([900, 1200, 1600, 800]))
    write_wav(folder / "recording.wav", noise)
    return folder / "word.wav", folder / "recording.wav"


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        word, recording = (read_wav(p) for p in (sys.argv[1:] if len(sys.argv) == 3 else whistled(Path(folder))))
    listener = Listener()
    found = likeness(listener(word), listener(recording))
    best = int(np.argmax(found))
    print(f"likeness {found[best]:.2f} at {best * STEP / 100:.1f} s: {'heard' if found[best] > ALIKE else 'not heard'}")


if __name__ == "__main__":
    try:
        main()
    except rlx.errors.NameNotFound as missing:  # a model is not there yet
        sys.exit(str(missing))
