"""Say what no class of options says: the keys of strategies and inventories, which are read by
hand, and the few keys and values that have another form in the config than in their class.

`tests/unit/test_keys_page.py` holds this to the keys that the readers name in their remedies.
"""

from dataclasses import dataclass

from whale_train.strategies.grammar import nodes
from whale_train.strategies.grammar.offload import ACTIVATIONS, OFFLOAD
from whale_train.strategies.grammar.recompute import RECOMPUTE
from whale_train.strategies.hardware import cluster


@dataclass(frozen=True)
class FieldKey:
    """A key of a grammar.

    path: the path that a user writes.
    kind: the class whose docstring says what it means.
    name: the field of that class.
    values: which values it takes, in words.
    default: the value where none is given; '' where one must be given.
    """

    path: str
    kind: type
    name: str
    values: str
    default: str = ""


def _choices(names: tuple[str, ...]) -> str:
    return ", ".join(f"`{name}`" for name in names)


_COUNT = "a whole number of at least 1, or `auto`"
_PATHS = "a path or a glob, or a list of them"
_NODES = "a node, or a list of nodes"
_AGAIN = f"{_choices(RECOMPUTE)}, a list of paths or globs of modules, or `{{memory: FRACTION}}`"
_FIGURE = "a number above 0"

STRATEGY = (
    FieldKey("strategy.graph", nodes.Strategy, "graph", f"{_NODES}, or `auto`"),
    FieldKey("strategy.balance", nodes.Strategy, "balance", _choices(nodes.BALANCE), "hardware"),
    FieldKey(
        "strategy.devices",
        nodes.Strategy,
        "devices",
        "a whole number of at least 1, a mapping of such by the kind of device, or `auto`",
        "auto",
    ),
    FieldKey(
        "strategy.prefer_intra_node",
        nodes.Strategy,
        "prefer_intra_node",
        "`true`, `false`",
        "true",
    ),
    FieldKey(
        "strategy.time_limit_s",
        nodes.Strategy,
        "time_limit_s",
        "a number of at least 0, or `null`",
        "null",
    ),
    FieldKey(
        "strategy.logical_workers",
        nodes.Strategy,
        "logical_workers",
        "a whole number of at least 1, or `null`",
        "null",
    ),
    FieldKey("replicate.degree", nodes.Replicate, "degree", _COUNT, "auto"),
    FieldKey("replicate.zero", nodes.Replicate, "zero", "`0`, `1`, `2`, `3`", "0"),
    FieldKey(
        "replicate.offload.optimizer",
        nodes.Replicate,
        "offload_optimizer",
        _choices(OFFLOAD),
        "none",
    ),
    FieldKey(
        "replicate.offload.parameters",
        nodes.Replicate,
        "offload_parameters",
        _choices(OFFLOAD),
        "none",
    ),
    FieldKey(
        "replicate.offload.activations",
        nodes.Replicate,
        "offload_activations",
        _choices(ACTIVATIONS),
        "null",
    ),
    FieldKey(
        "replicate.offload.path",
        nodes.Replicate,
        "offload_path",
        "the absolute path of a folder",
        "null",
    ),
    FieldKey(
        "replicate.state",
        nodes.Replicate,
        "state",
        "`auto`, `even`, `memory`, or a list of relative parts such as `[3, 1]`",
        "auto",
    ),
    FieldKey("replicate.modules", nodes.Replicate, "modules", _PATHS, "*"),
    FieldKey("replicate.recompute", nodes.Replicate, "recompute", _AGAIN, "null"),
    FieldKey("replicate.of", nodes.Replicate, "of", _NODES, "null"),
    FieldKey("split.degree", nodes.Split, "degree", _COUNT, "auto"),
    FieldKey("split.dim", nodes.Split, "dim", _choices(nodes.SPLIT_DIMS), "auto"),
    FieldKey("split.attention", nodes.Split, "attention", _choices(nodes.ATTENTIONS), "auto"),
    FieldKey("split.modules", nodes.Split, "modules", f"{_PATHS}; `head` is the head", "*"),
    FieldKey(
        "split.patterns",
        nodes.Split,
        "patterns",
        "a list of `{weight: GLOB, pattern: PATTERN}`, or a mapping of patterns by glob; a pattern "
        f"is one of {_choices(nodes.PATTERNS)}",
        "null",
    ),
    FieldKey("split.recompute", nodes.Split, "recompute", _AGAIN, "null"),
    FieldKey("split.of", nodes.Split, "of", _NODES, "null"),
    FieldKey("stage.modules", nodes.Stage, "modules", f"{_PATHS}, or `auto`", "auto"),
    FieldKey("stage.recompute", nodes.Stage, "recompute", _AGAIN, "null"),
    FieldKey("stage.device", nodes.Stage, "device", "the name of a device, or `auto`", "auto"),
    FieldKey("stage.of", nodes.Stage, "of", _NODES, "null"),
    FieldKey(
        "pipeline.stages",
        nodes.Pipeline,
        "stages",
        "a whole number of at least 1, or a list of nodes",
    ),
    FieldKey(
        "pipeline.micro_batches",
        nodes.Pipeline,
        "micro_batches",
        f"a whole number of 1 to {nodes.MOST_MICRO_BATCHES:,}, or `auto`",
        "auto",
    ),
    FieldKey("pipeline.schedule", nodes.Pipeline, "schedule", _choices(nodes.SCHEDULES), "1f1b"),
)

