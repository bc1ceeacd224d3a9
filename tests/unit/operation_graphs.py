"""Small operation graphs written by hand, as torch.export would give them.

Each function is one kind of head; extents are unlike each other (batch aside: sequences of 3,
widths of 4, 8 and 6), so that a wrong dimension shows. FLOPs are 2 per multiply-add of a product,
per sample.
"""

from collections.abc import Mapping

from whale_train.strategies.graph.operation_graph import (
    Argument,
    InputField,
    ModelProfile,
    Operation,
    OperationGraph,
    Parameter,
    Ref,
    Shape,
    Size,
)

END = 2**63 - 1  # how export writes the open end of a slice


def shape_of(text: str) -> Shape:
    """`"B 3 12"` and `"3B 12"`: extents that are B's multiples follow the batch."""

    def size(word: str) -> Size:
        return Size(0, int(word[:-1] or 1)) if word.endswith("B") else Size(int(word))

    return tuple(size(word) for word in text.split())


class Sketch:
    """Collects operations in order. An argument that is a string naming an earlier one is it."""

    def __init__(self) -> None:
        self.operations: list[Operation] = []
        self.fields: list[InputField] = []

    def input(self, name: str, shape: str, dtype: str = "int64") -> str:
        extents = tuple(size.fixed for size in shape_of(shape)[1:])
        self.fields.append(InputField(name, extents, dtype))
        self.operations.append(Operation(name, "input", shape=shape_of(shape), dtype=dtype))
        return name

    def parameter(self, path: str, shape: str, target: str = "parameter") -> str:
        name = path.replace(".", "_")
        extents = shape_of(shape)
        self.operations.append(Operation(name, target, (), (), extents, "float32", "", path))
        return name

    def buffer(self, path: str, shape: str) -> str:
        return self.parameter(path, shape, "buffer")

    def call(
        self,
        name: str,
        target: str,
        *args: object,
        shape: str | None,
        module: str = "",
        flops: float = 0.0,
        dtype: str = "float32",
        kwargs: Mapping[str, object] | None = None,
    ) -> str:
        """`shape` None is a value that is no tensor, `""` a scalar tensor. An operation in place
        writes into its first argument, if that is a buffer."""
        known = {operation.name for operation in self.operations}
        buffers = {operation.name for operation in self.operations if operation.target == "buffer"}
        in_place = target.partition(".")[0].endswith("_")

        def argument(value: object) -> Argument:
            if isinstance(value, tuple):
                return tuple(argument(part) for part in value)
            assert value is None or isinstance(value, str | int | float)
            return Ref(value) if isinstance(value, str) and value in known else value

        self.operations.append(
            Operation(
                name,
                f"aten.{target}",
                tuple(argument(x) for x in args),
                tuple((key, argument(x)) for key, x in (kwargs or {}).items()),
                None if shape is None else shape_of(shape),
                dtype if shape is not None else "",
                module,
                "",
                flops,
                writes=(str(args[0]),) if in_place and args[0] in buffers else (),
                changes=str(args[0]) if in_place else "",
            )
        )
        return name

    def graph(self, loss: str) -> OperationGraph:
        output = Operation("output", "output", ((Ref(loss),),))
        return OperationGraph((*self.operations, output))

    def profile(
        self,
        name: str,
        loss: str,
        activation_bytes: float = 1000.0,
        buffer_bytes: int = 0,
        tied: Mapping[str, str] | None = None,
        batch_norm_modules: tuple[str, ...] = (),
    ) -> ModelProfile:
        """`tied` maps an alias to the canonical path it shares a tensor with."""
        aliases = dict(tied or {})
        shapes = {
            op.path: tuple(size.fixed for size in op.shape or ())
            for op in self.operations
            if op.target == "parameter"
        }
        return ModelProfile(
            name=name,
            parameters=tuple(
                Parameter(path, shape, 4, tuple(a for a, to in aliases.items() if to == path))
                for path, shape in shapes.items()
                if path not in aliases
            ),
            inputs=tuple(self.fields),
            forward_flops=sum(op.flops for op in self.operations),
            activation_bytes=activation_bytes,
            buffer_bytes=buffer_bytes,
            graph=self.graph(loss),
            batch_norm_modules=batch_norm_modules,
        )


