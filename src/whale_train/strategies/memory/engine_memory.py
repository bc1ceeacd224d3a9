"""Bytes that a rank needs at the peak of a step, by use.

Covers replicas under ZeRO 0-3 with CPU offload, and a head whose shards have a group of one. Owns
how an engine handles gradients throughout a step; the rank needs the worst moment. `liveness.py`
owns the bytes of forwards and backwards. Sources: Rajbhandari et al., "ZeRO" (SC 2020, arXiv
1910.02054) section 3 for what each stage partitions; the DeepSpeed config for bucket sizes, and
DeepSpeed 0.19.8 for what is held twice.
"""

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache, cached_property
from itertools import accumulate

from whale_train.strategies.graph.block_paths import block_of
from whale_train.strategies.graph.operation_graph import (
    ModelProfile,
)
from whale_train.strategies.memory.liveness import ActivationProfile, MemoryPoint
from whale_train.strategies.plan.plan import MemoryEstimate
from whale_train.strategies.plan.training import BUCKET_ELEMENTS, Training

# Bytes that a process takes for each byte of short-lived values. Allocators round sizes up and
# leave holes between live and freed blocks (torch's on a GPU in blocks of 512 bytes and 2 MiB,
# malloc on a CPU), and kernels have workspaces: up to 3% of the activations of the runs of
# benchmarks/memory_accuracy.py. Without this factor, predictions are up to 4% too low.
ROUNDED_UP = 1.03

# Elements that an update or a prefetch takes at once: as many as the gradients of a bucket by
# default.
REDUCE_BUCKET_ELEMENTS = BUCKET_ELEMENTS


@dataclass(frozen=True)
class Precision:
    """Bytes of one element, by use.

    weights: bytes of the weight that the forward reads.
    gradients: bytes of the gradient.
    activations: bytes of an activation, as a fraction of its bytes in fp32.
    master: bytes of the optimizer's master copy of the weight; 0 where the optimizer updates the
        weight itself.
    casts: bytes of the 16-bit copy that autocast makes of an fp32 weight in the forward and keeps
        for the backward.
    """

    weights: int
    gradients: int
    activations: float
    master: int
    casts: int = 0


@cache
def precision_bytes(
    precision: str, zero: int, apart: bool = False, *, narrow: bool = False, cast: bool = True
) -> Precision:
    """Return the bytes of one element of a parameter under ZeRO stage `zero` (0 to 3).

    fp32 keeps one copy of a weight. ZeRO's flat partition is a second copy, at stage 3 only where
    the optimizer is `apart` from the parameters (runtime/engines/deepspeed_zero3.py). 16-bit
    training is autocast over fp32 weights, with a 16-bit copy of each weight that is `cast` or
    `narrow`. Under ZeRO, `narrow` weights are 16-bit values with an fp32 master partition
    (docs/adr/007).
    """
    flat = 4 if zero and (zero < 3 or apart) else 0
    if precision == "fp32":
        return Precision(4, 4, 1.0, flat)
    if zero and narrow:
        return Precision(2, 4, 0.5, 4)
    return Precision(4, 4, 0.5, flat, casts=2 if cast or narrow else 0)


@dataclass(frozen=True)
class Weights:
    """Bytes of all parameters of which a rank holds a part, counted in full.

    weights: bytes of the weights that the forward reads.
    master: bytes of the optimizer's master copies.
    casts: bytes of the copies that autocast makes.
    """

    weights: float
    master: float
    casts: float


def weights_bytes(
    elements: Mapping[str, float], profile: ModelProfile, precision: str, zero: int, apart: bool
) -> Weights:
    """Return the bytes of parameters under ZeRO stage `zero`.

    elements: elements of each parameter of `profile`, by path.
    precision, zero, apart: as in `precision_bytes`.
    """
    weights = master = casts = 0.0
    for path, count in elements.items():
        narrow, cast = path in profile.narrow, path in profile.cast
        sizes = precision_bytes(precision, zero, apart, narrow=narrow, cast=cast)
        weights += sizes.weights * count
        master += sizes.master * count
        casts += sizes.casts * count
    return Weights(weights, master, casts)


