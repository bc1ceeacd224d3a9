"""The rule table: the layout rule of every operation of the exported graph, one line for each
family.

An operation without a rule takes its inputs unsharded: slower, never wrong.
"""

from whale_train.strategies.layouts.rules.matmul import (
    addmm,
    attention,
    baddbmm,
    convolution,
    einsum,
    grouped_mm,
    linear,
    matmul,
    transposed_convolution,
)
from whale_train.strategies.layouts.rules.pointwise import pointwise
from whale_train.strategies.layouts.rules.reductions import (
    along,
    batch_norm,
    cross_entropy,
    embedding,
    group_norm,
    mean,
    normalized,
    reduction,
    second,
    spatial,
    third,
    total,
)
from whale_train.strategies.layouts.rules.slicing import (
    cat,
    gather,
    index,
    index_select,
    item,
    narrow,
    pad,
    stack,
    take_apart,
    unbind,
)
from whale_train.strategies.layouts.rules.views import (
    expand,
    flip,
    fresh,
    matrix_transpose,
    movedim,
    permute,
    repeat,
    repeat_interleave,
    reshape,
    reverse,
    select,
    squeeze,
    transpose,
    unsqueeze,
)
from whale_train.strategies.layouts.types import Rule

# fmt: off
_FAMILIES: tuple[tuple[Rule, str], ...] = (
    # Products
    (linear, "linear.default"),
    (addmm, "addmm.default"),
    (matmul, "matmul.default mm.default bmm.default"),
    (baddbmm, "baddbmm.default"),
    (einsum, "einsum.default"),
    (convolution, "conv1d.default conv2d.default conv3d.default "
                  "conv1d.padding conv2d.padding conv3d.padding"),
    (transposed_convolution,
     "conv_transpose1d.default conv_transpose2d.input conv_transpose3d.input"),
    (attention, "scaled_dot_product_attention.default"),
    (grouped_mm, "_grouped_mm.default transformers.grouped_mm_fallback.default "
                 "whale_train.grouped_mm.default"),
    # Tables and losses
    (embedding, "embedding.default"),
    (cross_entropy, "cross_entropy_loss.default"),
    # One element at a time
    (pointwise, "add.Tensor add_.Tensor sub.Tensor sub_.Tensor rsub.Scalar mul.Tensor mul_.Tensor "
                "mul.Scalar div.Tensor div_.Tensor div.Scalar div.Tensor_mode pow.Tensor_Scalar "
                "pow.Tensor_Tensor pow.Scalar addcmul.default lerp.Scalar"),
    (pointwise, "neg.default abs.default exp.default log.default log1p.default sqrt.default "
                "rsqrt.default reciprocal.default square.default sin.default cos.default "
                "erf.default floor.default round.default sign.default"),
    (pointwise, "relu.default relu_.default silu.default silu_.default gelu.default tanh.default "
                "sigmoid.default softplus.default mish.default hardtanh.default relu6.default "
                "hardswish.default hardsigmoid.default leaky_relu.default elu.default "
                "clamp.default clamp_min.default clamp_max.default"),
    (pointwise, "dropout.default dropout_.default alpha_dropout.default"),
    (pointwise, "to.dtype to.dtype_layout to.device _to_copy.default type_as.default float.default "
                "contiguous.default clone.default alias.default detach.default "
                "lift_fresh_copy.default"),
    (pointwise, "eq.Scalar eq.Tensor ne.Scalar ne.Tensor lt.Scalar lt.Tensor le.Scalar le.Tensor "
                "gt.Scalar gt.Tensor ge.Scalar ge.Tensor isinf.default isnan.default "
                "logical_not.default logical_and.default logical_or.default "
                "bitwise_not.default __and__.Tensor __or__.Tensor"),
    (pointwise, "where.self where.ScalarOther where.ScalarSelf where.Scalar "
                "masked_fill.Scalar masked_fill.Tensor masked_fill_.Scalar "
                "maximum.default minimum.default max.other min.other "
                "zeros_like.default ones_like.default full_like.default"),
    # Views and parts
    (reshape, "view.default reshape.default _unsafe_view.default flatten.using_ints unflatten.int"),
    (transpose, "transpose.int t.default"),
    (reverse, "numpy_T.default"),
    (matrix_transpose, "mT.default mH.default"),
    (permute, "permute.default"),
    (movedim, "movedim.int movedim.intlist"),
    (narrow, "slice.Tensor"),
    (select, "select.int"),
    (squeeze, "squeeze.default squeeze.dim squeeze.dims"),
    (unsqueeze, "unsqueeze.default"),
    (expand, "expand.default expand_as.default broadcast_to.default"),
    (repeat, "repeat.default"),
    (repeat_interleave, "repeat_interleave.self_int"),
    (take_apart, "split.Tensor split_with_sizes.default chunk.default tensor_split.sections"),
    (unbind, "unbind.int"),
    (item, "<built-in function getitem>"),
    (cat, "cat.default"),
    (stack, "stack.default"),
    (index, "index.Tensor"),
    (index_select, "index_select.default"),
    (gather, "gather.default"),
    (flip, "flip.default"),
    (pad, "pad.default constant_pad_nd.default"),
    (fresh, "sym_size.int new_zeros.default new_ones.default new_full.default new_empty.default"),
    # Along some dimensions, over all others
    (along(second), "softmax.int log_softmax.int cumsum.default sort.default "
                    "argsort.default glu.default"),
    (along(second), "_softmax.default _log_softmax.default"),
    (along(third), "topk.default"),
    (along(normalized), "layer_norm.default rms_norm.default"),
    (along(spatial), "max_pool1d.default max_pool2d.default max_pool3d.default avg_pool1d.default "
                     "avg_pool2d.default avg_pool3d.default adaptive_avg_pool1d.default "
                     "adaptive_avg_pool2d.default adaptive_avg_pool3d.default "
                     "upsample_nearest2d.vec upsample_bilinear2d.vec"),
    (batch_norm, "batch_norm.default"),
    (group_norm, "group_norm.default"),
    (total, "sum.dim_IntList sum.default"),
    (mean, "mean.dim mean.default"),
    (reduction, "amax.default amin.default var.correction std.correction logsumexp.default "
                "linalg_vector_norm.default any.dim all.dim argmax.default argmin.default "
                "var.dim std.dim"),
)
# fmt: on


