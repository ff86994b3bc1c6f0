"""The tests of CUDA run on NVIDIA's device if there is one, else g++ compiles the same text for the processor."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from host_driver import HostDriver

from rlx.backends.cuda.device import driver as drivers
from rlx.errors import DeviceUnavailable


@pytest.fixture(autouse=True, scope="module")
def device() -> Iterator[object]:
    """What kernels run on."""
    found = drivers.find_driver()
    if not isinstance(found, DeviceUnavailable):
        yield found
        return
    if not HostDriver.possible():
        pytest.skip("there is neither a device nor g++")
    with HostDriver() as host:
        drivers.chosen.append(host)
        yield host
        drivers.chosen.remove(host)
