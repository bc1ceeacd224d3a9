"""The refusals of a model under a strategy, before any decision."""

from collections.abc import Sequence

from whale_train.errors import Fault, PlanError
from whale_train.strategies.graph.operation_graph import ModelProfile
from whale_train.strategies.memory.nvme import in_files
from whale_train.strategies.resolver.shared_batch import (
    refuse_learned_targets,
    refuse_shared_batch,
    refuse_written_parameters,
)
from whale_train.strategies.stages.placement import PlanningContext, StageChunk
from whale_train.strategies.stages.split_names import refuse_unknown_names

# The remedy for a model without a graph. The launcher checks that replicas can divide the batch of
# the model before it gives this remedy.
AS_IS = "use strategy=dp or a zero strategy, which run the model as it is"


def refuse_model(job: PlanningContext) -> None:
    """Raise PlanError with all faults that keep the strategy of `job` from training its model."""
    faults: list[Fault] = []
    if job.profile.graph is None and not job.as_is:
        _refuse_no_graph(job, faults)
    if job.training.precision == "fp8" and not job.findings.scaled_weights:
        _refuse_scaling(job.profile, faults)
    refuse_unknown_names(job, faults)
    _refuse_shared_sequence(job, faults)
    refuse_written_parameters(job.profile, job.zero, faults)
    if job.zero:
        _refuse_partitions(job, faults)
        _refuse_files(job, faults)
    elif job.as_is and job.form.copies > 1:
        _refuse_reentrant(job.profile, faults)
    if faults:
        raise PlanError(faults)


def _refuse_no_graph(job: PlanningContext, faults: list[Fault]) -> None:
    """Add a fault for a strategy that cuts a model without an exported graph."""
    profile, key, value = job.profile, job.strategy.graph[0].path, ""
    for split in (stage.split for stage in job.form.stages if stage.body and stage.split):
        key, value = f"{split.path}.modules", ", ".join(split.modules)
    rule = f"needs the model's graph, and {profile.name} cannot be exported"
    faults.append(Fault(key, value, f"{rule} ({profile.export_error})", AS_IS))


def _refuse_scaling(profile: ModelProfile, faults: list[Fault]) -> None:
    """Add a fault for a model without a linear layer that could round its factors to 8 bits."""
    rule = f"is for linear layers in repeated blocks, and {profile.name} has none whose sizes are "
    rule += "multiples of 16 and at least 64"
    faults.append(Fault("train.precision", "fp8", rule, "use bf16"))


def _refuse_files(job: PlanningContext, faults: list[Fault]) -> None:
    """Add faults for state in files beside splits of modules, which have ZeRO 1 at most, and for
    parameters in files that are held in 16 bits: DeepSpeed's files have one dtype."""
    keeper = job.form.keeper
    assert keeper is not None
    path, states = f"{keeper.path}.offload", in_files(keeper)
    if states and any(stage.body is not None for stage in job.form.stages):
        rule = "is for copies of the whole model, and here modules are split beside the copies"
        faults.append(Fault(f"{path}.{states[0]}", "nvme", rule, "use cpu"))
    narrow = job.training.precision != "fp32" and job.profile.narrow
    if "parameters" in states and narrow:
        rule = f"is for parameters of one dtype, and train.precision={job.training.precision} "
        rule += f"holds some of {job.profile.name} in 16 bits"
        remedy = "use cpu, or train.precision=fp32"
        faults.append(Fault(f"{path}.parameters", "nvme", rule, remedy))


def _refuse_shared_sequence(job: PlanningContext, faults: list[Fault]) -> None:
    """Add a fault for each split of positions that cannot run the model: where BatchNorm takes
    statistics over positions, or values are summed over the batch."""
    norms = job.profile.batch_norm_modules
    for split in dict.fromkeys(x.split for x in job.form.stages if x.shares_sequence):
        assert split is not None
        rule = ""
        if norms:
            rule = f"divides positions, over all of which {norms[0]} takes its statistics"
        elif job.profile.graph is not None and job.batch_sums:
            rule = f"repeats {next(iter(job.batch_sums))}, a sum over the samples of the batch, "
            rule += "on every device"
        if rule:
            remedy = "use strategy=dp, or a split of weights"
            faults.append(Fault(f"{split.path}.dim", "context", rule, remedy))