def gpt(tied: bool = False, rows: int = 12) -> ModelProfile:
    """Embedding of so many `rows`, one projection, a norm, a head without bias, labels shifted: 12
    tokens, width 4, sequences of 3. Tied, the embedding reads the head's weight."""
    s = Sketch()
    s.parameter("token.weight", f"{rows} 4")
    s.parameter("block.weight", "4 4")
    s.parameter("norm.weight", "4")
    s.parameter("lm_head.weight", "12 4")
    s.input("input_ids", "B 3")
    s.input("labels", "B 3")
    table = "lm_head_weight" if tied else "token_weight"
    s.call("embedding", "embedding.default", table, "input_ids", shape="B 3 4", module="token")
    s.call(
        "linear", "linear.default", "embedding", "block_weight", shape="B 3 4", module="block",
        flops=96.0,
    )  # fmt: skip
    s.call("norm", "layer_norm.default", "linear", (4,), "norm_weight", shape="B 3 4")
    s.call(
        "logits", "linear.default", "norm", "lm_head_weight", shape="B 3 12", module="lm_head",
        flops=288.0,
    )  # fmt: skip
    s.call("rows", "slice.Tensor", "labels", 0, 0, END, shape="B 3", dtype="int64")
    s.call("shifted", "slice.Tensor", "rows", 1, 1, END, shape="B 2", dtype="int64")
    s.call("padded", "pad.default", "shifted", (0, 1), "constant", -100.0, shape="B 3")
    s.call("flat", "flatten.using_ints", "logits", 0, 1, shape="3B 12")
    s.call("float", "to.dtype", "flat", "torch.float32", shape="3B 12")
    s.call("targets", "flatten.using_ints", "padded", shape="3B", dtype="int64")
    s.call("loss", "cross_entropy_loss.default", "float", "targets", shape="")
    return s.profile("gpt", "loss", tied={"lm_head.weight": "token.weight"} if tied else None)


def classifier(classes: int = 10, batch_norm: bool = True) -> ModelProfile:
    """8 features to a width of 4, BatchNorm that counts its batches, a head with a bias."""
    s = Sketch()
    s.parameter("trunk.weight", "4 8")
    s.parameter("trunk.bias", "4")
    s.parameter("head.weight", f"{classes} 4")
    s.parameter("head.bias", f"{classes}")
    features = "hidden"
    if batch_norm:
        s.parameter("norm.weight", "4")
        s.parameter("norm.bias", "4")
        s.buffer("norm.running_mean", "4")
        s.buffer("norm.running_var", "4")
        s.buffer("norm.num_batches_tracked", "")
    s.input("features", "B 8", "float32")
    s.input("labels", "B")
    s.call(
        "hidden", "linear.default", "features", "trunk_weight", "trunk_bias", shape="B 4",
        module="trunk", flops=64.0,
    )  # fmt: skip
    if batch_norm:
        s.call(
            "counted",
            "add_.Tensor",
            "norm_num_batches_tracked",
            1,
            shape="",
            dtype="int64",
            module="norm",
        )
        features = s.call(
            "normed", "batch_norm.default", "hidden", "norm_weight", "norm_bias",
            "norm_running_mean", "norm_running_var", True, 0.1, 1e-5, True, shape="B 4",
            module="norm",
        )  # fmt: skip
    s.call(
        "logits", "linear.default", features, "head_weight", "head_bias", shape=f"B {classes}",
        module="head", flops=8.0 * classes,
    )  # fmt: skip
    s.call("float", "to.dtype", "logits", "torch.float32", shape=f"B {classes}")
    s.call("loss", "cross_entropy_loss.default", "float", "labels", shape="")
    modules = ("norm",) if batch_norm else ()
    return s.profile("classifier", "loss", buffer_bytes=40, batch_norm_modules=modules)


