"""Compare training on a whole batch with training on its parts, in numbers on the model itself.

This is for models whose graph does not tell whether a batch may be split
(`strategies/independence`), and for models without a graph. A batch of a few samples is run whole,
and in two unequal parts combined as the runtime combines them. Losses, gradients and buffers must
be equal. The comparison is repeated on different samples, so that state which changes between calls
is detected. In every other round gradients are scaled, so that a hook or a backward that is not
linear in them is detected. Operations that draw random numbers return fixed numbers instead. A
number that the forward reads from a tensor must not depend on several samples, because the batch at
hand shows only one branch.
"""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Any, Literal

import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.modules.batchnorm import _BatchNorm
from torch.overrides import TorchFunctionMode

from whale_train.errors import RequestError
from whale_train.models.batch_parts.dropout_off import DropoutOff
from whale_train.models.batch_parts.fixed_draws import FixedDraws
from whale_train.models.batch_parts.target_means import (
    RecomputedLosses,
    run_backward,
    scaled,
    target_mean,
)
from whale_train.models.build import build_model, load_class
from whale_train.models.export.read_numbers import ReadNumbers, made_of_several
from whale_train.models.loss_module import LossModule
from whale_train.models.options import ModelOptions
from whale_train.models.profile.counters import AHEAD, Counter, counters
from whale_train.models.profile.python_draws import PythonDraws
from whale_train.models.seeded_draws import private_seed, seed_privately

Arrays = Mapping[str, NDArray[Any]]
TensorBatch = dict[str, Tensor]

# Generous bounds on the change of a sum of fp32 products in another order: relative to the loss, to
# the parameter's gradient, and to the gradient of all parameters.
LOSS_TOLERANCE = 2e-5
GRADIENT_TOLERANCE = 5e-4
FLOOR = 1e-5
# Factor of the gradients in every other round: any number far from 1 would do.
SCALE = 1024.0


# Remedy for a model that needs all samples of a batch at once.
TOGETHER = "use strategy=single, or a strategy of one copy and one micro-batch"


@dataclass(frozen=True)
class Comparison:
    """Outcome of comparing a batch with its parts.

    different: the first difference, with both numbers; '' where everything is equal.
    remedy: what the user can do; '' where everything is equal.
    parts: number of samples of each part.
    loss: loss of the first whole batch; NaN where it was not computed.
    of_parts: loss of the first batch computed from its parts; NaN where it was not computed.
    seconds: wall-clock seconds that the comparison took.
    written: path of a parameter that the forward changes; '' for none.
    unlike: path of a module or parameter that some parts of a batch reached and other parts did
        not; '' for none.
    unlike_norm: path of such a batch norm; '' for none.
    """

    different: str
    remedy: str
    parts: tuple[int, ...]
    loss: float
    of_parts: float
    seconds: float
    written: str = ""
    unlike: str = ""
    unlike_norm: str = ""


@dataclass
class _Run:
    """Results of running every round, on whole batches or on their parts.

    losses: loss of each round.
    gradients: gradients of each round, by parameter path.
    buffers: the result of `_buffers` after the last round, by path.
    """

    losses: list[float] = field(default_factory=list)
    gradients: list[dict[str, Tensor]] = field(default_factory=list)
    buffers: dict[str, Tensor] = field(default_factory=dict)


class _Different(Exception):
    """The first difference between a batch and its parts. The message describes it."""


def compare_parts(
    options: ModelOptions,
    batches: Sequence[Arrays],
    parts: tuple[int, ...],
    *,
    one_copy: bool,
    seed: int,
) -> Comparison:
    """Compare `batches` with their parts, one batch after another, and return the outcome.

    batches: batches of `sum(parts)` samples.
    parts: number of samples of each part.
    one_copy: whether the parts are micro-batches of one replica of the model, which share its
        state; otherwise each part belongs to its own replica.
    seed: the seed of the model's weights.

    Raises ConfigError for a model that cannot be built.
    """
    started = time.perf_counter()
    loss_over = options.loss_over or "mean"
    check = _Check(options, batches, parts, one_copy=one_copy, seed=seed)
    batch_run, parts_run = _Run(), _Run()
    different, remedy = "", ""
    try:
        with private_seed():
            batch_run = check.whole()
            parts_run = check.parts(loss_over)
            _compare(batch_run, parts_run)
            check.refuse_branches()
    except _Different as difference:
        different = str(difference)
        remedy = TOGETHER
        if options.loss_over is None and check.is_sum(batch_run):
            remedy = "its parts add up: use model.loss_over=sum"
    losses = [x.losses[0] if x.losses else float("nan") for x in (batch_run, parts_run)]
    seconds = time.perf_counter() - started
    paths = (check.written, check.unlike, check.unlike_norm)
    return Comparison(different, remedy, parts, losses[0], losses[1], seconds, *paths)