HARDWARE = (
    FieldKey("hardware.kind", cluster.Cluster, "", "`cpu`, `local`"),
    FieldKey("hardware.devices", cluster.Cluster, "", _COUNT, "auto"),
    FieldKey("hardware.nodes", cluster.Cluster, "nodes", "a list of nodes"),
    FieldKey("hardware.network", cluster.Cluster, "network", "the name of a link, or its figures"),
    FieldKey("nodes[].count", cluster.Node, "", "a whole number of at least 1", "1"),
    FieldKey("nodes[].devices", cluster.Node, "", "a whole number of at least 1"),
    FieldKey(
        "nodes[].device",
        cluster.Node,
        "",
        "the name of a device, its figures, or a list with one for each device",
    ),
    FieldKey("nodes[].link", cluster.Node, "link", "the name of a link, or its figures"),
    FieldKey("nodes[].host", cluster.Node, "host", "the name of a host, or its figures", "null"),
    FieldKey("nodes[].nvme", cluster.Node, "nvme", "the figures of its disks", "null"),
    FieldKey("nodes[].slurm", cluster.Node, "slurm", "options of sbatch", "null"),
    FieldKey("slurm.partition", cluster.SlurmRequest, "partition", "text", "null"),
    FieldKey("slurm.constraint", cluster.SlurmRequest, "constraint", "text", "null"),
    FieldKey("slurm.gres", cluster.SlurmRequest, "gres", "text", "null"),
    FieldKey("slurm.account", cluster.SlurmRequest, "account", "text", "null"),
    FieldKey("slurm.qos", cluster.SlurmRequest, "qos", "text", "null"),
    FieldKey("slurm.reservation", cluster.SlurmRequest, "reservation", "text", "null"),
    FieldKey("slurm.mem", cluster.SlurmRequest, "mem", "text, or a number of megabytes", "null"),
    FieldKey(
        "slurm.cpus_per_task",
        cluster.SlurmRequest,
        "cpus_per_task",
        "a whole number of at least 1",
        "null",
    ),
    FieldKey("nvme.bytes", cluster.NvmeFigures, "bytes", _FIGURE),
    FieldKey("nvme.read_bytes_s", cluster.NvmeFigures, "read_bytes_s", _FIGURE),
    FieldKey("nvme.write_bytes_s", cluster.NvmeFigures, "write_bytes_s", _FIGURE),
    FieldKey("device.name", cluster.Device, "name", "text"),
    FieldKey("device.flops", cluster.Device, "flops", "a mapping of `fp32`, `bf16`, `fp16`, `fp8`"),
    FieldKey("device.memory_bytes", cluster.Device, "memory_bytes", _FIGURE),
    FieldKey(
        "device.memory_bandwidth_bytes_s", cluster.Device, "memory_bandwidth_bytes_s", _FIGURE
    ),
    FieldKey(
        "device.reserved_bytes",
        cluster.Device,
        "reserved_bytes",
        "a number of at least 0, below `memory_bytes`",
        "0",
    ),
    FieldKey("link.name", cluster.Link, "name", "text", "its bandwidth"),
    FieldKey("link.bandwidth_bytes_s", cluster.Link, "bandwidth_bytes_s", _FIGURE),
    FieldKey("link.latency_s", cluster.Link, "latency_s", "a number of at least 0"),
    FieldKey("host.name", cluster.HostFigures, "name", "text", "host"),
    FieldKey("host.memory_bytes", cluster.HostFigures, "memory_bytes", _FIGURE),
    FieldKey(
        "host.memory_bandwidth_bytes_s", cluster.HostFigures, "memory_bandwidth_bytes_s", _FIGURE
    ),
    FieldKey("host.link", cluster.HostFigures, "link", "the name of a link, or its figures"),
)

# Values that the config takes in another form than the class that reads them.
VALUES = {
    "model.loss": "`model`, `cross_entropy`, or a mapping with `_target_`",
    "checkpoint.best": "text, a mapping, or `null`",
    "optimizer.groups[].match": "text, or a list of it",
    "optimizer.no_decay": "`norms_and_biases` or `null`",
    "hydra.sweeper.objective": "text, a list of it, or `null`",
    "hydra.sweeper.direction": "`minimize`, `maximize`, a list of them, or `null`",
}
_TRACKER = "The tracker."
MEANINGS = {
    "data.field.source": "The field of the text that is read.",
    "data.field.target": "The field of the text to predict.",
    "data.sources[].field.source": "The field of the text that is read.",
    "data.sources[].field.target": "The field of the text to predict.",
    "data.kind": "The kind of data.",
    "trackers[].name": _TRACKER,
    "hardware.kind": "`cpu`: equal CPU processes on this machine. `local`: what this machine has.",
    "nodes[].count": "Number of such nodes.",
    "nodes[].devices": "Number of devices of a node.",
    "nodes[].device": "The kind of its devices.",
    "link.name": "The name in plans and messages.",
    "host.name": "The name in plans and messages.",
    "hydra.sweep.dir": "The folder of a sweep (`-m`).",
    "hydra.sweep.subdir": "The folder of a job of a sweep, below `hydra.sweep.dir`.",
    "hydra.job.name": "The name of the job.",
    "hydra.job.chdir": "Whether the command changes into the run directory.",
    "hydra.output_subdir": "The folder of Hydra's own config files, below the run directory.",
}
