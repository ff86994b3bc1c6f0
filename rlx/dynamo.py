"""`torch.compile(module, backend="rlx")`: graphs that TorchDynamo captures, through PyTorch's exporter to ONNX.

An entry point (group torch_dynamo_backends) names `backend`, so that nothing needs to be imported first. For inference:
a graph whose results need gradients is refused.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rlx.errors import OptionError
from rlx.runtime.compiled import CompiledGraph
from rlx.runtime.session import Session

__all__ = ["backend"]

SIZES = 32  # compiles of one graph that are kept, the latest used


def backend(
    module: Any, example_inputs: Sequence[Any], *, options: Mapping[str, Any] | None = None
) -> Callable[..., Any]:
    """The function that TorchDynamo calls instead of a captured graph; `options` are those of `rlx.compile`, the device
    the CPU unless they name another.

    Weights are constants of what is compiled. It is compiled when it is first called, and again for other sizes, and
    where a weight was changed in place.
    """
    return _Captured(module, Session(**{"device": "cpu", **(options or {})}))


class _Captured:
    """A captured graph, and what was compiled of it."""

    def __init__(self, module: Any, session: Session) -> None:
        self.module = module
        self.session = session
        # with the weights that it has as constants: while they live, their ids are nobody else's
        self.made: OrderedDict[tuple[Any, ...], tuple[CompiledGraph, tuple[Any, ...]]] = OrderedDict()

    def __call__(self, *arguments: Any) -> list[Any]:
        import torch

        tensors = [a for a in arguments if isinstance(a, torch.Tensor)]
        if torch.is_grad_enabled() and any(t.requires_grad for t in tensors):
            raise OptionError('backend="rlx" computes no gradients: call the compiled module under torch.no_grad()')
        elsewhere = next((t for t in tensors if not t.is_cpu), None)
        if elsewhere is not None:
            raise OptionError(f'backend="rlx" takes tensors on the CPU, got one on {elsewhere.device}')
        key = tuple(_signature(torch, a) for a in arguments)
        if key not in self.made:
            weights = tuple(a for a in arguments if not _is_input(torch, a))
            self.made[key] = self.compiled(torch, arguments), weights
            while len(self.made) > SIZES:
                self.made.popitem(last=False)
        self.made.move_to_end(key)
        model, _ = self.made[key]
        given = [a.detach().contiguous() for a in arguments if _is_input(torch, a)]
        return [torch.from_dlpack(y) for y in model.run(given)]

    def compiled(self, torch: Any, arguments: Sequence[Any]) -> CompiledGraph:
        """The graph for these sizes, with weights and numbers as they are now."""
        graph = self.module

        class Bound(torch.nn.Module):  # type: ignore[misc]
            """The graph as a module of its tensors that change from call to call."""

            def __init__(self) -> None:
                super().__init__()
                self.graph = graph
                for i, value in enumerate(arguments):
                    if isinstance(value, torch.nn.Parameter):
                        self.register_buffer(f"fixed{i}", value.detach())

            def forward(self, *inputs: Any) -> Any:
                rest = iter(inputs)
                return self.graph(
                    *(
                        next(rest) if _is_input(torch, a) else getattr(self, f"fixed{i}", a)
                        for i, a in enumerate(arguments)
                    )
                )

        inputs = tuple(a for a in arguments if _is_input(torch, a))
        return self.session.load(Bound().eval(), example_inputs=inputs)


def _is_input(torch: Any, value: Any) -> bool:
    """Whether an argument is data: no weight and no number."""
    return isinstance(value, torch.Tensor) and not isinstance(value, torch.nn.Parameter)


def _signature(torch: Any, value: Any) -> Any:
    """What a compile depends on: the type of data, a weight and how often it was written to, a number."""
    if _is_input(torch, value):
        return tuple(value.shape), value.dtype
    return (id(value), value._version) if isinstance(value, torch.Tensor) else int(value)
