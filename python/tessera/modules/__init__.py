"""The module paths of torchrec.modules, on Tessera's engine."""
