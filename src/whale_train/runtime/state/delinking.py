"""Read a checkpoint of shared layers into layers that continue separately.

The method is Pseudo-to-Real (M6-10T, Lin et al. 2021, arXiv 2110.03888). Every layer begins with
the weights that all layers shared, so the model's outputs stay the same. The optimizer's state
comes from gradients that were sums over N layers, and each layer's own gradient is one term of such
a sum. First moments are therefore divided by N, and second moments by N^2. The ratio in Adam's
update then stays the same, and no layer makes a jump. Counts of updates continue.
"""

from collections import Counter
from collections.abc import Mapping

_FIRST_MOMENTS = ("exp_avg", "momentum_buffer")
_SECOND_MOMENTS = ("exp_avg_sq",)


class Delinking:
    """The names of separate layers' tensors in a checkpoint of shared layers.

    `places` maps the path of a parameter to the path of the parameter whose values it begins with
    (`models/weights/shared_layers.py`). It is empty for a checkpoint of the model itself.
    """

    def __init__(self, places: Mapping[str, str]) -> None:
        self._places = places
        self._sharing = Counter(places.values())  # number of other layers, by the path of the first

    def source(self, folder: str, name: str) -> tuple[str, float]:
        """Return the checkpoint's name of the tensor `name` of `folder`, and the factor for its
        elements."""
        if folder == "model":
            return self._places.get(name, name), 1.0
        path, _, kind = name.removeprefix("state.").rpartition(".")
        first = self._places.get(path, path)
        layers = 1 + self._sharing[first]
        power = (kind in _FIRST_MOMENTS) + 2 * (kind in _SECOND_MOMENTS)
        return f"state.{first}.{kind}", float(layers) ** -power
