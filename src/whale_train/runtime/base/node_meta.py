"""The keys under which this package stores facts in the `meta` of a graph's nodes."""

# The block that a node belongs to, and the module, by their paths in the model.
BLOCK, MODULE = "block", "module"