def conv1d_head() -> ModelProfile:
    """Hugging Face's Conv1D as a head: addmm with a weight [4, 10] over rows of [batch * 3]."""
    s = Sketch()
    s.parameter("trunk.weight", "4 8")
    s.parameter("head.weight", "4 10")
    s.parameter("head.bias", "10")
    s.input("features", "B 3 8", "float32")
    s.input("labels", "B 3")
    s.call("hidden", "linear.default", "features", "trunk_weight", shape="B 3 4", flops=192.0)
    s.call("flat", "view.default", "hidden", (-1, 4), shape="3B 4")
    s.call(
        "addmm", "addmm.default", "head_bias", "flat", "head_weight", shape="3B 10",
        module="head", flops=240.0,
    )  # fmt: skip
    s.call("logits", "view.default", "addmm", (-1, 3, 10), shape="B 3 10", module="head")
    s.call("swapped", "transpose.int", "logits", 1, 2, shape="B 10 3")
    s.call("back", "permute.default", "swapped", (0, 2, 1), shape="B 3 10")
    s.call("rows", "reshape.default", "back", (-1, 10), shape="3B 10")
    s.call("targets", "view.default", "labels", (-1,), shape="3B", dtype="int64")
    s.call("loss", "cross_entropy_loss.default", "rows", "targets", shape="")
    return s.profile("conv1d", "loss")


def transposed_head() -> ModelProfile:
    """A head written `x @ W.T`, cast before it is transposed."""
    s = Sketch()
    s.parameter("trunk.weight", "4 8")
    s.parameter("classes", "10 4")
    s.input("features", "B 8", "float32")
    s.input("labels", "B")
    s.call("hidden", "linear.default", "features", "trunk_weight", shape="B 4", flops=64.0)
    s.call("cast", "to.dtype", "classes", "torch.float32", shape="10 4")
    s.call("t", "t.default", "cast", shape="4 10")
    s.call("logits", "matmul.default", "hidden", "t", shape="B 10", flops=80.0)
    s.call("loss", "cross_entropy_loss.default", "logits", "labels", shape="")
    return s.profile("transposed", "loss")


def bert() -> ModelProfile:
    """A head tied to the embedding, and its bias a parameter that is added afterwards."""
    s = Sketch()
    s.parameter("embeddings.weight", "12 4")
    s.parameter("transform.weight", "4 4")
    s.parameter("transform.bias", "4")
    s.parameter("decoder.weight", "12 4")
    s.parameter("decoder.bias", "12")
    s.input("input_ids", "B 3")
    s.input("labels", "B 3")
    s.call(
        "embedding", "embedding.default", "decoder_weight", "input_ids", 0, shape="B 3 4",
        module="embeddings",
    )  # fmt: skip
    s.call(
        "transform", "linear.default", "embedding", "transform_weight", "transform_bias",
        shape="B 3 4", module="transform", flops=96.0,
    )  # fmt: skip
    s.call(
        "linear", "linear.default", "transform", "decoder_weight", shape="B 3 12",
        module="decoder", flops=288.0,
    )  # fmt: skip
    s.call("logits", "add.Tensor", "linear", "decoder_bias", shape="B 3 12", module="decoder")
    s.call("flat", "view.default", "logits", (-1, 12), shape="3B 12")
    s.call("targets", "view.default", "labels", (-1,), shape="3B", dtype="int64")
    s.call("loss", "cross_entropy_loss.default", "flat", "targets", shape="")
    return s.profile("bert", "loss", tied={"decoder.weight": "embeddings.weight"})