class _Check:
    """The runs that are compared. Each run builds the model anew from the same seed."""

    def __init__(
        self,
        options: ModelOptions,
        batches: Sequence[Arrays],
        parts: tuple[int, ...],
        *,
        one_copy: bool,
        seed: int,
    ) -> None:
        self._options, self._batches, self._parts = options, batches, parts
        self._one_copy, self._seed = one_copy, seed
        load_class(options)  # so that a generator of its module is rewound too
        self._generators = PythonDraws()
        self.written = ""  # a parameter that the forward changes
        self.unlike, self.unlike_norm = "", ""  # reached by some parts, and not by others
        self._means = 0  # the number of losses in one call that are means over targets
        self._counters: list[Counter] = []
        self._norms: set[str] = set()
        # Index of each round's batch, and the calls that counters are set to (None: unchanged).
        self._rounds: list[tuple[int, int | None]] = [(i, None) for i in range(len(batches))]

    def whole(self) -> _Run:
        """Run every round on whole batches.

        Sets `written`, and the counters by which later rounds advance the model.
        """
        module, run = self._built(), _Run()
        first = self._batch(0, 0, sum(self._parts))
        self._counters = counters(module, lambda: self._forward(module, first, _Means()))
        self._rounds += [(0, calls) for calls in AHEAD if self._counters]
        module = self._built()
        before = _sums(module)
        for number in range(len(self._rounds)):
            means = _Means()
            loss = self._step(module, self._batch(number, 0, sum(self._parts)), means, 1.0, number)
            self._means = len(means.divisors)
            run.losses.append(loss)
            run.gradients.append(_gradients(module))
        run.buffers = _buffers(module)
        changed = (path for path, x in before.items() if not torch.equal(run.buffers[path], x))
        self.written = next(changed, "")
        return run

    def parts(self, loss_over: Literal["mean", "sum"]) -> _Run:
        """Run every round on parts, combined as the runtime combines them.

        `loss_over` says whether the loss of a batch is the mean or the sum of its samples' losses.
        Sets `unlike` and `unlike_norm`. Raises _Different where replicas have different buffers in
        the end.
        """
        modules = self._copies()
        divisors = self._divisors() if self._means else None
        run, total = _Run(), sum(self._parts)
        for number in range(len(self._rounds)):
            loss, start, gradients = 0.0, 0, dict[str, Tensor]()
            reached: list[list[str]] = []
            for part, size in enumerate(self._parts):
                batch = self._batch(number, start, start + size)
                weight = size / total if loss_over == "mean" else 1.0
                batch_divisors = None if divisors is None else _added([x[number] for x in divisors])
                with _modules_run(modules[part]) as ran:
                    loss += self._step(
                        modules[part], batch, _Means(batch_divisors, weight), weight, number
                    )
                start += size
                if not self._one_copy or part == len(self._parts) - 1:
                    own = _gradients(modules[part])
                    reached.append([*ran, *own])
                    for path, gradient in own.items():
                        gradients[path] = gradients.get(path, 0.0) + gradient
            self.unlike = self.unlike or _first_unlike(reached)
            norms = [[path for path in paths if path in self._norms] for paths in reached]
            self.unlike_norm = self.unlike_norm or _first_unlike(norms)
            run.losses.append(loss)
            run.gradients.append(gradients)
        for module in modules:
            buffers = _buffers(module)
            for path, value in buffers.items():
                first_value = run.buffers.setdefault(path, value)
                if first_value.shape != value.shape or not torch.allclose(
                    first_value, value, 1e-4, 1e-6
                ):
                    raise _Different(f"copies on other samples keep another {_kind(module, path)}")
        return run

    def is_sum(self, batch_run: _Run) -> bool:
        """Return whether the losses of the parts add up to the loss of the batch.

        batch_run: the run on whole batches.
        """
        if self._means or not batch_run.gradients:
            return False
        try:
            _compare(batch_run, self.parts("sum"))
        except _Different:
            return False
        return True

    def refuse_branches(self) -> None:
        """Raise _Different where the forward reads a number that depends on several samples."""
        batch = self._batch(0, 0, sum(self._parts))

        def reads(batch: TensorBatch) -> ReadNumbers:
            numbers, module = ReadNumbers(), self._built()
            with ExitStack() as stack:
                for mode in (DropoutOff(keeps_seeded=True), FixedDraws(), numbers):
                    stack.enter_context(mode)
                module(**batch)
            return numbers

        where = made_of_several(reads, batch)
        if where:
            raise _Different(f"it reads a number made of several samples: {where}")

    def _built(self) -> LossModule:
        """Return the model built anew from the seed, with batch norms reduced to their affine
        maps."""
        torch.manual_seed(self._seed)
        module = LossModule(build_model(self._options), self._options)
        for owner in list(module.modules()):
            for name, child in owner.named_children():
                if isinstance(child, _BatchNorm):  # the runtime's own, over the whole batch
                    owner.register_module(name, _Affine(child))
        parts = module.named_modules()
        self._norms = {x.removeprefix("model.") for x, part in parts if isinstance(part, _Affine)}
        return module

    def _copies(self) -> list[LossModule]:
        """Return the model of each part. With `one_copy` it is the same model for all parts."""
        if self._one_copy:
            return [self._built()] * len(self._parts)
        return [self._built() for _ in self._parts]

    def _divisors(self) -> list[list[list[Tensor]]]:
        """Return the divisors of all means over targets that a forward calls, by part and round."""
        divisors: list[list[list[Tensor]]] = []
        modules, start = self._copies(), 0
        for part, size in enumerate(self._parts):
            rounds = []
            for number in range(len(self._rounds)):
                means = _Means()
                batch = self._batch(number, start, start + size)
                self._advance(modules[part], number)
                self._forward(modules[part], batch, means)
                rounds.append(means.divisors)
            divisors.append(rounds)
            start += size
        return divisors

    def _advance(self, module: LossModule, number: int) -> None:
        """Set the counters of `module` to their values at the beginning of round `number`."""
        calls = self._rounds[number][1]
        if calls is not None:
            for counter in self._counters:
                counter.set(module, calls)

    def _batch(self, number: int, start: int, stop: int) -> TensorBatch:
        """Return samples `start` to `stop` - 1 of round `number`'s batch, by field name, on the
        CPU."""
        arrays = self._batches[self._rounds[number][0]].items()
        return {name: torch.from_numpy(array[start:stop].copy()) for name, array in arrays}

    def _step(
        self, module: LossModule, batch: TensorBatch, means: "_Means", weight: float, number: int
    ) -> float:
        """Accumulate the gradients of `weight` times the loss in `module`, and return that product.

        The gradients of odd rounds are multiplied by SCALE; the returned loss is not.
        """
        self._advance(module, number)
        loss = self._forward(module, batch, means) * weight
        scale = SCALE if number % 2 else 1.0
        with DropoutOff(keeps_seeded=True), FixedDraws(), means.made_again.in_backward():
            run_backward(loss, torch.full_like(loss, scale))
        return float(loss.detach())

    def _forward(self, module: LossModule, batch: TensorBatch, means: "_Means") -> Tensor:
        """Return the scalar loss of `batch`, with dropout off and random draws fixed.

        RequestErrors of the model are raised unchanged. Raises _Different where the forward fails
        in another way, and where gradients are enabled and the loss depends on no parameter.
        """
        self._generators.rewind()
        seed_privately(self._seed)
        size = len(next(iter(batch.values())))
        try:
            with DropoutOff(keeps_seeded=True), FixedDraws(), means:
                loss: Tensor = module(**batch)
        except RequestError:
            raise
        except Exception as error:
            said = " ".join(f"{type(error).__name__}: {error}".split())
            raise _Different(f"it fails on {size} samples ({said})") from error
        if not loss.requires_grad and torch.is_grad_enabled():
            raise _Different(f"on {size} samples its loss depends on no parameter")
        return loss


