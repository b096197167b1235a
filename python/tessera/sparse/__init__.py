"""The module paths of torchrec.sparse, on Tessera's engine."""
