"""A deep model's profile out of a few of its blocks, against that of all of them."""

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.pairs import some
from torch import Tensor, fx, nn

from whale_train.models.export.export import export, export_model, module_path
from whale_train.models.options import HUGGING_FACE, ModelOptions
from whale_train.models.profile import folded_export, measure
from whale_train.models.profile.block_folding import folds_of, unfold
from whale_train.models.profile.measure import profile_model
from whale_train.strategies.graph.operation_graph import InputField, ModelProfile

TOKENS = tuple(InputField(name, (12,), "int64", 31) for name in ("input_ids", "labels"))
VECTORS = (InputField("x", (8,), "float32"), InputField("labels", (), "int64", 8))
BLOCKS = 6
SMALL = {"vocab_size": 31, "hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 2}
HUGGING_FACE_MODELS = {
    "LlamaForCausalLM": {**SMALL, "num_hidden_layers": BLOCKS, "num_key_value_heads": 1},
    # An encoder and a decoder, whose first blocks are unlike the others.
    "T5ForConditionalGeneration": {
        **{"vocab_size": 31, "d_model": 16, "d_kv": 8, "d_ff": 24, "num_heads": 2},
        **{"num_layers": BLOCKS, "num_decoder_layers": BLOCKS + 1, "decoder_start_token_id": 0},
    },
    # Its first block multiplies sizes for all that follow; experts by their numbers.
    "MixtralForCausalLM": {
        **{**SMALL, "num_hidden_layers": BLOCKS, "num_key_value_heads": 1, "num_local_experts": 2},
        **{"pad_token_id": 0, "bos_token_id": 0, "eos_token_id": 0},
    },
    # Kinds of attention that take turns: nothing to fold.
    "Gemma2ForCausalLM": {
        **{**SMALL, "num_hidden_layers": BLOCKS, "num_key_value_heads": 1, "head_dim": 8},
        **{"pad_token_id": 0, "bos_token_id": 0, "eos_token_id": 0},
    },
}


def both(options: ModelOptions, fields: tuple[InputField, ...]) -> list[ModelProfile]:
    return [profile_model(options, "m", fields, by_folding=folding) for folding in (True, False)]


# It has two runs of blocks to fold. Blocks that have nothing to fold are below.
@pytest.mark.parametrize("name", some(HUGGING_FACE_MODELS, ["T5ForConditionalGeneration"]))
def test_a_folded_profile_is_that_of_the_whole_model(name: str) -> None:
    pytest.importorskip("transformers")
    options = ModelOptions.from_mapping(
        {
            **{"_target_": HUGGING_FACE, "architecture": name, "loss": "model"},
            "config": HUGGING_FACE_MODELS[name],
        }
    )
    folded, whole = both(options, TOKENS)
    assert whole.graph is not None
    assert folded == whole


@pytest.mark.parametrize("model", some(["gpt.GPT", "moe_gpt.MoEGPT"], ["moe_gpt.MoEGPT"]))
def test_layers_that_share_their_weights_are_folded(
    model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    more = {"ffn": 24, "experts": 2} if model == "moe_gpt.MoEGPT" else {"heads": 2}
    size = {"vocab_size": 31, "sequence_length": 12, "width": 16, "depth": BLOCKS, **more}
    taken = {"_target_": f"whale_train.models.{model}", **size, "loss": "model"}
    options = ModelOptions.from_mapping({**taken, "share_layers": True})
    unfolded = []
    monkeypatch.setattr(
        measure, "unfold", lambda *args: unfolded.append(unfold(*args)) or unfolded[0]
    )
    folded, whole = both(options, TOKENS)
    assert unfolded
    assert whole.graph is not None
    assert folded == whole


@pytest.mark.parametrize("name", some(HUGGING_FACE_MODELS, ["MixtralForCausalLM"]))
def test_a_folded_export_is_that_of_the_whole_model(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("transformers")
    options = ModelOptions.from_mapping(
        {
            **{"_target_": HUGGING_FACE, "architecture": name, "loss": "model"},
            "config": HUGGING_FACE_MODELS[name],
        }
    )
    whole, _ = export_model(options, TOKENS)
    sizes: list[int] = []

    def noting(*args: Any) -> tuple[fx.GraphModule | None, str]:
        graph, error = export(*args)
        sizes.append(len(graph.graph.nodes) if graph is not None else 0)
        return graph, error

    monkeypatch.setattr(folded_export, "export", noting)
    made, _ = folded_export.export_by_folding(options, TOKENS)
    assert whole is not None
    assert made is not None
    assert described(made) == described(whole)
    assert tied(made) == tied(whole)
    is_folded = name != "Gemma2ForCausalLM"
    assert (sizes[0] < len(whole.graph.nodes)) == is_folded
    assert len(sizes) == 1


def described(graph: fx.GraphModule) -> list[tuple[str, ...]]:
    """All that is known of a graph's nodes, as text."""
    found = []
    for node in graph.graph.nodes:
        given = fx.node.map_arg((node.args, node.kwargs), lambda x: x.name)
        value = node.meta.get("val")
        parts = (node.op, node.target, node.name, given, module_path(node), value)
        found.append(tuple(map(str, parts)))
    return found


def tied(graph: fx.GraphModule) -> set[frozenset[str]]:
    """The names of every tensor that a graph has."""
    names: dict[int, set[str]] = {}
    for name, x in (*graph.named_parameters(remove_duplicate=False), *graph.named_buffers()):
        names.setdefault(id(x), set()).add(name)
    return {frozenset(each) for each in names.values()}


class Block(nn.Module):
    def __init__(self, kind: str, number: int) -> None:
        super().__init__()
        self.number = number
        self.linear = nn.Linear(8, 8)
        self.odd = kind == "odd" and number == 4

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        return x + (y.sin() if self.odd else y.tanh())


class Deep(nn.Module):
    """Seven blocks of one kind; what is unlike is in the settings, in the forward, or nowhere."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.first = nn.Linear(8, 8)
        self.blocks = nn.ModuleList(Block(kind, number) for number in range(7))
        if kind == "wider":
            self.blocks[6] = nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 8))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        early = x
        for number, block in enumerate(self.blocks):
            x = block(x)
            if self.kind == "between":
                x = x * 2
            if number == 1:
                early = x
        return x + early if self.kind == "skip" else x


def measured(kind: str) -> list[ModelProfile]:
    target = f"{__name__}.Deep"
    options = ModelOptions.from_mapping({"_target_": target, "kind": kind, "loss": "cross_entropy"})
    return both(options, VECTORS)


@pytest.mark.parametrize(
    ("kind", "runs"),
    [
        ("plain", [("blocks", 0, 7)]),
        ("wider", [("blocks", 0, 6)]),
        ("odd", []),
        ("between", [("blocks", 0, 7)]),  # found out when the graph is unfolded
        ("skip", [("blocks", 0, 7)]),
    ],
)
def test_blocks_that_are_not_alike_are_not_taken_for_it(
    kind: str, runs: list[tuple[str, int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    with torch.device("meta"):
        found = folds_of(Deep(kind))
    assert [(fold.path, fold.start, fold.count) for fold in found] == runs
    folded, whole = measured(kind)
    assert folded == whole
    assert whole.graph is not None
    products = sum(op.target == "aten.linear.default" for op in whole.graph)
    assert products == (9 if kind == "wider" else 8)


def test_a_fold_exports_as_much_of_a_deep_model_as_of_a_shallow_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Counted in operations that are traced."""
    from whale_train.models.profile import measure as profile

    traced: list[int] = []
    export = profile.export

    def counting(*arguments: Any) -> Any:
        graph, error = export(*arguments)
        traced.append(len(graph.graph.nodes))
        return graph, error

    monkeypatch.setattr(profile, "export", counting)
    for blocks in (6, 12):
        options = ModelOptions.from_mapping(
            {
                **{
                    "_target_": "whale_train.models.gpt.GPT",
                    "vocab_size": 31,
                    "sequence_length": 12,
                },
                **{"width": 16, "depth": blocks, "heads": 2},
            }
        )
        profile_model(options, "gpt", TOKENS, by_folding=True)
    assert traced[0] == traced[1]
