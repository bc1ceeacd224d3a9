"""The table of rules: the rule of every operation, one line for each family.

A name stands for all overloads of an operation and for its in-place form. A name with a dot stands
for that overload alone.
"""

from functools import partial

from whale_train.strategies.independence import (
    computing,
    indexing,
    losses,
    making,
    moving,
    products,
)
from whale_train.strategies.independence.call import Answer, Call, Refused, StateRule
from whale_train.strategies.independence.states import FIXED, PerSample, RowPosition


def _written(call: Call) -> Answer:
    """Derive the state of the first input overwritten by the second, which is broadcast to it."""
    shifted = call.shifted(call.name(1)) if call.name(1) else FIXED
    if isinstance(shifted, PerSample | RowPosition):
        return shifted
    return moving.whole(call, shifted)


def _order(call: Call) -> Answer:
    """Derive the state of a random permutation of numbers."""
    return (
        Refused("draws an order of the samples") if any(s.per_sample for s in call.shape) else FIXED
    )


# fmt: off
_FAMILIES: tuple[tuple[StateRule, str], ...] = (
    # One element at a time (torch's tag `pointwise`), and dropout
    (computing.elementwise,
     "abs acos acosh addcdiv addcmul angle asin asinh atan atan2 atanh bitwise_and "
     "bitwise_left_shift bitwise_not bitwise_or bitwise_right_shift bitwise_xor ceil celu clamp "
     "clamp_max clamp_min clip copysign cos cosh deg2rad digamma div.Tensor_mode div.Scalar_mode "
     "elu eq erf erfc erfinv exp exp2 expm1 float_power floor fmax fmin fmod frac gcd ge gelu gt "
     "hardshrink hardsigmoid hardswish hardtanh heaviside hypot i0 isfinite isinf isnan isneginf "
     "isposinf lcm ldexp le leaky_relu lerp lgamma log log10 log1p log2 log_sigmoid logaddexp "
     "logaddexp2 logical_and logical_not logical_or logical_xor logit lt masked_fill max.other "
     "maximum min.other minimum mish nan_to_num ne nextafter polygamma pow rad2deg reciprocal "
     "relu relu6 remainder round rsqrt rrelu selu sgn sigmoid sign signbit silu sin sinc sinh "
     "softplus softshrink special_entr special_erfcx special_i0e special_i1 special_log_ndtr "
     "special_ndtri special_xlog1py sqrt square tan tanh threshold trunc where xlogy __and__ "
     "__or__ __xor__ __lshift__ __rshift__ dropout alpha_dropout"),
    (computing.copying,
     "neg positive to _to_copy float double half bfloat16 contiguous clone alias detach "
     "type_as lift_fresh_copy lift_fresh lift"),
    (computing.adding, "add sub rsub"),
    (computing.multiplying, "mul multiply"),
    (computing.dividing, "div divide true_divide"),
    (computing.dividing_numbers, "floor_divide"),
    (making.fresh, "zeros_like ones_like full_like empty_like"),
    (_written, "copy"),
    # Reductions
    (computing.summing, "sum nansum"),
    (computing.averaging, "mean"),
    (computing.counting, "count_nonzero bincount"),
    (computing.histogram, "histc"),
    (computing.reducing,
     "amax amin aminmax all any argmax argmin max min median nanmedian mode std std_mean var "
     "var_mean prod logsumexp nanmean"),
    (computing.norm, "linalg_vector_norm norm"),
    # Along a dimension
    (computing.along, "softmax log_softmax _softmax _log_softmax cumprod logcumsumexp cummax "
                      "cummin softmin"),
    (computing.along_last, "glu"),
    (computing.along_third, "topk kthvalue diff"),
    (computing.running_sum, "cumsum flip"),
    (computing.rolling, "roll"),
    (computing.sorting, "sort argsort"),
    (computing.last_dims, "layer_norm rms_norm"),
    (computing.triangle, "triu tril"),
    # Channels and places of a sample
    (computing.per_image,
     "group_norm instance_norm max_pool1d max_pool2d max_pool3d avg_pool1d avg_pool2d avg_pool3d "
     "adaptive_avg_pool1d adaptive_avg_pool2d adaptive_avg_pool3d adaptive_max_pool1d "
     "adaptive_max_pool2d adaptive_max_pool3d max_pool1d_with_indices max_pool2d_with_indices "
     "upsample_nearest1d upsample_nearest2d upsample_nearest3d upsample_linear1d "
     "upsample_bilinear2d upsample_bicubic2d upsample_trilinear3d feature_dropout "
     "feature_alpha_dropout im2col channel_shuffle lp_pool1d lp_pool2d"),
    (computing.batch_norm, "batch_norm"),
    (computing.recurrent, "lstm.input gru.input rnn_tanh.input rnn_relu.input"),
    # Products
    (products.linear, "linear"),
    (products.matmul, "matmul mm bmm mv dot vdot"),
    (products.added_product, "addmm baddbmm addmv"),
    (products.einsum, "einsum"),
    (products.convolution, "conv1d conv2d conv3d conv_transpose1d conv_transpose2d "
                            "conv_transpose3d"),
    (products.attention, "scaled_dot_product_attention"),
    (products.grouped_product, "_grouped_mm transformers.grouped_mm_fallback "
                                "whale_train.grouped_mm"),
    (products.lookup, "embedding"),
    (products.renormed, "embedding_renorm"),
    # Losses
    (losses.typed_target_mean, "cross_entropy_loss nll_loss nll_loss_nd nll_loss2d"),
    (partial(losses.elementwise_loss, position=2),
     "mse_loss l1_loss smooth_l1_loss huber_loss soft_margin_loss kl_div"),
    (partial(losses.elementwise_loss, position=3),
     "binary_cross_entropy hinge_embedding_loss"),
    (partial(losses.elementwise_loss, position=4),
     "binary_cross_entropy_with_logits margin_ranking_loss"),
    (partial(losses.elementwise_loss, position=5), "poisson_nll_loss"),
    (partial(losses.row_loss, position=2), "multilabel_margin_loss"),
    (partial(losses.row_loss, position=4), "cosine_embedding_loss"),
    (partial(losses.row_loss, position=5), "multi_margin_loss"),
    (partial(losses.row_loss, position=7), "triplet_margin_loss"),
    # Views and parts
    (moving.reshape, "view reshape _unsafe_view flatten unflatten view_as reshape_as"),
    (moving.transpose, "transpose t mT mH matrix_H adjoint swapaxes swapdims"),
    (moving.reverse, "numpy_T"),
    (moving.permute, "permute"),
    (moving.movedim, "movedim moveaxis"),
    (moving.squeeze, "squeeze unsqueeze"),
    (moving.expand, "expand expand_as broadcast_to"),
    (computing.broadcast_rows, "broadcast_tensors"),
    (moving.repeat, "repeat tile"),
    (moving.repeat_interleave, "repeat_interleave.self_int"),
    (moving.narrow, "slice"),
    (moving.split, "split split_with_sizes chunk tensor_split"),
    (moving.item, "<built-in function getitem>"),
    (moving.select, "select"),
    (moving.unbind, "unbind"),
    (moving.cat, "cat concat"),
    (moving.stack, "stack"),
    (moving.pad, "pad constant_pad_nd"),
    # Indexing
    (indexing.index, "index.Tensor"),
    (indexing.index_put, "index_put"),
    (indexing.gather, "gather scatter scatter_add scatter_reduce"),
    (indexing.index_select, "index_select"),
    (indexing.scattered, "select_scatter slice_scatter"),
    (indexing.one_hot, "one_hot"),
    (indexing.searchsorted, "searchsorted"),
    # What a forward makes
    (making.fresh, "zeros ones full empty new_zeros new_ones new_full new_empty scalar_tensor "
                   "fill zero"),
    (making.drawn, "rand randn randint rand_like randn_like randint_like normal bernoulli uniform "
                   "exponential poisson"),
    (_order, "randperm"),
    (making.arange, "arange"),
    (making.extent, "sym_size"),
    (computing.multiplying, "<built-in function mul>"),
    (computing.dividing, "<built-in function truediv>"),
    (computing.adding, "<built-in function add> <built-in function sub>"),
    (computing.copying, "<function sym_float>"),
)
# fmt: on


def _names(family: str) -> list[str]:
    # The names of Python's functions have blanks, which do not separate names.
    names = []
    for word in (
        family.replace("<built-in function ", "<built-in~function~")
        .replace("<function ", "<function~")
        .split()
    ):
        names.append(word.replace("~", " "))
    return names


RULES: dict[str, StateRule] = {name: rule for rule, family in _FAMILIES for name in _names(family)}


def rule_of(target: str) -> StateRule | None:
    """Return the rule of the operation `target`, by its overload or else by its base name; None
    where neither has a rule."""
    kind = target.removeprefix("aten.")
    if kind in RULES:
        return RULES[kind]
    base = kind.rpartition(".")[0] or kind
    in_place = base.endswith("_") and not base.endswith("__")
    overload = kind[len(base) :]
    base = base.removesuffix("_") if in_place else base
    return RULES.get(base + overload) or RULES.get(base)
