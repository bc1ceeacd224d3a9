"""Resolve a Request to its Plan, and check that hardware, data and model agree.

Every fault that can be found without the model is found before torch is imported.
"""

import os
import shutil
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

from whale_train.config import Request
from whale_train.data.dataset import Dataset
from whale_train.data.evaluation_sets import OpenedData, open_data
from whale_train.data.fingerprint import Fingerprint, fingerprint
from whale_train.data.mixture import MixedDataset, MixedOrder
from whale_train.data.stream import StreamDataset
from whale_train.errors import ConfigError, Fault, PlanError, RequestError
from whale_train.launcher.planning.additions import explain_additions
from whale_train.launcher.planning.architectures import refused_architectures
from whale_train.launcher.planning.check_data import (
    check_data,
    explain_data,
    explain_vocabulary,
)
from whale_train.launcher.planning.checkpoint_memory import (
    explain_checkpoint_copies,
    explain_store,
)
from whale_train.launcher.planning.compare_samples import compared, must_compare
from whale_train.launcher.planning.devices.calibrations import with_kept_calibrations
from whale_train.launcher.planning.devices.devices_here import (
    assign_devices,
    cards_of,
    explain_device_figures,
    refuse_other_order,
)
from whale_train.launcher.planning.devices.emulation import bandwidths_in_use, relative_bandwidths
from whale_train.launcher.planning.devices.emulation import paces as emulated_paces
from whale_train.launcher.planning.devices.host_memory import refuse_small_hosts
from whale_train.launcher.planning.devices.placing import place_of, this_host_of, threads_of
from whale_train.launcher.planning.evaluations import explain_evaluations, refuse_uncounted
from whale_train.launcher.planning.exact_bits import refuse_hash_of_parts, refuse_unlike_bits
from whale_train.launcher.planning.isolated_documents import refuse_joined_documents
from whale_train.launcher.planning.longest_rows import refuse_longest
from whale_train.launcher.planning.loss_read import explain_logits
from whale_train.launcher.planning.nvme_tools import files_refused
from whale_train.launcher.planning.own_optimizers import (
    explain_optimizers,
    refuse_parts,
    schedule_decisions,
    with_optimizers,
)
from whale_train.launcher.planning.precision import refuse_reduce_dtype, with_precision, with_tf32
from whale_train.launcher.planning.profile_cache import profile_of, quiet_exports
from whale_train.launcher.planning.quantised_weights import explain_quantised, refuse_quantised
from whale_train.launcher.planning.remedies import with_checked_remedies
from whale_train.launcher.planning.watched_metrics import refuse_unwatchable
from whale_train.launcher.report.rank_kinds import rank_kinds
from whale_train.launcher.report.timelines import ranks_to_show
from whale_train.machine.hosts import Host
from whale_train.machine.limits import cores, memory_bytes
from whale_train.models.options import ADAPTERS
from whale_train.strategies.grammar.nodes import Replicate, Strategy, every_node, read_strategy
from whale_train.strategies.graph.operation_graph import ModelProfile
from whale_train.strategies.graph.saved_tensors import on_cpus
from whale_train.strategies.hardware.calibration import stand_ins
from whale_train.strategies.hardware.cluster import CPU_PROCESS, Cluster
from whale_train.strategies.memory.malloc_headroom import THRESHOLD, explain_fragmentation
from whale_train.strategies.plan.plan import Decision, Plan
from whale_train.strategies.plan.training import GroupRule, Training, bucket_elements
from whale_train.strategies.resolver.parameter_groups import (
    explain_parameter_groups,
    refuse_unmatched,
)
from whale_train.strategies.resolver.resolve import refuse_without_model, resolve_and_simulate
from whale_train.strategies.search.search import search
from whale_train.strategies.simulate.chrome_trace import Event
from whale_train.strategies.simulate.prediction import Simulated
from whale_train.strategies.stages.analysis import ModelAnalysis


