"""Train any PyTorch model on any mix of devices from one declarative config."""
