"""How many bytes a rank needs at the peak of a step, by what holds them.

For replicas under ZeRO 0-3 with CPU offload, and a head whose shards have a group of one. Owns what
an engine makes of gradients at every moment of a step, of which the worst is the rank's; what
forwards and backwards hold at that moment is `liveness.py`'s. Sources: Rajbhandari et al., "ZeRO"
(SC 2020, arXiv 1910.02054) section 3 for what each stage partitions; the DeepSpeed config for
bucket sizes, and DeepSpeed 0.19.8 for what is held twice.
"""

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache, cached_property
from itertools import accumulate

from whale_train.strategies.graph.operation_graph import (
    ModelProfile,
    block_of,
)
from whale_train.strategies.memory.liveness import Moment, Passing
from whale_train.strategies.plan.plan import MemoryEstimate
from whale_train.strategies.plan.training import Training

# What a process takes for a byte of values that come and go. Allocators round sizes up and leave
# holes between what lives and what went (torch's on a GPU in blocks of 512 bytes and 2 MiB, malloc
# on a CPU), and kernels have workspaces: up to 3% of the activations of the runs of
# benchmarks/memory_accuracy.py, which without this are predicted up to 4% under what they take.
ROUNDED_UP = 1.03

# Elements of the bucket a gradient reduction gathers before it is sent (both of DeepSpeed's
# buckets and DistributedDataParallel's, which counts 25 MiB of fp32).
REDUCE_BUCKET_ELEMENTS = 25 * 2**20 // 4


@dataclass(frozen=True)
class Precision:
    """Bytes per element by use. `weights` are what forward reads, `master` the optimizer's copy
    (0 where the weights themselves are it), `casts` the 16-bit weights that autocast makes of
    fp32 ones in forward and keeps for backward."""

    weights: int
    gradients: int
    activations: float
    master: int
    casts: int = 0


@cache
def precision_bytes(
    precision: str, zero: int, apart: bool = False, *, narrow: bool = False, cast: bool = True
) -> Precision:
    """Return what an element of a parameter takes. fp32 keeps one copy, which ZeRO's flat partition
    doubles; at stage 3 only where the optimizer is `apart` from the parameters
    (runtime/engines/deepspeed_zero3.py). 16 bits are autocast over fp32 weights, of which it makes
    copies of those that are `cast`; under ZeRO the `narrow` ones are 16-bit values with an fp32
    master partition (docs/adr/007)."""
    flat = 4 if zero and (zero < 3 or apart) else 0
    if precision == "fp32":
        return Precision(4, 4, 1.0, flat)
    if zero and narrow:
        return Precision(2, 4, 0.5, 4)
    return Precision(4, 4, 0.5, flat, casts=2 if cast or narrow else 0)


@dataclass(frozen=True)
class Weights:
    """Bytes of all parameters a rank has a part of, were they whole: what forward reads of them,
    the optimizer's copies, and the copies that autocast makes."""

    weights: float
    master: float
    casts: float


def weights_bytes(
    elements: Mapping[str, float], profile: ModelProfile, precision: str, zero: int, apart: bool
) -> Weights:
    """Return the bytes of so many `elements` of each parameter of `profile`, by its path, as
    `precision_bytes` has them."""
    weights = master = casts = 0.0
    for path, count in elements.items():
        narrow, cast = path in profile.narrow, path in profile.cast
        sizes = precision_bytes(precision, zero, apart, narrow=narrow, cast=cast)
        weights += sizes.weights * count
        master += sizes.master * count
        casts += sizes.casts * count
    return Weights(weights, master, casts)


def narrow_frozen(profile: ModelProfile, training: Training) -> frozenset[str]:
    """Return the paths of the frozen weights that ranks hold in 16 bits: those that are only added
    to, and that nothing reads but what autocast lowers."""
    if training.precision == "fp32" or not training.adds_to_frozen:
        return frozenset()
    return profile.narrow.intersection(each.path for each in profile.frozen)


def frozen_bytes(profile: ModelProfile, training: Training) -> dict[str, float]:
    """Return the bytes of every frozen weight as ranks hold it, by path."""
    narrow = narrow_frozen(profile, training)
    return {
        each.path: each.elements * (2.0 if each.path in narrow else each.bytes_per_element)
        for each in profile.frozen
    }


def weight_width(profile: ModelProfile, precision: str, zero: int) -> float:
    """Return the mean bytes of an element of the parameters of `profile` as ranks hold them."""
    elements = {parameter.path: float(parameter.elements) for parameter in profile.parameters}
    total = weights_bytes(elements, profile, precision, zero, apart=False).weights
    return total / max(1.0, sum(elements.values()))


