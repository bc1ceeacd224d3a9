"""Check that a model keeps the documents of a sample apart, where the data asks for it.

Many models of transformers derive a mask from position ids that restart with each document, if no
attention mask is given. In such a mask, a position attends to positions of the same document alone.
Other models (OPT, BERT) take position ids and let positions attend to other documents.
"""

from whale_train.config import Request
from whale_train.data.sources.text_files import TextFilesOptions
from whale_train.errors import Fault
from whale_train.strategies.graph.operation_graph import ModelProfile

KEY = "data.pack.documents"
POSITIONS = "position_ids"


def refuse_joined_documents(request: Request, profile: ModelProfile, faults: list[Fault]) -> None:
    """Add a fault where the data asks for isolated documents and the model does not isolate them.

    A model isolates documents if its graph computes a boolean for each pair of positions from the
    position ids.
    """
    data = request.data
    if not isinstance(data, TextFilesOptions) or data.packing.documents != "isolated":
        return
    if _makes_a_mask(profile, data.sequence_length):
        return
    name = request.model.class_name
    rule = f"needs a model that keeps documents apart by their position ids, and {name} "
    rule += "does not" if profile.graph is not None else "cannot be exported to see whether it does"
    remedy = "use joined, or data.pack.mode=none (a document a sample), or a model such as "
    remedy += "GPT2LMHeadModel or LlamaForCausalLM"
    faults.append(Fault(KEY, "isolated", rule, remedy))


def _makes_a_mask(profile: ModelProfile, length: int) -> bool:
    """Return whether a boolean tensor over pairs of `length` positions depends on the position ids.

    Only operations on integers and booleans are followed, since every float in the model depends on
    the embedding of the position ids.
    """
    graph = profile.graph
    if graph is None:
        return False
    reached: set[str] = set()
    for operation in graph:
        if operation.target == "input" and operation.name == POSITIONS:
            reached.add(operation.name)
        elif reached.intersection(operation.inputs) and not operation.dtype.startswith("float"):
            reached.add(operation.name)
            shape = operation.shape or ()
            pair = tuple(dim.fixed for dim in shape[-2:])
            if operation.dtype == "bool" and pair == (length, length):
                return True
    return False
