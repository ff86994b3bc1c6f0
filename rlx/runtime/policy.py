"""Which devices may be chosen, and by what: the policy of a choice, from an argument or one variable."""

from __future__ import annotations

import os
from typing import Any

from rlx.backends import BACKENDS, BY_NAME, unknown_device
from rlx.backends.base import CAPABILITIES, Backend
from rlx.boundary import bounded_class
from rlx.errors import OptionError
from rlx.options import CompileOptions
from rlx.records import dataclass, names_of
from rlx.units import as_int

__all__ = ["OBJECTIVES", "VARIABLE", "DevicePolicy", "policy_of"]

PACES = ("now", "calibrated")
OBJECTIVES = ("latency", "throughput", "memory")
VARIABLE = "RLX_DEVICE_POLICY"


@bounded_class(OptionError)
@dataclass(frozen=True)
class DevicePolicy:
    """How `device="auto"` chooses. By default: among all devices, the one with the shortest predicted run.

    `only` allows those named alone, `deny` keeps some out. `prefer` is a chain: the first of them that can run the
    graph is taken whatever it costs, and the decision says which were passed over; after them comes the cheapest.
    `benchmark` compiles every candidate and times so many runs of each, once: the winner is kept. `objective`:
    "latency" (of one run, with its share of the compile), "throughput" (without what a run takes besides its kernels)
    or "memory" (the lowest peak). `expected_calls`: over how many runs a compile is spread. `split` allows a graph that
    no device can run as a whole to be cut into parts on several. `pace`: "now" (times follow the present speed of the
    processor, by a probe of some milliseconds) or "calibrated" (its speed when devices were calibrated: a choice is the
    same from day to day). `needs` are capabilities of which a device must have each: ("profile",), say.
    """

    only: tuple[str, ...] | None = None
    deny: tuple[str, ...] = ()
    prefer: tuple[str, ...] = ()
    benchmark: int = 0
    objective: str = "latency"
    expected_calls: int = 1000
    split: bool = False
    pace: str = "now"
    needs: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for name in ("only", "deny", "prefer", "needs"):
            value = getattr(self, name)
            if value is None and name == "only":
                continue
            given = (value,) if isinstance(value, str) else tuple(value)
            object.__setattr__(self, name, given)
            for device in given if name != "needs" else ():
                if device not in BACKENDS:
                    raise unknown_device(device, f"{name}=")
                if name != "deny" and device in BY_NAME:
                    raise OptionError(f"{name}={device!r}: it is never chosen; name it as the device to use it")
        for need in self.needs:
            if need not in CAPABILITIES:
                raise OptionError(f"needs={need!r}: unknown capability; known are {', '.join(CAPABILITIES)}")
        for name, least in (("benchmark", 0), ("expected_calls", 1)):
            number = as_int(getattr(self, name))
            if number is None or number < least:
                raise OptionError(f"{name}={getattr(self, name)!r}: expected an int >= {least}")
            object.__setattr__(self, name, number)
        for name, known in (("objective", OBJECTIVES), ("pace", PACES)):
            if getattr(self, name) not in known:
                raise OptionError(f"{name}={getattr(self, name)!r}: expected one of {', '.join(map(repr, known))}")
        if not isinstance(self.split, bool):
            raise OptionError(f"split={self.split!r}: expected True or False")

    def forbids(self, device: str) -> str:
        """Why the policy keeps a device out; "" when it doesn't."""
        if device in BY_NAME:
            return "it is never chosen: name it as the device to use it"
        if self.only is not None and device not in self.only:
            return f"not among only={', '.join(self.only)}"
        return "denied" if device in self.deny else ""

    def unfit(self, backend: Backend, options: CompileOptions) -> str:
        """Why a device that is here can't be chosen for any graph: what it lacks or ignores; "" when it can."""
        lacking = [need for need in self.needs if need not in backend.capabilities]
        if lacking:
            return f"it does not offer what is needed: {', '.join(lacking)}"
        ignored = backend.ignored(options)
        return f"it can't honour {ignored}" if ignored else ""

    @staticmethod
    def parse(text: str) -> DevicePolicy:
        """A policy from a text such as "only=cpu,xla; objective=throughput; benchmark=5"; `OptionError` for others."""
        known = names_of(DevicePolicy)
        given: dict[str, Any] = {}
        for part in filter(None, (p.strip() for p in text.split(";"))):
            name, equals, value = (s.strip() for s in part.partition("="))
            if name not in known or not equals:
                raise OptionError(f"device policy {part!r}: expected NAME=VALUE with one of {', '.join(known)}")
            if name in ("only", "deny", "prefer", "needs"):
                given[name] = tuple(filter(None, (s.strip() for s in value.split(","))))
            elif name in ("benchmark", "expected_calls"):
                if not value.isascii() or not value.isdigit():
                    raise OptionError(f"device policy {part!r}: expected a number")
                given[name] = int(value)
            elif name == "split":
                if value not in ("true", "false"):
                    raise OptionError(f"device policy {part!r}: expected true or false")
                given[name] = value == "true"
            else:
                given[name] = value
        return DevicePolicy(**given)


def policy_of(policy: DevicePolicy | str | None) -> DevicePolicy:
    """The policy given (a text is parsed), else that of the variable RLX_DEVICE_POLICY, else the default."""
    if isinstance(policy, DevicePolicy):
        return policy
    if policy is not None and not isinstance(policy, str):
        raise OptionError(f"policy: expected a DevicePolicy or a text, got {type(policy).__name__}")
    if policy is not None:
        return DevicePolicy.parse(policy)
    try:
        return DevicePolicy.parse(os.environ.get(VARIABLE, ""))
    except OptionError as error:
        raise OptionError(f"{VARIABLE}: {error}") from None
