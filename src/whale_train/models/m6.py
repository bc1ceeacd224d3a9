"""An M6: one transformer over the patches of an image and a text, for several tasks.

It knows nothing of whale-train. M6 (Lin et al. 2021, arXiv 2103.00823) trains one set of weights on
tasks that differ in nothing but what attends to what. Here an image's patches are a linear
projection of their pixels, and a task is a number that each sample has:

====  ==================================  ====================  ===================
task  what is learnt                      the image             the source
====  ==================================  ====================  ===================
0     language modelling                  hidden from the text  none
1     captioning: text from an image      seen by the text      none
2     denoising: text from a damaged one  hidden from the text  up to the separator
3     denoising with the image            seen by the text      up to the separator
====  ==================================  ====================  ===================

An image's patches attend to each other in both directions, and so do the tokens of a source. All
other tokens attend to those before them. The loss counts no token of a source. Without an image
part, and without tasks, it is MoEGPT.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional

from whale_train.models.gpt import (
    IGNORED_LABEL,
    Output,
    dropout_layer,
    next_token_loss,
    start_weights,
)
from whale_train.models.moe_gpt import Block, Routing


def attention_mask(num_patches: int, sees_image: Tensor, is_source: Tensor) -> Tensor:
    """Return which position (third dim) attends to which (last dim), bool [batch, 1, positions,
    positions].

    num_patches: number of patches, whose positions come before those of the text.
    sees_image: whether a sample's text attends to its image, bool [batch].
    is_source: tokens that are read in both directions, bool [batch, tokens].
    """
    key = torch.arange(num_patches + is_source.shape[1], device=is_source.device)
    query = key.unsqueeze(1)
    is_patch = key < num_patches
    source = functional.pad(is_source.long(), (num_patches, 0)) > 0
    to_image = is_patch & ((query < num_patches) | sees_image.view(-1, 1, 1))
    to_text = ~is_patch & (query >= num_patches) & ((key <= query) | source.unsqueeze(1))
    return (to_image | to_text).unsqueeze(1)


class Patches(nn.Module):
    """A linear projection of the pixels of an image's patches, with learned positions.

    It maps [batch, channels, image_size, image_size] to [batch, patches, width], row by row.
    """

    def __init__(self, image_size: int, patch_size: int, channels: int, width: int) -> None:
        super().__init__()
        self.across, self.size = image_size // patch_size, patch_size
        self.embed = nn.Linear(channels * patch_size**2, width)
        self.position = nn.Embedding(self.across**2, width)

    def forward(self, image: Tensor) -> Tensor:
        batch, channels, across, size = *image.shape[:2], self.across, self.size
        cut = image.view(batch, channels, across, size, across, size)
        pixels = cut.permute(0, 2, 4, 1, 3, 5).reshape(batch, across**2, channels * size**2)
        projected: Tensor = self.embed(pixels)
        return projected + self.position.weight


class M6(nn.Module):
    """A transformer with a mixture of experts in every block, over an image and a text.

    vocab_size: number of different tokens.
    sequence_length: largest number of tokens of a text.
    image_size: height and width of an image, a multiple of `patch_size`; None for no image part.
    patch_size: height and width of a patch.
    channels: channels of an image.
    separator: number of the token that ends a source.

    The other arguments are those of `MoEGPT`, and so are the losses and the initial weights. Raises
    ValueError for sizes that do not divide, and where `Routing` raises.
    """

    def __init__(
        self,
        vocab_size: int = 257,
        sequence_length: int = 128,
        image_size: int | None = 32,
        patch_size: int = 8,
        channels: int = 3,
        separator: int = 1,
        width: int = 128,
        depth: int = 4,
        heads: int = 4,
        ffn: int = 256,
        experts: int = 8,
        top_k: int = 2,
        dropout: float = 0.0,
        prototypes: int = 1,
        capacity_factor: float | None = None,
        balance: float = 0.0,
        balance_over: str = "batch",
        z_loss: float = 0.0,
        bias_rate: float = 0.0,
    ) -> None:
        super().__init__()
        if image_size is not None and image_size % patch_size:
            raise ValueError(
                f"image_size={image_size} does not divide into patch_size={patch_size}"
            )
        limits = (capacity_factor, balance, balance_over, z_loss, bias_rate)
        routing = Routing(experts, top_k, prototypes, *limits)
        self.separator = separator
        self.num_patches = 0 if image_size is None else (image_size // patch_size) ** 2
        self.image = (
            None if image_size is None else Patches(image_size, patch_size, channels, width)
        )
        self.token = nn.Embedding(vocab_size, width)
        self.position = nn.Embedding(sequence_length, width)
        self.drop = dropout_layer(dropout)
        self.blocks = nn.ModuleList(
            Block(width, heads, ffn, routing, dropout) for _ in range(depth)
        )
        self.norm = nn.LayerNorm(width)
        self.lm_head = nn.Linear(width, vocab_size, bias=False)
        start_weights(self, depth)

    def forward(
        self,
        input_ids: Tensor,
        labels: Tensor | None = None,
        pixel_values: Tensor | None = None,
        task: Tensor | None = None,
    ) -> Output:
        """Return the logits of the text, and the loss where `labels` are given.

        `input_ids` and `labels` are int64 [batch, tokens], `pixel_values` [batch, channels,
        image_size, image_size], `task` int64 [batch]; None is captioning, or language modelling
        without an image part. The label of a position is its own token; the loss is GPT's over what
        is no source, plus the mean over samples of the auxiliary losses. Raises ValueError for
        images without an image part, and for an image part without images.
        """
        if (pixel_values is None) != (self.image is None):
            if self.image is None:
                raise ValueError("image_size=None has no part for pixel_values")
            raise ValueError("image_size is given, and pixel_values are not")
        positions = torch.arange(input_ids.size(1), device=input_ids.device)
        hidden = self.token(input_ids) + self.position(positions)
        num_patches, mask = self.num_patches, None
        if self.image is not None:
            hidden = torch.cat((self.image(pixel_values), hidden), dim=1)
        if task is None and num_patches:
            task = torch.ones_like(input_ids[:, 0])
        if task is not None:
            ends = (input_ids == self.separator).long()
            is_source = (ends.cumsum(1) - ends == 0) & (task >= 2).unsqueeze(1)
            mask = attention_mask(num_patches, task % 2 == 1, is_source)
            if labels is not None:
                labels = torch.where(is_source, IGNORED_LABEL, labels)
        hidden = self.drop(hidden)
        losses = []
        for block in self.blocks:
            hidden, auxiliary = block(hidden, mask)
            if auxiliary is not None:
                losses.append(auxiliary)
        if num_patches:
            hidden = hidden[:, num_patches:]
        logits = self.lm_head(self.norm(hidden))
        if labels is None:
            return Output(None, logits)
        loss = next_token_loss(logits, labels)
        if losses:
            loss = loss + sum(losses[1:], losses[0]).mean()
        return Output(loss, logits)