def engine_of(
    profile: ModelProfile,
    elements: Mapping[str, float],
    precision: str,
    zero: int,
    copies: int,
    on_cpu: bool,
    offloads: bool,
    by_block: bool,
    frozen: Mapping[str, float],
    order: Iterable[str] = (),
) -> "Gradients":
    """Return what an engine of so many `elements` of each parameter, by its path, makes of their
    gradients, of the parameters in `order`, as far as that is known; `by_block` and `frozen` are as
    in `gathered_at_once`."""
    width = weights_bytes(elements, profile, precision, zero, apart=False).weights
    width /= max(1.0, sum(elements.values()))
    gathered = 0.0
    if zero == 3:
        gathered = gathered_at_once(elements, frozen, profile, precision, by_block)
    total = sum(elements.values())
    made: tuple[Made, ...] = ()
    if zero >= 2 and not frozen:
        listed = ((path, elements[path]) for path in order)
        made = tuple(_made(listed, profile, precision, zero, by_block))
    return Gradients(zero, copies, total, gathered, width, on_cpu, offloads, made)


@dataclass(frozen=True)
class Made:
    """Gradients that are whole together for a while, and the weights they are of: bytes."""

    gradients: float
    weights: float


def _made(
    elements: Iterable[tuple[str, float]],
    profile: ModelProfile,
    precision: str,
    zero: int,
    by_block: bool,
) -> Iterator[Made]:
    """Yield what is whole together of parameters and their `elements`: under ZeRO 2 a parameter,
    under ZeRO 3 what is gathered at once."""
    found: dict[str, list[float]] = {}
    for path, count in elements:
        sizes = precision_bytes(precision, zero, narrow=path in profile.narrow)
        of = found.setdefault(_gathered_with(path, by_block) if zero == 3 else path, [0.0, 0.0])
        of[0] += sizes.gradients * count
        of[1] += sizes.weights * count
    for gradients, weights in found.values():
        yield Made(gradients, weights)


def _gathered_with(path: str, by_block: bool) -> str:
    """Return the module that ZeRO 3 gathers a parameter with, or, `by_block`, the block."""
    module = path.rpartition(".")[0]
    return block_of(module) if by_block else module


def gathered_at_once(
    elements: Mapping[str, float],
    frozen: Mapping[str, float],
    profile: ModelProfile,
    precision: str,
    by_block: bool,
) -> float:
    """Return the bytes of weights that ZeRO 3 gathers at once, and of their gradients, of a rank's
    `elements`, by parameter, and of the bytes of those that are `frozen`: those of a module, or,
    `by_block`, of a block that a rewritten graph runs as one (runtime/graph/block_modules.py)."""
    found: dict[str, float] = {}

    def add(path: str, size: float) -> None:
        module = _gathered_with(path, by_block)
        found[module] = found.get(module, 0.0) + size

    for path, count in elements.items():
        sizes = precision_bytes(precision, 3, narrow=path in profile.narrow)
        add(path, (sizes.weights + sizes.gradients) * count)
    for path, size in frozen.items():
        add(path, size)
    return max(found.values(), default=0)


@dataclass(frozen=True)
class Needed:
    """Bytes at one moment of a step: gradients, activations, and what engines move or put together
    meanwhile."""

    gradients: float
    activations: float
    moving: float

    @property
    def total(self) -> float:
        return self.gradients + self.activations + self.moving


