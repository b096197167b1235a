"""The module paths of nemo_automodel.components.loss, on Tessera's engine."""
