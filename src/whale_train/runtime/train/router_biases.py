"""Adjust routers' biases so that experts get equal loads, without a loss term.

After a step the bias by which a router chooses an expert falls by `rate` where that expert got more
rows than the mean, and rises by `rate` where it got fewer (Wang et al. 2024, arXiv 2408.15664;
DeepSeek-V3, arXiv 2412.19437, section 2.1.2). Models have the bias as a buffer, and leave its
adjustment to their trainer.
"""

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from whale_train.runtime.engines.base import Engine
from whale_train.runtime.graph.expert_loads import PendingLoads
from whale_train.runtime.state.held import paths_of


class RouterBiases:
    """The biases of the routers on a rank.

    `router_biases` are the plan's: the path of the bias, by mixture. Biases on other ranks are
    ignored.
    """

    def __init__(
        self, router_biases: Mapping[str, str], engines: Iterable[Engine], rate: float
    ) -> None:
        self._rate = rate
        buffers: dict[str, Tensor] = {}
        for engine in engines:
            paths = paths_of(engine)
            buffers |= {paths[id(x)]: x for x in engine.module.buffers() if id(x) in paths}
        self._biases = {
            mixture: buffers[path] for mixture, path in router_biases.items() if path in buffers
        }

    @torch.no_grad()
    def move(self, loads: PendingLoads) -> None:
        """Adjust the biases by the loads of the last step over all ranks."""
        rows = loads.rows()
        for mixture, bias in self._biases.items():
            got = rows[mixture].to(bias.dtype)
            bias.add_((got.mean() - got).sign(), alpha=self._rate)
