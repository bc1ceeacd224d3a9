"""Keys of what graphs' nodes have in their `meta` of ours."""

# The block that a node belongs to, and the module, by their paths in the model.
BLOCK, MODULE = "block", "module"
