"""The module paths of torchrec.metrics: how well a model predicts clicks, over all ranks."""