@dataclass(frozen=True)
class Resolved:
    """A request's plan and what it was made from.

    plan: the plan.
    cluster: the devices that the plan uses.
    profile: the profile of the model.
    device: the kind of device that ranks run on.
    emulated: whether CPU processes stand for devices that this machine does not have.
    num_samples: number of training samples in the data.
    data: fingerprint of the data, where the run saves checkpoints or goes on from one.
    paces: the seconds that each emulated device takes for a second of computing; None where all are
        as fast as they can be.
    links: the bandwidth between any two emulated devices, relative to the fastest link; None
        likewise.
    timeline: the predicted step's events of a rank of each kind, of all ranks with `train.trace`;
        those of the stand-ins where these were measured.
    found: the strategy that `graph: auto` came to, in the form of a file; None for any other.
    mixture: the order of the samples of several sources; None where there is one source.
    lost_place: why a run cannot go on in a stream, as the end of a sentence; '' where it can, and
        None for data with numbered samples.
    """

    plan: Plan
    cluster: Cluster
    profile: ModelProfile
    device: Literal["cpu", "cuda"]
    emulated: bool
    num_samples: int
    data: Fingerprint | None = None
    paces: tuple[float, ...] | None = None
    links: tuple[tuple[float, ...], ...] | None = None
    timeline: tuple[Event, ...] = ()
    found: Mapping[str, Any] | None = None
    mixture: MixedOrder | None = None
    lost_place: str | None = None


def training_of(request: Request) -> Training:
    """Return the part of the request's training options that a plan depends on."""
    return Training(
        request.train.global_batch,
        request.train.precision or "fp32",
        request.train.grad_clip or 0.0,
        request.optimizer.name,
        request.optimizer.arguments(),
        request.model.sync_batchnorm,
        request.train.accumulate,
        request.model.loss_over,
        request.model.samples_are_independent,
        request.model.adapters is not None,
        request.train.reduce_dtype,
        request.train.all_reduce,
        bucket_elements(request.train.bucket_mb),
        request.optimizer.no_decay == "norms_and_biases",
        tuple(
            GroupRule(x.match, x.weight_decay, x.lr_scale, trust_ratio=x.trust_ratio)
            for x in request.optimizer.groups
        ),
    )


