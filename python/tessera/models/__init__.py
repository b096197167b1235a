"""The module paths of torchrec.models: whole models of clicks."""
