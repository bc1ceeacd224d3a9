"""Detect behaviour of a model that `torch.export` would lose.

Export traces a forward, and the backward of the graph follows by differentiation. Silently lost
would be the backward of an autograd Function, hooks that may change gradients, the replacement of a
buffer by another tensor, and the seeding of a generator. This file detects all four while a model
is exported.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Self

from torch import Tensor, nn
from torch.autograd import Function
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from whale_train.models.export.gradcheck import is_derived
from whale_train.models.loss_module import MODEL_PREFIX
from whale_train.models.seeded_draws import OwnSeed

# The module in which torch makes a Function for the backward of a custom operation. Such a backward
# is not lost, because the graph has the operation.
_OF_CUSTOM_OPERATIONS = "torch._library.autograd"


class Watch:
    """Observer of a forward: autograd Functions, hooks, replaced buffers and seeded generators."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._functions: dict[type[Function], None] = {}
        self._seen = _Seen()
        self._buffers: dict[str, Tensor] = {}
        self._replaced = ""

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Observe the module inside of the context."""
        handles = (
            self._module.register_forward_pre_hook(self._remember),
            self._module.register_forward_hook(self._look),
        )
        try:
            with self._seen:
                yield
        finally:
            self._buffers = {}
            for handle in handles:
                handle.remove()

    @property
    def draws(self) -> str:
        """Return a description of a generator that the forward draws from and seeds or holds, or
        ''."""
        return "a generator that its forward seeds or holds" if self._seen.draws else ""

    def lost(self, run: Callable[[], Any]) -> str:
        """Return a description of the part of the module that an export loses, or '' where it loses
        nothing.

        `run` calls the module. It is called once for each autograd Function that the forward used,
        to record the arguments of the Function.
        """
        hooked = _hooked(self._module)
        if hooked:
            return hooked
        if self._seen.hooks:
            return "the hook on a gradient that its forward registers"
        if self.draws:
            return f"the state of {self.draws}"
        if self._replaced:
            return f"the tensor that its forward puts in the place of buffer {self._replaced}"
        for function in self._functions:
            if not is_derived(function, run):
                return f"the backward of the autograd function {function.__qualname__}"
        return ""

    def _remember(self, module: nn.Module, args: Any) -> None:
        """Note the buffers of the module before its forward."""
        self._buffers = dict(module.named_buffers())

    def _look(self, module: nn.Module, args: Any, output: Any) -> None:
        """Note the Functions that computed `output`, and a buffer that the forward replaced."""
        for path, buffer in module.named_buffers():
            if self._buffers.get(path) is not buffer:
                self._replaced = self._replaced or path.removeprefix(MODEL_PREFIX)
        nodes = [x.grad_fn for x in tree_leaves(output) if isinstance(x, Tensor)]
        visited = set()
        while nodes:
            node = nodes.pop()
            if node is None or node in visited:
                continue
            visited.add(node)
            function = getattr(node, "_forward_cls", None)
            if function is not None and function.__module__ != _OF_CUSTOM_OPERATIONS:
                self._functions.setdefault(function)
            nodes += [next_node for next_node, _ in node.next_functions]


class _Seen(TorchFunctionMode):
    """Function mode that records two actions of a forward.

    hooks: whether it registers hooks on the gradients of tensors that it makes.
    draws: whether it draws from a generator that it seeds or holds.
    """

    def __init__(self) -> None:
        super().__init__()
        self.hooks, self.draws = False, False

    def __enter__(self) -> Self:
        self._seed = OwnSeed()
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if func in (Tensor.register_hook, Tensor.register_post_accumulate_grad_hook):
            self.hooks = True
        self.draws = self.draws or self._seed.is_seeded(kwargs or {})
        return func(*args, **(kwargs or {}))


def _hooked(module: nn.Module) -> str:
    """Return a description of the first module or parameter with a hook in its backward, or ''."""
    for path, submodule in module.named_modules():
        if submodule._backward_hooks or submodule._backward_pre_hooks:
            return f"the backward hook of module {path.removeprefix(MODEL_PREFIX)}"
    for path, parameter in module.named_parameters():
        if parameter._backward_hooks or parameter._post_accumulate_grad_hooks:
            return f"the hook on the gradient of parameter {path.removeprefix(MODEL_PREFIX)}"
    return ""
