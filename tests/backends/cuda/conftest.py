"""The tests of CUDA run on NVIDIA's device if there is one, else g++ compiles the same text for the processor."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from host_driver import HostDriver

from rlx.backends.cuda.device import driver as drivers
from rlx.errors import DeviceUnavailable


@pytest.fixture(scope="session")
def stand_in() -> Iterator[HostDriver]:
    """One for all tests of the process, since memory of it may be kept."""
    if not HostDriver.possible():
        pytest.skip("there is neither a device nor g++")
    with HostDriver() as host:
        yield host


@pytest.fixture(autouse=True, scope="module")
def device(request: pytest.FixtureRequest) -> Iterator[object]:
    """What kernels run on. Tests of other modules see no device where there is none."""
    found = drivers.find_driver()
    if not isinstance(found, DeviceUnavailable):
        yield found
        return
    host = request.getfixturevalue("stand_in")
    drivers.chosen.append(host)
    yield host
    drivers.chosen.remove(host)