def resolve_request(request: Request, hosts: Sequence[Host] | None = None) -> Resolved:
    """Return the plan of a request.

    hosts: the hosts on which others started ranks, all of whose devices are used; None for this
        host.

    Raises ConfigError or PlanError with all faults of a stage.
    """
    faults: list[Fault] = []
    strategy = request.strategy_graph()
    use_all = hosts is not None
    hosts = hosts or this_host_of(request)
    place = place_of(request, hosts, faults)
    of_precision: tuple[Decision, ...] = ()
    if place is not None:
        used = place.cluster if strategy.is_auto else place.cluster.chosen(strategy.devices)
        request, of_precision = with_precision(request, used, place.device)
        refuse_reduce_dtype(request, faults)
        faster, of_tf32 = with_tf32(request, place.cluster, faults)
        place, of_precision = replace(place, cluster=faster), (*of_precision, *of_tf32)
    training = training_of(request)
    if place is not None:
        if not strategy.is_auto:
            refuse_without_model(strategy, place.cluster, training, faults)
        _refuse_device_speed(request, place.cluster, place.emulated, faults)
        used = place.cluster.chosen(strategy.devices)
        if used.devices:
            _refuse_link_speed(request, used, place.emulated, faults)
    data = _data(request, faults)
    if request.mode == "train":
        _refuse_offloading(request, faults)
        if place is not None and place.device == "cpu":
            _refuse_compiling(request, faults)
    if faults or place is None or data is None:
        raise ConfigError(faults)
    cluster, device, emulated = place.cluster, place.device, place.emulated
    dataset = data.training
    profile = _profile(request, dataset, cluster)
    check_data(request, profile, data, faults)
    refuse_joined_documents(request, profile, faults)
    refuse_unwatchable(request, data, faults)
    if not profile.parameters:  # without which there is no plan, nor more faults to find
        raise ConfigError(faults)
    refuse_unmatched(training.groups, profile.parameters, faults)
    training = with_optimizers(request, training, profile.parameters, faults)
    of_schedule = schedule_decisions(request, faults)
    weights = _weights(request, faults)
    if request.optimizer.is_custom and not training.optimizers:
        raise ConfigError(faults)  # there is no plan without them
    planned = partial(_planned, request, training, strategy, cluster, emulated, use_all)
    try:
        made = planned(profile)
    except PlanError as error:

        def of(other: Strategy) -> Plan:
            findings = ModelAnalysis(profile, training.precision)
            return resolve_and_simulate(other, cluster, findings, training)[0]

        error = with_checked_remedies(error, request, dataset, profile, of)
        raise PlanError([*faults, *error.faults]) from None
    refuse_parts(made.plan, faults)
    refuse_uncounted(request, made.plan, profile, faults)
    refuse_longest(request, made.plan, faults)
    refuse_quantised(request, made.plan, profile, faults)
    refuse_hash_of_parts(request, made.plan, faults)
    refuse_unlike_bits(request, made.plan, faults)
    _refuse_biases(request, made.plan, faults)
    on_cards = device == "cuda" and request.mode == "train"
    if on_cards:
        faults += refused_architectures(cards_of(made.used, hosts))
    if request.mode == "train":
        refuse_other_order(made.used, hosts, faults)
        is_whole = request.model.is_built_whole
        refuse_small_hosts(made.plan, profile, hosts, is_whole, device == "cpu", faults)
    on_one_host = device == "cpu" and len(hosts) == 1
    shared = memory_bytes() if on_one_host and request.mode != "plan" else None
    copies = explain_checkpoint_copies(
        *(request.checkpoint, made.plan, profile, training, shared, faults),
        keeps_frozen=not request.model.adds_to_a_folder,
    )
    if faults:
        raise ConfigError(faults)
    if must_compare(request, made.plan):
        profile, plan = compared(request, dataset, profile, made.plan)
        made = planned(profile) if profile.unequal_parts else replace(made, plan=plan)
    plan = made.plan
    evaluations = explain_evaluations(request, plan, dataset)
    holes = explain_fragmentation(plan, shared) if shared and THRESHOLD not in os.environ else ()
    of_properties = device == "cuda" and request.hardware.get("kind") == "local"
    figures = explain_device_figures(made.used) if of_properties else ()
    of_loss, of_data = explain_logits(request, profile), explain_data(request, dataset)
    of_data += explain_vocabulary(request, profile)
    additions = explain_additions(profile) if request.model.adapters is not None else ()
    additions += explain_quantised(profile)
    of_groups = (
        *explain_optimizers(training),
        *of_schedule,
        *explain_parameter_groups(training, profile.parameters),
    )
    said = (
        *(*request.files, *additions, *of_precision, *of_loss, *of_data),
        *(*of_groups, *weights, *evaluations, *figures, *holes, *copies),
        *explain_store(request.checkpoint),
    )
    plan = replace(plan, decisions=(*plan.decisions, *said))
    used = made.used
    if on_cards:
        plan = assign_devices(plan, used, hosts)
    paces, links = _paces(request, used), _links(request, used)
    shown = range(plan.world_size) if request.train.trace else ranks_to_show(rank_kinds(plan))
    simulated_on = (made.here or used).devices
    timeline = tuple(made.step.events({rank: simulated_on[rank].name for rank in shown}))
    print_of_data = fingerprint(dataset) if _has_checkpoints(request) else None
    mixture = dataset.order if isinstance(dataset, MixedDataset) else None
    made_of = (plan, used, profile, device, emulated, dataset.num_samples, print_of_data)
    lost_place = dataset.lost_place if isinstance(dataset, StreamDataset) else None
    return Resolved(*made_of, paces, links, timeline, made.written, mixture, lost_place)


def _has_checkpoints(request: Request) -> bool:
    """Return whether a run writes a checkpoint or goes on from one."""
    return request.mode == "train" and (request.may_save or request.train.resume is not None)