def two_heads() -> ModelProfile:
    """Two projections of one trunk, each with its loss; `coarse` is the smaller."""
    s = Sketch()
    s.parameter("trunk.weight", "4 8")
    s.parameter("coarse.weight", "6 4")
    s.parameter("fine.weight", "10 4")
    s.input("features", "B 8", "float32")
    s.input("labels", "B")
    s.input("coarse_labels", "B")
    s.call("hidden", "linear.default", "features", "trunk_weight", shape="B 4", flops=64.0)
    s.call(
        "coarse", "linear.default", "hidden", "coarse_weight", shape="B 6", module="coarse",
        flops=48.0,
    )  # fmt: skip
    s.call(
        "fine", "linear.default", "hidden", "fine_weight", shape="B 10", module="fine", flops=80.0
    )
    s.call("coarse_loss", "cross_entropy_loss.default", "coarse", "coarse_labels", shape="")
    s.call("fine_loss", "cross_entropy_loss.default", "fine", "labels", shape="")
    s.call("loss", "add.Tensor", "fine_loss", "coarse_loss", shape="")
    return s.profile("two_heads", "loss")


def head_read_elsewhere() -> ModelProfile:
    """The backbone looks at the head's weight: its mean row is added to the features."""
    s = Sketch()
    s.parameter("trunk.weight", "4 8")
    s.parameter("head.weight", "10 4")
    s.input("features", "B 8", "float32")
    s.input("labels", "B")
    s.call("hidden", "linear.default", "features", "trunk_weight", shape="B 4")
    s.call("mean", "mean.dim", "head_weight", (0,), shape="4", module="centre")
    s.call("moved", "sub.Tensor", "hidden", "mean", shape="B 4")
    s.call("logits", "linear.default", "moved", "head_weight", shape="B 10", module="head")
    s.call("loss", "cross_entropy_loss.default", "logits", "labels", shape="")
    return s.profile("centred", "loss")


def without_head() -> ModelProfile:
    """The last product is normed with parameters: no output projection."""
    s = Sketch()
    s.parameter("trunk.weight", "4 8")
    s.parameter("norm.weight", "4")
    s.input("features", "B 8", "float32")
    s.call("hidden", "linear.default", "features", "trunk_weight", shape="B 4", module="trunk")
    s.call("normed", "layer_norm.default", "hidden", (4,), "norm_weight", shape="B 4")
    s.call("loss", "mean.default", "normed", shape="")
    return s.profile("headless", "loss")


def auxiliary_loss(experts: str = "B 3") -> ModelProfile:
    """A router's scores add a scalar to the loss of the head; `experts` is their shape."""
    s = Sketch()
    s.parameter("router.weight", "3 8")
    s.parameter("trunk.weight", "4 8")
    s.parameter("head.weight", "10 4")
    s.input("features", "B 8", "float32")
    s.input("labels", "B")
    s.call("router", "linear.default", "features", "router_weight", shape="B 3")
    s.call("scores", "softmax.int", "router", -1, shape=experts)
    s.call("hidden", "linear.default", "features", "trunk_weight", shape="B 4", flops=64.0)
    s.call(
        "logits", "linear.default", "hidden", "head_weight", shape="B 10", module="head", flops=80.0
    )
    s.call("balance", "mean.default", "scores", shape="")
    s.call("scaled", "mul.Tensor", "balance", 0.01, shape="")
    s.call("task", "cross_entropy_loss.default", "logits", "labels", shape="")
    s.call("loss", "add.Tensor", "task", "scaled", shape="")
    return s.profile("routed", "loss")


def one_operation(
    target: str,
    args: tuple[object, ...],
    shapes: Mapping[str, str | None],
    shape: str | None,
    dtypes: Mapping[str, str] | None = None,
    kwargs: Mapping[str, object] | None = None,
) -> OperationGraph:
    """The operation `result`; `shapes` are of the values its arguments name."""
    sketch = Sketch()
    for name, text in shapes.items():
        if text is None:
            sketch.call(name, "sym_size.int", 0, shape=None)
        else:
            sketch.input(name, text, (dtypes or {}).get(name, "float32"))
    sketch.call("result", target, *args, shape=shape, kwargs=kwargs)
    return sketch.graph("result")
