"""Choose the weights whose products round their factors to 8 bits (`train.precision=fp8`)."""

from whale_train.strategies.graph.block_paths import is_repeated
from whale_train.strategies.graph.operation_graph import ModelProfile

# Products with a smaller dimension gain nothing: rounding costs more than the product.
_LEAST = 64
_MULTIPLE = 16  # of both dimensions, as the kernels of GPUs need


def scaled_weights(profile: ModelProfile) -> tuple[str, ...]:
    """Return the paths of the weights of linear layers in the model's repeated blocks, of those
    whose two dimensions are multiples of 16 and at least 64.

    Output heads and layers outside of blocks stay in 16 bits, as do weights of experts, which
    are no linear layers. A head's product feeds the loss, whose softmax enlarges its errors.
    """
    return tuple(
        path
        for path in profile.linear_weights
        if is_repeated(path)
        and all(
            extent % _MULTIPLE == 0 and extent >= _LEAST
            for extent in profile.weight_by_path[path].shape
        )
    )