class _Affine(nn.Module):
    """Batch norm without its statistics: the affine map of its weight and bias.

    The runtime computes batch norms over the whole batch itself, so that only the rest of the model
    must be compared. The module holds the weight and bias of `original`, and its forward changes
    neither.
    """

    def __init__(self, original: _BatchNorm) -> None:
        super().__init__()
        self.weight, self.bias = original.weight, original.bias

    def forward(self, x: Tensor) -> Tensor:
        """Return `x`, [batch, channels, ...], scaled and shifted per channel."""
        count = x.shape[1]
        zeros, ones = x.new_zeros(count), x.new_ones(count)
        return functional.batch_norm(x, zeros, ones, self.weight, self.bias, training=False)


class _Means(TorchFunctionMode):
    """Function mode that records the divisors of means over targets, in the order of the calls.

    batch_divisors: the divisors of the whole batch. With these, every mean becomes a sum over the
        part's targets divided by the batch's divisor and by `weight`, as in the runtime. None
        leaves the means unchanged.
    weight: the factor by which the caller multiplies the part's loss.
    """

    def __init__(self, batch_divisors: Sequence[Tensor] | None = None, weight: float = 1.0) -> None:
        super().__init__()
        self.divisors: list[Tensor] = []
        self.made_again = RecomputedLosses()
        self._whole, self._weight = batch_divisors, weight

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        call = target_mean(func, args, kwargs)
        if call is None:
            return func(*args, **kwargs)
        with torch.no_grad():
            self.divisors.append(call.divisor())
        if self._whole is None:
            return func(*args, **kwargs)
        if len(self.divisors) > len(self._whole):
            raise _Different("a part calls more losses than the batch it is of")
        factor = 1.0 / (self._whole[len(self.divisors) - 1] * self._weight)
        total = call.sum()
        self.made_again.note(call, total, factor)
        return scaled(call, total, factor)


