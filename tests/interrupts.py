"""Ctrl-C in the middle of a run."""

from __future__ import annotations

import os
import signal
import threading
import time

import numpy as np
from numpy.typing import NDArray


def interrupt_at(count: NDArray[np.int64]) -> threading.Thread:
    """A thread, not begun, that sends SIGINT once the run has come to its kernels, which count in `count[0]`."""

    def interrupt() -> None:
        while count[0] == 0:
            time.sleep(1e-3)
        os.kill(os.getpid(), signal.SIGINT)

    return threading.Thread(target=interrupt)