def _refuse_biases(request: Request, plan: Plan, faults: list[Fault]) -> None:
    """Add a fault where `train.router_bias_rate` is set and routers have no biases, or loads that
    are hidden by torch.compile."""
    rate = request.train.router_bias_rate
    if rate is None:
        return
    rule, remedy = "", "use null"
    if not plan.router_biases:
        rule = "moves the biases by which routers choose experts, and the model has no such buffers"
        remedy = "use null, or a model that has, as DeepseekV3ForCausalLM"
    elif plan.rewrite is None and request.train.compile:
        rule = "goes by loads that train.compile=true hides in a model that runs as it is"
        remedy = "use train.compile=false, or strategy=experts_dp"
    if rule:
        faults.append(Fault("train.router_bias_rate", f"{rate:g}", rule, remedy))


def _weights(request: Request, faults: list[Fault]) -> list[Decision]:
    """Return the plan's notes about the initial weights. Adds to `faults` where a folder has the
    weights of another model."""
    folder = request.model.pretrained
    if request.mode == "plan":
        return []
    if folder is None:
        why = "there is no model.pretrained, and model/ has the additions alone"
        said = Decision(ADAPTERS, "added to weights that begin at random", "", why)
        return [] if request.model.adapters is None else [said]
    from whale_train.launcher.planning.pretrained import compare_names  # which imports torch

    with quiet_exports():
        names = compare_names(request.model)
    faults += names.faults(folder, request.model.class_name)
    return names.decisions()


@dataclass(frozen=True)
class _Planned:
    """A plan, and what it was made from.

    plan: the plan.
    used: the devices that it uses.
    step: its step, simulated on `here` where that is given, else on `used`.
    here: the measured processes that stand for the devices; None where there are none.
    written: the strategy that was found, in the form of a file; None where none was searched.
    """

    plan: Plan
    used: Cluster
    step: Simulated
    here: Cluster | None
    written: Mapping[str, Any] | None


def _planned(
    request: Request,
    training: Training,
    strategy: Strategy,
    cluster: Cluster,
    emulated: bool,
    use_all: bool,
    profile: ModelProfile,
) -> _Planned:
    """Return the plan for `strategy`, or for the strategy that is found where `graph: auto` asks
    for one.

    emulated: whether CPU processes stand for the devices.
    use_all: whether a strategy that is found has to use all devices.

    Raises PlanError with all faults.
    """
    chosen = None
    findings = ModelAnalysis(profile, training.precision)
    if strategy.is_auto:
        can_offload = _can_offload(request)
        chosen = search(
            strategy, cluster, findings, training, can_offload=can_offload, use_all=use_all
        )
        strategy = chosen.strategy
    here = _stand_ins(request, strategy, cluster) if emulated else None
    plan, step = resolve_and_simulate(strategy, cluster, findings, training, here)
    if request.mode == "train":
        _refuse_offload_of(plan, request)
    if chosen is not None:
        plan = replace(plan, decisions=(*chosen.decisions, *plan.decisions))
    used = cluster.chosen(strategy.devices)
    return _Planned(plan, used, step, here, None if chosen is None else chosen.written)


def resolve_each(
    request: Request, strategies: Mapping[str, Mapping[str, Any]]
) -> dict[str, Resolved | RequestError]:
    """Return the plan of the request under each of `strategies`, or the error that says why there
    is none.

    strategies: strategies as their config files write them, by name.

    Raises ConfigError where the request is wrong under all of them.
    """
    base = planning_base(request)
    request, cluster, profile, training = base.request, base.cluster, base.profile, base.training
    findings = ModelAnalysis(profile, training.precision)
    plans: dict[str, Resolved | RequestError] = {}
    for name, content in strategies.items():
        wrong: list[Fault] = []
        strategy = read_strategy(content, name, wrong)
        try:
            if strategy is None or wrong:
                raise ConfigError(wrong)
            if strategy.is_auto:
                strategy = search(
                    strategy, cluster, findings, training, can_offload=base.can_offload
                ).strategy
            plan, step = resolve_and_simulate(strategy, cluster, findings, training)
            used = cluster.chosen(strategy.devices)
            made_of = (plan, used, profile, base.device, base.emulated, base.num_samples)
            shown = {rank: used.devices[rank].name for rank in ranks_to_show(rank_kinds(plan))}
            plans[name] = Resolved(*made_of, timeline=tuple(step.events(shown)))
        except RequestError as error:
            plans[name] = error
    return plans


