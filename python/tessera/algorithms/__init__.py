"""The module paths of nemo_rl.algorithms, on Tessera's engine."""
