"""Which exported attentions are told that they are causal, which take keys that queries share
without repeating them, and what they compute then."""

from typing import Any

import pytest
import torch
from torch import fx, nn

from whale_train.models.build import build_model
from whale_train.models.export.export import EXPORT_BATCH, export, export_model
from whale_train.models.export.to_operation_graph import operation_graph
from whale_train.models.loss_module import LossModule
from whale_train.models.options import HUGGING_FACE, ModelOptions
from whale_train.runtime.kernels.grouped_attention import group_keys
from whale_train.strategies.graph.operation_graph import InputField
from whale_train.strategies.graph.rewrites import RewriteScope

TOKENS = 12
IDS, LABELS, MASK = (
    InputField(name, (TOKENS,), "int64", 67) for name in ("input_ids", "labels", "attention_mask")
)
TINY = {
    "vocab_size": 67, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 16,
}  # fmt: skip
GPT2 = {
    "vocab_size": 67, "n_positions": 16, "n_embd": 32, "n_layer": 2, "n_head": 4,
    "attn_pdrop": 0.0, "resid_pdrop": 0.0, "embd_pdrop": 0.0,
}  # fmt: skip
BERT = {k: v for k, v in TINY.items() if k != "num_key_value_heads"}


def options(architecture: str, config: dict[str, Any]) -> ModelOptions:
    return ModelOptions.from_mapping(
        {"_target_": HUGGING_FACE, "architecture": architecture, "config": config}
    )


def attentions(graph: fx.GraphModule) -> list[tuple[bool, bool]]:
    """For each attention, whether it has a mask, and whether it is causal."""
    return [
        (len(node.args) > 3 and node.args[3] is not None, len(node.args) > 5 and bool(node.args[5]))
        for node in graph.graph.nodes
        if "scaled_dot_product_attention" in str(node.target)
    ]


CAUSAL, MASKED = (False, True), (True, False)


@pytest.mark.parametrize(
    ("architecture", "config", "fields", "expected"),
    [
        ("LlamaForCausalLM", TINY, (IDS, LABELS), CAUSAL),
        pytest.param(*("Qwen3ForCausalLM", TINY, (IDS, LABELS), CAUSAL), marks=pytest.mark.full),
        ("GPT2LMHeadModel", GPT2, (IDS, LABELS), CAUSAL),
        ("MistralForCausalLM", {**TINY, "sliding_window": 64}, (IDS, LABELS), CAUSAL),
        ("MistralForCausalLM", {**TINY, "sliding_window": 5}, (IDS, LABELS), MASKED),
        ("LlamaForCausalLM", TINY, (IDS, LABELS, MASK), MASKED),
        pytest.param(
            *("BertForMaskedLM", BERT, (IDS, LABELS, MASK), MASKED), marks=pytest.mark.full
        ),
    ],
)
def test_only_a_mask_that_is_the_triangle_is_left_out(
    architecture: str,
    config: dict[str, Any],
    fields: tuple[InputField, ...],
    expected: tuple[bool, bool],
) -> None:
    graph, why = export_model(options(architecture, config), fields)
    assert graph is not None, why
    assert attentions(graph) == [expected] * 2
    if expected == CAUSAL:  # and what only the mask was made of
        assert not [n for n in graph.graph.nodes if str(n.target).startswith("aten.le.")]


def exported() -> tuple[LossModule, fx.GraphModule]:
    """A Llama whose queries share keys in pairs, and its graph."""
    torch.manual_seed(0)
    wanted = options("LlamaForCausalLM", TINY)
    module = LossModule(build_model(wanted), wanted).train()
    example = {
        k: torch.ones(EXPORT_BATCH, TOKENS, dtype=torch.int64) for k in ("input_ids", "labels")
    }
    graph, why = export(module, example)
    assert graph is not None, why
    return module, graph


def drawn(batch: int) -> dict[str, torch.Tensor]:
    ids = torch.randint(1, 67, (batch, TOKENS), generator=torch.Generator().manual_seed(1))
    return {"input_ids": ids, "labels": ids.clone()}


def grouped(graph: fx.GraphModule) -> int:
    """Group the keys of all attentions of the graph that repeat them; their number."""
    nodes = {node.name: node for node in graph.graph.nodes}
    scope = RewriteScope.whole(operation_graph(graph, {}, {}, {}))
    named = [x.operations for x in scope.grouped_keys()]
    group_keys(graph, [[nodes[name] for name in names] for names in named])
    graph.recompile()
    return len(named)


@pytest.mark.parametrize("batch", [1, 2, 5])
def test_it_computes_what_the_model_does(batch: int) -> None:
    module, graph = exported()
    inputs = drawn(batch)
    assert attentions(graph) == [CAUSAL] * 2
    torch.testing.assert_close(graph(**inputs), module(**inputs), rtol=1e-6, atol=1e-6)


def test_keys_are_grouped_where_they_were_repeated() -> None:
    module, graph = exported()
    assert grouped(graph) == 2
    for node in graph.graph.nodes:
        if "scaled_dot_product_attention" in str(node.target):
            assert node.kwargs["enable_gqa"] is True
            assert [x.meta["val"].shape[1] for x in node.args[:3]] == [4, 2, 2]
    inputs = drawn(3)
    loss, expected = graph(**inputs), module(**inputs)
    torch.testing.assert_close(loss, expected, rtol=1e-6, atol=1e-6)
    parameters = list(module.parameters())
    for one, other in zip(
        torch.autograd.grad(loss, list(graph.parameters())),
        torch.autograd.grad(expected, parameters),
        strict=True,
    ):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


def test_keys_are_grouped_where_they_are_summed_before_they_are_repeated() -> None:
    """A split's collective stands between the two where a key is put together late."""
    module, graph = exported()
    aten = torch.ops.aten
    nodes = {node.name: node for node in graph.graph.nodes}
    attentions = RewriteScope.whole(operation_graph(graph, {}, {}, {})).grouped_keys()
    repeated = [[nodes[name] for name in x.operations] for x in attentions]
    for node in list(graph.graph.nodes):
        if node.target is aten.expand.default and node.args[0].target is aten.unsqueeze.default:
            before = node.args[0]
            graph.add_module(f"sum_{node.name}", nn.Identity())
            with graph.graph.inserting_before(node):
                summed = graph.graph.call_module(f"sum_{node.name}", (before,))
            node.replace_input_with(before, summed)
    group_keys(graph, repeated)
    graph.recompile()
    assert len(repeated) == 2
    assert not {names[1] for names in repeated} & set(graph.graph.nodes)
    inputs = drawn(3)
    torch.testing.assert_close(graph(**inputs), module(**inputs), rtol=1e-6, atol=1e-6)


def test_keys_of_their_own_stay_as_they_are() -> None:
    graph, why = export_model(options("GPT2LMHeadModel", GPT2), (IDS, LABELS))
    assert graph is not None, why
    assert grouped(graph) == 0
