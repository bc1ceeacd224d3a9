"""A small residual network with BatchNorm: the reference image model.

It knows nothing of whale-train. The blocks are ResNet's (He et al. 2016), for images too small for
ResNet's own stem.
"""

from typing import NamedTuple

from torch import Tensor, nn
from torch.nn import functional


class Output(NamedTuple):
    """Result of a forward.

    loss: scalar; None without labels.
    logits: [batch, num_classes].
    """

    loss: Tensor | None
    logits: Tensor


class ResidualBlock(nn.Module):
    """Two 3x3 convolutions with a shortcut around them.

    It maps [batch, inputs, height, width] to [batch, outputs, height / stride, width / stride].
    """

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(inputs, outputs, 3, stride=stride, padding=1, bias=False)
        self.first_norm = nn.BatchNorm2d(outputs)
        self.second = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.second_norm = nn.BatchNorm2d(outputs)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or inputs != outputs:
            self.shortcut = nn.Sequential(
                nn.Conv2d(inputs, outputs, 1, stride=stride, bias=False), nn.BatchNorm2d(outputs)
            )

    def forward(self, image: Tensor) -> Tensor:
        inner = functional.relu(self.first_norm(self.first(image)))
        return functional.relu(self.second_norm(self.second(inner)) + self.shortcut(image))


class ImageClassifier(nn.Module):
    """Residual network of `depth` blocks of `width` channels, a mean over the image, and a linear
    head.

    The second and third block halve the image and double the channels. Further blocks keep both, so
    that depth does not shrink an 8x8 image to nothing (BatchNorm needs more than one value per
    channel, also for a batch of 1).
    """

    def __init__(
        self, num_classes: int = 10, channels: int = 1, width: int = 32, depth: int = 3
    ) -> None:
        super().__init__()
        self.stem = nn.Conv2d(channels, width, 3, padding=1, bias=False)
        self.stem_norm = nn.BatchNorm2d(width)
        blocks: list[nn.Module] = []
        for index in range(depth):
            stride = 2 if index in (1, 2) else 1
            blocks.append(ResidualBlock(width, width * stride, stride))
            width *= stride
        self.blocks = nn.Sequential(*blocks)
        self.head = nn.Linear(width, num_classes)

    def forward(self, pixel_values: Tensor, labels: Tensor | None = None) -> Output:
        """Return the logits, and the mean cross-entropy where `labels` are given.

        `pixel_values` are [batch, channels, height, width], `labels` int64 [batch].
        """
        image = functional.relu(self.stem_norm(self.stem(pixel_values)))
        logits = self.head(self.blocks(image).mean(dim=(2, 3)))
        if labels is None:
            return Output(None, logits)
        # In half precision a loss keeps three digits.
        return Output(functional.cross_entropy(logits.float(), labels), logits)