@contextmanager
def _modules_run(module: nn.Module) -> Iterator[list[str]]:
    """Yield a list to which the path of every module that runs in the context is added, in order.

    Only modules with parameters of their own and batch norms are included.
    """
    ran: list[str] = []

    def noting(path: str) -> Callable[..., None]:
        return lambda *_: ran.append(path)

    handles = [
        part.register_forward_pre_hook(noting(path.removeprefix("model.")))
        for path, part in module.named_modules()
        if next(part.parameters(recurse=False), None) is not None or isinstance(part, _Affine)
    ]
    try:
        yield ran
    finally:
        for handle in handles:
            handle.remove()


def _first_unlike(reached: Sequence[Sequence[str]]) -> str:
    """Return the first entry by which one of the lists differs from the first list, or ''."""
    for other in reached[1:]:
        for one, two in zip_longest(reached[0], other, fillvalue=""):
            if one != two:
                return one or two
    return ""


def _added(divisors: Sequence[Sequence[Tensor]]) -> list[Tensor]:
    """Return, for each mean over targets, the sum of the parts' divisors.

    Raises _Different where parts call different numbers of means.
    """
    if len({len(x) for x in divisors}) > 1:
        raise _Different("one part calls other losses than another")
    return [torch.stack(list(x)).sum(0) for x in zip(*divisors, strict=True)]


def _gradients(module: nn.Module) -> dict[str, Tensor]:
    """Return the gradients of `module` by the paths of the user's model, and clear them in the
    module."""
    gradients = {}
    for path, parameter in module.named_parameters():
        if parameter.grad is not None:
            grad = parameter.grad.to_dense() if parameter.grad.is_sparse else parameter.grad
            gradients[path.removeprefix("model.")] = grad.detach().clone()
            parameter.grad = None
    return gradients


def _buffers(module: nn.Module) -> dict[str, Tensor]:
    """Return the values that a forward may have changed, by path.

    They are the buffers, in fp64, and two sums for each parameter (`_sums`).
    """
    held = module.named_buffers(remove_duplicate=False)
    buffers = {path.removeprefix("model."): x.detach().double().clone() for path, x in held}
    return buffers | _sums(module)


def _sums(module: nn.Module) -> dict[str, Tensor]:
    """Return the sum of every parameter and the sum of its squares, fp64 [2], by path.

    A change of the parameter changes at least one of the two sums, barring coincidence.
    """
    sums = {}
    for path, parameter in module.named_parameters():
        values = parameter.detach().double()
        sums[path.removeprefix("model.")] = torch.stack([values.sum(), values.square().sum()])
    return sums


def _compare(batch_run: _Run, parts_run: _Run) -> None:
    """Raise _Different for the first difference between the run on batches and the run on parts."""
    for loss, of_parts in zip(batch_run.losses, parts_run.losses, strict=True):
        if not abs(loss - of_parts) <= LOSS_TOLERANCE * max(abs(loss), 1e-3):
            raise _Different(f"a batch's loss is {loss:.6g}, and {of_parts:.6g} made of its parts")
    for one, other in zip(batch_run.gradients, parts_run.gradients, strict=True):
        everything = sum(float(x.double().square().sum()) for x in one.values()) ** 0.5
        for path in dict.fromkeys((*one, *other)):
            grad = one.get(path, torch.zeros_like(other[path]) if path in other else None)
            assert grad is not None
            difference = float((grad - other.get(path, torch.zeros_like(grad))).double().norm())
            norm = float(grad.double().norm())
            if not difference <= GRADIENT_TOLERANCE * norm + FLOOR * everything:
                off = difference / norm if norm else float("inf")
                said = f"the gradient of {path} has norm {norm:.6g}, and is {off:.1%} off "
                raise _Different(f"{said}made of parts")
    for path, value in batch_run.buffers.items():
        after = parts_run.buffers.get(path)
        if (
            after is None
            or after.shape != value.shape
            or not torch.allclose(after, value, 1e-4, 1e-6)
        ):
            raise _Different(f"the buffer or parameter {path} is another one after the parts")


def _kind(module: nn.Module, path: str) -> str:
    """Return `path` after the word `parameter` or `buffer`."""
    trained = {name.removeprefix("model.") for name, _ in module.named_parameters()}
    return f"{'parameter' if path in trained else 'buffer'} {path}"
