"""A checkpoint of shared layers, as one of layers that go on by themselves.

Pseudo-to-Real (M6-10T, Lin et al. 2021, arXiv 2110.03888). Every layer begins with the weights
that all had, so that nothing is computed otherwise. The optimizer's state was made of gradients
that were sums over N layers, and each layer's from now on is one of them: first moments become an
N-th, second moments an N^2-th of what they were. The ratio of which Adam's update is made stays the
same then, and no layer makes a jump; counts of updates go on.
"""

from collections import Counter
from collections.abc import Mapping

_FIRST_MOMENTS = ("exp_avg", "momentum_buffer")
_SECOND_MOMENTS = ("exp_avg_sq",)


class Delinking:
    """Where a tensor of a checkpoint is found: `places` are the paths of parameters by those of the
    ones whose values they begin with (`models/weights/shared_layers.py`); none for a checkpoint of
    the model itself."""

    def __init__(self, places: Mapping[str, str]) -> None:
        self._places = places
        self._sharing = Counter(places.values())  # a first layer's, by the others

    def source(self, folder: str, name: str) -> tuple[str, float]:
        """Return the name that the checkpoint has a tensor of `folder` under, and what its elements
        are multiplied by."""
        if folder == "model":
            return self._places.get(name, name), 1.0
        path, _, kind = name.removeprefix("state.").rpartition(".")
        first = self._places.get(path, path)
        layers = 1 + self._sharing[first]
        power = (kind in _FIRST_MOMENTS) + 2 * (kind in _SECOND_MOMENTS)
        return f"state.{first}.{kind}", float(layers) ** -power