def casts_last(zero: int, recomputes: bool) -> bool:
    """Return True if the 16-bit copies of weights live from the first forward of a step to its last
    backward. With recomputation, and under ZeRO 3, they live for one block at a time instead."""
    return zero < 3 and not recomputes


def narrow_frozen(profile: ModelProfile, training: Training) -> frozenset[str]:
    """Return the paths of the frozen weights that ranks hold in 16 bits.

    These are the frozen weights that are read only by operations which autocast lowers, in a
    training that leaves frozen weights as they are and only adds to them (adapters). In fp32 there
    are none.
    """
    if training.precision == "fp32" or not training.adds_to_frozen:
        return frozenset()
    frozen = {parameter.path for parameter in profile.frozen}
    return profile.narrow & frozen.difference(parameter.path for parameter in profile.quantised)


def frozen_bytes(profile: ModelProfile, training: Training) -> dict[str, float]:
    """Return the bytes of every frozen weight as ranks hold it, by its path."""
    narrow = narrow_frozen(profile, training)
    return {
        parameter.path: parameter.elements
        * (2.0 if parameter.path in narrow else parameter.bytes_per_element)
        for parameter in profile.frozen
    }


def dequantised_bytes(profile: ModelProfile, precision: str) -> float:
    """Return the bytes of the largest weight stored in 4 bits, as products read it: forward and
    backward turn one weight back at a time."""
    largest = max((parameter.elements for parameter in profile.quantised), default=0)
    return largest * (4.0 if precision == "fp32" else 2.0)


def weight_width(profile: ModelProfile, precision: str, zero: int) -> float:
    """Return the mean bytes per element of the parameters of `profile`, as ranks hold them."""
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
    bucket_elements: int = BUCKET_ELEMENTS,
    in_files: bool = False,
) -> "Gradients":
    """Return the gradients of a rank's parameters, as the engine of the rank handles them.

    elements: the rank's elements of each parameter, by path.
    zero: ZeRO stage, over `copies` replicas.
    on_cpu: True if ranks are CPU processes.
    offloads: True if the optimizer's state is on the host.
    by_block, frozen: as in `zero3_live_bytes`.
    order: paths of the parameters in the order in which a backward makes their gradients, as far as
        the order is known.
    bucket_elements: number of gradients that are reduced together.
    in_files: True if gradients are written to files as a backward makes them.
    """
    width = weights_bytes(elements, profile, precision, zero, apart=False).weights
    width /= max(1.0, sum(elements.values()))
    gathered = 0.0
    if zero == 3:
        gathered = zero3_live_bytes(elements, frozen, profile, precision, by_block)
    total = sum(elements.values())
    made: tuple[GradientBucket, ...] = ()
    if zero >= 2 and not frozen:
        ordered = ((path, elements[path]) for path in order)
        made = tuple(_made(ordered, profile, precision, zero, by_block))
    sizes = (zero, copies, total, gathered, width)
    return Gradients(*sizes, on_cpu, offloads, made, bucket_elements, in_files)


@dataclass(frozen=True)
class GradientBucket:
    """Gradients that are alive unpartitioned at the same time, and their weights.

    gradients: bytes of the gradients.
    weights: bytes of the weights.
    """

    gradients: float
    weights: float


def _made(
    elements: Iterable[tuple[str, float]],
    profile: ModelProfile,
    precision: str,
    zero: int,
    by_block: bool,
) -> Iterator[GradientBucket]:
    """Yield the groups of parameters whose gradients are alive unpartitioned at the same time.

    `elements` are pairs of path and number of elements, in the order of the gradients. A group is
    one parameter under ZeRO 2, and the parameters that are gathered together under ZeRO 3.
    """
    groups: dict[str, list[float]] = {}
    for path, count in elements:
        sizes = precision_bytes(precision, zero, narrow=path in profile.narrow)
        of = groups.setdefault(_gathered_with(path, by_block) if zero == 3 else path, [0.0, 0.0])
        of[0] += sizes.gradients * count
        of[1] += sizes.weights * count
    for gradients, weights in groups.values():
        yield GradientBucket(gradients, weights)


def _gathered_with(path: str, by_block: bool) -> str:
    """Return the path of the module whose parameters ZeRO 3 gathers together with the parameter at
    `path`: its own module, or the block of that module if `by_block`."""
    module = path.rpartition(".")[0]
    return block_of(module) if by_block else module