@dataclass(frozen=True)
class Gradients:
    """The gradients of a rank's weights and what its engine makes of them, under `zero` over
    `copies`: of `elements` in all, weights of `width` bytes and fp32 gradients. ZeRO 3 has at most
    `gathered` bytes of whole weights and their gradients at once. On a GPU (not
    `on_cpu`) what comes next is gathered meanwhile; and where it `offloads` the optimizer's state,
    the partitions of gradients that ZeRO 2 and 3 make are on the host with it. `made` are the
    gradients in the order in which a backward makes them, as far as that is known."""

    zero: int
    copies: int
    elements: float
    gathered: float
    width: float
    on_cpu: bool
    offloads: bool = False
    made: tuple[Made, ...] = ()

    @property
    def num_bytes(self) -> float:
        return 4 * self.elements

    @property
    def are_buckets(self) -> bool:
        """DistributedDataParallel has all gradients from its first step on, as its buckets."""
        return self.zero == 0 and self.copies > 1

    def worst(self, steps: Iterable[tuple[float, float, float]]) -> Needed:
        """Return the moment of a step that needs most. `steps` are those of forward and backward:
        bytes of the gradients there are, of those about to be added to them, and of activations."""
        needs = [
            self._meanwhile(come, added, activations * ROUNDED_UP)
            for come, added, activations in dict.fromkeys(steps)
        ]
        return max((*needs, self._updated()), key=lambda needed: needed.total)

    def _meanwhile(self, come: float, added: float, activations: float) -> Needed:
        """Return the bytes of gradients meanwhile: where copies partition them, those made last are
        whole, a bucket of them, and once more when that is reduced. ZeRO 3's bucket and partition
        stay from step to step; some parameters are gathered, with their gradients, and perhaps a
        bucket of what comes next: gathered flat, copied out of it."""
        if self.zero < 2 or self._is_alone:
            return Needed(come, activations, added)
        bucket = min(come, self._bucket)
        if self.zero == 2:
            # A gradient that is larger than a bucket is whole as well.
            moving = added + bucket + max(bucket, self._just_made(come).gradients)
            if not self.on_cpu:  # one bucket is filled while another is reduced
                moving += bucket
            return Needed(self._here * come / self.copies, activations, moving)
        moving = self._bucket + bucket + added
        moving += self._gathered(come)
        if not self.on_cpu:
            moving += 2 * self.width * min(self.elements, REDUCE_BUCKET_ELEMENTS)
        return Needed(self._here * self.num_bytes / self.copies, activations, moving)

    def _updated(self) -> Needed:
        """No activation is left. ZeRO 1 reduces all gradients here, a bucket at a time; 1 and 2
        make one tensor of this copy's part, 3 of a bucket of it."""
        part = self.num_bytes / self.copies
        if self.zero == 0 or self._is_alone:
            return Needed(self.num_bytes, 0.0, 0.0)
        if self.zero == 1:
            return Needed(self.num_bytes + part, 0.0, 2 * self._bucket)
        part *= self._here
        return Needed(part, 0.0, part if self.zero == 2 else self._bucket)

    def _gathered(self, come: float) -> float:
        """Return the bytes of whole weights and their gradients that ZeRO 3 has when there are so
        many of all gradients: in a forward, weights alone."""
        if not self.made:
            return self.gathered
        if not come:
            return max(each.weights for each in self.made)
        last = self._just_made(come)
        return last.weights + last.gradients

    def _just_made(self, come: float) -> Made:
        """Return what was made last, when there are so many bytes of all gradients."""
        # They are added up here in another order.
        place = bisect_left(self._come, come * (1 - 1e-9))
        return self.made[place] if place < len(self.made) else Made(0.0, 0.0)

    @cached_property
    def _come(self) -> list[float]:
        return list(accumulate(each.gradients for each in self.made))

    @property
    def _is_alone(self) -> bool:
        """Whether there is no other copy, and no engine of DeepSpeed's, which only offload asks for
        then (`_rank` in strategies/resolver/write.py)."""
        return self.copies == 1 and not self.offloads

    @property
    def _here(self) -> float:
        """Of partitions of gradients, the part in the rank's memory: all, or nothing."""
        return 0.0 if self.offloads and not self.on_cpu else 1.0

    @property
    def summed(self) -> float:
        """Bytes of what is put together to be summed over copies that keep all gradients."""
        return self._bucket if self.are_buckets else 0.0

    @property
    def fits_a_bucket(self) -> bool:
        """Whether all gradients are summed at once."""
        return self.elements <= REDUCE_BUCKET_ELEMENTS

    @property
    def _bucket(self) -> float:
        return 4 * min(self.elements, REDUCE_BUCKET_ELEMENTS)


def unmeasured(activation_bytes: float, gradients: float, largest: float) -> Passing:
    """Return the moments of a model of whose operations nothing is known: all it keeps is there
    together with all gradients."""
    all_of_it = (Moment(gradients, activation_bytes),)
    again = (Moment(largest, activation_bytes),)
    forward = (Moment(0.0, activation_bytes),)
    return Passing(activation_bytes, 0.0, gradients, forward, all_of_it, again)


def added(first: MemoryEstimate, second: MemoryEstimate) -> MemoryEstimate:
    """Two TaskGraphs on one device."""
    return MemoryEstimate(
        first.parameters + second.parameters,
        first.gradients + second.gradients,
        first.optimizer + second.optimizer,
        first.activations + second.activations,
        first.communication + second.communication,
    )
