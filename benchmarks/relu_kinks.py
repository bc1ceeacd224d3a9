"""Measure how much rounding alone changes the first gradients of the image classifier.

python benchmarks/relu_kinks.py --size 224 --batch 8

The gradients of one batch are computed in fp64, in fp32, with other convolution kernels, and with
weights changed by a factor of 1 +- 2^-24. All these gradients are right. The output has the number
of ReLUs whose decisions differ from fp64, and the parameter whose gradient differs most, relative
to the gradient's largest element.
"""

import argparse
import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from whale_train.data.order import indices_from
from whale_train.data.sources.images import ImagesOptions, open_images
from whale_train.models.image_classifier import ImageClassifier


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--size", type=int, default=224, help="height and width of the images")
    parser.add_argument("--batch", type=int, default=8)
    options = parser.parse_args()
    data = open_images(ImagesOptions(num_classes=10, channels=1, size=options.size))
    batch = data.samples(indices_from(0, data.num_samples, options.batch, 0, True))
    images, labels = (torch.from_numpy(batch[key]) for key in ("pixel_values", "labels"))
    torch.manual_seed(0)
    model = ImageClassifier()
    wide = copy.deepcopy(model).double()
    expected, kinks = gradients(wide, images.double(), labels)
    print(f"{sum(len(x) for x in kinks):,} ReLUs")

    def show(name: str, of: nn.Module, inputs: Tensor) -> None:
        own_gradients, decided = gradients(of, inputs, labels)
        flips = sum(int((a != b).sum()) for a, b in zip(decided, kinks, strict=True))
        off = {
            path: float((own_gradients[path] - x).abs().max() / x.abs().max())
            for path, x in expected.items()
        }
        worst = max(off, key=lambda path: off[path])
        print(f"{name}: {flips} ReLUs differ from fp64, {worst} is {off[worst]:.1e} off")

    show("fp32", model, images)
    with torch.backends.mkldnn.flags(enabled=False):
        show("fp32, mkldnn off", model, images)
    for seed in range(2):
        show(f"fp32, weights moved ({seed})", moved(model, seed), images)
    show("fp64, weights moved (0)", moved(wide, 0), images.double())


def moved(model: nn.Module, seed: int) -> nn.Module:
    """Return a copy of `model` with every weight multiplied by 1 + 2^-24 or 1 - 2^-24."""
    changed, generator = copy.deepcopy(model), torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in changed.parameters():
            up = torch.randint(0, 2, parameter.shape, generator=generator) * 2 - 1
            parameter.mul_(1 + 2**-24 * up.to(parameter.dtype))
    return changed


def gradients(
    model: nn.Module, images: Tensor, labels: Tensor
) -> tuple[dict[str, Tensor], list[Tensor]]:
    """Return the gradients of the parameters in fp64, by path, and the decisions of every ReLU.

    images: the images of the batch.
    labels: the labels of the batch, int64 [batch].

    A decision is a boolean for each element: whether the ReLU passes it on.
    """
    own = copy.deepcopy(model)
    with deciding() as decided:
        own(images, labels).loss.backward()
    return {path: p.grad.double() for path, p in own.named_parameters()}, decided


@contextmanager
def deciding() -> Iterator[list[Tensor]]:
    """Yield a list that receives the decisions of every ReLU called in the context, as flat boolean
    tensors."""
    right, decided = functional.relu, list[Tensor]()

    def seen(x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        decided.append((x > 0).flatten())
        return right(x, *args, **kwargs)

    functional.relu = seen
    try:
        yield decided
    finally:
        functional.relu = right


if __name__ == "__main__":
    main()