def zero3_live_bytes(
    elements: Mapping[str, float],
    frozen: Mapping[str, float],
    profile: ModelProfile,
    precision: str,
    by_block: bool,
) -> float:
    """Return the most bytes of weights and their gradients that ZeRO 3 gathers at once.

    elements: the rank's elements of each parameter, by path.
    frozen: bytes of each frozen weight, by path.
    by_block: True if a rewritten graph runs every block as one module
        (runtime/graph/block_modules.py). A block is then gathered at once, otherwise a module.
    """
    module_bytes: dict[str, float] = {}

    def add(path: str, size: float) -> None:
        module = _gathered_with(path, by_block)
        module_bytes[module] = module_bytes.get(module, 0.0) + size

    for path, count in elements.items():
        sizes = precision_bytes(precision, 3, narrow=path in profile.narrow)
        add(path, (sizes.weights + sizes.gradients) * count)
    for path, size in frozen.items():
        add(path, size)
    return max(module_bytes.values(), default=0)


@dataclass(frozen=True)
class PeakMemory:
    """Bytes at one moment of a step.

    gradients: bytes of gradients.
    activations: bytes of activations.
    moving: bytes of communication buffers and other temporaries of the engine.
    """

    gradients: float
    activations: float
    moving: float

    @property
    def total(self) -> float:
        """Return the sum of all bytes."""
        return self.gradients + self.activations + self.moving


