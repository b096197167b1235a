"""The module paths of torch.distributed.algorithms, on Tessera's engine."""