@dataclass(frozen=True)
class PlanningBase:
    """What the plans of several strategies for one request are made from.

    request: the request, with its precision.
    cluster: all devices there are.
    profile: the profile of the model.
    training: batch, precision and optimizer.
    device: the kind of device that ranks run on.
    emulated: whether CPU processes stand for devices that this machine does not have.
    num_samples: number of training samples in the data.
    can_offload: whether copies may keep state on the host.
    """

    request: Request
    cluster: Cluster
    profile: ModelProfile
    training: Training
    device: Literal["cpu", "cuda"]
    emulated: bool
    num_samples: int
    can_offload: bool


def planning_base(request: Request) -> PlanningBase:
    """Return the model, the devices and the training of a request, whatever its strategy.

    Raises ConfigError where the request is wrong under all strategies.
    """
    faults: list[Fault] = []
    place, data = place_of(request, this_host_of(request), faults), _data(request, faults)
    if faults or place is None or data is None:
        raise ConfigError(faults)
    dataset = data.training
    request, _ = with_precision(request, place.cluster, place.device)
    refuse_reduce_dtype(request, faults)
    cluster, _ = with_tf32(request, place.cluster, faults)
    training = training_of(request)
    device, emulated = place.device, place.emulated
    profile = _profile(request, dataset, cluster)
    check_data(request, profile, data, faults)
    refuse_joined_documents(request, profile, faults)
    training = with_optimizers(request, training, profile.parameters, faults)
    schedule_decisions(request, faults)
    if faults:
        raise ConfigError(faults)
    made_of = (request, cluster, profile, training, device, emulated, dataset.num_samples)
    return PlanningBase(*made_of, _can_offload(request))


def _profile(request: Request, dataset: Dataset, cluster: Cluster) -> ModelProfile:
    """Return the profile of the request's model, for the kind of device of `cluster`."""
    profile = profile_of(request, dataset)
    return on_cpus(profile) if cluster.on_cpu else profile


def _data(request: Request, faults: list[Fault]) -> OpenedData | None:
    """Return the data of the request, or None after adding its faults."""
    try:
        return open_data(request.data, blank_labels=request.blank_labels)
    except ConfigError as error:
        faults += error.faults
        return None


def _refuse_compiling(request: Request, faults: list[Fault]) -> None:
    """Add a fault where the run compiles for CPUs and torch finds no compiler
    (torch._inductor.config.cpp.cxx)."""
    compiler = os.environ.get("CXX", "g++")
    if request.train.compile and shutil.which(compiler) is None:
        rule = f"needs a C++ compiler for CPUs, and there is no {compiler}"
        faults.append(Fault("train.compile", "true", rule, "install g++, or use false"))


def _refuse_offloading(request: Request, faults: list[Fault]) -> None:
    """Add a fault where the strategy offloads the optimizer to the host, and a tool that compiles
    the optimizer there is missing."""
    offloading = [x for x in _replicates(request) if x.offload_optimizer in ("cpu", "nvme")]
    if offloading:
        node = offloading[0]
        places = (node.offload_optimizer, node.offload_parameters)
        faults += _faults_of_tools(request, node.path, places)


def _refuse_offload_of(plan: Plan, request: Request) -> None:
    """Raise ConfigError where the planner chose to offload the optimizer to the host, and a tool
    that compiles the optimizer there is missing."""
    offloading = [x for x in plan.task_graphs if x.offload["optimizer"] != "none"]
    for task_graph in offloading[:1]:
        places = task_graph.offload.values()
        if faults := _faults_of_tools(request, task_graph.path, places):
            raise ConfigError(faults)


def _faults_of_tools(request: Request, path: str, places: Collection[str]) -> list[Fault]:
    """Return the fault of the replicate at `path`, which offloads its optimizer, if DeepSpeed's CPU
    optimizer cannot be compiled, and the faults of state in files, where one of `places` is `nvme`.
    """
    faults = []
    node = next((x for x in _replicates(request) if x.path == path), None)
    if node is not None and node.offload_path is not None and "nvme" in places:
        faults = files_refused(node.path, node.offload_path)
    missing = _missing_tools() if request.optimizer.name != "sgd" else []
    if not missing:
        return faults
    rule = "needs DeepSpeed's CPU optimizer, which is compiled at first use, and there is no "
    rule += " and no ".join(missing)
    remedy = "install g++ and ninja, or use optimizer=sgd, or a strategy without offload"
    return [*faults, Fault(f"{path}.offload.optimizer", "cpu", rule, remedy)]


