"""The module paths of torchrec.distributed, on Tessera's engine."""
