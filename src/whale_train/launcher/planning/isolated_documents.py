"""Check that a model keeps the documents of a sample apart, where the data asks for it.

Models of transformers that are given position ids which begin anew, and no attention mask, make a
mask of them in which a position looks at those of its own document alone. Others take position ids
and let documents see each other (OPT, BERT).
"""

from whale_train.config import Request
from whale_train.data.sources.text_files import TextFilesOptions
from whale_train.errors import Fault
from whale_train.strategies.graph.operation_graph import ModelProfile

KEY = "data.pack.documents"
POSITIONS = "position_ids"


def refuse_joined_documents(request: Request, profile: ModelProfile, faults: list[Fault]) -> None:
    """Add a fault where documents are to be isolated and the model does not do so.

    A model does where its graph makes a truth value for each pair of positions out of the position
    ids.
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
    """Return whether truth values over pairs of `length` positions depend on the position ids.

    Only operations on integers and truth values are followed: everything in a model depends on the
    position ids by way of their embedding.
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