def _full_name(target: str) -> str:
    return target if target.count(".") == 2 else f"aten.{target}"


def _each(targets: str) -> list[str]:
    return targets.split()


def _names(targets: str) -> list[str]:
    if targets.startswith("<"):
        return [targets]
    return [_full_name(target) for target in _each(targets)]


RULES: dict[str, Rule] = {name: rule for rule, targets in _FAMILIES for name in _names(targets)}

# The operations that keep the samples of replicas (the batch axis) apart. Any other operation takes
# the whole batch: sharded work begins there.
CARRIES_SAMPLES = frozenset(
    f"aten.{target}"
    for target in _each(
        "linear.default addmm.default matmul.default mm.default embedding.default "
        "cross_entropy_loss.default add.Tensor sub.Tensor mul.Tensor div.Tensor neg.default "
        "tanh.default to.dtype to.dtype_layout _to_copy.default type_as.default float.default "
        "contiguous.default clone.default alias.default clamp.default relu.default view.default "
        "reshape.default _unsafe_view.default flatten.using_ints unflatten.int transpose.int "
        "t.default permute.default slice.Tensor select.int unsqueeze.default"
    )
)


def register_rule(target: str, rule: Rule) -> None:
    """Add a layout rule for an operation of your own (`my_library.my_op.default`).

    Call it in the module that defines the model, which is imported before anything is planned. The
    rule takes a `RuleInput` and returns a `RuleResult`, or None where the operation cannot work on
    shards, as the rules in `strategies/layouts/rules/` do. At run time the operation is called
    unchanged, on this rank's shards of the inputs in the layouts that the rule wants. Raises
    ValueError for an operation that has a rule.
    """
    if target in RULES:
        raise ValueError(f"{target} has a layout rule")
    RULES[target] = rule
