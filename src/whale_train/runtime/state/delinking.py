"""Read a checkpoint of shared layers as one of layers that continue separately.

Pseudo-to-Real (M6-10T, Lin et al. 2021, arXiv 2110.03888). Every layer begins with the weights that
all shared, so the model's outputs stay the same. The optimizer's state comes from gradients that
were sums over N layers, and each layer's own gradient is one term of such a sum: first moments
become an N-th, second moments an N^2-th of what they were. The ratio in Adam's update then stays
the same, and no layer makes a jump. Counts of updates continue.
"""

from collections import Counter
from collections.abc import Mapping

_FIRST_MOMENTS = ("exp_avg", "momentum_buffer")
_SECOND_MOMENTS = ("exp_avg_sq",)


class Delinking:
    """Names under which a checkpoint of shared layers has the tensors of separate layers.

    `places` maps the path of a parameter to the path of the one whose values it begins with
    (`models/weights/shared_layers.py`). It is empty for a checkpoint of the model itself.
    """

    def __init__(self, places: Mapping[str, str]) -> None:
        self._places = places
        self._sharing = Counter(places.values())  # number of other layers, by the path of the first

    def source(self, folder: str, name: str) -> tuple[str, float]:
        """Return the checkpoint's name of a tensor of `folder`, and the factor of its elements."""
        if folder == "model":
            return self._places.get(name, name), 1.0
        path, _, kind = name.removeprefix("state.").rpartition(".")
        first = self._places.get(path, path)
        layers = 1 + self._sharing[first]
        power = (kind in _FIRST_MOMENTS) + 2 * (kind in _SECOND_MOMENTS)
        return f"state.{first}.{kind}", float(layers) ** -power