def _refuse_partitions(job: PlanningContext, faults: list[Fault]) -> None:
    """Add faults for parameters that the ZeRO stage of `job` cannot partition."""
    profile, keeper = job.profile, job.form.keeper
    assert keeper is not None
    rules = []
    if profile.perhaps_unused:
        rules.append(
            "needs to know which parameters get no gradient, and whether "
            f"{profile.perhaps_unused[0]} does is another thing in every call of {profile.name}"
        )
    wide = next((p.path for p in profile.parameters if p.bytes_per_element > 4), None)
    if wide is not None:
        rules.append(f"keeps fp32 values of parameters, and {wide} of {profile.name} is of fp64")
    for rule in rules:
        faults.append(Fault(f"{keeper.path}.zero", str(job.zero), rule, "use strategy=dp"))


def _refuse_reentrant(profile: ModelProfile, faults: list[Fault]) -> None:
    """Add a fault for a reentrant checkpoint: DistributedDataParallel treats the parameters that
    are read inside it as unused."""
    if "autograd function CheckpointFunction" in profile.export_error:
        rule = "checkpoints with use_reentrant=True, which DistributedDataParallel does not follow"
        remedy = "use use_reentrant=False, or strategy=zero1"
        faults.append(Fault("model", profile.name, rule, remedy))


def refuse_pieces(job: PlanningContext, micro_batches: int) -> None:
    """Raise PlanError if the batch must not be divided into as many pieces as replicas and
    `micro_batches` make."""
    faults: list[Fault] = []
    form, profile = job.form, job.profile
    pieces = form.copies * micro_batches
    key = f"{form.pipeline.path}.micro_batches" if form.pipeline else "train.accumulate"
    value, remedy = str(micro_batches), "use 1, and one copy" if form.pipeline else "use 1"
    workers = job.strategy.logical_workers
    if workers is not None:  # of which devices run one or several: refused for any number of them
        micro_batches, pieces = workers, workers
        key, value, remedy = "strategy.logical_workers", str(workers), "use strategy=dp"
    if pieces > 1 or form.members > 1:
        refuse_shared_batch(job.findings, job.training, micro_batches, faults, workers)
    if micro_batches > 1 and profile.graph is None:
        rule = (
            f"counts a step's targets by the model's graph, and {profile.name} cannot be exported"
        )
        faults.append(Fault(key, value, f"{rule} ({profile.export_error})", remedy))
    elif micro_batches > 1:
        refuse_learned_targets(profile, key, value, remedy, faults)
    elif pieces > 1 and not job.as_is:
        path = job.strategy.graph[0].path
        refuse_learned_targets(profile, path, "", "use one copy, or strategy=dp", faults)
    if faults:
        raise PlanError(faults)


def refuse_own_losses(job: PlanningContext, chunks: Sequence[StageChunk]) -> None:
    """Raise PlanError where members of a shard group each compute a loss on their own samples with
    targets that are computed from parameters: these cannot be counted before the model runs."""
    if job.as_is:
        return
    faults: list[Fault] = []
    loss = job.graph.operations[-1].inputs[0]
    for chunk in chunks:
        if chunk.has_own_losses(loss) and loss in chunk.slice.operations:
            split = job.form.stages[chunk.stage].split
            assert split is not None
            key, value = f"{split.path}.modules", ", ".join(split.modules)
            remedy = "use a split of all, or strategy=dp"
            refuse_learned_targets(job.profile, key, value, remedy, faults)
    if faults:
        raise PlanError(faults)