def _replicates(request: Request) -> list[Replicate]:
    """Return all replicates of the request's strategy."""
    return [x for x in every_node(request.strategy_graph().graph) if isinstance(x, Replicate)]


def _can_offload(request: Request) -> bool:
    """Return whether a strategy that the planner finds may keep its optimizer on the host."""
    return request.mode == "plan" or request.optimizer.name == "sgd" or not _missing_tools()


def _missing_tools() -> list[str]:
    """Return the tools that DeepSpeed lacks to compile its CPU optimizer.

    DeepSpeed compiles it at first use where it was not installed compiled. torch then runs ninja
    and the compiler $CXX, or c++ (torch.utils.cpp_extension).
    """
    spec = find_spec("deepspeed")
    if spec and spec.origin and [*Path(spec.origin).parent.glob("ops/adam/cpu_adam_op*.so")]:
        return []
    compiler = os.environ.get("CXX", "c++")
    return [tool for tool in (compiler, "ninja") if shutil.which(tool) is None]


def _stand_ins(request: Request, strategy: Strategy, cluster: Cluster) -> Cluster | None:
    """Return the CPU processes that stand for the devices of `strategy`, as measured.

    Returns None where they were not measured at the precision of the training, or where emulated
    links slow them.
    """
    used = cluster.chosen(strategy.devices)
    threads = threads_of(request, cores(), len(used.devices))
    precision = training_of(request).precision
    measured = [
        x
        for x in with_kept_calibrations()
        if (x.device, x.threads) == (CPU_PROCESS, threads) and precision in x.kernels
    ]
    if not measured or request.launcher.link_speed:
        return None
    return stand_ins(used, measured[0], _paces(request, used), cores() / threads)


def _refuse_device_speed(
    request: Request, cluster: Cluster, emulated: bool, faults: list[Fault]
) -> None:
    """Add a fault where `launcher.device_speed` is set and has no effect: ranks stand for no other
    devices, or for devices of one kind."""
    if not request.launcher.device_speed:
        return
    rule = ""
    if not emulated:
        rule = f"has no effect where ranks are the devices of hardware={cluster.name} themselves"
    elif len({device.name for device in cluster.devices}) == 1:
        rule = f"has no effect on the devices of hardware={cluster.name}, all of one kind"
    if rule:
        faults.append(Fault("launcher.device_speed", "true", rule, "use false"))


def _refuse_link_speed(
    request: Request, used: Cluster, emulated: bool, faults: list[Fault]
) -> None:
    """Add a fault where `launcher.link_speed` is set and has no effect: links stand for no others,
    all have one bandwidth, or there is none."""
    if not request.launcher.link_speed:
        return
    rule = ""
    if not emulated:
        rule = f"has no effect where ranks are the devices of hardware={used.name} themselves"
    elif len(used.devices) == 1:
        rule = f"has no effect on 1 device of hardware={used.name}, which nothing is linked to"
    elif len(bandwidths_in_use(used)) == 1:
        rule = f"has no effect on the links of hardware={used.name}, all of one bandwidth"
    if rule:
        faults.append(Fault("launcher.link_speed", "true", rule, "use false"))


def _paces(request: Request, cluster: Cluster) -> tuple[float, ...] | None:
    """Return the seconds that each rank takes for a second of computing, or None where ranks do not
    keep their devices' proportions."""
    if not request.launcher.device_speed:
        return None
    processors = cores() / (request.launcher.threads or 1)
    return emulated_paces(cluster.devices, training_of(request).precision, processors)


def _links(request: Request, cluster: Cluster) -> tuple[tuple[float, ...], ...] | None:
    """Return the relative bandwidth between any two ranks, or None where links do not keep their
    proportions."""
    if not request.launcher.link_speed or request.mode == "plan":
        return None
    return relative_bandwidths(cluster)