@dataclass(frozen=True)
class Gradients:
    """The gradients of a rank's weights, as its engine handles them.

    zero: ZeRO stage.
    copies: number of replicas.
    elements: number of elements of all gradients, which are fp32.
    gathered: the most bytes of weights and their gradients that ZeRO 3 gathers at once.
    width: bytes per element of the weights.
    on_cpu: True if the rank is a CPU process. On a GPU, the next parameters are prefetched.
    offloads: True if the optimizer's state is on the host, and with it the partitions of gradients
        of ZeRO 2 and 3.
    made: the gradients in the order in which a backward makes them, as far as the order is known.
    bucket_elements: number of gradients that are reduced together.
    in_files: True if gradients are written to files as a backward makes them.
    """

    zero: int
    copies: int
    elements: float
    gathered: float
    width: float
    on_cpu: bool
    offloads: bool = False
    made: tuple[GradientBucket, ...] = ()
    bucket_elements: int = BUCKET_ELEMENTS
    in_files: bool = False

    @property
    def num_bytes(self) -> float:
        """Return the bytes of all gradients."""
        return 4 * self.elements

    @property
    def are_buckets(self) -> bool:
        """Return True if the gradients are views of DistributedDataParallel's buckets, which are
        all alive from the first step on."""
        return self.zero == 0 and self.copies > 1

    def worst(self, steps: Iterable[tuple[float, float, float]]) -> PeakMemory:
        """Return the moment of a step that needs the most bytes.

        `steps` are the moments of forward and backward, as tuples of three: bytes of existing
        gradients, bytes of gradients about to be added to them, and bytes of activations.
        """
        needs = [
            self._meanwhile(come, added, activations * ROUNDED_UP)
            for come, added, activations in dict.fromkeys(steps)
        ]
        return max((*needs, self._updated()), key=lambda needed: needed.total)

    def _meanwhile(self, come: float, added: float, activations: float) -> PeakMemory:
        """Return the bytes at a moment of forward or backward, with `come` bytes of existing
        gradients and `added` bytes about to be added to them.

        Under ZeRO 2 and 3, the latest gradients fill a bucket, which exists twice while it is
        reduced. ZeRO 3's bucket and partition persist between steps; some parameters are gathered,
        with their gradients. On a GPU, a bucket of the next parameters may be prefetched as well:
        it is gathered into a flat buffer and copied out.
        """
        if self.zero < 2 or self._is_alone:
            return PeakMemory(come, activations, added)
        bucket = min(come, self._bucket)
        if self.zero == 2:
            # A gradient that is larger than a bucket is unpartitioned as well.
            moving = added + bucket + max(bucket, self._just_made(come).gradients)
            if not self.on_cpu:  # one bucket is filled while another is reduced
                moving += bucket
            return PeakMemory(self._here * come / self.copies, activations, moving)
        moving = self._bucket + bucket + added
        if self.in_files and self.on_cpu:  # the partitions of a bucket, before they are written
            moving += bucket / self.copies
        moving += self._gathered(come)
        if not self.on_cpu:
            moving += 2 * self.width * min(self.elements, REDUCE_BUCKET_ELEMENTS)
        return PeakMemory(self._here * self.num_bytes / self.copies, activations, moving)

    def _updated(self) -> PeakMemory:
        """Return the bytes at the optimizer's update, when no activation is alive.

        ZeRO 1 reduces all gradients here, bucket by bucket. ZeRO 1 and 2 copy this replica's
        partition into one flat tensor, ZeRO 3 one bucket of it.
        """
        part = self.num_bytes / self.copies
        if self.zero == 0 or self._is_alone:
            return PeakMemory(self.num_bytes, 0.0, 0.0)
        if self.zero == 1:
            return PeakMemory(self.num_bytes + part, 0.0, 2 * self._bucket)
        part *= self._here
        return PeakMemory(part, 0.0, part if self.zero == 2 else self._bucket)

    def _gathered(self, come: float) -> float:
        """Return the bytes of weights and gradients that ZeRO 3 has gathered when `come` bytes of
        all gradients exist. At 0, in a forward, only weights are gathered."""
        if not self.made:
            return self.gathered
        if not come:
            return max(group.weights for group in self.made)
        last = self._just_made(come)
        return last.weights + last.gradients

    def _just_made(self, come: float) -> GradientBucket:
        """Return the group of gradients made last when `come` bytes of all gradients exist."""
        place = self.place_of(come)
        return self.made[place] if place < len(self.made) else GradientBucket(0.0, 0.0)

    def place_of(self, come: float) -> int:
        """Return the place in `made` of the group of gradients made last when `come` bytes of all
        gradients exist."""
        # The tolerance is for `come`, whose bytes may be added up in another order.
        return bisect_left(self.come_after, come * (1 - 1e-9))

    @cached_property
    def come_after(self) -> list[float]:
        """Return the cumulative bytes of gradients after each group."""
        return list(accumulate(group.gradients for group in self.made))

    @property
    def _is_alone(self) -> bool:
        """Return True if the rank has no other replica and no DeepSpeed engine. A single replica
        has an engine only for offload (`_rank` in strategies/resolver/write.py)."""
        return self.copies == 1 and not self.offloads

    @property
    def _here(self) -> float:
        """Return the fraction of the partitions of gradients that is in the rank's memory: 1, or 0
        where the partitions are on the host or in files."""
        return 0.0 if self.in_files or (self.offloads and not self.on_cpu) else 1.0

    @property
    def summed(self) -> float:
        """Return the bytes of a bucket that DistributedDataParallel reduces over replicas; 0 where
        it does not serve."""
        return self._bucket if self.are_buckets else 0.0

    @property
    def fits_a_bucket(self) -> bool:
        """Return True if all gradients fit one bucket, and so are reduced at once."""
        return self.elements <= self.bucket_elements

    @property
    def _bucket(self) -> float:
        """Return the bytes of a bucket of gradients."""
        return 4 * min(self.elements, self.bucket_elements)


def unmeasured(activation_bytes: float, gradients: float, largest: float) -> ActivationProfile:
    """Return the profile of a model whose operations are unknown: all activations and all gradients
    are alive at once.

    activation_bytes: bytes per sample that autograd keeps.
    gradients: bytes of all gradients.
    largest: bytes of the largest gradient, which exists a second time while it is added to existing
        ones.
    """
    all_of_it = (MemoryPoint(gradients, activation_bytes),)
    again = (MemoryPoint(largest, activation_bytes),)
    forward = (MemoryPoint(0.0, activation_bytes),)
    return ActivationProfile(activation_bytes, 0.0, gradients, forward, all_of_it, again)


def added(first: MemoryEstimate, second: MemoryEstimate) -> MemoryEstimate:
    """Return the memory of two TaskGraphs on one device."""
    return MemoryEstimate(
        first.parameters + second.parameters,
        first.gradients + second.gradients,
        first.optimizer + second.optimizer,
        first.activations + second.activations,
        first.communication + second.communication,
    )
